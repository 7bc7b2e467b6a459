"""Vision-language models under every layout against one process: log-probs, gradient norm, all parameters after steps.

Tolerances as in test_layouts.py.
"""

import random

import pytest
import torch

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Jagged
from tests.dist import fresh_layout, run_distributed
from tests.models.vlm_tiny import KINDS, batch_of, config_of, draw
from tests.training import cases

OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0.5, schedule="cosine", warmup_steps=1)
#: Rows and columns of the images of each sample; samples of one rank have none in some layouts.
SHAPES = [((2, 3),), ((1, 1), (3, 2)), ((2, 2),), (), ()]
LAYOUTS = [
    ({"tp": 2}, {}),
    ({"tp": 2, "sp": True}, {"recompute": "full"}),
    ({"pp": 2}, {"recompute": "full"}),
    ({}, {"overlap_grad_reduce": True}),
    ({}, {"micro_batch_tokens": 1, "distributed_optimizer": False}),
]


def _batch(hf):
    from megarl.models.hf import encoder_of, image_settings

    rng = random.Random(4)
    samples = [draw(rng, encoder_of(hf), *shapes) for shapes in SHAPES]
    batch = batch_of(samples, image_settings(hf))
    total = sum(len(sample.response) for sample in samples)
    weights = [
        torch.randn(len(one.response), generator=torch.Generator().manual_seed(i)) for i, one in enumerate(samples)
    ]
    batch.set("loss_weights", Jagged.from_list([own / total for own in weights]))
    batch.set("sample_id", [f"s{i}" for i in range(len(samples))])
    return batch


def _run(kind: str, parallel: ParallelConfig, engine: EngineConfig) -> dict:
    """Log-probs before, gradient norms, and all parameters after two steps."""
    from megarl.models.hf import encoder_of, load_hf_config
    from megarl.models.weights import iter_hf_tensors
    from megarl.training.engine import MegatronEngine
    from megarl.training.vlm_sequences import ImageLayout

    layout = fresh_layout(parallel)
    hf = load_hf_config(ModelConfig(hf_config=config_of(kind)))
    made = MegatronEngine(
        hf,
        parallel,
        engine,
        OPTIM,
        dtype=torch.float32,
        layout=layout,
        total_steps=10,
        weights=lambda chunks: cases._random(chunks, hf, 3),
        sequences=ImageLayout(encoder_of(hf)),
    )
    whole = _batch(hf)
    few = 2 if layout.dp_size > 1 else 0  # the last rank's samples have no image
    batch = whole if not few else whole.split([len(whole) - few, few])[layout.dp_rank]
    logp = made.logprobs(batch, 0.8)[0]
    norms = [cases.train(made, batch, 0.8).result()["actor/grad_norm"] for _ in range(2)]
    tensors = {name: tensor for name, tensor in iter_hf_tensors(made.chunks, layout.world) if tensor is not None}
    return {"logp": logp.values.clone(), "norms": torch.tensor(norms), "dp_rank": layout.dp_rank, "tensors": tensors}


def _case(kind: str) -> list[str]:
    wrong = []
    import torch.distributed as dist

    runs = [_run(kind, ParallelConfig(**parallel), EngineConfig(**engine)) for parallel, engine in LAYOUTS]
    if dist.get_rank() != 0:
        return []
    first = runs[0]
    for (parallel, engine), run in zip(LAYOUTS[1:], runs[1:], strict=True):
        same = first["logp"][: len(run["logp"])]
        for name, ours, theirs in [
            ("logp", run["logp"], same),
            ("norms", run["norms"], first["norms"]),
            *((name, run["tensors"][name], tensor) for name, tensor in first["tensors"].items()),
        ]:
            if not torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4):
                wrong.append(f"{parallel} {engine} {name}: {(ours - theirs).abs().max():.2g}")
    return wrong


def _alone(kind: str) -> dict:
    return _run(kind, ParallelConfig(), EngineConfig(micro_batch_tokens=10_000))


def _both(kind: str, alone: dict) -> list[str]:
    """Compare the first layout with one process; the others are compared with it."""
    import torch.distributed as dist

    run = _run(kind, ParallelConfig(**LAYOUTS[0][0]), EngineConfig(**LAYOUTS[0][1]))
    wrong = _case(kind)
    if dist.get_rank() == 0:
        pairs = [("logp", run["logp"], alone["logp"]), ("norms", run["norms"], alone["norms"])]
        pairs += [(name, run["tensors"][name], tensor) for name, tensor in alone["tensors"].items()]
        wrong += [
            f"tp 2 and one process, {name}: {(ours - theirs).abs().max():.2g}"
            for name, ours, theirs in pairs
            if not torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
        ]
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_equals_one_process(kind):
    from tests.dist import single_process

    single_process()
    assert run_distributed(_both, 2, 240.0, kind, _alone(kind)) == [[], []]
