"""An MCP server for tests: `mcp_server.py` speaks over stdin and stdout, `mcp_server.py PORT` over HTTP."""

from __future__ import annotations

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("arithmetic", log_level="CRITICAL")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b


@server.tool()
def misbehave(how: str) -> str:
    """Fail in some way."""
    if how == "sleep":
        time.sleep(60)
    if how == "die":
        os._exit(3)
    if how == "shout":
        os.write(2, b"x" * 200_000)
        return "done"
    raise ToolError(how)


@server.tool()
def secret() -> str:
    """What the environment holds."""
    return os.environ.get("SECRET", "") + os.environ.get("OTHER", "")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
