"""The adapter of LIBERO against a stand-in of its interface; `make campaign-libero` runs the real one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megarl.robots.simulators.libero import MESHES, Libero, axis_angle
from megarl.robots.simulators.protocol import SettingError
from tests.robots.simulators import stand_in_libero

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """The folder of the stand-in; its meshes are there, LIBERO was never configured."""
    stand_in_libero.write(tmp_path)
    for name in MESHES:
        (tmp_path / "libero/libero/assets" / name).mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("LIBERO_CONFIG_PATH", "MUJOCO_GL"):
        monkeypatch.setenv(name, "")  # so that what the adapter sets is taken back
        os.environ.pop(name)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("libero", "robosuite", "mujoco")]:
        del sys.modules[name]


def simulator(**settings) -> Libero:
    return Libero("libero_goal/0", {"size": 8, **settings})


def test_tasks_of_four_suites_with_either_limits(packages, capsys):
    specs = {spec.name: spec for spec in Libero.tasks({})}
    assert len(specs) == 8
    spec = specs["libero_10/1"]
    assert (spec.instruction, spec.trials, spec.action_dim, spec.state_dim) == ("open it", 3, 7, 8)
    assert spec.cameras == {"agentview": (256, 256), "wrist": (256, 256)}
    assert {spec.max_steps for spec in specs.values()} == {512}
    limits = {spec.name: spec.max_steps for spec in Libero.tasks({"limits": "openvla"})}
    assert [limits[f"libero_{suite}/0"] for suite in ("spatial", "object", "goal", "10")] == [220, 280, 300, 520]
    assert capsys.readouterr().out == ""  # standard output may be somebody's pipe


def test_the_suite_of_90_tasks_and_limits_of_ones_own(packages):
    (first, _) = Libero.tasks({"suites": ["libero_90"], "limits": "openvla"})
    assert (first.name, first.max_steps) == ("libero_90/0", 400)
    assert {spec.max_steps for spec in Libero.tasks({"max_steps": 33})} == {33}


def test_the_configuration_that_libero_would_ask_for_is_written(packages):
    Libero.tasks({"suites": ["libero_goal"]})
    (file,) = (packages / "cache").rglob("config.yaml")
    assert os.environ["LIBERO_CONFIG_PATH"] == str(file.parent)
    assert json.loads(file.read_text())["init_states"] == str(packages / "libero/libero/init_files")


def test_an_episode_begins_settled_in_the_start_state_of_its_trial(packages):
    made = simulator()
    domain = made._env.env
    domain.pictures = 0
    observation = made.reset(2)
    np.testing.assert_array_equal(domain.state, [8, 9, 10, 11])
    np.testing.assert_array_equal(domain.taken, [[0, 0, 0, 0, 0, 0, -1]] * 10)
    assert domain.pictures == 2  # one of each camera
    assert np.all(observation.frames["agentview"] == 18)
    assert np.all(observation.frames["wrist"] == 118)
    assert observation.frames["wrist"].shape == (8, 8, 3)
    np.testing.assert_allclose(observation.state, [18, 19, 20, 0, 0, math.pi / 2, 0.04, -0.04], rtol=1e-6)
    assert observation.state.dtype == np.float32


def test_every_episode_begins_as_the_first_one_after_the_seed(packages):
    made = simulator(settle=1)
    domain = made._env.env
    np.random.seed(0)
    expected = np.random.rand(2, 3)
    for trial in (1, 0, 1):
        np.random.rand(5)
        made.reset(trial)
        np.testing.assert_array_equal(domain.sim.model.body_pos, expected)
        assert list(domain.robots[0].gripper.current_action) == [-1, -1]  # of this episode's one action
    assert domain.built == 1  # the scene is not built again for an episode


def test_a_chunk_renders_its_last_picture_only(packages):
    made = simulator()
    made.reset(0)
    domain = made._env.env
    domain.pictures = 0
    outcome = made.step(np.full((5, 7), -3.0, np.float32))
    assert (outcome.executed, outcome.success, outcome.over, outcome.progress) == (5, False, False, 0.0)
    assert domain.pictures == 2
    assert np.all(outcome.observation.frames["agentview"] == 15)
    np.testing.assert_array_equal(domain.taken[10:], -np.ones((5, 7)))  # clipped
    assert set(outcome.seconds) == {"physics", "render"}
    assert min(outcome.seconds.values()) >= 0


def test_a_chunk_stops_at_success_and_shows_it(packages):
    made = simulator(cameras=["wrist"])
    made.reset(0)
    actions = np.zeros((4, 7), np.float32)
    actions[:, 0] = [1, 0, 1, 0]
    assert made.step(actions[:2]).progress == 0.5
    outcome = made.step(actions[2:])
    assert (outcome.executed, outcome.success, outcome.over, outcome.progress) == (1, True, True, 1.0)
    assert np.all(outcome.observation.frames["wrist"] == 13)
    assert list(outcome.observation.frames) == ["wrist"]
    with pytest.raises(RuntimeError, match="libero_goal/0: this episode is over"):
        made.step(actions)
    assert not made.reset(0).state[0] > 10
    assert not made.step(actions[1:2]).success


def test_an_episode_ends_at_its_limit_and_settling_does_not_count(packages):
    made = simulator(limits="openvla", cameras=["wrist"])
    made.reset(0)
    outcomes = [made.step(np.zeros((16, 7), np.float32)) for _ in range(19)]
    assert [outcome.executed for outcome in outcomes] == [16] * 18 + [12]
    assert [outcome.over for outcome in outcomes] == [False] * 18 + [True]
    assert not outcomes[-1].success
    made.close()
    assert made._env.closed


def test_shadows_and_reflections_can_be_left_out(packages):
    assert np.all(simulator()._env.env.sim._render_context_offscreen.scn.flags == 1)
    flags = simulator(shadows=False)._env.env.sim._render_context_offscreen.scn.flags
    assert list(np.flatnonzero(flags == 0)) == [0, 2]


PERTURBED = [
    {
        "id": 1,
        "name": "put_it_there_view_0_0_100_2_352_initstate_0",
        "category": "Camera Viewpoints",
        "difficulty_level": 2,
    },
    {"id": 2, "name": "open_it_light_3", "category": "Light Conditions", "difficulty_level": None},
]


def perturb(packages: Path) -> None:
    """Make the stand-in LIBERO-Plus."""
    file = packages / "libero/libero/benchmark/task_classification.json"
    file.write_text(json.dumps({"libero_goal": PERTURBED, "libero_10": PERTURBED[:1]}))


def test_perturbed_tasks_are_those_of_the_chosen_kinds_and_levels(packages):
    perturb(packages)

    def found(**settings) -> list[tuple[str, str, int]]:
        specs = Libero.tasks({"suites": ["libero_goal", "libero_10"], **settings})
        return [(spec.name, spec.part, spec.trials) for spec in specs]

    goal, light, ten = ("libero_goal/0", "camera", 1), ("libero_goal/1", "light", 1), ("libero_10/0", "camera", 1)
    assert found(perturbations=["camera", "light"]) == [goal, light, ten]
    assert found(perturbations=["light"], levels=None) == [light]
    with pytest.raises(SettingError, match="all of whose tasks are perturbed"):
        found(perturbations=None)
    assert found(perturbations=["camera", "light"], levels=[2, 3]) == [goal, ten], "the other task has no level"
    settings = {"size": 8, "suites": ["libero_goal"], "perturbations": ["light"]}
    with pytest.raises(FileNotFoundError, match=r"has no new_objects, textures.*assets.zip"):
        Libero("libero_goal/1", settings)
    for name in ("new_objects", "textures"):
        (packages / "libero/libero/assets" / name).mkdir()
    made = Libero("libero_goal/1", settings)
    assert (made._env.problem, made.spec.instruction) == ("libero_goal/1.bddl", "open it")
    assert (made.spec.source, made.spec.part) == ("libero_goal/light", "light")


@pytest.mark.parametrize(
    ("plus", "settings", "key", "text"),
    [
        (
            False,
            {"perturbations": ["light"]},
            "perturbations",
            "has no benchmark/task_classification.json; install https",
        ),
        (True, {}, "perturbations", "all of whose tasks are perturbed"),
        (True, {"perturbations": ["lamp"]}, "perturbations", "unknown kind of perturbation"),
        (True, {"perturbations": ["light"], "levels": [6]}, "levels", "difficulty level"),
        (False, {"levels": [1]}, "levels", "needs `perturbations`, too"),
        (True, {"perturbations": ["light"], "suites": ["libero_90"]}, "suites", "has no perturbed tasks of this suite"),
    ],
)
def test_perturbations_that_are_not_there_are_refused_with_their_key(packages, plus, settings, key, text):
    if plus:
        perturb(packages)
    with pytest.raises(SettingError, match=text) as caught:
        Libero.tasks(settings)
    assert caught.value.key == key


def test_missing_meshes_are_named_with_the_ways_to_get_them(packages):
    (packages / "libero/libero/assets/scenes").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        simulator()
    assert str(packages / "libero/libero/assets") in str(caught.value)
    assert f"hf download lerobot/libero-assets --repo-type dataset --local-dir {packages}/home" in str(caught.value)
    with pytest.raises(FileNotFoundError, match="elsewhere should have articulated_objects"):
        simulator(assets=str(packages / "elsewhere"))
    assert len(Libero.tasks({})) == 8  # what tasks there are needs none


def test_meshes_of_the_settings_are_used(packages):
    for name in MESHES:
        (packages / "meshes" / name).mkdir(parents=True)
    simulator(assets=str(packages / "meshes"))
    assert sys.modules["libero.libero"]._assets_path_cache == str(packages / "meshes")


def test_what_does_not_exist_is_refused_with_what_does(packages):
    with pytest.raises(ValueError, match=r"no task 'libero_goal/7'; allowed: .*libero_goal/0 to libero_goal/1, "):
        Libero("libero_goal/7", {})
    for wrong in (
        {"suites": ["libero_91"]},
        {"max_steps": 0},
        {"limits": "mine"},
        {"cameras": ["front"]},
        {"cameras": []},
    ):
        with pytest.raises(ValueError, match=f"LIBERO: invalid value of `{next(iter(wrong))}`: .*; allowed: "):
            Libero.tasks(wrong)
    with pytest.raises(ValueError, match="trial 3; allowed: 0 to 2"):
        simulator().reset(3)


def test_without_libero_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "libero", None)
    with pytest.raises(ImportError, match="make libero-env"):
        Libero.tasks({})


@pytest.mark.parametrize(
    ("quaternion", "expected"),
    [
        ((0, 0, 0, 1), (0, 0, 0)),
        ((1, 0, 0, 0), (math.pi, 0, 0)),
        ((0, math.sin(0.2), 0, math.cos(0.2)), (0, 0.4, 0)),
        ((0, 0, math.sin(0.2), -math.cos(0.2)), (0, 0, 2 * math.pi - 0.4)),  # as robosuite: no shorter way round
    ],
)
def test_axis_angle(quaternion, expected):
    np.testing.assert_allclose(axis_angle(quaternion), expected, atol=1e-7)


REAL = """
import hashlib, json, sys
import numpy as np
from megarl.robots.simulators.libero import Libero, axis_angle

task, meshes = sys.argv[1:]
made = Libero(task, {"size": 64, "assets": meshes or None})
calls = [np.random.RandomState(call).uniform(-1, 1, (8, 7)).astype(np.float32) for call in range(3)]

def digest(seen):
    parts = [np.ascontiguousarray(array).tobytes() for one in seen for array in one]
    return hashlib.sha256(b"".join(parts)).hexdigest()

def episode(trial):
    seen = [made.reset(trial), *(made.step(actions).observation for actions in calls)]
    return [(one.frames["agentview"], one.frames["wrist"], one.state) for one in seen]

def evaluation():  # as OpenVLA's: an environment of its own, every picture rendered
    from libero.libero import benchmark
    from libero.libero.envs import OffScreenRenderEnv
    suite, number = task.split("/")
    tasks = benchmark.get_benchmark(suite)()
    file = tasks.get_task_bddl_file_path(int(number))
    env = OffScreenRenderEnv(bddl_file_name=file, camera_heights=64, camera_widths=64)
    env.seed(0)
    env.reset()
    env.set_init_state(tasks.get_task_init_states(int(number))[0])
    seen = []
    for chunk in [[[0, 0, 0, 0, 0, 0, -1]] * 10, *calls]:
        for action in chunk:
            raw = env.step(np.asarray(action, np.float64))[0]
        state = raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]
        pictures = raw["agentview_image"], raw["robot0_eye_in_hand_image"]
        seen.append((*pictures, np.concatenate(state).astype(np.float32)))
    return seen

first, other, again = episode(0), episode(1), episode(0)
answer = {"first": digest(first), "other": digest(other), "again": digest(again), "evaluation": digest(evaluation())}
print(json.dumps({**answer, "contrast": float(np.std(first[-1][0]))}))
"""


@pytest.mark.campaign("libero")
@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object", "libero_goal", "libero_10"])
def test_the_real_libero_repeats_its_episodes_which_are_those_of_the_published_evaluation(suite):
    """MEGARL_LIBERO_PYTHON names the interpreter of `make libero-env`, MEGARL_LIBERO_ASSETS the meshes."""
    python, meshes = os.environ.get("MEGARL_LIBERO_PYTHON"), os.environ.get("MEGARL_LIBERO_ASSETS", "")
    if python is None:
        pytest.skip("MEGARL_LIBERO_PYTHON is not set")
    done = subprocess.run(
        [python, "-c", REAL, f"{suite}/0", meshes],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["first"] == said["again"] == said["evaluation"]
    assert said["first"] != said["other"]
    assert said["contrast"] > 10  # a picture, not a blank
