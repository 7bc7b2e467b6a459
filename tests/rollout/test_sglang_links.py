"""Servers of a rollout role in a team of its own: the messages between its team and that of the actor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.run import RunConfig
from megarl.dag.messages import ServerStates, WeightsName
from megarl.rollout.sglang import links
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet, Server
from megarl.rollout.sglang.start import servers_key
from megarl.sync import updater
from megarl.system.errors import ServerError
from megarl.system.metrics import Metrics
from megarl.system.rendezvous import write_token
from tests.disaggregated.test_rollout_team import Letters
from tests.dist import single_process

CONFIG = RunConfig.model_validate({"name": "pump", "rollout": {"engine": "sglang", "sglang": {"servers": 2}}})


@pytest.fixture
def teams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The pump's fleet of two servers that run, its engine, and the fleet of the trainer."""
    write_token(tmp_path)
    mail, key = Letters(), servers_key(CONFIG, tmp_path)
    known = [
        Server(n, ServerApi(f"http://127.0.0.1:{n + 1}", key, f"server {n}"), state="catching_up") for n in range(2)
    ]
    pump = Fleet(known, CONFIG.rollout.sglang)
    WeightsName("1f").post(mail)
    host = SimpleNamespace(config=CONFIG, run_dir=tmp_path, layout=single_process(), mail=mail, tokenizer=None)
    host.team_of, host.metrics = lambda role: role.value, Metrics()
    monkeypatch.setattr(links, "start_servers", lambda *args: pump)
    pumped = links.PumpedServers(host)
    mail.posted.pop(WeightsName.name_of())
    sync = SimpleNamespace(run="1f", transport_name="none", push=lambda version: updater.SyncReport(version, "none"))
    monkeypatch.setattr(links, "send_weights_to", lambda *args: sync)
    filled = links.FilledServers(host)
    assert WeightsName.read(mail).run == "1f"
    return SimpleNamespace(
        mail=mail, pump=pump, pumped=pumped, engine=pumped.engine, trainer=filled.fleet, filled=filled, sync=sync
    )


def push(teams: SimpleNamespace, version: int, failed: dict[int, str] | None = None) -> None:
    """The trainer publishes to its fleet; then the pump follows."""

    def fill(version: int) -> updater.SyncReport:
        for server in teams.trainer.servers:
            if server.number in (failed or {}):
                teams.trainer.mark_failed(server, failed[server.number])
            elif server.state in ("catching_up", "current"):
                teams.trainer.acknowledge(server, version)
        return updater.SyncReport(version, "none")

    teams.pump.refresh()
    ServerStates(version, teams.pump.reports()).post(teams.mail)
    teams.sync.push = fill
    teams.filled.publish(version)
    reports = teams.mail.posted.pop(ServerStates.name_of(version))
    teams.pumped.publish(version)
    assert teams.mail.posted[ServerStates.name_of(version)] == reports


def test_the_trainer_knows_the_servers_as_the_pump_does(teams):
    for mine, theirs in zip(teams.trainer.servers, teams.pump.servers, strict=True):
        assert (mine.api.url, mine.api.api_key, mine.state) == (theirs.api.url, theirs.api.api_key, "catching_up")


def test_servers_that_took_a_version_are_asked(teams):
    for version in (0, 1):
        push(teams, version)
        assert list(teams.engine.servers()) == [0, 1]
        assert teams.engine.weight_version == version


def test_a_server_that_took_none_is_not_asked(teams):
    push(teams, 0, failed={1: "no memory left"})
    assert list(teams.engine.servers()) == [0]
    assert teams.pump.servers[1].why == "no memory left"


def test_a_server_that_was_restarted_is_filled_from_the_start(teams):
    push(teams, 0)
    restarted = teams.pump.servers[1]
    restarted.state, restarted.version, restarted.restarts = "catching_up", None, 1
    restarted.api = ServerApi("http://127.0.0.1:9", restarted.api.api_key, restarted.api.name)
    ServerStates(1, teams.pump.reports()).post(teams.mail)
    teams.filled.adopt(1)
    assert teams.trainer.servers[0].version == 0
    assert (teams.trainer.servers[1].api.url, teams.trainer.servers[1].version) == ("http://127.0.0.1:9", None)


def test_a_run_whose_servers_all_failed_ends(teams):
    with pytest.raises(ServerError, match="no server is left; this server failed: gone"):
        push(teams, 0, failed={0: "gone", 1: "gone"})


def test_servers_that_are_lost_within_a_step_are_not_waited_for_without_end(teams):
    push(teams, 0)
    for server in teams.pump.servers:
        server.state = "catching_up"
    with pytest.raises(ServerError, match="the actor's team sends none before the next one"):
        teams.engine.recover(0)
