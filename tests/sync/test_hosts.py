"""A trainer on several machines: one view of where servers are, and an address of its own for every sender."""

import socket
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.sync.updater import choose_transport
from tests.dist import fresh_parallel, run_distributed
from tests.models.tiny import build_tiny, save_tiny
from tests.sync.receivers import fleet_of, receivers
from tests.sync.test_updater import SETTINGS, assert_holds

ELSEWHERE = "10.9.8.7"


def on_two_machines(folder: str, run_dir: str, urls: list[str]) -> dict:
    """Each rank is a machine of its own, and the first alone can look the other's name up."""
    import torch.distributed as dist

    from megarl.config.sync import SyncConfig
    from megarl.sync.plan import ServerLayout
    from megarl.sync.updater import WeightSync

    rank = dist.get_rank()

    def look_up(name: str) -> tuple[str, list[str], list[str]]:
        if (rank, name) == (0, "machine1"):
            return name, [], [ELSEWHERE]
        raise socket.gaierror(f"{name} is not known here")

    socket.gethostname, socket.gethostbyname_ex = lambda: f"machine{rank}", look_up
    fresh_parallel(pp=2)
    chunks = build_tiny(folder, pp=2)

    def sync_to(addresses: list[str], transport: str) -> WeightSync:
        config = SyncConfig(**(SETTINGS | {"transport": transport}))
        return WeightSync(chunks, chunks[0].hf_config, fleet_of(addresses), ServerLayout(), config, Path(run_dir))

    planned = sync_to([f"http://{ELSEWHERE}:1"], "auto")
    sync = sync_to(urls, "distributed")
    report = sync.push(2)
    sync.close()
    return {
        "transport": planned.transport_name,
        "hosts": [server.host for server in planned.plan.servers],
        "updated": report.updated,
        "failed": report.failed,
    }


@pytest.mark.procs
def test_ranks_agree_on_hosts_and_every_sender_has_its_own_address(tmp_path):
    save_tiny(tmp_path / "model", "qwen3")
    with receivers(tmp_path / "r", 1) as urls:
        found = run_distributed(on_two_machines, 2, 120, str(tmp_path / "model"), str(tmp_path), urls)
        assert found == [{"transport": "tensor", "hosts": ["machine1"], "updated": [0], "failed": {}}] * 2
        assert_holds(urls[0], tmp_path / "model", tmp_path)


def test_shared_memory_needs_a_trainer_on_every_servers_host():
    assert choose_transport("auto", ["a", "b"], {"a", "b"}) == "tensor"
    assert choose_transport("auto", ["a", "c"], {"a", "b"}) == "distributed"
    assert choose_transport("auto", ["a", "b"], {"a", "b"}, apart=True) == "distributed"
    with pytest.raises(ConfigError, match="no trainer rank runs on c"):
        choose_transport("tensor", ["a", "c"], {"a", "b"})
