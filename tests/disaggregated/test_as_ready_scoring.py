"""Rewards that take long do not keep a replica from generating, where samples go to training as they get ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.run import RunConfig
from megarl.dag.messages import SavesStep
from megarl.data.batch import Batch
from megarl.disaggregated import as_ready_loop as flow
from megarl.disaggregated import call_batcher
from megarl.disaggregated.as_ready_loop import AsReadyLoop
from megarl.disaggregated.buffer.channel import FinishedGroups
from megarl.disaggregated.call_batcher import CallBatcher
from megarl.runtime.stages.reward import PENDING, Pending
from megarl.system.comm import WorkerGroup
from megarl.system.metrics import Metrics

LIMIT_S = 30.0


class Stream:
    """Draws a token of every group at a time; group k is over after `lengths[k]` tokens."""

    free, is_async = 8, False

    def __init__(self, lengths: dict[int, int], after_token: Callable[[int], None]) -> None:
        self._left, self._after, self.tokens = dict(lengths), after_token, 0

    @property
    def busy(self) -> bool:
        return bool(self._left)

    def open(self) -> None: ...

    def interrupt(self) -> None: ...

    def end(self) -> None:
        """All groups are over with the next token."""
        self._left = dict.fromkeys(self._left, 1)

    def partial(self) -> dict[int, Any]:
        return {}

    def wait(self, enough: Callable[[], bool]) -> list[tuple[int, list[Any]]]:
        while self._left and not enough():
            self.tokens += 1
            self._after(self.tokens)
            self._left = {number: left - 1 for number, left in self._left.items()}
            if over := [number for number, left in self._left.items() if not left]:
                self._left = {number: left for number, left in self._left.items() if left}
                return [(number, []) for number in over]
        return []


class Run:
    """A replica of its own, whose rewards come when `rewards[number]` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, partial: bool = False) -> None:
        order = {"max_staleness": 1, "order": "as_ready", "partial": partial}
        config = RunConfig.model_validate({"name": "x", "trainer": {"save_every": 1}, "async": order})
        alone = WorkerGroup.alone()
        layout = SimpleNamespace(mp_group=alone, world=alone, is_lead=True, rank=0, dp_rank=0, dp_size=1)
        self.wanted: Callable[[], bool] = lambda: False
        buffer = SimpleNamespace(
            has_arrived=lambda name: self.wanted(),
            flow_state=lambda: {"next": 5},
        )
        team = SimpleNamespace(plan=SimpleNamespace(nodes=["rollout"]))
        rollout = SimpleNamespace(generating=lambda context, step: nullcontext(), experts=None)
        context = SimpleNamespace(metrics=Metrics(), step=1)
        loader = SimpleNamespace(go_to=lambda number: None, prepare=lambda numbers: None)
        c: Any = SimpleNamespace(
            config=config,
            layout=layout,
            team=team,
            buffer=buffer,
            rollout=rollout,
            context=context,
            fleet=None,
            loader=loader,
            mail=SimpleNamespace(read_together=lambda name: SavesStep(1, saves=name == "saves/1").encode()),
        )
        self.rewards: dict[int, Future[Any]] = {0: Future(), 1: Future()}
        self.told: list[tuple[int, int]] = []  # groups handed over, and how many tokens had been drawn by then
        self.calls: list[list[int]] = []  # groups of each call
        self.asked: list[int] = []  # prompts that each call asks for
        channel: Any = SimpleNamespace(aside={}, give=self._give, collect=self._collect, swap=self._swap)
        submits: Any = SimpleNamespace(run=self._submit, graph={"rollout": None})
        waits: Any = SimpleNamespace(run=self._wait)
        checkpoints: Any = SimpleNamespace(write_part=lambda version, last, files: files())
        self.channel = channel
        self.steps = AsReadyLoop(c, submits, waits, channel, SimpleNamespace(), checkpoints, None)  # type: ignore[arg-type]
        self.steps._batcher = CallBatcher(8, 8)
        self.steps._prompts = {number: Batch({}, {"uid": [number]}) for number in self.rewards}
        self.steps._versions = dict.fromkeys(self.rewards, 0)
        monkeypatch.setattr(flow, "_LOOK_S", 0.0)
        monkeypatch.setattr(flow, "post_loader_place", lambda c: None)
        monkeypatch.setattr(flow, "samples_of", lambda role, prompts, drawn, sampling: prompts)
        monkeypatch.setattr(flow, "refuse_broken_logprobs", lambda batch: None)
        monkeypatch.setattr(flow, "record_samples", lambda c, batch: c.metrics.sum("drawn", len(batch)))

    def draw(self, lengths: dict[int, int], after_token: Callable[[int], None]) -> Stream:
        self.stream = Stream(lengths, after_token)
        self.steps._generate(self.stream, 0)  # type: ignore[arg-type]
        return self.stream

    def _give(self, context: Any, node: Any, batch: Batch) -> None:
        self.channel.aside["rollout"] = batch

    def _submit(self, context: Any, batch: Batch) -> Batch:
        batch.set(PENDING, [Pending(self.rewards[n], 0) for n in batch["uid"]])
        return batch

    def _wait(self, context: Any, batch: Batch) -> Batch:
        for number in batch["uid"]:
            self.rewards[number].result(timeout=LIMIT_S)
        return batch

    def _collect(self, numbers: list[int], batch: Batch, metrics: Metrics) -> FinishedGroups:
        aside, self.channel.aside = self.channel.aside, {}
        assert aside["rollout"]["uid"] == numbers, "each group with what was put aside of it"
        return FinishedGroups(numbers, [], aside, metrics)

    def _swap(
        self, context: Any, ready: list[FinishedGroups], rejected: list[int], version: int, most: int
    ) -> list[int]:
        assert all(some.metrics.result() == {"drawn": len(some.numbers)} for some in ready)
        numbers = [number for some in ready for number in some.numbers]
        self.told += [(number, self.stream.tokens) for number in numbers]
        self.calls += [numbers] if numbers else []
        self.asked.append(most)
        return []


def test_drawing_goes_on_while_rewards_are_computed(monkeypatch):
    run = Run(monkeypatch)

    def after(token: int) -> None:
        if token == 6:
            run.rewards[0].set_result(1.0)
            run.rewards[1].set_result(1.0)

    run.draw({0: 2, 1: 9}, after)
    assert run.told == [(0, 6), (1, 9)], "as soon as its rewards are there"


def test_rewards_that_come_last_are_waited_for(monkeypatch):
    run = Run(monkeypatch)
    run.rewards[1].set_result(1.0)
    waits = run.steps.scored.run

    def come(context: Any, batch: Batch) -> Batch:
        if not run.rewards[0].done():
            run.rewards[0].set_result(1.0)
        return waits(context, batch)

    run.steps.scored.run = come  # type: ignore[method-assign]
    run.draw({0: 2, 1: 9}, lambda token: None)
    assert run.told == [(0, 9), (1, 9)], "nothing else is left to be drawn"


def test_on_servers_a_replica_looks_for_meetings_while_only_rewards_are_left(monkeypatch):
    run, looks = Run(monkeypatch), 0
    run.rewards[1].set_result(1.0)
    run.stream = Stream({0: 2, 1: 9}, lambda token: None)
    run.stream.is_async = True
    wait = run.stream.wait

    def look(enough: Callable[[], bool]) -> list[tuple[int, list[Any]]]:
        nonlocal looks
        looks += not run.stream.busy
        if looks == 3:
            run.rewards[0].set_result(1.0)
        return wait(enough)

    run.stream.wait = look  # type: ignore[method-assign]
    waits = run.steps.scored.run

    def arrived(context: Any, batch: Batch) -> Batch:
        assert all(run.rewards[number].done() for number in batch["uid"]), "it blocks, and misses a meeting"
        return waits(context, batch)

    run.steps.scored.run = arrived  # type: ignore[method-assign]
    run.steps._generate(run.stream, 0)  # type: ignore[arg-type]
    assert (looks, run.told) == (3, [(0, 9), (1, 9)])


def test_an_interrupt_does_not_wait_for_rewards_and_a_checkpoint_does(monkeypatch):
    run = Run(monkeypatch, partial=True)
    run.wanted = lambda: run.stream.tokens >= 4
    stream = run.draw({0: 2, 1: 1_000_000}, lambda token: None)
    assert stream.tokens < 1_000_000
    assert run.told == []
    saved: list[Any] = []
    monkeypatch.setattr(
        flow,
        "files_of_flow",
        lambda c, version, under_way, partials, carried: saved.append(([*run.told], under_way)) or {},
    )
    run.rewards[0].set_result(1.0)
    run.steps._save(1, stream)  # type: ignore[arg-type]
    assert saved == [([(0, stream.tokens)], {1: 0})], "group 0 is put, group 1 under way"


def test_what_is_finished_is_put_off_and_handed_over_in_one_call_when_nothing_is_drawn(monkeypatch):
    run = Run(monkeypatch)
    put_off(run)
    run.draw({0: 2, 1: 9}, lambda token: None)
    assert (run.calls, run.told) == ([[0, 1]], [(0, 9), (1, 9)])


def test_what_was_put_off_is_handed_over_before_the_weights_change(monkeypatch):
    run = Run(monkeypatch, partial=True)
    put_off(run)
    run.wanted = lambda: run.stream.tokens >= 4
    run.draw({0: 2, 1: 1_000_000}, lambda token: None)
    assert run.told == [(0, run.stream.tokens)]


def test_the_time_that_a_call_is_put_off_ends_while_drawing_goes_on(monkeypatch):
    run = Run(monkeypatch)
    put_off(run)
    monkeypatch.setattr(call_batcher, "_LONGEST_S", 0.1)
    end = time.monotonic() + LIMIT_S

    def after(token: int) -> None:
        time.sleep(0.001)
        if run.told:
            run.stream.end()
        assert time.monotonic() < end, "it is handed over when all is drawn, and never before"

    run.draw({0: 2, 1: 1_000_000}, after)
    assert run.calls == [[0], [1]]


def test_a_stretch_begins_with_prompts_for_empty_places_and_with_none_in_hand(monkeypatch):
    run = Run(monkeypatch)
    run.steps._batcher = CallBatcher(8, 16)
    run.stream = Stream({}, lambda token: None)
    run.stream.free = 8 * run.steps.c.config.rollout.sampling.n
    run.steps._batcher.begin(-1e6)
    put_off(run)
    run.steps._admit(run.stream, 0)  # type: ignore[arg-type]
    assert run.asked == [8]


def put_off(run: Run) -> None:
    """The scores are there, and the stretch before was long, so that a call may be put off."""
    for reward in run.rewards.values():
        reward.set_result(1.0)
    run.steps._batcher.begin(time.monotonic() - 1e6)
