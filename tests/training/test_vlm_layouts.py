"""Vision-language models under every layout against one process: log-probs, gradient norm, all parameters after steps.

Tolerances as in test_layouts.py.
"""

import dataclasses
import random
from typing import Any

import pytest
import torch

from megarl.architectures.vision_language import FAMILIES
from megarl.config.model import LoraConfig, ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Jagged
from tests.dist import fresh_layout, run_distributed
from tests.models.vlm_tiny import batch_of, config_of, draw, shallow_config
from tests.training import cases

pytestmark = pytest.mark.procs

OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0.5, schedule="cosine", warmup_steps=1)
#: Rows and columns of the images of each sample, and 2 frames; samples of one rank have none in some layouts.
SHAPES: list[tuple[tuple[int, ...], ...]] = [((2, 3),), ((1, 1), (3, 2, 2)), ((2, 2),), (), ()]
TENSOR = [({"tp": 2, "sp": True}, {"recompute": "full"})]
PIPELINE = [({"pp": 2}, {"recompute": "full"})]
DATA = [
    ({}, {"overlap_grad_reduce": True, "micro_batch_tokens": 60}),
    ({}, {"micro_batch_tokens": 1, "distributed_optimizer": False}),
]
CONTEXT = [({"cp": 2}, {"micro_batch_tokens": 1})]  # in some micro-batches one rank has no feature
MIXTURE = [({"tp": 2, "ep": 2}, {}), ({"ep": 2}, {"recompute": "full"})]
# Every way of splitting the three encoders and both language models; the campaign splits every family in every way.
LAYOUTS = {
    "qwen2_vl": TENSOR,
    "qwen2_5_vl": DATA[:1],
    "qwen3_vl": TENSOR + PIPELINE + DATA[1:] + CONTEXT,
    "qwen3_vl_moe": MIXTURE[:1],
    "qwen3_5_moe": MIXTURE[1:],
    "qwen3_5": TENSOR + CONTEXT,
}
#: Decoder layers: the first of two pipeline stages needs two for the features of this model's encoder blocks.
LAYERS = {"qwen3_vl": 4, "qwen3_vl_moe": 4}
#: Samples of each data-parallel rank, by the number of these ranks; those of the last one have no image.
SHARES = {1: [6], 2: [4, 2], 4: [2, 1, 1, 2]}
#: With parts that do not learn; of the first one a stage has nothing that does.
FROZEN = [({"pp": 2}, {"recompute": "full"}, ("language_model",)), ({"tp": 2, "sp": True}, {}, ("tower",))]
#: In place of parts that do not learn: adapters of decoder and encoder do; the model is a critic.
ADAPTERS, CRITIC = ("adapters",), ("critic",)
FORMS: dict[tuple[str, ...], dict[str, Any]] = {
    ADAPTERS: {"lora": LoraConfig(rank=4, alpha=8, targets=["attention", "mlp", "tower", "merger"])},
    CRITIC: {"value_head": True},
}
#: By test: the model, and layouts with settings of the engine and the parts that do not learn.
CASES = {
    **{kind: (kind, [(*layout, ()) for layout in layouts]) for kind, layouts in LAYOUTS.items()},
    "frozen": ("qwen3_vl", FROZEN),
    "adapters": ("qwen3_vl", [({"tp": 2, "sp": True}, {"recompute": "full"}, ADAPTERS)]),
    "critic": ("qwen2_5_vl", [({"cp": 2}, {}, CRITIC)]),
}


def batch_for(hf):
    """Samples with weights of their tokens, and for a mixture with routes."""
    from megarl.models.hf import encoder_of, image_settings, route_form

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
    form = route_form(hf)
    return batch if form is None else cases.with_random_routes(batch, form)


def engine_of(kind: str, parallel: ParallelConfig, engine: EngineConfig, optim: OptimConfig = OPTIM, **settings: Any):
    """An engine with a random model; `dtype`, `seed` and `freeze` can be given."""
    from megarl.models.hf import encoder_of, load_hf_config, route_form
    from megarl.training.engine import MegatronEngine
    from megarl.training.vlm_sequences import ImageLayout

    raw = shallow_config(kind, LAYERS.get(kind, 2))
    hf, seed = load_hf_config(ModelConfig(hf_config=raw, vision=True)), settings.pop("seed", 3)
    return MegatronEngine(
        hf,
        parallel,
        engine,
        optim,
        dtype=settings.pop("dtype", torch.float32),
        layout=fresh_layout(parallel),
        total_steps=10,
        weights=lambda chunks: cases._random(chunks, hf, seed),
        sequences=ImageLayout(encoder_of(hf), routes=route_form(hf)),
        **settings,
    )


def _run(kind: str, parallel: ParallelConfig, engine: EngineConfig, freeze: tuple, **settings: Any) -> dict:
    """Log-probs (or values) before, gradient norms, and all parameters after two steps."""
    from megarl.models.weights import iter_hf_tensors

    made = engine_of(kind, parallel, engine, **FORMS.get(freeze, {"freeze": freeze}), **settings)
    layout, whole = made.layout, batch_for(made.hf_config)
    batch = whole.split(SHARES[layout.dp_size])[layout.dp_rank]
    logp = next(iter(cases.outputs(made, batch, 0.8).values()))
    norms = [cases.train(made, batch, 0.8).result()["actor/grad_norm"] for _ in range(2)]
    tensors = {name: tensor for name, tensor in iter_hf_tensors(made.chunks, layout.world) if tensor is not None}
    return {"logp": logp.values.clone(), "norms": torch.tensor(norms), "dp_rank": layout.dp_rank, "tensors": tensors}


def _wrong(cases: dict[str, tuple[str, list]], alone: dict[Any, dict]) -> dict[str, list[str]]:
    """By test: the numbers of each layout that are not those of one process."""
    return {
        name: [text for layout in layouts for text in _differences(kind, *layout, alone)]
        for name, (kind, layouts) in cases.items()
    }


def _differences(
    kind: str, parallel: dict, engine: dict, freeze: tuple, alone: dict[Any, dict], **settings: Any
) -> list[str]:
    run = _run(kind, ParallelConfig(**parallel), EngineConfig(**engine), freeze, **settings)
    want = alone[kind, freeze]
    pairs = [("norms", run["norms"], want["norms"])]
    if run["dp_rank"] == 0:  # which has the first samples
        pairs += [("logp", run["logp"], want["logp"][: len(run["logp"])])]
    if run["tensors"]:  # the first rank gathers them
        pairs += [(name, run["tensors"][name], tensor) for name, tensor in want["tensors"].items()]
    return [
        f"{parallel} {engine} {freeze} {name}: {(ours - theirs).abs().max():.2g}"
        for name, ours, theirs in pairs
        if not torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)
    ]


@pytest.fixture(scope="module")
def wrong() -> list[dict[str, list[str]]]:
    """By rank. The ranks import the encoders once for all tests."""
    return _of_all_ranks(CASES)


def _of_all_ranks(chosen: dict[str, tuple[str, list]], ranks: int = 2) -> list[dict[str, list[str]]]:
    from tests.dist import single_process

    single_process()
    asked = dict.fromkeys((kind, freeze) for kind, layouts in chosen.values() for *_, freeze in layouts)
    whole = EngineConfig(micro_batch_tokens=10_000)
    alone = {(kind, freeze): _run(kind, ParallelConfig(), whole, freeze) for kind, freeze in asked}
    return run_distributed(_wrong, ranks, 400.0, chosen, alone)


@pytest.mark.parametrize("name", CASES)
def test_every_layout_equals_one_process(name, wrong):
    """With `frozen`, of the parts that learn; with `adapters`, of the merged weights; with `critic`, of the values."""
    assert [found[name] for found in wrong] == [[], []]


@pytest.mark.campaign("families")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_two_processes_equal_one(kind):
    mixture = [{"ep": 2}] if "num_experts" in config_of(kind)["text_config"] else []
    sizes = [{"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}, {"cp": 2}, *mixture]
    assert _of_all_ranks({kind: (kind, [(size, {}, ()) for size in sizes])}) == [{kind: []}, {kind: []}]


#: Layouts of four processes; the last two have two replicas.
TOGETHER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"cp": 2, "tp": 2, "sp": True}, {"micro_batch_tokens": 1}),
    ({"cp": 2, "pp": 2}, {"recompute": "full"}),
    ({"cp": 2}, {}),
    ({"pp": 2}, {}),
]


@pytest.mark.campaign("families")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("learns", [(), ADAPTERS], ids=["everything", "adapters"])
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])  # qwen3_5's tiny model has too few key heads for tp * cp
def test_context_parallelism_with_another_kind_and_adapters_equal_one_process(kind, learns):
    layouts = [(*layout, learns) for layout in TOGETHER]
    assert _of_all_ranks({kind: (kind, layouts)}, ranks=4) == [{kind: []}] * 4


#: Steps of a tenth of the gradients, whose size Adam does not divide out with this epsilon.
PLAIN = OptimConfig(lr=0.1, eps=1.0, weight_decay=0.0, clip_grad=1e6)


def _wrong_steps(kind: str, alone: dict[Any, dict]) -> list[str]:
    layouts = [{"ep": 2}, {"ep": 4}, {"tp": 2, "ep": 2}, {"tp": 2, "ep": 4}, {"pp": 2, "ep": 2}]
    return [text for layout in layouts for text in _differences(kind, layout, {}, (), alone, optim=PLAIN)]


@pytest.mark.campaign("teams")
@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_gradients_of_encoder_and_experts_are_those_of_one_process(kind):
    from tests.dist import single_process

    single_process()
    alone = {(kind, ()): _run(kind, ParallelConfig(), EngineConfig(micro_batch_tokens=10_000), (), optim=PLAIN)}
    assert run_distributed(_wrong_steps, 4, 400.0, kind, alone) == [[]] * 4
