"""Advantages of several policies: each estimator sees one policy's samples; running baselines follow the data."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from megarl.algorithms.advantages.rae import RunningBaselines
from megarl.config.load import load_config
from megarl.config.run import RunConfig
from megarl.dag.stage import Kind, Role, contract_of, stage
from megarl.data.batch import Batch, Jagged
from megarl.data.groups import ORDINAL
from megarl.recipes.build import build_task_graph
from megarl.runtime.context import StepContext
from megarl.runtime.policies import OfModel
from megarl.runtime.roles import RolloutRole
from megarl.runtime.samples import open_groups
from megarl.runtime.stages.advantage import advantage
from megarl.runtime.stages.baseline import running_baseline
from megarl.runtime.stages.reward import write_scores
from megarl.runtime.stages.update import mini_batches
from megarl.system.metrics import Metrics

#: Rewards of two episodes of a prompt, and the mean over others in each of them: the worked numbers of the estimators.
REWARDS = [("proposer", [0.7]), ("solver", [1.0, 0.0, 1.0])], [("proposer", [0.1]), ("solver", [0.0, 0.0, 1.0])]


def context(policies, rank=0, ranks=1, gathered=None, baselines=None):
    group = SimpleNamespace(all_gather_json=lambda own: gathered(rank, own) if gathered else [own])
    return SimpleNamespace(
        config=RunConfig(name="x", policies=policies),
        metrics=Metrics(),
        all_sum=lambda values: values,
        layout=SimpleNamespace(dp_rank=rank, dp_size=ranks, dp_group=group),
        baselines=baselines or RunningBaselines(),
    )


def samples_of(rows):
    """Samples of two tokens for each (uid, part's name, reward), the reward on the last one."""
    lengths = torch.full((len(rows),), 2)
    rewards = torch.tensor([[0.0, reward] for *_, reward in rows], dtype=torch.float32).reshape(-1)
    fields = {
        "token_rewards": Jagged.from_lengths(rewards, lengths),
        "response_mask": Jagged.from_lengths(torch.ones(2 * len(rows), dtype=torch.bool), lengths),
        "lane": torch.zeros(len(rows), dtype=torch.int64),
    }
    names = [name for _, name, _ in rows]
    policies = [name.partition("@")[2].partition(":")[0] for name in names]
    return Batch(fields, {"uid": [uid for uid, *_ in rows], "episode": names, "policy": policies})


def episodes(*played, uid="a"):
    return [
        (uid, f"{uid}#{k}@{policy}" + f":{number}" * (len(rewards) > 1), reward)
        for k, parts in enumerate(played)
        for policy, rewards in parts
        for number, reward in enumerate(rewards)
    ]


def estimated(policies, rows):
    made = advantage(context(policies), samples_of(rows))["advantages"]
    by_policy = {}
    for (_, name, _), values in zip(rows, made.unbind(), strict=True):
        assert values[0] == values[1]
        by_policy.setdefault(name.partition("@")[2].partition(":")[0], []).append(float(values[0]))
    return by_policy


def test_solvers_are_compared_within_their_episode_and_proposers_across_episodes():
    mean = {"name": "grpo", "norm_by_std": False}
    policies = {"proposer": {"advantage": mean}, "solver": {"advantage": mean, "compare": "episode"}}
    made = estimated(policies, episodes(*REWARDS))
    assert made["proposer"] == pytest.approx([0.3, -0.3])
    assert made["solver"] == pytest.approx([1 / 3, -2 / 3, 1 / 3, -1 / 3, -1 / 3, 2 / 3])
    others = {**mean, "name": "rloo"}
    del others["norm_by_std"]
    policies = {"proposer": {"train": False}, "solver": {"advantage": others, "compare": "episode"}}
    made = estimated(policies, episodes(*REWARDS))
    assert made == {"proposer": [0.0, 0.0], "solver": pytest.approx([0.5, -1, 0.5, -0.5, -0.5, 1])}


def test_the_groups_of_metrics_are_those_of_the_estimator():
    rows = episodes([("solver", [1.0, 1.0])], [("solver", [0.0, 0.0])])
    samples = samples_of(rows)
    samples.set("response_ids", samples["response_mask"])
    equal = []
    for compare in ("prompt", "episode"):
        c = context({"solver": {"compare": compare}})
        write_scores(c, samples, [{"overall": reward} for *_, reward in rows], by_turn=False)
        equal.append(c.metrics.result()["solver/critic/groups/zero_std"])
    assert equal == [0, 1]


def test_an_estimator_sees_the_samples_of_its_policy_only():
    policies = {"proposer": {"advantage": {"name": "grpo"}}, "solver": {"advantage": {"name": "grpo"}}}
    made = estimated(policies, episodes(*REWARDS))
    for policy, values in made.items():
        alone = [[part for part in parts if part[0] == policy] for parts in REWARDS]
        other = {name: {"advantage": {"name": "grpo"}} for name in policies}
        assert estimated(other, episodes(*alone))[policy] == values


@pytest.mark.parametrize("compare", ["prompt", "episode"])
def test_a_sample_without_others_to_compare_with_has_advantage_0(compare):
    rows = episodes([("proposer", [0.7]), ("solver", [1.0])], [("proposer", [0.1])])  # the second one failed
    policies = {name: {"advantage": {"name": "rloo"}} for name in ("proposer", "solver")}
    policies["solver"]["compare"] = compare
    assert estimated(policies, rows) == {"proposer": pytest.approx([0.6, -0.6]), "solver": [0.0]}


def test_rae_subtracts_each_policy_s_baseline_before_the_sample():
    rae = {"advantage": {"name": "rae"}}
    c = context({"p0": rae, "p1": rae})
    rewards = [1, -1, 1, -1, -1, 1]
    samples = samples_of([(f"u{k // 2}", f"u{k // 2}#0@p{k % 2}", reward) for k, reward in enumerate(rewards)])
    made = advantage(c, running_baseline(c, samples))["advantages"]
    assert made.values[::2].tolist() == pytest.approx([1, -1, 0.95, -0.95, -1.0975, 1.0975])
    assert c.baselines.state_dict() == pytest.approx({"p0": 0.042625, "p1": -0.042625})


@pytest.mark.parametrize("ranks", [2, 3])
def test_baselines_follow_the_order_of_the_data_whatever_the_number_of_replicas(ranks):
    draw = random.Random(ranks)
    policies = {"a": {"advantage": {"name": "rae", "decay": 0.8}}, "b": {"advantage": {"name": "rae"}}}
    prompts = [
        episodes(
            *([(name, [draw.random() for _ in range(draw.randint(1, 3))]) for name in policies] for _ in range(2)),
            uid=f"u{number}",
        )
        for number in range(6)
    ]
    expected, now = {}, {"a": 0.0, "b": 0.0}
    for _, name, reward in (row for prompt in prompts for row in prompt):
        policy = name.partition("@")[2][0]
        expected[name] = now[policy]
        decay = 0.8 if policy == "a" else 0.95
        now[policy] = decay * now[policy] + (1 - decay) * reward
    shares = [[row for prompt in prompts[rank::ranks] for row in prompt] for rank in range(ranks)]
    own = {}
    for rank, share in enumerate(shares):  # what each rank has
        running_baseline(context(policies, rank, ranks, lambda k, rows: [own.setdefault(k, rows)]), samples_of(share))
    for rank, share in enumerate(shares):
        c = context(policies, rank, ranks, lambda *_: list(own.values()))
        made = running_baseline(c, samples_of(share))["running_baseline"].tolist()
        # rewards and the field are float32
        assert made == pytest.approx([expected[name] for _, name, _ in share], rel=1e-6, abs=1e-7)
        assert c.baselines.state_dict() == pytest.approx(now, rel=1e-6)


@pytest.mark.parametrize(("trains", "updates"), [(True, ("actor_train",)), (False, ())])
def test_what_comes_after_a_node_of_the_actor_comes_after_those_of_all_models(trains, updates):
    listed = "[rollout, scoring, advantages, actor_train, {stage: old_logp, after: [actor_train]}]"
    settings = [f"algorithm.pipeline={listed}", f"policies.solver.train={str(trains).lower()}"]
    settings += ["models={proposer: {train: true}}", "policies.proposer.model=proposer"]
    graph = build_task_graph(load_config("grpo_self_play_quickstart", settings))
    assert all(graph[id].deps == (*updates, "proposer_actor_train") for id in ("old_logp", "proposer_old_logp"))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_model_s_mini_batches_count_prompts_of_which_its_policies_have_no_rows(shuffle):
    names = [("u0", "a"), ("u1", "b"), ("u2", "a"), ("u2", "b"), ("u3", "b"), ("u4", "a"), ("u5", "a"), ("u5", "a")]
    minis = []

    @stage(reads=["uid"], optional=[ORDINAL], writes=[], kind=Kind.MODEL_TRAIN, role=Role.ACTOR)
    def trains(c, samples, *, actor):
        minis.append([mini["uid"] for mini in mini_batches(c, samples, "actor", 0)])
        return samples

    settings = {"models": {"own": {"train": True, "mini_batch_size": 2, "shuffle": shuffle}}, "data": {"batch_size": 6}}
    config = RunConfig(name="x", policies={"a": {"model": "own"}, "b": {}}, **settings)
    model = OfModel(trains, contract_of(trains), "own", ("a",), ())
    for ranks in (1, 2):
        for rank in range(ranks):
            rows = [row for row in names if int(row[0][1]) % ranks == rank]
            layout = SimpleNamespace(dp_rank=rank, dp_size=ranks)
            c = StepContext(config, layout, None, None, None, sequences=None, step=1)
            model(c, Batch({}, {"uid": [u for u, _ in rows], "policy": [p for _, p in rows]}, size=len(rows)), own=None)
    whole, *parts = minis
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == [sorted(mini) for mini in whole]
    assert shuffle or whole == [["u0"], ["u2"], ["u4", "u5", "u5"]]


@pytest.mark.parametrize("training", [True, False])
def test_held_out_samples_have_their_own_sampling_even_if_it_equals_that_of_training(training):
    c = SimpleNamespace(config=RunConfig(name="x"))
    engines = [SimpleNamespace(open=lambda *a, name=name: opened.append(name)) for name in ("common", "own")]
    rollout, opened = RolloutRole(engines[0], None, [2], training_engine=engines[1]), []
    open_groups(c, rollout, c.config.rollout.sampling, 1, training=training).open()
    assert opened == ["own" if training else "common"]


@pytest.mark.parametrize("epochs", [1, 2])
def test_several_passes_over_the_samples_of_a_policy_need_log_probs_before_the_update(epochs):
    settings = [f"models={{proposer: {{train: true, ppo_epochs: {epochs}}}}}", "policies.proposer.model=proposer"]
    graph = build_task_graph(load_config("grpo_self_play_quickstart", settings))
    assert ("proposer_old_logp" in graph.order()) == (epochs > 1)
