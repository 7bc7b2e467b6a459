"""Somebody dies while a real SGLang server gets weights.

A server: the other goes on, and it comes back with all weights. The trainer: a server that outlives it goes on with the
weights it can read by itself.
"""

from pathlib import Path

import pytest

from megarl.rollout.sglang.api import ServerApi
from tests.dist import fresh_parallel, run_distributed, single_process
from tests.models.tiny import build_tiny, save_tiny
from tests.rollout.forked import forked_servers
from tests.rollout.servers import engine, need_interpreter, start
from tests.sync.receivers import weight_sync
from tests.sync.test_keeper import wait_for_log
from tests.sync.test_sglang import KEY, PARAMETERS, TRANSPORTS, assert_answers, negate_head, serving

pytestmark = [pytest.mark.procs, pytest.mark.servers, pytest.mark.timeout(900)]


def kill_at_second_bucket(fleet, transport, number: int) -> None:
    """When server `number` holds the first bucket of a synchronisation and is to get the second, it is killed."""
    import os
    import signal

    deliver = transport.deliver

    def killing(target, bucket_number, *rest) -> None:
        if (target.number, bucket_number) == (number, 1):
            transport.deliver = deliver
            os.killpg(fleet._owned[number].pid, signal.SIGKILL)
        deliver(target, bucket_number, *rest)

    transport.deliver = killing


def asked(folder, number: int) -> int:
    """Requests for samples that a server has answered since its first start."""
    return (folder / "servers" / f"server_{number}.log").read_text().count("POST /generate")


def kill_and_return(run_dir: Path) -> dict:
    """Version 1 to two servers; server 0 dies during version 2 and is started again."""
    from megarl.config.rollout import SamplingConfig
    from megarl.config.sync import SyncConfig
    from megarl.rollout.engine import Request

    single_process()
    chunks = build_tiny(run_dir / "model")
    requests = [Request([10 + i, 20, 30], [7 * i, 7 * i + 1]) for i in range(4)]
    with forked_servers(), start(run_dir, run_dir / "model", servers=2) as fleet:
        config = SyncConfig(transport="tensor", bucket_mb=5, timeout_s=60.0)
        sync = weight_sync(chunks, fleet, config, run_dir)

        def generate() -> list:
            made = engine(fleet, version=2, run=sync.run)
            made._catch_up = sync.catch_up
            groups = made.generate(requests, SamplingConfig(max_new_tokens=4), [2])
            return [version for group in groups for sample in group for version, _ in sample.versions]

        found = {"first": sync.push(1).verified}
        negate_head(chunks)
        kill_at_second_bucket(fleet, sync.transport, 0)
        report = sync.push(2)
        found |= {"updated": report.updated, "failed": report.failed}
        found["versions"] = generate()
        fleet.wait_started()
        found["state"], before = fleet.servers[0].state, asked(run_dir, 0)
        found["versions"] += generate()
        found["asked too early"] = asked(run_dir, 0) - before
        report = sync.catch_up()
        found |= {"caught up": report.updated, "verified": report.verified}
        found["versions"] += generate()
        found["asked then"] = asked(run_dir, 0) - before
        assert_answers(fleet.servers[0].api, run_dir / "model", 2, negated=True)
        sync.close()
    return found


def test_a_server_killed_during_a_synchronisation_returns_with_all_weights(tmp_path):
    need_interpreter()
    save_tiny(tmp_path / "model", "qwen3", tie_word_embeddings=False, vocab_size=20_000)  # several buckets
    found = kill_and_return(tmp_path)
    failed, then = found.pop("failed"), found.pop("asked then")
    assert list(failed) == [0]
    assert then > 0
    assert found == {
        "first": 2 * PARAMETERS,
        "updated": [1],
        "state": "catching_up",
        "versions": [2] * 24,
        "asked too early": 0,
        "caught up": [0],
        "verified": PARAMETERS,
    }


def push_and_be_killed(folder: str, url: str, run_dir: str, transport: str, die: bool) -> None:
    """Version 1, verified; the trainer is killed after the first bucket of version 2, if at all."""
    import os
    import signal
    import time

    from megarl.config.sglang import SGLangConfig
    from megarl.config.sync import SyncConfig
    from megarl.rollout.sglang.fleet import Fleet, Server
    from megarl.sync.transports import distributed

    fresh_parallel()
    chunks = build_tiny(folder)
    negate_head(chunks)
    fleet = Fleet([Server(0, ServerApi(url, KEY, "server 0"), "catching_up")], SGLangConfig(urls=[url]))
    config = SyncConfig(transport=transport, verify="every", bucket_mb=5, timeout_s=60.0)
    sync = weight_sync(chunks, fleet, config, run_dir)
    report = sync.push(1)
    assert (report.updated, report.verified) == ([0], PARAMETERS), report
    if die:
        step = {"distributed": "broadcast_within", "disk": "commit"}.get(transport, "deliver")
        owner = distributed if transport == "distributed" else sync.transport
        action, calls = getattr(owner, step), iter(range(100))

        def dying(*args) -> None:
            if next(calls) == (0 if step == "commit" else 1):
                time.sleep(1.0)  # the server of `distributed` has been told of the broadcast then, and waits in it
                os.kill(os.getpid(), signal.SIGKILL)
            action(*args)

        setattr(owner, step, dying)
        for parameter in chunks[0].parameters():
            parameter.data.mul_(1.5)
        sync.push(2)
    sync.close()


@pytest.mark.parametrize(
    "transports", [("distributed", "disk"), pytest.param(TRANSPORTS, marks=pytest.mark.campaign("servers"))], ids=len
)
def test_a_server_whose_trainer_is_killed_serves_one_version_again(tmp_path, transports):
    """Each trainer but the first finds the server as the keeper of the one before it left it."""
    need_interpreter()
    with serving(tmp_path, "qwen3", tie_word_embeddings=False, vocab_size=20_000) as url:
        api, model = ServerApi(url, KEY, "server 0"), tmp_path / "model"
        for transport in transports:
            run_dir = tmp_path / transport
            with pytest.raises(AssertionError, match="-9"):
                run_distributed(push_and_be_killed, 1, 240, str(model), url, str(run_dir), transport, True)
            wait_for_log(run_dir, "again, under version")
            if transport == "disk":  # the last version that it read as a whole
                assert_answers(api, model, 1, negated=True)
            else:
                assert_answers(api, model, "default", negated=False)
        run_distributed(push_and_be_killed, 1, 240, str(model), url, str(tmp_path / "last"), "tensor", False)
        assert_answers(api, model, 1, negated=True)
