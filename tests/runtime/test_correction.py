"""Rollout correction in training: every preset trains, and no split of the samples changes an update."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.config.correction import PRESETS, RolloutCorrectionConfig
from megarl.config.load import load_config
from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Batch
from megarl.data.versions import version_values
from megarl.runtime.context import Seeds
from megarl.runtime.roles import ActorRole
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import OffloadSchedule
from tests.dist import layout_for, run_distributed, single_process, world
from tests.runtime import harness
from tests.training import cases

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]
# Thresholds that reject and cut a part of what `samples` draws.
TIGHT = {
    "decoupled": {"preset": "decoupled_seq_is_rs", "rs": [{"level": "token", "upper": 1.5}], "is_threshold": 1.1},
    "normalised": {"preset": "decoupled_token_icepop", "is_batch_normalize": True, "rs_level": "token",
                   "rs_threshold": 1.5},
    "bypass": {"preset": "bypass_ppo_clip_geo_rs", "rs_threshold": 1.1, "veto_threshold": 0.3},
    "pg": {"preset": "bypass_pg_geo_rs_seq_tis", "rs_threshold": 1.1, "rs": [{"level": "token", "upper": 1.5}]},
    "nothing left": {"preset": "pg_rs", "rs_threshold": 1.0, "rs_threshold_lower": 1.0},
}  # fmt: skip
COUNT = 8


def join_alone():
    """The layout of a single process."""
    torch.set_num_threads(1)
    return single_process()


@pytest.fixture
def alone():
    return join_alone()


# -- every preset ------


@pytest.fixture(scope="module")
def controller(tmp_path_factory):
    """A real controller of one process, which the presets share."""
    from megarl.runtime.setup import build_rank_state

    layout = join_alone()
    folder = tmp_path_factory.mktemp("run")
    recipe = harness.write_recipe(folder)
    config = load_config(
        recipe, ["cluster.nproc=1", "rollout.dtype=bf16", "rollout.stale_steps=2", "algorithm.kl.use=none"]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megarl.runtime.setup.init_processes", lambda *_: layout)
        c = build_rank_state(config, folder)
    yield c
    c.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_trains(controller, preset):
    from megarl.dag.executor import Executor
    from megarl.recipes.build import build_task_graph

    c = controller
    # Bounds of 0.1% are for thousands of tokens; of four they reject nearly all, and a sample alone in its group has no
    # advantage: the step would train on nothing.
    wide = {"rs_threshold": 1.02} if PRESETS[preset].get("rs_level") == "geometric" else {}
    section = RolloutCorrectionConfig(preset=preset, **wide)
    context = c.context
    context.config = context.config.model_copy(update={"rollout_correction": section})
    knobs, executor = section.resolved(), Executor(build_task_graph(context.config), c.roles)
    norms = []
    for _ in range(2):
        context.step += 1
        context.metrics = Metrics()
        executor.run(context, next(c.loader))
        c.rollout.engine.weight_version = context.step
        numbers = context.metrics.result()
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert numbers["rollout_corr/k3_kl"] > 0
        assert numbers["rollout_corr/staleness_mean"] <= 2
        assert ("rollout_corr/rejected" in numbers) == knobs.rejects
        trained = numbers.get("rollout_corr/rejected", 0) < 1
        assert ("rollout_corr/is_weight_mean" in numbers) == (knobs.is_level != "none" and trained)
        assert ("actor/pg_loss" in numbers) == trained
        norms.append(numbers["actor/grad_norm"])
    assert max(norms) > 1e-3
    assert ("old_logp" in executor.nodes) == (knobs.active and not knobs.bypass)
    assert all(torch.isfinite(p).all() for chunk in c.actor.chunks for p in chunk.parameters())


# -- one update, however it is cut ------


def samples(engine) -> Batch:
    """Samples whose rollout log-probs are those of the engine with noise, and different advantages."""
    batch = cases.make_batch(COUNT).drop(["loss_weights"])
    logp, _ = engine.logprobs(batch)
    g = torch.Generator().manual_seed(1)
    noise = (
        0.4
        * torch.randn(logp.values.shape, generator=g)
        * torch.rand(COUNT, generator=g).repeat_interleave(logp.lengths)
    )
    mask = torch.rand(logp.values.shape, generator=g) < 0.9
    batch.set("response_mask", logp.like(mask))
    batch.set("rollout_logp", logp.like(logp.values + noise))
    batch.set("old_logp", logp)
    batch.set("advantages", logp.like(torch.randn(logp.values.shape, generator=g)))
    return batch.with_values(version_values([[[i % 3, n]] for i, n in enumerate(logp.lengths.tolist())]))


def worker(engine, layout, mode: str, correction: dict) -> SimpleNamespace:
    """As much of a controller as the correction and the update use."""
    config = RunConfig(name="case", rollout_correction=RolloutCorrectionConfig(**correction))
    loss = config.algorithm.loss.model_copy(update={"aggregation": mode, "sum_norm": 40.0, "entropy_coef": 0.01})
    algorithm = config.algorithm.model_copy(update={"loss": loss})

    def all_sum(values):
        return layout.dp_group.all_reduce(values.clone())

    c = SimpleNamespace(
        config=config.model_copy(update={"algorithm": algorithm}),
        layout=layout,
        all_sum=all_sum,
        temperature=1.0,
        metrics=Metrics(),
        offload=OffloadSchedule(),
        seeds=Seeds(0),
        step=3,
    )
    c.actor = ActorRole(engine, c, offloads=())
    return c


def one_update(engine, batch: Batch, mode: str, correction: dict, uneven: bool) -> dict:
    """Gradients (summed over ranks, before clipping) and metrics of one step."""
    from megarl.runtime.stages.correction import rollout_correction
    from megarl.runtime.stages.update import actor_step

    layout = engine.layout
    if layout.dp_size > 1:
        first = COUNT if uneven else COUNT // 2  # uneven: the other rank has nothing at all
        batch = batch.split([first, COUNT - first])[layout.dp_rank]
    c = worker(engine, layout, mode, correction)
    if not c.config.rollout_correction.resolved().bypass:
        batch = rollout_correction(c, batch)
    metrics = actor_step(c, batch, c.actor).merge(c.metrics).result()
    grads = [p.main_grad.clone() for chunk in engine.chunks for p in chunk.parameters()]
    return {"grads": torch.cat([g.flatten() for g in grads]), "metrics": metrics if layout.rank == 0 else {}}


def all_updates(budgets: list[int]) -> list[dict]:
    """Every case by every split, from the same weights: the learning rate is too small for a float32 to move."""
    out = []
    for budget in budgets:
        settings = EngineConfig(micro_batch_tokens=budget, logits_chunk_tokens=16, distributed_optimizer=False)
        optim = OptimConfig(lr=1e-30, clip_grad=0.0)
        # How losses are added up does not depend on the depth.
        engine = cases.make_engine("dense", layout=layout_for(ParallelConfig()), layers=1, engine=settings, optim=optim)
        batch = samples(engine)
        for name, correction in TIGHT.items():
            for mode in MODES if name in ("decoupled", "pg") else MODES[:2]:
                for uneven in (False, True) if world().size > 1 and mode == MODES[0] else (False,):
                    made = one_update(engine, batch.copy(), mode, correction, uneven)
                    out.append({"case": [name, mode], **made})
        assert torch.equal(samples(engine)["old_logp"].values, batch["old_logp"].values), "the weights have moved"
    return out


@pytest.fixture(scope="module")
def whole() -> dict:
    """The updates of one process with one micro-batch."""
    return {tuple(one["case"]): one for one in run_distributed(all_updates, 1, 240, [10_000])[0]}


def assert_same_gradient(one: torch.Tensor, want: torch.Tensor) -> None:
    """Float32 sums in another order: 1e-5 of the largest entry."""
    assert float((one - want).abs().max()) <= 1e-5 * float(want.abs().max())


def agree(one: dict, want: dict) -> None:
    assert_same_gradient(one["grads"], want["grads"])
    for name, value in want["metrics"].items():
        if one["metrics"]:
            assert one["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (one["case"], name)


@pytest.mark.procs
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processes", "budgets"), [(1, [1]), (2, [60])])
def test_no_split_changes_an_update_with_rejection(processes, budgets, whole):
    for rank in run_distributed(all_updates, processes, 420, budgets):
        for one in rank:
            agree(one, whole[tuple(one["case"])])


@pytest.mark.procs
def test_the_updates_that_are_compared_reject_a_part_and_train_on_the_rest(whole):
    for (name, _), one in whole.items():
        rejected = one["metrics"]["rollout_corr/rejected"]
        if name == "nothing left":
            assert rejected == 1
            assert one["grads"].abs().max() == 0
        else:
            assert 0.05 < rejected < 0.95, name
            assert one["grads"].abs().max() > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_counts_that_come_late_divide_like_counts_known_before(alone, mode):
    """Bypass finds its counts in the update; with the masks known beforehand the gradient and loss are the same."""
    from megarl.algorithms.aggregation import aggregation_weights, local_counts
    from megarl.algorithms.correction import Rule, correct
    from megarl.algorithms.objective import actor_loss
    from megarl.runtime.stages.update import actor_step

    settings = EngineConfig(micro_batch_tokens=60, distributed_optimizer=False)
    results = []
    for late in (True, False):
        engine = cases.make_engine("dense", layout=alone, engine=settings, optim=OptimConfig(lr=1e-2, clip_grad=0.0))
        batch = samples(engine)
        c = worker(engine, alone, mode, TIGHT["bypass"])
        if late:
            metrics = actor_step(c, batch, c.actor)
        else:
            mask, rollout = batch["response_mask"], batch["rollout_logp"]
            out = correct(batch["old_logp"].values, rollout.values, mask.values, offsets=mask.offsets,
                          rules=[Rule("geometric", upper=1.1)], veto=0.3)  # fmt: skip
            counts = local_counts(out.mask, mask.offsets)
            weights = aggregation_weights(mode, out.mask, counts, offsets=mask.offsets, sum_norm=40.0)
            batch.set("accepted", mask.like(out.mask))
            batch.set("loss_weights", mask.like(weights))

            def loss(logp, entropy, micro, c=c, counts=counts):
                fields = [micro[n].values for n in ("rollout_logp", "advantages", "accepted", "loss_weights")]
                loss_settings = c.config.algorithm.loss
                return actor_loss(logp, *fields, loss_settings, tokens=float(counts[0]), entropy=entropy)

            metrics = engine.train_step(batch, loss)
        grads = [p.main_grad.flatten().clone() for chunk in engine.chunks for p in chunk.parameters()]
        results.append((torch.cat(grads), metrics.result()))
    assert_same_gradient(results[0][0], results[1][0])
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        assert results[0][1][name] == pytest.approx(results[1][1][name], rel=1e-5), name


# -- the baseline, old weights ------


@pytest.mark.parametrize("affects", [True, False])
def test_rejected_samples_leave_their_group_if_asked(alone, affects):
    """Scores 0, 1, 5 of one prompt, and the third sample is rejected: the others are compared only with each other."""
    from megarl.data.batch import Jagged
    from megarl.runtime.stages.advantage import advantage
    from megarl.runtime.stages.correction import rollout_correction

    correction = {"rs_level": "sequence", "rs_threshold": 2.0, "rs_affects_baseline": affects}
    c = worker(None, alone, "token-mean", correction)
    rows = {"old_logp": [[0.0]] * 3, "rollout_logp": [[0.0], [0.0], [-3.0]], "token_rewards": [[0.0], [1.0], [5.0]]}
    batch = Batch({name: Jagged.from_list(values) for name, values in rows.items()}, {"uid": ["a"] * 3})
    batch.set("response_ids", batch["old_logp"].like(torch.zeros(3, dtype=torch.int64)))
    batch.set("response_mask", batch["old_logp"].like(torch.ones(3, dtype=torch.bool)))
    batch = batch.with_values(version_values([[[0, 1]]] * 3))
    out = advantage(c, rollout_correction(c, batch))
    assert out["loss_mask"].values.tolist() == [True, True, False]
    assert out["response_mask"].values.all(), "the data stays as it is"
    scores = torch.tensor([0.0, 1.0] if affects else [0.0, 1.0, 5.0])
    want = ((scores - scores.mean()) / (scores.std() + 1e-6)).tolist()
    assert out["advantages"].values.tolist()[: len(want)] == pytest.approx(want)


def test_old_weights_generate_and_the_new_ones_come_back(alone):
    from megarl.rollout.embedded.stale import StaleWeights

    engine = cases.make_engine("dense", layout=alone, frozen=True)
    (parameter, *_) = (p for chunk in engine.chunks for p in chunk.parameters())
    rollout = SimpleNamespace(weight_version=0)
    stale = StaleWeights(engine.chunks, rollout, 2)
    seen = []
    for version in range(5):
        with torch.no_grad():
            parameter.fill_(float(version))
        rollout.weight_version = version
        with stale.installed():
            seen.append((rollout.weight_version, float(parameter.flatten()[0])))
        assert (rollout.weight_version, float(parameter.flatten()[0])) == (version, version)
    assert seen == [(0, 0), (0, 0), (0, 0), (1, 1), (2, 2)]


def test_a_resumed_run_with_old_weights_is_refused(alone):
    from megarl.rollout.embedded.stale import StaleWeights

    engine = cases.make_engine("dense", layout=alone, frozen=True)
    stale = StaleWeights(engine.chunks, SimpleNamespace(weight_version=7), 2)
    with pytest.raises(ConfigError, match=r"rollout\.stale_steps.*cannot be resumed"), stale.installed():
        pass


def test_the_demo_recipe_has_a_gap(tmp_path: Path):
    config = load_config("grpo_correction_demo")
    assert (config.model.dtype, config.rollout.dtype, config.rollout.stale_steps) == ("fp32", "bf16", 4)
