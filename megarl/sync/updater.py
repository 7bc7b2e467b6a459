"""Entry points for the training loop: `push` after an update of the policy, `catch_up` for receivers that lag.

Both are collective over all ranks of the trainer:

    all ranks            agree on the receivers to update
    lead of a receiver   pause, begin                     one lead per receiver: the first sender of its route
    all ranks            agree on which receivers are open
    all ranks            rounds: gather, send             (sender.py)
    all ranks            agree on which receivers got everything
    lead                 commit, end, tag, [verify], flush, resume
    all ranks            agree on which receivers are current; update every rank's `Receivers`

A receiver that fails at any point is marked failed on every rank; the update of the others continues.
"""

from __future__ import annotations

import secrets
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import torch

from megarl.config.sync import SyncConfig
from megarl.models.policy import PolicyModel
from megarl.models.weight_table import Coordinate
from megarl.models.weights.export import iter_on_all_ranks, layout_of_all, stage_group
from megarl.models.weights.fill import coordinate
from megarl.sync import verify
from megarl.sync.hosts import choose_transport, hosts_of_ranks, hosts_of_receivers, place_of_store
from megarl.sync.plan import TrainerRank, holdings, make_plan
from megarl.sync.protocol import ReceiverUpdate, failure, holds_last_version, version_tag
from megarl.sync.receiver import Checksums, Receiver, Receivers, UpdateStep
from megarl.sync.sender import BucketSender, SyncReport
from megarl.sync.shards.handover import device_name
from megarl.sync.shards.transfer import ShardReceiver, ShardTransfer
from megarl.sync.source import Pieces, Source
from megarl.sync.transports.base import Transport
from megarl.sync.transports.delta import DeltaTransport, relays_of_all
from megarl.sync.transports.disk import DiskTransport
from megarl.sync.transports.distributed import DistributedTransport
from megarl.sync.transports.shards import ShardsTransport, own_shards, planner, refuse_shards
from megarl.sync.transports.tensor import TensorTransport
from megarl.system.comm import WorkerGroup
from megarl.system.device import DTYPES, device, gpu_name
from megarl.system.errors import ServerError, WorkerError
from megarl.system.processes import address_of
from megarl.system.tracing import phase

T = TypeVar("T")


class WeightSync:
    """Sends the trainer's weights to receivers.

    Args:
        chunks: this rank's part of the model, whose current parameters are sent.
        receivers: all receivers, in the same order on every rank.
        config: section `sync` of the recipe.
        run_dir: run folder, for logs and the disk transport's folder.
        world: all ranks of the trainer.
        freeze: parts of the model (`ModelPart`) that are not trained, and are sent to a receiver only once.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        receivers: Receivers,
        config: SyncConfig,
        run_dir: Path,
        world: WorkerGroup,
        freeze: Collection[str] = (),
    ) -> None:
        self.chunks, self.receivers, self.config, self.world = chunks, receivers, config, world
        self.version: int | None = None
        self.run = world.broadcast_json(secrets.token_hex(4))  # names this run in version tags
        model_dtype = chunks[0].config.params_dtype
        self.dtype = model_dtype if config.dtype == "model" else DTYPES[config.dtype]
        ranks = layout_of_all(coordinate(chunks), world)
        self.table = chunks[0].weight_table.without_draft()
        sent = chunks[0].weight_table if receivers.takes_draft else self.table
        names, addresses = hosts_of_ranks(world)
        hosts = hosts_of_receivers([receiver.url for receiver in receivers.all], names, addresses, world)
        self.transport_name = choose_transport(
            config.transport,
            hosts,
            set(names.values()),
            receivers.cannot_map,
            receivers.spread,
            colocated=receivers.colocated,
        )
        if self.transport_name == "shards":
            refuse_shards(receivers, adapters=chunks[0].config.lora is not None)
        kind, gpus = TRANSPORTS[self.transport_name], world.all_gather_json(gpu_name())
        self.plan = make_plan(
            holdings(sent, ranks),
            [TrainerRank(at.pp_rank, names[rank], gpus[rank]) for rank, at in enumerate(ranks)],
            hosts,
            dtype=str(self.dtype).removeprefix("torch."),
            fp8=config.fp8,
            bucket_bytes=config.bucket_mb * 10**6,
            same_host=kind.same_host,
            gpus=[receiver.gpus for receiver in receivers.all],
            one_replica=kind.one_replica,
            senders_per_stage=kind.senders_per_stage,
            frozen=sent.names_of(freeze),
            together=next((receiver.layout.together for receiver in receivers.all), None),
        )
        # receivers that this rank leads: it sends them the calls that begin and end an update
        self._led = {number for route in self.plan.routes if route.lead == world.rank for number in route.receivers}
        self.transport = self._make_transport(run_dir, names, addresses, ranks)
        at, live = self.transport.device, self.transport.live and chunks[0].config.lora is None
        if at.type != "cpu":  # nccl makes the world's communicator in this first collective
            world.all_reduce(torch.zeros(1, device=at))
        source = Source(Pieces(chunks), self.plan, world, self.dtype, at, live=live)
        self.sender = BucketSender(source, self.transport)
        if self._led:
            receivers.lead(run_dir / "sync", config.timeout_s)

    def push(self, version: int) -> SyncReport:
        """Send the current parameters to every living receiver as version `version`; return the report. Collective.

        Raises:
            ValueError: the version is older than the last one.
            WorkerError: a receiver's checksums differ from the trainer's, the version cannot be published, or a weight
                relay has ended.
        """
        if self.version is not None and version < self.version:
            raise ValueError(
                f"weight version {version} is older than version {self.version}, which was sent before; send version "
                f"{self.version} or a newer one"
            )
        self.version = version
        return self._sync(lambda receiver: True)

    def catch_up(self) -> SyncReport:
        """Send the current version to receivers that lack it and have not failed, and return the report.

        Collective; cheap if none lack it.
        """
        if self.version is None:
            raise ValueError("catch_up has no weights to send: call push first")
        return self._sync(lambda receiver: receiver.version != self.version)

    def close(self) -> None:
        """Leave process groups, free buffers, and close the connections to receivers. Not collective."""
        self.receivers.close()
        self.transport.close()
        self.sender.release()

    def _make_transport(
        self, run_dir: Path, names: dict[int, str], addresses: dict[str, str], ranks: Sequence[Coordinate]
    ) -> Transport:
        limit = self.config.timeout_s
        if self.transport_name in ("shards", "distributed"):
            # Only to refuse a name that stands for every interface: servers get the name itself, because they may
            # resolve it to another address.
            address_of(self.config.address, "sync.address")
        if self.transport_name == "shards":
            machines, address = place_of_store(self.config.address, self.world)
            colocated, wire = self.receivers.colocated, str(self.dtype).removeprefix("torch.")
            gpus = self.world.all_gather_json(device_name(device())) if colocated else None
            shards = own_shards(self.chunks, self.table, ranks, machines, wire, gpus)
            rounds = planner(self.config.bucket_mb * 10**6, colocated=colocated)
            return ShardsTransport(ShardTransfer(shards, rounds, self.world, self.run, limit, address))
        if self.transport_name == "tensor":
            return TensorTransport(self.plan, device(), limit)
        if self.transport_name == "distributed":
            return DistributedTransport(device(), limit, self.config.address)
        if self.transport_name == "delta":
            relays, key, process = relays_of_all(
                set(self.plan.hosts), names, addresses, self.config, run_dir, self.world
            )
            return DeltaTransport(self.plan, relays, key, f"{self.world.rank}", self.run, limit, process)
        folder = Path(self.config.folder) if self.config.folder else run_dir / "sync"
        return DiskTransport(folder, self.world.rank, self.chunks[0].hf_config, limit)

    def _sync(self, wanted: Callable[[Receiver], bool]) -> SyncReport:
        assert self.version is not None
        report = SyncReport(self.version, self.transport_name)
        start = time.perf_counter()
        agreed = self._agreed(wanted)
        if not agreed:
            return report
        with phase("weight_sync"):
            # Tensors that are not trained go to receivers that may lack them, or if the transport needs all tensors.
            whole = not (self.plan.frozen and self.transport.in_parts) or bool(self._lacking(agreed))
            tag = version_tag(self.version, self.run)
            step = UpdateStep(f"update to version {tag}", self.config.timeout_s)
            updates = {
                n: ReceiverUpdate(self.receivers.all[n], tag, self.config.pause, self.transport.session, step)
                for n in agreed
                if n in self._led
            }
            self._each(updates, ReceiverUpdate.open, report)
            ready = self._agree(agreed, report)
            if isinstance(self.transport, ShardsTransport):
                checked = [
                    n for n in ready if self.config.verify == "every" and self.receivers.all[n].version is not None
                ]
                receivers = [cast("ShardReceiver", self.receivers.all[n]) for n in ready]
                self.transport.transfer.run(receivers, self._led, report, checked)
            else:
                self._send_buckets(ready, report, whole=whole)
            self._agree(ready, report)
            self._finish(updates, [n for n in ready if n not in report.failed], report)
        report.seconds = time.perf_counter() - start
        self._close_report(report, agreed)
        return report

    def _agreed(self, wanted: Callable[[Receiver], bool]) -> list[int]:
        """Return the numbers of the `wanted` receivers that have failed on no rank. Collective.

        Raises:
            WorkerError: the transport cannot complete any update any more.
        """
        numbers = [r.number for r in self.receivers.all if r.answers and wanted(r)]
        everyone = self.world.all_gather_json([numbers, self.transport.broken()])
        broken = [why for _, why in everyone if why is not None]
        if broken:
            raise WorkerError(broken[0])
        return sorted(set.intersection(*(set(part) for part, _ in everyone)))

    def _send_buckets(self, ready: list[int], report: SyncReport, *, whole: bool) -> None:
        """Send the tensors in buckets to the receivers `ready`; frozen tensors only if `whole`."""
        routes = [i for i, route in enumerate(self.plan.routes) if any(n in route.receivers for n in ready)]
        here = self.sender.source.route
        served = () if here is None else self.plan.routes[here].receivers
        receivers = [self.receivers.all[number] for number in ready if number in served]
        if receivers:
            self.transport.start(report.version, receivers)
        self.sender.run(routes, receivers, report, whole=whole)

    def _lacking(self, numbers: list[int]) -> set[int]:
        """Return the receivers in `numbers` that no longer report the version that was sent to them last, or got none
        yet. Collective.
        """
        led = [number for number in numbers if number in self._led]
        with ThreadPoolExecutor(max(len(led), 1)) as pool:
            receivers = (self.receivers.all[number] for number in led)
            hold = list(pool.map(lambda r: holds_last_version(r, self.run, self.config.timeout_s), receivers))
        lacking = [number for number, holds in zip(led, hold, strict=True) if not holds]
        return {number for part in self.world.all_gather_json(lacking) for number in part}

    def _finish(self, updates: dict[int, ReceiverUpdate], ready: list[int], report: SyncReport) -> None:
        """Publish the version; then the lead of each receiver (the rank that calls it) performs the steps of the update
        from `commit` on.
        """
        problem = None
        if self.world.rank == 0 and ready:
            try:
                self.transport.publish()
            except (OSError, WorkerError) as error:
                problem = f"cannot publish version {report.version}: {error}"
        problem = self.world.broadcast_json(problem)
        if problem is not None:
            raise WorkerError(problem)
        led = {n: update for n, update in updates.items() if n in ready}
        self._each(led, lambda update: update.load(self.transport.commit), report)
        if self.config.verify != "off":
            every = self.config.verify == "every"
            new = [n for n in ready if every or self.receivers.all[n].version is None]
            report.to_probe = sorted({n for part in self.world.all_gather_json(new) for n in part})
            whole = report.to_probe
            # This transport has itself compared, by hashes, the receivers that already had a version.
            if isinstance(self.transport, ShardsTransport):
                whole = [n for n in whole if self.receivers.all[n].version is None]
            if whole and not self.config.fp8:
                self._verify(led, whole, report)
        led = {n: update for n, update in led.items() if n not in report.failed}
        self._each(led, lambda update: update.reopen(self.transport.folder_held()), report)

    def _verify(self, led: Collection[int], numbers: list[int], report: SyncReport) -> None:
        """Compare the checksums of the receivers `numbers` with the trainer's; this rank calls those in `led`.
        Collective.

        A receiver that returns no checksums counts as failed.

        Raises:
            WorkerError: a receiver's weights differ from the trainer's; raised on every rank.
        """
        layouts = list(dict.fromkeys(self.receivers.all[n].layout for n in numbers))
        compared = self.table.shapes()  # without the draft head, of which receivers report no checksums
        with stage_group(self.chunks, self.world) as stage:
            every = iter_on_all_ranks(self.chunks, stage, device())
            tensors = ((name, tensor) for name, tensor in every if name in compared)
            expected = verify.expected_checksums(tensors, layouts, self.dtype, self.world, self.table.float32(), stage)
        reported: dict[int, Checksums] = {}

        def read(number: int) -> None:
            reported[number] = self.receivers.all[number].checksums(UpdateStep(verify.PHASE, self.config.timeout_s))

        self._each({n: n for n in led if n in numbers and n not in report.failed}, read, report)
        wrong: list[str] = []
        for number, checksums in reported.items():
            receiver = self.receivers.all[number]
            try:
                report.verified += verify.compare(receiver, expected[receiver.layout], checksums)
            except ServerError as error:
                wrong.append(str(error))
        everyone = [text for part in self.world.all_gather_json(wrong) for text in part]
        if everyone:
            raise WorkerError("\n".join(everyone))

    def _each(self, work: Mapping[int, T], action: Callable[[T], None], report: SyncReport) -> None:
        """Run `action` for every receiver in `work` in parallel, and record failures in the report."""
        if not work:
            return
        with ThreadPoolExecutor(len(work)) as pool:
            running = {number: pool.submit(action, value) for number, value in work.items()}
        for number, future in running.items():
            error = future.exception()
            if isinstance(error, Exception) and not isinstance(error, ServerError):
                traceback.print_exception(error)  # the run continues, so print the cause
                where = f"update to version {report.version}"
                error = failure(self.receivers.all[number], where, f"{type(error).__name__}: {error}")
            if isinstance(error, ServerError):
                report.failed[number] = str(error)
            elif error is not None:
                raise error

    def _agree(self, numbers: list[int], report: SyncReport) -> list[int]:
        """Share all failures between the ranks' reports; return the receivers in `numbers` that no rank saw fail."""
        for part in self.world.all_gather_json([[number, why] for number, why in report.failed.items()]):
            for number, why in part:
                report.failed.setdefault(number, why)
        return [number for number in numbers if number not in report.failed]

    def _close_report(self, report: SyncReport, agreed: list[int]) -> None:
        """Merge the ranks' reports of a weight update, so that all are equal, and set the receivers' states by it."""
        self._agree(agreed, report)
        numbers = [report.nbytes, report.seconds, report.gather_s, report.send_s, report.verified]
        everyone = self.world.all_gather_json(numbers)
        report.nbytes = sum(part[0] for part in everyone)
        report.seconds, report.gather_s, report.send_s = (max(part[i] for part in everyone) for i in (1, 2, 3))
        report.verified = sum(part[4] for part in everyone)
        report.updated = [number for number in agreed if number not in report.failed]
        report.to_probe = [number for number in report.to_probe if number in report.updated]
        for number in agreed:
            if number in report.failed:
                self.transport.drop(self.receivers.all[number])
                self.receivers.mark_failed(number, report.failed[number])
            else:
                self.receivers.acknowledge(number, report.version)


TRANSPORTS: dict[str, type[Transport]] = {
    "tensor": TensorTransport,
    "distributed": DistributedTransport,
    "disk": DiskTransport,
    "delta": DeltaTransport,
    "shards": ShardsTransport,
}
