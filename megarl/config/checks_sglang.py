"""Checks of `rollout.engine: sglang`: what its servers need, and what they cannot do."""

from __future__ import annotations

from megarl.compat.sglang import find_python
from megarl.config.checklist import Checklist, divisors
from megarl.config.run import RunConfig
from megarl.errors import ConfigError

_NAME = "servers"
EVERY_INTERFACE = ("0.0.0.0", "::", "*", "")


def check_servers(config: RunConfig, checks: Checklist) -> None:
    """All checks of the servers; none when another engine generates."""
    if config.rollout.engine != "sglang":
        return
    _check_interpreter(config, checks)
    _check_layout(config, checks)
    _check_limits(config, checks)
    _check_abilities(config, checks)


def _check_interpreter(config: RunConfig, checks: Checklist) -> None:
    servers = config.rollout.sglang
    if servers.urls:
        checks.ok(_NAME, f"{len(servers.urls)} servers run already")
        return
    try:
        checks.ok(_NAME, f"their interpreter is {find_python(servers.python, cuda=None)}")
    except ConfigError as error:
        checks.from_error(_NAME, error)


def _check_layout(config: RunConfig, checks: Checklist) -> None:
    servers, nnodes = config.rollout.sglang, config.cluster.nnodes
    if servers.tp_size % servers.ep_size:
        checks.fail(
            _NAME,
            "rollout.sglang.ep_size",
            f"expert-parallel ranks are among the {servers.tp_size} tensor-parallel ones",
            found=servers.ep_size,
            allowed=divisors(servers.tp_size),
            fix="change ep_size or tp_size",
        )
    if servers.urls:
        return
    if servers.host in EVERY_INTERFACE:
        checks.fail(
            _NAME,
            "rollout.sglang.host",
            "servers must not listen on every interface",
            found=servers.host,
            allowed="the address of one private interface, or null",
            fix="set rollout.sglang.host=null",
        )
    key = "rollout.sglang.servers"
    if not checks.divides(_NAME, key, servers.servers, nnodes, key, "cluster.nnodes"):
        return
    needed = servers.servers // nnodes * servers.ranks
    if servers.gpus is not None and len(servers.gpus) != needed:
        checks.fail(
            _NAME,
            "rollout.sglang.gpus",
            f"the {servers.servers // nnodes} servers of a machine have {needed} ranks (tp_size * dp_size each)",
            found=servers.gpus,
            allowed=f"a list of {needed} devices",
            fix="name one device per rank, or none",
        )


def _check_limits(config: RunConfig, checks: Checklist) -> None:
    servers, cluster = config.rollout.sglang, config.cluster
    longest = config.data.max_prompt_tokens + config.rollout.sampling.max_new_tokens
    if servers.context_length is not None and servers.context_length < longest:
        checks.fail(
            _NAME,
            "rollout.sglang.context_length",
            f"prompt and response together have up to {longest} tokens",
            found=servers.context_length,
            allowed=f"whole number from {longest}",
            fix=f"set it to {longest} or to null",
        )
    if cluster.nproc > 1 and servers.start_timeout_s >= cluster.timeout_s:
        checks.fail(
            _NAME,
            "rollout.sglang.start_timeout_s",
            f"the other processes give up after cluster.timeout_s = {cluster.timeout_s:g} s, before a restart does",
            found=servers.start_timeout_s,
            allowed=f"number below {cluster.timeout_s:g}",
            fix=f"set it to {cluster.timeout_s / 2:g}, or cluster.timeout_s={2 * servers.start_timeout_s:g}",
        )


def _check_abilities(config: RunConfig, checks: Checklist) -> None:
    sections = {"rollout.sampling": config.rollout.sampling, "validation.sampling": config.validation.sampling}
    for key, sampling in sections.items():
        if sampling.min_new_tokens:
            checks.fail(
                _NAME,
                f"{key}.min_new_tokens",
                "SGLang has no shortest length for servers without a tokenizer",
                found=sampling.min_new_tokens,
                allowed="0",
                fix=f"set {key}.min_new_tokens=0, or rollout.engine=embedded",
            )
    if config.rollout.stale_steps:
        checks.fail(
            _NAME,
            "rollout.stale_steps",
            "servers get the new weights after every step",
            found=config.rollout.stale_steps,
            allowed="0",
            fix="set rollout.stale_steps=0, or rollout.engine=embedded",
        )
