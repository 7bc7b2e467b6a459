"""`delta` when somebody dies: a relay takes its servers along, a server nobody else, and what comes back is whole."""

import os
import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.rollout.sglang.api import ServerApi
from tests.dist import fresh_parallel, run_distributed, world
from tests.models.tiny import build_tiny, save_tiny
from tests.sync.receivers import fleet_of, receivers, weight_sync
from tests.sync.test_updater import SETTINGS, held_by, state_of

pytestmark = pytest.mark.procs
#: Every element changes, or every fiftieth.
STEPS = pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.campaign("kills")), 50])
BUCKETS = 4  # of the model below, with the sizes below, on one sender
VOCABULARY = 20_000
DEADLINE_S = 8.0  # for those who hang; the others have to be done by then on a slow machine, too


def sync_of(chunks, fleet, run_dir: str, deadline_s: float = 60.0):
    """A trainer's end of `delta`; what hangs is given up after `deadline_s`."""
    from megarl.config.sync import SyncConfig

    config = SyncConfig(**(SETTINGS | {"transport": "delta", "timeout_s": 60.0}))
    sync = weight_sync(chunks, fleet, config, run_dir)
    sync.transport.deadline_s = deadline_s  # not that of the relay's start, which imports torch
    return sync


def change(chunks, step: int = 1) -> None:
    """Other values in one of `step` elements of every parameter."""
    with torch.no_grad():
        for chunk in chunks:
            for param in chunk.parameters():
                param.view(-1)[::step] += 0.5


def strike_at(transport, op: str, how: int) -> None:
    """Send the signal `how` to the relay when it is to be told `op` about the second bucket."""
    call, blows = transport._call, iter([how])

    def struck(target, number: int, header: dict, *bodies):
        if (number, header["op"]) == (1, op) and next(blows, None) is not None:
            os.kill(transport._process.pid, how)
            if how == signal.SIGKILL:
                transport._process.wait()
        return call(target, number, header, *bodies)

    transport._call = struck


def lose_the_relay(folder: str, run_dir: str, urls: list[str], op: str, how: int) -> list:
    """Version 1; the relay is struck in the middle of version 2."""
    from megarl.sync.transports import delta

    fresh_parallel()
    chunks, fleet = build_tiny(folder), fleet_of(urls)
    sync = sync_of(chunks, fleet, run_dir, DEADLINE_S)
    sync.push(1)
    change(chunks, 50)
    strike_at(sync.transport, op, how)
    connected, connect = [], delta.MessageClient
    delta.MessageClient = lambda *args: connected.append(args) or connect(*args)
    report = sync.push(2)
    sync.close()
    return [report.updated, report.failed, [server.state for server in fleet.servers], fleet.told, len(connected)]


@pytest.mark.parametrize(
    ("op", "how"),
    [
        ("delta", signal.SIGKILL),
        ("patch", signal.SIGSTOP),
        pytest.param("delta", signal.SIGSTOP, marks=pytest.mark.campaign("durability")),
        pytest.param("patch", signal.SIGKILL, marks=pytest.mark.campaign("durability")),
    ],
)
def test_a_relay_that_is_lost_during_an_update_fails_its_servers(tmp_path, op, how):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=VOCABULARY)
    with receivers(tmp_path / "r", 2) as urls:
        run = (str(tmp_path / "model"), str(tmp_path), urls, op, int(how))
        ((updated, failed, states, told, connected),) = run_distributed(lose_the_relay, 1, 120, *run)
        assert (updated, states) == ([], ["failed", "failed"])
        for number, url in enumerate(urls):
            assert failed[str(number)].startswith(f"server {number} at {url}: relay on {socket.gethostname()}: ")
            state = state_of(url)
            assert (state["version"], state["paused"]) == ("1", True)  # it answers nothing with half of two versions
        assert [version for _, version in told[:2]] == [1, 1]
        assert 2 not in [version for _, version in told]
        assert connected == 0  # the second server does not wait for another deadline


def push_without_the_relay(folder: str, run_dir: str, urls: list[str], during: bool) -> None:
    """Both ranks send. The relay ends before or during version 2; the servers are back when it is tried again."""
    import torch.distributed as dist

    fresh_parallel(pp=2)
    chunks, fleet = build_tiny(folder, pp=2), fleet_of(urls)
    sync = sync_of(chunks, fleet, run_dir)
    assert sync.push(1).updated == [0]
    change(chunks, 50)
    if during:
        if dist.get_rank() == 0:
            strike_at(sync.transport, "delta", signal.SIGKILL)
        report = sync.push(2)
        assert (report.updated, list(report.failed)) == ([], [0])
        fleet.servers[0].state = "catching_up"
        sync.catch_up()
    else:
        if dist.get_rank() == 0:
            sync.transport._process.kill()
            sync.transport._process.wait()
        dist.barrier()
        sync.push(2)


@pytest.mark.parametrize("during", [False, True])
def test_an_update_without_its_relay_ends_the_run(tmp_path, during):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=VOCABULARY)
    error = r"rank [01] failed:\n(.|\n)*WorkerError: the weight relay of .* ended \(signal SIGKILL"
    with receivers(tmp_path / "r", 1) as urls:
        with pytest.raises(AssertionError, match=error):
            run_distributed(push_without_the_relay, 2, 120, str(tmp_path / "model"), str(tmp_path), urls, during)
        assert state_of(urls[0])["version"] == "1"


def lose_servers(folder: str, run_dir: str, urls: list[str], back: list[str], step: int) -> dict:
    """Version 1; servers fail in the middle of version 2, stand at the addresses `back` then, and get version 3."""
    from megarl.models.weights.export import iter_hf_tensors

    fresh_parallel()
    chunks, fleet = build_tiny(folder), fleet_of(urls)
    sync = sync_of(chunks, fleet, run_dir, DEADLINE_S)
    assert len(sync.sender.source.buckets) == BUCKETS

    def write(version: int) -> None:
        # Exporting shares nothing with the plan of a synchronisation.
        tensors = {name: tensor.bfloat16().contiguous() for name, tensor in iter_hf_tensors(chunks, world())}
        save_file(tensors, Path(run_dir) / f"expected{version}")

    def check(version: int) -> list[int]:
        """Servers that were acknowledged; each holds what was exported, bit for bit."""
        expected = load_file(Path(run_dir) / f"expected{version}")
        for server in fleet.current(version):
            held = held_by(server.api.url, Path(run_dir) / "dump")
            assert held.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), (server.api.name, name)
        return [server.number for server in fleet.current(version)]

    write(1)
    sync.push(1)
    found = {"first": check(1)}
    change(chunks, step)
    write(2)
    report = sync.push(2)
    found |= {"updated": report.updated, "failed": report.failed, "second": check(2)}
    assert len(report.failed) == len(back), report.failed
    for number, url in zip(report.failed, back, strict=True):
        server = fleet.servers[number]
        server.api, server.state = ServerApi(url, None, server.api.name), "catching_up"
    found |= {"caught up": sync.catch_up().updated, "then": check(2)}
    change(chunks, 50)
    write(3)
    found |= {"left out": sync.push(3).failed, "third": check(3)}
    sync.close()
    return found


@STEPS
def test_servers_that_fail_during_an_update_do_not_touch_the_other_one(tmp_path, step):
    save_tiny(tmp_path / "model", "qwen3", vocab_size=VOCABULARY)
    at = BUCKETS + 2  # the second bucket of the second version
    faults = {0: f"die:{at}", 1: f"hang:{at}", 2: f"refuse:{at}"}
    # The refusal of changed elements is no failure: such a server gets whole tensors from then on.
    lost = [0, 1, 2] if step == 1 else [0, 1]
    with receivers(tmp_path / "r", 4, faults) as urls, receivers(tmp_path / "back", len(lost)) as back:
        run = (str(tmp_path / "model"), str(tmp_path), urls, back, step)
        (found,) = run_distributed(lose_servers, 1, 180, *run)
        others = [number for number in range(4) if number not in lost]
        failed = found.pop("failed")
        assert [int(number) for number in failed] == lost
        assert all(why.startswith(f"server {n} at {urls[int(n)]}: ") for n, why in failed.items())
        assert "within 8 s" in failed["1"]
        assert found == {
            "first": [0, 1, 2, 3],
            "updated": others,
            "second": others,
            "caught up": lost,
            "then": [0, 1, 2, 3],
            "left out": {},
            "third": [0, 1, 2, 3],
        }


@STEPS
def test_a_relay_that_missed_the_end_of_an_update_is_sent_it(tmp_path, step):
    """Its only server dies: the sender compares with version 2 from then on, and the relay has half of it."""
    save_tiny(tmp_path / "model", "qwen3", vocab_size=VOCABULARY)
    with receivers(tmp_path / "r", 1, {0: f"die:{BUCKETS + 2}"}) as urls, receivers(tmp_path / "back", 1) as back:
        run = (str(tmp_path / "model"), str(tmp_path), urls, back, step)
        (found,) = run_distributed(lose_servers, 1, 120, *run)
        assert list(found.pop("failed")) == ["0"]
        assert found.pop("left out") == {}
        assert found == {"first": [0], "updated": [], "second": [], "caught up": [0], "then": [0], "third": [0]}
