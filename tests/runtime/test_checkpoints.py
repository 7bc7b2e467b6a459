"""Which checkpoint is the best, and where the reference of a resumed run is."""

from __future__ import annotations

import argparse
import json
import math
from types import SimpleNamespace

import pytest

from megarl import cli
from megarl.artifacts.trained import Exported, exported, write_exported
from megarl.artifacts.trained import best_step as noted_best
from megarl.commands import job
from megarl.config.load import load_config
from megarl.config.run import RunConfig, TrainerConfig
from megarl.config.task import Task
from megarl.config.training import SFTConfig
from megarl.dag.messages import NoMail
from megarl.dag.placement import together
from megarl.dag.stage import Role
from megarl.disaggregated import loop
from megarl.runtime import export, frozen_models, start
from megarl.runtime.checkpoint_part import finishing_save
from megarl.runtime.checkpoints import Checkpoints, SaveBy, check_best_metric
from megarl.runtime.frozen_models import ReferencePlace, kept_reference, set_aside_reference, unchanged_model
from megarl.runtime.rank_state import TeamContext
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError, DataError, UserError, WorkerError
from megarl.system.offload_schedule import PARTS, OffloadSchedule
from megarl.training.shards import FormatError
from tests.runtime.harness import RECIPE

ONE_TEAM = SimpleNamespace(buffer=None)


def test_a_misspelt_best_metric_names_those_that_exist():
    numbers = {"val/acc": 0.5, "val/prompts": 8.0}
    check_best_metric(None, numbers)
    check_best_metric("val/acc", numbers)
    with pytest.raises(ConfigError, match=r"trainer.best_metric(?s:.*)val/acc, val/prompts(?s:.*)mean val/acc"):
        check_best_metric("val/ac", numbers)


def test_the_reference_is_beside_the_checkpoints(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no reference model(?s:.*)set reference.path"):
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


def test_a_run_that_starts_again_leaves_the_reference_with_its_old_checkpoints(tmp_path):
    def model(folder):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    old = [tmp_path / f"checkpoints.old-{k}" for k in (1, 2, 3)]
    for folder in old:
        folder.mkdir()
    model(tmp_path / "reference")
    set_aside_reference(tmp_path, old[1])  # the first time the run only went back to an earlier step
    newest = model(tmp_path / "reference")
    assert [kept_reference(folder / "step_1") for folder in old] == [old[1] / "reference"] * 2 + [newest]
    assert kept_reference(tmp_path / "checkpoints" / "step_1") == newest


@pytest.fixture
def run_dir(tmp_path):
    """A run folder with three checkpoints that hold no model."""
    from megarl.training import checkpoint, multi_team_commit
    from megarl.training.host_memory import HostArena
    from megarl.training.shards import Snapshot
    from tests.dist import world

    layout = SimpleNamespace(describe=lambda: {"world_size": 1}, world=world())
    engines = {"actor": SimpleNamespace(layout=layout, step=0, hf_config=SimpleNamespace(vocab_size=9))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_team_commit, "snapshot", lambda engines, label: Snapshot([], label, HostArena()))
        for step in (1, 2, 3):
            checkpoint.save(tmp_path / "checkpoints", step, engines, {"loader": {}}, keep_last=9)
    (tmp_path / "metrics.jsonl").touch()
    return tmp_path


def of_run(run_dir, resume="auto", loader=None, roles=()):
    config = SimpleNamespace(trainer=TrainerConfig(resume=resume), task=Task(), model_dump=lambda mode: {})
    layout = SimpleNamespace(rank=0, world=WorkerGroup.alone())
    loader = loader or SimpleNamespace(check_state=lambda state: None)
    fields = {"run_dir": run_dir, "trained": {}, "loading": loader, "layout": layout, "team": ONE_TEAM}
    return Checkpoints(SimpleNamespace(config=config, hf_config=None, oversampling=None, **fields), roles)


def find(run_dir, resume="auto", steps=9, loader=None):
    checkpoints = of_run(run_dir, resume, loader)
    return checkpoints.find("trainer.steps", steps), checkpoints.source


def files_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_goes_on_from_the_newest_checkpoint_that_is_intact_and_says_so(run_dir, capsys):
    root = run_dir / "checkpoints"
    (root / "step_3" / "meta.json").unlink()
    (root / "step_2" / "state.json").write_text('{"loader": {]}')
    checkpoints = of_run(run_dir)
    assert (checkpoints.find("trainer.steps", 9), checkpoints.source) == (1, root / "step_1")
    checkpoints.begin()
    output = capsys.readouterr().out
    assert f"WARNING: {root / 'step_3'} is not used, it is damaged or incomplete: meta.json is missing" in output
    assert f"WARNING: {root / 'step_2'} is not used, it is damaged or incomplete: state.json was changed" in output
    assert sorted(path.name for path in (run_dir / "checkpoints.old-1").iterdir()) == ["step_2", "step_3"]


@pytest.mark.parametrize(("resume", "steps", "left"), [("auto", 3, 1), ("auto", 4, 0), ("never", 3, 0)])
def test_a_run_that_has_steps_left_withdraws_what_it_has_exported(run_dir, resume, steps, left):
    (run_dir / "hf").mkdir()
    (run_dir / "hf" / "config.json").touch()
    write_exported(run_dir, [Exported("hf", 3, "last")])
    checkpoints = of_run(run_dir, resume)
    checkpoints.find("trainer.steps", steps)
    assert len(exported(run_dir)) == 1  # the start may still be refused
    checkpoints.begin()
    assert len(exported(run_dir)) == left


@pytest.mark.parametrize("sft_steps", [0, 3])
def test_a_start_that_is_refused_leaves_the_run_folder_as_it_was(run_dir, monkeypatch, sft_steps):
    def refuse(*_):
        raise ConfigError("no such thing", where="its.key")

    def keep_reference(c, **_):
        (run_dir / "reference.next").mkdir()
        (run_dir / "reference.next" / "config.json").write_text("of this start")
        return ReferencePlace(str(run_dir / "reference.next"), "")

    (run_dir / "hf").mkdir()
    (run_dir / "hf" / "config.json").touch()
    write_exported(run_dir, [Exported("hf", 3, "last")])
    (run_dir / "graph.svg").write_text("of the run so far")
    (run_dir / "reference").mkdir()
    (run_dir / "reference" / "config.json").write_text("of the run so far")
    config = RunConfig(name="run", trainer=TrainerConfig(steps=9, resume="never"), sft=SFTConfig(steps=sft_steps))
    layout = SimpleNamespace(rank=0, world=WorkerGroup.alone())
    placement = together(config, (Role.ACTOR, Role.CRITIC, Role.REFERENCE, Role.ROLLOUT))
    actor = SimpleNamespace(reset_optimizer=lambda *_: None)
    c = SimpleNamespace(config=config, run_dir=run_dir, trained={}, loading=None, layout=layout, actor=actor)
    c.offload, c.held, c.loader = OffloadSchedule(), {}, None
    c.context, c.team, c.hf_config = SimpleNamespace(), TeamContext(placement.teams[0], placement), None
    c.close, c.mail = lambda: None, NoMail()
    monkeypatch.setattr(start, "build_rank_state", lambda *_: c)
    monkeypatch.setattr(loop, "place", lambda *_: placement)
    monkeypatch.setattr(frozen_models, "keep_reference", keep_reference)
    monkeypatch.setattr(start, "make_reference", lambda *_: None)
    monkeypatch.setattr(start, "make_critic", refuse)  # after a cold start this would be a run that has begun
    monkeypatch.setattr(start.sft, "load_examples", refuse)
    before = files_in(run_dir)
    with pytest.raises(ConfigError, match="no such thing"):
        loop.train(config, run_dir, SimpleNamespace(roles={Role.REFERENCE, Role.CRITIC}, has_responses=False))
    assert files_in(run_dir) == before
    assert not (run_dir / "reference.next").exists()


def test_a_start_that_is_accepted_sets_aside_what_it_does_not_continue(run_dir, capsys):
    (run_dir / "reference").mkdir()
    (run_dir / "reference" / "config.json").write_text("of the run so far")
    (run_dir / "reference.next").mkdir()
    (run_dir / "reference.next" / "config.json").write_text("of this start")
    checkpoints = of_run(run_dir, "never")
    checkpoints.find("trainer.steps", 9)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step_1", "step_2", "step_3"]
    checkpoints.begin()
    aside = run_dir / "checkpoints.old-1"
    assert sorted(path.name for path in aside.iterdir()) == ["reference", "step_1", "step_2", "step_3"]
    assert (aside / "reference" / "config.json").read_text() == "of the run so far"
    assert (run_dir / "reference" / "config.json").read_text() == "of this start"
    assert f"are now in {aside}" in capsys.readouterr().out


def test_other_data_is_refused_before_anything_in_the_run_folder_changes(run_dir, capsys):
    def refuse(state):
        raise DataError("other data", where="data.train_files")

    (run_dir / "hf").mkdir()
    (run_dir / "hf" / "config.json").touch()
    write_exported(run_dir, [Exported("hf", 3, "last")])
    files = files_in(run_dir)
    with pytest.raises(DataError):
        find(run_dir, steps=2, loader=SimpleNamespace(check_state=refuse))
    assert files_in(run_dir) == files
    assert "this run is finished" not in capsys.readouterr().out


def with_state(run_dir, monkeypatch, state, roles=(), **sections):
    """Checkpoints of a run whose newest one, of step 3, has this `state`."""
    from megarl.training import checkpoint

    state = {"loader": {}, "kl": {}, "surplus_parts": 0, "best": None, **state}
    monkeypatch.setattr(checkpoint, "read_state", lambda _: state)
    monkeypatch.setattr(checkpoint, "load", lambda *_: (3, state))
    loader = SimpleNamespace(check_state=lambda _: None, load_state_dict=lambda _: None)
    checkpoints = of_run(run_dir, loader=loader, roles=roles)
    c = checkpoints._c
    c.config = RunConfig.model_validate({"name": "run", **sections})
    c.team = SimpleNamespace(buffer=None, placement=together(c.config, (Role.ACTOR, Role.ROLLOUT)))
    c.offload, c.context = OffloadSchedule(), SimpleNamespace(surplus=None, scores=None, replay=None, config=c.config)
    c.context.kl_controller = c.context.baselines = SimpleNamespace(load_state_dict=lambda _: None)
    return checkpoints


def test_a_finished_run_is_not_refused_for_samples_that_it_does_not_train_on(run_dir, monkeypatch):
    fields, settings = {"rollout": ["response_ids"]}, {"data.batch_size": 1}
    state = {"generated": {"order": "in_order", "steps": 1, "parts": 1, "fields": fields, "settings": settings}}
    batch_size = RunConfig(name="run").data.batch_size
    assert with_state(run_dir, monkeypatch, state).find("trainer.steps", 3) == 3
    with pytest.raises(ConfigError, match=r"data\.batch_size: .* samples of step 4"):
        with_state(run_dir, monkeypatch, state).find("trainer.steps", 4)
    state["generated"]["settings"]["data.batch_size"] = batch_size
    with pytest.raises(ConfigError, match="placement: the checkpoint holds samples of step 4"):
        with_state(run_dir, monkeypatch, state).find("trainer.steps", 4)


def test_a_run_as_ready_that_has_no_samples_goes_on_with_any_settings(run_dir, monkeypatch, capsys):
    state = {"drawn": {"order": "as_ready", "steps": 0, "parts": 1, "fields": {}, "settings": {"data.batch_size": 1}}}
    (run_dir / "checkpoints" / "step_3" / "flow_0.json").write_text('{"again": []}')
    monkeypatch.setattr("megarl.runtime.files_read.announcements", lambda *_, begun, generated: [f"after {generated}"])
    assert with_state(run_dir, monkeypatch, state).find("trainer.steps", 9) == 3
    assert "changed since the checkpoint: after None\n" in capsys.readouterr().out


def test_prompts_that_a_run_as_ready_left_out_are_not_skipped_in_order(run_dir, monkeypatch):
    state = {"drawn": {"order": "as_ready", "steps": 0, "parts": 2, "fields": {}, "settings": {}}}
    for part, again in enumerate(([4, 9], [11])):
        file = run_dir / "checkpoints" / "step_3" / f"flow_{part}.json"
        file.write_text(json.dumps({"again": again}))
    with pytest.raises(ConfigError, match=r"async\.order: .* 3 prompts to generate again") as error:
        with_state(run_dir, monkeypatch, state, data={"batch_size": 2}).find("trainer.steps", 9)
    assert "train steps 4 to 5 with async.order=as_ready and trainer.steps=5" in error.value.fix
    ready = {"async": {"order": "as_ready", "max_staleness": 1}}
    assert with_state(run_dir, monkeypatch, state, **ready).find("trainer.steps", 9) == 3
    assert with_state(run_dir, monkeypatch, state).find("trainer.steps", 3) == 3, "it trains on nothing"


def test_changes_are_announced_with_the_step_that_is_drawn_already(run_dir, monkeypatch, capsys):
    monkeypatch.setattr("megarl.runtime.checkpoints.refuse_other_sampling", lambda *_: None)
    monkeypatch.setattr("megarl.runtime.files_read.announcements", lambda *_, begun, generated: [f"after {generated}"])
    for name in ("generated", "drawn"):  # the name of older versions
        with_state(run_dir, monkeypatch, {name: {"steps": 1}}).find("trainer.steps", 9)
        assert "changed since the checkpoint: after 4\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("enabled", "node", "order", "steps", "why"),
    [
        (False, True, "in_order", 9, "algorithm.dynamic_sampling.enabled is false"),
        (False, True, "in_order", 3, None),
        (True, True, "in_order", 9, None),
        (True, False, "in_order", 9, "the task graph has no node"),
        (True, True, "as_ready", 9, "async.order=as_ready"),
    ],
)
def test_left_over_samples_are_dropped_without_dynamic_sampling(
    run_dir, monkeypatch, capsys, enabled, node, order, steps, why
):
    monkeypatch.setattr("megarl.runtime.checkpoints.read_surplus", lambda *_: "samples")
    sections = {"algorithm": {"dynamic_sampling": {"enabled": enabled}}, "async": {"order": order, "max_staleness": 1}}
    roles = {Role.ROLLOUT, Role.DYNAMIC_SAMPLING} if node else {Role.ROLLOUT}
    checkpoints = with_state(run_dir, monkeypatch, {"surplus_parts": 1}, roles, **sections)
    checkpoints.find("trainer.steps", steps)
    said = capsys.readouterr().out
    assert ("surplus samples of dynamic sampling are not used" in said) == (why is not None)
    assert (why or "") in said
    checkpoints.load(checkpoints.source)
    used = enabled and node and order == "in_order"
    assert checkpoints._c.context.surplus == ("samples" if used else None)


@pytest.mark.parametrize(("best_step", "best", "kept"), [(2, 0.8, 2), (7, -math.inf, None)])
def test_a_best_value_comes_back_only_with_its_checkpoint(run_dir, monkeypatch, best_step, best, kept):
    from megarl.training import checkpoint

    state = {"loader": {}, "kl": {}, "surplus_parts": 0, "best": 0.8, "best_metric": "val/acc", "best_step": best_step}
    monkeypatch.setattr(checkpoint, "load", lambda *_: (3, state))
    part = SimpleNamespace(load_state_dict=lambda state: None)
    trainer = TrainerConfig()
    config = SimpleNamespace(trainer=trainer, task=Task(), model_dump=lambda mode: {})
    c = SimpleNamespace(
        config=config,
        run_dir=run_dir,
        trained={},
        scores=None,
        loading=part,
        oversampling=None,
        frozen={},
        kl_controller=part,
        baselines=part,
    )
    c.team, c.hf_config = ONE_TEAM, None
    c.offload, c.context, c.replay = OffloadSchedule(), c, None
    c.layout = SimpleNamespace(rank=0, world=WorkerGroup.alone())
    part.check_state = lambda state: None
    checkpoints = Checkpoints(c)
    checkpoints.find("trainer.steps", 9)
    checkpoints.load(checkpoints.source)
    assert checkpoints.best == best
    assert noted_best(run_dir / "checkpoints") is None  # the start may still be refused
    checkpoints.begin()
    assert noted_best(run_dir / "checkpoints") == kept


@pytest.mark.parametrize("damaged", [False, True])
def test_a_damaged_best_checkpoint_costs_a_finished_run_no_more_than_that_model(run_dir, monkeypatch, capsys, damaged):
    from megarl.training import checkpoint

    root = run_dir / "checkpoints"
    assert checkpoint.keep_best(root, 2)
    if damaged:
        (root / "step_2" / "state.json").write_text('{"loader": {]}')
    else:

        def load(*_):
            assert critic.held == set(), "the critic is not read"
            return 2, {}

        monkeypatch.setattr(checkpoint, "load", load)

    def write(c, engine, name):
        (run_dir / name).mkdir()
        (run_dir / name / "config.json").touch()

    monkeypatch.setattr(export, "_write", write)
    c = SimpleNamespace(
        config=SimpleNamespace(trainer=SimpleNamespace(export_hf=True), model=SimpleNamespace(lora=None), models={}),
        run_dir=run_dir,
    )
    c.layout = SimpleNamespace(rank=0, world=WorkerGroup.alone())
    engine = SimpleNamespace(layout=c.layout)
    c.actor, c.models, c.offload = SimpleNamespace(engine=engine, chunks=[]), {}, OffloadSchedule()
    c.team = SimpleNamespace(leads=True)
    critic = SimpleNamespace(parts={*PARTS}, held={*PARTS})
    critic.hold = lambda *parts: setattr(critic, "held", {*parts})
    c.offload.add("critic", critic, offloads=PARTS)
    c.context = SimpleNamespace(step=3)
    export.export(c, root)
    assert [model.folder for model in exported(run_dir)] == (["hf"] if damaged else ["hf", "hf_best"])
    assert ("WARNING: the best checkpoint cannot be read" in capsys.readouterr().out) == damaged


def test_a_run_without_an_intact_checkpoint_says_what_can_be_done(run_dir):
    for step in (1, 2, 3):
        (run_dir / "checkpoints" / f"step_{step}" / "state.json").unlink()
    with pytest.raises(UserError, match=r"no checkpoint of this run is intact(?s:.*)trainer.resume=never") as caught:
        find(run_dir)
    assert "step_3: state.json is missing" in caught.value.found
    assert find(run_dir, "never") == (None, None)


def test_a_checkpoint_that_is_all_that_is_left_of_a_run_is_not_gone_on_from_unasked(run_dir):
    (run_dir / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics of the steps before the checkpoint are lost") as caught:
        find(run_dir)
    newest = run_dir / "checkpoints" / "step_3"
    assert f"trainer.resume={newest} continues without these metrics" in caught.value.fix
    assert find(run_dir, str(newest)) == (3, newest)
    assert find(run_dir, "never") == (None, None)


def test_a_checkpoint_of_another_format_is_not_passed_over(run_dir):
    """Its run would begin again from an earlier one, or from the beginning, without a word of its user."""
    meta = run_dir / "checkpoints" / "step_3" / "meta.json"
    meta.write_text(meta.read_text().replace('"format": ', '"format": 1'))
    with pytest.raises(
        FormatError,
        match=r"written by another version of megarl(?s:.*)format 1\d(?s:.*)convert",
    ):
        find(run_dir)


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
            (run_dir / "run.json").write_text('{"process": "of this start"}')
        return code

    monkeypatch.setattr("megarl.launchers.common.run_workers", run_workers)
    assert cli.main(["train", str(tmp_path / "r.yaml"), "--run-dir", str(run_dir)]) == code
    output = capsys.readouterr().err
    assert ("to continue:" in output) is told
    assert ("to continue: fix the problem above, then megarl" in output) is (told and code == 2)


@pytest.fixture
def saving(monkeypatch, tmp_path):
    """What is asked of the savings of a run, and the checkpoints of that run."""
    from megarl.training import checkpoint

    calls = []

    class Saving:
        def __init__(self, root, step, engines, extra, **options):
            self.step, self.ended = step, None
            kind = f", best {extra['best_step']}" if options["best"] else ""
            calls.append(f"begin {step}" + kind + ("" if options["kept"] else " to go on"))

        def poll(self):
            calls.append(f"poll {self.step}")
            return self.step == 1

        def wait(self):
            calls.append(f"wait {self.step}")

        def finish_save(self):
            calls.append(f"finish_save {self.step}")

    monkeypatch.setattr(checkpoint, "begin", Saving)
    part = SimpleNamespace(state_dict=dict)
    trainer = SimpleNamespace(**dict(TrainerConfig(save_every=2, best_metric=None)))
    c = SimpleNamespace(
        config=SimpleNamespace(trainer=trainer, task=Task(), model_dump=lambda mode: {}), run_dir=tmp_path, frozen={}
    )
    c.loading, c.kl_controller, c.baselines, c.surplus = part, part, part, None
    c.trained, c.offload = {}, OffloadSchedule()
    c.context, c.team, c.scores, c.replay, c.hf_config, c.oversampling = c, ONE_TEAM, None, None, None, None
    c.layout = SimpleNamespace(world=WorkerGroup.alone())
    return calls, Checkpoints(c), trainer


def test_a_checkpoint_is_completed_before_an_unknown_best_metric_ends_the_run(saving):
    calls, checkpoints, trainer = saving
    trainer.best_metric = "val/typo"
    with pytest.raises(ConfigError, match="val/typo"), finishing_save(checkpoints):
        checkpoints.after_step(2, {"val/acc": 0.5}, 0.5, last=False)
    assert calls == ["begin 2", "finish_save 2"]


def test_a_worker_that_is_lost_ends_the_run_at_once(saving):
    calls, checkpoints, _ = saving
    checkpoints.after_step(2, {}, None, last=False)
    with pytest.raises(WorkerError), finishing_save(checkpoints):
        raise WorkerError("rank 1 was killed")
    assert calls == ["begin 2"]


def test_a_checkpoint_says_which_step_is_the_best(saving):
    calls, checkpoints, trainer = saving
    trainer.best_metric = "val/acc"
    checkpoints.after_step(3, {"val/acc": 0.5}, 0.5, last=False)
    checkpoints.after_step(4, {"val/acc": 0.4}, 0.4, last=False)
    assert calls[::3] == ["begin 3, best 3", "begin 4"]
    assert checkpoints.best_step == 3


def test_of_equal_checkpoints_the_later_is_the_best(saving):
    calls, checkpoints, trainer = saving
    trainer.best_metric = "val/acc"
    checkpoints.after_step(3, {"val/acc": 0.0}, 0.0, last=False)
    checkpoints.after_step(5, {"val/acc": 0.0}, 0.0, last=True)
    assert [call for call in calls if "begin" in call] == ["begin 3, best 3", "begin 5, best 5"]


def test_the_result_of_a_cold_start_is_complete_at_once_and_rated_when_it_is_measured(saving, tmp_path):
    calls, checkpoints, trainer = saving
    trainer.best_metric = "val/acc"
    checkpoints.save_start()
    assert calls == ["begin 0", "wait 0"]
    (tmp_path / "checkpoints" / "step_0").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_0" / "meta.json").touch()
    checkpoints.rate_step_0({"val/acc": 0.5})
    assert (checkpoints.best, checkpoints.best_step, noted_best(tmp_path / "checkpoints")) == (0.5, 0, 0)


def test_checkpoints_to_go_on_from_come_between_those_that_are_kept_and_are_not_the_best(saving):
    calls, checkpoints, trainer = saving
    trainer.resume_every, trainer.save_every, trainer.best_metric = 2, 3, "score"
    for step in range(1, 6):
        checkpoints.after_step(step, {"score": float(step)}, None, last=step == 5)
    found = [call for call in calls if "begin" in call]
    assert found == ["begin 2 to go on", "begin 3, best 3", "begin 4 to go on", "begin 5, best 5"]


def test_a_run_ends_with_a_checkpoint_when_the_next_step_may_come_after_the_limit_of_the_job(
    saving, monkeypatch, capsys
):
    calls, checkpoints, trainer = saving
    clock = iter([100.0, 110.0, 125.0, 140.0])
    monkeypatch.setenv("MEGARL_JOB_BEGAN", "70")
    trainer.save_by_s, trainer.save_every = 100.0, 0
    checkpoints._save_by = SaveBy(100.0, lambda: next(clock))  # until 170; a step takes up to 15, and a save as long
    ends = []
    for step in (1, 2, 3):
        checkpoints.after_step(step, {}, None, last=False)
        ends.append(checkpoints.must_stop)
    assert ends == [False, False, True]
    assert calls == ["begin 3", "wait 3"]
    assert "saved at step 3: trainer.save_by_s = 100, and the next step may come too late" in capsys.readouterr().out


def test_the_longest_save_counts_and_the_last_step_is_the_end_as_always(saving, monkeypatch):
    monkeypatch.delenv("MEGARL_JOB_BEGAN", raising=False)
    _, checkpoints, _ = saving
    clock = iter([0.0, 10.0, 20.0])
    checkpoints._save_by = SaveBy(100.0, lambda: next(clock))
    checkpoints._in_flight.longest_s = 80.0
    checkpoints.after_step(1, {}, None, last=True)
    assert not checkpoints.must_stop
    near = SaveBy(100.0, lambda: next(iter([0.0])))
    assert not near.is_near(save_s=90.0)
    assert near.is_near(save_s=91.0)


def test_steps_run_while_a_checkpoint_is_written_and_the_last_one_waits(saving):
    calls, checkpoints, _ = saving
    for step in range(1, 6):
        checkpoints.after_step(step, {}, None, last=step == 5)
    assert calls == ["begin 2", "poll 2", "poll 2", "wait 2", "begin 4", "poll 4", "wait 4", "begin 5", "wait 5"]


@pytest.mark.parametrize(
    ("resume", "saved", "begun", "advice"),
    [
        ("auto", True, True, "from the checkpoint of step 3"),
        ("auto", True, False, "from the checkpoint of step 3"),
        ("auto", False, True, "from the beginning"),
        ("never", False, True, "trainer.resume=auto"),
        ("never", True, False, "from the beginning"),  # the checkpoint is of an earlier run in this folder
        ("/other/step_5", True, True, "trainer.resume=auto"),
        ("/other/step_5", True, False, "again from /other/step_5"),
        ("/other/step_5", False, True, "again from /other/step_5"),
    ],
)
def test_the_command_to_go_on_names_where_it_begins(tmp_path, resume, saved, begun, advice):
    if saved:
        (tmp_path / "checkpoints" / "step_3").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step_3" / "meta.json").write_text("{}")
    arguments = argparse.Namespace(command="train", recipe="r.yaml", overrides=[], launcher=None)
    text = job.continue_command(arguments, tmp_path, resume, begun=begun)
    assert advice in text
    assert ("trainer.resume=auto" in text) == (begun and (resume == "never" or (saved and resume != "auto")))
