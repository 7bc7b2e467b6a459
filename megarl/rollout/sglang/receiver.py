"""SGLang servers as receivers of weights: SGLang's HTTP calls for each step of an update.

Servers that a run starts have megarl's loaders (compat/sglang_server/loaders): they keep a sender's buffer mapped until
the last bucket, and can write single changed elements. External servers without these loaders map every bucket again,
and receive only whole tensors.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.keeper import RESTORING, Keeper
from megarl.rollout.sglang.layout import ServerLayout
from megarl.rollout.sglang.wire import bucket_payload, header_payload, loader_payload
from megarl.sync.plan import Entry
from megarl.sync.protocol import read_tag
from megarl.sync.receiver import (
    Checksums,
    PauseMode,
    ShardMeeting,
    ShardUpdate,
    SharedUse,
    UpdateGroup,
    UpdateStep,
)
from megarl.sync.shared import Handle
from megarl.system.compat.sglang import ALL_LOADERS, DESCRIBE_LOADER, LOADER, PATCH_LOADER, SHARD_LOADER
from megarl.system.errors import ServerError

OWN_GPUS = "servers with GPUs of their own (rollout.sglang.gpus) cannot map memory of the trainer's GPUs"
SPREAD = "servers on several machines (rollout.sglang.nnodes) cannot receive weights through memory of one machine"
WHOLE = "flattened_bucket"  # SGLang's name for a buffer of whole tensors
_POLL_S = 0.5
_UNLOAD_S = 5.0  # deadline for unloading an old adapter, which waits until no request uses it
_MOVES_NOTHING = frozenset(
    (
        *("/pause_generation", "/continue_generation", "/begin_weight_update", "/flush_cache"),
        *("/update_weight_version", "/model_info", "/server_info"),
    )
)

# the models of a server that take an update: a draft of speculative decoding keeps its own weights unless it is trained
_MODEL_ONLY, _WITH_DRAFT = {"selector": "target"}, {"selector": "all"}


class SglangReceiver:
    """Transfers weights to one SGLang server; implements `megarl.sync.receiver.Receiver`.

    Args:
        server: the server; a restart changes its address.
        keeper: gets a message about every step of an update, so that its process can restore the server if the trainer
            dies; None for servers that end with the trainer.
        answer_s: deadline in seconds of calls that transfer no weights; shorter than the deadline for loading.
    """

    def __init__(
        self, server: Server, layout: ServerLayout, keeper: Keeper | None = None, answer_s: float = math.inf
    ) -> None:
        self.server, self.layout, self.keeper, self._answer_s = server, layout, keeper, answer_s
        self.number = server.number
        self.models = _MODEL_ONLY
        self._loaders: dict[str, set[str]] = {}  # address of the server -> names of its weight loaders

    @property
    def name(self) -> str:
        """The name of the server."""
        return self.server.api.name

    @property
    def url(self) -> str:
        """The address of the server."""
        return self.server.api.url

    @property
    def version(self) -> int | None:
        """The last weight version that the server acknowledged since its start; None: no version."""
        return self.server.version

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs of the server's ranks; empty for external servers."""
        return self.server.gpus

    @property
    def answers(self) -> bool:
        """Whether the server is neither starting nor failed."""
        return self.server.state in ("catching_up", "current")

    def pause(self, mode: PauseMode, step: UpdateStep) -> None:
        """Pause the server; if an earlier trainer died during a weight update, first wait until its keeper process has
        restored the server's weights.
        """
        if self.keeper is not None:
            self.keeper.open(self.server.api)
        end = time.monotonic() + step.deadline_s
        while self.held_version(step).startswith(RESTORING):
            if time.monotonic() > end:
                # A keeper process that still restores the server stops when it reads this new version.
                self.set_version("taken over", step)
                break
            time.sleep(_POLL_S)
        self._call("/pause_generation", {"mode": mode}, step)

    def loading(self, version: str, step: UpdateStep) -> None:
        """Notify the keeper, which restores the server if the trainer dies, that the server is between versions.

        From now on it may hold tensors of both its old version and `version`.
        """
        if self.keeper is not None:
            self.keeper.loading(self.server.api, version)

    def begin(self, step: UpdateStep) -> None:
        """Begin an update; end an earlier update first that a dead trainer left open."""
        try:
            self._call("/begin_weight_update", self.models, step)
        except ServerError as error:
            if "already open" not in error.reason:
                raise
            self._call("/end_weight_update", {}, step)
            self._call("/begin_weight_update", self.models, step)

    def end(self, step: UpdateStep) -> None:
        """End the weight update that `begin` has opened on the server."""
        self._call("/end_weight_update", {}, step)

    def set_version(self, version: str, step: UpdateStep) -> None:
        """Set the name of the weight version that the server holds."""
        self._call("/update_weight_version", {"new_version": version, "abort_all_requests": False}, step)

    def held_version(self, step: UpdateStep) -> str:
        """Return the name of the weight version that the server holds."""
        return str(self._call("/model_info", None, step, "GET").get("weight_version"))

    def flush(self, mode: PauseMode, step: UpdateStep) -> None:
        """Drop the prefix cache; after an `in_place` pause the server may reject this: requests use the cache."""
        try:
            self._call("/flush_cache", {}, step)
        except ServerError as error:
            if mode != "in_place" or error.status is None:
                raise

    def resume(self, step: UpdateStep) -> None:
        """Resume generation."""
        # The server empties the allocator's cache with a CUDA call, which fails on a CPU.
        self._call("/continue_generation", {"torch_empty_cache": False}, step)

    def done(self, version: str, folder: Path | None) -> None:
        """Report to the keeper, the process that restores the server if the trainer dies, that it has `version`.

        Args:
            folder: where these weights are on disk, if they are.
        """
        if self.keeper is not None:
            self.keeper.done(self.server.api, version, folder)

    def take_shared(
        self, handles: Sequence[Handle], entries: Sequence[Sequence[Entry]], use: SharedUse | None, step: UpdateStep
    ) -> None:
        """Send each server rank the handle of its shared buffer and the list of the tensors in it.

        Raises:
            ServerError: the call failed, or the server lacks megarl's loader. Without this loader it would answer
                before its GPU has read the buffer, which would then be refilled too early.
        """
        if any("device" in handle for handle in handles) and not self._has(LOADER, step):
            reason = (
                "without megarl's loader it answers before its GPU has copied the weights; start it with "
                f"--custom-weight-loader {LOADER} {PATCH_LOADER} (docs/servers.md), or set sync.transport=distributed"
            )
            raise ServerError(self.name, self.url, step.phase, reason)
        if use is None or not self._has(LOADER, step):
            self._load([bucket_payload(h, es) for h, es in zip(handles, entries, strict=True)], WHOLE, step)
            return
        payloads = []
        for handle, wanted in zip(handles, entries, strict=True):
            tensors = [[entry.name, entry.shape, entry.dtype, entry.offset, entry.nbytes] for entry in wanted]
            header = {"tensors": tensors, "update": use.update, "sender": use.sender, "last": use.last}
            payloads.append(loader_payload(handle, header))
        self._load(payloads, LOADER, step)

    def takes_changes(self, step: UpdateStep) -> bool:
        """Return whether the server can load only changed elements, and has not rejected such an update yet."""
        return self._has(PATCH_LOADER, step)

    def take_changes(self, handles: Sequence[Handle], header: list[Any], step: UpdateStep) -> bool:
        """Send the changed elements of the weights; return False if the server rejects them."""
        try:
            self._load([loader_payload(handle, header) for handle in handles], PATCH_LOADER, step)
        except ServerError as error:
            if error.status != 200:
                raise
            # the server stores a tensor in a form that cannot be changed in part: send whole tensors from now on
            self._loaders[self.url].discard(PATCH_LOADER)
            return False
        return True

    def join_group(self, group: UpdateGroup, step: UpdateStep) -> None:
        """Make the server's ranks join the process group."""
        payload = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": 1,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self._call("/init_weights_update_group", payload, step)

    def take_broadcast(self, group: str, entries: Sequence[Entry], step: UpdateStep) -> None:
        """Make the server receive a broadcast of one flat buffer with these tensors."""
        payload = {
            "names": [entry.name for entry in entries],
            "dtypes": [entry.dtype for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
            "group_name": group,
            "load_format": WHOLE,
            "flush_cache": False,
        }
        self._call("/update_weights_from_distributed", payload | self.models, step)

    def describe_storage(self, meeting: ShardMeeting, step: UpdateStep) -> None:
        """Make each rank of the server write how it stores the model (`RankStorage`), and its machine's name, to the
        trainer's store."""
        self._call_ranks(DESCRIBE_LOADER, asdict(meeting), step)

    def take_shards(self, update: ShardUpdate, step: UpdateStep) -> None:
        """Make each rank of the server receive its part of an update directly from the trainer's ranks."""
        header = asdict(update)
        self._call_ranks(SHARD_LOADER, header.pop("meeting") | header, step)

    def _call_ranks(self, loader: str, header: dict[str, Any], step: UpdateStep) -> None:
        """Call a loader (a function of megarl inside the server) on every rank, with `header` and the rank's number.

        Raises:
            ServerError: the call failed, or the server was started without this loader.
        """
        if not self._has(loader, step):
            reason = (
                f"it was started without megarl's loader {loader}; start it with --custom-weight-loader "
                f"{' '.join(ALL_LOADERS)} (docs/servers.md), or set sync.transport=distributed"
            )
            raise ServerError(self.name, self.url, step.phase, reason)
        self._load([header_payload(header | {"rank": rank}) for rank in range(self.layout.ranks)], loader, step)

    def read_folder(self, folder: Path, step: UpdateStep) -> None:
        """Make the server read all weights from a folder."""
        payload = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": False}
        self._call("/update_weights_from_disk", payload, step)

    def load_adapter(self, name: str, folder: Path, kept: Collection[str], step: UpdateStep) -> None:
        """Make the server load a PEFT adapter and compare it with what its trainer has written, then unload other
        adapters that a run has loaded and that are not in `kept`.

        The server unloads an adapter when no request uses it any more. If that takes longer than a few seconds, the
        next update unloads the adapter.

        Raises:
            ServerError: the load failed, or the server does not compare adapters.
        """
        payload = {"lora_name": name, "lora_path": str(folder)}
        try:
            answer = self._call("/load_lora_adapter", payload, step)
        except ServerError as error:
            if "already loaded" not in error.reason and "incomplete unload" not in error.reason:
                raise
            # An earlier update of this server failed after it had loaded the adapter, or began to unload it.
            self._call("/unload_lora_adapter", {"lora_name": name}, step)
            answer = self._call("/load_lora_adapter", payload, step)
        if answer.get("error_message") != f"compared {name}":
            reason = (
                f"it loads adapter {name} without comparing it with the trainer's; start it with serve.py of this "
                "version of megarl (docs/servers.md), or set sync.adapters=merged"
            )
            raise ServerError(self.name, self.url, step.phase, reason)
        old = [each for each in answer["loaded_adapters"] if each not in (name, *kept) and _is_tag(each)]
        try:
            for each in old:
                short = replace(step, deadline_s=min(step.deadline_s, _UNLOAD_S))
                self._call("/unload_lora_adapter", {"lora_name": each}, short)
        except ServerError as error:
            print(f"{self.name} keeps old adapters until the next update: {error}", flush=True)

    def checksums(self, step: UpdateStep) -> Checksums:
        """Return the server's checksums of its own parameters, by tensor-parallel rank."""
        answer = self._call("/weights_checker", {"action": "checksum"}, step)
        try:
            # With attention_dp, each attention group of the server adds a list with the checksums of all ranks.
            flat = [info for part in answer["ranks"] for info in (part if isinstance(part, list) else [part])]
            ranks = {info["parallelism_info"][0]["tp_rank"]: info["checksums"] for info in flat}
            return [ranks[rank] for rank in sorted(ranks)]
        except (KeyError, IndexError, TypeError) as error:
            reason = f"its answer contains no checksums: {type(error).__name__}: {error}"
            raise ServerError(self.name, self.url, step.phase, reason) from error

    def forget(self) -> None:
        """Forget which weight loaders the server at this address has, because at the next update another server may
        have the address."""
        self._loaders.pop(self.url, None)

    def _has(self, loader: str, step: UpdateStep) -> bool:
        if self.url not in self._loaders:
            info = self._call("/server_info", None, UpdateStep("query of its loaders", step.deadline_s), "GET")
            self._loaders[self.url] = set(info.get("custom_weight_loader") or [])
        return loader in self._loaders[self.url]

    def _load(self, payloads: list[str], load_format: str, step: UpdateStep) -> None:
        payload = {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": False}
        self._call("/update_weights_from_tensor", payload | self.models, step)

    def _call(
        self, path: str, payload: dict[str, Any] | None, step: UpdateStep, method: str = "POST"
    ) -> dict[str, Any]:
        limit = min(step.deadline_s, self._answer_s) if path in _MOVES_NOTHING else step.deadline_s
        return self.server.api.call(path, payload, deadline_s=limit, phase=step.phase, method=method)


def _is_tag(name: str) -> bool:
    try:
        read_tag(name)
    except ValueError:
        return False
    return True


class SglangReceivers:
    """The servers of a fleet; implements `megarl.sync.receiver.Receivers`.

    `takes_draft`: their draft model is the policy's own draft head, which is trained.
    """

    def __init__(self, fleet: Fleet, layout: ServerLayout, *, takes_draft: bool = False) -> None:
        self.fleet, self.takes_draft = fleet, takes_draft
        self.keeper: Keeper | None = None
        limit_s = fleet.config.health_timeout_s
        self.all = [SglangReceiver(server, layout, answer_s=limit_s) for server in fleet.servers]
        for receiver in self.all if takes_draft else ():
            receiver.models = _WITH_DRAFT

    @property
    def cannot_map(self) -> str:
        """Why servers cannot map memory of the trainer's GPUs; empty if they can, or run on a CPU."""
        separate = not self.fleet.external and not self.fleet.config.colocated
        return OWN_GPUS if separate and self.all and self.all[0].layout.on_gpu else ""

    @property
    def spread(self) -> str:
        """The reason why servers cannot receive weights through the shared memory of one machine, for errors: a server
        spans several machines. Empty if they can."""
        return SPREAD if self.fleet.config.nnodes > 1 else ""

    @property
    def colocated(self) -> bool:
        """Whether the servers share the trainer's GPUs (`rollout.sglang.colocated`)."""
        return self.fleet.config.colocated

    @property
    def takes_no_shards(self) -> str:
        """Why servers cannot take weights directly from the trainer's ranks (`sync.transport=shards`); empty if they
        can."""
        return "servers with a draft model that is trained take whole tensors" if self.takes_draft else ""

    def lead(self, folder: Path, deadline_s: float) -> None:
        """Start a keeper process for external servers: they outlive the trainer, and it restores a server if the
        trainer dies during a weight update.
        """
        if self.fleet.external:
            self.keeper = Keeper(folder, deadline_s)
            for receiver in self.all:
                receiver.keeper = self.keeper

    def acknowledge(self, number: int, version: int) -> None:
        """Record in the fleet that server `number` holds `version`."""
        self.fleet.acknowledge(self.fleet.servers[number], version)

    def mark_failed(self, number: int, why: str) -> None:
        """Record in the fleet that server `number` failed, and why."""
        self.fleet.mark_failed(self.fleet.servers[number], why)

    def close(self) -> None:
        """Close the pipe to the keeper process, which then restores servers whose update is not done."""
        if self.keeper is not None:
            self.keeper.close()
