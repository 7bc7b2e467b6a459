"""Tools of MCP servers: real ones, over stdin and stdout and over HTTP."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.envs import Action
from megarl.envs.registry import load_environment
from megarl.envs.tools.environment import Tools
from megarl.envs.tools.mcp_servers import McpServer, McpServers
from megarl.rewards.process_output import LIMIT
from megarl.system.errors import ConfigError
from megarl.system.processes import free_port

if importlib.util.find_spec("mcp") is None:
    pytest.skip("the extra mcp is not installed", allow_module_level=True)

SERVER = str(Path(__file__).parent / "mcp_server.py")
LIMIT_S = 60.0


def program(**more: object) -> McpServer:
    return McpServer.model_validate({"command": sys.executable, "args": [SERVER], "start_s": 120.0, **more})


@pytest.fixture(scope="module")
def servers() -> Iterator[McpServers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "42")
        patch.setenv("OTHER", "not for servers")
        opened = McpServers({"arithmetic": program(pass_env=["SECRET"])}, LIMIT_S)
        yield opened
        opened.close()


def test_the_tools_of_a_server_have_schemas_and_are_called(servers):
    assert servers.schemas[0] == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    assert servers.names == ["multiply", "misbehave", "secret"]
    assert servers.call("multiply", {"a": 47, "b": 85}) == ("3995", False)


def test_what_goes_wrong_is_told_to_the_model(servers):
    for arguments in ({"a": 1}, {"a": "x", "b": 2}):
        text, failed = servers.call("multiply", arguments)
        assert failed
        assert text.startswith("error: ")
    text, failed = servers.call("misbehave", {"how": "raise"})
    assert failed
    assert "raise" in text


def test_what_a_server_prints_as_errors_has_a_bound(servers, capfd):
    assert servers.call("misbehave", {"how": "shout"}) == ("done", False)
    printed, deadline = "", time.monotonic() + LIMIT_S
    while "dropped" not in printed and time.monotonic() < deadline:
        time.sleep(0.01)
        captured = capfd.readouterr()
        printed += captured.out + captured.err
    assert printed.count("x") <= LIMIT
    assert "the MCP server 'arithmetic': output beyond" in printed


def test_a_server_that_ends_is_started_again(servers):
    text, failed = servers.call("misbehave", {"how": "die"})
    assert failed
    assert text.startswith("error: ")
    assert servers.call("multiply", {"a": 2, "b": 3}) == ("6", False)


def test_a_late_result_is_an_error(servers, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(servers, "_timeout_s", 1.0)
        assert servers.call("misbehave", {"how": "sleep"}) == ("error: no result within 1 s", True)
    assert servers.call("multiply", {"a": 2, "b": 3}) == ("6", False)


def test_a_server_sees_no_variable_that_it_was_not_given(servers):
    assert servers.call("secret", {}) == ("42", False)


@dataclass
class Web:
    """A server over HTTP, and its process, which a test may replace."""

    port: int
    process: subprocess.Popen[bytes]

    def settings(self, *tools: str) -> dict[str, Any]:
        return {"url": f"http://127.0.0.1:{self.port}/mcp", "tools": list(tools)}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    port = free_port()
    served = Web(port, serve(port))
    yield served
    served.end()


def test_a_server_over_http_is_reached_again_after_its_end(web):
    servers = McpServers({"web": McpServer(**web.settings("multiply"))}, LIMIT_S)
    assert servers.names == ["multiply"]
    assert servers.call("multiply", {"a": 47, "b": 85}) == ("3995", False)
    web.end()
    text, failed = servers.call("multiply", {"a": 2, "b": 3})
    assert failed
    assert text.startswith("error: ")
    web.process = serve(web.port)
    assert servers.call("multiply", {"a": 2, "b": 3}) == ("6", False)
    servers.close()


def serve(port: int) -> subprocess.Popen[bytes]:
    """A server that listens."""
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server did not start")


def test_what_a_model_calls_may_be_functions_and_servers_together(web):
    own = {"name": "tools", "mcp": {"arithmetic": web.settings("multiply")}}
    functions = [f"{Path(__file__).parent / 'some_tools.py'}:{name}" for name in ("shift", "sums")]
    _, settings = load_environment({**own, "tools": functions})
    assert [schema["function"]["name"] for schema in Tools.tools(settings)] == ["shift", "sums", "multiply"]
    shared = Tools.open(settings)
    try:
        assert shared.names == ["shift", "sums", "multiply"]
        assert shared.begin("multiply", {"a": 2, "b": 3}, time.monotonic() + 60).result(60) == ("6", False)
        assert shared.begin("sums", {"numbers": [1, 2]}, time.monotonic() + 60).result(60) == ('{"sum": 3.0}', False)
    finally:
        Tools.close(shared)


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({}, "either a command or a url"),
        ({"command": "x", "url": "http://a/mcp"}, "either a command or a url"),
        ({"url": "ftp://a/mcp"}, "http:// or https://"),
        ({"url": "https://me:password@a/mcp"}, "token_env"),
        ({"url": "http://a.example/mcp", "token_env": "T"}, "sent only over https://"),
        ({"url": "http://a/mcp", "args": ["x"]}, "are only for a command"),
        ({"command": "x", "token_env": "T"}, "pass_env"),
        ({"comand": "x"}, "comand"),
    ],
)
def test_a_server_that_is_described_wrongly_is_refused(server, message):
    with pytest.raises(ConfigError, match=message):
        load_environment({"name": "tools", "mcp": {"one": server}})


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (program(command="/nowhere/to/be/found"), "'one' does not list its tools: FileNotFoundError"),
        (program(args=["-c", "pass"]), "'one' does not list its tools[\\s\\S]*run the command"),
        (program(args=["-c", "import time; time.sleep(60)"], start_s=0.5), "nothing within 0.5 s"),
        (program(pass_env=["NOT_THERE"]), "NOT_THERE is not set"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(server, message):
    with pytest.raises(ConfigError, match=message):
        McpServers({"one": server}, LIMIT_S)


def test_a_tool_that_a_server_does_not_have_and_two_tools_of_one_name_are_refused(web):
    with pytest.raises(ConfigError, match=r"lacks this tool[\s\S]*divide[\s\S]*multiply"):
        McpServers({"one": McpServer(**web.settings("divide"))}, LIMIT_S)
    both = {name: McpServer(**web.settings("multiply")) for name in ("one", "two")}
    with pytest.raises(ConfigError, match=r"both have a tool 'multiply'"):
        McpServers(both, LIMIT_S)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("megarl.envs.tools.mcp_servers.installed_version", lambda name: None)
    with pytest.raises(ConfigError, match=r"'\.\[mcp\]'"):
        McpServers({"one": program()}, LIMIT_S)


def test_a_server_that_does_not_come_back_is_no_answer_of_its_tool(tmp_path):
    """It raises, so `env.on_error` decides; calls that wait do not each try for `start_s`."""
    once = "import os, runpy, sys; os.path.exists('gone') and sys.exit(1); open('gone', 'w')"
    once += f"; runpy.run_path({SERVER!r}, run_name='__main__')"
    servers = McpServers({"one": program(args=["-c", once], cwd=str(tmp_path))}, LIMIT_S)
    text, failed = servers.call("misbehave", {"how": "die"})
    assert (failed, text[:7]) == (True, "error: ")
    for _ in range(20):
        with pytest.raises(ConfigError, match="'one' does not list its tools"):
            servers.call("multiply", {"a": 2, "b": 3})
    servers.close()


def test_a_dry_run_starts_no_server():
    own = {"name": "tools", "mcp": {"one": {"command": "not-there-at-all"}}}
    kind, settings = load_environment(own)
    with pytest.raises(ConfigError, match=r"command of the MCP server 'one' does not exist[\s\S]*not-there-at-all"):
        kind.check(settings)
    kind, settings = load_environment({**own, "mcp": {"one": {"command": sys.executable, "args": ["-c", "1 / 0"]}}})
    kind.check(settings)


def test_a_turn_that_was_cut_calls_nothing():
    kind, settings = load_environment({"name": "tools", "tools": []})
    said = '<tool_call>{"name": "x"}</tool_call>'
    assert kind(settings, None).step(Action(said, said, [], "length", 0)).done
