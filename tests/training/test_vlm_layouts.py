"""Vision-language models under every layout against one process: log-probs, gradient norm, all parameters after steps.

Tolerances as in test_layouts.py.
"""

import dataclasses
import random
from typing import Any

import pytest
import torch

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Jagged
from tests.dist import fresh_layout, run_distributed
from tests.models.vlm_tiny import KINDS, batch_of, config_of, draw
from tests.training import cases

pytestmark = pytest.mark.procs

OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0.5, schedule="cosine", warmup_steps=1)
#: Rows and columns of the images of each sample; samples of one rank have none in some layouts.
SHAPES = [((2, 3),), ((1, 1), (3, 2)), ((2, 2),), (), ()]
LAYOUTS = [
    ({"tp": 2}, {}),
    ({"tp": 2, "sp": True}, {"recompute": "full"}),
    ({"pp": 2}, {"recompute": "full"}),
    ({}, {"overlap_grad_reduce": True, "micro_batch_tokens": 60}),
    ({}, {"micro_batch_tokens": 1, "distributed_optimizer": False}),
]
MIXTURE = [({"tp": 2, "ep": 2}, {}), ({"ep": 2}, {"recompute": "full"})]
#: With parts that do not learn; of the first one a stage has nothing that does.
FROZEN = [({"pp": 2}, {"recompute": "full"}, ["language_model"]), ({"tp": 2, "sp": True}, {}, ["tower"])]


def layouts_of(kind: str) -> list[tuple[dict, dict]]:
    return MIXTURE if kind == "qwen3_vl_moe" else LAYOUTS


def batch_for(hf):
    """Samples with weights of their tokens."""
    from megarl.models.hf import encoder_of, image_settings

    rng = random.Random(4)
    samples = [draw(rng, encoder_of(hf), *shapes) for shapes in SHAPES]
    samples.insert(1, dataclasses.replace(samples[0], response=[7, 8, 9, 10]))  # of its group
    batch = batch_of(samples, image_settings(hf))
    total = sum(len(sample.response) for sample in samples)
    weights = [
        torch.randn(len(one.response), generator=torch.Generator().manual_seed(i)) for i, one in enumerate(samples)
    ]
    batch.set("loss_weights", Jagged.from_list([own / total for own in weights]))
    batch.set("sample_id", [f"s{i}" for i in range(len(samples))])
    return batch


def engine_of(kind: str, parallel: ParallelConfig, engine: EngineConfig, optim: OptimConfig = OPTIM, **settings: Any):
    """An engine with a random model; `dtype`, `seed` and `freeze` can be given."""
    from megarl.models.hf import encoder_of, load_hf_config
    from megarl.training.engine import MegatronEngine
    from megarl.training.vlm_sequences import ImageLayout

    hf, seed = load_hf_config(ModelConfig(hf_config=config_of(kind))), settings.pop("seed", 3)
    return MegatronEngine(
        hf,
        parallel,
        engine,
        optim,
        dtype=settings.pop("dtype", torch.float32),
        layout=fresh_layout(parallel),
        total_steps=10,
        weights=lambda chunks: cases._random(chunks, hf, seed),
        sequences=ImageLayout(encoder_of(hf)),
        **settings,
    )


def _run(kind: str, parallel: ParallelConfig, engine: EngineConfig, **settings: Any) -> dict:
    """Log-probs before, gradient norms, and all parameters after two steps."""
    from megarl.models.weights import iter_hf_tensors

    made = engine_of(kind, parallel, engine, **settings)
    layout, whole = made.layout, batch_for(made.hf_config)
    few = 2 if layout.dp_size > 1 else 0  # the last rank's samples have no image
    batch = whole if not few else whole.split([len(whole) - few, few])[layout.dp_rank]
    logp = made.logprobs(batch, 0.8)[0]
    norms = [cases.train(made, batch, 0.8).result()["actor/grad_norm"] for _ in range(2)]
    tensors = {name: tensor for name, tensor in iter_hf_tensors(made.chunks, layout.world) if tensor is not None}
    return {"logp": logp.values.clone(), "norms": torch.tensor(norms), "dp_rank": layout.dp_rank, "tensors": tensors}


def _case(kind: str) -> list[str]:
    wrong = []
    import torch.distributed as dist

    layouts = layouts_of(kind)
    runs = [_run(kind, ParallelConfig(**parallel), EngineConfig(**engine)) for parallel, engine in layouts]
    if dist.get_rank() != 0:
        return []
    first = runs[0]
    for (parallel, engine), run in zip(layouts[1:], runs[1:], strict=True):
        same = first["logp"][: len(run["logp"])]
        for name, ours, theirs in [
            ("logp", run["logp"], same),
            ("norms", run["norms"], first["norms"]),
            *((name, run["tensors"][name], tensor) for name, tensor in first["tensors"].items()),
        ]:
            if not torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4):
                wrong.append(f"{parallel} {engine} {name}: {(ours - theirs).abs().max():.2g}")
    return wrong


def _frozen(kind: str, alone: list[dict]) -> list[str]:
    """Compare runs with frozen parts with those of one process."""
    import torch.distributed as dist

    wrong = []
    for (parallel, engine, freeze), want in zip(FROZEN, alone, strict=True):
        run = _run(kind, ParallelConfig(**parallel), EngineConfig(**engine), freeze=freeze)
        pairs = [("norms", run["norms"], want["norms"])]
        pairs += [(name, run["tensors"][name], tensor) for name, tensor in want["tensors"].items() if run["tensors"]]
        wrong += [
            f"{parallel} {freeze} {name}: {(ours - theirs).abs().max():.2g}"
            for name, ours, theirs in pairs
            if not torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
        ]
    return wrong if dist.get_rank() == 0 else []


def _alone(kind: str) -> dict:
    return _run(kind, ParallelConfig(), EngineConfig(micro_batch_tokens=10_000))


def _both(kind: str, alone: dict) -> list[str]:
    """Compare the first layout with one process; the others are compared with it."""
    import torch.distributed as dist

    (parallel, engine), *_ = layouts_of(kind)
    run = _run(kind, ParallelConfig(**parallel), EngineConfig(**engine))
    wrong = _case(kind)
    if dist.get_rank() == 0:
        pairs = [("logp", run["logp"], alone["logp"]), ("norms", run["norms"], alone["norms"])]
        pairs += [(name, run["tensors"][name], tensor) for name, tensor in alone["tensors"].items()]
        wrong += [
            f"{parallel} and one process, {name}: {(ours - theirs).abs().max():.2g}"
            for name, ours, theirs in pairs
            if not torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
        ]
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_equals_one_process(kind):
    from tests.dist import single_process

    single_process()
    assert run_distributed(_both, 2, 240.0, kind, _alone(kind)) == [[], []]


def test_frozen_parts_in_layouts_equal_one_process():
    from tests.dist import single_process

    single_process()
    whole = EngineConfig(micro_batch_tokens=10_000)
    alone = [_run("qwen3_vl", ParallelConfig(), whole, freeze=freeze) for *_, freeze in FROZEN]
    assert run_distributed(_frozen, 2, 240.0, "qwen3_vl", alone) == [[], []]
