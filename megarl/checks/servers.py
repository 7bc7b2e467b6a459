"""Check that servers listen at the addresses that the recipe gives."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from megarl.config.run import RunConfig

_CONNECT_S = 2.0


def silent_servers(config: RunConfig) -> str | None:
    """Return the warning for addresses of `rollout.sglang.urls` that take no connection now; None when all do."""
    if config.rollout.engine != "sglang":
        return None
    servers = config.rollout.sglang
    silent = [f"{url} ({why})" for url in servers.urls if (why := _refusal(url))]
    if not silent:
        return None
    return (
        f"rollout.sglang.urls: nothing answers at {', '.join(silent)}; the run starts all the same and waits for its "
        f"servers when it needs them (rollout.sglang.start_timeout_s = {servers.start_timeout_s:g} s)"
    )


def _refusal(url: str) -> str | None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
