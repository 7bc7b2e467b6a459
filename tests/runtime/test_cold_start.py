"""A cold start that is interrupted goes on from its checkpoint, and the run is the undisturbed one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.artifacts.run_folder import COLD_START, LAUNCH_FOLDER, SAVE_REQUEST
from megarl.artifacts.trained import steps_in
from megarl.config.run import RunConfig
from megarl.runtime.cold_start import ColdStartCheckpoints
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError
from megarl.training import multi_team_commit
from megarl.training.host_memory import HostArena
from megarl.training.shards import Snapshot
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]


class Interrupted(Exception):
    """The end of a run that has saved."""


def interrupted_work(*arguments: object) -> None:
    """The run, as one of its ranks, which is asked for a checkpoint in step 2 of the cold start and ended after it."""
    run_dir, save = Path(str(arguments[1])), ColdStartCheckpoints.after_step

    def after_step(self: ColdStartCheckpoints, step: int, *rest: object, **more: object) -> None:
        if step == 2:
            (run_dir / LAUNCH_FOLDER).mkdir(exist_ok=True)
            (run_dir / LAUNCH_FOLDER / SAVE_REQUEST).touch()
        save(self, step, *rest, **more)
        if step == 2:
            raise Interrupted

    ColdStartCheckpoints.after_step = after_step
    harness.work_of_rank(*arguments)


def lines(run_dir: Path) -> list[dict[str, float]]:
    """Everything but times and memory of both stages."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("timing_s/", "perf/")) and k != "time"} for row in rows]


def test_a_cold_start_that_is_interrupted_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    recipe = harness.write_recipe(tmp_path)
    short = ("trainer.steps=1", "sft.eval_every=2", "trainer.export_hf=false", "cluster.nproc=1")
    harness.train(recipe, tmp_path / "whole", *short)
    with pytest.raises(Exception, match="Interrupted"):
        harness.train(recipe, tmp_path / "cut", *short, work=interrupted_work)
    assert steps_in(tmp_path / "cut" / COLD_START) == [2]
    assert not (tmp_path / "cut" / LAUNCH_FOLDER / SAVE_REQUEST).exists()
    harness.train(recipe, tmp_path / "cut", *short)
    assert not (tmp_path / "cut" / COLD_START).exists()
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert [(row["stage"], row["step"]) for row in lines(tmp_path / "cut")][:3] == [("sft", 1), ("sft", 2), ("sft", 3)]


def cold_start_of(folder: Path) -> ColdStartCheckpoints:
    """The checkpoints of a cold start whose recipe names files in `folder`; they hold no weights."""
    model, reward = {"path": str(folder / "model")}, {"name": f"{folder / 'reward.py'}:score"}
    world = WorkerGroup.alone()
    layout = SimpleNamespace(describe=lambda: {"world_size": 1}, world=world)
    hf_config = SimpleNamespace(vocab_size=9)
    engine = SimpleNamespace(layout=layout, step=0, hf_config=hf_config, lora=None, chunks=[])
    c: Any = SimpleNamespace(
        config=RunConfig.model_validate({"name": "x", "model": model, "reward": reward, "sft": {"steps": 4}}),
        layout=layout,
        run_dir=folder / "run",
        trained={"actor": engine},
        offload=SimpleNamespace(phase=lambda name: contextlib.nullcontext()),
    )
    examples: Any = SimpleNamespace(state_dict=lambda: {"samples": 9}, check_state=lambda state: None)
    return ColdStartCheckpoints(c, examples)


def test_a_resumed_cold_start_names_files_that_have_changed_and_refuses_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multi_team_commit, "snapshot", lambda engines, label: Snapshot([], label, HostArena()))
    for name in ("model/tokenizer.json", "model/config.json", "reward.py", f"run/{SAVE_REQUEST}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    first = cold_start_of(tmp_path)
    first.find()
    first.after_step(2, {}, None, last=False)
    capsys.readouterr()

    (tmp_path / "reward.py").write_text("changed")
    again = cold_start_of(tmp_path)
    again.find()
    assert again.step == 2
    said = capsys.readouterr().out
    assert f"changed since the checkpoint: reward.name: {tmp_path / 'reward.py'} has other contents\n" in said
    assert "resuming after step 2 of 4 of the cold start" in said

    for name in ("tokenizer.json", "config.json"):
        (tmp_path / "model" / name).write_text('{"changed": 1}')
        with pytest.raises(ConfigError, match="cannot be continued with the new contents") as refused:
            cold_start_of(tmp_path).find()
        assert refused.value.where == "model.path"
        assert str(tmp_path / "model" / name) in str(refused.value)
        (tmp_path / "model" / name).write_text("{}")
