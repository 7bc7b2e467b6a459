"""A pool whose slots are environments of one simulator process, which step together.

It has the calls of `SimulatorPool`. Calls are collected until `answers` sends them to the process as one turn:

    begin(slot, ...), act(slot, ...) ...   -->  turn: steps of all episodes in flight, then resets  -->  answers

Chunks are sent when every episode in flight has one (`BatchedSimulator` steps its rows together), so a caller acts in
all of them; until then only resets and requests for an expert's action are sent.

A process that dies, hangs, or sends an invalid answer ends the turn of all episodes. It is replaced, and all episodes
in flight are replayed up to `retries` times, so that they end together as before. An episode whose replay differs
becomes a Failure, and so does one whose numbers are not finite, without a new process.
"""

from __future__ import annotations

import dataclasses
import time
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.robots.envs.answers import Advice, Answer, Failure, PoolCounts
from megarl.robots.envs.episodes import SlotEpisode
from megarl.robots.envs.messages import TurnAnswers, check_answer, check_construct, check_refusal, check_turn
from megarl.robots.envs.opening import BEAT_S, first_answer, pool_error, readable
from megarl.robots.envs.process import SimulatorProcess
from megarl.robots.envs.settings import SimulatorSettings
from megarl.robots.simulators.protocol import Observation, Outcome, Recording
from megarl.robots.simulators.wire import clip_places
from megarl.system.errors import count
from megarl.system.plain import Malformed
from megarl.system.processes import how_it_ended
from megarl.system.tracing import beat

_EXIT_S = 2.0  # seconds that the process has to exit before it is killed


class BatchedPool:
    """One simulator process with many environments, one for each slot. The calls of several slots are sent to it in one
    message, a turn.

    Args:
        settings: the simulator, and the number of environments.
        where: dotted path of the recipe's section with `settings`, for messages.
        cuda_device: this rank's CUDA device, as `settings.egl_devices` numbers it; None: the rank has none.

    Attributes:
        together: true, because all episodes in flight are stepped together.
        settings: the argument `settings`.
        tasks: available tasks, by name.
        counts: counters so far.
    """

    together = True

    def __init__(self, settings: SimulatorSettings, *, where: str = "env", cuda_device: int | None = None) -> None:
        settings.check(where)
        self.settings, self._where, self._cuda_device = settings, where, cuda_device
        self.counts = PoolCounts()
        self._episodes: dict[int, SlotEpisode] = {}  # episodes in flight, by slot
        # (slot, kind) of each call in the turn that the process works on, in the order of the answers
        self._asked: list[tuple[int, str]] = []
        self._replay = 0  # number of earlier turns that the process, started after a failure, still has to replay
        self._stride = 0  # bytes in the shared memory for the pictures of one slot
        self._failures = 0  # how often the process has failed since an episode was last finished or dropped
        self._process = self._start()
        try:
            self.tasks = first_answer(self._process, settings, where)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> BatchedPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def slots(self) -> range:
        """The numbers, from 0, of the environments that run side by side."""
        return range(self.settings.workers)

    @property
    def busy(self) -> list[int]:
        """The numbers of the slots that have not answered yet."""
        return [slot for slot, episode in sorted(self._episodes.items()) if episode.awaits_answer]

    def begin(self, slot: int, task: str, trial: int, record: Recording | None = None) -> None:
        """Begin an episode in a slot; an unfinished episode of the slot is dropped.

        With `record` the simulator renders every environment step, and the episode's last Outcome has a clip.
        """
        assert slot not in self.busy, f"slot {slot} has not answered its last call"
        assert 0 <= trial < self.tasks[task].trials, f"{task} has no trial {trial}"
        if slot in self._episodes:
            self._failures = 0
        self._episodes[slot] = SlotEpisode(task, trial, record=record)

    def act(self, slot: int, actions: NDArray[Any]) -> None:
        """Request the execution of a chunk of actions [K, D] in the slot's unfinished episode; K must be the same in
        all slots."""
        assert slot not in self.busy, f"slot {slot} has not answered its last call"
        episode = self._episodes[slot]
        chunk, task = np.array(actions, np.float32), self.tasks[episode.task]
        shape = list(chunk.shape)
        assert shape == [len(chunk), task.action_dim], f"actions are {shape}, of {task.name} [K, {task.action_dim}]"
        if not np.isfinite(chunk).all():
            raise ValueError(f"{task.name}, trial {episode.trial}: the policy's actions are not finite")
        episode.chunks.append(chunk)

    def expert(self, slot: int) -> None:
        """Request the scripted expert's action in the current state of the slot's episode."""
        assert slot not in self.busy, f"slot {slot} has not answered its last call"
        self._episodes[slot].advice = True

    def answers(self, wait_s: float) -> dict[int, Answer]:
        """Send the requested calls as one turn, unless the process still works on a turn. Wait up to `wait_s` seconds,
        and return the answers that have arrived, by slot.

        Each call of a slot gets one answer. After a final Outcome, or a Failure, the slot is idle.
        """
        until = time.monotonic() + wait_s
        while True:
            if not self._process.waiting and not self._send_turn():
                return {}
            answers = self._collect(until)
            beat()
            if answers or time.monotonic() >= until:
                return answers

    def abandon(self) -> None:
        """Drop all episodes, after waiting until the process has answered its current turn."""
        while self._process.waiting:
            self._collect(time.monotonic() + BEAT_S)
            beat()
        self._episodes, self._replay = {}, 0

    def close(self) -> None:
        """End the process."""
        self._process.ask({"call": "close"}, [])
        self._process.wait(_EXIT_S)
        self._process.kill()

    def _start(self) -> SimulatorProcess:
        return SimulatorProcess(self.settings, self._where, self._cuda_device)

    def _send_turn(self) -> bool:
        """Send the next turn: calls to replay in a process that was started after a failure, else the calls without an
        answer. Return whether there are such calls."""
        playing = dict(sorted(self._episodes.items()))
        # The longest episode may have failed in the replay, and the others need fewer turns.
        self._replay = min(self._replay, max((len(episode.sums) for episode in playing.values()), default=0))
        if self._replay:
            kinds = {
                slot: "reset" if len(episode.sums) == self._replay else "step"
                for slot, episode in playing.items()
                if len(episode.sums) >= self._replay
            }
        else:
            kinds = {slot: episode.next_call for slot, episode in playing.items() if episode.awaits_answer}
            if any(episode.sums and kinds.get(slot) != "step" for slot, episode in playing.items()):
                kinds = {slot: kind for slot, kind in kinds.items() if kind != "step"}
        self._asked = [
            (slot, kind) for wanted in ("step", "reset", "expert") for slot, kind in kinds.items() if kind == wanted
        ]
        if not self._asked:
            return False
        sizes = [clip_places(self.tasks[episode.task], episode.record)[1] for episode in playing.values()]
        self._stride = max(self._stride, *sizes)
        begins = [self._begin_call(slot) for slot, kind in self._asked if kind == "reset"]
        by_kind = {name: [slot for slot, kind in self._asked if kind == name] for name in ("step", "expert")}
        chunks = [playing[slot].chunks[self._played(slot) - 1] for slot in by_kind["step"]]
        arrays = {"actions": np.stack(chunks)} if chunks else {}
        header = {"call": "turn", "begin": begins, "stride": self._stride, **by_kind}
        self._process.ask(header, ["construct", "turn"], arrays)
        return True

    def _begin_call(self, slot: int) -> list[Any]:
        episode = self._episodes[slot]
        return [
            slot,
            episode.task,
            episode.trial,
            None if episode.record is None else dataclasses.asdict(episode.record),
        ]

    def _played(self, slot: int) -> int:
        """Return how many calls of the slot's episode come before its call in the current (or replayed) turn."""
        return len(self._episodes[slot].sums) - self._replay

    def _collect(self, until: float) -> dict[int, Answer]:
        """Wait for messages of the process, at most until `until`; return the answers for the pool's caller, by slot. A
        process that misses its deadline is replaced."""
        process, now = self._process, time.monotonic()
        key = "construct_s" if process.waiting[0] in ("open", "construct") else "answer_s"
        seconds = getattr(self.settings, key)
        ends = min(until, now + BEAT_S, process.since + seconds)
        if readable([process.socket], ends - now):
            return self._read()
        if time.monotonic() - process.since <= seconds:
            return {}
        process.print_stack()
        return self._failed("hang", f"no answer to {process.waiting[0]} within {self._where}.{key} = {seconds:g} s")

    def _read(self) -> dict[int, Answer]:
        process = self._process
        during, answers = process.waiting[0], dict[int, Answer]()
        try:
            for header, arrays in process.read():
                during = process.waiting[0]
                if "error" in header:
                    check_refusal(header, opening=during == "open")
                    return self._failed(header["error"], f"{header['text']} (during {during})")
                if during == "open":  # the first answer of a process that was started after a failure
                    check_answer("open", header, arrays, None, 0)
                elif during == "construct":
                    check_construct(header)
                    if header["fresh"]:
                        self.counts.seconds["construct"] += header["seconds"]
                        self.counts.constructions.update(header["fresh"])
                else:
                    tasks = {slot: self.tasks[self._episodes[slot].task] for slot, _ in self._asked}
                    limits = {
                        slot: len(self._episodes[slot].chunks[self._played(slot) - 1])
                        for slot, kind in self._asked
                        if kind == "step"
                    }
                    answers = self._take(check_turn(header, arrays, self._asked, tasks, limits))
                process.waiting.popleft()
        except EOFError:
            return self._failed("crash", f"its process ended ({how_it_ended(process.process)}) during {during}")
        except Malformed as error:
            return self._failed("crash", f"its process wrote an invalid message: {error} (during {during})")
        return answers

    def _take(self, turn: TurnAnswers) -> dict[int, Answer]:
        """Process the answer to a turn; return the answers for the pool's caller, by slot.

        Answers to replayed calls are only compared with those to the original calls; an episode for which they differ
        fails.
        """
        entries, replayed, answers = turn.entries, self._replay, dict[int, Answer]()
        # Convert the answers before any counter changes, because a malformed answer raises an error here.
        if not replayed:
            seen = (entry for entry in entries if entry["kind"] in ("reset", "step"))
            answers = {entry["slot"]: self._answer(entry, turn.states[entry["slot"]]) for entry in seen}
        for name, spent in turn.seconds.items():
            self.counts.seconds[name] += spent
        for entry in entries:
            kind, slot = entry["kind"], entry["slot"]
            episode = self._episodes[slot]
            self.counts.resets += kind == "reset"
            self.counts.chunks += kind == "step"
            self.counts.steps += entry["executed"] if kind == "step" else 0
            if kind == "failed":
                answers[slot] = self._drop(slot, entry["problem"], entry["text"])
                self.counts.failures[entry["problem"]] += 1
            elif kind == "expert":
                episode.advice = False
                answers[slot] = Advice(turn.advice.get(slot))
            elif not replayed:
                episode.sums.append(entry["sum"])
                if kind == "step" and entry["over"]:
                    del self._episodes[slot]
                    self._failures = 0
            elif episode.sums[len(episode.sums) - replayed] != entry["sum"]:
                text = "a replay of the episode with the same actions had another result"
                answers[slot] = self._drop(slot, "differs", text)
                self.counts.failures["differs"] += 1
        self._replay = max(0, replayed - 1)
        return answers

    def _answer(self, entry: dict[str, Any], state: NDArray[np.float32]) -> Observation | Outcome:
        """Return the Observation after a reset, or the Outcome of a chunk, from the slot's entry in the answer."""
        slot = entry["slot"]
        episode, base = self._episodes[slot], slot * self._stride
        task = self.tasks[episode.task]
        observation = Observation(self._process.frames(task, base), state, entry.get("instruction", ""))
        if entry["kind"] == "reset":
            return observation
        clip: dict[str, NDArray[np.uint8]] = {}
        if entry["over"] and episode.record is not None:
            clip = self._process.clip(task, episode.record, entry.get("clip"), base)
        values = (entry[key] for key in ("executed", "success", "over", "progress"))
        return dataclasses.replace(Outcome(observation, *values), clip=clip)

    def _drop(self, slot: int, kind: str, text: str) -> Failure:
        """End the slot's failed episode, and return its Failure with this kind and text."""
        episode = self._episodes.pop(slot)
        return Failure(kind, text, episode.task, episode.trial, max(0, len(episode.sums) - 1), "")

    def _failed(self, kind: str, text: str) -> dict[int, Answer]:
        """Replace the failed process, and plan the replay of its episodes; return a Failure for each episode that has
        failed too often to be replayed, by slot.

        Raises:
            SimulatorError: the simulator cannot be constructed, or the process has failed too often in a row.
        """
        constructing = bool(self._process.waiting) and self._process.waiting[0] in ("open", "construct")
        begun = [self._episodes[slot].task for slot, wanted in self._asked if wanted == "reset"]
        output = self._process.kill()
        self._process, self._asked = self._start(), []
        self._failures += 1
        self.counts.failures[kind] += 1
        ended = {
            slot: Failure(kind, text, episode.task, episode.trial, max(0, len(episode.sums) - 1), output)
            for slot, episode in sorted(self._episodes.items())
        }
        first = next(iter(ended.values()), None)  # None: no episode was in flight, as at the process's start
        if kind == "raised" and constructing and any(not self.counts.constructions[task] for task in begun):
            raise pool_error(self.settings, self._where, "the simulator could not be constructed", first)
        if self._failures >= self.settings.max_restarts:
            problem = f"the simulator's process failed {count(self.settings.max_restarts, 'time')} in a row"
            raise pool_error(self.settings, self._where, problem, first, text, output)
        for slot in ended:
            self._episodes[slot].failures += 1
        answers: dict[int, Answer] = {
            slot: failure for slot, failure in ended.items() if self._episodes[slot].failures > self.settings.retries
        }
        for slot in answers:
            del self._episodes[slot]
        self._replay = max((len(episode.sums) for episode in self._episodes.values()), default=0)
        return answers
