"""Gradients of one optimizer step do not depend on micro-batches or ranks, for every loss and aggregation.

The step is the real one: `update.actor_step` with its counts and preparations over ranks, through the engine's forward,
backward and gradient reduction. Only the optimizer is left out, so that all cases start from the same weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from megarl.algorithms.losses import POLICY_LOSSES
from megarl.config.algorithm import Aggregation
from megarl.config.training import EngineConfig
from megarl.data.batch import Batch
from megarl.data.versions import version_values
from megarl.runtime.context import Seeds
from megarl.runtime.roles import ActorRole, CriticRole
from megarl.system.offload_schedule import OffloadSchedule
from tests.dist import fresh_layout, run_distributed
from tests.training import cases

LOSSES = POLICY_LOSSES.names()
MODES = get_args(Aggregation)
BUDGETS = {1: 10_000, 2: 125, 4: 46, 8: 1}  # micro-batches of the whole batch in one process -> their token budget
SAMPLES = 8
SHARE = 5  # samples of the first of two ranks
FEW = (BUDGETS[1], BUDGETS[4])
MASKS = ("all", "holes")
BUCKETS = 64


def make_batch(masked: str) -> Batch:
    """Samples with everything that losses read; `holes` also rejects tokens, and one sample altogether."""
    batch = cases.make_batch(SAMPLES, longest=30).drop(["loss_weights"])
    responses = batch["response_ids"]
    g = torch.Generator().manual_seed(5)
    n = len(responses.values)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(n, generator=g)

    mask = torch.ones(n, dtype=torch.bool)
    if masked == "holes":
        mask = torch.rand(n, generator=g) < 0.7
        mask[responses.offsets[2] : responses.offsets[3]] = False
    batch.set("response_mask", responses.like(mask))
    batch.set("advantages", responses.like(noise(1.0)))
    expert = torch.zeros(n, dtype=torch.bool)
    expert[responses.offsets[1] : responses.offsets[2]] = True
    batch.set("expert_mask", responses.like(expert))
    batch.set("drift", responses.like(noise(0.4)))
    return batch


def controller(engine, loss: dict, correction: dict | None = None, critic: dict | None = None, **algorithm):
    from megarl.config.run import RunConfig

    everywhere = {"sum_norm": 30.0, "entropy_coef": 0.05}
    visible = {"cov_low": 0.0, "cov_fraction": 0.1, "trust_region": 1e-4}  # at their defaults little is restrained
    own = POLICY_LOSSES.spec(loss.get("name", "ppo")).settings.model_fields
    losses = everywhere | {key: value for key, value in visible.items() if key in own} | loss
    algorithm = {"loss": losses, "kl": {"use": "loss", "estimator": "low_var_kl+", "coef": 0.1}} | algorithm

    def all_sum(values):
        return engine.layout.dp_group.all_reduce(values.clone())

    if correction is None:
        correction = {"preset": "pg_is"} if loss.get("name") == "pg_is" else {}
    config = RunConfig(name="invariance", algorithm=algorithm, rollout_correction=correction, critic=critic or {})
    return SimpleNamespace(
        config=config,
        all_sum=all_sum,
        temperature=1.0,
        step=1,
        layout=engine.layout,
        offload=OffloadSchedule(),
        seeds=Seeds(0),
    )


def step(engine, batch: Batch, loss: dict, budget: int, step_on=None, **sections) -> tuple[torch.Tensor, dict, int]:
    """Signed sums of the gradient's entries, metrics, and micro-batches of this rank that hold samples."""
    from megarl.runtime.stages import update

    engine.config = engine.config.model_copy(update={"micro_batch_tokens": budget})
    c, model = controller(engine, loss, **sections), ActorRole if step_on is None else CriticRole
    seen = []

    def capture(batch, groups, losses):
        flat = torch.cat([p.main_grad.flatten() for chunk in engine.chunks for p in chunk.parameters()]).double()
        g = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, flat.shape, generator=g) * 2 - 1
        bucket = torch.randint(0, BUCKETS, flat.shape, generator=g)
        seen.extend([torch.zeros(BUCKETS).double().index_add_(0, bucket, signs * flat), sum(map(bool, groups))])
        return {"grad_norm": 0.0, "lr": 0.0}

    engine._update = capture
    metrics = (step_on or update.actor_step)(c, batch, model(engine, c, offloads=())).result()
    return seen[0], metrics, seen[1]


def _engine(model: str = "dense"):
    from megarl.config.model import ParallelConfig

    layout = fresh_layout(ParallelConfig())
    # How losses are added up does not depend on the depth.
    return cases.make_engine(model, layout=layout, layers=1, engine=EngineConfig(distributed_optimizer=False))


def _samples(engine, masked: str) -> Batch:
    """The batch with old log-probs near those of the model, so that ratios fall on both sides of every clip."""
    batch = make_batch(masked)
    logp, _ = engine.logprobs(batch)
    for name, factor in (("old_logp", 1.0), ("rollout_logp", 0.7), ("ref_logp", -0.5)):
        batch.set(name, logp.like(logp.values - factor * batch["drift"].values))
    batch = batch.with_values(version_values([[[0, n]] for n in logp.lengths.tolist()]))
    return batch.drop(["drift"])


def _cuts(loss: str, masked: str, ranks: int) -> list[int]:
    """Micro-batches of the whole batch: one loss is cut in all ways.

    Of the others, a single process takes the whole batch at once, and two ranks are compared with it in several each:
    of single samples, or of several with holes.
    """
    if masked == "all" and loss == LOSSES[0]:
        return list(BUDGETS)
    if ranks == 1:
        return [1]
    return [8] if masked == "all" else [4]


def _modes(loss: str, masked: str, every: bool) -> list[str]:
    """How this loss is aggregated: in every mode with holes, or one loss is and each other in one mode."""
    if masked == "all":
        return list(MODES[:1])
    number = LOSSES.index(loss)
    return [mode for place, mode in enumerate(MODES) if every or number == 0 or place == number % len(MODES)]


def _all_steps(every: bool) -> dict[str, dict]:
    """Case and number of micro-batches -> what a step made of it, on this process group."""
    engine, found = _engine(), {}
    rank, size = engine.layout.dp_rank, engine.layout.dp_size
    for masked in MASKS:
        batch = _samples(engine, masked)
        if size == 2:
            batch = batch.split([SHARE, SAMPLES - SHARE])[rank]
        for loss in LOSSES:
            for mode in _modes(loss, masked, every):
                for cut in _cuts(loss, masked, size):
                    grads, metrics, count = step(engine, batch, {"name": loss, "aggregation": mode}, BUDGETS[cut])
                    key = f"{loss}, {mode}, mask {masked}"
                    found.setdefault(key, []).append({"grads": grads, "metrics": metrics, "micro_batches": count})
    return found


#: Masks, and how value losses are aggregated.
CRITICS = {
    "all": {},
    "holes": {},
    "holes, by sequence": {"aggregation": "seq-mean-token-mean"},
    "holes, by a constant": {"aggregation": "seq-mean-token-sum-norm", "sum_norm": 30.0},
}


def _critic_steps() -> dict[str, list[dict]]:
    """The same for the critic's real step, with returns and old values near what it predicts."""
    from megarl.runtime.stages import critic

    engine, found = _engine("critic"), {}
    rank, size = engine.layout.dp_rank, engine.layout.dp_size
    for masked, critic_settings in CRITICS.items():
        batch = make_batch(masked.partition(",")[0])
        values = engine.values(batch)
        for name, factor in (("values", 2.0), ("returns", -1.0)):
            batch.set(name, values.like(values.values + factor * batch["drift"].values))
        if size == 2:
            batch = batch.split([SHARE, SAMPLES - SHARE])[rank]
        for budget in FEW[size - 1 :]:
            grads, metrics, count = step(engine, batch, {}, budget, critic.critic_step, critic=critic_settings)
            found.setdefault(masked, []).append({"grads": grads, "metrics": metrics, "micro_batches": count})
    return found


#: No term that importance weights do not multiply.
ALONE = {"loss": {"entropy_coef": 0.0}, "kl": {"use": "none"}}
RULES = [{"level": "token", "stat": "k1", "lower": 0.6, "upper": 1.6}]
PG = {"preset": "pg_is", "is_level": "token", "is_threshold": 1.3}
#: Further updates by name: the loss, the sections of the recipe, and whether samples have copies.
FURTHER = {
    "bypass": ({**ALONE["loss"]}, {"kl": ALONE["kl"], "correction": PG}, False),
    "bypass, divided by the mean weight": (
        {**ALONE["loss"]}, {"kl": ALONE["kl"], "correction": PG | {"is_batch_normalize": True}}, False,
    ),
    "bypass, rejecting": ({**ALONE["loss"]}, {"kl": ALONE["kl"], "correction": PG | {"rs": RULES}}, False),
    "bypass, rejecting, divided": (
        {**ALONE["loss"], "aggregation": "seq-mean-token-mean"},
        {"kl": ALONE["kl"], "correction": PG | {"rs": RULES, "is_batch_normalize": True}},
        False,
    ),
    "bypass, rejecting, divided by that of all": (
        {**ALONE["loss"]},
        {"kl": ALONE["kl"], "correction": PG | {"rs": RULES, "is_batch_normalize": True, "is_normalize_over": "all"}},
        False,
    ),
    "resampled": ({"aggregation": "seq-mean-token-mean"}, {}, True),
    "resampled, bypass, rejecting": ({}, {"correction": PG | {"rs": RULES}}, True),
    "resampled, bypass, divided": (
        {**ALONE["loss"]}, {"kl": ALONE["kl"], "correction": PG | {"rs": RULES, "is_batch_normalize": True}}, True,
    ),
    "resampled, bypass, divided by sequence": (
        {**ALONE["loss"]},
        {"kl": ALONE["kl"], "correction": PG | {"is_level": "sequence", "is_batch_normalize": True}},
        True,
    ),
}  # fmt: skip
TOP = {"coef": 0.5, "estimator": "forward_kl_topk", "topk": 4}
FURTHER |= {
    "taught": ({}, {"distillation": TOP}, False),
    "taught between both": ({}, {"distillation": {"coef": 0.5, "estimator": "jsd", "topk": 4, "beta": 0.7}}, False),
    "taught, with bounds": ({}, {"distillation": TOP | {"log_prob_min_clamp": -4.5, "loss_max_clamp": 0.4}}, False),
    "taught, without rewards": (
        {"entropy_coef": 0.0},
        {"kl": ALONE["kl"], "distillation": TOP | {"task_loss": False}},
        False,
    ),
    "taught through the policy loss": (
        {"name": "gspo", "aggregation": "seq-mean-token-mean"},
        {"distillation": {"coef": 2.0, "estimator": "k1", "through": "policy", "loss_max_clamp": 0.5}},
        True,
    ),
}
COPIES_OF = [0, 2, 1, 0, 3, 1, 1, 0]


def _teacher_targets(batch: Batch):
    """A teacher's four likeliest tokens at every place, with most of its probability."""
    g, responses = torch.Generator().manual_seed(7), batch["response_ids"]
    n = len(responses.values)
    ids = torch.rand(n, cases.VOCAB, generator=g).argsort(1)[:, :5].float()
    ids[:, 4] = -1
    logp = torch.log_softmax(2 * torch.randn(n, 5, generator=g), 1)
    return responses.like(torch.stack([ids, logp], 2))


def _further_steps() -> dict[str, list[dict]]:
    """The same for the updates of `FURTHER`, each in one and in four micro-batches; on two ranks only in several."""
    engine, found = _engine(), {}
    rank, size = engine.layout.dp_rank, engine.layout.dp_size
    whole = _samples(engine, "holes")
    whole.set("teacher_logp", whole["ref_logp"])
    whole.set("teacher_topk", _teacher_targets(whole))
    for name, (loss, sections, copied) in FURTHER.items():
        batch = whole.copy()
        if copied:
            batch.set("copies", torch.tensor(COPIES_OF))
        if size == 2:
            batch = batch.split([SHARE, SAMPLES - SHARE])[rank]
        for budget in FEW[size - 1 :]:
            grads, metrics, count = step(engine, batch.copy(), loss, budget, **sections)
            found.setdefault(name, []).append({"grads": grads, "metrics": metrics, "micro_batches": count})
    if size == 1:  # written out: every sample as often as it is drawn
        again = torch.repeat_interleave(torch.arange(SAMPLES), torch.tensor(COPIES_OF))
        for name in filter(lambda name: name.startswith("resampled"), FURTHER):
            loss, sections, _ = FURTHER[name]
            grads, _, _ = step(engine, whole.select(again), loss, BUDGETS[1], **sections)
            found[f"written out: {name}"] = [{"grads": grads}]
    return found


@pytest.mark.procs
def test_gradients_of_further_updates_do_not_depend_on_the_split():
    (one,) = run_distributed(_further_steps, 1, 300)
    two = run_distributed(_further_steps, 2, 300)
    written = {name.partition(": ")[2]: one.pop(name)[0]["grads"] for name in list(one) if name.startswith("written")}
    for name, (want, *more) in one.items():
        scale = want["grads"].abs().max()
        assert scale > 1e-4, name
        for split in [*more, *two[0][name], *two[1][name]]:
            assert (split["grads"] - want["grads"]).abs().max() < 1e-5 * scale, name
            for key, value in want["metrics"].items():
                assert split["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), (name, key)
    for name, expected in written.items():
        difference = (one[name][0]["grads"] - expected).abs().max()
        assert difference < 1e-5 * expected.abs().max(), f"{name}: two copies count as two samples"
    for plain, divided in (
        ("bypass", "bypass, divided by the mean weight"),
        ("bypass, rejecting", "bypass, rejecting, divided by that of all"),
    ):
        mean = one[divided][0]["metrics"]["rollout_corr/is_batch_norm"]
        assert abs(mean - 1) > 0.005
        expected = one[plain][0]["grads"] / mean
        assert (one[divided][0]["grads"] - expected).abs().max() < 1e-5 * expected.abs().max()
        pg_loss = one[plain][0]["metrics"]["actor/pg_loss"] / mean
        assert one[divided][0]["metrics"]["actor/pg_loss"] == pytest.approx(pg_loss, rel=1e-4)


@pytest.mark.procs
def test_gradients_of_the_critic_do_not_depend_on_the_split():
    (one,) = run_distributed(_critic_steps, 1, 300)
    two = run_distributed(_critic_steps, 2, 300)
    for masked, (want, *_) in one.items():
        scale = want["grads"].abs().max()
        assert scale > 1e-4
        assert 0 < want["metrics"]["critic/vf_clipfrac"] < 1, "both branches of the loss"
        for split in [*one[masked][1:], *two[0][masked], *two[1][masked]]:
            assert (split["grads"] - want["grads"]).abs().max() < 1e-5 * scale, masked
            for name, value in want["metrics"].items():
                assert split["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert [s["micro_batches"] for s in one["all"]] == [1, 4]
    losses = {name: steps[0]["metrics"]["critic/vf_loss"] for name, steps in one.items()}
    assert len({round(loss, 5) for loss in losses.values()}) == len(CRITICS), losses


@pytest.mark.procs
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.campaign("teams"))])
def test_gradients_do_not_depend_on_the_split(every):
    (one,) = run_distributed(_all_steps, 1, 300, every)
    two = run_distributed(_all_steps, 2, 300, every)
    assert len(one) == sum(len(_modes(loss, masked, every)) for loss in LOSSES for masked in MASKS)
    for key, steps in one.items():
        loss, masked = key.partition(",")[0], key.rpartition(" ")[2]
        assert [s["micro_batches"] for s in steps] == _cuts(loss, masked, 1), key
        want = steps[0]
        scale = want["grads"].abs().max()
        assert scale > 1e-4, key
        for split in [*steps[1:], *two[0][key], *two[1][key]]:
            assert (split["grads"] - want["grads"]).abs().max() < 1e-5 * scale, key
            for name, value in want["metrics"].items():
                assert split["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (key, name)
        if masked == "all":
            shares = [tuple(rank[key][number]["micro_batches"] for rank in two) for number in (0, -1)]
            assert shares[-1] == (SHARE, SAMPLES - SHARE), key
            assert shares[0] == ((1, 1) if loss == LOSSES[0] else shares[-1]), key
    # The comparison would say little if all losses had one gradient.
    seen = {tuple(steps[0]["grads"].tolist()) for key, steps in one.items() if key.endswith("token-mean, mask all")}
    assert len(seen) == len(LOSSES)
