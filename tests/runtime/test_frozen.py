"""A resumed run goes on with the reference and the teacher that it began with, or says that it cannot."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megarl.config.run import RunConfig
from megarl.runtime import frozen_models, start
from megarl.runtime.frozen_models import changed_files, frozen_in, keep_reference, record_frozen
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError
from tests.runtime import harness

WEIGHTS = "model.safetensors"
SHORT = ("sft.steps=0", "data.val_files=[]", "trainer.export_hf=false", "trainer.steps=2")
ALONE = WorkerGroup.alone()


def _flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-9] ^= 0xFF
    (folder / WEIGHTS).write_bytes(data)


def _zero_a_block(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:4096] + bytes(4096) + data[8192:])


def _once(work: Callable[[], object]) -> None:
    """What one rank does before all go on."""
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def _train(recipe: str, run_dir: Path, overrides: Sequence[str]) -> None:
    """A run in processes that run others, too; each of them writes to a file of its own."""
    made, build = [], start.build_rank_state
    with (
        pytest.MonkeyPatch.context() as patch,
        Path(f"{run_dir}.{dist.get_rank()}.txt").open("w") as said,
        contextlib.redirect_stdout(said),
    ):
        patch.setattr(start, "build_rank_state", lambda *args: made.append(build(*args)) or made[0])
        try:
            harness.work_of_rank(recipe, str(run_dir), list(overrides), [])
        finally:
            made[0].layout.close()


REAL: dict[str, Callable[[Path], object]] = {
    "flipped": lambda run: _flip_a_byte(run / "reference"),
    "removed": lambda run: shutil.rmtree(run / "reference"),
}


def _resume_each(recipe: str, run_dir: str, overrides: list[str], teams: list) -> None:
    whole = Path(run_dir)
    _train(recipe, whole, overrides)
    for name, damage in REAL.items():
        copy = whole.with_name(name)

        def prepare(copy: Path = copy, damage: Callable[[Path], object] = damage) -> None:
            shutil.copytree(whole, copy)
            shutil.rmtree(copy / "checkpoints" / "step_2")
            damage(copy)

        _once(prepare)
        _train(recipe, copy, overrides)


@pytest.mark.procs
def test_a_damaged_reference_is_made_again_and_the_resumed_run_is_the_same(tmp_path):
    recipe = harness.write_recipe(tmp_path)
    whole = harness.train(recipe, tmp_path / "whole", *SHORT, work=_resume_each)
    assert whole[2]["actor/kl_loss"] > 0
    for name, why in {"flipped": f"{WEIGHTS} was changed after", "removed": "there is no reference/"}.items():
        copy = tmp_path / name
        assert harness.metrics(copy) == whole
        said = Path(f"{copy}.0.txt").read_text() + Path(f"{copy}.1.txt").read_text()
        (line,) = [line for line in said.splitlines() if line.startswith(f"WARNING: the reference in {copy}")]
        assert why in line
        assert line.endswith("it is written again from the policy's initial weights")
        assert (
            changed_files(copy / "reference", frozen_in(copy / "checkpoints" / "step_2")["reference"].files, ALONE)
            == []
        )


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"rope_theta": 10000.0}')
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * 64)
    return folder


def _worker(run_dir: Path, **settings) -> SimpleNamespace:
    config = RunConfig(name="run", **settings)
    return SimpleNamespace(config=config, run_dir=run_dir, layout=SimpleNamespace(rank=0, world=ALONE), frozen={})


def _checkpoint(run_dir: Path, c: SimpleNamespace) -> Path:
    """One of the run of `c`, as far as its frozen models are asked for."""
    folder = run_dir / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"frozen": c.frozen}))
    return folder


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a zero block": (_zero_a_block, rf"{WEIGHTS} was changed after it was written"),
    "a byte": (_flip_a_byte, rf"{WEIGHTS} was changed after it was written"),
    "cut": (lambda folder: (folder / WEIGHTS).write_bytes(b"{}"), f"{WEIGHTS} has 2 bytes, but 16,384 were written"),
    "a file is gone": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
    "another number": (
        lambda folder: (folder / "config.json").write_text('{"rope_theta": 10001.0}'),
        "config.json was changed",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_teacher_that_has_changed_since_the_checkpoint_is_refused(tmp_path, damage):
    teacher, c = _model(tmp_path / "teacher"), _worker(tmp_path)
    record_frozen(c, "teacher", "teacher.path", str(teacher), None)
    checkpoint = _checkpoint(tmp_path, c)
    again = _worker(tmp_path)
    record_frozen(again, "teacher", "teacher.path", str(teacher), str(checkpoint))
    assert again.frozen == c.frozen
    (teacher / "README.md").touch()  # nobody reads it
    record_frozen(_worker(tmp_path), "teacher", "teacher.path", str(teacher), str(checkpoint))
    change, message = DAMAGE[damage]
    change(teacher)
    with pytest.raises(ConfigError, match=rf"teacher\.path: the model's files have changed(?s:.*){message}"):
        record_frozen(_worker(tmp_path), "teacher", "teacher.path", str(teacher), str(checkpoint))
    record_frozen(_worker(tmp_path), "teacher", "teacher.path", str(_model(tmp_path / "another")), str(checkpoint))


def test_weights_that_would_be_read_in_place_of_the_old_ones_are_a_change(tmp_path):
    teacher, c = _model(tmp_path / "teacher"), _worker(tmp_path)
    (teacher / WEIGHTS).rename(teacher / "model-1.safetensors")
    (teacher / f"{WEIGHTS}.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    record_frozen(c, "teacher", "teacher.path", str(teacher), None)
    (teacher / WEIGHTS).touch()
    with pytest.raises(ConfigError, match=f"{WEIGHTS} is new"):
        record_frozen(_worker(tmp_path), "teacher", "teacher.path", str(teacher), str(_checkpoint(tmp_path, c)))


class _Machines:
    """Two ranks on machines of their own, as the first one sees them."""

    rank, size = 0, 2

    def all_gather_json(self, value):
        if isinstance(value, str):
            return [value, "another-machine"]
        return [value, {name: [known[0], "0" * 16] if name == WEIGHTS else known for name, known in value.items()}]


def test_machines_with_different_files_of_a_model_are_refused(tmp_path):
    c = _worker(tmp_path)
    c.layout.world = _Machines()
    with pytest.raises(ConfigError, match=rf"files differ between the machines of this run(?s:.*){WEIGHTS}"):
        record_frozen(c, "teacher", "teacher.path", str(_model(tmp_path / "teacher")), None)


@pytest.mark.parametrize("sft_steps", [0, 3])
def test_a_damaged_reference_that_cannot_be_made_again_ends_the_start(tmp_path, monkeypatch, sft_steps):
    c = _worker(tmp_path, sft={"steps": sft_steps})
    record_frozen(c, "reference", "", str(_model(tmp_path / "reference")), None)
    checkpoint = _checkpoint(tmp_path, c)
    (tmp_path / "checkpoints" / "step_0").mkdir()
    (tmp_path / "checkpoints" / "step_0" / "meta.json").touch()
    _flip_a_byte(tmp_path / "reference")
    monkeypatch.setattr(frozen_models, "_export_actor", lambda c, folder: _zero_a_block(_model(folder)))
    why = "RL began after a cold start" if sft_steps else "the policy's initial weights have changed"
    with pytest.raises(ConfigError, match=rf"damaged, and cannot be written again: {why}") as caught:
        keep_reference(_worker(tmp_path, sft={"steps": sft_steps}), resumed_from=checkpoint, begun=True)
    assert caught.value.where == str(tmp_path / "reference")
    assert re.search("copy it from a backup, or set reference.path.*step_0 restarts RL", caught.value.fix)


def test_a_reference_that_is_the_policys_own_files_needs_no_folder_in_the_run(tmp_path):
    policy, run_dir = _model(tmp_path / "policy"), tmp_path / "run"
    run_dir.mkdir()
    c = _worker(run_dir, model={"path": str(policy)})
    source = keep_reference(c, resumed_from=None, begun=False)
    record_frozen(c, "reference", source.key, source.path, None)
    checkpoint = _checkpoint(run_dir, c)
    shutil.rmtree(run_dir / "reference.next")
    again = _worker(run_dir, model={"path": str(policy)})
    assert keep_reference(again, resumed_from=checkpoint, begun=True) == source
    assert json.loads((run_dir / "reference.next" / "origin.json").read_text()) == {"path": str(policy)}
    _zero_a_block(policy)
    with pytest.raises(ConfigError, match=r"model\.path: the model's files have changed"):
        record_frozen(again, "reference", source.key, source.path, str(checkpoint))
