"""Which servers with separate adapters are probed."""

from __future__ import annotations

from pathlib import Path

from megarl.config.sync import SyncConfig
from megarl.sync.adapters import AdapterSync
from megarl.sync.sender import SyncReport
from megarl.system.comm import WorkerGroup


class Updates(AdapterSync):
    """Updates of which this rank sends nothing."""

    def __init__(self, verify: str) -> None:
        self.config, self.world, self.run = SyncConfig(adapters="separate", verify=verify), WorkerGroup.alone(), "run"
        self._led, self._updated_once, self._tensors, self._nbytes = set(), set(), 0, 0

    def _write(self, version: int) -> Path:
        return Path(f"v{version}")

    def _close_report(self, report: SyncReport, agreed: list[int]) -> None: ...


def test_a_servers_second_update_is_probed_because_b_is_zero_in_the_first() -> None:
    """Server 1 begins, or begins again, one update later."""
    for verify, expected in (("first", [[0], [0, 1], [1], []]), ("off", [[], [], [], []])):
        sync, probed = Updates(verify), []
        for version, base in enumerate([[0], [1], [], []], 1):
            report = SyncReport(version, "disk", to_probe=base if verify == "first" else [])
            sync._send_adapters([0, 1], {}, report)
            probed.append(report.to_probe)
        assert probed == expected
