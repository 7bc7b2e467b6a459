"""Replay: groups keep log-probs, versions and advantages; neither replicas nor a resume change what a step draws."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megarl.algorithms.objective import TokenInputs, source_metrics
from megarl.config.data import ReplayConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.versions import version_values
from megarl.rollout.seeds import Seeds
from megarl.runtime.replay import ReplayStore
from megarl.runtime.stages.update import mini_batches
from megarl.system.metrics import Metrics
from tests.runtime import harness

PROMPTS, N = 4, 2


class Replicas:
    """The group of several replicas in one process: each gives its part, in turn, and gets all parts."""

    def __init__(self) -> None:
        self.stores: list[ReplayStore] = []

    def all_gather_json(self, mine: list) -> list:
        return [[list(entry) for entry, _ in store.groups] for store in self.stores]


def fresh(step: int, replica: int, replicas: int) -> Batch:
    """This replica's groups of a step; group 3 has no signal."""
    numbers = [number for number in range(PROMPTS) if number % replicas == replica for _ in range(N)]
    ids = Jagged.from_list([[step, number] for number in numbers], dtype=torch.int64)
    signs = [1.0 if place % N else -1.0 for place in range(len(numbers))]
    values = torch.tensor([[0.0 if k == 3 else sign * (k + 1)] * 2 for k, sign in zip(numbers, signs, strict=True)])
    fields = {
        "response_ids": ids,
        "response_mask": ids.like(torch.ones_like(ids.values, dtype=torch.bool)),
        "rollout_logp": ids.like(-ids.values.float() / 7),
        "advantages": ids.like(values.view(-1)),
        "score": torch.tensor(signs),
        **version_values([[[step - 1, 2]]] * len(numbers)),
    }
    return Batch(fields, {"uid": [f"train-{step}-{number}" for number in numbers]})


def context(
    step: int, replica: int, stores: list[ReplayStore], group: Replicas, *, metrics: Metrics, **actor: object
) -> SimpleNamespace:
    layout = SimpleNamespace(dp_group=group, dp_rank=replica, dp_size=len(stores), rank=replica, is_lead=True)
    data = SimpleNamespace(batch_size=PROMPTS, replay=stores[0].settings)
    config = SimpleNamespace(data=data, training_of=lambda role: SimpleNamespace(**actor))
    return SimpleNamespace(step=step, layout=layout, config=config, seeds=Seeds(3), metrics=metrics)


def walk(stores: list[ReplayStore], group: Replicas, steps: range) -> tuple[list[list], list[Metrics]]:
    """What each step trains on, over all replicas: uid, log-probs and advantages by the number of the group."""
    whole, metrics = [], []
    for step in steps:
        rows = []
        bag = Metrics()
        for replica, store in enumerate(stores):
            joined = store.joined(context(step, replica, stores, group, metrics=bag), fresh(step, replica, len(stores)))
            columns = joined["ordinal"], joined["uid"], joined["rollout_logp"].unbind(), joined["advantages"].unbind()
            rows += [(n, uid, logp.tolist(), a.tolist()) for n, uid, logp, a in zip(*columns, strict=True)]
        whole.append(sorted(rows))
        metrics.append(bag)
    return whole, metrics


def stores_of(count: int, **settings) -> tuple[list[ReplayStore], Replicas]:
    group = Replicas()
    group.stores += [ReplayStore(ReplayConfig(**settings)) for _ in range(count)]
    return group.stores, group


@pytest.mark.parametrize("priority", ["uniform", "recent", "signal"])
def test_a_resumed_run_replays_what_the_undisturbed_one_does(priority):
    settings = {"share": 0.5, "max_age": 3, "capacity": 8, "priority": priority}
    stores, group = stores_of(1, **settings)
    whole, metrics = walk(stores, group, range(1, 8))
    assert len(whole[0]) == PROMPTS * N, "nothing is stored yet"
    for step, rows in enumerate(whole[1:], 2):
        replayed = [row for row in rows if "@" in row[1]]
        assert len(rows) - len(replayed) == PROMPTS * N
        for _, uid, logp, advantages in replayed:
            _, at, number = uid.partition("@")[0].split("-")
            assert 0 < step - int(at) <= 3, "the weights before step `at` are at most max_age steps older"
            assert logp == pytest.approx([-int(at) / 7, -int(number) / 7])
            assert number != "3"
            assert abs(advantages[0]) == int(number) + 1, "of the original group"
    assert metrics[6].result()["replay/groups"] == 4
    assert 1 <= metrics[6].result()["replay/age"] <= 3
    assert metrics[6].result()["replay/samples"] == 4 * N
    assert 1 <= metrics[6].result()["replay/signal"] <= 3
    first, first_group = stores_of(1, **settings)
    walk(first, first_group, range(1, 4))
    resumed, resumed_group = stores_of(1, **settings)
    resumed[0].load([first[0].to_bytes()], 0, 1)
    assert walk(resumed, resumed_group, range(4, 8))[0] == whole[3:]


def test_capacity_and_age_drop_the_oldest_groups():
    stores, group = stores_of(1, capacity=4, max_age=9)
    walk(stores, group, range(1, 4))
    assert [(entry.step, entry.number) for entry, _ in stores[0].groups] == [(2, 2), (3, 0), (3, 1), (3, 2)]
    stores, group = stores_of(1, max_age=1)
    walk(stores, group, range(1, 4))
    assert {entry.step for entry, _ in stores[0].groups} == {2, 3}


def test_groups_that_a_run_with_other_fields_stored_are_dropped_with_a_message(capsys):
    stores, group = stores_of(1, share=0.5, max_age=9)
    walk(stores, group, range(1, 3))
    stores[0].groups = [(entry, rows.drop(["score"])) for entry, rows in stores[0].groups]
    (rows,), (metrics,) = walk(stores, group, range(3, 4))
    assert len(rows) == PROMPTS * N
    assert metrics.result()["replay/groups"] == 0
    output = capsys.readouterr().out
    assert "replay: 6 stored groups of a run with other settings dropped" in output
    assert "fields that only they or only new samples have: score" in output
    assert walk(stores, group, range(4, 5))[1][0].result()["replay/groups"] == 3


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_mini_batch_gets_its_share_of_the_replayed_groups_on_any_number_of_replicas(shuffle):
    def minis(replicas: int, step: int, epoch: int) -> list[list[str]]:
        stores, group = stores_of(replicas, share=0.6, max_age=9)
        walk(stores, group, range(1, step))
        whole: list[list[str]] = [[], []]
        for replica, store in enumerate(stores):
            c = context(step, replica, stores, group, metrics=Metrics(), mini_batch_size=2, shuffle=shuffle)
            samples = store.joined(c, fresh(step, replica, replicas))
            for mini, part in zip(whole, mini_batches(c, samples, "actor", epoch), strict=True):
                mini += part["uid"]
        return [sorted(mini) for mini in whole]

    # At step 2 fewer groups are stored than a step replays, of which a random order may put all into one mini-batch.
    for step, replayed in ((2, [2, 1]), (4, [3, 3]))[shuffle:]:
        one = minis(1, step, 0)
        assert [sum("@" in uid for uid in mini) for mini in one] == [n * N for n in replayed]
        assert [sum("@" not in uid for uid in mini) for mini in one] == [2 * N, 2 * N]
        assert minis(2, step, 0) == one
        assert (minis(1, step, 1) != one) == shuffle


def test_ratios_of_a_source_are_those_of_its_trained_tokens_with_known_log_probs():
    new = torch.tensor([-1.0, -2.0, -0.5, -0.25, math.nan, -3.0])
    old = torch.tensor([-1.5, -1.0, -0.5, -9.0, -1.0, -3.5])
    trained = torch.tensor([True, True, True, True, False, True])
    of = {"replay": [0, 1, 4], "experts": [2, 3, 5]}
    masks = {name: torch.tensor([place in places for place in range(6)]) for name, places in of.items()}
    inputs = TokenInputs(
        *(torch.tensor([0, 6]), torch.zeros(6), trained, trained),
        replayed=masks["replay"],
        expert_mask=masks["experts"],
        outside=torch.tensor([place == 3 for place in range(6)]),
    )
    found = source_metrics(new, old, trained, inputs).result()
    for source, places in {"replay": [0, 1], "experts": [2, 5]}.items():
        ratios = [math.exp(float(new[place] - old[place])) for place in places]
        assert found[f"{source}/ppo_kl"] == pytest.approx(-sum(map(math.log, ratios)) / 2)
        assert found[f"{source}/ratio_mean"] == pytest.approx(sum(ratios) / 2)
        assert found[f"{source}/ratio_max"] == pytest.approx(max(ratios))
    assert len(found) == 6
    assert not [*source_metrics(new, old, trained & False, inputs)]


@pytest.mark.procs
@pytest.mark.timeout(600)
def test_a_run_that_resumes_replays_the_same_groups(tmp_path):
    recipe = harness.write_recipe(tmp_path)
    settings = [
        *("data.replay={share: 0.5, max_age: 3}", "rollout_correction.preset=ppo_is_bypass", "sft.steps=0"),
        *("cluster.nproc=1", "trainer.export_hf=false", "validation.every=0", "trainer.steps=4"),
        "actor.mini_batch_size=2",
    ]
    whole = harness.train(recipe, tmp_path / "run", *settings)
    assert [whole[step]["replay/groups"] for step in (1, 2, 3, 4)] == [0, 4, 4, 4]
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    assert harness.train(recipe, tmp_path / "run", *settings, f"trainer.resume={checkpoint}") == whole
    two = harness.train(recipe, tmp_path / "two", *settings, f"trainer.resume={checkpoint}", "cluster.nproc=2")
    for step in two:  # two ranks add in another order
        assert two[step] == pytest.approx({name: whole[step][name] for name in two[step]}, rel=1e-3, abs=1e-4)
