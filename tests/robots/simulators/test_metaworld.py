"""Meta-World: the real one where `make metaworld-env` has made its interpreter, and errors anywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.robots.simulators import metaworld
from megarl.robots.simulators.metaworld import INSTRUCTIONS, MetaWorld

ROOT = Path(__file__).resolve().parents[3]
REAL = """
import hashlib, json
import numpy as np
from megarl.robots.simulators.metaworld import INSTRUCTIONS, MetaWorld

specs = {spec.name: spec for spec in MetaWorld.tasks({"size": 32})}
# after tasks(), which chooses how to render before MuJoCo is imported
from metaworld.env_dict import ALL_V3_ENVIRONMENTS, ML10_V3, ML45_V3
made = MetaWorld("button-press-topdown-v3", {"size": 32, "max_steps": 90})
calls = np.random.default_rng(0).uniform(-1.5, 1.5, (2, 4, 4)).astype(np.float32)

def played(trial, calls, made=made):
    seen, said = [made.reset(trial)], []
    for actions in calls:
        outcome = made.step(actions)
        seen.append(outcome.observation)
        said.append([outcome.executed, outcome.success, outcome.over, outcome.progress])
    digest = hashlib.sha256(repr(said).encode())
    for one in seen:
        digest.update(one.frames["corner2"].tobytes() + one.state.tobytes())
    return digest.hexdigest()

def expert(trial):
    seen = made.reset(trial)
    while True:
        outcome = made.step(np.repeat(made.expert()[None], 2, 0))
        if outcome.over:
            return outcome

many = MetaWorld("button-press-topdown-v3", {"size": 32, "max_steps": 90, "trials": 120, "plain": True})
next_seed = MetaWorld("button-press-topdown-v3", {"size": 32, "max_steps": 90, "seed": 1, "plain": True})
many.reset(0)  # its second block is drawn after the first
whole, plain = made.reset(7).frames["corner2"], many.reset(7).frames["corner2"]
moves = []
for one in (made, many):
    one.reset(5)
    done = [one.step(actions) for actions in calls]
    moves.append([[*each.observation.state.tolist(), each.progress] for each in done])
triangles = [int(one._env.model.mesh_facenum.sum()) for one in (made, many)]
first, other, again = played(0, calls), played(1, calls), played(0, calls)
last = expert(1)
made.reset(0)
limit = [made.step(np.zeros((40, 4), np.float32)) for _ in range(3)]
seen = limit[-1].observation
print(json.dumps({
    "ml10": [list(ML10_V3["train"]), list(ML10_V3["test"])], "ml45": [list(ML45_V3["train"]), list(ML45_V3["test"])],
    "names": sorted(specs) == sorted(INSTRUCTIONS) == sorted(ALL_V3_ENVIRONMENTS),
    "first": first, "other": other, "again": again,
    "clipped": played(0, np.clip(calls, -1, 1)), "smaller": played(0, calls / 3),
    "fresh": played(0, calls, MetaWorld("button-press-topdown-v3", {"size": 32, "max_steps": 90})),
    "solved": last.success, "progress": last.progress,
    "limit": [[one.executed, one.success, one.over] for one in limit], "before": limit[-1].progress,
    "trials": many.spec.trials, "block": played(53, calls, many) == played(3, calls, next_seed),
    "starts": [played(number, calls, many) for number in (3, 53, 103)], "plain_again": played(3, calls, many),
    "arm": [float(((p[..., 0] > 80) & (p[..., 1] < 60)).mean()) for p in (whole.astype(int), plain.astype(int))],
    "shape": [list(seen.frames["corner2"].shape), str(seen.frames["corner2"].dtype), list(seen.state.shape)],
    "moves": moves, "triangles": triangles,
    "contrast": float(np.std(seen.frames["corner2"])),
}))
"""


@pytest.fixture(scope="module")
def real():
    """What the script above says in Meta-World's own interpreter."""
    (pinned,) = [line for line in (ROOT / "constraints-metaworld.txt").read_text().split() if "metaworld==" in line]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "megarl" / pinned.replace("==", "-")
    if not (folder / ".complete").is_file():
        pytest.skip(f"no {folder}: `make metaworld-env` makes it")
    done = subprocess.run(
        [folder / "bin/python", "-W", "ignore", "-c", REAL],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_tasks_are_those_of_mt50(real):
    assert real["names"]


def test_splits_by_task_are_those_of_ml10_and_ml45(real):
    robot = load_config("srpo_metaworld_ml10").robot
    trained, measured = real["ml10"]
    assert (robot.simulator["tasks"], robot.held_out_tasks) == (trained + measured, measured)
    trained, measured = real["ml45"]
    assert f"robot.held_out_tasks=[{','.join(measured)}]" in (ROOT / "docs/embodied.md").read_text()
    assert set(trained) == set(INSTRUCTIONS) - set(measured)


def test_the_same_trial_and_actions_give_the_same_episode(real):
    assert real["first"] == real["again"] == real["fresh"] == real["clipped"]
    assert len({real["first"], real["other"], real["smaller"]}) == 3


def test_the_scripted_expert_succeeds_with_progress_one(real):
    assert real["solved"]
    assert real["progress"] == 1.0


def test_an_episode_ends_inside_a_chunk_at_its_limit(real):
    assert real["limit"] == [[40, False, False], [40, False, False], [10, False, True]]
    assert 0 <= real["before"] < 1


def test_observations_are_as_the_task_says(real):
    assert real["shape"] == [[32, 32, 3], "uint8", [4]]
    assert real["contrast"] > 10  # a picture, not a blank


def test_start_states_after_the_fiftieth_are_those_of_the_next_seed(real):
    assert real["trials"] == 120
    assert real["block"]
    assert len(set(real["starts"])) == 3
    assert real["plain_again"] == real["starts"][0]


def test_plain_pictures_show_the_same_arm(real):
    whole, plain = real["arm"]  # shares of red pixels
    assert whole > 0.02
    assert plain == pytest.approx(whole, rel=0.3)  # without smooth edges, and darker


def test_plain_pictures_have_a_tenth_of_the_triangles_and_the_same_physics(real):
    whole, plain = real["triangles"]
    assert 1000 < plain < whole / 10
    assert real["moves"][0] == real["moves"][1]


def test_every_task_has_an_instruction_of_its_own():
    assert len(set(INSTRUCTIONS.values())) == len(INSTRUCTIONS) == 50


def test_missing_libraries_of_the_system_are_named_by_their_packages(monkeypatch):
    monkeypatch.setattr(metaworld.ctypes.util, "find_library", lambda name: None)
    for way, packages in {"egl": "libegl1 libopengl0", "osmesa": "libosmesa6", "glfw": "libglfw3"}.items():
        monkeypatch.setenv("MUJOCO_GL", way)
        with pytest.raises(RuntimeError, match=f"MUJOCO_GL={way}: .*`apt install {packages}`"):
            MetaWorld.tasks({})


@pytest.mark.parametrize(("there", "way"), [({"EGL", "OpenGL", "OSMesa"}, "egl"), ({"EGL", "OSMesa"}, "osmesa")])
def test_without_metaworld_the_error_says_how_to_get_it_once_a_way_to_render_is_chosen(monkeypatch, there, way):
    monkeypatch.setattr(metaworld.ctypes.util, "find_library", lambda name: name if name in there else None)
    monkeypatch.setitem(sys.modules, "metaworld", None)
    monkeypatch.setenv("MUJOCO_GL", "")
    with pytest.raises(ImportError, match="make metaworld-env"):
        MetaWorld.tasks({})
    assert os.environ["MUJOCO_GL"] == way
