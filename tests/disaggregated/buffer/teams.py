"""A pipeline over three teams, with a buffer that lives in the test's process: replicas are threads.

rollout (team train) -> pick (train, resamples) -> ref_logp (team ref), values (team critic) -> learn (train)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megarl.config.model import ParallelConfig
from megarl.config.run import RunConfig
from megarl.dag.executor import Executor
from megarl.dag.graph import TaskGraph
from megarl.dag.pipeline import Pipeline
from megarl.dag.placement import Handover, Placement, TeamPlan, place
from megarl.dag.stage import Kind, Role, stage
from megarl.data.batch import Batch, Jagged
from megarl.data.wire import Block, Span
from megarl.disaggregated.buffer.channel import TeamChannel
from megarl.disaggregated.buffer.core import Core
from megarl.system.metrics import Metrics

N = 3  # samples of a group


@stage(reads=["prompt_ids", "uid"], writes=["response_ids", "sample_id"], role=Role.ROLLOUT, resamples=True)
def rollout(c, prompts):
    """Sample i of prompt k is k * i + 1 tokens; the samples of a group do not stand together."""
    samples = Batch.concat([prompts] * N)
    number = [i // len(prompts) for i in range(len(samples))] if len(prompts) else []
    first = [int(ids[0]) for ids in samples["prompt_ids"].unbind()]
    lengths = [k * i + 1 for k, i in zip(first, number, strict=True)]
    samples.set("response_ids", Jagged.from_list([[n] * n for n in lengths], dtype=torch.int64))
    samples.set("sample_id", [f"{uid}#{i}" for uid, i in zip(samples["uid"], number, strict=True)])
    return samples


@stage(reads=["uid", "sample_id"], writes=[], may_write=["note"], role=Role.DYNAMIC_SAMPLING, resamples=True)
def pick(c, samples):
    """Drop the longest sample of every group; leave a note in even steps."""
    kept = samples.select([i for i, id in enumerate(samples["sample_id"]) if not id.endswith(f"#{N - 1}")])
    if c.step % 2 == 0:
        kept.set("note", [{"id": id} for id in kept["sample_id"]])
    return kept


@stage(reads=["response_ids"], writes=["ref_logp"], kind=Kind.MODEL_INFERENCE, role=Role.REFERENCE)
def ref_logp(c, samples):
    """-1, -2, ... at the tokens of a response, in their number."""
    ids = samples["response_ids"]
    samples.set("ref_logp", ids.like(-ids.values.float()))
    return samples


@stage(
    reads=["response_ids", "prompt_ids", "ref_logp"],
    optional=["note"],
    writes=["values"],
    kind=Kind.MODEL_INFERENCE,
    role=Role.CRITIC,
)
def values(c, samples):
    """Uses what two other teams made, at different times."""
    ids = samples["response_ids"]
    noted = 0.5 if "note" in samples else 0.0
    samples.set("values", ids.like(2 * samples["ref_logp"].values + noted))
    return samples


@stage(
    reads=["uid", "sample_id", "response_ids", "ref_logp", "values"],
    writes=["loss"],
    role=Role.ACTOR,
)
def learn(c, samples):
    """Sum over the tokens of a sample."""
    pairs = zip(samples["ref_logp"].unbind(), samples["values"].unbind(), strict=True)
    samples.set("loss", torch.tensor([float(a.sum() + b.sum()) for a, b in pairs]))
    return samples


def pipeline() -> TaskGraph:
    """The graph of this module."""
    p = Pipeline("teams")
    for one in (rollout, pick, ref_logp, values, learn):
        p.add(one)
    return p.build()


def placed(graph: TaskGraph, train: int, ref: int, critic: int, share: str = "dealt", tp: int = 1) -> Placement:
    """Teams of so many replicas."""
    teams = {
        "train": {"roles": ["actor", "rollout"], "devices": train * tp},
        "ref": {"roles": ["reference"], "devices": ref * tp},
        "critic": {"roles": ["critic"], "devices": critic * tp},
    }
    config = RunConfig(
        name="x",
        actor={"parallel": {"tp": tp}},
        cluster={"nproc": (train + ref + critic) * tp},
        placement={"teams": teams, "share": share},
    )
    return place(graph, config)


def prompts(count: int, replica: int = 0, replicas: int = 1) -> Batch:
    """A replica's share of `count` prompts; the first token of a prompt is its number."""
    mine = range(replica, count, replicas)
    return Batch(
        {"prompt_ids": Jagged.from_list([[k] * (k + 1) for k in mine], dtype=torch.int64)},
        {"uid": [f"p{k}" for k in mine]},
        size=len(mine),
    )


class HereClient:
    """What `BufferClient` does, on a core in this process."""

    def __init__(self, core: Core, change: threading.Condition, team: str, rank: int) -> None:
        self.core, self.change, self.team, self.rank = core, change, team, rank

    def give(self, step: int, key: str, groups: Sequence[Any], payloads: Iterable[Span]) -> int:
        """At once."""
        copies: dict[Block, Block] = {}  # the batch may change after this
        refs = []
        for block, start, stop in payloads:
            if block not in copies:
                copies[block] = Block((np.frombuffer(bytes(block), dtype=np.uint8),))
            refs.append(Span(copies[block], start, stop))
        with self.change:
            self.core.give(self.team, self.rank, step, key, groups, refs)
            self.change.notify_all()
        return sum(map(len, copies))

    def assignment(self, step: int, samples: str, part: int) -> Any:
        """As soon as it is there."""
        return self._wait(lambda: self.core.assignment(self.team, step, samples, part))

    def fetch(self, step: int, key: str, uids: Sequence[str]) -> Any:
        """As soon as they are there."""
        return self._wait(lambda: self.core.fetch(self.team, step, key, uids))

    def done(self, step: int) -> None:
        """At once."""
        with self.change:
            self.core.done(self.team, self.rank, step)

    def _wait(self, ask: Any) -> Any:
        with self.change:
            assert self.change.wait_for(lambda: ask() is not None, timeout=120), "nobody gave"
            return ask()


def walk(graph: TaskGraph, placement: Placement, core: Core, count: int, steps: Sequence[int]) -> dict[str, list]:
    """All workers of all teams, each in a thread; by team, what every rank had after each step.

    Raises:
        BaseException: the first error of any of them.
    """
    change, errors = threading.Condition(), list[BaseException]()
    ended: dict[str, list] = {team.name: [None] * team.devices for team in placement.teams}

    def work(team: TeamPlan, rank: int) -> None:
        size = team.parallel.model_parallel_size
        client: Any = HereClient(core, change, team.name, rank)
        dealt = core._share == "dealt"
        channel = TeamChannel(graph, placement, client, rank // size, rank % size == 0, dealt=dealt)
        executor = Executor(graph, {}, team.nodes, channel)
        batches = []
        try:
            for step in steps:
                first = prompts(count, rank // size, team.replicas) if team.name == "train" else None
                context = SimpleNamespace(step=step, metrics=Metrics())
                batches.append((executor.run(context, first), context.metrics))
            ended[team.name][rank] = batches
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=(team, rank)) for team in placement.teams for rank in range(team.devices)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return ended


def by_hand(train: int = 1, ref: int = 1, critic: int = 1, tp: int = 1) -> Placement:
    """Teams without a graph: `train` hands samples to both others, `ref` hands something back."""
    sizes, first = {"train": train, "ref": ref, "critic": critic}, 0
    teams = []
    for name, replicas in sizes.items():
        teams.append(TeamPlan(name, (Role.ACTOR,), replicas * tp, first, ParallelConfig(tp=tp), (name,)))
        first += replicas * tp
    return Placement(
        tuple(teams),
        (
            Handover("rollout", "train", ("response_ids",), ("critic", "ref"), "rollout"),
            Handover("ref_logp", "ref", ("ref_logp",), ("train",), "rollout"),
        ),
    )
