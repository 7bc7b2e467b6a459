"""The gradient of prompts with 3, 8, 2 and 5 samples, whose episodes have different numbers of turns, is that of loops
over single samples in float64, for any layout and any micro-batch size.

The steps are the real ones: scores by turn, rollout correction, advantages, mini-batches of two prompts, and the update
with its counts over ranks. Only the optimizer is left out, so all mini-batches start from the same weights.
"""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
import torch

from megarl.config.correction import RolloutCorrectionConfig
from megarl.config.data import DataConfig
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.training import EngineConfig
from megarl.data.batch import Batch
from megarl.data.trajectory import Trajectory, trajectory_values
from megarl.runtime.context import Seeds
from megarl.runtime.roles import ActorRole
from megarl.runtime.stages.advantage import advantage
from megarl.runtime.stages.correction import rollout_correction
from megarl.runtime.stages.reward import set_scores
from megarl.runtime.stages.update import actor_step, mini_batches
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import OffloadSchedule
from tests.algorithms import oracle
from tests.dist import fresh_layout, run_distributed, world
from tests.training import cases
from tests.trajectories import add_turn

SIZES = (3, 8, 2, 5)  # samples of each prompt
PROMPTS_PER_STEP = 2
MODES = ("token-mean", "seq-mean-token-mean")
LOSS = {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": None}
THRESHOLD = 1.3  # of importance weights
BUDGETS = (1, 60, 10_000)  # tokens of a micro-batch: one sample each, some, all
LAYOUTS = [{}, {"pp": 2}, {"cp": 2}]  # of two processes: the first is DP2
# float32 against float64: some tens of roundings (1.2e-7) of the largest entry, from layers and sums over 100 tokens.
TOLERANCE = 5e-6


def episode(draw: random.Random) -> Trajectory:
    """One to four turns of one to five tokens each, with something said between them, and a reward for each turn."""
    tokens = lambda low, high: [draw.randrange(cases.VOCAB) for _ in range(draw.randint(low, high))]  # noqa: E731
    made, turns = Trajectory(tokens(1, 6)), draw.randint(1, 4)
    for turn in range(turns):
        drawn = tokens(1, 5)
        add_turn(made, drawn, [0.0] * len(drawn), [[turn, len(drawn)]], draw.uniform(-1, 1))
        if turn < turns - 1:
            made.add_observation(tokens(1, 6))
    made.ended_by = "done"
    return made


def everything() -> Batch:
    """All samples, those of all prompts one after the other in turn. The environment of one of them failed."""
    draw = random.Random(7)
    names = [f"{k}#{i}" for i in range(max(SIZES)) for k in range(len(SIZES)) if i < SIZES[k]]
    played = [episode(draw) for _ in names]
    played[6].mark_failed("no state", 0, 0)
    batch = Batch(size=len(names)).with_values(trajectory_values(played))
    batch.set("sample_id", names)
    batch.set("uid", [name[0] for name in names])
    set_scores(batch, [{"overall": sum(t.turn_rewards)} for t in played], by_turn=True)
    return batch


# -- the oracle ------


def model_of(engine) -> torch.nn.Module:
    """The engine's weights in transformers' model, in float64 but for the cosines of its positions."""
    from transformers import AutoModelForCausalLM

    from megarl.models.weights import iter_hf_tensors

    model = AutoModelForCausalLM.from_config(cases.hf_config("dense", num_hidden_layers=2), attn_implementation="sdpa")
    model.double().load_state_dict({name: x.double() for name, x in iter_hf_tensors(engine.chunks, world())})
    for norm in [module for module in model.modules() if hasattr(module, "variance_epsilon")]:
        norm.forward = lambda x, n=norm: (
            n.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + n.variance_epsilon)
        )
    return model


def logp_of(model, prompt: list[int], response: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1)[range(len(response)), response]


def oracle_gradient(model, batch: Batch, prompts: range, mode: str) -> dict[str, torch.Tensor]:
    """Of one mini-batch: loops over samples and tokens."""
    rows = {name: [row.tolist() for row in batch[name].unbind()] for name in batch.fields if name != "score"}
    mask, uid = rows["response_mask"], batch["uid"]
    gains = oracle.grpo(rows["token_rewards"], mask, uid)
    model.zero_grad()
    losses: list[list[torch.Tensor]] = []
    for i in [i for i in range(len(uid)) if int(uid[i]) in prompts]:
        logp = logp_of(model, rows["prompt_ids"][i], rows["response_ids"][i])
        losses.append([])
        for t, a in enumerate(gains[i]):
            if mask[i][t]:
                old = rows["old_logp"][i][t]
                ratio = (logp[t] - old).exp()
                bounded = ratio.clamp(1 - LOSS["clip_low"], 1 + LOSS["clip_high"])
                weight = min(torch.tensor(old - rows["rollout_logp"][i][t]).double().exp().item(), THRESHOLD)
                losses[-1].append(weight * torch.maximum(-a * ratio, -a * bounded))
    losses = [row for row in losses if row]
    if mode == "token-mean":
        total = sum(sum(row) for row in losses) / sum(map(len, losses))
    else:
        total = sum(sum(row) / len(row) for row in losses) / len(losses)
    total.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def steps() -> list[range]:
    return [range(k, k + PROMPTS_PER_STEP) for k in range(0, len(SIZES), PROMPTS_PER_STEP)]


def make_oracle() -> dict:
    """Log-probs near those of the model, and the gradients of every mini-batch."""
    model, batch = model_of(make_engine({}, BUDGETS[-1])), everything()
    with torch.no_grad():
        pairs = zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True)
        logp = torch.cat([logp_of(model, p.tolist(), r.tolist()) for p, r in pairs])
    g = torch.Generator().manual_seed(1)
    old = (logp + 0.2 * torch.randn(len(logp), generator=g)).float()
    given = {"old_logp": old, "rollout_logp": old + 0.3 * torch.randn(len(old), generator=g)}
    batch = with_logps(batch, given)
    gradients = {mode: [oracle_gradient(model, batch, prompts, mode) for prompts in steps()] for mode in MODES}
    return {"given": given, "gradients": gradients}


def with_logps(batch: Batch, given: dict[str, torch.Tensor]) -> Batch:
    for name, values in given.items():
        batch.set(name, batch["response_ids"].like(values))
    return batch


# -- what is tested ------


def make_engine(sizes: dict, budget: int):
    parallel = ParallelConfig(**sizes)
    settings = EngineConfig(micro_batch_tokens=budget, distributed_optimizer=False)
    return cases.make_engine("dense", parallel, layout=fresh_layout(parallel), engine=settings, layers=2)


def worker(engine, mode: str) -> SimpleNamespace:
    config = RunConfig(
        name="mixed",
        data=DataConfig(batch_size=len(SIZES)),
        algorithm={"loss": {"aggregation": mode, **LOSS}},
        actor={"mini_batch_size": PROMPTS_PER_STEP},
        rollout_correction=RolloutCorrectionConfig(preset="decoupled_token_is", is_threshold=THRESHOLD),
    )
    layout = engine.layout
    all_sum = lambda values: layout.dp_group.all_reduce(values.clone())  # noqa: E731
    c = SimpleNamespace(
        config=config,
        layout=layout,
        all_sum=all_sum,
        metrics=Metrics(),
        offload=OffloadSchedule(),
        seeds=Seeds(0),
        temperature=1.0,
        step=8,
    )
    c.actor = ActorRole(engine, c, offloads=())
    return c


def errors(engine, want: dict[str, torch.Tensor]) -> float:
    """Largest error of this rank's part of the gradient, as a share of the largest entry of all."""
    from megarl.models.weights.fill import local_shards

    cut = lambda region: tuple(slice(*span) for span in region)  # noqa: E731
    found = [
        (parameter.main_grad[cut(piece.target_region)].double() - want[piece.source][cut(piece.source_region)])
        .abs()
        .max()
        for shard, parameter in local_shards(engine.chunks)
        for piece in shard.pieces
    ]
    return float(max(found) / max(x.abs().max() for x in want.values()))


def look(engine, want: dict[str, torch.Tensor], seen: list[float], *args) -> dict[str, float]:
    """In the place of the optimizer."""
    seen.append(errors(engine, want))
    return {"grad_norm": 0.0, "lr": 0.0}


def budgets_of(sizes: dict) -> tuple[int, ...]:
    """The tokens of a micro-batch that a layout is tried with: all with data parallelism, a middle one with others."""
    return BUDGETS[1:2] if sizes else BUDGETS


def all_errors(made: dict, layouts: list[dict]) -> dict[str, list[float]]:
    """Layout, budget and aggregation -> the errors of each mini-batch."""
    found: dict[str, list[float]] = {}
    for sizes in layouts:
        engine = make_engine(sizes, 1)
        rank, count = engine.layout.dp_rank, engine.layout.dp_size
        for budget in budgets_of(sizes):
            engine.config = engine.config.model_copy(update={"micro_batch_tokens": budget})
            for mode in MODES:
                batch = with_logps(everything(), made["given"])
                mine = batch.select([i for i, uid in enumerate(batch["uid"]) if int(uid) % count == rank])
                c = worker(engine, mode)
                minis = mini_batches(c, advantage(c, rollout_correction(c, mine)), "actor", 0)
                seen: list[float] = []
                for mini, want in zip(minis, made["gradients"][mode], strict=True):
                    engine._update = functools.partial(look, engine, want, seen)
                    actor_step(c, mini, c.actor)
                found[f"{sizes or 'dp'}, {budget} tokens, {mode}"] = seen
    return found


@pytest.mark.procs
def test_mixed_groups_have_the_gradient_of_loops_over_samples():
    [made] = run_distributed(make_oracle, 1, 120)
    first, second = made["gradients"][MODES[0]]
    assert all((first[name] - second[name]).abs().max() > 1e-4 for name in first), "the comparison would say little"
    for found in run_distributed(all_errors, 2, 240, made, LAYOUTS):
        assert len(found) == sum(len(budgets_of(sizes)) for sizes in LAYOUTS) * len(MODES)
        for case, seen in found.items():
            assert len(seen) == len(steps()), case
            assert max(seen) < TOLERANCE, (case, seen)
