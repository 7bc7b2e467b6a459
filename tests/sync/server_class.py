"""Runs in the servers' interpreter: loads buckets into SGLang's own model classes and reports what they then hold.

    python server_class.py CASES.json FOLDER...         FOLDERs are put on the path; CASES.json is a list of cases

A case has the keys `folder`, `dtype`, `tp`, `ep`, `attention`, `buckets`, `changes`, `out`, and maybe `requests` and
`attention_dp` (groups of ranks with attention of their own).
`folder` has a config.json, `buckets` are files of (header, bytes) for megarl's loader, `changes` of patches for the
same parameters. Each rank of each case is a process forked from this one, and writes to `out` the digests of its
parameters after the buckets and after the patches. `requests` is a file with a list of requests with images; what
SGLang's processor makes of them, and the features of its encoder, are written to a file beside `out`.
`draft` is a folder with the config.json of a draft model, which gets the same buckets and patches.
Of a case without `buckets` each rank writes what the class has from the config.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import sys
import traceback
import types
from pathlib import Path

import torch

ROTATED = 48  # positions whose rotation is compared


def built(case: dict, rank: int):
    """The models (the draft model, if there is one, after the model) as a server's process makes them before it reads
    weights, the model's config, and the server's arguments."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    tp, ep, groups = case["tp"], case["ep"], case.get("attention_dp", 1)
    settings = {"device": "cpu", "sampling_backend": "pytorch", "attention_backend": case["attention"]}
    switches = {"disable_overlap_schedule": True, "skip_tokenizer_init": True, "disable_shared_experts_fusion": True}
    if case.get("requests"):
        switches["skip_tokenizer_init"] = False
    sizes = {"tp_size": tp, "ep_size": ep, "attn_dp_size": groups}
    arguments = ServerArgs(case["folder"], dtype=case["dtype"], **sizes, **settings, **switches)
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=rank))
    init_distributed_environment(
        world_size=tp, rank=rank, local_rank=rank, backend="gloo", distributed_init_method=f"file://{case['out']}.store"
    )
    initialize_model_parallel(backend="gloo")
    if groups > 1:
        initialize_dp_attention(arguments)
    loading = LoadConfig()
    models, configs = [], []
    for folder in [case["folder"], *([case["draft"]] if case.get("draft") else [])]:
        config = ModelConfig.from_server_args(arguments, model_path=folder, is_draft_model=bool(models))
        heads = [
            (part, name, getattr(part, name))
            for part in (config, config.hf_config, config.hf_text_config)
            for name in ("num_attention_heads", "num_key_value_heads")
            if hasattr(part, name)
        ]
        config = adjust_config_with_unaligned_cpu_tp(config, loading, tp)
        for part, name, number in heads:  # on a CPU SGLang adds heads that no GPU has, rather than share them
            setattr(part, name, number)
        with set_default_torch_dtype(config.dtype), torch.device("cpu"):
            models.append(_initialize_model(config, loading, _get_quantization_config(config, loading)))
        configs.append(config.hf_config)
    return models, configs[0], arguments


def digests(model) -> dict[str, str]:
    """Parameters as SGLang's checksum sees them; those that a bucket should have written and did not are `missing`."""
    found = {}
    for name, parameter in model.named_parameters():
        data = parameter.detach().contiguous().flatten()
        whole = not data.isnan().any()
        found[name] = hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if whole else "missing"
    return found


def derived(model) -> list[str]:
    """Names of weights that the model computes from its parameters, and that do not belong to them."""
    wrong = []
    for name, module in model.named_modules():
        if getattr(module, "w_kc", None) is not None:
            parts = module.kv_b_proj.weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
            keys, values = parts.split([module.qk_nope_head_dim, module.v_head_dim], 1)
            wrong += [] if torch.equal(module.w_kc, keys) else [f"{name}.w_kc"]
            wrong += [] if torch.equal(module.w_vc, values.transpose(1, 2)) else [f"{name}.w_vc"]
        if hasattr(module, "gemma_weight"):
            wrong += [] if torch.equal(module.gemma_weight, module.weight + 1) else [f"{name}.gemma_weight"]
    return wrong


def seen(model, config, arguments, requests: list[dict]) -> list[dict]:
    """For each request the tokens, the positions and the features that SGLang makes of it, and heads [tokens, width]
    full of ones after RoPE."""
    from sglang.srt.managers.multimodal_processor import get_mm_processor, import_processors
    from sglang.srt.managers.tokenizer_manager import get_processor_wrapper

    import_processors("sglang.srt.multimodal.processors")
    processor = get_mm_processor(config, arguments, get_processor_wrapper(), "default")
    attention = next(module for module in model.modules() if hasattr(module, "rotary_emb"))
    found = []
    for request in requests:
        other = types.SimpleNamespace(video_data=None, audio_data=None, mm_content_hashes=None, rid="1")
        made = asyncio.run(processor.process_mm_data_async(request["image_data"], request["input_ids"], other))
        with torch.no_grad():
            features = model.get_image_feature(made.mm_items)
            ones = [torch.ones(len(made.input_ids), attention.head_dim) for _ in range(2)]
            rotated, _ = attention.rotary_emb.forward_native(made.mrope_positions, *ones)
        told = {"ids": made.input_ids, "positions": made.mrope_positions}
        found.append({**told, "features": features, "rotated": rotated})
    return found


def readings(model) -> list[dict]:
    """What each layer's softmax attention has from the config, and heads full of ones [tokens, width] after RoPE."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found = []
    for block in model.modules():
        for part in (part for part in block.children() if isinstance(part, RadixAttention)):
            ones, rope = torch.ones(ROTATED, 1, part.head_dim), getattr(block, "rotary_emb", None)
            if rope is not None:
                if hasattr(rope, "_ensure_cos_sin_cache_length"):  # as a server does once the model is loaded
                    rope._ensure_cos_sin_cache_length(ROTATED - 1)
                ones = rope.forward_native(torch.arange(ROTATED), ones.clone(), ones.clone())[0]
            window = part.sliding_window_size
            sizes = {"factor": part.scaling, "cap": part.logit_cap or None, "width": part.head_dim}
            sizes["window"] = None if window is None or window < 0 else window + 1
            found.append({**sizes, "rotated": ones.view(ROTATED, -1)})
    return found


def loaded_again(model, buckets: list) -> list[str]:
    """Load the buckets into the model a second time, after all its numbers were overwritten; return the names of the
    tensors for which the loader still calls the model's own loading code."""
    import megarl_loader

    for tensor in (*model.parameters(), *(m.w_kc for m in model.modules() if getattr(m, "w_kc", None) is not None)):
        if tensor.is_floating_point():
            tensor.data.fill_(float("nan"))
    slow, load = [], model.load_weights
    model.load_weights = lambda weights: (slow.extend(name for name, _ in weights), load(weights))
    for header, flat in buckets:
        megarl_loader.load(model, [(header, flat)])
    del model.load_weights
    return slow


def filled_by_boxes(model, buckets: list) -> dict[str, str]:
    """Digests of parameters that were overwritten, and then filled as the rank's own description of them says; or why
    the rank cannot describe them, under the name `refused`."""
    import megarl_shards
    import numpy as np
    from megarl_weight_map import derive

    tensors = {
        name: flat[start : start + nbytes].view(getattr(torch, dtype)).view(shape)
        for text, flat in buckets
        for name, shape, dtype, start, nbytes in json.loads(text)["tensors"]
    }
    sizes = [",".join(map(str, tensor.shape)) for tensor in tensors.values()]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
    table = {
        "tensors.names": np.array([*tensors]),
        "tensors.dtypes": np.array(dtypes),
        "tensors.sizes": np.array(sizes),
    }
    try:
        described, arrays = megarl_shards.storage_of(model, table)
    except megarl_shards.CannotDescribe as error:
        return {"refused": str(error)}
    for parameter in described.parameters:
        parameter.fill_(float("nan"))
    for padding in described.zeros:
        padding.zero_()
    whole = [tensor.reshape(megarl_shards._padded(tensor.shape)) for tensor in tensors.values()]
    keys = ("tensor", "lo", "hi", "parameter", "offset", "strides")
    for tensor, lo, hi, parameter, offset, strides in zip(*(arrays[f"boxes.{key}"] for key in keys), strict=True):
        if tensor >= 0:
            part = whole[tensor][tuple(slice(*span) for span in zip(lo, hi, strict=True))]
            described.parameters[parameter].as_strided(part.shape, strides.tolist(), int(offset)).copy_(part)
    derive(model)
    return digests(model)


def run(case: dict, rank: int) -> None:
    import megarl_loader

    (model, *drafts), *settings = built(case, rank)
    if "buckets" not in case:
        torch.save(readings(model), f"{case['out']}.{rank}")
        return
    for parameter in (parameter for each in (model, *drafts) for parameter in each.parameters()):
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    for header, flat in torch.load(case["buckets"]):
        for each in (model, *drafts):
            megarl_loader.load(each, [(header, flat)])
    slow = [loaded_again(each, torch.load(case["buckets"])) for each in (model, *drafts)]
    if case.get("requests"):
        torch.save(seen(model, *settings, torch.load(case["requests"])), f"{case['out']}.{rank}.seen")
    report = {"loaded": digests(model), "derived": derived(model), "patched": None, "slow": slow[0]}
    report["boxes"] = filled_by_boxes(model, torch.load(case["buckets"]))
    report["derived"] += derived(model)
    report["drafts"] = [{"loaded": digests(draft), "derived": derived(draft)} for draft in drafts]
    for header, flat in torch.load(case["changes"]):
        for each in (model, *drafts):
            megarl_loader.patch(each, [(header, flat)])
    report |= {"patched": digests(model), "derived": report["derived"] + derived(model)}
    for draft, of_draft in zip(drafts, report["drafts"], strict=True):
        of_draft |= {"patched": digests(draft), "derived": of_draft["derived"] + derived(draft)}
    Path(f"{case['out']}.{rank}").write_text(json.dumps(report))


def patch_classes() -> None:
    """Change SGLang as megarl's servers do."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    importlib.import_module("serve")
    HookRegistry.apply_hooks()


def main() -> None:
    failed = 0
    sys.path[:0] = sys.argv[2:]
    patch_classes()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        children = []
        for rank in range(case["tp"]):
            child = os.fork()
            if not child:
                try:
                    run(case, rank)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
            children.append(child)
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    sys.exit(failed)


if __name__ == "__main__":
    main()
