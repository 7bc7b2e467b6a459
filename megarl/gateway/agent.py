"""The environment `agent`: an episode runs a program of the user, whose chat endpoint is the policy.

reset -> start the program --> its first calls --> prompts      step(turns) -> reply to the calls --> its next calls
                                                                                                  '-> exit: the score
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megarl.envs.protocol import Action, Continuation, Ending, Environment, EnvSettings, EpisodeFailure, Services, Step
from megarl.envs.registry import import_source
from megarl.gateway.chat import ChatForm
from megarl.gateway.credit import KINDS as CREDITS
from megarl.gateway.credit import find_credit, shares_of
from megarl.gateway.images import ImageReader, data_url
from megarl.gateway.programs import Program, Programs
from megarl.gateway.results import ResultError, parse_result, parse_rewards
from megarl.gateway.sandbox import PORT, Limits, Sandbox, template_error
from megarl.gateway.server import LOOPBACK, POLICY, Gateway
from megarl.gateway.session import ChatSession, PendingTurn, Window
from megarl.system.errors import ConfigError, MegarlError

_CLOSE_S = 20.0  # seconds to end all programs


class AgentSettings(EnvSettings):
    """The keys of the section `env` that only the environment `agent` has."""

    command: list[str] | None = Field(
        None, description="the agent: a program and its arguments; `python` is the interpreter of `env.python`"
    )
    function: str | None = Field(
        None,
        description="the agent: file.py:fn or pkg.mod:fn, called in a process of its own with {row, seed}; it may "
        "return the result",
    )
    python: str | None = Field(
        None,
        description="interpreter of the function, and of a command `python`; it needs no megarl. null: the trainer's",
    )
    cwd: str | None = Field(None, description="folder in which the agent starts; null: the run's")
    pass_env: list[str] = Field(
        default_factory=list,
        description="environment variables that are passed to the agent; of all others it gets PATH, HOME and the like",
    )
    score: Literal["agent", "reward"] = Field(
        "agent",
        description="agent: the number in the file MEGARL_RESULT; reward: the recipe's reward function scores the last "
        "turn, but not one of a sub-agent",
    )
    timeout_s: PositiveFloat = Field(
        240.0, description="deadline of an episode; further calls are then refused, and it is scored"
    )
    grace_s: PositiveFloat = Field(
        10.0, description="seconds that an agent has to end by itself after a limit has ended its episode"
    )
    max_calls: PositiveInt | None = Field(
        None, description="maximum calls of an episode; further calls are refused; null: rollout.limits.turns"
    )
    max_running: PositiveInt = Field(32, description="maximum agents that run at the same time per replica")
    host: str = Field(
        LOOPBACK,
        description="IPv4 address at which the endpoint listens and at which the agent calls it. 127.0.0.1: only "
        "programs of this machine reach it",
    )
    sandbox: Literal["none", "bubblewrap", "docker", "apptainer"] | list[str] = Field(
        "none",
        description="where the agent runs. none: as the user who started the run; bubblewrap, docker, apptainer: "
        "without network but for the endpoint, and with no files of this machine but its own; a list: a command that "
        "makes another sandbox, with {command} and {shared} (docs/agents.md)",
    )
    image: str | None = Field(None, description="image of the sandboxes docker and apptainer; it has python3")
    readable: list[str] = Field(
        default_factory=list, description="files and folders that the agent may read in a sandbox, beside its own"
    )
    memory_mb: PositiveInt | None = Field(
        None,
        description="maximum memory of each of the agent's processes (address space) and of all together; null: in a "
        "sandbox 2048, else no limit",
    )
    processes: PositiveInt | None = Field(
        None, description="maximum number of the agent's processes and threads; null: in a sandbox 128, else no limit"
    )
    cpu_s: PositiveFloat | None = Field(
        None, description="maximum CPU time of all of the agent's processes; null: no limit but `timeout_s`"
    )
    output_mb: PositiveInt | None = Field(
        None, description="what an agent may write to stdout and stderr; null: in a sandbox 16, else no limit"
    )
    disk_mb: PositiveInt = Field(64, description="what an agent may write to files in a sandbox")
    train: Literal["all", "main"] = Field(
        "all",
        description="turns that are trained on. main: only those of sequences that begin with the system message of "
        "the episode's first call, so not those of sub-agents and of side calls such as titles",
    )
    credit: str = Field(
        "each",
        description="how the score of an episode counts for its sequences. each: fully; last: only for the turns that "
        "the last call continues; by_agent: each agent's sequences share it equally; file.py:fn or pkg.mod:fn: the "
        "function gets the segments of an episode and returns a share for each, by which advantages are multiplied",
    )
    models: list[str] = Field(
        default_factory=list,
        description="names of models, in addition to `policy`, that a call may give for the policy; `*`: any name",
    )
    parser: Literal["qwen", "qwen25", "llama3"] = Field("qwen", description="format in which the model writes a call")
    announce: Literal["template", "system", "none"] = Field(
        "template",
        description="how prompts present the tools of a request. template: through the chat template's `tools`; "
        "system: as text in the system message; none: not at all",
    )
    history: Literal["template", "exact"] = Field(
        "template",
        description="what a call continues whose earlier turns the chat template changes, such as by leaving out old "
        "thoughts. template: a new sequence, as the deployed model would read it; exact: the tokens as sampled",
    )

    @property
    def longest_s(self) -> float:
        """An episode's deadline, plus the time to end a program."""
        return self.timeout_s + self.grace_s + 10.0

    @model_validator(mode="after")
    def _one_way(self) -> AgentSettings:
        if (self.command is None) == (self.function is None):
            raise ValueError("an agent is either a command or a function: set env.command or env.function, not both")
        if self.command is not None and not self.command:
            raise ValueError("env.command is an empty list: name the agent's program and its arguments")
        if self.credit not in CREDITS and ":" not in self.credit:
            raise ValueError(f"env.credit is {self.credit!r}; allowed: {', '.join(CREDITS)}, file.py:fn, pkg.mod:fn")
        return self

    @field_validator("host")
    @classmethod
    def _one_address(cls, host: str) -> str:
        try:
            address = ipaddress.IPv4Address(host)
        except ValueError:
            address = None
        if address is None or address.is_unspecified:
            raise ValueError(
                f"env.host is {host!r}, which no program can call; allowed: an IPv4 address of the machine that "
                "generates, such as 172.17.0.1, the one that containers of docker see"
            )
        return host

    @model_validator(mode="after")
    def _one_sandbox(self) -> AgentSettings:
        if isinstance(self.sandbox, list):
            if error := template_error(self.sandbox):
                raise ValueError(error)
        elif (self.sandbox in ("docker", "apptainer")) != (self.image is not None):
            raise ValueError(
                f"env.image goes with the sandboxes docker and apptainer, which need it; found: {self.image}, and "
                f"env.sandbox={self.sandbox}"
            )
        if self.sandbox != "none" and self.host != LOOPBACK:
            raise ValueError(
                f"env.host is {self.host}, but agents in a sandbox reach the endpoint only by a relay: remove "
                "env.host or env.sandbox"
            )
        if self.sandbox != "none" and self.python is not None:
            raise ValueError("env.python is for agents without a sandbox: remove it; env.command can name a program")
        if self.sandbox == "none" and self.readable:
            raise ValueError(
                "env.readable is only for sandboxes, because other agents may read all that the user may: remove it"
            )
        return self

    @property
    def limits(self) -> Limits:
        """The limits of memory, time, processes and output of each agent's program."""
        sandboxed = self.sandbox != "none"
        return Limits(
            self.memory_mb or (2048 if sandboxed else None),
            self.cpu_s,
            self.processes or (128 if sandboxed else None),
            self.output_mb or (16 if sandboxed else None),
            self.disk_mb,
            self.longest_s,
        )

    def sandbox_of(self) -> Sandbox | None:
        """Return the sandbox in which agents run; None: they run without a sandbox."""
        if self.sandbox == "none":
            return None
        return Sandbox(self.sandbox, self.limits, self.readable, self.cwd, self.image)


class AgentReplica:
    """The endpoint of a replica, and the agents' programs that the replica runs."""

    def __init__(self, settings: AgentSettings, services: Services) -> None:
        self.form = ChatForm(
            services.template,
            services.turns,
            settings.parser,
            settings.announce,
            settings.history,
            services.images,
        )
        calls = settings.max_calls or services.turns_limit
        self.window = Window(services.prompt_tokens, services.tokens, calls)
        self.images = ImageReader(services.images, self.window.whole)
        sandbox, self.policies = settings.sandbox_of(), services.policies
        path = None if sandbox is None else sandbox.open()
        self.gateway = Gateway(settings.models, settings.host, path, self.policies, settings.max_running)
        # the address at which programs reach the gateway
        self.url = self.gateway.url if sandbox is None else f"http://127.0.0.1:{PORT}"
        self.programs = Programs(
            settings.command,
            settings.function,
            settings.cwd,
            settings.pass_env,
            settings.limits,
            sandbox,
            settings.python,
        )
        self.credit = find_credit(settings.credit)
        self.free = asyncio.Semaphore(settings.max_running)
        self.loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Open the endpoint; called before every episode, it does nothing after the first time."""
        self.loop = asyncio.get_running_loop()
        await self.gateway.start()

    async def stop(self) -> None:
        """End all agents' programs, and close the endpoint."""
        await self.programs.close()
        await self.gateway.stop()
        self.images.close()


class Agent(Environment):
    """Plays an episode in which an agent's program calls the policy."""

    Settings: ClassVar[type[AgentSettings]] = AgentSettings
    times_itself: ClassVar[bool] = True
    may_drop_turns: ClassVar[bool] = True
    has_simultaneous_turns: ClassVar[bool] = True
    plays_policies: ClassVar[bool] = True
    _program: Program  # set by `reset`
    _turns: Sequence[PendingTurn] = ()  # turns that the policy is sampling, or has sampled last

    def __init__(self, settings: AgentSettings, shared: AgentReplica) -> None:
        super().__init__(settings, shared)
        self._session = ChatSession(shared.form, shared.window, shared.images)
        self._key = ""
        self._freeing: asyncio.Future[None] | None = None
        self._late = self._holds = False
        self._deadline = self._last = math.inf  # times at which calls are refused, and at which the program is ended

    @property
    def dropped_turns(self) -> Collection[int]:  # type: ignore[override]
        """Indices of those turns in flight for which no client waits any more: all if the agent's program has ended."""
        ended = bool(self._turns) and self._program.ended.done()
        return [place for place, turn in enumerate(self._turns) if ended or turn.is_abandoned]

    @classmethod
    def gives_scores(cls, settings: AgentSettings) -> bool:
        """Return whether the agent's program gives the score."""
        return settings.score == "agent"

    @classmethod
    def check(cls, settings: AgentSettings) -> None:
        """Import the function of `env.credit`, find the interpreter and the agent's program, and start the sandbox
        once."""
        find_credit(settings.credit)
        if settings.python is not None and shutil.which(settings.python) is None:
            raise ConfigError(
                "this interpreter does not exist or is not an executable file",
                where="env.python",
                found=settings.python,
                fix="name .../bin/python",
            )
        cls.check_program(settings)
        if (sandbox := settings.sandbox_of()) is not None:
            sandbox.check(settings.command or [], settings.function)

    @classmethod
    def check_program(cls, settings: Any) -> None:
        """Find the program, or import the function. That of another interpreter is imported in the first episode."""
        if settings.command is None:
            cls._check_function(settings)
            return
        program, of_image = settings.command[0], settings.image is not None
        if program != "python" and not of_image and shutil.which(program, path=None) is None:
            raise ConfigError(
                "this program does not exist or is not an executable file",
                where="env.command",
                found=program,
                fix="install the program, write its full path, or make the file executable (chmod +x)",
            )

    @staticmethod
    def _check_function(settings: AgentSettings) -> None:
        source, colon, name = str(settings.function).rpartition(":")
        if colon and settings.python is not None and not source.endswith(".py"):
            return
        if colon and settings.python is not None and Path(source).expanduser().is_file():
            return
        if not colon or not callable(getattr(import_source(source, "env.function"), name, None)):
            raise ConfigError(
                "this is not a function",
                where="env.function",
                found=settings.function,
                allowed="file.py:fn, pkg.mod:fn",
                fix="correct the name, or define the function there",
            )

    @classmethod
    def open_with(cls, settings: AgentSettings, services: Services | None) -> AgentReplica:
        """Open the endpoint; it serves from the first episode on."""
        if services is None:
            raise MegarlError("the environment `agent` needs a run's chat template and tokenizer")
        return AgentReplica(settings, services)

    @classmethod
    def close(cls, shared: AgentReplica) -> None:
        """End all agents' programs, and close the endpoint."""
        if shared.loop is not None:
            asyncio.run_coroutine_threadsafe(shared.stop(), shared.loop).result(_CLOSE_S)

    def task(self, row: dict[str, Any], seed: int) -> dict[str, Any]:
        """Return the task that the agent's program reads: the row, with images as data URLs, and the episode's seed."""
        if not self.shared.images.is_used:
            return {"row": row, "seed": seed}
        given = {name: value for name, value in row.items() if name != "images"}
        if images := [data_url(image) for image in row.get("images") or () if hasattr(image, "getpixel")]:
            given["images"] = images
        return {"row": given, "seed": seed}

    async def reset(self, row: dict[str, Any], seed: int) -> Any:
        """Start the agent's program, and return the prompts of the first calls that it makes to the policy."""
        shared = self.shared
        self.is_waiting = True
        await shared.free.acquire()
        self.is_waiting, self._holds = False, True
        await self._refuse_after_end()
        await shared.start()
        self._key = shared.gateway.open(self._session)
        url = shared.url
        self._program = await shared.programs.start(
            await asyncio.to_thread(self.task, row, seed),
            {
                "OPENAI_BASE_URL": f"{url}/v1",
                "OPENAI_API_KEY": self._key,
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_AUTH_TOKEN": self._key,
                "MEGARL_MODEL": next(iter(shared.policies), POLICY),
            },
        )
        await self._refuse_after_end()
        self._deadline = asyncio.get_running_loop().time() + self.settings.timeout_s
        return await self._next()

    async def step(self, action: Action) -> Any:
        """Send the policy's turns to the agent's program, and return the prompts of the program's next calls, or the
        end of the episode."""
        if not self._turns:
            raise RuntimeError("the agent waits for no turn; call `step` only after `reset` or `step` returns one")
        dropped = self.dropped_turns
        for place, (turn, sampled) in enumerate(zip(self._turns, (action, *action.beside), strict=True)):
            self._session.reply(turn, sampled)
            if sampled.finish_reason == "abort" and place not in dropped:
                self._session.close("its time is up")
        following = await self._next()
        return Step(following) if isinstance(following, Continuation) else following

    def discard(self) -> None:
        """End the agent's program, because the run needs no more of the episode."""
        self._session.close("the run has ended it")
        if self._holds:
            self._freeing = asyncio.ensure_future(self._free())

    async def _refuse_after_end(self) -> None:
        """Raise EpisodeFailure if the run has ended this episode while it waited to be started.

        Before that, its session and a program that started meanwhile are ended.
        """
        if not self._session.over:
            return
        self.shared.gateway.end(self._key)
        if (program := getattr(self, "_program", None)) is not None:  # the program started after `discard` was called
            await self.shared.programs.stop(program)
            self.shared.programs.remove(program)
        await self._free()
        raise EpisodeFailure(self._session.over)

    async def _next(self) -> Continuation | Step:
        """Wait until the agent's program calls the policy, and return the prompts; or return the end of the episode."""
        program, loop = self._program, asyncio.get_running_loop()
        while True:
            if not program.ended.done() and not self._session.over and loop.time() >= self._deadline:
                self._late = True
                self._session.close("its time is up")
            turns = await self._session.take()
            if self._session.broken:
                raise EpisodeFailure(self._session.broken)
            if turns:
                self._turns = turns
                first, *others = map(_continuation, turns)
                return replace(first, beside=tuple(others))
            if program.ended.done():
                return await self._end(program)
            if self._session.over:
                self._last = min(self._last, loop.time() + self.settings.grace_s)
            left = (self._last if self._session.over else self._deadline) - loop.time()
            if left <= 0 and self._session.over:
                await self.shared.programs.stop(program)
                return await self._end(program)
            arrival = asyncio.ensure_future(self._session.arrival())
            awaited: set[asyncio.Future[Any]] = {arrival, program.ended}
            await asyncio.wait(awaited, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            arrival.cancel()

    async def _end(self, program: Program) -> Step:
        """Return the episode's last step with the program's result; raise EpisodeFailure if it has no valid result."""
        session = self._session
        limited = bool(session.over) or self._late or session.overflowed or bool(program.limit)
        session.close("its program has ended")
        frozen = [name for name, policy in self.shared.policies.items() if not policy.train]
        settings = self.settings
        untrained = session.untrained(main=settings.train == "main", last=settings.credit == "last", frozen=frozen)
        try:
            reward, rewards, info = self._result(program, limited)
            output = program.output
            shares = shares_of(self.shared.credit, session.record, untrained)
        finally:
            await self._free()
        untrained += tuple(turn for turn, share in shares.items() if not share)
        numbers = {**session.numbers(), "untrained_calls": float(len(untrained)), "timeouts": float(self._late), **info}
        if program.limit:
            numbers[f"limits/{program.limit}"] = 1.0
        return Step(Ending(untrained, session.answer(), output, rewards, shares), reward, True, numbers)

    def _result(
        self, program: Program, limited: bool
    ) -> tuple[float, dict[str, float | list[float]], dict[str, float]]:
        """Return what a program has left as its result: a reward, rewards of several policies, and numbers to log.

        Args:
            limited: a limit ended the episode, so that a program without a result counts as 0.
        """
        scores = self.gives_scores(self.settings)
        if not program.has_begun and (self._late or not limited):
            within = f" within env.timeout_s = {self.settings.timeout_s:g} seconds" if self._late else ""
            raise EpisodeFailure(f"the sandbox did not start the agent{within}: {program.how_it_ended()}")
        if not limited and program.ended.done() and program.ended.result() != 0:
            raise EpisodeFailure(f"the agent ended with {program.how_it_ended()}")
        try:
            text = program.read_result()
            if not text and (limited or not scores):
                return 0.0, {} if scores else self._apart(), {}
            if self.shared.policies and scores:
                return 0.0, *parse_rewards(text, self.shared.policies, self._session.record)
            reward, info = parse_result(text, scored=scores)
            return reward, {} if scores else self._apart(), info
        except (ResultError, ValueError) as error:
            raise EpisodeFailure(
                f"the agent left no valid result: {error}. It ended with {program.how_it_ended()}"
            ) from error

    def _apart(self) -> dict[str, float | list[float]]:
        """Return a reward of 0 for each conversation of each policy, to which reward functions add their scores."""
        return {name: [0.0] * len(self._session.record.roots(name)) for name in self.shared.policies}

    async def _free(self) -> None:
        """End the agent's program and its session, and let another episode begin."""
        if not self._holds:
            return
        self._holds = False
        self.shared.gateway.end(self._key)
        program = getattr(self, "_program", None)  # None: no program could be started
        if program is not None:
            await self.shared.programs.stop(program)
            self.shared.programs.remove(program)
        self.shared.free.release()


def _continuation(turn: PendingTurn) -> Continuation:
    request = turn.call.request
    return Continuation(turn.token_ids, turn.node.parent, turn.room, request.stop, request.policy, turn.images)
