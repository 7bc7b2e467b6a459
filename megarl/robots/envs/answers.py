"""The types of answers of a `SimulatorPool`, and its counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.robots.simulators.protocol import Numbers, Observation, Outcome
from megarl.system.credentials import mask
from megarl.system.errors import MegarlError


@dataclass(frozen=True)
class Advice:
    """A scripted expert's action, float32 [D]; None: the simulator has no expert."""

    action: Numbers | None


@dataclass(frozen=True)
class Failure:
    """The answer for an episode that failed and cannot be scored; its slot is free for the next episode.

    The simulator's process has been replaced, unless it has many environments and only this one failed (the kinds
    `state` and `differs`).

    Attributes:
        task, trial: the episode's task and start state.
    """

    # `crash`, the process died; `hang`, no answer in time; `raised`, the simulator raised an error; `state`, numbers
    # that are not finite; `frames`, pictures that do not fit the task; `differs`, the replay with the same actions gave
    # another episode
    kind: str
    text: str  # what happened, in one clause of a sentence
    task: str
    trial: int
    chunks: int  # number of policy calls that the process had answered before
    output: str  # last lines that the process printed


#: The answer to `begin` is an Observation, to a chunk of actions an Outcome, to `expert` an Advice; to each it may be a
#: Failure.
Answer = Observation | Outcome | Advice | Failure


@dataclass
class PoolCounts:
    """The counters of a pool since its creation.

    Attributes:
        resets, chunks, steps: numbers of resets, policy calls and environment steps, replayed episodes included.
    """

    constructions: Counter[str] = field(default_factory=Counter)  # number of constructed simulators, by task
    # number of failures of processes, by kind, whether or not the episode could be replayed
    failures: Counter[str] = field(default_factory=Counter)
    resets: int = 0
    chunks: int = 0
    steps: int = 0
    # seconds of all processes, by work: `construct`, `reset`, `step`, and what a simulator reports, `physics` and
    # `render`
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


class SimulatorError(MegarlError):
    """No simulator process works any more.

    Args:
        simulator: the simulator's name.
        python: its interpreter.
        what: the problem, in one clause.
        lines: further details, as pairs of a name and a text.
        output: last lines that the process printed.
        fix: how the user can fix it.
    """

    def __init__(
        self, simulator: str, python: str, what: str, lines: Sequence[tuple[str, str]], output: str, fix: str
    ) -> None:
        shown = [f"simulator {simulator!r} in {python}: {what}"]
        shown += [f"  {f'{name}:':<8} {text}" for name, text in lines]
        if output:
            shown += ["  its last lines:", *(f"    {line}" for line in output.splitlines())]
        super().__init__(mask("\n".join([*shown, f"  {'fix:':<8} {fix}"])))
