"""Embedded engines in a team of their own: the weights that the actor's team sends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config.run import RunConfig
from megarl.rollout.embedded.links import ReceivedWeights, SentWeights
from megarl.system.errors import WorkerError
from megarl.system.metrics import Metrics
from megarl.system.rendezvous import write_token
from tests.disaggregated.test_rollout_team import Letters
from tests.dist import single_process
from tests.rollout import cases


@pytest.fixture
def teams(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Both teams in this process: the trainer's chunks and their link, an engine and its link."""
    write_token(tmp_path)
    config = RunConfig.model_validate({"name": "two teams", "sync": {"timeout_s": 20.0, "bucket_mb": 5}})
    layout, mail = single_process(), Letters()
    trained, held = cases.build(seed=3), cases.build(seed=4)
    engine = cases.engine(held)
    host = SimpleNamespace(
        config=config,
        run_dir=tmp_path,
        layout=layout,
        mail=mail,
        team_of=lambda role: role.value,
        policy=trained,
        hf_config=trained[0].hf_config,
        metrics=Metrics(),
    )
    received, sent = ReceivedWeights(host, engine), SentWeights(host)
    yield SimpleNamespace(mail=mail, trained=trained, engine=engine, received=received, sent=sent)
    sent.close()
    received.close()


def draw(engine: Any) -> list[Any]:
    return engine.generate(cases.make_requests(3, 2), cases.sampled(max_new_tokens=6), [2])


def test_the_engine_draws_what_the_trainers_own_would(teams):
    own = cases.engine(teams.trained)
    for version in (0, 1):
        with torch.no_grad():
            for parameter in teams.trained[0].parameters():
                parameter.mul_(1.125)
        teams.sent.publish(version)
        teams.received.publish(version)
        own.weight_version = version
        with teams.received.held():
            assert draw(teams.engine) == draw(own)


def test_no_other_version_is_drawn_with(teams):
    for version in (1, 2):
        teams.sent.publish(version)
    with pytest.raises(WorkerError, match=r"did not receive weights of version 1 .* holds weights 2@"):
        teams.received.publish(1)


def test_an_engine_that_takes_no_weights_ends_the_run(teams, monkeypatch):
    def broken(name: str, tensor: torch.Tensor) -> None:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(teams.received._inbox._writer, "write", broken)
    with pytest.raises(WorkerError, match=r"did not receive version 1 .*\nengine 0 at tcp.*no memory left"):
        teams.sent.publish(1)
    assert "weights/1" not in teams.mail.posted


def test_a_run_without_a_token_has_no_key(tmp_path):
    host = SimpleNamespace(config=RunConfig(name="two teams"), run_dir=tmp_path, layout=single_process())
    with pytest.raises(WorkerError, match="the run has no token in"):
        ReceivedWeights(host, cases.engine(cases.build()))
