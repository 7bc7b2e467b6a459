"""Compares external servers (`rollout.sglang.urls`) with the recipe."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.adapters import adapter_problems
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.routes import SWITCH
from megarl.rollout.sglang.server import HEALTH_S
from megarl.system.comm import WorkerGroup
from megarl.system.compat.sglang import LOADER, PATCH_LOADER
from megarl.system.errors import ConfigError, ServerError

_SHORT_NAMES = {"float": "float32", "half": "float16"}
#: Fields of /server_info that are compared, and their types.
_FIELDS = {"tp_size": int, "ep_size": int, "dp_size": int, "nnodes": int, "dtype": str, "context_length": int | None}
#: Names of sizes in the recipe and in /server_info. Versions without the last field have other arguments for it.
_SIZES = {"tp_size": "tp_size", "ep_size": "ep_size", "nnodes": "nnodes", "attention_dp": "attn_dp_size"}


Problem = dict[str, Any]  # keyword arguments of ConfigError


def check_external(fleet: Fleet, examine: Callable[[Server], list[Problem]] | None, world: WorkerGroup) -> None:
    """Compare the start settings of every server with the recipe. Collective over `world`.

    A server that fails and answers again later is compared before it is used.

    Args:
        fleet: external servers, each of which answers or has failed.
        examine: `differences` on rank 0, which queries all servers; None on other ranks.

    Raises:
        ConfigError: on every rank, if a server's settings differ or are not available.
        ServerError: on every rank, if no server is left.
    """
    problems: list[Problem] = []
    lost: list[list[Any]] = []
    servers = [server for server in fleet.servers if server.state != "failed"]
    if examine is not None and servers:
        fleet.examine = functools.partial(_problem, examine)
        with ThreadPoolExecutor(len(servers)) as pool:
            answers = [pool.submit(examine, server) for server in servers]
        for server, answer in zip(servers, answers, strict=True):
            try:
                problems += answer.result()
            except ServerError as error:
                lost.append([server.number, error.reason])
    # The other ranks wait here, so rank 0 must not raise an error about a server before.
    problems, lost = world.broadcast_json([problems, lost])
    for problem in problems:
        raise ConfigError(**problem)
    for number, why in lost:
        fleet.mark_failed(fleet.servers[number], why)
    fleet.need_one()


def differences(
    server: Server, *, config: SGLangConfig, dtype: str, longest: int, images: bool = False
) -> list[Problem]:
    """Return a problem for each setting of a running server that differs from the recipe.

    A server dtype of `auto` counts as different, because the server does not report the actual dtype.

    Args:
        dtype: the recipe's dtype of the servers' weights: float32, bfloat16 or float16.
        longest: tokens of the longest sequence of the run; 0: do not check the servers' limit.
        images: whether prompts may have images.

    Raises:
        ServerError: the server does not answer.
    """
    try:
        info = server.api.call("/server_info", deadline_s=HEALTH_S, phase="start", method="GET")
    except ServerError as error:
        if error.status is None:
            raise
        return [_unclear(server, error.reason)]
    return [
        *_differences(server, info, config, dtype, longest),
        *(_image_cache_problem(server, info) if images else ()),
        *_adapter_problems(server, info, config),
    ]


def _problem(examine: Callable[[Server], list[Problem]], server: Server) -> str | None:
    """Return why a server cannot be used; None if it can be used."""
    try:
        problems = examine(server)
    except ServerError as error:
        return error.reason
    return problems[0]["what"] if problems else None


def _image_cache_problem(server: Server, info: dict[str, Any]) -> Iterator[Problem]:
    """Yield a problem if the server would use cached image features of old weights after a weight update."""
    if LOADER not in (info.get("custom_weight_loader") or ()):
        yield {
            "what": f"{server.api.name} at {server.api.url} would keep cached image features of old weights after an "
            "update: it was not started with serve.py",
            "where": "rollout.sglang.urls",
            "found": server.api.url,
            "allowed": f"servers with --custom-weight-loader {LOADER} {PATCH_LOADER}",
            "fix": "start it as described in docs/servers.md, or leave rollout.sglang.urls out",
        }


def _adapter_problems(server: Server, info: dict[str, Any], config: SGLangConfig) -> Iterator[Problem]:
    """Yield a problem if the server cannot load the adapters that the run sends separately."""
    for lack, option in adapter_problems(info, config):
        yield {
            "what": f"{server.api.name} at {server.api.url} {lack}",
            "where": "sync.adapters",
            "found": "separate",
            "allowed": "merged; separate with servers that load the adapters of this run",
            "fix": f"start the server with {option} (docs/lora.md), or set sync.adapters=merged",
        }


def _unclear(server: Server, why: str) -> Problem:
    """Return the problem of a server whose /server_info is missing or incomplete."""
    return {
        "what": f"{server.api.name} at {server.api.url} does not report its start settings: /server_info: {why}",
        "where": "rollout.sglang.urls",
        "found": server.api.url,
        "allowed": "SGLang servers",
        "fix": "name SGLang's own address, not that of a router, and the variable of its key in "
        "rollout.sglang.api_key_env",
    }


def _differences(
    server: Server, info: dict[str, Any], config: SGLangConfig, dtype: str, longest: int
) -> Iterator[Problem]:
    """Yield a problem for each start setting that differs from the recipe."""
    for name, kind in _FIELDS.items():
        if not isinstance(info.get(name), kind):
            yield _unclear(server, f"{name} is {info[name]!r}" if name in info else f"no {name} in its answer")
            return
    where = f"{server.api.name} at {server.api.url}"
    if info["dp_size"] > 1:
        yield {
            "what": f"{where} has several replicas of the model, whose weights SGLang cannot update",
            "where": "rollout.sglang.urls",
            "found": f"dp_size {info['dp_size']}",
            "allowed": "servers of one replica, whose attention may be data parallel (rollout.sglang.attention_dp)",
            "fix": "start several servers without --dp-size, or one with --attn-dp-size",
        }
    for name, field in _SIZES.items():
        wanted, actual, option = getattr(config, name), info.get(field, 1), f"--{field.replace('_', '-')}"
        if actual != wanted:
            yield {
                "what": f"{where} was started with {field} {actual}",
                "where": f"rollout.sglang.{name}",
                "found": wanted,
                "allowed": f"{actual}, which all servers in rollout.sglang.urls must have",
                "fix": f"set rollout.sglang.{name}={actual}, or start the server with {option} {wanted}",
            }
    actual = _SHORT_NAMES.get(info["dtype"], info["dtype"])
    if actual != dtype:
        yield {
            "what": f"{where} computes in {actual}",
            "where": "rollout.dtype",
            "found": dtype,
            "allowed": f"{actual}, which all servers in rollout.sglang.urls must have",
            "fix": f"start the server with --dtype {dtype}, or change rollout.dtype",
        }
    if SWITCH in config.extra_args and not info.get("enable_return_routed_experts"):
        yield {
            "what": f"{where} does not return the routes of its samples",
            "where": "rollout.replay_routes",
            "found": True,
            "allowed": f"servers with {SWITCH}",
            "fix": f"start the server with {SWITCH}, or set rollout.replay_routes=false",
        }
    limit = info.get("context_length")
    if limit is not None and limit < longest:
        yield {
            "what": f"{where} accepts sequences of up to {limit} tokens, but prompt and response have up to {longest}",
            "where": "rollout.sglang.urls",
            "found": server.api.url,
            "allowed": f"servers with a --context-length from {longest}",
            "fix": f"start the server with --context-length {longest}, or lower data.max_prompt_tokens or "
            "rollout.sampling.max_new_tokens",
        }
