"""The environment `tools`: every turn that calls tools is answered with their results, the first that does not is last.

user: 47*85=
assistant: <tool_call>{"name": "multiply", "arguments": {"a": 47, "b": 85}}</tool_call>
tool: 3995
assistant: 3995                      --> scored by the recipe's reward function
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, Protocol

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.envs.protocol import Action, Environment, EnvSettings, Step
from megarl.envs.tools.functions import Functions, load_tools
from megarl.envs.tools.mcp_servers import McpServer, McpServers, check_servers
from megarl.envs.tools.parsers import PARSERS, Call
from megarl.errors import ConfigError
from megarl.simulators.plain import nested_deeper

_DEPTH = 100


class ToolSettings(EnvSettings):
    """Keys of the section `env` for tool use."""

    tools: list[str] = Field(
        default_factory=list, description="functions that the model may call: file.py:fn, pkg.mod:fn"
    )
    mcp: dict[str, McpServer] = Field(default_factory=dict, description="MCP servers whose tools it may call, by name")
    parser: Literal["qwen", "qwen25", "llama3"] = Field("qwen", description="how the model writes a call")
    workers: PositiveInt = Field(1, description="processes per replica that run tools")
    timeout_s: PositiveFloat = Field(10.0, description="deadline of a call; a later one is answered with an error")
    memory_mb: PositiveInt = Field(2048, description="address space of a process that runs tools")
    max_chars: PositiveInt = Field(8192, le=1_000_000, description="characters of a result that the model is shown")


class Tools(Environment):
    """Answers calls with messages of the role `tool`; what is wrong with a call is answered, too."""

    Settings = ToolSettings
    scores: ClassVar[bool] = False

    @classmethod
    def check(cls, settings: ToolSettings) -> None:
        """Functions are loaded; servers are not started, which may take long and belongs to the machines of the run."""
        if not (settings.tools or settings.mcp):
            raise ConfigError("no tools", where="env.tools", found=[], fix="name a function, or a server in env.mcp")
        load_tools(settings.tools)
        check_servers(settings.mcp)

    @classmethod
    def tools(cls, settings: ToolSettings) -> list[dict[str, Any]]:
        """Schemas of all tools."""
        schemas = [tool.schema for tool in load_tools(settings.tools)]
        if settings.mcp:
            servers = McpServers(settings.mcp, settings.timeout_s)
            servers.close()
            _check_names([schema["function"]["name"] for schema in schemas], servers.names)
            schemas += servers.schemas
        return schemas

    @classmethod
    def open(cls, settings: ToolSettings) -> Callers:
        """The processes that run functions, and the connections to servers."""
        callers = Callers()
        try:
            if settings.tools:
                callers.add(
                    Functions(
                        settings.tools,
                        workers=settings.workers,
                        timeout_s=settings.timeout_s,
                        memory_mb=settings.memory_mb,
                        max_chars=settings.max_chars,
                    )
                )
            if settings.mcp:
                callers.add(McpServers(settings.mcp, settings.timeout_s))
        except BaseException:
            callers.close()
            raise
        return callers

    @classmethod
    def close(cls, shared: Callers) -> None:
        """End the processes and connections."""
        shared.close()

    def step(self, action: Action) -> Step:
        """Run the calls of a turn, in their order; a turn that was cut is the last one, so nothing waits for them."""
        if action.finish_reason != "stop":
            return Step(done=True)
        calls = PARSERS[self.settings.parser](action.raw)
        if not calls:
            return Step(done=True)
        answers = [self._run(call) for call in calls]
        messages = [{"role": "tool", "content": _encodable(text[: self.settings.max_chars])} for text, _ in answers]
        failed = sum(bad for _, bad in answers)
        return Step(messages, info={"tool_calls": float(len(calls)), "tool_errors": float(failed)})

    def _run(self, call: Call) -> tuple[str, bool]:
        if call.error:
            return f"error: {call.error}", True
        if call.name not in self.shared.names:
            return f"error: there is no tool {call.name!r}; there are {', '.join(self.shared.names)}", True
        if nested_deeper(call.arguments, _DEPTH):
            return f"error: the arguments are nested more than {_DEPTH} levels deep", True
        result: tuple[str, bool] = self.shared.call(call.name, call.arguments)
        return result


class Caller(Protocol):
    """What runs tools: `names` of them, `call(name, arguments) -> (text, failed)` from any thread."""

    @property
    def names(self) -> list[str]:
        """What the tools are called."""

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """What the tool said, or its error as the model is told it, and whether it failed."""

    def close(self) -> None:
        """End what runs them."""


class Callers:
    """All that the episodes of a replica call. `names`: of the tools."""

    def __init__(self) -> None:
        self._all: list[Caller] = []
        self._by_name: dict[str, Caller] = {}

    @property
    def names(self) -> list[str]:
        """What the tools are called."""
        return list(self._by_name)

    def add(self, caller: Caller) -> None:
        """Take on its tools; `close` ends it, too."""
        self._all.append(caller)
        self._by_name |= dict.fromkeys(caller.names, caller)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """As `Caller.call`."""
        return self._by_name[name].call(name, arguments)

    def close(self) -> None:
        """End everything, whatever one of them raises."""
        with ExitStack() as stack:
            for caller in self._all:
                stack.callback(caller.close)


def _check_names(functions: Sequence[str], served: Sequence[str]) -> None:
    if twice := sorted(set(functions) & set(served)):
        raise ConfigError(
            "a function and a tool of an MCP server have one name",
            where="env.tools",
            found=twice,
            fix="rename the function, or choose the server's tools with env.mcp.NAME.tools",
        )


def _encodable(text: str) -> str:
    """Text without halves of surrogate pairs, which JSON can spell and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()
