"""The recipe's keys for simulators of robots."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.base import ComponentSection
from megarl.robots.simulators.registry import BATCHED, FORMS, SIMULATORS, batched_problem, is_known
from megarl.system.errors import ConfigError, choose


class SimulatorSettings(ComponentSection):
    """Settings of simulator processes. Further keys are the simulator's own settings."""

    name: str = Field(description="a built-in simulator, file.py:Class, or pkg.mod:Class of its interpreter")
    python: str | None = Field(None, description="interpreter that has the simulator; null: megarl's own")
    tasks: list[str] | dict[str, dict[str, Any]] = Field(
        [],
        description="tasks to play; a mapping adds the facts of each task that the simulator needs; empty: all tasks",
    )
    workers: PositiveInt = Field(
        4, description="episodes at a time: processes of one environment, or environments of one process if `batched`"
    )
    batched: bool = Field(
        False, description="one process with all environments, which step together; for simulators that have this form"
    )
    threads: PositiveInt = Field(1, description="CPU threads of each process")
    kept: PositiveInt = Field(10, description="constructed simulators, one per task, that a process keeps")
    construct_s: PositiveFloat = Field(300.0, description="seconds that starting or constructing one may take")
    answer_s: PositiveFloat = Field(60.0, description="seconds that a reset or a chunk of actions may take")
    retries: NonNegativeInt = Field(1, description="times that an episode is played again after a failed process")
    max_restarts: PositiveInt = Field(
        3, description="the run ends when every process in use has failed this many times without finishing an episode"
    )
    egl_devices: dict[NonNegativeInt, NonNegativeInt] = Field(
        {}, description="EGL device by CUDA device, which are numbered differently; none: the simulator chooses"
    )

    def check(self, where: str) -> None:
        """Raise ConfigError at `where` if the simulator is unknown, or does not support this value of `batched`."""
        if not is_known(self.name):
            names = dict.fromkeys((*sorted(SIMULATORS | BATCHED), *FORMS))
            choose(names, self.name, "unknown simulator", where=f"{where}.name")
        if (problem := batched_problem(self.name, batched=self.batched)) is not None:
            allowed, fix = problem
            raise ConfigError(
                f"simulator {self.name!r} has {'no' if self.batched else 'only a'} batched form (many environments in "
                "one process)",
                where=f"{where}.batched",
                found=self.batched,
                allowed=allowed,
                fix=fix,
            )
