"""Checks of `rollout.engine: sglang`: what the recipe, the model and this machine must have for servers."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from megarl.architectures import ARCHITECTURES
from megarl.architectures.vision_language import VisionEncoder
from megarl.artifacts.facts import ModelFacts, local_folder
from megarl.artifacts.layout import divisors
from megarl.config.rollout import HeldOutSamplingConfig, SamplingConfig
from megarl.config.run import RunConfig
from megarl.config.sglang import SGLangConfig, url_problem
from megarl.dag.placement import Placement
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.gated_delta.plain import GatedDelta
from megarl.rollout.sglang.adapters import ARGUMENTS as LORA_ARGUMENTS
from megarl.rollout.sglang.adapters import check_adapters
from megarl.rollout.sglang.attention_dp import check_attention_dp
from megarl.rollout.sglang.server_places import NAME as _NAME
from megarl.rollout.sglang.server_places import check_colocated, check_gpus
from megarl.system.compat.cuda import check_same_nccl, driver_problem, toolkit_problem, version_in
from megarl.system.compat.sglang import find_python, install_fix, sglang_version
from megarl.system.errors import ConfigError, count
from megarl.system.imports import installed_version
from megarl.system.processes import address_of, is_every_interface, nvidia_devices

if TYPE_CHECKING:
    from megarl.checks.checklist import Checklist

#: Server arguments that megarl sets. The server uses the last of two, so setting one again would bypass a check.
_OURS = (
    *("--model-path", "--model", "--dtype", "--load-format", "--skip-tokenizer-init", "--device"),
    *("--kv-cache-dtype",),
    *("--custom-weight-loader", "--host", "--port", "--api-key", "--admin-api-key"),
    *("--tp-size", "--tensor-parallel-size", "--ep-size", "--expert-parallel-size", "--ep", "--tp"),
    *("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-load-format"),
    *("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--enable-dp-attention"),
    *("--attn-dp-size", "--attention-data-parallel-size"),
    *("--dp-size", "--data-parallel-size", "--dp", "--pp-size", "--pipeline-parallel-size", "--pp"),
    *LORA_ARGUMENTS,
)
#: Keys of `rollout.sglang` that matter only when megarl starts servers.
_STARTED = (
    *("servers", "gpus", "host", "memory_fraction", "max_total_tokens", "context_length", "attention_backend"),
    *("deterministic", "speculative", "extra_args", "kv_cache_dtype"),
)
#: Number of tokens by which an input must be shorter than a server's capacity, one generated token included.
_FREE_TOKENS = 6


def check_servers(
    config: RunConfig,
    placement: Placement | None,
    facts: ModelFacts | None,
    checks: Checklist,
    launcher: str | None = None,
    *,
    here: bool = True,
) -> None:
    """Check all settings of a recipe's servers except images; `EngineFamily.check` explains the arguments."""
    checks = checks.of(_NAME)
    _check_ignored(config, checks)
    _check_interpreter(config, checks, here=here)
    request_workers = 0 if placement is None else placement.request_workers
    known = placement is not None or not config.placement.has_several_teams  # whether the servers' GPUs are known
    _check_layout(config, request_workers, checks, known=known)
    check_attention_dp(config, facts, checks)
    if here and known and launcher != "ray" and "CUDA_VISIBLE_DEVICES" not in os.environ:
        check_gpus(config, request_workers, checks)
    if facts is not None:
        _check_model(config, facts, checks)
        _check_interrupted(config, facts, checks)
        _check_fp8(config, facts, checks)
    _check_arguments(config, checks)
    _check_speculative(config, checks)
    _check_limits(config, checks)
    _check_abilities(config, checks)
    check_colocated(config, checks)
    check_adapters(config, facts, checks)
    _check_address(config, checks, here=here)
    _check_sync(config, checks)


def _check_ignored(config: RunConfig, checks: Checklist) -> None:
    """Warn about keys that have no effect because of other settings."""
    servers, sync = config.rollout.sglang, config.sync
    defaults = SGLangConfig()
    keys = [f"rollout.sglang.{name}" for name in _STARTED if getattr(servers, name) != getattr(defaults, name)]
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
            "this key is only for servers that already run; servers that megarl starts get a random API key",
            found=servers.api_key_env,
            fix="set rollout.sglang.urls, or remove this key",
        )
    if sync.adapters == "merged":
        _check_transport_key("sync.folder", sync.folder, sync.transport, ("disk",), checks)
    _check_transport_key("sync.address", sync.address, sync.transport, ("distributed", "shards", "auto"), checks)


def _check_transport_key(
    key: str, value: str | None, transport: str, users: tuple[str, ...], checks: Checklist
) -> None:
    if value is not None and transport not in users:
        why = "selects tensor or distributed, which do not use it" if transport == "auto" else "does not use it"
        fix = f"set sync.transport={users[0]}, or leave {key} out"
        checks.warn(key, f"the transport {transport} {why}", found=value, fix=fix)


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
            checks.ok(f"{', '.join(servers.urls)}: checked when the run starts")
        return
    try:
        cuda = _needs_cuda(config)
        python = find_python(servers.python, cuda=cuda)
        checks.ok(f"the interpreter of servers is {python}, with sglang {sglang_version(python, cuda=cuda)}")
        if cuda and servers.colocated and config.sync.transport == "delta":
            checks.fail(
                "sync.transport",
                "colocated servers release their weights in each update, so a delta has nothing to change",
                found="delta",
                allowed="auto, tensor, shards or disk with rollout.sglang.colocated",
                fix="set sync.transport=auto, or rollout.sglang.colocated=false",
            )
        broadcast = config.sync.transport == "distributed" or (
            config.sync.transport in ("auto", "shards") and not servers.colocated
        )
        if here and _has_gpus():
            _check_cuda(config, python, checks)
            if broadcast:  # broadcasts to GPU servers use NCCL, whose versions must be equal
                check_same_nccl(python)
    except ConfigError as error:
        if _starts_elsewhere(config, here=here):
            checks.warn("rollout.sglang.python", f"on this machine: {error.what}", fix=error.fix)
        else:
            checks.from_error(error)


def _starts_elsewhere(config: RunConfig, *, here: bool) -> bool:
    """Return whether servers start on another machine, which may have another interpreter: the run does, or the recipe
    is for GPUs and this machine has none. Then a problem with the interpreter on this machine is a warning only."""
    return not here or (config.cluster.device_memory_gb is not None and not _has_gpus())


def _has_gpus() -> bool:
    """Return whether this machine has GPUs and `CUDA_VISIBLE_DEVICES` does not hide all of them."""
    return nvidia_devices() > 0 and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def _needs_cuda(config: RunConfig) -> bool | None:
    """Return True if servers need an interpreter for GPUs, and None if they may have one of either kind."""
    # A recipe for GPUs needs GPU servers, also in a dry run on a machine without GPUs.
    return True if config.cluster.device_memory_gb is not None or _has_gpus() else None


def _check_cuda(config: RunConfig, python: Path, checks: Checklist) -> None:
    """Warn about a driver, toolkit or torch with which servers on this machine may not start or receive weights."""
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


def _check_layout(config: RunConfig, request_workers: int, checks: Checklist, *, known: bool) -> None:
    """Check the layout of a server and the number of servers per machine. `known` means that the teams are known."""
    servers, nnodes = config.rollout.sglang, config.cluster.nnodes
    groups = f"the {servers.tp_size} tensor-parallel ranks of a server cannot form expert-parallel groups"
    _check_divides("ep_size", servers.ep_size, servers.tp_size, groups, checks, "tp_size")
    if servers.dp_size > 1:
        checks.fail(
            "rollout.sglang.dp_size",
            "SGLang cannot update the weights of a server with several replicas",
            found=servers.dp_size,
            allowed="1",
            fix="set rollout.sglang.dp_size=1, and use several servers instead (rollout.sglang.servers)",
        )
    _check_nodes(config, checks)
    if servers.urls:
        return
    if servers.host is not None and is_every_interface(servers.host):
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
            f"{nnodes} machines cannot have the same address",
            found=servers.host,
            allowed="null, which selects on each machine the address that the other machines reach",
            fix="set rollout.sglang.host=null",
        )
    key = "rollout.sglang.servers"
    # With request workers, servers run only on some of the machines, which the checks of the placement cover.
    if nnodes > 1 and (request_workers or not known):
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
            f"a machine has {count(needed, 'rank')} of servers (servers * tp_size / cluster.nnodes)",
            found=servers.gpus,
            allowed=f"a list of {count(needed, 'device')}",
            fix="list one device per rank, or set it to null",
        )


def _check_divides(name: str, value: int, total: int, why: str, checks: Checklist, other: str | None = None) -> None:
    """Check that the key `name` of `rollout.sglang` divides `total`, which `other` sets."""
    if total % value:
        fix = f"change {name}" + (f" or {other}" if other else "")
        checks.fail(f"rollout.sglang.{name}", why, found=value, allowed=divisors(total), fix=fix)


def _check_nodes(config: RunConfig, checks: Checklist) -> None:
    """Check servers on several machines: their ranks are spread evenly, and they get no weights through memory."""
    servers, machines = config.rollout.sglang, config.cluster.nnodes
    if servers.nnodes == 1:
        return
    key = "rollout.sglang.nnodes"
    evenly = f"the machines of a server cannot evenly share its {servers.tp_size} tensor-parallel ranks"
    _check_divides("nnodes", servers.nnodes, servers.tp_size, evenly, checks, "tp_size")
    if not servers.urls and servers.nnodes > machines:
        checks.fail(
            key,
            f"the run has {count(machines, 'machine')} (cluster.nnodes), and a server needs {servers.nnodes}",
            found=servers.nnodes,
            allowed=f"at most {machines}",
            fix=f"set {key}={machines}, or give the run more machines",
        )
    if servers.colocated and config.sync.transport == "distributed":
        checks.fail(
            "sync.transport",
            "NCCL cannot join a colocated server's ranks and the trainer's, which are on the same GPUs",
            found="distributed",
            allowed="auto, shards or disk with rollout.sglang.colocated and nnodes > 1",
            fix="set sync.transport=shards",
        )
    elif config.sync.transport in ("tensor", "delta"):
        others = ["shards", "disk"] if servers.colocated else ["distributed", "disk", "shards"]
        checks.fail(
            "sync.transport",
            f"a server on {count(servers.nnodes, 'machine')} cannot receive weights through the memory of one of them",
            found=config.sync.transport,
            allowed=f"auto, {others[0]}, {' or '.join(others[1:])} with rollout.sglang.nnodes > 1",
            fix=f"set sync.transport={others[0]}",
        )


def _check_waiting(config: RunConfig, needed: int, checks: Checklist) -> None:
    """Warn about GPUs without a server, which idle during generation. `needed`: GPUs per machine used by servers."""
    servers, here = config.rollout.sglang, config.cluster.nproc // config.cluster.nnodes
    if servers.colocated and config.cluster.device_memory_gb is not None and needed < here:
        checks.warn(
            "rollout.sglang.servers",
            f"{here - needed} of the {count(here, 'GPU')} of a machine have no server, and idle during generation",
            found=servers.servers,
            fix=f"set rollout.sglang.servers={config.cluster.nproc // servers.ranks}",
        )


def _check_model(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    """Check that SGLang supports the model, and that a server's ranks can evenly share its heads and experts."""
    servers = config.rollout.sglang
    ranks = "ranks of an attention_dp group" if servers.attention_dp > 1 else "ranks of a server"
    if facts.heads % servers.attention_tp:
        checks.fail(
            "rollout.sglang.tp_size",
            f"the {ranks} cannot evenly share the model's {facts.heads} attention heads",
            found=servers.tp_size,
            allowed=[servers.attention_dp * size for size in divisors(facts.heads)],
            fix="change tp_size" + (" or attention_dp" if servers.attention_dp > 1 else ""),
        )
    if why := facts.wrong_in_sglang or _odd_layers(facts):
        checks.fail(
            "rollout.engine",
            why,
            found=f"sglang with a {facts.model_type}",
            allowed="embedded",
            fix="set rollout.engine=embedded",
        )
        return
    _check_windows(config, facts, checks)
    _check_processor(config, facts, checks)
    experts = f"expert-parallel ranks cannot evenly share the model's {facts.experts} experts"
    _check_divides("ep_size", servers.ep_size, facts.experts or 1, experts, checks)
    stacked = facts.mixture is not None and facts.mixture.stacked
    if stacked and config.sync.fp8:
        checks.fail(
            "sync.fp8",
            f"the experts of a {facts.model_type} cannot be sent in FP8: one tensor has all experts of a layer",
            found=True,
            allowed=False,
            fix="set sync.fp8=false",
        )
    # SGLang 0.5.23 reads neither key that chooses layers without experts: mlp_only_layers, decoder_sparse_step.
    lists = "mlp_only_layers" in ARCHITECTURES[facts.model_type].keys
    dense = facts.dense_layers if facts.is_moe else facts.layers
    if dense and lists:
        checks.fail(
            "model: mlp_only_layers, decoder_sparse_step",
            "SGLang expects experts in every layer, and this model has layers without experts",
            found=f"{dense} of {count(facts.layers, 'layer')} without experts",
            allowed="experts in all layers where SGLang servers generate",
            fix="set rollout.engine=embedded, or take a model with experts in all layers",
        )


def _check_processor(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    """Check that servers on CPUs can compute the model, with the recipe's dtype of the KV cache."""
    if config.rollout.sglang.urls or config.cluster.device_memory_gb is not None or nvidia_devices():
        return
    if config.rollout.sglang.kv_cache_dtype != "auto":
        checks.fail(
            "rollout.sglang.kv_cache_dtype",
            "SGLang has kernels for keys and values in FP8 on GPUs only",
            found=config.rollout.sglang.kv_cache_dtype,
            allowed="auto on CPUs",
            fix="set rollout.sglang.kv_cache_dtype=auto, or cluster.device_memory_gb to check the recipe for GPUs",
        )
    if facts.needs_gpu_in_sglang:
        checks.fail(
            "rollout.engine",
            "SGLang has kernels for this model on GPUs only",
            found=f"sglang with a {facts.model_type} on CPUs",
            allowed="embedded; sglang on GPUs",
            fix="set rollout.engine=embedded, or cluster.device_memory_gb to check the recipe for GPUs",
        )


def _check_windows(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    """Check that all samples fit into the sliding windows that SGLang's class does not apply."""
    longest, windows = config.longest_sequence(), [mixer.window for mixer in facts.mixers if mixer.window is not None]
    if ARCHITECTURES[facts.model_type].served.windows or min(windows, default=longest) >= longest:
        return
    checks.fail(
        "rollout.engine",
        f"SGLang computes a {facts.model_type} without its sliding window of {min(windows)} tokens",
        found=f"sglang, for {longest} tokens of prompt and response",
        allowed=f"embedded; sglang for at most {min(windows)} tokens",
        fix="set rollout.engine=embedded, or lower rollout.sampling.max_new_tokens",
    )


def _odd_layers(facts: ModelFacts) -> str | None:
    """Return why SGLang would compute a kind of layer at places where the model has another; None if it would not."""
    kinds = [mixer.kind for mixer in facts.mixers]
    if GatedDelta.kind in kinds:
        every = kinds.index(Attention.kind) + 1 if Attention.kind in kinds else len(kinds) + 1
        if any((kind == Attention.kind) != (layer % every == 0) for layer, kind in enumerate(kinds, 1)):
            return "SGLang expects softmax attention in every n-th layer, and this model has it in other layers"
    if (
        facts.sparse
        and "mlp_only_layers" not in ARCHITECTURES[facts.model_type].keys
        and facts.sparse != tuple(sorted(facts.sparse))
    ):
        return "SGLang expects all layers without experts before those with experts"
    return None


def _check_fp8(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    if not config.sync.fp8:
        return
    if others := sorted({mixer.kind for mixer in facts.mixers} - {Attention.kind}):
        checks.fail(
            "sync.fp8",
            f"weights of these layers cannot be sent as FP8: {', '.join(others)}",
            found=True,
            allowed="false",
            fix="set sync.fp8=false",
        )
        return
    from megarl.rollout.sglang.block_fp8 import unsplittable  # not at the top, because it imports torch, which is slow
    from megarl.sync.plan import FP8_BLOCK

    servers = config.rollout.sglang
    if wrong := unsplittable(facts, servers.tp_size, servers.ep_size, servers.attention_dp):
        checks.fail(
            "sync.fp8",
            f"a rank of a server would hold parts of blocks of {FP8_BLOCK} x {FP8_BLOCK} weights: {', '.join(wrong)}",
            found=True,
            allowed=f"widths on each of {count(servers.tp_size, 'rank')} that are multiples of {FP8_BLOCK}",
            fix="lower rollout.sglang.tp_size, or set sync.fp8=false",
        )


def serves_own_draft(config: RunConfig) -> bool:
    """Return whether the servers' draft model is the policy's own draft head, and the run trains it."""
    draft = config.rollout.sglang.speculative
    if draft is None or config.actor.mtp is None or draft.algorithm != "EAGLE":
        return False
    draft_path, path = draft.draft_path, config.model.path
    if draft_path is None or path is None:
        return False
    draft_folder, folder = local_folder(draft_path), local_folder(path)
    if draft_folder is None or folder is None:
        return draft_path == path
    return draft_folder.resolve() == folder.resolve()


def _check_speculative(config: RunConfig, checks: Checklist) -> None:
    """Check that a draft model is set if and only if the algorithm needs one, and check the shape of the draft tree."""
    draft = config.rollout.sglang.speculative
    if draft is None:
        return
    ngram = draft.algorithm == "NGRAM"
    if ngram != (draft.draft_path is None):
        checks.fail(
            "rollout.sglang.speculative.draft_path",
            f"{draft.algorithm} {'uses no' if ngram else 'needs a'} draft model",
            found=draft.draft_path,
            allowed="null with NGRAM; else a folder or hub name that servers can read",
            fix="leave draft_path out" if ngram else "set draft_path to the draft model",
        )
    shape = {"steps": draft.steps, "topk": draft.topk, "draft_tokens": draft.draft_tokens}
    given = [name for name, value in shape.items() if value is not None]
    if (set(given) - {"draft_tokens"}) if ngram else 0 < len(given) < len(shape):
        checks.fail(
            "rollout.sglang.speculative",
            "NGRAM has no steps and no topk" if ngram else "SGLang needs all of steps, topk and draft_tokens, or none",
            found=", ".join(given),
            allowed="draft_tokens with NGRAM; with a draft model steps, topk and draft_tokens, or none of them",
            fix="leave out steps and topk" if ngram else "set all three, such as steps: 3, topk: 1, draft_tokens: 4",
        )
    elif draft.topk == 1 and draft.draft_tokens != (chain := (draft.steps or 0) + 1):
        checks.fail(
            "rollout.sglang.speculative.draft_tokens",
            f"with topk: 1 the model checks {chain} tokens: those of {draft.steps} steps and the token before them",
            found=draft.draft_tokens,
            allowed=chain,
            fix=f"set draft_tokens to {chain}",
        )
    if serves_own_draft(config) and config.sync.fp8:
        checks.fail(
            "sync.fp8",
            "the run trains a draft head, whose projection SGLang does not quantise",
            found=config.sync.fp8,
            allowed="false with actor.mtp and the policy's own draft head",
            fix="set sync.fp8=false",
        )
    if not ngram and config.sync.transport == "disk":
        checks.fail(
            "sync.transport",
            "SGLang would load the folder with the model's weights into the draft model as well",
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
                "megarl sets this argument, by itself or from another key of the recipe",
                found=argument,
                allowed="arguments of sglang.launch_server other than " + ", ".join(sorted(_OURS)),
                fix=f"leave {name} out",
            )


def _check_interrupted(config: RunConfig, facts: ModelFacts, checks: Checklist) -> None:
    """Check that servers accept interrupted samples with their partial tokens; they reject inputs that leave less than
    `_FREE_TOKENS` of their capacity."""
    servers, longest = config.rollout.sglang, config.longest_sequence()
    limits = [servers.context_length or facts.max_positions, servers.max_total_tokens]
    room = min(limit for limit in limits if limit is not None) - _FREE_TOKENS
    if (interrupts := _interrupts(config)) is not None and longest > room:
        key, value, off = interrupts
        checks.fail(
            key,
            f"prompt and response have up to {longest} tokens, but servers accept interrupted samples up to {room}",
            found=value,
            allowed=f"{off}, or at most {room} tokens of prompt and response",
            fix=f"lower rollout.sampling.max_new_tokens by {longest - room}, or set {key}={off}",
        )


def _interrupts(config: RunConfig) -> tuple[str, object, str] | None:
    """Return the key that makes the run continue interrupted samples, its value, and the value that turns this off;
    None: the run does not continue interrupted samples."""
    if config.async_.partial:
        return "async.partial", True, "false"
    if config.rollout.carries:
        return "rollout.carry_steps", config.rollout.carry_steps, "0"
    return None


def _check_limits(config: RunConfig, checks: Checklist) -> None:
    servers, longest = config.rollout.sglang, config.longest_sequence()
    limits = {"context_length": servers.context_length, "max_total_tokens": servers.max_total_tokens}
    for name, limit in limits.items():
        if limit is not None and limit < longest:
            checks.fail(
                f"rollout.sglang.{name}",
                f"prompt and response together have up to {longest} tokens",
                found=limit,
                allowed=f"integer from {longest}",
                fix=f"set {name} to at least {longest}, or to null",
            )
    checks.check_deadline("rollout.sglang.start_timeout_s", servers.start_timeout_s, "a start times out", config)
    checks.check_deadline("sync.timeout_s", config.sync.timeout_s, "a weight update times out", config)


def _check_abilities(config: RunConfig, checks: Checklist) -> None:
    rollout = config.rollout.sampling
    samplings: tuple[tuple[str, SamplingConfig | HeldOutSamplingConfig], ...] = (
        ("rollout.sampling", rollout),
        ("validation.sampling", config.validation.sampling),
    )
    for key, sampling in samplings:
        if sampling.min_new_tokens:
            checks.fail(
                f"{key}.min_new_tokens",
                "servers without a tokenizer cannot enforce a minimum length",
                found=sampling.min_new_tokens,
                allowed="0",
                fix=f"set {key}.min_new_tokens=0, or rollout.engine=embedded",
            )
        if sampling.min_p:
            checks.fail(
                f"{key}.min_p",
                "an SGLang server that samples with min_p and a seed per sample crashes",
                found=sampling.min_p,
                allowed="0",
                fix=f"set {key}.min_p=0 and use top_p or top_k, or rollout.engine=embedded",
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
            "servers get the new weights after every step, so they cannot generate with old weights",
            found=config.rollout.stale_steps,
            allowed="0",
            fix="set rollout.stale_steps=0, or rollout.engine=embedded",
        )


def _check_pause(config: RunConfig, checks: Checklist) -> None:
    """Check that with `sync.pause=in_place` servers have no prefix cache: it holds results of old weights, and cannot
    be dropped while requests run.
    """
    servers, switch = config.rollout.sglang, "--disable-radix-cache"
    if config.sync.pause == "in_place" and (servers.urls or switch not in servers.extra_args):
        checks.fail(
            "sync.pause",
            "requests after an update would use the prefix cache of the old weights",
            found="in_place",
            allowed=f"abort or retract; in_place with {switch} in rollout.sglang.extra_args, for servers that megarl "
            "starts",
            fix="set sync.pause=retract" + ("" if servers.urls else f", or rollout.sglang.extra_args=[{switch}]"),
        )


def _check_shards(config: RunConfig, checks: Checklist) -> None:
    """Check that no setting prevents updates from shard to shard, where trainer ranks send weights directly to server
    ranks."""
    if not config.sends_shards:
        return
    servers = config.rollout.sglang
    obstacles = {
        "sync.fp8": (config.sync.fp8, "projections are not quantised on the way from shard to shard", False),
        "model.lora": (config.model.lora is not None, "weights merged with adapters lie in no parameter", None),
        "rollout.sglang.speculative": (serves_own_draft(config), "a draft head that is trained goes whole", None),
    }
    transport = "sync.transport=shards" if config.sync.transport == "shards" else "sync.transport=auto, here shards,"
    for key, (is_set, why, allowed) in obstacles.items():
        if is_set:
            checks.fail(
                key,
                f"{why}, so {transport} cannot be used",
                found="set" if allowed is None else True,
                allowed="null" if allowed is None else allowed,
                fix=f"set sync.transport={'disk' if servers.colocated and servers.nnodes > 1 else 'auto'}",
            )


def _check_address(config: RunConfig, checks: Checklist, *, here: bool) -> None:
    """Check the address from which weights are sent; whether a name resolves to every interface only if `here`."""
    sync = config.sync
    if sync.address is None:
        return
    if is_every_interface(sync.address):
        checks.fail(
            "sync.address",
            "this address stands for every interface, and weights must be sent from one",
            found=sync.address,
            allowed="the address of one interface, or null",
            fix="set sync.address=null",
        )
    elif config.cluster.nnodes > 1:
        checks.fail(
            "sync.address",
            f"the trainer runs on {config.cluster.nnodes} machines, which cannot have the same address",
            found=sync.address,
            allowed="null with cluster.nnodes > 1",
            fix="set sync.address=null, so that every sender uses the address of its interface that reaches the server",
        )
    elif sync.transport in ("auto", "distributed", "shards"):
        if not _is_known(sync.address):
            checks.warn(
                "sync.address",
                "this machine cannot resolve this address",
                found=sync.address,
                fix="set sync.address=null, which selects the address of the interface that reaches the server",
            )
        elif here:
            with checks.recorded():
                address_of(sync.address, "sync.address")


def _check_sync(config: RunConfig, checks: Checklist) -> None:
    """Check that the tensors sent to servers are in the form that servers and checksums expect."""
    sync, model = config.sync, config.model.dtype
    dtype = config.rollout_dtype
    sent = model if sync.dtype == "model" else sync.dtype
    _check_pause(config, checks)
    _check_shards(config, checks)
    if sync.fp8 and sync.verify != "off":
        checks.warn(
            "sync.verify",
            "with sync.fp8 no checksums are compared; verification only measures the gap of log-probs (sync/probe_gap)",
            found=sync.verify,
            fix="watch sync/probe_gap, or set sync.verify=off to leave out the probe as well",
        )
    elif sent != dtype and sync.verify != "off":
        checks.fail(
            "sync.dtype",
            f"checksums of the {sent} weights that are sent cannot match the servers' {dtype} weights (rollout.dtype)",
            found=sync.dtype,
            allowed=dtype,
            fix=f"set sync.dtype={dtype}, or sync.verify=off",
        )


def _is_known(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except (OSError, UnicodeError):  # UnicodeError: an invalid name, such as a..b
        return False


#: Length of a Qwen2.5-VL patch that SGLang 0.5.23 reads as pixels; it reads other lengths as features.
_PATCH_VALUES = 1176
#: Number of encoder blocks whose features SGLang 0.5.23 adds to layers of a Qwen3-VL mixture-of-experts model.
_MIXTURE_BLOCKS = 3


def check_images(config: RunConfig, encoder: VisionEncoder, checks: Checklist, *, here: bool = True) -> None:
    """Check that servers can generate from images with this vision encoder."""
    _check_encoder(config.rollout.sglang, encoder, checks)
    if config.data.video_key is not None:
        checks.fail(
            "data.video_key",
            "a server samples and resizes frames in its own way, so that it would see another video than the trainer",
            found=config.data.video_key,
            allowed="null with rollout.engine=sglang",
            fix="set rollout.engine=embedded, or show the frames as images (data.image_key)",
        )
    if (interrupts := _interrupts(config)) is not None:
        key, value, off = interrupts
        checks.fail(
            key,
            "a server would look for another image at each image token of an interrupted sample",
            found=value,
            allowed=f"{off} if SGLang servers get images",
            fix=f"set {key}={off}, or rollout.engine=embedded",
        )
    if not config.rollout.sglang.urls:
        _check_torchvision(config, checks, here=here)


def _check_encoder(servers: SGLangConfig, encoder: VisionEncoder, checks: Checklist) -> None:
    """Check that SGLang servers support this vision encoder."""
    if encoder.model_type == "qwen2_5_vl" and encoder.patch_values != _PATCH_VALUES:
        checks.fail(
            "model: vision_config.patch_size",
            "a server would read patches of this size as finished features",
            found=encoder.patch,
            allowed=f"14 ({_PATCH_VALUES} numbers per patch), as in the published models of Qwen2.5-VL",
            fix="use a published model, or rollout.engine=embedded",
        )
    if encoder.model_type == "qwen3_vl_moe" and len(encoder.deepstack) != _MIXTURE_BLOCKS:
        checks.fail(
            "model: vision_config.deepstack_visual_indexes",
            f"servers add features of exactly {_MIXTURE_BLOCKS} encoder blocks to the layers",
            found=list(encoder.deepstack),
            allowed=f"{_MIXTURE_BLOCKS} blocks, as in the published models of Qwen3-VL",
            fix="use a published model, or rollout.engine=embedded",
        )
    evenly = "the ranks of a server cannot evenly share the heads and the MLP of the vision encoder"
    _check_divides("tp_size", servers.tp_size, math.gcd(encoder.heads, encoder.ffn), evenly, checks)


def _check_torchvision(config: RunConfig, checks: Checklist, *, here: bool) -> None:
    """Check that the servers' interpreter can read images; other checks report a missing interpreter."""
    try:
        python = find_python(config.rollout.sglang.python, cuda=_needs_cuda(config))
    except ConfigError:
        return
    if version_in(python, "torchvision") is not None:
        return
    key, reason = "rollout.sglang.python", "the servers' interpreter lacks torchvision, which reads images"
    if _starts_elsewhere(config, here=here):
        checks.warn(key, f"on this machine: {reason}", found=str(python), fix=install_fix())
    else:
        checks.fail(key, reason, found=str(python), fix=install_fix())


_CONNECT_S = 2.0


def silent_servers(config: RunConfig) -> str | None:
    """Return a warning about addresses of `rollout.sglang.urls` that accept no connection now; None when all do."""
    servers = config.rollout.sglang
    silent = [f"{url} ({why})" for url in servers.urls if (why := _refusal(url))]
    if not silent:
        return None
    return (
        f"rollout.sglang.urls: no server answers at {', '.join(silent)}; the run starts anyway, and later waits up to "
        f"rollout.sglang.start_timeout_s = {servers.start_timeout_s:g} s for its servers"
    )


def _refusal(url: str) -> str | None:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), _CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None
