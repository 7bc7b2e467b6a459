"""Servers that run already (`rollout.sglang.urls`): are they what the recipe takes them for?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.comm import Group, broadcast_json
from megarl.config.sglang import SGLangConfig
from megarl.errors import ConfigError, ServerError
from megarl.rollout.sglang.fleet import Fleet, Server

_SHORT_NAMES = {"float": "float32", "half": "float16"}


def check_external(
    fleet: Fleet, config: SGLangConfig, dtype: str, longest: int, *, asks: bool, group: Group = None
) -> None:
    """Compare what every server was started with with the recipe. Collective over `group`.

    A dtype of `auto` does not pass: the server does not tell what it stands for.

    Args:
        fleet: of servers that answer, or have failed.
        config: `rollout.sglang`.
        dtype: of the weights that servers are to hold: float32 or bfloat16.
        longest: tokens of the longest sequence; 0 is not checked.
        asks: this rank does it for all; it is rank 0.
        group: ranks of the run.

    Raises:
        ConfigError: on every rank, when one server differs.
    """
    found: list[dict[str, Any]] = []
    for server in fleet.servers if asks else []:
        if server.state != "failed":
            try:
                info = server.api.call("/server_info", deadline_s=config.start_timeout_s, phase="start", method="GET")
            except ServerError as error:
                fleet.mark_failed(server, error.reason)
            else:
                found += _differences(server, info, config, dtype, longest)
    for problem in broadcast_json(found, 0, group):
        raise ConfigError(**problem)


def _differences(
    server: Server, info: dict[str, Any], config: SGLangConfig, dtype: str, longest: int
) -> Iterator[dict[str, Any]]:
    """Arguments of ConfigError for everything that does not fit."""
    where = f"{server.api.name} at {server.api.url}"
    for name in ("tp_size", "ep_size", "dp_size"):
        wanted, there, option = getattr(config, name), info.get(name), f"--{name.replace('_', '-')}"
        if there != wanted:
            yield {
                "what": f"{where} was started with {name} {there}",
                "where": f"rollout.sglang.{name}",
                "found": wanted,
                "allowed": f"{there}, as all servers in rollout.sglang.urls have it",
                "fix": f"set rollout.sglang.{name}={there}, or start the server with {option} {wanted}",
            }
    there = _SHORT_NAMES.get(str(info.get("dtype")), info.get("dtype"))
    if there != dtype:
        yield {
            "what": f"{where} computes in {there}",
            "where": "rollout.dtype",
            "found": dtype,
            "allowed": f"{there}, as all servers in rollout.sglang.urls have it",
            "fix": f"start the server with --dtype {dtype}, or change rollout.dtype",
        }
    limit = info.get("context_length")
    if limit is not None and limit < longest:
        yield {
            "what": f"{where} takes sequences of up to {limit} tokens, and prompt and response have up to {longest}",
            "where": "rollout.sglang.urls",
            "found": server.api.url,
            "allowed": f"servers with a --context-length from {longest}",
            "fix": f"start it with --context-length {longest}, or lower data.max_prompt_tokens or "
            "rollout.sampling.max_new_tokens",
        }
