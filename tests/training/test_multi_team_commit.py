"""Several teams write one checkpoint: it is there when all parts are, and any placement goes on from it."""

import threading
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megarl.artifacts.trained import steps_in
from megarl.config.model import ParallelConfig
from megarl.config.training import OptimConfig
from megarl.dag.messages import CheckpointTag
from megarl.system.errors import WorkerError
from megarl.system.processes import free_port
from megarl.system.tracing import phase
from megarl.training import checkpoint, saving
from megarl.training.multi_team_commit import Teams, begin_part, part_of
from megarl.training.shards import CheckpointError
from tests.dist import fresh_layout, join_team, run_distributed, world
from tests.mail import FolderMail
from tests.training import cases

OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1)
TEAMS = {"policy": (0, 1), "values": (2,)}
ENGINES = {"policy": ("actor", "moe", {"ep": 2}), "values": ("critic", "critic", {})}


def _engine(model: str, layout, seed: int):
    return cases.make_engine(model, layout.parallel, layout=layout, optim=OPTIM, seed=seed)


def _steps(engine, first: int) -> list[dict]:
    layout, found = engine.layout, []
    for step in range(first, first + 2):
        batch = cases.split_over(cases.make_batch(seed=step), layout.dp_rank, layout.dp_size)
        found.append(cases.train(engine, batch).result())
    return found


def _apart(ports: dict[str, int], root: str) -> dict:
    """One of two teams: goes on from the colocated step 2, writes step 4, goes on, and goes on from step 4 again."""
    rank = dist.get_rank()
    team = join_team(TEAMS, ports, Path(root))
    folder, mail = Path(root) / "checkpoints", FolderMail(Path(root) / "mail")
    name, model, sizes = ENGINES[team]
    layout = fresh_layout(ParallelConfig(**sizes))
    engine = _engine(model, layout, 77)
    torch.manual_seed(rank)  # a worker's own
    meta = checkpoint.verify(folder / "step_2", layout.world, [name])
    assert checkpoint.load(folder / "step_2", {name: engine}, meta)[0] == 2
    found = {"after_2": _steps(engine, 2)}
    if team == "policy":
        teams = Teams("policy", 0, mail, 60.0, ("values",))
        written = checkpoint.begin(folder, 4, {name: engine}, {"loader": {"at": 7}}, teams=teams)
    else:
        teams = Teams("values", 2, mail, 60.0)
        written = begin_part(folder, 4, CheckpointTag.read(mail, 4).tag, {name: engine}, teams, layout, {})
    drawn = torch.rand(3)
    found["after_4"] = _steps(engine, 4)  # while it is written
    written.wait()
    if rank == 0:
        mail.post("complete", "")
    mail.read("complete")  # the team of the values has only written its part
    again = _engine(model, layout, 78)
    checkpoint.load(folder / "step_4", {name: again}, checkpoint.verify(folder / "step_4", layout.world, [name]))
    assert torch.equal(torch.rand(3), drawn), "random states of this worker"
    found["again"] = _steps(again, 4)
    return found


@pytest.mark.procs
def test_a_run_goes_from_one_team_to_two_and_back(alone, tmp_path):
    root, layout = tmp_path / "checkpoints", fresh_layout(ParallelConfig())
    engines = {"actor": _engine("moe", layout, 3), "critic": _engine("critic", layout, 4)}
    before = {name: _steps(engine, 0) for name, engine in engines.items()}
    assert before["actor"] != before["critic"]
    checkpoint.save(root, 2, engines, {"loader": {"at": 3}})
    assert "teams" not in checkpoint.read_meta(root / "step_2")
    undisturbed = {name: [_steps(engine, 2), _steps(engine, 4)] for name, engine in engines.items()}

    ranks = run_distributed(_apart, 3, 240, {team: free_port() for team in TEAMS}, str(tmp_path))
    for found, (name, model, sizes) in zip(ranks, [ENGINES["policy"]] * 2 + [ENGINES["values"]], strict=True):
        assert found["again"] == found["after_4"], "the same layout: bit for bit"
        for got, want in zip([*found["after_2"], *found["after_4"]], chain(*undisturbed[name]), strict=True):
            if not sizes:
                assert got == want, "the layout of the colocated run"
            assert got["loss"] == pytest.approx(want["loss"], rel=5e-6, abs=5e-6), (model, sizes)

    meta = checkpoint.verify(root / "step_4", world())
    assert sorted(meta["files"]) == sorted(
        ["state.json", *(f"{kind}_{rank}.safetensors" for kind in ("rank", "rng") for rank in range(3))]
    )
    assert meta["teams"]["values"] == {"workers": [2, 1], "layout": layout.describe(), "engines": ["critic"]}
    assert list(meta["teams"]) == ["policy", "values"]
    together_again = {"actor": _engine("moe", layout, 8), "critic": _engine("critic", layout, 9)}
    assert checkpoint.load(root / "step_4", together_again) == (4, {"loader": {"at": 7}})
    for name, engine in together_again.items():
        got, want = _steps(engine, 4), undisturbed[name][1]
        assert got == ranks[2]["after_4"] if name == "critic" else got[1]["loss"] == pytest.approx(want[1]["loss"])


@pytest.fixture
def run(alone, tmp_path):
    """A policy of one rank with step 1 saved, and what a team beside it needs to write a part of step 2.

    `impatient` is the policy's team with a deadline that is over soon.
    """
    layout = fresh_layout(ParallelConfig())
    engines = {"actor": _engine("dense", layout, 3)}
    root = tmp_path / "checkpoints"
    checkpoint.save(root, 1, engines, {})
    mail = FolderMail(tmp_path / "mail", 120.0)
    return SimpleNamespace(
        engines=engines,
        layout=layout,
        critic={"critic": _engine("critic", layout, 4)},
        root=root,
        mail=mail,
        policy=Teams("policy", 0, mail, 120.0, ("values",)),
        impatient=Teams("policy", 0, mail, 0.2, ("values",)),
        values=Teams("values", 1, mail, 120.0),
    )


def _values_write(run) -> None:
    begin_part(run.root, 2, CheckpointTag.read(run.mail, 2).tag, run.critic, run.values, run.layout, {}).wait()


def test_a_step_is_a_checkpoint_only_when_the_last_part_of_all_teams_is_on_disk(run, monkeypatch):
    seen, write_file, write_atomically = [], saving.write_file, saving.write_atomically

    def look(function):
        def looking(path, *arguments):
            seen.append((path.name, steps_in(run.root)))
            return function(path, *arguments)

        return looking

    monkeypatch.setattr(saving, "write_file", look(write_file))
    monkeypatch.setattr(saving, "write_atomically", look(write_atomically))
    other = threading.Thread(target=_values_write, args=(run,), daemon=True)
    other.start()
    checkpoint.begin(run.root, 2, run.engines, {}, teams=run.policy).wait()
    other.join(120)
    assert {name for name, _ in seen} >= {"rng_0.safetensors", "rng_1.safetensors", "seal_0.json", "seal_1.json"}
    assert all(steps == [1] for _, steps in seen)
    assert steps_in(run.root) == [1, 2]
    assert checkpoint.verify(run.root / "step_2", world())["optimizer_steps"] == {"actor": 0, "critic": 0}


def test_a_team_that_does_not_finish_its_part_is_named_and_the_step_before_stays(run):
    part_of(run.critic, "values", 2, 1, 1000, run.layout).post(run.mail)
    with phase("checkpoint"):
        written = checkpoint.begin(run.root, 2, run.engines, {}, teams=run.impatient)
    with pytest.raises(WorkerError) as caught:
        written.wait()
    told = str(caught.value)
    assert "team 'values'" in told
    assert "step_2 in phase checkpoint: worker 1 has not finished" in told
    assert [path.name for path in run.root.iterdir()] == ["step_1"]


def test_a_kill_between_the_parts_leaves_a_folder_that_nobody_reads(run, monkeypatch):
    """What the policy's team leaves when all are killed while it waits for the other one."""
    part_of(run.critic, "values", 2, 1, 1000, run.layout).post(run.mail)
    copy, write_atomically = list[tuple[str, bytes]](), saving.write_atomically

    def keep(path, *arguments, **more) -> None:
        write_atomically(path, *arguments, **more)
        if path.name == "seal_0.json":  # the last of its part
            copy.extend((file.name, file.read_bytes()) for file in path.parent.iterdir())

    monkeypatch.setattr(saving, "write_atomically", keep)
    with pytest.raises(WorkerError):
        checkpoint.begin(run.root, 2, run.engines, {}, teams=run.impatient).wait()
    assert len(copy) > 1
    left = run.root / f"step_2.tmp-{CheckpointTag.read(run.mail, 2).tag}"
    left.mkdir()
    for name, content in copy:
        (left / name).write_bytes(content)
    assert steps_in(run.root) == checkpoint.named_steps(run.root) == [1]
    checkpoint.save(run.root, 2, run.engines, {})
    assert sorted(path.name for path in run.root.iterdir()) == ["step_1", "step_2"]


def test_a_checkpoint_that_does_not_fit_is_begun_by_no_team(run, monkeypatch):
    said = []

    def write() -> None:
        with pytest.raises(CheckpointError) as caught:
            _values_write(run)
        said.append(str(caught.value))

    mine = sum(path.stat().st_size for path in (run.root / "step_1").iterdir())
    free = checkpoint._SPARE + mine + 500_000  # enough for this team's part
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    other = threading.Thread(target=write, daemon=True)
    other.start()
    with pytest.raises(
        CheckpointError, match=r"GB must stay free(?s:.*)it continues from the checkpoint of step 1"
    ) as caught:
        checkpoint.begin(run.root, 2, run.engines, {}, teams=run.policy)
    other.join(120)
    assert said == [str(caught.value)]
    assert [path.name for path in run.root.iterdir()] == ["step_1"]
