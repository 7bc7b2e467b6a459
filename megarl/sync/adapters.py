"""Updates of servers that hold the base model once and get only the adapters afterwards (`sync.adapters: separate`).

    servers without the base model   the steps of `WeightSync`, with adapters off
    first rank                       gather A and B of every layer, write them as a PEFT folder
    lead of a server                 load the folder as an adapter with the version's tag as its name, tag
    all ranks                        agree on which servers are current

Requests name the adapter of their version, so servers need no pause: requests that run meanwhile finish with the
adapter that they began with (`sync.pause: abort` pauses servers and ends these requests). A server keeps the adapters
of the new version and of the one before it, and drops older ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol, cast

from megarl.config.sync import SyncConfig
from megarl.models.lora import adapters_off
from megarl.models.policy import PolicyModel
from megarl.models.weights.adapters import adapter_tensors
from megarl.models.weights.peft import write_adapter
from megarl.sync.protocol import version_tag
from megarl.sync.receiver import Receiver, Receivers, UpdateStep
from megarl.sync.sender import SyncReport
from megarl.sync.transports.disk import remove_old, version_folder
from megarl.sync.updater import WeightSync
from megarl.system.comm import WorkerGroup
from megarl.system.errors import WorkerError
from megarl.system.tracing import phase

DIFFERS = "differ from the trainer's"
"""Part of the error of a server whose adapter differs from the trainer's file (serve.py)."""


class AdapterReceiver(Receiver, Protocol):
    """A receiver that can load low-rank adapters in addition to its weights."""

    def load_adapter(self, name: str, folder: Path, kept: Collection[str], step: UpdateStep) -> None:
        """Make the engine load the PEFT adapter in `folder` as `name`.

        Args:
            kept: names of earlier adapters that stay; the others that runs have loaded are dropped.

        Raises:
            ServerError: the engine has not loaded exactly the adapter `name`.
        """


class AdapterSync(WeightSync):
    """Sends the base model once to each receiver, and then only the adapters; arguments as of `WeightSync`.

    Raises:
        ValueError: the model has no adapters.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        receivers: Receivers,
        config: SyncConfig,
        run_dir: Path,
        world: WorkerGroup,
    ) -> None:
        if chunks[0].config.lora is None:
            raise ValueError("sync.adapters=separate needs a model with adapters; set model.lora")
        super().__init__(chunks, receivers, config, run_dir, world)
        self._lora = chunks[0].config.lora
        self._updated_once: set[int] = set()  # receivers that `verify=first` probes again at their next update
        self._folder = (Path(config.folder) if config.folder else run_dir / "sync") / "adapters"
        sizes = adapter_tensors(chunks[0].hf_config, self._lora)
        self._tensors = len(sizes)
        self._nbytes = chunks[0].config.params_dtype.itemsize * sum(down * up for down, up in sizes.values())

    def _sync(self, wanted: Callable[[Receiver], bool]) -> SyncReport:
        assert self.version is not None
        start = time.perf_counter()
        agreed = self._agreed(wanted)
        if not agreed:
            return SyncReport(self.version, self.transport_name)
        before = {number: self.receivers.all[number].version for number in agreed}
        base = SyncReport(self.version, self.transport_name)
        if lacking := self._lacking(agreed):  # the same receivers on every rank
            with adapters_off(self.chunks):
                base = super()._sync(lambda receiver: receiver.number in lacking)
            self.sender.release()  # later updates need no buckets
        report = SyncReport(self.version, self.transport_name, to_probe=base.to_probe)
        with phase("weight_sync"):
            self._send_adapters([number for number in agreed if number not in base.failed], before, report)
        report.failed |= base.failed
        report.nbytes, report.verified = report.nbytes + base.nbytes, report.verified + base.verified
        report.gather_s, report.send_s = report.gather_s + base.gather_s, report.send_s + base.send_s
        report.seconds = max(self.world.all_gather_json(time.perf_counter() - start))
        return report

    def _send_adapters(self, numbers: list[int], before: dict[int, int | None], report: SyncReport) -> None:
        """Make the receivers `numbers` load the adapters as they are now, and complete the report. Collective.

        Args:
            before: version of each receiver before this update.

        Raises:
            WorkerError: the adapters cannot be written, or a receiver has read other values; raised on every rank.
        """
        if not numbers:
            return
        start = time.perf_counter()
        folder = self._write(report.version)
        report.gather_s = time.perf_counter() - start
        tag = version_tag(report.version, self.run)
        step = UpdateStep(f"update to version {tag}", self.config.timeout_s)

        def load(number: int) -> None:
            receiver, version = cast("AdapterReceiver", self.receivers.all[number]), before[number]
            if self.config.pause == "abort":
                receiver.pause("abort", step)
            receiver.load_adapter(tag, folder, () if version is None else (version_tag(version, self.run),), step)
            receiver.set_version(tag, step)
            if self.config.pause == "abort":
                receiver.resume(step)
                receiver.done(tag, self.transport.folder_held())

        self._each({number: number for number in numbers if number in self._led}, load, report)
        report.send_s = time.perf_counter() - start - report.gather_s
        ready = self._agree(numbers, report)
        if differing := [why for why in report.failed.values() if DIFFERS in why]:
            raise WorkerError("\n".join(differing))
        report.nbytes = self._nbytes * len(self._led.intersection(ready))
        if self.config.verify != "off" and self.world.rank == 0:
            report.verified = self._tensors * len(ready)
        if self.config.verify == "every":
            if unchecked := [number for number in ready if number not in report.to_probe]:
                with adapters_off(self.chunks):
                    self._verify(self._led, unchecked, report)
            report.to_probe = ready
        elif self.config.verify == "first":
            # B is 0 at the start of a run, so only the second update shows whether a server applies its adapter.
            again = self._updated_once.intersection(ready)
            self._updated_once = (self._updated_once - again) | set(report.to_probe).intersection(ready)
            report.to_probe = sorted(again.union(report.to_probe))
        self._close_report(report, numbers)

    def _write(self, version: int) -> Path:
        """Write the adapters into the folder of `version`, and return it. Collective."""
        folder = self._folder / version_folder(version)
        problem = None
        try:
            if self.world.rank == 0:
                self._folder.mkdir(parents=True, exist_ok=True)
            write_adapter(
                *(self.chunks, folder, self._lora),
                base=None,
                world=self.world,
                adapter=version_tag(version, self.run),
                digests=self.config.verify != "off",
            )
            if self.world.rank == 0:
                remove_old(self._folder, version)
        except OSError as error:
            problem = (
                f"cannot write the adapters of version {version} to {folder}: {error}; correct this, for example free "
                "space there, or name another folder in sync.folder"
            )
        problem = self.world.broadcast_json(problem)
        if problem is not None:
            raise WorkerError(problem)
        return folder.resolve()
