"""Checkpoints: bit-for-bit resume, resharding with optimizer state, and folders that are complete or not there."""

import os
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.artifacts.trained import steps_in
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from megarl.training import checkpoint, shards
from megarl.training.shards import CheckpointError, FormatError
from tests.dist import fresh_layout, run_distributed, world
from tests.training import cases

OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
COUNT = 4  # in one micro-batch: how a step is cut is not what these tests are about

# (model, layout that saves, layouts that load); {} is data parallel over all processes.
Saves = list[tuple[str, dict, list[dict]]]
TWO: Saves = [
    ("dense", {}, [{}, {"tp": 2, "sp": True}]),
    ("tied", {"pp": 2, "vpp": 2}, [{"pp": 2, "vpp": 2}, {"cp": 2}]),
    ("moe", {"tp": 2, "sp": True}, [{"tp": 2, "sp": True}, {"tp": 2, "sp": True, "ep": 2}]),
    ("shared", {"ep": 2}, [{"pp": 2}]),
    ("drafting", {"ep": 2}, [{"tp": 2, "sp": True}]),
    ("critic", {"tp": 2}, [{"pp": 2}]),
]
# The same with other tensors, or from and to another of the layouts above.
MORE_OF_TWO: Saves = [
    ("dense", {"tp": 2}, [{"pp": 2}, {}]),
    ("moe", {"ep": 2}, [{"ep": 2}, {"pp": 2}]),
    ("wide", {"tp": 2, "sp": True}, [{"pp": 2}]),
    ("sinks", {"tp": 2, "sp": True}, [{"ep": 2}]),
]


def _engine(name: str, sizes: dict, seed: int = 3, distributed: bool = True, **kwargs):
    parallel = ParallelConfig(**sizes)
    layout = fresh_layout(parallel)
    settings = EngineConfig(micro_batch_tokens=300, distributed_optimizer=distributed)
    return cases.make_engine(name, parallel, layout=layout, engine=settings, optim=OPTIM, seed=seed, **kwargs)


def _steps(engine, first: int, count: int = 2) -> list[dict]:
    found = []
    for step in range(first, first + count):
        layout = engine.layout
        batch = cases.split_over(cases.make_batch(COUNT, seed=step), layout.dp_rank, layout.dp_size)
        found.append(cases.train(engine, batch).result())
    return found


def _layers(name: str) -> int:
    """As few as the layouts of this model can cut."""
    return max(
        cases.layers_for(case, sizes)
        for case, saver, loaders in (*TWO, *MORE_OF_TWO)
        if case == name
        for sizes in (saver, *loaders)
    )


def _hashes(engine) -> list[str]:
    return [cases.digest(p) for chunk in engine.chunks for p in chunk.weights().values()]


def _reshard(root: str, saves: Saves) -> list[dict]:
    """Save under one layout, go on there and under every other, and report the metrics of steps 2 and 3."""
    out = []
    for number, (name, saver, loaders) in enumerate(saves):
        distributed = number % 2 == 0
        engine = _engine(name, saver, distributed=distributed, layers=_layers(name))
        _steps(engine, 1, 1)
        folder = checkpoint.save(Path(root) / str(number), 2, {"actor": engine}, {"case": number})
        goes_on, end = _steps(engine, 2), _hashes(engine)
        for sizes in loaders:
            # Another form of optimizer than the one that saved, except under the same layout.
            same = sizes == saver
            form = distributed if same else not distributed
            other = _engine(name, sizes, seed=77, distributed=form, layers=_layers(name))
            step, extra = checkpoint.load(folder, {"actor": other})
            metrics = _steps(other, 2)
            exact = metrics == goes_on and _hashes(other) == end
            out.append({"case": [name, saver, sizes], "meta": [step, extra["case"]], "metrics": metrics})
            out[-1]["exact"] = exact if same else None
    return out


def _alone_again(root: str, saves: Saves) -> dict:
    """Metrics of three steps of a single process, and of the last two after loading what two processes saved."""
    found = {"whole": {}, "resumed": []}
    for name in {case[0] for case in saves}:
        engine = _engine(name, {}, layers=_layers(name))
        found["whole"][name] = _steps(engine, 1, 3)
    for number, (name, saver, _) in enumerate(saves):
        engine = _engine(name, {}, seed=77, layers=_layers(name))
        checkpoint.load(Path(root) / str(number) / "step_2", {"actor": engine})
        found["resumed"].append({"case": [name, saver, "alone"], "metrics": _steps(engine, 2)})
    return found


@pytest.mark.procs
@pytest.mark.parametrize("saves", [TWO, pytest.param(MORE_OF_TWO, marks=pytest.mark.campaign("teams"))], ids=len)
def test_every_layout_goes_on_from_every_other_with_optimizer_state(saves, tmp_path):
    ranks = run_distributed(_reshard, 2, 300, str(tmp_path), saves)
    alone = run_distributed(_alone_again, 1, 200, str(tmp_path), saves)[0]
    for found in [*ranks[0], *ranks[1], *alone["resumed"]]:
        want = alone["whole"][found["case"][0]][1:]
        for got, expected in zip(found["metrics"], want, strict=True):
            for key in ("loss", "samples", "actor/grad_norm"):
                # Without optimizer state, or with a wrong step count, these differ by more than 1e-3.
                assert got[key] == pytest.approx(expected[key], rel=5e-6, abs=5e-6), (found["case"], key)
        assert found.get("exact") in (None, True), found["case"]
    assert ranks[1][0]["meta"] == [2, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_is_bit_for_bit(alone, tmp_path, dtype):
    engine = _engine("moe", {}, dtype=dtype)
    frozen = cases.make_engine("dense", frozen=True, dtype=dtype, name="reference")
    _steps(engine, 0)
    extra = {"loader": {"epoch": 1, "position": 7}, "kl": 0.125}
    folder = checkpoint.save(tmp_path, 2, {"actor": engine, "reference": frozen}, extra, config={"name": "x"})
    draw = torch.rand(3)
    metrics = _steps(engine, 2)
    again = _engine("moe", {}, dtype=dtype, seed=8)
    fresh = cases.make_engine("dense", frozen=True, dtype=dtype, name="reference", seed=8)
    assert checkpoint.load(folder, {"actor": again, "reference": fresh}) == (2, extra)
    assert torch.equal(torch.rand(3), draw)
    assert _steps(again, 2) == metrics
    assert _hashes(again) == _hashes(engine)
    assert _hashes(fresh) == _hashes(frozen)
    assert checkpoint.read_meta(folder)["config"] == {"name": "x"}
    assert len({path.stat().st_mode for path in folder.iterdir() if path.is_file()}) == 1  # readable by the same people
    for path in folder.iterdir():
        path.write_bytes(b"")  # a state that is still mapped would end this process
    checkpoint.save(tmp_path, 3, {"actor": again}, extra)


def test_a_checkpoint_needs_optimizer_state_and_no_gradients(alone, tmp_path):
    engine = _engine("dense", {})
    _steps(engine, 0)
    engine.hold("parameters")
    with pytest.raises(RuntimeError, match="optimizer are not on the device"):
        checkpoint.save(tmp_path, 2, {"actor": engine}, {})
    engine.hold("parameters", "optimizer")
    folder = checkpoint.save(tmp_path, 2, {"actor": engine}, {})
    with pytest.raises(RuntimeError, match="gradients are not on the device"):
        _steps(engine, 2)
    engine.hold(*engine.parts)
    other = _engine("dense", {}, seed=5)
    checkpoint.load(folder, {"actor": other})
    assert _steps(other, 2) == _steps(engine, 2)


def test_each_parameter_has_its_own_step(alone, tmp_path):
    engine = _engine("dense", {})
    _steps(engine, 0)
    folder = checkpoint.save(tmp_path, 2, {"actor": engine}, {})
    checkpoint.load(folder, {"actor": engine})
    steps = [state["step"] for part in engine.optimizer.chained_optimizers for state in part.optimizer.state.values()]
    assert len({step.data_ptr() for step in steps}) == len(steps)
    assert {step.item() for step in steps} == {2.0}


def test_newest_and_best_are_kept(alone, tmp_path):
    engine = _engine("dense", {})
    assert steps_in(tmp_path) == []
    assert checkpoint.best(tmp_path) is None
    for step in range(1, 6):
        checkpoint.save(tmp_path, step, {"actor": engine}, {}, keep_last=2, best=step == 2)
    assert checkpoint.steps_in(tmp_path) == [2, 4, 5]
    assert steps_in(tmp_path)[-1] == 5
    assert checkpoint.best(tmp_path).name == "step_2"
    checkpoint.save(tmp_path, 5, {"actor": engine}, {"again": 1})
    assert checkpoint.load(tmp_path / "step_5", {"actor": engine}) == (5, {"again": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "step_2", "step_4", "step_5"]


def test_a_checkpoint_to_go_on_from_goes_when_a_newer_one_is_complete(alone, tmp_path):
    engine, there = _engine("dense", {}), []
    for step in range(1, 7):
        kept = step % 3 == 0
        checkpoint.save(tmp_path, step, {"actor": engine}, {}, keep_last=2, kept=kept, best=step == 3)
        there.append(checkpoint.steps_in(tmp_path))
    assert there == [[1], [2], [3], [3, 4], [3, 5], [3, 6]]
    (tmp_path / "step_3" / "meta.json").write_text("")  # whether it is to be kept cannot be told
    checkpoint.save(tmp_path, 7, {"actor": engine}, {}, keep_last=2, kept=False)
    assert checkpoint.steps_in(tmp_path) == [3, 6, 7]


def test_interrupted_save_is_not_seen_and_goes_away(alone, tmp_path):
    engine = _engine("dense", {})
    checkpoint.save(tmp_path, 1, {"actor": engine}, {})
    left = tmp_path / "step_2.tmp-1234"  # a killed run
    left.mkdir()
    (left / "meta.json").write_text("{}")
    assert steps_in(tmp_path)[-1] == 1
    (tmp_path / "step_9").mkdir()
    assert steps_in(tmp_path)[-1] == 1
    checkpoint.save(tmp_path, 3, {"actor": engine}, {})
    assert not list(tmp_path.glob("*.tmp-*"))
    assert steps_in(tmp_path)[-1] == 3


@pytest.fixture
def no_room_for_files():
    """The kernel refuses to let files grow beyond 100,000 bytes, as it does on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_leaves_the_last_checkpoint_and_says_how_to_go_on(alone, tmp_path, request):
    engine = _engine("dense", {})
    whole = checkpoint.save(tmp_path / "checkpoints", 1, {"actor": engine}, {})
    request.getfixturevalue("no_room_for_files")
    saving = checkpoint.begin(tmp_path / "checkpoints", 2, {"actor": engine}, {})
    with pytest.raises(CheckpointError) as caught:
        saving.wait()
    error = caught.value
    assert error.what == "cannot write the checkpoint"
    assert "rank 0: File too large (rank_0.safetensors)" in error.found
    assert f"--run-dir {tmp_path}: it continues from the checkpoint of step 1" in error.fix
    assert [path.name for path in whole.parent.iterdir()] == ["step_1"]
    checkpoint.verify(whole, world())


def test_a_checkpoint_that_does_not_fit_is_not_begun(alone, tmp_path, monkeypatch):
    engine = _engine("dense", {})
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=70 << 20))
    checkpoint.save(tmp_path, 1, {"actor": engine}, {})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=64 << 20))
    with pytest.raises(
        CheckpointError,
        match=r"0\.0671 GB must stay free for logs, but 0\.0671 GB are free(?s:.*)checkpoint of step 1",
    ):
        checkpoint.save(tmp_path, 2, {"actor": engine}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_training_goes_on_while_a_checkpoint_is_written(alone, tmp_path, monkeypatch):
    engine = _engine("dense", {})
    _steps(engine, 0)
    want = _hashes(engine)
    go_on = threading.Event()
    write_file = shards.write_file
    monkeypatch.setattr(shards, "write_file", lambda *args: go_on.wait(60) and write_file(*args))
    saving = checkpoint.begin(tmp_path, 2, {"actor": engine}, {"at": 2})
    metrics = _steps(engine, 2)
    beats = []
    monkeypatch.setattr("megarl.training.saving.beat", lambda: beats.append(1))
    assert not saving.poll()
    assert steps_in(tmp_path) == []
    assert not beats  # a file system that hangs looks stuck
    go_on.set()
    saving.wait()
    assert beats
    again = _engine("dense", {}, seed=8)
    assert checkpoint.load(tmp_path / "step_2", {"actor": again}) == (2, {"at": 2})
    assert _hashes(again) == want
    assert _steps(again, 2) == metrics


def test_an_error_waits_for_the_checkpoint_that_is_being_written(alone, tmp_path, monkeypatch):
    engine, write_file = _engine("dense", {}), shards.write_file
    monkeypatch.setattr(shards, "write_file", lambda *args: time.sleep(0.3) or write_file(*args))
    checkpoint.begin(tmp_path, 2, {"actor": engine}, {}).finish_save()
    assert steps_in(tmp_path) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_an_error_does_not_wait_for_a_file_system_that_hangs(alone, tmp_path, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(shards, "write_file", lambda *args: go_on.wait(60))
    monkeypatch.setattr("megarl.training.saving._STUCK_S", 0.2)
    saving = checkpoint.begin(tmp_path, 2, {"actor": _engine("dense", {})}, {})
    saving.finish_save()
    assert saving.ended is None
    go_on.set()


def _one_rank_fails(root: str) -> list:
    """Rank 1 cannot write; what each rank sees, and the bytes that each rank wrote before."""
    engine = _engine("dense", {})
    folder = checkpoint.save(Path(root), 1, {"actor": engine}, {})
    sizes = [(folder / f"rank_{rank}.safetensors").stat().st_size for rank in range(2)]
    dist.barrier()
    if engine.layout.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        checkpoint.save(Path(root), 2, {"actor": engine}, {})
    except CheckpointError as error:
        return [str(error), sizes, sum(p.numel() for chunk in engine.chunks for p in chunk.parameters())]
    return []


def _killed_while_writing(root: str) -> None:
    """Rank 0 is killed when it has written a part of its file of step 2."""
    engine = _engine("dense", {})
    checkpoint.save(Path(root), 1, {"actor": engine}, {"at": 1})
    if engine.layout.rank == 0:
        shards.write_file = lambda path, parts, _: (path.write_bytes(parts[0]), os.kill(os.getpid(), signal.SIGKILL))
    checkpoint.begin(Path(root), 2, {"actor": engine}, {}).wait()


@pytest.mark.procs
def test_a_kill_while_a_checkpoint_is_written_loses_only_that_checkpoint(alone, tmp_path):
    with pytest.raises(AssertionError, match="exit codes"):
        run_distributed(_killed_while_writing, 2, 120, str(tmp_path))
    names = sorted(path.name.partition(".tmp-")[0] for path in tmp_path.iterdir())
    assert names == ["step_1", "step_2"]
    assert steps_in(tmp_path)[-1] == 1
    engine = _engine("dense", {}, seed=8)
    assert checkpoint.load(tmp_path / "step_1", {"actor": engine}) == (1, {"at": 1})
    checkpoint.save(tmp_path, 2, {"actor": engine}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


@pytest.mark.procs
def test_ranks_write_equal_parts_and_fail_together(tmp_path):
    first, second = run_distributed(_one_rank_fails, 2, 120, str(tmp_path))
    assert first == second
    message, sizes, parameters = first
    assert "rank 1: File too large (rank_1.safetensors)" in message
    assert "rank 0:" not in message
    for size in sizes:  # parameters and two moments in fp32, half of them; the rest is the header and rounding
        assert 6 * parameters <= size <= 6.5 * parameters
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_what_is_no_checkpoint_is_refused(alone, tmp_path):
    engine = _engine("dense", {})
    with pytest.raises(CheckpointError, match=r"damaged or incomplete(?s:.*)meta.json is missing"):
        checkpoint.load(tmp_path / "nothing", {"actor": engine})
    folder = checkpoint.save(tmp_path, 1, {"actor": engine}, {})
    with pytest.raises(CheckpointError, match=r"the checkpoint has no model critic, only actor"):
        checkpoint.load(folder, {"critic": engine})
    meta = folder / "meta.json"
    meta.write_text(meta.read_text().replace(f'"format": {checkpoint.FORMAT}', '"format": 3'))
    told = r"another version of megarl(?s:.*)found: *'format 3'\n *allowed: format 4\n *fix: *use that version"
    with pytest.raises(FormatError, match=told):
        checkpoint.load(folder, {"actor": engine})


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def _overwrite(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


DAMAGE = {
    "cut": (_cut, "bytes were written|[0-9,]+ were written"),
    "overwritten": (_overwrite, r"was changed after it was written \(checksum"),
    "missing": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damaged_file_is_found_before_anything_is_loaded(alone, tmp_path, damage):
    engine = _engine("dense", {})
    folder = checkpoint.save(tmp_path, 1, {"actor": engine}, {})
    checkpoint.save(tmp_path, 2, {"actor": engine}, {}, keep_last=9)
    before = _hashes(engine)
    change, message = DAMAGE[damage]
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        change(path)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(folder, {"actor": engine})
        error = caught.value
        assert error.where == str(folder)
        if path.name == "meta.json":
            assert "meta.json" in error.found
        else:
            assert re.search(f"{re.escape(path.name)} .*({message})", error.found)
        assert f"trainer.resume={tmp_path / 'step_2'}" in error.fix
        path.write_bytes(whole)
    assert _hashes(engine) == before
    meta = folder / "meta.json"
    meta.write_text(meta.read_text().replace('"step": 1', '"step": 7'))
    with pytest.raises(CheckpointError, match=r"meta\.json was changed after it was written"):
        checkpoint.load(folder, {"actor": engine})


def _one_rank_sees_it(root: str) -> str:
    engine = _engine("dense", {"tp": 2})
    folder = checkpoint.save(Path(root), 1, {"actor": engine}, {})
    if engine.layout.rank == 0:
        _overwrite(folder / "rng_1.safetensors")
    dist.barrier()
    try:
        checkpoint.verify(folder, world())
    except CheckpointError as error:
        return str(error)
    return "nothing"


@pytest.mark.procs
def test_all_ranks_agree_on_what_is_damaged(tmp_path):
    first, second = run_distributed(_one_rank_sees_it, 2, 120, str(tmp_path))
    assert first == second
    assert "rng_1.safetensors was changed after" in first


def test_a_best_json_that_cannot_be_read_is_none(alone, tmp_path, caplog):
    (tmp_path / "best.json").write_text('{"step": 1')
    assert checkpoint.best(tmp_path) is None
    assert "best.json cannot be read" in caplog.text


def test_nothing_in_a_checkpoint_is_a_pickle(alone, tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"actor": _engine("dense", {})}, {})
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}


def test_the_file_of_another_checkpoint_is_named(alone, tmp_path):
    engine = _engine("dense", {})
    folder = checkpoint.save(tmp_path, 1, {"actor": engine}, {})
    other = checkpoint.save(tmp_path, 2, {"actor": engine}, {})
    (folder / "rank_0.safetensors").write_bytes((other / "rank_0.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"rank_0\.safetensors belongs to another checkpoint \(step 2\)"):
        checkpoint.load(folder, {"actor": engine})


def test_damage_in_a_header_is_damage(alone, tmp_path):
    engine = _engine("dense", {})
    path = checkpoint.save(tmp_path, 1, {"actor": engine}, {}) / "rank_0.safetensors"
    whole = path.read_bytes()
    places = [0, 8, *(whole.index(text) for text in (b"__metadata__", b"label", b"tag", b"wholes"))]
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"rank_0\.safetensors was changed"):
            checkpoint.verify(path.parent, world())


def test_a_checkpoint_whose_neighbours_cannot_be_changed_is_complete(alone, tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint, "_prune", refuse)
    (tmp_path / "best.tmp").mkdir()  # best.json is written under this name first
    folder = checkpoint.save(tmp_path, 1, {"actor": _engine("dense", {})}, {}, best=True)
    assert checkpoint.verify(folder, world())["step"] == 1
    assert "best.json cannot be written" in caplog.text
    assert "cannot be removed" in caplog.text


def test_checkpoints_of_steps_to_be_trained_again_are_set_aside(tmp_path):
    root = tmp_path / "checkpoints"
    for step in (50, 100, 150, 200):
        (root / f"step_{step}").mkdir(parents=True)
        (root / f"step_{step}" / "meta.json").write_text("{}")
    (root / "best.json").write_text('{"step": 150}')
    assert checkpoint.set_aside(root, 200) is None
    assert checkpoint.set_aside(root, 100) == tmp_path / "checkpoints.old-1"
    assert checkpoint.steps_in(root) == [50, 100]
    assert checkpoint.steps_in(tmp_path / "checkpoints.old-1") == [150, 200]
    assert checkpoint.best(root) is None
    assert checkpoint.best(tmp_path / "checkpoints.old-1").name == "step_150"
    (root / "best.json").write_text('{"step": 50}')
    assert checkpoint.set_aside(root, 50).name == "checkpoints.old-2"
    assert checkpoint.best(root).name == "step_50"
    assert checkpoint.set_aside(root, None).name == "checkpoints.old-3"
    (root / "step_7").mkdir()  # has lost its meta.json
    assert checkpoint.set_aside(root, 6).name == "checkpoints.old-4"
    assert not list(root.iterdir())
