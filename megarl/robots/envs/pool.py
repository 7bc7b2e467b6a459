"""A pool of simulator processes: each slot plays one episode at a time, and all slots run in parallel.

    begin(slot, task, trial)     begin an episode            -> Observation
    act(slot, actions)           execute one policy call     -> Outcome
    expert(slot)                 request the expert's action -> Advice
    answers(wait_s)              return the answers that have arrived, by slot; a Failure replaces an answer

A process that dies, hangs, or sends an invalid answer is replaced. Its episode is replayed from the start with its
recorded actions, up to `retries` times. If the replay has the same answers, the caller does not notice. Otherwise the
slot's answer is a Failure, and the episode is discarded.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.robots.envs.answers import Advice, Answer, Failure, PoolCounts
from megarl.robots.envs.episodes import SlotEpisode
from megarl.robots.envs.messages import check_answer
from megarl.robots.envs.opening import BEAT_S, first_answer, pool_error, readable
from megarl.robots.envs.process import SimulatorProcess
from megarl.robots.envs.settings import SimulatorSettings
from megarl.robots.simulators.protocol import Observation, Outcome, Recording
from megarl.system.errors import count
from megarl.system.plain import Malformed
from megarl.system.processes import how_it_ended
from megarl.system.tracing import beat

_EXIT_S = 2.0  # seconds in which processes may end by themselves before they are killed


@dataclass
class _Slot:
    """One process of the pool."""

    process: SimulatorProcess
    episode: SlotEpisode | None = None
    # number of this process's answers in this episode; less than the slot's while the process replays earlier calls
    played: int = 0
    failures: int = 0  # failures of this slot's processes since the last finished or dropped episode
    used: bool = False  # whether an episode has been started in this slot

    @property
    def awaits_answer(self) -> bool:
        return self.episode is not None and self.episode.awaits_answer


class SimulatorPool:
    """A pool of simulator processes, one for each slot; a process plays one episode at a time.

    Args:
        settings: the simulator, and the number of processes.
        where: dotted path of the recipe's section with `settings`, for messages.
        cuda_device: this rank's CUDA device, as `settings.egl_devices` numbers it; None: the rank has none.

    Attributes:
        together: false, because each episode in flight is stepped independently of the others.
        settings: the argument `settings`.
        tasks: available tasks, by name.
        counts: counters so far.
    """

    together = False

    def __init__(self, settings: SimulatorSettings, *, where: str = "env", cuda_device: int | None = None) -> None:
        settings.check(where)
        self.settings, self._where, self._cuda_device = settings, where, cuda_device
        self.counts = PoolCounts()
        self._slots: list[_Slot] = []
        try:
            for _ in range(settings.workers):
                self._slots.append(_Slot(self._start()))
            self.tasks = first_answer(self._slots[0].process, settings, where)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SimulatorPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def slots(self) -> range:
        """Numbers of the slots."""
        return range(len(self._slots))

    @property
    def busy(self) -> list[int]:
        """The numbers of the slots that have not answered yet."""
        return [number for number, slot in enumerate(self._slots) if slot.awaits_answer]

    def begin(self, slot: int, task: str, trial: int, record: Recording | None = None) -> None:
        """Begin an episode in a slot; an unfinished episode of the slot is dropped.

        With `record` the simulator renders every environment step, and the episode's last Outcome has a clip.
        """
        it = self._free(slot)
        if it.episode is not None:
            it.failures = 0
        assert 0 <= trial < self.tasks[task].trials, f"{task} has no trial {trial}"
        it.episode, it.played, it.used = SlotEpisode(task, trial, record=record), 0, True
        self._send_next_call(it)

    def act(self, slot: int, actions: NDArray[Any]) -> None:
        """Execute a chunk of actions [K, D] in the slot's unfinished episode."""
        it = self._free(slot)
        assert it.episode is not None, f"slot {slot} plays no episode"
        chunk = np.array(actions, np.float32)
        task = self.tasks[it.episode.task]
        shape = list(chunk.shape)
        assert shape == [len(chunk), task.action_dim], f"actions are {shape}, of {task.name} [K, {task.action_dim}]"
        if not np.isfinite(chunk).all():
            raise ValueError(f"{task.name}, trial {it.episode.trial}: the policy's actions are not finite")
        it.episode.chunks.append(chunk)
        self._send_next_call(it)

    def expert(self, slot: int) -> None:
        """Request the scripted expert's action in the current state of the slot's episode."""
        it = self._free(slot)
        assert it.episode is not None, f"slot {slot} plays no episode"
        it.episode.advice = True
        self._send_next_call(it)

    def answers(self, wait_s: float) -> dict[int, Answer]:
        """Wait up to `wait_s` seconds for answers, and return those that have arrived, by slot.

        A slot answers every call once. After a final Outcome, or a Failure, it is idle.
        """
        until = time.monotonic() + wait_s
        while True:
            answers = self._collect(until)
            beat()
            if answers or not self.busy or time.monotonic() >= until:
                return answers

    def abandon(self) -> None:
        """Wait until all processes have answered their calls, without using the answers."""
        while self.busy:
            self.answers(BEAT_S)

    def close(self) -> None:
        """End all processes."""
        for slot in self._slots:
            slot.process.ask({"call": "close"}, [])
        until = time.monotonic() + _EXIT_S
        for slot in self._slots:
            slot.process.wait(max(0.0, until - time.monotonic()))
            slot.process.kill()
        self._slots = []

    def _start(self) -> SimulatorProcess:
        return SimulatorProcess(self.settings, self._where, self._cuda_device)

    def _free(self, number: int) -> _Slot:
        slot = self._slots[number]
        assert not slot.awaits_answer, f"slot {number} has not answered its last call"
        return slot

    def _send_next_call(self, slot: _Slot) -> None:
        """Send the slot's process the next call of its episode, unless it is still working on one."""
        episode = slot.episode
        if episode is None or slot.process.waiting:
            return
        if slot.played == 0:
            record = None if episode.record is None else dataclasses.asdict(episode.record)
            header = {"call": "begin", "task": episode.task, "trial": episode.trial, "record": record}
            slot.process.ask(header, ["construct", "reset"])
        elif slot.played <= len(episode.chunks):
            slot.process.ask({"call": "step"}, ["step"], {"actions": episode.chunks[slot.played - 1]})
        elif episode.advice:
            slot.process.ask({"call": "expert"}, ["expert"])

    def _limit(self, slot: _Slot) -> tuple[str, float]:
        """Return the recipe key of the deadline for the current call, and its seconds."""
        key = "construct_s" if slot.process.waiting[0] in ("open", "construct") else "answer_s"
        return f"{self._where}.{key}", getattr(self.settings, key)

    def _collect(self, until: float) -> dict[int, Answer]:
        """Wait for messages, at the latest until `until` or the first deadline; return the slots' answers."""
        busy = {number: self._slots[number] for number in self.busy}
        ends = [slot.process.since + self._limit(slot)[1] for slot in busy.values()]
        now = time.monotonic()
        sockets = [slot.process.socket for slot in busy.values()]
        ready = readable(sockets, min([until, now + BEAT_S, *ends]) - now) if busy else []
        answers = {}
        for number, slot in busy.items():
            answer = self._read(slot) if slot.process.socket in ready else self._in_time(slot)
            if answer is not None:
                answers[number] = answer
        return answers

    def _in_time(self, slot: _Slot) -> Answer | None:
        key, seconds = self._limit(slot)
        if time.monotonic() - slot.process.since <= seconds:
            return None
        slot.process.print_stack()
        return self._failed(slot, "hang", f"no answer to {slot.process.waiting[0]} within {key} = {seconds:g} s")

    def _read(self, slot: _Slot) -> Answer | None:
        try:
            messages = slot.process.read()
        except EOFError:
            how = how_it_ended(slot.process.process)
            return self._failed(slot, "crash", f"its process ended ({how}) during {slot.process.waiting[0]}")
        except Malformed as error:
            return self._failed(
                slot, "crash", f"its process wrote an invalid message: {error} (during {slot.process.waiting[0]})"
            )
        answer, episode = None, slot.episode
        task = None if episode is None else self.tasks[episode.task]
        for header, arrays in messages:
            during = slot.process.waiting[0]
            try:
                chunk = len(episode.chunks[slot.played - 1]) if episode is not None and during == "step" else 0
                check_answer(during, header, arrays, task, chunk)
                if "error" in header:
                    return self._failed(slot, header["error"], f"{header['text']} (during {during})")
                slot.process.waiting.popleft()
                answer = self._take(slot, header, arrays)
            except Malformed as error:
                return self._failed(slot, "crash", f"its process wrote an invalid message: {error} (during {during})")
        self._send_next_call(slot)
        return answer

    def _take(self, slot: _Slot, header: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Answer | None:
        """Process a message of the slot's process. Return the answer for the pool's caller; None: the message concerns
        only the pool."""
        episode, call = slot.episode, header["call"]
        if episode is None or call == "open":
            return None
        self._count(episode.task, call, header)
        if call == "construct":
            return None
        if call == "expert":
            episode.advice = False
            return Advice(arrays.get("action"))
        slot.played += 1
        if slot.played <= len(episode.sums):
            if header["sum"] == episode.sums[slot.played - 1]:
                return None
            return self._failed(slot, "differs", "a replay of the episode with the same actions had another result")
        episode.sums.append(header["sum"])
        observation = Observation(slot.process.frames(self.tasks[episode.task]), arrays["state"])
        if call == "reset":
            return dataclasses.replace(observation, instruction=header["instruction"])
        clip: dict[str, NDArray[np.uint8]] = {}
        if header["over"]:
            if episode.record is not None:
                clip = slot.process.clip(self.tasks[episode.task], episode.record, header.get("clip"))
            slot.episode, slot.failures = None, 0
        values = (header[key] for key in ("executed", "success", "over", "progress", "parts"))
        return dataclasses.replace(Outcome(observation, *values), clip=clip)

    def _count(self, task: str, call: str, header: dict[str, Any]) -> None:
        counts = self.counts
        if call in ("reset", "step") or header.get("fresh"):
            counts.seconds[call] += header["seconds"]
        for name, seconds in header.get("parts", {}).items():
            counts.seconds[name] += seconds
        if header.get("fresh"):
            counts.constructions[task] += 1
        counts.resets += call == "reset"
        counts.chunks += call == "step"
        counts.steps += header.get("executed", 0)

    def _failed(self, slot: _Slot, kind: str, text: str) -> Failure | None:
        """Replace the slot's failed process; return a Failure, or None if the episode is replayed."""
        episode = slot.episode
        assert episode is not None
        constructing = bool(slot.process.waiting) and slot.process.waiting[0] in ("open", "construct")
        output = slot.process.kill()
        slot.process, slot.played = self._start(), 0
        slot.failures += 1
        self.counts.failures[kind] += 1
        failure = Failure(kind, text, episode.task, episode.trial, max(0, len(episode.sums) - 1), output)
        if kind == "raised" and constructing and not self.counts.constructions[episode.task]:
            raise pool_error(self.settings, self._where, "the simulator could not be constructed", failure)
        used = [other for other in self._slots if other.used]
        if all(other.failures >= self.settings.max_restarts for other in used):
            times = count(self.settings.max_restarts, "time")
            problem = f"every simulator process in use, {len(used)} in all, failed at least {times} in a row"
            raise pool_error(self.settings, self._where, problem, failure)
        episode.failures += 1
        if episode.failures > self.settings.retries or kind == "differs":
            slot.episode = None
            return failure
        self._send_next_call(slot)
        return None
