"""Checks of `rollout.engine: sglang`: what servers require, and their limits."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megarl.architectures.vision_language import VisionEncoder
from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.layout import divisors
from megarl.config.base import Section
from megarl.config.run import RunConfig
from megarl.config.sglang import SGLangConfig, url_problem
from megarl.dag.placement import Placement
from megarl.rollout.sglang.server_places import NAME as _NAME
from megarl.rollout.sglang.server_places import check_colocated, check_gpus
from megarl.system.compat.cuda import check_same_nccl, driver_problem, toolkit_problem, version_in
from megarl.system.compat.sglang import find_python, install_fix, sglang_version
from megarl.system.errors import ConfigError, count
from megarl.system.imports import installed_version
from megarl.system.processes import nvidia_devices

if TYPE_CHECKING:
    from megarl.checks.checklist import Checklist

EVERY_INTERFACE = ("0.0.0.0", "::", "*", "")
#: Server arguments that megarl sets itself. The last one counts, so setting one again would bypass a check.
_OURS = (
    *("--model-path", "--model", "--dtype", "--load-format", "--skip-tokenizer-init", "--device"),
    *("--custom-weight-loader", "--host", "--port", "--api-key", "--admin-api-key"),
    *("--tp-size", "--tensor-parallel-size", "--ep-size", "--expert-parallel-size", "--ep", "--tp"),
    *("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-load-format"),
    *("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--attn-dp-size", "--enable-dp-attention"),
    *("--dp-size", "--data-parallel-size", "--dp", "--pp-size", "--pipeline-parallel-size", "--pp"),
)
#: Keys of `rollout.sglang` that matter only when megarl starts servers.
_STARTED = (
    *("servers", "gpus", "host", "memory_fraction", "max_total_tokens", "context_length", "attention_backend"),
    *("deterministic", "speculative", "extra_args"),
)
#: Number of tokens by which an input must be shorter than a server's capacity, plus one token to generate.
_KEPT_FREE = 6


def check_servers(
    config: RunConfig,
    placement: Placement | None,
    facts: ModelFacts | None,
    checks: Checklist,
    launcher: str | None = None,
    *,
    here: bool = True,
) -> None:
    """Check the servers.

    Args:
        facts: sizes of the model; None: unknown.
        here: the run may be on this machine, whose GPUs and packages then count.
    """
    checks = checks.of(_NAME)
    _check_ignored(config, checks)
    _check_interpreter(config, checks, here=here)
    asking = 0 if placement is None else placement.asking
    known = placement is not None or not config.placement.asks_for_teams  # whether the servers' GPUs are known
    _check_layout(config, asking, checks, known=known)
    # otherwise the servers' GPUs are unknown
    if here and known and launcher != "ray" and "CUDA_VISIBLE_DEVICES" not in os.environ:
        check_gpus(config, asking, checks)
    if facts is not None:
        _check_model(config, facts, checks)
        _check_interrupted(config, facts, checks)
        _check_fp8(config, facts, checks)
    _check_arguments(config, checks)
    _check_speculative(config, checks)
    _check_limits(config, checks)
    _check_abilities(config, checks)
    check_colocated(config, checks)
    _check_sync(config, checks)


def _changed(path: str, section: Section) -> list[str]:
    """Return the keys of `section` that are not at their defaults."""
    default = type(section)()
    return [f"{path}.{name}" for name in type(section).model_fields if getattr(section, name) != getattr(default, name)]


def _check_ignored(config: RunConfig, checks: Checklist) -> None:
    """Warn of keys that other settings make ineffective."""
    servers, sync = config.rollout.sglang, config.sync
    keys = [key for key in _changed("rollout.sglang", servers) if key.rpartition(".")[2] in _STARTED]
    if servers.urls and keys:
        checks.warn(
            "rollout.sglang.urls",
            f"these servers already run, so nothing uses {', '.join(keys)}",
            found=servers.urls,
            fix="start the servers with these settings yourself, and remove the keys; or remove rollout.sglang.urls",
        )
    if servers.api_key_env is not None and not servers.urls:
        checks.warn(
            "rollout.sglang.api_key_env",
            "this is only for servers that already run; servers of a run get their own key",
            found=servers.api_key_env,
            fix="set rollout.sglang.urls, or remove this key",
        )
    _check_transport_key("sync.folder", sync.folder, sync.transport, ("disk",), checks)
    _check_transport_key("sync.address", sync.address, sync.transport, ("distributed", "auto"), checks)


def _check_transport_key(
    key: str, found: str | None, transport: str, users: tuple[str, ...], checks: Checklist
) -> None:
    if found is not None and transport not in users:
        what = "takes tensor or distributed, which do not use it" if transport == "auto" else "does not use it"
        checks.warn(
            key,
            f"the transport {transport} {what}",
            found=found,
            fix=f"set sync.transport={users[0]}, or leave {key} out",
        )


def _check_interpreter(config: RunConfig, checks: Checklist, *, here: bool) -> None:
    servers = config.rollout.sglang
    if servers.urls:
        wrong = [f"{url}: {why}" for url in servers.urls if (why := url_problem(url, "rollout.sglang.api_key_env"))]
        if wrong or len({url.rstrip("/") for url in servers.urls}) < len(servers.urls):
            checks.fail(
                "rollout.sglang.urls",
                "invalid or repeated addresses of servers",
                found=wrong or servers.urls,
                allowed="a list of http://host:port or https://host:port, each once",
                fix="write each address once, beginning with http:// or https://, and without a key",
            )
            return
        with checks.recorded():
            servers.external_key()
            checks.ok(f"{', '.join(servers.urls)}: asked when the run starts")
        return
    try:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        # A recipe for GPUs needs GPU servers, also in a dry run on a machine without GPUs.
        cuda = True if config.cluster.device_memory_gb is not None or (nvidia_devices() and not hidden) else None
        python = find_python(servers.python, cuda=cuda)
        checks.ok(f"their interpreter is {python}, with sglang {sglang_version(python, cuda=cuda)}")
        if cuda and servers.colocated and config.sync.transport == "delta":
            checks.fail(
                "sync.transport",
                "colocated servers release their weights in each update, so a delta has nothing to change",
                found="delta",
                allowed="auto, tensor or disk with rollout.sglang.colocated",
                fix="set sync.transport=auto, or rollout.sglang.colocated=false",
            )
        broadcast = config.sync.transport == "distributed" or (
            config.sync.transport == "auto" and not servers.colocated
        )
        if here and nvidia_devices() and not hidden:
            _check_cuda(config, python, checks)
            if broadcast:  # gloo without GPUs
                check_same_nccl(python)
    except ConfigError as error:
        # the run is for another machine
        if not here or (config.cluster.device_memory_gb is not None and not nvidia_devices()):
            checks.warn("rollout.sglang.python", f"not here: {error.what}", fix=error.fix)
        else:
            checks.from_error(error)


def _check_cuda(config: RunConfig, python: Path, checks: Checklist) -> None:
    """Warn of a driver, toolkit or torch with which servers on this machine's GPUs may not start or receive weights."""
    for problem in (driver_problem(), toolkit_problem(python=python)):
        if problem is not None:
            checks.warn(problem.where or "", problem.what, found=problem.found, fix=problem.fix)
    ours, theirs = installed_version("torch"), version_in(python, "torch")
    if config.sync.transport not in ("disk", "delta") and ours and theirs and _public(ours) != _public(theirs):
        checks.warn(
            "rollout.sglang.python",
            "trainer and servers have different versions of torch, and exchanging weights between these on GPUs is "
            "untested",
            found=f"trainer {ours}, servers {theirs}",
            fix=f"install the trainer with torch {_public(theirs)} (constraints-gpu.txt), or set sync.transport=disk",
        )


def _public(version: str) -> str:
    return version.partition("+")[0]


def _check_layout(config: RunConfig, asking: int, checks: Checklist, *, known: bool) -> None:
    """Check the layout of a server and the number of servers per machine. `known` means that the teams are known."""
    servers, nnodes = config.rollout.sglang, config.cluster.nnodes
    if servers.tp_size % servers.ep_size:
        checks.fail(
            "rollout.sglang.ep_size",
            f"expert-parallel ranks are among the {servers.tp_size} tensor-parallel ones",
            found=servers.ep_size,
            allowed=divisors(servers.tp_size),
            fix="change ep_size or tp_size",
        )
    if servers.dp_size > 1:
        checks.fail(
            "rollout.sglang.dp_size",
            "SGLang does not take new weights in a server with several replicas",
            found=servers.dp_size,
            allowed="1",
            fix="set rollout.sglang.dp_size=1, and start more servers where there are GPUs",
        )
    _check_nodes(config, checks)
    if servers.urls:
        return
    if servers.host in EVERY_INTERFACE:
        checks.fail(
            "rollout.sglang.host",
            "servers must not listen on every interface",
            found=servers.host,
            allowed="the address of one private interface, or null",
            fix="set rollout.sglang.host=null",
        )
    if servers.host is not None and nnodes > 1:
        checks.fail(
            "rollout.sglang.host",
            f"one address cannot be that of {nnodes} machines",
            found=servers.host,
            allowed="null: on each machine the address of the interface that reaches the first one",
            fix="set rollout.sglang.host=null",
        )
    key = "rollout.sglang.servers"
    if nnodes > 1 and (asking or not known):  # on some of the machines; see megarl.checks.placement
        return
    per, by = nnodes // math.gcd(nnodes, servers.nnodes), "cluster.nnodes"
    by += " / rollout.sglang.nnodes" if servers.nnodes > 1 else ""
    if not checks.divides(key, servers.servers, per, "the number", by):
        return
    needed = servers.servers * servers.ranks // nnodes
    _check_waiting(config, needed, checks)
    if servers.gpus is not None and len(servers.gpus) != needed:
        checks.fail(
            "rollout.sglang.gpus",
            f"a machine has {count(needed, 'rank')} of servers (servers * tp_size * dp_size / cluster.nnodes)",
            found=servers.gpus,
            allowed=f"a list of {count(needed, 'device')}",
            fix="name one device per rank, or none",
        )


def _check_nodes(config: RunConfig, checks: Checklist) -> None:
    """Check servers on several machines: each machine has equally many ranks, GPUs of their own, and no memory of the
    trainer's."""
    servers, machines = config.rollout.sglang, config.cluster.nnodes
    if servers.nnodes == 1:
        return
    key = "rollout.sglang.nnodes"
    if servers.tp_size % servers.nnodes:
        checks.fail(
            key,
            f"the machines of a server share its {servers.tp_size} tensor-parallel ranks",
            found=servers.nnodes,
            allowed=divisors(servers.tp_size),
            fix="change nnodes or tp_size",
        )
    if not servers.urls and servers.nnodes > machines:
        checks.fail(
            key,
            f"the run has {count(machines, 'machine')} (cluster.nnodes)",
            found=servers.nnodes,
            allowed=f"at most {machines}",
            fix=f"set {key}={machines}, or give the run more machines",
        )
    if servers.colocated:
        checks.fail(
            key,
            "servers on the trainer's GPUs get their weights through the memory of one machine",
            found=servers.nnodes,
            allowed="1 with rollout.sglang.colocated",
            fix="set rollout.sglang.colocated=false and give the servers GPUs of their own, or set "
            f"{key}=1 and tp_size to GPUs of one machine",
        )
    if config.sync.transport in ("tensor", "delta"):
        checks.fail(
            "sync.transport",
            f"a server on {count(servers.nnodes, 'machine')} takes nothing through the memory of one of them",
            found=config.sync.transport,
            allowed="auto, distributed or disk with rollout.sglang.nnodes > 1",
            fix="set sync.transport=distributed",
        )


def _check_waiting(config: RunConfig, needed: int, checks: Checklist) -> None:
    """Warn of GPUs of a team without servers that idle while others generate. `needed`: GPUs per machine in use."""
    servers, here = config.rollout.sglang, config.cluster.nproc // config.cluster.nnodes
    if servers.colocated and config.cluster.device_memory_gb is not None and needed < here:
        checks.warn(
            "rollout.sglang.servers",
            f"{here - needed} of the {count(here, 'GPU')} of a machine have no server, and wait while others generate",
            found=servers.servers,
            fix=f"set rollout.sglang.servers={config.cluster.nproc // servers.ranks}",
        )


def _check_model(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    """Check the model: servers split heads and experts evenly or pad them, and store it in another form."""
    servers = config.rollout.sglang
    if facts.heads % servers.tp_size:
        checks.fail(
            "rollout.sglang.tp_size",
            f"the ranks of a server share the model's {facts.heads} attention heads",
            found=servers.tp_size,
            allowed=divisors(facts.heads),
            fix="change tp_size",
        )
    if servers.ep_size > 1 and (not facts.experts or facts.experts % servers.ep_size):
        checks.fail(
            "rollout.sglang.ep_size",
            f"expert-parallel ranks share the model's {facts.experts} experts",
            found=servers.ep_size,
            allowed=divisors(facts.experts) if facts.experts else "1",
            fix="change ep_size",
        )
    if facts.is_moe and facts.dense_layers:  # SGLang 0.5.23 reads neither key
        checks.fail(
            "model: mlp_only_layers, decoder_sparse_step",
            "servers would give experts to layers that have none",
            found=f"{facts.dense_layers} of {count(facts.layers, 'layer')} without experts",
            allowed="experts in all layers where SGLang servers generate",
            fix="set rollout.engine=embedded, or take a model with experts in all layers",
        )


def _check_fp8(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    if not config.sync.fp8:
        return
    from megarl.rollout.sglang.block_fp8 import unsplittable  # imports torch
    from megarl.sync.plan import FP8_BLOCK

    servers = config.rollout.sglang
    if wrong := unsplittable(facts, servers.tp_size, servers.ep_size):
        checks.fail(
            "sync.fp8",
            f"a rank of a server would hold parts of blocks of {FP8_BLOCK} x {FP8_BLOCK} weights: {', '.join(wrong)}",
            found=True,
            allowed=f"widths on each of {count(servers.tp_size, 'rank')} that are multiples of {FP8_BLOCK}",
            fix="lower rollout.sglang.tp_size, or set sync.fp8=false",
        )


def _check_speculative(config: RunConfig, checks: Checklist) -> None:
    """Check that a draft is given exactly when it is needed, and that only the model gets weights."""
    draft = config.rollout.sglang.speculative
    if draft is None:
        return
    own = draft.algorithm == "NGRAM"
    if own != (draft.draft_path is None):
        checks.fail(
            "rollout.sglang.speculative.draft_path",
            f"{draft.algorithm} {'uses no' if own else 'needs a'} draft model",
            found=draft.draft_path,
            allowed="null with NGRAM; with the others a folder or hub name that servers can read",
            fix="leave it out" if own else "name the draft",
        )
    shape = {"steps": draft.steps, "topk": draft.topk, "draft_tokens": draft.draft_tokens}
    given = [name for name, value in shape.items() if value is not None]
    if (set(given) - {"draft_tokens"}) if own else 0 < len(given) < len(shape):
        what = "the tree of NGRAM has a number of tokens only" if own else "SGLang chooses all three numbers, or none"
        checks.fail(
            "rollout.sglang.speculative",
            what,
            found=", ".join(given),
            allowed="draft_tokens with NGRAM; with a draft model steps, topk and draft_tokens, or none of them",
            fix="leave out the others" if own else "give all three, for example steps: 3, topk: 1, draft_tokens: 4",
        )
    elif draft.topk == 1 and draft.draft_tokens != (chain := (draft.steps or 0) + 1):
        checks.fail(
            "rollout.sglang.speculative.draft_tokens",
            f"a chain (topk: 1) of {draft.steps} steps is checked with the token before it",
            found=draft.draft_tokens,
            allowed=chain,
            fix=f"set draft_tokens to {chain}",
        )
    if not own and config.sync.transport == "disk":
        checks.fail(
            "sync.transport",
            "SGLang would load the folder with the model's weights into the draft, too",
            found="disk",
            allowed="auto, tensor, distributed or delta with a draft model",
            fix="set sync.transport=auto",
        )


def _check_arguments(config: RunConfig, checks: Checklist) -> None:
    for argument in config.rollout.sglang.extra_args:
        name = argument.partition("=")[0]
        # The server's parser also accepts the beginning of an argument's name.
        if name.startswith("--") and any(ours.startswith(name) for ours in _OURS):
            checks.fail(
                "rollout.sglang.extra_args",
                "megarl sets this argument itself, or from other keys of the recipe",
                found=argument,
                allowed="arguments of sglang.launch_server other than " + ", ".join(sorted(_OURS)),
                fix=f"leave {name} out",
            )


def _check_interrupted(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    """Check that interrupted samples can be sent again with their tokens: servers refuse nearly full inputs."""
    servers, longest = config.rollout.sglang, config.longest_sequence()
    limits = [servers.context_length or facts.max_positions, servers.max_total_tokens]
    room = min(limit for limit in limits if limit is not None) - _KEPT_FREE
    if config.async_.partial and longest > room:
        checks.fail(
            "async.partial",
            f"prompt and response have up to {longest} tokens, and servers take interrupted samples of up to {room}",
            found=True,
            allowed=f"false, or at most {room} tokens of prompt and response",
            fix=f"lower rollout.sampling.max_new_tokens by {longest - room}, or set async.partial=false",
        )


def _check_limits(config: RunConfig, checks: Checklist) -> None:
    servers, longest = config.rollout.sglang, config.longest_sequence()
    if servers.context_length is not None and servers.context_length < longest:
        checks.fail(
            "rollout.sglang.context_length",
            f"prompt and response together have up to {longest} tokens",
            found=servers.context_length,
            allowed=f"integer from {longest}",
            fix=f"set it to {longest} or to null",
        )
    if servers.max_total_tokens is not None and servers.max_total_tokens < longest:
        checks.fail(
            "rollout.sglang.max_total_tokens",
            f"a single sample has up to {longest} tokens",
            found=servers.max_total_tokens,
            allowed=f"integer from {longest}",
            fix="raise it, or set it to null",
        )
    checks.check_deadline("rollout.sglang.start_timeout_s", servers.start_timeout_s, "a restart does", config)
    checks.check_deadline("sync.timeout_s", config.sync.timeout_s, "a server that takes no weights does", config)


def _check_abilities(config: RunConfig, checks: Checklist) -> None:
    rollout, held_out = config.rollout.sampling, config.validation.sampling
    sections = {"rollout.sampling": rollout.min_new_tokens, "validation.sampling": held_out.min_new_tokens}
    for key, least in sections.items():
        if least:
            checks.fail(
                f"{key}.min_new_tokens",
                "SGLang cannot enforce a shortest length in servers without a tokenizer",
                found=least,
                allowed="0",
                fix=f"set {key}.min_new_tokens=0, or rollout.engine=embedded",
            )
    for key, min_p in {"rollout.sampling": rollout.min_p, "validation.sampling": held_out.min_p}.items():
        if min_p:
            checks.fail(
                f"{key}.min_p",
                "SGLang crashes a server that samples with min_p and a seed per sample",
                found=min_p,
                allowed="0",
                fix=f"set {key}.min_p=0 and top_p or top_k in its place, or rollout.engine=embedded",
            )
    if rollout.logprobs == "processed":
        checks.fail(
            "rollout.sampling.logprobs",
            "servers return log-probs of the full distribution at the sampling temperature",
            found="processed",
            allowed="full",
            fix="set rollout.sampling.logprobs=full, or rollout.engine=embedded",
        )
    if config.rollout.stale_steps:
        checks.fail(
            "rollout.stale_steps",
            "servers get the new weights after every step",
            found=config.rollout.stale_steps,
            allowed="0",
            fix="set rollout.stale_steps=0, or rollout.engine=embedded",
        )


def _check_pause(config: RunConfig, checks: Checklist) -> None:
    """Check the prefix cache: it cannot be dropped while requests run, and later requests would use it."""
    servers, switch = config.rollout.sglang, "--disable-radix-cache"
    if config.sync.pause == "in_place" and (servers.urls or switch not in servers.extra_args):
        checks.fail(
            "sync.pause",
            "the prefix cache of the old weights would remain, and be used by requests after the update",
            found="in_place",
            allowed=f"abort or retract; in_place with {switch} in rollout.sglang.extra_args, for servers that megarl "
            "starts",
            fix="set sync.pause=retract" + ("" if servers.urls else f", or rollout.sglang.extra_args=[{switch}]"),
        )


def _check_sync(config: RunConfig, checks: Checklist) -> None:
    """Check that the tensors sent to servers are in the form that servers and checksums expect."""
    sync, model = config.sync, config.model.dtype
    if sync.address in EVERY_INTERFACE:
        checks.fail(
            "sync.address",
            "weights must not be offered on every interface",
            found=sync.address,
            allowed="the address of one interface, or null",
            fix="set sync.address=null",
        )
    elif sync.address is not None and config.cluster.nnodes > 1:
        checks.fail(
            "sync.address",
            f"the trainer runs on {config.cluster.nnodes} machines, and at most one of them has this address",
            found=sync.address,
            allowed="null with cluster.nnodes > 1",
            fix="set sync.address=null: every sender takes the address of its interface that reaches the server",
        )
    elif sync.address is not None and sync.transport in ("auto", "distributed") and not _is_known(sync.address):
        checks.warn(
            "sync.address",
            "this machine cannot resolve this address",
            found=sync.address,
            fix="set sync.address=null, which takes that of the interface that reaches the server",
        )
    held = config.rollout_dtype
    sent = model if sync.dtype == "model" else sync.dtype
    _check_pause(config, checks)
    if sync.fp8 and sync.verify != "off":
        checks.warn(
            "sync.verify",
            "with sync.fp8 no checksums are compared; only the gap of a probe is measured, sync/probe_gap",
            found=sync.verify,
            fix="watch sync/probe_gap, or set sync.verify=off to leave that out as well",
        )
    elif sent != held and sync.verify != "off":
        checks.fail(
            "sync.dtype",
            f"checksums are of {sent}, and the servers hold {held} (rollout.dtype)",
            found=sync.dtype,
            allowed=held,
            fix=f"set sync.dtype={held}, or sync.verify=off",
        )


def _is_known(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):  # UnicodeError: an invalid name, such as a..b
        return False


#: Length of a Qwen2.5-VL patch that SGLang 0.5.23 takes for pixels; other lengths it takes for features.
_PATCH_VALUES = 1176
#: Number of encoder blocks of Qwen3-VL's mixture whose features SGLang 0.5.23 adds to layers.
_MIXTURE_BLOCKS = 3


def check_images(config: RunConfig, encoder: VisionEncoder, checks: Checklist) -> None:
    """Check that servers see the images of this vision encoder."""
    _check_encoder(config.rollout.sglang, encoder, checks)
    if config.async_.partial:
        checks.fail(
            "async.partial",
            "in an interrupted sample a server would take the image token for another image",
            found=True,
            allowed="false if SGLang servers get images",
            fix="set async.partial=false, or rollout.engine=embedded",
        )
    # otherwise the interpreter is on another machine
    if not config.rollout.sglang.urls and config.cluster.device_memory_gb is None:
        _check_torchvision(config.rollout.sglang, checks)


def _check_encoder(servers: SGLangConfig, encoder: VisionEncoder, checks: Checklist) -> None:
    """Check that SGLang servers support this vision encoder."""
    tp = servers.tp_size
    if encoder.model_type == "qwen2_5_vl" and encoder.patch_values != _PATCH_VALUES:
        checks.fail(
            "model: vision_config.patch_size",
            "a server takes patches of this size for finished features",
            found=encoder.patch,
            allowed=f"14, {_PATCH_VALUES} numbers of a patch, as published models of Qwen2.5-VL have it",
            fix="use such a model, or rollout.engine=embedded",
        )
    if encoder.model_type == "qwen3_vl_moe" and len(encoder.deepstack) != _MIXTURE_BLOCKS:
        checks.fail(
            "model: vision_config.deepstack_visual_indexes",
            "servers support features of another number of blocks only",
            found=list(encoder.deepstack),
            allowed=f"{_MIXTURE_BLOCKS} blocks, as published models of Qwen3-VL have them",
            fix="use such a model, or rollout.engine=embedded",
        )
    if encoder.heads % tp or encoder.ffn % tp:
        checks.fail(
            "rollout.sglang.tp_size",
            "the ranks of a server must be able to divide the heads and the MLP of the vision encoder",
            found=tp,
            allowed=divisors(math.gcd(encoder.heads, encoder.ffn)),
            fix="change tp_size",
        )


def _check_torchvision(servers: SGLangConfig, checks: Checklist) -> None:
    """Check that the servers' interpreter can read images; other checks report a missing interpreter."""
    try:
        python = find_python(servers.python, cuda=None)
    except ConfigError:
        return
    if version_in(python, "torchvision") is None:
        checks.fail(
            "rollout.sglang.python",
            "the servers' interpreter lacks torchvision, which reads images there",
            found=str(python),
            fix=install_fix(),
        )


_CONNECT_S = 2.0


def silent_servers(config: RunConfig) -> str | None:
    """Return a warning about addresses of `rollout.sglang.urls` that accept no connection now; None when all do."""
    servers = config.rollout.sglang
    silent = [f"{url} ({why})" for url in servers.urls if (why := _refusal(url))]
    if not silent:
        return None
    return (
        f"rollout.sglang.urls: nothing replies at {', '.join(silent)}; the run starts anyway and waits for its "
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
