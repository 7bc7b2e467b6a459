"""The environment `tools`: it replies to every turn that calls tools with the results; a turn without calls is the
last.

user: 47*85=
assistant: <tool_call>{"name": "multiply", "arguments": {"a": 47, "b": 85}}</tool_call>
tool: 3995
assistant: 3995                      --> scored by the recipe's reward function
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.data.announcement import NO_TOOLS, Announcement
from megarl.envs.protocol import Action, Environment, EnvSettings, Step
from megarl.envs.tools.functions import Functions, Said, load_tools
from megarl.envs.tools.mcp_servers import McpServer, McpServers, check_servers
from megarl.envs.tools.parsers import PARSERS, Call, system_text
from megarl.envs.tools.schema import data_url
from megarl.system.errors import ConfigError, count
from megarl.system.plain import nested_deeper

_DEPTH = 100
_THREADS = 64  # maximum number of concurrent calls, including those that wait for a process
_GIVE_UP_S = 10.0  # seconds after a turn's deadline to end a process


class ToolSettings(EnvSettings):
    """The keys of the section `env` that only the environment `tools` has."""

    tools: list[str] = Field(
        default_factory=list, description="functions that the model may call: file.py:fn, pkg.mod:fn"
    )
    mcp: dict[str, McpServer] = Field(
        default_factory=dict, description="MCP servers whose tools the model may call, by name"
    )
    parser: Literal["qwen", "qwen25", "llama3"] = Field("qwen", description="format in which the model writes a call")
    announce: Literal["template", "system", "none"] = Field(
        "template",
        description="how prompts present the tools. template: through the chat template's `tools`; system: as text in "
        "the system message; none: not at all",
    )
    workers: PositiveInt = Field(1, description="processes per replica that run tools")
    timeout_s: PositiveFloat = Field(10.0, description="deadline of a call; a call that takes longer gets an error")
    max_calls: PositiveInt = Field(16, description="maximum executed calls per turn; further calls get an error")
    turn_timeout_s: PositiveFloat = Field(
        120.0,
        description="deadline of all calls of a turn together, including the wait for a free process; later "
        "calls get an error",
    )
    memory_mb: PositiveInt = Field(2048, description="maximum memory (address space) of a process that runs tools")
    max_chars: PositiveInt = Field(8192, le=1_000_000, description="maximum characters of a result that the model sees")

    @property
    def longest_s(self) -> float:
        """A turn's deadline plus the time to end a process."""
        return self.turn_timeout_s + _GIVE_UP_S


class Tools(Environment):
    """Replies to the policy's tool calls with messages of the role `tool`, also if a call fails."""

    Settings = ToolSettings
    scores: ClassVar[bool] = False

    def __init__(self, settings: ToolSettings, shared: Callers) -> None:
        """Create the environment of one episode, without images."""
        super().__init__(settings, shared)
        self._images: list[str] = []

    @classmethod
    def check(cls, settings: ToolSettings) -> None:
        """Load the functions. Servers are not started, because that may take long and needs the run's machines."""
        if not (settings.tools or settings.mcp):
            raise ConfigError(
                "the environment has no tools",
                where="env.tools",
                found=[],
                fix="name a function in env.tools, or a server in env.mcp",
            )
        load_tools(settings.tools)
        check_servers(settings.mcp)

    @classmethod
    def tools(cls, settings: ToolSettings) -> list[dict[str, Any]]:
        """Return the schemas of all tools."""
        schemas = [tool.schema for tool in load_tools(settings.tools)]
        if settings.mcp:
            servers = McpServers(settings.mcp, settings.timeout_s)
            servers.close()
            if twice := sorted({schema["function"]["name"] for schema in schemas} & set(servers.names)):
                raise ConfigError(
                    "a function and a tool of an MCP server have the same name",
                    where="env.tools",
                    found=twice,
                    fix="rename the function, or choose the server's tools with env.mcp.NAME.tools",
                )
            schemas += servers.schemas
        return schemas

    @classmethod
    def announcement(cls, settings: ToolSettings) -> Announcement:
        """Return the schemas for the chat template, or as text for the system message; with `announce: none` return
        neither."""
        schemas = cls.tools(settings)
        if settings.announce == "system":
            return Announcement(system=system_text(settings.parser, schemas))
        return Announcement(schemas) if settings.announce == "template" else NO_TOOLS

    @classmethod
    def needs_tool_template(cls, settings: ToolSettings) -> bool:
        """Return whether the chat template must be able to write tools."""
        return settings.announce == "template"

    @classmethod
    def open(cls, settings: ToolSettings) -> Callers:
        """Start the processes that run functions, and the connections to servers."""
        callers = Callers()
        try:
            if settings.tools:
                functions = Functions(
                    settings.tools,
                    workers=settings.workers,
                    timeout_s=settings.timeout_s,
                    memory_mb=settings.memory_mb,
                    max_chars=settings.max_chars,
                )
                callers.add(functions)
                callers.uses_images = bool(functions.seeing)
            if settings.mcp:
                callers.add(McpServers(settings.mcp, settings.timeout_s))
        except BaseException:
            callers.close()
            raise
        return callers

    @classmethod
    def close(cls, shared: Callers) -> None:
        """End the processes and connections that the episodes share."""
        shared.close()

    def reset(self, row: dict[str, Any], seed: int) -> None:
        """Keep the prompt's images if a function uses images."""
        given = (row.get("images") or ()) if self.shared.uses_images else ()
        self._images = [data_url(image).partition(",")[2] for image in given]

    def step(self, action: Action) -> Step:
        """Run the calls of a turn concurrently; return their results in the order of the calls. A truncated turn is the
        last one, so its calls are not run."""
        if action.finish_reason != "stop":
            return Step(done=True)
        calls = PARSERS[self.settings.parser](action.raw)
        if not calls:
            return Step(done=True)
        made, rest = calls[: self.settings.max_calls], len(calls) - self.settings.max_calls
        answers = self._run(made)
        if rest > 0:
            most = f"error: a turn has at most {count(len(made), 'call')}; {rest} more were not made"
            answers.append((most, True))
        messages = [{"role": "tool", "content": _shown(result, self.settings.max_chars)} for result, _ in answers]
        parts = [part for result, _ in answers if not isinstance(result, str) for part in result]
        self._images += [part["image"].partition(",")[2] for part in parts if "image" in part]
        failed = sum(bad for _, bad in answers) + max(0, rest - 1)
        return Step(messages, info={"tool_calls": float(len(calls)), "tool_errors": float(failed)})

    def _run(self, calls: Sequence[Call]) -> list[Said]:
        """Return the results of concurrent calls, in the order of the calls."""
        deadline = time.monotonic() + self.settings.turn_timeout_s
        work = [
            self._wrong_with(call) or self.shared.begin(call.name, call.arguments, deadline, self._images)
            for call in calls
        ]
        answers: list[Said] = []
        for started in work:
            if isinstance(started, str):
                answers.append((started, True))
                continue
            try:
                answers.append(started.result(max(0.0, deadline + _GIVE_UP_S - time.monotonic())))
            except FutureTimeout:
                started.cancel()
                answers.append((f"error: no result within {self.settings.turn_timeout_s:g} s", True))
        return answers

    def _wrong_with(self, call: Call) -> str:
        """Return why a tool call cannot be run, as text for the policy; empty if it can."""
        if call.error:
            return f"error: {call.error}"
        if call.name not in self.shared.names:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self.shared.names)}"
        if nested_deeper(call.arguments, _DEPTH):
            return f"error: the arguments are nested more than {_DEPTH} levels deep"
        return ""


class Caller(Protocol):
    """Runs tools: `names` lists them, and `call(name, arguments, deadline, images)` may be called from any thread."""

    @property
    def names(self) -> list[str]:
        """Names of the tools."""

    def call(self, name: str, arguments: dict[str, Any], deadline: float, images: Sequence[str]) -> Said:
        """Return the tool's result, or its error as text for the model, and whether it failed."""

    def close(self) -> None:
        """End the processes or connections."""


class Callers:
    """All tools that the episodes of a replica call.

    Attributes:
        names: names of the tools.
        uses_images: at least one tool uses the images of its episode.
    """

    def __init__(self) -> None:
        self._all: list[Caller] = []
        self._by_name: dict[str, Caller] = {}
        self.uses_images = False
        self._threads = ThreadPoolExecutor(_THREADS, "tools")

    @property
    def names(self) -> list[str]:
        """Names of the tools."""
        return list(self._by_name)

    def add(self, caller: Caller) -> None:
        """Add a caller and its tools; `close` closes the caller, too."""
        self._all.append(caller)
        self._by_name |= dict.fromkeys(caller.names, caller)

    def begin(self, name: str, arguments: dict[str, Any], deadline: float, images: Sequence[str] = ()) -> Future[Said]:
        """Start `Caller.call` in a thread."""
        return self._threads.submit(self._by_name[name].call, name, arguments, deadline, list(images))

    def close(self) -> None:
        """Close all callers, even if one of them raises."""
        with ExitStack() as stack:
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            for caller in self._all:
                stack.callback(caller.close)


def _shown(said: str | list[dict[str, str]], most: int) -> str | list[dict[str, str]]:
    """Return a tool's result as the content of a message: a text is cut to `most` characters."""
    if isinstance(said, str):
        return _encodable(said[:most])
    return [{**part, "text": _encodable(part["text"])} if "text" in part else part for part in said]


def _encodable(text: str) -> str:
    """Replace unpaired surrogates, which JSON can express but tokenizers cannot encode, by `?`."""
    return text.encode("utf-8", "replace").decode()
