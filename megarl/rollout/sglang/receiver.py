"""SGLang's servers as receivers of weights: SGLang's calls for each step, and its wire formats.

What a server takes depends on how it was started. One that has megarl's loaders (compat/sglang_server/loaders) keeps a
sender's buffer mapped until the last bucket, and writes changed elements itself; servers that a run starts have them.
Any other maps every bucket again, and takes whole tensors only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.keeper import RESTORING, Keeper
from megarl.rollout.sglang.layout import ServerLayout
from megarl.rollout.sglang.wire import bucket_payload, loader_payload
from megarl.sync.plan import Entry
from megarl.sync.receiver import Checksums, PauseMode, SharedUse, UpdateGroup, UpdateStep
from megarl.sync.shared import Handle
from megarl.system.compat.sglang import LOADER, PATCH_LOADER
from megarl.system.errors import ServerError

OWN_GPUS = "servers with GPUs of their own (rollout.sglang.gpus) cannot map the memory of the trainer's"
SPREAD = "servers on several machines (rollout.sglang.nnodes) take nothing through the memory of one of them"
WHOLE = "flattened_bucket"  # SGLang's name for a buffer of whole tensors
_POLL_S = 0.5
_MOVES_NOTHING = frozenset(
    (
        *("/pause_generation", "/continue_generation", "/begin_weight_update", "/flush_cache"),
        *("/update_weight_version", "/model_info", "/server_info"),
    )
)

_MODEL_ONLY = {"selector": "target"}  # a draft of speculative decoding keeps its own weights


class SglangReceiver:
    """One server, see `megarl.sync.receiver.Receiver`.

    Args:
        server: its address changes when it is restarted.
        keeper: told of every update of this server, if it outlives the trainer.
        answer_s: deadline of calls that move no weights: a server that hangs is not waited for like one that loads.
    """

    def __init__(
        self, server: Server, layout: ServerLayout, keeper: Keeper | None = None, answer_s: float = math.inf
    ) -> None:
        self.server, self.layout, self.keeper, self._answer_s = server, layout, keeper, answer_s
        self.number = server.number
        self._loaders: dict[str, set[str]] = {}  # names of the weight loaders of a server, by its address

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
        """The last one that was acknowledged since it was started."""
        return self.server.version

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs of its ranks, where the run started it."""
        return self.server.gpus

    @property
    def answers(self) -> bool:
        """It is neither starting nor failed."""
        return self.server.state in ("catching_up", "current")

    def pause(self, mode: PauseMode, step: UpdateStep) -> None:
        """Wait until the keeper of an earlier trainer is done with the server, then pause it."""
        if self.keeper is not None:
            self.keeper.open(self.server.api)
        end = time.monotonic() + step.deadline_s
        while self.held_version(step).startswith(RESTORING):
            if time.monotonic() > end:
                self.set_version("taken over", step)  # the keeper is gone, or sees that the server is no longer its own
                break
            time.sleep(_POLL_S)
        self._call("/pause_generation", {"mode": mode}, step)

    def loading(self, version: str, step: UpdateStep) -> None:
        """Send the keeper the message that the server may now hold tensors of both its old version and `version`."""
        if self.keeper is not None:
            self.keeper.loading(self.server.api, version)

    def begin(self, step: UpdateStep) -> None:
        """Open a session; one that a dead trainer left open is closed."""
        try:
            self._call("/begin_weight_update", _MODEL_ONLY, step)
        except ServerError as error:
            if "already open" not in error.reason:
                raise
            self._call("/end_weight_update", {}, step)
            self._call("/begin_weight_update", _MODEL_ONLY, step)

    def end(self, step: UpdateStep) -> None:
        """Close the session."""
        self._call("/end_weight_update", {}, step)

    def set_version(self, version: str, step: UpdateStep) -> None:
        """Set the name of the weight version that the server holds."""
        self._call("/update_weight_version", {"new_version": version, "abort_all_requests": False}, step)

    def held_version(self, step: UpdateStep) -> str:
        """Return the server's name of its weights."""
        return str(self._call("/model_info", None, step, "GET").get("weight_version"))

    def flush(self, mode: PauseMode, step: UpdateStep) -> None:
        """Drop the prefix cache, unless `in_place` requests hold on to theirs."""
        try:
            self._call("/flush_cache", {}, step)
        except ServerError as error:
            if mode != "in_place" or error.status is None:
                raise

    def resume(self, step: UpdateStep) -> None:
        """Resume generation."""
        # Emptying the allocator's cache calls CUDA in the server whatever device it runs on.
        self._call("/continue_generation", {"torch_empty_cache": False}, step)

    def done(self, version: str, folder: Path | None) -> None:
        """Send the keeper the message that the server serves `version`, and the folder that holds it, if any."""
        if self.keeper is not None:
            self.keeper.done(self.server.api, version, folder)

    def take_shared(
        self, handles: Sequence[Handle], entries: Sequence[Sequence[Entry]], use: SharedUse | None, step: UpdateStep
    ) -> None:
        """Send a payload of handles for each rank."""
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
        """Return whether it has the loader, which has not refused yet."""
        return self._has(PATCH_LOADER, step)

    def take_changes(self, handles: Sequence[Handle], header: list[Any], step: UpdateStep) -> bool:
        """Return the changed elements for the loader."""
        try:
            self._load([loader_payload(handle, header) for handle in handles], PATCH_LOADER, step)
        except ServerError as error:
            if error.status != 200:
                raise
            self._loaders[self.url].discard(PATCH_LOADER)  # it keeps some tensor in another form
            return False
        return True

    def join_group(self, group: UpdateGroup, step: UpdateStep) -> None:
        """Make the server's ranks join."""
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
        """Broadcast one flat buffer."""
        payload = {
            "names": [entry.name for entry in entries],
            "dtypes": [entry.dtype for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
            "group_name": group,
            "load_format": WHOLE,
            "flush_cache": False,
        }
        self._call("/update_weights_from_distributed", payload | _MODEL_ONLY, step)

    def read_folder(self, folder: Path, step: UpdateStep) -> None:
        """Read the folder in one call."""
        payload = {"model_path": str(folder), "load_format": "safetensors", "flush_cache": False}
        self._call("/update_weights_from_disk", payload, step)

    def checksums(self, step: UpdateStep) -> Checksums:
        """Return the server's checksums of its own parameters, by tensor-parallel rank."""
        answer = self._call("/weights_checker", {"action": "checksum"}, step)
        try:
            # One list per data-parallel engine; those are not used, so there is one.
            flat = [info for part in answer["ranks"] for info in (part if isinstance(part, list) else [part])]
            flat.sort(key=lambda info: info["parallelism_info"][0]["tp_rank"])
            return [info["checksums"] for info in flat]
        except (KeyError, IndexError, TypeError) as error:
            reason = f"no checksums in its answer: {type(error).__name__}: {error}"
            raise ServerError(self.name, self.url, step.phase, reason) from error

    def forget(self) -> None:
        """Forget it: under this address there may be another server the next time."""
        self._loaders.pop(self.url, None)

    def _has(self, loader: str, step: UpdateStep) -> bool:
        if self.url not in self._loaders:
            info = self._call("/server_info", None, UpdateStep("which loaders it has", step.deadline_s), "GET")
            self._loaders[self.url] = set(info.get("custom_weight_loader") or [])
        return loader in self._loaders[self.url]

    def _load(self, payloads: list[str], load_format: str, step: UpdateStep) -> None:
        payload = {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": False}
        self._call("/update_weights_from_tensor", payload | _MODEL_ONLY, step)

    def _call(
        self, path: str, payload: dict[str, Any] | None, step: UpdateStep, method: str = "POST"
    ) -> dict[str, Any]:
        limit = min(step.deadline_s, self._answer_s) if path in _MOVES_NOTHING else step.deadline_s
        return self.server.api.call(path, payload, deadline_s=limit, phase=step.phase, method=method)


class SglangReceivers:
    """The servers of a fleet; implements `megarl.sync.receiver.Receivers`."""

    def __init__(self, fleet: Fleet, layout: ServerLayout) -> None:
        self.fleet = fleet
        self.keeper: Keeper | None = None
        self.all = [SglangReceiver(server, layout, answer_s=fleet.answer_s) for server in fleet.servers]

    @property
    def cannot_map(self) -> str:
        """Servers on GPUs that are not the trainer's."""
        return OWN_GPUS if self.fleet.on_other_gpus and self.all and self.all[0].layout.on_gpu else ""

    @property
    def spread(self) -> str:
        """Servers on several machines."""
        return SPREAD if self.fleet.nnodes > 1 else ""

    def lead(self, folder: Path, deadline_s: float) -> None:
        """Give a keeper to servers that outlive the trainer."""
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
        """End; the keeper brings back what is not done."""
        if self.keeper is not None:
            self.keeper.close()
