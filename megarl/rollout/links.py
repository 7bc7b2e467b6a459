"""Helpers that the weight links of several engines share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.system.processes import LOOPBACK

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.rollout.family import EngineHost
    from megarl.sync.updater import SyncReport


def record_update(host: EngineHost, report: SyncReport) -> None:
    """Record the metrics of a weight update; the report is the same on every rank."""
    if not report.updated and not report.failed:
        return
    m = host.metrics
    m.max("sync/gb", report.nbytes / 1e9)
    m.max("sync/seconds", report.seconds)
    m.max("sync/gb_per_s", report.nbytes / 1e9 / max(report.seconds, 1e-9))
    m.max("sync/gather_s", report.gather_s)
    m.max("sync/send_s", report.send_s)
    m.max("sync/servers", len(report.updated))
    m.max("sync/failed", len(report.failed))
    m.max("sync/verified_tensors", report.verified)
    if report.failed and host.layout.rank == 0:
        for number, why in sorted(report.failed.items()):
            print(f"server {number} did not receive weights {report.version}: {why}", flush=True)


def address_of_worker(config: RunConfig) -> str:
    """Return the network address at which workers of other teams reach this worker."""
    if config.cluster.nnodes == 1:
        return LOOPBACK[0]
    import ray

    return str(ray.util.get_node_ip_address())
