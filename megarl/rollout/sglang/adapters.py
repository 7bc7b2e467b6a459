"""Servers that get only low-rank adapters (`sync.adapters: separate`): their arguments, requests, and checks.

Read in SGLang 0.5.23 (sglang/srt): a request names its adapter in `lora_path` and is refused if the server has never
loaded it (`managers/tokenizer_manager.py`); without a name the base model answers. Keys and values in the prefix cache
belong to one loaded adapter. `lora/mem_pool.py` has a slot per adapter of a batch, one of them for the base model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.model import LoraConfig
from megarl.config.run import RunConfig
from megarl.config.sglang import SGLangConfig
from megarl.models.layers.attention.plain import Attention
from megarl.system.compat.sglang import ALL_LOADERS, LOADER
from megarl.system.errors import count
from megarl.system.processes import nvidia_devices

if TYPE_CHECKING:
    from megarl.artifacts.facts import ModelFacts
    from megarl.checks.checklist import Checklist

SWITCH = "--enable-lora"
RANK, TARGETS, BATCH = "--max-lora-rank", "--lora-target-modules", "--max-loras-per-batch"
#: Arguments that the run sets; a server's own adapters would take the slots of the run's.
ARGUMENTS = (SWITCH, RANK, TARGETS, BATCH, "--lora-paths", "--max-loaded-loras")
#: Adapters of a batch: the current version, the one before it, and the base model's empty one.
_IN_BATCH = 3
_MODULES = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
#: Architectures whose servers were compared with the trainer (tests/sync/test_adapters.py).
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_KEY = "sync.adapters"
_CPU_BLOCK = 32  # a server on a CPU pads widths that are no multiple of this number on each rank


def serving_adapters(servers: SGLangConfig, lora: LoraConfig, facts: ModelFacts, *, cuda: bool) -> SGLangConfig:
    """Return the settings of servers that get only adapters (`sync.adapters: separate`).

    Args:
        servers: the recipe's settings.
        facts: sizes of the policy's layers.
        cuda: whether the servers run on GPUs.
    """
    modules = [name for target in lora.targets or _targets(facts) for name in _MODULES[target]]
    arguments = [SWITCH, RANK, str(lora.rank), BATCH, str(_IN_BATCH), TARGETS, *modules]
    arguments += [] if cuda else ["--lora-backend", "torch_native"]  # the other ways to compute need a GPU
    if cuda and servers.colocated:
        arguments.append("--enable-weights-cpu-backup")  # no update sends the base model again
    return servers.model_copy(update={"extra_args": [*arguments, *servers.extra_args]})


def takes_adapters(servers: SGLangConfig) -> bool:
    """Return whether these are settings of `serving_adapters` for servers that get only adapters."""
    return SWITCH in servers.extra_args


def adapter_fields(servers: SGLangConfig, tag: str) -> dict[str, str]:
    """Return the fields by which a /generate request names the adapter of the weights `tag`; empty for servers that
    hold merged weights."""
    return {"lora_path": tag} if takes_adapters(servers) else {}


def adapter_problems(info: dict[str, Any], servers: SGLangConfig) -> Iterator[tuple[str, str]]:
    """Yield what an external server lacks for the adapters of this run, and with which arguments it has it.

    Args:
        info: its answer to /server_info.
        servers: the settings of the recipe's servers, see `serving_adapters`.
    """
    if not takes_adapters(servers):
        return
    rank, start = int(servers.argument(RANK) or 0), servers.extra_args.index(TARGETS) + 1
    stop = next((n for n in range(start, len(servers.extra_args)) if servers.extra_args[n].startswith("-")), None)
    wanted, modules = set(servers.extra_args[start:stop]), set(info.get("lora_target_modules") or ())
    if not info.get("enable_lora"):
        yield "loads no adapters", SWITCH
    elif (info.get("max_lora_rank") or 0) < rank:
        yield f"takes adapters up to rank {info.get('max_lora_rank')}, not {rank}", f"{RANK} {rank}"
    elif "all" not in modules and not wanted <= modules:
        missing = ", ".join(sorted(wanted - modules))
        yield f"takes no adapters of {missing}", f"{TARGETS} {' '.join(sorted(wanted))}"
    elif (info.get("max_loras_per_batch") or 0) < _IN_BATCH:
        yield f"takes only {info.get('max_loras_per_batch')} adapters in a batch", f"{BATCH} {_IN_BATCH}"
    elif LOADER not in (info.get("custom_weight_loader") or ()):
        yield "does not compare the adapters that it reads", f"--custom-weight-loader {' '.join(ALL_LOADERS)}"


def check_adapters(config: RunConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that servers can apply the recipe's adapters themselves, if it sends only these."""
    servers, lora = config.rollout.sglang, config.model.lora
    if config.sync.adapters == "merged" or lora is None:
        return
    for key, value, why, allowed in _obstacles(config):
        checks.fail(
            key,
            f"servers that get only adapters (sync.adapters=separate) do not work with this setting: {why}",
            found=value,
            allowed="null" if allowed is None else allowed,
            fix=f"change {key}, or set {_KEY}=merged",
        )
    if facts is not None:
        _check_model(facts, lora.targets, checks)
        here = config.cluster.device_memory_gb is None and not servers.urls  # the servers run on this kind of machine
        if here and not nvidia_devices() and "mlp" in (lora.targets or _MODULES):
            _check_widths(servers.tp_size, facts, checks)


def _obstacles(config: RunConfig) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the settings that separate adapters exclude: key, value, the reason, and what is allowed."""
    servers, sync = config.rollout.sglang, config.sync
    if servers.attention_dp > 1:
        why = "with attention groups SGLang loads only adapters that are never dropped"
        yield "rollout.sglang.attention_dp", servers.attention_dp, why, 1
    if servers.speculative is not None:
        why = "speculative decoding with adapters was never compared with the trainer"
        yield "rollout.sglang.speculative", servers.speculative, why, None
    if sync.fp8:
        yield "sync.fp8", sync.fp8, "adapters on FP8 weights were never compared with the trainer", False
    transports = "disk" if servers.colocated and servers.nnodes > 1 else "tensor, distributed or disk"
    if config.sends_shards:
        yield "sync.transport", sync.transport, "updates from shard to shard need a model without adapters", transports
    if sync.transport == "delta":
        why = "it keeps copies of the weights in host memory for later changes, and the base model never changes"
        yield "sync.transport", sync.transport, why, transports
    if sync.pause == "in_place":
        why = "a request cannot change its adapter while it runs"
        yield "sync.pause", sync.pause, why, "retract (requests finish with their adapter) or abort"
    if sync.folder is not None and config.cluster.nnodes > 1 and Path(sync.folder).is_relative_to("/dev/shm"):
        why = "memory of one machine cannot be read by servers on the others"
        yield "sync.folder", sync.folder, why, "a folder that all machines share"


def _check_model(facts: ModelFacts, targets: Collection[str] | None, checks: Checklist) -> None:
    """Check that the servers' class of the model applies adapters of these `targets` as the trainer does."""
    plain = facts.encoder is None and all(mixer.kind == Attention.kind for mixer in facts.mixers)
    if facts.model_type not in ARCHITECTURES or not plain:
        checks.fail(
            _KEY,
            f"separate adapters were not compared between trainer and servers for a {facts.model_type}",
            found="separate",
            allowed=f"merged; separate for {', '.join(ARCHITECTURES)}",
            fix=f"set {_KEY}=merged",
        )
        return
    known = _targets(facts)
    if other := [target for target in targets or known if target not in known]:
        checks.fail(
            "model.lora.targets",
            f"with {_KEY}=separate servers apply no adapters of {', '.join(other)} in a {facts.model_type}",
            found=targets,
            allowed=list(known),
            fix=f"remove {', '.join(other)}, or set {_KEY}=merged",
        )


def _targets(facts: ModelFacts) -> tuple[str, ...]:
    """Return the layers to which servers can apply adapters; in a mixture SGLang would adapt `mlp` as experts."""
    return ("attention",) if facts.is_moe else tuple(_MODULES)


def _check_widths(tp: int, facts: ModelFacts, checks: Checklist) -> None:
    """Check that a server of `tp` ranks on a CPU does not pad the MLP, because it would not pad the adapters."""
    if not facts.is_moe and facts.ffn % (_CPU_BLOCK * tp):
        checks.fail(
            "rollout.sglang.tp_size",
            f"{count(tp, 'rank')} of a server on a CPU would pad the MLP's width of {facts.ffn}, but not its adapters",
            found=tp,
            allowed=f"a size that divides {facts.ffn / _CPU_BLOCK:g} (the width / {_CPU_BLOCK})",
            fix=f"change tp_size, remove mlp from model.lora.targets, or set {_KEY}=merged",
        )
