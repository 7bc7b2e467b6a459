"""Groups of any number of samples, standing in any order, where a step counts prompts."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.run import RunConfig
from megarl.config.task import TEXT
from megarl.data.batch import Batch
from megarl.data.groups import ORDINAL
from megarl.data.versions import VERSION_FIELDS
from megarl.runtime.checkpoints import read_surplus, surplus_file
from megarl.runtime.context import Seeds
from megarl.runtime.stages import reward, rollout
from megarl.runtime.stages.rollout import SAMPLE_FIELDS
from megarl.runtime.stages.update import mini_batches
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics

#: Samples of each prompt of a batch, in the order of the data, and how their samples are mixed.
mixed = st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.randoms(use_true_random=False))


CONFIG = RunConfig(name="run")


def replica(sizes: list[int], shuffle: random.Random, rank: int, count: int) -> list[str]:
    """A replica's samples: prompts rank, rank + count, ... in the order of their first samples, the rest anywhere."""
    names = [f"{k}#0" for k in range(rank, len(sizes), count)]
    for k in range(rank, len(sizes), count):
        for i in range(1, sizes[k]):
            names.insert(shuffle.randint(names.index(f"{k}#0") + 1, len(names)), f"{k}#{i}")
    return names


def batch_of(names: list[str]) -> Batch:
    batch = Batch({"number": torch.arange(len(names))}, size=len(names))
    for field in SAMPLE_FIELDS:
        batch.set(field, batch["number"])
    batch.set("sample_id", names)
    batch.set("uid", [name.split("#")[0] for name in names])
    return batch


def worker(prompts: int, replicas: int, size: int, rank: int = 0, shuffle: bool = False) -> SimpleNamespace:
    actor = SimpleNamespace(mini_batch_size=size, shuffle=shuffle)
    config = SimpleNamespace(data=SimpleNamespace(batch_size=prompts, replay=None), training_of=lambda role: actor)
    layout = SimpleNamespace(dp_size=replicas, dp_rank=rank)
    return SimpleNamespace(config=config, layout=layout, seeds=Seeds(3), step=7)


@settings(max_examples=50, deadline=None)
@given(mixed, st.integers(1, 3), st.data())
def test_a_mini_batch_is_the_next_prompts_with_all_their_samples(groups, replicas, data):
    sizes, shuffle = groups
    sizes = sizes[: len(sizes) // replicas * replicas] or [1] * replicas
    size = replicas * data.draw(st.integers(1, len(sizes) // replicas))
    shares = [replica(sizes, shuffle, rank, replicas) for rank in range(replicas)]
    found = [list(mini_batches(worker(len(sizes), replicas, size), batch_of(names), "actor", 0)) for names in shares]
    count = len(sizes) // size
    assert {len(minis) for minis in found} == {count}
    for number in range(count):
        prompts = range(number * size, len(sizes) if number == count - 1 else (number + 1) * size)
        together = sorted(name for minis in found for name in minis[number]["sample_id"])
        assert together == sorted(f"{k}#{i}" for k in prompts for i in range(sizes[k]))
    for names, minis in zip(shares, found, strict=True):
        assert all([names[i] for i in mini["number"]] == mini["sample_id"] for mini in minis), "fields go with columns"


def shuffled(sizes: list[int], shuffle, size: int, replicas: int, epoch: int, ordinals: bool) -> list[list[str]]:
    """Names of the samples of each mini-batch, over all replicas, which hold prompts as they are dealt or by tokens."""
    minis: list[list[str]] = [[] for _ in range(len(sizes) // size)]
    for rank in range(replicas):
        names = replica(sizes, shuffle, rank, replicas)
        if ordinals:
            at = range(len(sizes) // 2) if rank == 0 else range(len(sizes) // 2, len(sizes))
            names = [name for k in at for name in replica(sizes, shuffle, k, len(sizes))]
        batch = batch_of(names)
        if ordinals:
            batch.set(ORDINAL, [int(name.split("#")[0]) for name in names])
        c = worker(len(sizes), replicas, size, rank, shuffle=True)
        parts = list(mini_batches(c, batch, "actor", epoch))
        assert len(parts) == len(minis)
        for mini, part in zip(minis, parts, strict=True):
            mini += part["sample_id"]
    return [sorted(mini) for mini in minis]


def test_shuffled_mini_batches_are_those_of_any_layout_and_differ_between_passes():
    shuffle, sizes, size = random.Random(0), [2, 1, 3, 2, 1, 2, 4, 1, 2, 2, 1, 3], 5
    one = shuffled(sizes, shuffle, size, 1, 0, False)
    assert sorted(name for mini in one for name in mini) == sorted(replica(sizes, shuffle, 0, 1))
    prompts = [{name.split("#")[0] for name in mini} for mini in one]
    assert [len(mini) for mini in prompts] == [5, 7], "prompts that do not divide are in the last one"
    assert not prompts[0] & prompts[1]
    for replicas, ordinals in ((2, False), (3, False), (2, True)):
        assert shuffled(sizes, shuffle, size, replicas, 0, ordinals) == one
    assert shuffled(sizes, shuffle, size, 2, 1, False) != one
    assert prompts[0] != {str(number) for number in range(size)}, "not the order of the data"


def test_samples_that_were_resampled_away_are_in_no_mini_batch():
    names = replica([2, 2, 2, 2], random.Random(0), 0, 1)
    batch = batch_of(names)
    batch.set("copies", torch.tensor([0, 2, 1, 0, 3, 0, 1, 1]))
    minis = list(mini_batches(worker(4, 1, 2), batch, "actor", 0))
    assert sorted(n for mini in minis for n in mini["number"].tolist()) == [1, 2, 4, 6, 7]


@settings(max_examples=25, deadline=None)
@given(mixed, st.integers(1, 3), st.integers(1, 3))
def test_what_was_left_over_is_read_by_any_number_of_replicas(tmp_path_factory, groups, before, now):
    (sizes, shuffle), folder = groups, tmp_path_factory.mktemp("checkpoint")
    shares = [replica(sizes, shuffle, rank, before) for rank in range(before)]
    for rank, names in enumerate(shares):
        layout = SimpleNamespace(dp_rank=rank, is_lead=True)
        for name, content in surplus_file(SimpleNamespace(surplus=batch_of(names), layout=layout)).items():
            (folder / name).write_bytes(content)
    for rank in range(now):
        layout = SimpleNamespace(dp_rank=rank, dp_size=now)
        mine = read_surplus(SimpleNamespace(layout=layout, config=CONFIG), folder, before)
        prompts = range(rank, len(sizes), now)
        assert mine["sample_id"] == [x for k in prompts for x in shares[k % before] if x.startswith(f"{k}#")]


def test_left_over_samples_of_an_older_version_are_refused(tmp_path):
    old = batch_of(["a#0", "a#1"]).drop(VERSION_FIELDS)
    old.set("weight_version", torch.tensor([4, 5]))
    (tmp_path / "surplus_0.safetensors").write_bytes(old.to_bytes())
    c = SimpleNamespace(config=CONFIG, layout=SimpleNamespace(dp_rank=0, dp_size=1))
    with pytest.raises(ConfigError, match=f"without {', '.join(VERSION_FIELDS)}, which this recipe needs"):
        read_surplus(c, tmp_path, 1)


def test_every_sample_of_a_prompt_has_its_greedy_score(monkeypatch: pytest.MonkeyPatch):
    scores = {"a": 3.0, "b": 5.0}
    samples = batch_of(["a#0", "b#0", "a#1", "b#1", "b#2"])
    for name in ("prompt_text", "answer", "data_source", "row"):
        samples.set(name, samples["uid"])
    samples.set("prompt_ids", samples["number"])
    monkeypatch.setattr(rollout, "generate", lambda c, rollout, prompts, sampling: prompts)
    monkeypatch.setattr(rollout, "_record_work", lambda c, samples: None)
    monkeypatch.setattr(reward, "submit", lambda scorer, samples: samples["uid"])
    monkeypatch.setattr(
        reward, "collect", lambda c, scorer, asked, samples: [{"overall": scores[uid]} for uid in asked]
    )
    sampling = SimpleNamespace(model_copy=lambda update: None)
    data = SimpleNamespace(image_key=None)
    config = SimpleNamespace(
        rollout=SimpleNamespace(sampling=sampling, replay_routes=False, replay_kept_tokens=False),
        data=data,
        has_turns=False,
        task=TEXT,
    )
    c = SimpleNamespace(config=config, metrics=Metrics())
    assert rollout.greedy_rollout(c, samples, rollout=None, scorer=None)["greedy_score"].tolist() == [
        3.0,
        5.0,
        3.0,
        5.0,
        5.0,
    ]
    assert c.metrics.result()["critic/greedy_score/mean"] == 4.0


@settings(max_examples=25, deadline=None)
@given(mixed, st.integers(1, 3), st.data())
def test_metrics_of_groups_are_those_of_all_groups_of_two_and_more_on_any_number_of_replicas(groups, replicas, data):
    sizes, shuffle = groups
    sizes = sizes[: len(sizes) // replicas * replicas] or [1] * replicas
    scores = {f"{k}#{i}": data.draw(st.sampled_from([0.0, 0.25, 1.0])) for k, n in enumerate(sizes) for i in range(n)}

    found = Metrics()
    for rank in range(replicas):
        names = replica(sizes, shuffle, rank, replicas)
        samples = batch_of(names)
        samples.set("score", torch.tensor([scores[name] for name in names]))
        context = SimpleNamespace(metrics=Metrics())
        reward.record_groups(context, samples, [scores[name] for name in names])
        found.merge(context.metrics)

    whole = [[scores[f"{k}#{i}"] for i in range(n)] for k, n in enumerate(sizes) if n > 1]
    expected = {
        "critic/score/group_std": [float(torch.tensor(group, dtype=torch.float64).std()) for group in whole],
        "critic/groups/zero_std": [len(set(group)) == 1 for group in whole],
        "critic/groups/all_correct": [set(group) == {1.0} for group in whole],
        "critic/groups/none_correct": [1.0 not in group for group in whole],
    }
    means = {name: sum(values) / len(values) for name, values in expected.items() if values}
    assert found.result() == pytest.approx(means, abs=1e-12)
