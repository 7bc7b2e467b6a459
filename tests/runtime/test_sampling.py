"""Groups that wait for the next step are scored by the policy that generated them, whatever follows the rollout."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algorithms.objective import Objective
from megarl.config.algorithm import AdvantageConfig, AlgorithmConfig, DynamicSamplingConfig
from megarl.config.correction import RolloutCorrectionConfig
from megarl.config.data import DataConfig
from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.config.run import RunConfig
from megarl.data.batch import Batch, Jagged
from megarl.disaggregated.as_ready_loop import AsReadyLoop
from megarl.runtime.roles import ActorRole
from megarl.runtime.stages import logprob
from megarl.runtime.stages.rollout import record_unknown
from megarl.runtime.stages.sampling import NoSignalError, admitted, dynamic_sampling, group_condition
from megarl.runtime.stages.update import token_inputs
from megarl.system.comm import WorkerGroup
from megarl.system.metrics import Metrics
from megarl.system.offload_schedule import OffloadSchedule

N, WANTED = 2, 2
LENGTHS = [2, 3]


class Policy:
    """Log-probs that tell the weights, the temperature and the sample; counts what it is asked."""

    def __init__(self) -> None:
        self.weights, self.scored = 1.0, list[str]()

    def logprobs(self, samples: Batch, temperature: float, entropy: bool) -> tuple[Jagged, None]:
        self.scored += samples["sample_id"]
        ids = samples["response_ids"]
        return ids.like(-ids.values.float() * self.weights / temperature), None


def drawn(names: list[str]) -> Batch:
    """N samples of each prompt, which score differently."""
    ids = [f"{name}#{i}" for name in names for i in range(N)]
    tokens = Jagged.from_list([[1 + i % N] * LENGTHS[i % N] for i in range(len(ids))], dtype=torch.int64)
    batch = Batch({"response_ids": tokens, "score": torch.arange(len(ids)) % N * 1.0})
    batch.set("sample_id", ids)
    batch.set("uid", [id[:-2] for id in ids])
    return batch


def worker(**sections: Any) -> SimpleNamespace:
    """As much of a controller as sampling and scoring use; every prompt is a group with a signal."""
    config = RunConfig(
        name="case",
        data=DataConfig(batch_size=WANTED),
        rollout=RolloutConfig(sampling=SamplingConfig(n=N)),
        **{
            "algorithm": AlgorithmConfig(
                dynamic_sampling=DynamicSamplingConfig(enabled=True), **sections.pop("algorithm", {})
            ),
            **sections,
        },
    )
    names = (f"p{k}" for k in itertools.count())
    c = SimpleNamespace(
        config=config,
        layout=SimpleNamespace(dp_group=WorkerGroup.alone(), dp_rank=0, dp_size=1),
        loader=([next(names) for _ in range(3)] for _ in itertools.count()),
        surplus=None,
        cuts=None,
        offload=OffloadSchedule(),
        metrics=Metrics(),
        step=1,
        temperature=1.0,
        count_pass=lambda samples: None,
    )
    c.actor = ActorRole(Policy(), c, offloads=())
    return c


def steps(c: SimpleNamespace, count: int) -> list[Batch]:
    """The batch of each step; the weights are 1, 2, ... in them."""
    batches = []
    for step in range(1, count + 1):
        c.step, c.actor.engine.weights = step, float(step)
        batches.append(dynamic_sampling(c, drawn(next(c.loader)), lambda: drawn(next(c.loader)), actor=c.actor))
    return batches


def logp_of(weights: list[float], temperature: float = 1.0) -> list[float]:
    """Of the tokens of one group after another, each under its own weights."""
    tokens = [float(1 + i) for i in range(N) for _ in range(LENGTHS[i])]
    return [-token * w / temperature for w in weights for token in tokens]


def test_old_log_probs_are_those_of_the_policy_that_drew_the_sample():
    c = worker()
    first, second = steps(c, 2)
    assert logprob.old_logp(c, second, actor=c.actor)["old_logp"].values.tolist() == pytest.approx(logp_of([1, 2]))
    assert "surplus_logp" not in first
    assert second["uid"] == ["p2"] * N + ["p3"] * N
    assert c.actor.engine.scored == [f"{p}#{i}" for p in ("p2", "p4", "p5", "p3") for i in range(N)], "once each"


def test_a_group_may_wait_more_than_once():
    c = worker()
    third = steps(c, 3)[-1]  # 3 groups a step for 2: p2 | p4 p5 | p6 p7 p8 wait
    fourth = dynamic_sampling(c, drawn(next(c.loader)), lambda: drawn(next(c.loader)), actor=c.actor)
    assert third["surplus_logp"].values.tolist() == pytest.approx(logp_of([2, 2]))
    assert fourth["surplus_logp"].values.tolist() == pytest.approx(logp_of([3, 3]))
    waits = set(c.surplus["uid"])
    assert waits == {"p8", "p9", "p10", "p11"}
    assert c.surplus["surplus_logp"].values.tolist() == pytest.approx(logp_of([3, 3, 3, 3]))
    assert len(set(c.actor.engine.scored)) == len(c.actor.engine.scored)


def test_the_optimal_baselines_see_one_policy():
    c = worker(algorithm={"advantage": AdvantageConfig(name="optimal_token_baseline")})
    _, second = steps(c, 2)
    second = logprob.sum_pi_squared(c, logprob.old_logp(c, second, actor=c.actor), actor=c.actor)
    exact = [2 * a - b for a, b in zip(logp_of([1, 2]), logp_of([1, 2], 0.5), strict=True)]
    assert second["sum_pi_squared"].values.log().tolist() == pytest.approx(exact, abs=1e-6)


def test_in_bypass_the_rollout_has_said_it_already():
    c = worker(rollout_correction=RolloutCorrectionConfig(preset="ppo_is_bypass"))
    _, second = steps(c, 2)
    assert "surplus_logp" not in second
    assert c.actor.engine.scored == []


def test_what_is_dropped_is_not_scored():
    c = worker()
    c.config.algorithm.dynamic_sampling.__dict__["surplus"] = "drop"
    steps(c, 2)
    assert c.surplus is None
    assert c.actor.engine.scored == []


def test_a_batch_that_no_round_fills_takes_groups_of_the_last_one_without_a_signal():
    c = worker()
    sampling = c.config.algorithm.dynamic_sampling
    sampling.__dict__.update(short="fill", max_rounds=2)
    rounds = [drawn([f"p{k}", f"p{k + 1}"]) for k in (0, 2)]
    rounds[0].set("score", torch.tensor([0.0, 1.0, 1.0, 1.0]))
    rounds[1].set("score", torch.ones(4))
    batch = dynamic_sampling(c, rounds[0], lambda: rounds[1], actor=c.actor)
    assert batch["uid"] == ["p0"] * N + ["p2"] * N
    assert c.surplus is None
    assert c.metrics.result()["sampling/filled"] == 1

    sampling.__dict__["short"] = "fail"
    with pytest.raises(NoSignalError, match="after 2 rounds of generation 1 of 2 groups"):
        dynamic_sampling(c, rounds[0], lambda: rounds[1], actor=c.actor)


@pytest.mark.parametrize(("with_signal", "kept"), [(False, [True, False, True]), (True, [True, False, False])])
def test_a_group_that_the_filter_leaves_nothing_of_is_not_handed_over(with_signal, kept):
    c = worker(**{"async": {"order": "as_ready", "max_staleness": 1}})
    c.config.algorithm.filter.__dict__["name"] = "mine.py:long_enough"
    c.config.algorithm.dynamic_sampling.__dict__["enabled"] = with_signal
    samples = drawn(["p0", "p1", "p2"])
    samples.set("score", torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    mask = Jagged.from_list([[True], [True] * 2, [False], [False] * 2, [False], [False, True]], dtype=torch.bool)
    samples.set("response_mask", mask)
    seen: list[list[float]] = []
    assert admitted(c, samples, seen) == kept
    assert seen == [[0, 1], [0, 1], [1, 1]]
    assert c.metrics.result()["filter/groups_kept"] == pytest.approx(2 / 3)
    assert group_condition(c.config).endswith("a sample that the filter mine.py:long_enough keeps")
    flow = SimpleNamespace(c=SimpleNamespace(config=c.config, layout=c.layout, context=c), _rejected=[[0.0]] * 18)
    assert len(AsReadyLoop._rejected_groups(flow, [0, 1, 2], samples)) == 3 - sum(kept)
    samples.set("response_mask", mask.like(mask.values & False))
    flow._rejected = [[0.0]] * (10 * WANTED - 3)
    with pytest.raises(
        NoSignalError, match=rf"none of its last {10 * WANTED} groups has (?s:.*)loosen algorithm\.filter"
    ):
        AsReadyLoop._rejected_groups(flow, [0, 1, 2], samples)
    c.config.async_.__dict__["order"] = "in_order"  # there it masks samples of a step, which keeps its size
    assert group_condition(c.config) == ("scores that differ" if with_signal else None)


def test_one_update_of_all_samples_clips_those_that_waited():
    """No node scores fresh samples then: their ratio is 1. A policy that moved by log 2 has a ratio of 1/2 there."""
    c = worker()
    _, second = steps(c, 2)
    responses = second["response_ids"]
    logp = responses.like(torch.tensor(logp_of([1, 2]))).values - torch.log(torch.tensor(2.0))
    logp.requires_grad_()
    ones = torch.ones_like(logp)
    second.set("advantages", responses.like(-ones))
    second.set("loss_weights", responses.like(ones))
    for name in ("response_mask", "loss_mask"):
        second.set(name, responses.like(ones.bool()))
    objective = Objective.of(c.config.algorithm, c.config.rollout_correction.resolved())
    loss, metrics = objective.loss(logp, ones, token_inputs(second), float(len(logp)))
    loss.backward()
    waited = sum(LENGTHS)
    numbers = metrics.result()
    assert numbers["actor/ratio_min"] == pytest.approx(0.5)
    assert numbers["actor/ratio_max"] == pytest.approx(1)
    assert numbers["actor/pg_clipfrac"] == pytest.approx(0.5)
    assert logp.grad is not None
    assert (logp.grad[:waited] == 0).all()
    assert (logp.grad[waited:] > 0).all()


@pytest.mark.parametrize(("tokens", "share"), [(4, 0.5), (6, None), (None, None)])
def test_tokens_that_the_tokenizer_does_not_have_are_counted(tokens, share):
    ids = Jagged.from_list([[1, 5, 5], [4, 3]], dtype=torch.int64)  # of an environment: the second one
    mask = Jagged.from_list([[True, False, True], [True, True]], dtype=torch.bool)
    c = SimpleNamespace(tokens=tokens, hf_config=SimpleNamespace(vocab_size=6), metrics=Metrics())
    record_unknown(c, Batch({"response_ids": ids, "response_mask": mask}))
    assert c.metrics.result().get("rollout/unknown_tokens") == share


def test_small_rounds_fill_a_batch_with_the_last_groups_that_they_dropped():
    """Of two rounds of a batch of two, which are four rounds of one group each."""
    c, names = worker(), iter("bcde")
    c.config.rollout.__dict__["round_prompts"] = 1
    c.config.algorithm.dynamic_sampling.__dict__.update(short="fill", max_rounds=2)

    def without_signal(name: str) -> Batch:
        return drawn([name]).with_values({"score": torch.zeros(N)})

    batch = dynamic_sampling(c, without_signal("a"), lambda: without_signal(next(names)), actor=c.actor)
    assert list(dict.fromkeys(batch["uid"])) == ["c", "d"]
    assert c.metrics.result()["sampling/rounds"] == 4
