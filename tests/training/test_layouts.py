"""Every layout against the single process: loss, log-probs, gradient norm, and parameters after optimizer steps.

The batch is packed, of uneven lengths, split unevenly over data-parallel ranks (from three ranks on, the last has no
sample at all), which exchange samples except in one layout; micro-batch budgets differ from the reference's, so that
ranks have different numbers of micro-batches.

Tolerances, float32: sums run in another order under another layout, which costs a few units in the last place of
values of size 1 to 10 (1e-6 relative); parameters move by at most lr = 1e-2 per step, and Adam's division by |g| + eps
turns a gradient error of 1e-8 into at most lr / eps * 1e-8 = 1e-7.
"""

import pytest
import torch
import torch.distributed as dist

from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from tests.campaigns import chosen
from tests.dist import fresh_layout, run_distributed
from tests.training import cases

OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0.5, schedule="cosine", warmup_steps=1)
STEPS = 2
COUNT = 6  # the first of two data-parallel ranks has five of them, the first of four has four: several micro-batches

TWO = [
    ("capped", {"tp": 2}, {}),
    ("tied", {"tp": 2, "sp": True}, {"micro_batch_tokens": 50}),
    ("dense", {"pp": 2}, {"distributed_optimizer": False}),
    ("tied", {"pp": 2, "vpp": 2, "last_stage_layers": 1}, {"micro_batch_tokens": 60}),
    ("moe", {"pp": 2, "vpp": 2}, {"recompute": ["moe"]}),
    ("dense", {}, {"overlap_grad_reduce": True, "balance_replicas": False}),
    ("dense", {}, {"distributed_optimizer": False, "micro_batch_tokens": 1}),
    ("drafting", {"tp": 2, "sp": True, "ep": 2}, {"recompute": "full"}),
    ("drafting latent", {"pp": 2}, {"overlap_grad_reduce": True}),
    ("wide", {"tp": 2, "sp": True}, {}),
    ("sinks", {"cp": 2, "ep": 2}, {"recompute": "selective"}),
    ("moe critic", {"tp": 2, "sp": True, "ep": 2}, {}),
]
FOUR = [
    ("drafting latent", {"tp": 2, "cp": 2, "sp": True}, {"recompute": "full"}),
    ("moe", {"pp": 2, "ep": 2}, {"overlap_grad_reduce": True}),
    ("moe", {"ep": 2}, {}),
    ("moe", {"ep": 2, "etp": 2}, {"recompute": "full"}),
]
# Each of these changes one thing of a layout above, or leaves one out.
MORE_OF_TWO = [
    ("moe", {"tp": 2, "sp": True, "ep": 2}, {}),
    ("moe", {"ep": 2}, {"distributed_optimizer": False, "recompute": "full"}),
    ("moe", {"tp": 2, "sp": True, "etp": 1}, {}),
    ("critic", {"tp": 2, "sp": True}, {"micro_batch_tokens": 50}),
    ("dense", {"cp": 2}, {"recompute": "full"}),
    ("critic", {"pp": 2, "vpp": 2}, {}),
    ("sinks", {"tp": 2, "sp": True}, {"recompute": "full"}),
    ("moe", {"tp": 2, "sp": True}, {}),
    ("moe", {"pp": 2, "first_stage_layers": 1}, {}),
    ("moe", {}, {}),
    ("moe", {"cp": 2}, {"recompute": "selective"}),
    ("latent", {"pp": 2}, {"distributed_optimizer": False, "recompute": "selective"}),
    ("drafting", {}, {"overlap_grad_reduce": True}),
    ("shared", {"tp": 2, "sp": True, "ep": 2}, {}),
    ("moe", {"ep": 2}, {}),
    ("critic", {"tp": 2}, {}),
    ("capped", {"cp": 2}, {"recompute": "selective"}),
    ("latent", {"cp": 2}, {"recompute": "selective"}),
    ("latent", {"tp": 2}, {}),
    ("latent", {"pp": 2}, {"recompute": "full"}),
    ("shared", {"cp": 2}, {}),
    ("sinks", {"pp": 2}, {"recompute": "selective"}),
    ("moe", {"tp": 2, "sp": True, "etp": 1}, {"distributed_optimizer": False}),
    ("drafting", {"pp": 2, "vpp": 2}, {"recompute": "full"}),
    ("drafting latent", {"tp": 2}, {}),
    ("drafting", {"cp": 2}, {"recompute": "full"}),
    ("drafting latent", {"cp": 2}, {}),
    ("drafting tied", {"pp": 2}, {"distributed_optimizer": False}),
    ("drafting latent", {"pp": 2}, {"recompute": "full"}),
    ("critic", {"cp": 2}, {}),
    ("critic", {}, {"overlap_grad_reduce": True}),
]
MORE_OF_FOUR = [
    ("moe", {"tp": 2, "pp": 2, "sp": True}, {}),
    ("critic", {"tp": 2, "cp": 2, "sp": True}, {}),
    ("tied", {"pp": 2, "vpp": 2}, {}),
    ("dense", {"tp": 2, "pp": 2}, {}),
    ("tied", {"tp": 2, "sp": True}, {}),
    ("moe", {"tp": 2, "cp": 2, "sp": True}, {}),
    ("moe", {"tp": 2, "sp": True, "ep": 2, "etp": 2}, {}),
    ("tied", {}, {"overlap_grad_reduce": True}),
    ("moe", {"tp": 2, "sp": True}, {}),
    ("dense", {"tp": 2, "cp": 2}, {}),
    ("drafting", {"tp": 2, "pp": 2, "sp": True}, {}),
    ("drafting", {"tp": 2, "cp": 2, "sp": True}, {}),
    ("drafting", {"pp": 2, "vpp": 2, "cp": 2}, {}),
    ("drafting tied", {"pp": 2, "ep": 2}, {"overlap_grad_reduce": True}),
]


def _batch():
    return cases.make_batch(COUNT, longest=16)


def _run(name: str, sizes: dict, layers: int, engine: EngineConfig) -> dict:
    """Log-probs before, metrics of each step, this rank's parameters after, under one layout."""
    parallel = ParallelConfig(**sizes)
    layout = fresh_layout(parallel)
    made = cases.make_engine(name, parallel, layout=layout, engine=engine, optim=OPTIM, layers=layers)
    whole = _batch()
    whole = cases.with_routes(whole, layers) if name == "moe" else whole
    whole = cases.with_kept(whole) if name == "tied" else whole
    batch = cases.split_over(whole, layout.dp_rank, layout.dp_size)
    before = cases.outputs(made, batch, 0.8)
    steps = [cases.train(made, batch, 0.8).result() for _ in range(STEPS)]
    return {"engine": made, "layout": layout, "before": before, "steps": steps}


def _reference(layouts: list) -> dict:
    """Log-probs, metrics and weights of every model of these layouts in a single process."""
    from megarl.models.weights import iter_hf_tensors

    out = {}
    for kind, (name, layers) in cases.kinds(layouts).items():
        got = _run(name, {}, layers, EngineConfig(micro_batch_tokens=10_000))
        out[kind] = {
            "before": {key: rows.values for key, rows in got["before"].items()},
            "steps": got["steps"],
            "weights": dict(iter_hf_tensors(got["engine"].chunks, got["layout"].world)),
        }
    return out


def _compare(case: tuple, reference: dict) -> dict[str, float]:
    """Largest errors of this rank."""
    from megarl.models.weights.fill import local_shards

    name, sizes, settings = case
    layers = cases.layers_for(name, sizes)
    defaults = {"micro_batch_tokens": 40, "logits_chunk_tokens": 16}
    got = _run(name, sizes, layers, EngineConfig(**{**defaults, **settings}))
    want, layout = reference[cases.kind(name, layers)], got["layout"]
    lengths = _batch()["response_ids"].lengths
    order = list(range(COUNT))
    counts = [len(cases.split_over(_batch(), r, layout.dp_size)) for r in range(layout.dp_size)]
    first = sum(counts[: layout.dp_rank])
    mine = order[first : first + counts[layout.dp_rank]]
    begin, end = int(lengths[:first].sum()), int(lengths[: first + len(mine)].sum())
    errors = {
        key: (rows.values - want["before"][key][begin:end]).abs().max().item() if mine else 0.0
        for key, rows in got["before"].items()
    }
    drafts = ["actor/mtp_loss", "actor/mtp_grad_norm"] if name.startswith("drafting") else []
    for key in ("loss", next(iter(got["before"])), "actor/grad_norm", "actor/lr", "samples", *drafts):
        pairs = zip(got["steps"], want["steps"], strict=True)
        errors[f"step {key}"] = max(abs(a[key] - b[key]) / max(abs(b[key]), 1.0) for a, b in pairs)
    errors["weights"] = max(
        (parameter[_cut(piece.target_region)] - want["weights"][piece.source][_cut(piece.source_region)])
        .abs()
        .max()
        .item()
        for shard, parameter in local_shards(got["engine"].chunks)
        for piece in shard.pieces
    )
    return errors


def _cut(region) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in region)


def _all_cases(layouts: list, reference: dict) -> list[dict[str, float]]:
    found = []
    for case in layouts:
        try:
            found.append(_compare(case, reference))
        except Exception as error:
            raise RuntimeError(f"rank {dist.get_rank()}, {case}") from error
    return found


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest) -> dict:
    return run_distributed(_reference, 1, 120, [case for layouts in chosen(request, "layouts") for case in layouts])[0]


@pytest.mark.procs
@pytest.mark.parametrize(
    ("processes", "layouts"),
    [
        (2, TWO),
        (4, FOUR),
        pytest.param(2, MORE_OF_TWO, marks=pytest.mark.campaign("teams")),
        pytest.param(4, MORE_OF_FOUR, marks=pytest.mark.campaign("teams")),
    ],
)
def test_layout_equals_the_single_process(processes, layouts, reference):
    ranks = run_distributed(_all_cases, processes, 420, layouts, reference)
    for number, case in enumerate(layouts):
        worst = {key: max(rank[number][key] for rank in ranks) for key in ranks[0][number]}
        print(case, {key: f"{value:.1e}" for key, value in worst.items()})
        assert max(worst.get(key, 0.0) for key in ("logp", "entropy", "value")) < 5e-6, (case, worst)
        # A critic's loss is far from 0, and so are its gradients: their norm has a few units more in the last place.
        steps = 5e-6 if "critic" in case[0] else 2e-6
        assert max(value for key, value in worst.items() if key.startswith("step")) < steps, (case, worst)
        assert worst["weights"] < 2e-6, (case, worst)


def test_reference_moves(reference):
    """The comparison would be empty if steps changed nothing."""
    for want in reference.values():
        losses = [step["loss"] for step in want["steps"]]
        assert losses[0] > losses[1]
        assert all(torch.isfinite(tensor).all() for tensor in want["weights"].values())
