"""SGLang's own classes load the stream of weights: every parameter gets its numbers, whatever bucket they come in.

On a CPU SGLang builds models that it cannot run there, so weights of these models are checked here.
"""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.architectures import ARCHITECTURES
from megarl.config.model import ModelConfig
from megarl.data.image_set import image_sets
from megarl.models.hf import encoder_of, image_settings, load_hf_config, visual_tensors
from megarl.models.vlm.model import build_encoder, positions_of
from megarl.models.weight_table import Coordinate, WeightTable
from megarl.models.weights.metadata import write_draft_layers, write_metadata
from megarl.rollout.sglang.images import ServedImages, write_processor
from megarl.rollout.sglang.layout import ServerLayout
from megarl.sync.delta import make_delta, patch_header
from megarl.sync.plan import ITEMSIZE, SLAB_BYTES, Bucket, holdings, make_plan
from megarl.sync.verify import expected_checksums
from megarl.system.comm import WorkerGroup
from megarl.system.compat.sglang import LOADERS, STAND_INS
from tests.models.tiny import tiny_dict
from tests.models.vlm_tiny import Sample, batch_of, config_of, draw, encoder_input
from tests.rollout.forked import run_program
from tests.rollout.servers import need_interpreter
from tests.sync.layouts import HERE, ranks_of

pytestmark = pytest.mark.servers
PROGRAM = Path(__file__).with_name("server_class.py")
#: On a CPU the server pads the widths of experts and MLPs on a rank to multiples of 32.
WIDE = {"moe_intermediate_size": 64, "intermediate_size": 128}
CASES = {
    "deepseek_v3": {"n_shared_experts": 1, **WIDE},
    "deepseek_v3 with one projection of queries": {"n_shared_experts": 1, "q_lora_rank": None, **WIDE},
    "exaone4": {**WIDE, "head_dim": 16, "rope_theta": 1e6},
    "gemma2": {**WIDE, "tie_word_embeddings": True},
    "glm4_moe": {"first_k_dense_replace": 1, **WIDE},
    "glm4_moe_lite": {"q_lora_rank": 24, **WIDE},
    "gpt_oss": {"intermediate_size": 64},
    "gpt_oss of four key/value heads": {"intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4},
    "minimax_m2": {"intermediate_size": 64},
    "qwen2_moe": {**WIDE, "shared_expert_intermediate_size": 64},
    "qwen3_5_moe_text": {**WIDE, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": WIDE,
    "qwen3_next": {**WIDE, "shared_expert_intermediate_size": 64},
}
#: Changes with which a model divides among eight ranks; a config gets those whose keys it has.
FOR_EIGHT = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"), 8),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 256),
    "vocab_size": 515,  # so that each rank has a row, and the last one padding
}
#: Vision-language models; of these SGLang also reads images.
SEEING = {"qwen3_5": WIDE, "qwen3_5_moe": {**WIDE, "shared_expert_intermediate_size": 64}}
#: Models whose servers describe their parameters; of other models loading may make something else than boxes.
DESCRIBED = ("deepseek_v3", "gpt_oss")
SHARED = ("model.embed_tokens", "lm_head")  # a server's draft model has these in common with its model
GROUPED = [name for name in CASES if ARCHITECTURES[name.split()[0]].served.attention_dp]
MIXED = [*(name for name in CASES if ARCHITECTURES[name.split()[0]].experts is not None), "qwen3_5_moe"]
#: Name, ranks, ranks among which experts are shared, groups of ranks with attention of their own.
SOON = [("deepseek_v3", 2), ("gpt_oss", 2, 2), ("qwen3_5", 1), ("qwen3_5_moe_text", 2, 1, 2)]
LATER = [
    ("gpt_oss of four key/value heads", 4, 2),
    *((name, tp) for name in (*CASES, *SEEING) for tp in (1, 2) if (name, tp) not in SOON),
    *((name, 2, 1, 2) for name in GROUPED if name != "qwen3_5_moe_text"),
    ("gpt_oss of four key/value heads", 4, 2, 2),
]
#: Of each model servers of four and eight ranks. Many models have two key/value heads then, each on several ranks.
WIDER = {
    name: [
        *([(name, 4, 2), (name, 8, 8)] if name in MIXED else [(name, 4)]),
        (name, 8),
        *((name, 8, 4, groups) for groups in (2, 8) if name in GROUPED),
    ]
    for name in (*CASES, *SEEING)
}


def for_eight(raw: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a tiny model, changed so that the model divides among eight ranks."""
    if "text_config" in raw:
        encoder = {**raw["vision_config"], "num_heads": 8, "intermediate_size": 256}
        decoder = {**for_eight(raw["text_config"]), "linear_num_value_heads": 16}  # two for each head of keys
        return {**raw, "text_config": decoder, "vision_config": encoder}
    changes: dict[str, Any] = {key: value for key, value in FOR_EIGHT.items() if key in raw}
    if raw["num_key_value_heads"] == raw["num_attention_heads"]:  # latent attention: every head has its own keys
        changes["num_key_value_heads"] = changes["num_attention_heads"]
    if raw.get("model_type") == "exaone4":  # SGLang's class does not read the width of heads
        changes["head_dim"] = raw["hidden_size"] // changes["num_attention_heads"]
    return {**raw, **changes}


def server_name(name: str) -> str:
    """The name in the server's draft model of a tensor of the head."""
    outside, inside = ("eh_proj", "enorm", "hnorm", "shared_head"), ("fc.", "pre_fc")
    if not name.startswith("mtp."):
        rest = re.sub(r"model\.layers\.\d+\.", "", name, count=1)
        return f"model.{rest}" if rest.startswith(outside) else f"model.decoder.{rest}"
    rest = name.removeprefix("mtp.")
    return rest if rest.startswith(inside) else f"model.{rest}"


def weights(table: WeightTable, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    wide = table.float32()
    drawn = {name: torch.randn(shape, generator=g) for name, shape in table.shapes().items()}
    return {name: tensor if name in wide else tensor.to(dtype) for name, tensor in drawn.items()}


def filled(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of a bucket."""
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    for entry in bucket.entries:
        flat[entry.offset : entry.offset + entry.nbytes] = tensors[entry.source].contiguous().view(-1).view(torch.uint8)
    return flat


def write_buckets(folder: Path, buckets: tuple[Bucket, ...], old: dict, new: dict) -> None:
    """Files with what a server gets: all buckets of `old`, and what changes to `new`."""
    whole, changes = [], []
    for number, bucket in enumerate(buckets, 1):
        entries = [[e.name, e.shape, e.dtype, e.offset, e.nbytes] for e in bucket.entries]
        header = {"tensors": entries, "update": "1", "sender": "a", "last": number == len(buckets)}
        before, now = filled(bucket, old), filled(bucket, new)
        whole.append((json.dumps(header), before))
        parts = [[flat[e.offset : e.offset + e.nbytes].clone() for e in bucket.entries] for flat in (before, now)]
        delta = make_delta(*parts, [ITEMSIZE[e.dtype] for e in bucket.entries], 10**9)
        assert delta is not None
        changes.append((json.dumps(patch_header(bucket.entries, delta)), torch.cat([delta.distances, delta.values])))
    torch.save(whole, folder / "buckets")
    torch.save(changes, folder / "changes")


def write_requests(file: Path, hf) -> list[Sample]:
    """A file of requests with one image, two, one that is narrow; the samples that they are made of."""
    encoder, rng = encoder_of(hf), random.Random(1)
    samples = [draw(rng, encoder, *shapes) for shapes in ([(2, 3)], [(1, 1), (4, 2)], [(1, 5)])]
    sets = image_sets(batch_of(samples, image_settings(hf)))
    torch.save([ServedImages(images).request(one.prompt) for one, images in zip(samples, sets, strict=True)], file)
    return samples


def check_seen(file: Path, samples: list[Sample], hf, tensors: dict[str, torch.Tensor]) -> None:
    """SGLang has read the samples' tokens, at the trainer's positions, and its encoder's features and its RoPE are
    transformers'."""
    from transformers import AutoConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding, apply_rotary_pos_emb

    rope = Qwen3_5TextRotaryEmbedding(AutoConfig.for_model(**hf.vision_language).text_config)
    tower = build_encoder(hf, torch.float32)
    names = {parameter.removeprefix("visual."): name for parameter, (name, _) in visual_tensors(hf).items()}
    tower.load_state_dict({parameter: tensors[name] for parameter, name in names.items()})
    for sample, found in zip(samples, torch.load(file), strict=True):
        places = [(start, *images.places[0][1:]) for start, images in zip(sample.starts, sample.images, strict=True)]
        assert found["ids"] == sample.prompt
        assert found["positions"].tolist() == positions_of(len(sample.prompt), places).tolist()
        with torch.no_grad():
            expected = tower(*encoder_input(sample, image_settings(hf))).pooler_output
        # float32 with other kernels; the weights are so large that the features are about 300
        torch.testing.assert_close(found["features"], expected, rtol=1e-3, atol=1e-2)
        ones = torch.ones(1, 1, *found["rotated"].shape)
        rotated, _ = apply_rotary_pos_emb(ones, ones, *rope(ones, found["positions"][:, None]))
        torch.testing.assert_close(found["rotated"], rotated[0, 0])


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case of PROGRAM with its files, and what its ranks should report."""

    name: str
    hf: Any
    case: dict[str, Any]
    expected: list[list[dict[str, str]]]  # checksums of each rank after the buckets, and after the changes
    old: dict[str, torch.Tensor]
    samples: list[Sample]
    of_draft: list[list[dict[str, str]]]  # the same of the draft model; empty: there is none


def prepared(folder: Path, name: str, tp: int, ep: int = 1, groups: int = 1, *, eight: bool = False) -> Prepared:
    """Write the files of a case to `folder`; `eight`: of a model that divides among eight ranks."""
    folder.mkdir()
    dtype, samples, more = torch.bfloat16, [], {}
    seeing = name in SEEING
    raw = config_of(name, **SEEING[name]) if seeing else tiny_dict(name.split()[0], **CASES[name])
    hf = load_hf_config(ModelConfig(hf_config=for_eight(raw) if eight else raw, vision=seeing))
    if seeing:
        dtype = torch.float32
    drafts = name not in SEEING and ARCHITECTURES[hf.model_type].draft is not None
    table, layout = WeightTable.of(hf, draft=drafts), ServerLayout.of(hf, tp, ep, attention_dp=groups)
    write_metadata(folder, hf, None, dtype)
    if drafts:  # its files have the config with a draft head; the servers' own config has none
        (folder / "draft").mkdir()
        write_metadata(folder / "draft", hf, None, dtype)
        write_draft_layers(folder / "draft", hf, 1)
        more = {"draft": str(folder / "draft")}
    if name in SEEING:
        write_processor(folder, hf)
        samples, more = write_requests(folder / "requests", hf), {"requests": str(folder / "requests")}
    at = [Coordinate()]
    spelled = str(dtype).removeprefix("torch.")
    sizes = {"bucket_bytes": SLAB_BYTES + 12_000, "dtype": spelled}  # a few tensors in each bucket
    plan = make_plan(holdings(table, at), ranks_of(at), [HERE], together=layout.together, **sizes)
    old, new = (weights(table, seed, dtype) for seed in (1, 2))
    new = {key: torch.where(torch.rand(new[key].shape) < 0.1, new[key], old[key]) for key in old}
    write_buckets(folder, plan.routes[0].senders[0], old, new)
    # SGLang checks that the kernels have sinks or windows, though nothing is computed here
    attention = {"gpt_oss": "intel_amx", "exaone4": "triton"}.get(name.split()[0], "torch_native")
    files = {key: str(folder / key) for key in ("buckets", "changes", "out")}
    sizes = {"tp": tp, "ep": ep, "attention_dp": groups}
    case = {"folder": str(folder), "dtype": spelled, **sizes, "attention": attention, **files, **more}
    model, alone = table.without_draft().shapes(), WorkerGroup.alone()
    of_model = [[(key, tensor) for key, tensor in tensors.items() if key in model] for tensors in (old, new)]
    expected = [expected_checksums(tensors, [layout], dtype, alone, table.float32())[layout] for tensors in of_model]
    wide = set(map(server_name, table.float32()))
    heads = [[(server_name(key), each[key]) for key in each if key not in model] for each in (old, new) if drafts]
    of_draft = [expected_checksums(tensors, [layout], dtype, alone, wide)[layout] for tensors in heads]
    return Prepared(name, hf, case, expected, old, samples, of_draft)


@pytest.mark.parametrize(
    ("cases", "eight"),
    [
        pytest.param(SOON, False, id="soon"),
        pytest.param(LATER, False, id="later", marks=pytest.mark.campaign("servers")),
        *(pytest.param(WIDER[name], True, id=f"wider {name}", marks=pytest.mark.campaign("servers")) for name in WIDER),
    ],
)
def test_every_parameter_of_the_class_gets_its_numbers(tmp_path, cases, eight):
    need_interpreter()
    made = [prepared(tmp_path / str(number), *case, eight=eight) for number, case in enumerate(cases)]
    (tmp_path / "cases").write_text(json.dumps([each.case for each in made]))
    log = tmp_path / "log"
    paths = [str(tmp_path / "cases"), *map(str, (LOADERS.parent, LOADERS, *STAND_INS))]
    assert run_program(PROGRAM, paths, log) == 0, log.read_text().partition("Traceback")[2][:3000]
    for each in made:
        for rank in range(each.case["tp"]):
            out = Path(f"{each.case['out']}.{rank}")
            report = json.loads(out.read_text())
            where = (each.name, *(each.case[key] for key in ("tp", "ep", "attention_dp")), rank)
            if each.samples:
                check_seen(out.with_name(f"{out.name}.seen"), each.samples, each.hf, each.old)
            assert report["loaded"] == each.expected[0][rank], where
            assert report["derived"] == [], where
            assert len(report["drafts"]) == bool(each.of_draft), where
            # Only loading makes the padding of vocabularies zero again, and gpt_oss overwrites a bias.
            rest = [name for name in report["slow"] if not re.search(r"embed_tokens|lm_head|bias", name)]
            assert rest == [], where
            if each.name in DESCRIBED or "refused" not in report["boxes"]:
                assert report["boxes"] == report["loaded"], where
            for draft in report["drafts"]:
                assert draft["derived"] == [], where
                for when, expected in zip(["loaded", "patched"], each.of_draft, strict=True):
                    held = {name: digest for name, digest in draft[when].items() if not name.startswith(SHARED)}
                    assert held == expected[rank], (*where, when)
            assert report["patched"] == each.expected[1][rank], where
