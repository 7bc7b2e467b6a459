"""Where ranks meet: one address, a port that is free, and ranks of this run only."""

from __future__ import annotations

import datetime
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from megarl.system import rendezvous
from megarl.system.errors import ConfigError, WorkerError
from megarl.system.rendezvous import forget_token, listen, meet, ranks_text, read_token, write_token


def meet_all(prefixes: list[str], world: int, timeout_s: float = 20.0) -> list[str]:
    """The results of ranks 0, 1, ... that use these prefixes, in one store of a run of `world` ranks."""
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    limit = datetime.timedelta(seconds=20)
    master = dist.TCPStore(
        "127.0.0.1", port, world, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    stores = [master] + [dist.TCPStore("127.0.0.1", port, world, False, limit) for _ in prefixes[1:]]

    def one(rank: int) -> str:
        try:
            meet(dist.PrefixStore(prefixes[rank], stores[rank]), rank, world, timeout_s)
        except WorkerError as error:
            return str(error)
        return "joined"

    with ThreadPoolExecutor(len(prefixes)) as pool:
        return list(pool.map(one, range(len(prefixes))))


def test_ranks_of_the_run_join() -> None:
    assert meet_all(["run"] * 3, 3) == ["joined"] * 3


def test_a_rank_of_another_run_is_not_counted() -> None:
    results = meet_all(["run", "other", "run"], 3, timeout_s=2.0)
    assert "timed out waiting for rank 1 to join" in results[0]
    assert all("timed out waiting for the other ranks" in result for result in results[1:])


def test_ranks_that_never_come_are_named_at_the_deadline() -> None:
    results = meet_all(["run", "run"], 4, timeout_s=2.0)
    assert "timed out waiting for ranks 2, 3 to join within 2 s (cluster.timeout_s)" in results[0]
    assert "timed out waiting for the other ranks" in results[1]


def test_the_token_is_for_the_owners_eyes_and_new_for_every_attempt(tmp_path: Path) -> None:
    assert read_token(tmp_path) is None
    write_token(tmp_path)
    first = read_token(tmp_path)
    assert first is not None
    assert len(first) == 64
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    write_token(tmp_path)
    assert read_token(tmp_path) != first
    forget_token(tmp_path)
    assert read_token(tmp_path) is None


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"MASTER_PORT: another process listens on this port\n.*127.0.0.1:{port}"):
            listen("127.0.0.1", port)


def test_a_name_that_is_loopback_here_is_listened_on_for_other_machines_with_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo
    addresses = {"node0": "127.0.1.1"}  # as Debian's /etc/hosts has it
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: look_up(addresses.get(host, host), *a, **k))
    with listen("node0", one_machine=False) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")
    assert "where other machines cannot reach it" in caplog.text


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_an_address_that_says_itself_that_it_is_loopback_is_never_opened_further(host: str) -> None:
    with listen(host, one_machine=False) as listener:
        assert listener.getsockname()[0] in (host, "127.0.0.1", "::1")


def test_loopback_is_told_by_the_word() -> None:
    assert all(map(rendezvous.is_loopback, ("127.0.0.1", "127.0.1.1", "::1", "localhost")))
    assert not any(map(rendezvous.is_loopback, ("10.0.0.1", "fd00::1", "node0", "127.example.org")))


def test_an_address_of_the_private_network_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "is_loopback", lambda address: False)  # 127.0.0.2 in the part of a private one
    with listen("127.0.0.2", one_machine=False) as listener:
        assert listener.getsockname()[0] == "127.0.0.2"


def test_gloo_listens_where_the_first_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = SimpleNamespace(address="10.0.0.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth1": [entry]})
    monkeypatch.setattr(rendezvous, "address_towards", lambda host: "10.0.0.7")
    assert rendezvous.gloo_interface("node0") == "eth1"
    monkeypatch.setattr(rendezvous, "address_towards", lambda host: "127.0.0.1")
    assert rendezvous.gloo_interface("node0") is None


def test_many_ranks_are_not_all_listed() -> None:
    assert ranks_text([1]) == "rank 1"
    assert ranks_text(range(18)).endswith("14, 15 and 2 more")
