"""Runs in the servers' interpreter: loads buckets into SGLang's own model classes and reports what they then hold.

    python server_class.py CASES.json FOLDER...         FOLDERs are put on the path; CASES.json is a list of cases

A case has the keys `folder`, `dtype`, `tp`, `attention`, `buckets`, `changes` and `out`.
`folder` has a config.json, `buckets` are files of (header, bytes) for megarl's loader, `changes` of patches for the
same parameters. Each rank of each case is a process forked from this one, and writes to `out` the digests of its
parameters after the buckets and after the patches.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch


def built(case: dict, rank: int):
    """The model as a server's process makes it before it reads weights."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.model_loader.loader import _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    tp = case["tp"]
    settings = {"device": "cpu", "sampling_backend": "pytorch", "attention_backend": case["attention"]}
    switches = {"disable_overlap_schedule": True, "skip_tokenizer_init": True, "disable_shared_experts_fusion": True}
    arguments = ServerArgs(case["folder"], dtype=case["dtype"], tp_size=tp, **settings, **switches)
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=rank))
    init_distributed_environment(
        world_size=tp, rank=rank, local_rank=rank, backend="gloo", distributed_init_method=f"file://{case['out']}.store"
    )
    initialize_model_parallel(backend="gloo")
    loading = LoadConfig()
    config = adjust_config_with_unaligned_cpu_tp(ModelConfig.from_server_args(arguments), loading, tp)
    with set_default_torch_dtype(config.dtype), torch.device("cpu"):
        return _initialize_model(config, loading)


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


def run(case: dict, rank: int) -> None:
    import megarl_loader

    model = built(case, rank)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    for header, flat in torch.load(case["buckets"]):
        megarl_loader.load(model, [(header, flat)])
    report = {"loaded": digests(model), "derived": derived(model), "patched": None}
    try:
        for header, flat in torch.load(case["changes"]):
            megarl_loader.patch(model, [(header, flat)])
        report |= {"patched": digests(model), "derived": report["derived"] + derived(model)}
    except megarl_loader.CannotPatch as error:
        report["refused"] = str(error)
    Path(f"{case['out']}.{rank}").write_text(json.dumps(report))


def main() -> None:
    failed = 0
    sys.path[:0] = sys.argv[2:]
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
