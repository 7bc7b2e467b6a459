"""Which checkpoint is the best, and where the reference of a resumed run is."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from megarl import cli
from megarl.config.load import load_config
from megarl.errors import ConfigError, UserError
from megarl.runtime.checkpoints import Checkpoints, check_best_metric
from megarl.runtime.reference import kept_reference, put_aside, unchanged_model
from tests.runtime.harness import RECIPE


def test_a_misspelt_best_metric_names_those_that_exist():
    numbers = {"val/acc": 0.5, "val/prompts": 8.0}
    check_best_metric(None, numbers)
    check_best_metric("val/acc", numbers)
    with pytest.raises(ConfigError, match=r"trainer.best_metric(?s:.*)val/acc, val/prompts(?s:.*)mean val/acc"):
        check_best_metric("val/ac", numbers)


def test_the_reference_is_beside_the_checkpoints(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"kept no reference model(?s:.*)set reference.path"):
        kept_reference(checkpoint)
    (tmp_path / "run" / "reference").mkdir()
    (tmp_path / "run" / "reference" / "config.json").write_text("{}")
    assert kept_reference(checkpoint) == tmp_path / "run" / "reference"


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ([], True),
        (["sft.steps=3"], False),
        (["model.hf_config={sliding_window: 8}"], False),
        (["model.path=null"], False),
        (["model.path=org/name"], True),
    ],
)
def test_a_model_that_is_on_disk_already_is_not_written_again_as_the_reference(tmp_path, settings, same):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    base = [f"model.path={tmp_path}", "model.hf_config=null", "sft.steps=0"]
    config = load_config(tmp_path / "recipe.yaml", [*base, *settings])
    path = config.model.path if config.model.path == "org/name" else str(tmp_path.resolve())
    assert unchanged_model(config) == (path if same else None)


def test_a_run_that_starts_anew_leaves_the_reference_with_its_old_checkpoints(tmp_path):
    def model(folder):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    old = [tmp_path / f"checkpoints.old-{k}" for k in (1, 2, 3)]
    for folder in old:
        folder.mkdir()
    model(tmp_path / "reference")
    put_aside(tmp_path, old[1])  # the first time the run only went back to an earlier step
    newest = model(tmp_path / "reference")
    assert [kept_reference(folder / "step_1") for folder in old] == [old[1] / "reference"] * 2 + [newest]
    assert kept_reference(tmp_path / "checkpoints" / "step_1") == newest


@pytest.fixture
def run_dir(tmp_path):
    """A run folder with three checkpoints that hold no model."""
    from megarl.training import checkpoint
    from megarl.training.shards import Snapshot
    from tests.dist import single_process

    single_process()
    layout = SimpleNamespace(describe=lambda: {"world_size": 1})
    engines = {"actor": SimpleNamespace(layout=layout, step=0, hf_config=SimpleNamespace(vocab_size=9))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "snapshot", lambda engines, label: Snapshot([], label))
        for step in (1, 2, 3):
            checkpoint.save(tmp_path / "checkpoints", step, engines, {}, keep_last=9)
    return tmp_path


def find(run_dir, resume="auto"):
    config = SimpleNamespace(trainer=SimpleNamespace(resume=resume), model_dump=lambda mode: {})
    checkpoints = Checkpoints(SimpleNamespace(config=config, run_dir=run_dir, trained={}))
    return checkpoints.find("trainer.steps", 9), checkpoints.source


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_intact_and_says_so(run_dir, capsys):
    root = run_dir / "checkpoints"
    (root / "step_3" / "meta.json").unlink()
    (root / "step_2" / "state.json").write_text("{]")
    assert find(run_dir) == (1, root / "step_1")
    output = capsys.readouterr().out
    assert f"WARNING: {root / 'step_3'} is not used, it is damaged or incomplete: there is no meta.json" in output
    assert f"WARNING: {root / 'step_2'} is not used, it is damaged or incomplete: state.json holds other" in output
    assert sorted(path.name for path in (run_dir / "checkpoints.old-1").iterdir()) == ["step_2", "step_3"]


def test_a_run_without_an_intact_checkpoint_says_what_can_be_done(run_dir):
    for step in (1, 2, 3):
        (run_dir / "checkpoints" / f"step_{step}" / "state.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint of this run is intact(?s:.*)trainer.resume=never") as caught:
        find(run_dir)
    assert "step_3: state.json is missing" in caught.value.found
    assert find(run_dir, "never") == (None, None)


def test_a_checkpoint_that_was_asked_for_is_not_replaced_by_another(run_dir):
    folder = run_dir / "checkpoints" / "step_3"
    (folder / "state.json").unlink()
    with pytest.raises(UserError, match=r"state.json is missing(?s:.*)trainer.resume=.*step_2 continues"):
        find(run_dir, str(folder))


@pytest.mark.parametrize(
    ("code", "saved", "told"),
    [(0, True, False), (1, False, True), (2, False, False), (2, True, True), (137, True, True)],
)
def test_a_run_that_fails_late_says_how_to_go_on_whoever_is_to_blame(monkeypatch, tmp_path, capsys, code, saved, told):
    """A reward function may raise at step 1000; a recipe that is refused has nothing to go on with."""
    from tests.config.conftest import RECIPE

    (tmp_path / "r.yaml").write_text(RECIPE)
    run_dir = tmp_path / "run"

    def run_workers(*_: object) -> int:
        if saved:
            (run_dir / "checkpoints" / "step_3").mkdir(parents=True)
            (run_dir / "checkpoints" / "step_3" / "meta.json").write_text("{}")
        return code

    monkeypatch.setattr("megarl.launchers.common.run_workers", run_workers)
    assert cli.main(["train", str(tmp_path / "r.yaml"), "--run-dir", str(run_dir)]) == code
    assert ("to go on:" in capsys.readouterr().err) is told


def test_steps_run_while_a_checkpoint_is_written_and_the_last_one_waits(monkeypatch, tmp_path):
    from megarl.training import checkpoint

    calls = []

    class Saving:
        def __init__(self, root, step, *args, **kwargs):
            self.step = step
            calls.append(f"begin {step}")

        def poll(self):
            calls.append(f"poll {self.step}")
            return self.step == 1

        def wait(self):
            calls.append(f"wait {self.step}")

    monkeypatch.setattr(checkpoint, "begin", Saving)
    part = SimpleNamespace(state_dict=dict)
    trainer = SimpleNamespace(save_every=2, best_metric=None, keep_last=2)
    c = SimpleNamespace(config=SimpleNamespace(trainer=trainer, model_dump=lambda mode: {}), run_dir=tmp_path)
    c.loader, c.kl_controller, c.surplus, c.trained = part, part, None, {}
    checkpoints = Checkpoints(c)
    for step in range(1, 6):
        checkpoints.after_step(step, {}, None, last=step == 5)
    assert calls == ["begin 2", "poll 2", "poll 2", "wait 2", "begin 4", "poll 4", "wait 4", "begin 5", "wait 5"]


@pytest.mark.parametrize(
    ("resume", "saved", "advice"),
    [
        ("auto", True, "from the checkpoint of step 3"),
        ("auto", False, "from the beginning"),
        ("never", False, "trainer.resume=auto"),
        ("/other/step_5", True, "trainer.resume=auto"),
        ("/other/step_5", False, "again from /other/step_5"),
    ],
)
def test_the_command_to_go_on_names_where_it_begins(tmp_path, resume, saved, advice):
    if saved:
        (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step_3" / "meta.json").write_text("{}")
    arguments = argparse.Namespace(command="train", recipe="r.yaml", overrides=[], launcher="local")
    text = cli._command_to_go_on(arguments, tmp_path, resume)
    assert advice in text
    assert ("trainer.resume=auto" in text) == (resume == "never" or (saved and resume != "auto"))
