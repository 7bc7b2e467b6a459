"""LIBERO: a Franka arm, four suites of ten tasks and one of 90, 50 start states each. Needs hf-libero and its meshes.

A task is `SUITE/NUMBER`, libero_spatial/0 to libero_90/89, in LIBERO's order. A trial is one of its start states;
`settle` actions that do nothing come first and are not counted. An action is 7 numbers, -1 to 1: change of position and
of orientation, and the gripper, -1 opens and 1 closes. `robot.gripper` converts a policy's other convention (0 to 1,
the other sign, values between). The state is 8 numbers: position of the gripper, its axis-angle orientation, and its
two fingers. Pictures are as robosuite renders them: upside down, which OpenVLA's pre-processing corrects by a turn of
180 degrees.

Pictures are those of LIBERO's own observations, taken one physics step (2 ms) before the end of an environment step.
They are rendered only for the last action of a chunk. Fixtures (a stove, a cabinet) are not part of a start state: in
every episode they are where `seed(0)` and one reset put them, as in OpenVLA's evaluation.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .libero_plus import ASSETS, check_kinds, perturbed_tasks
from .protocol import Numbers, Observation, Outcome, Simulator, TaskSpec

#: Suite -> environment steps after which OpenVLA's evaluation ends an episode.
SUITES = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
#: Value of `limits` -> suite -> limit in environment steps.
LIMITS: Mapping[str, Mapping[str, int]] = {"common": dict.fromkeys(SUITES, 512), "openvla": SUITES}
#: Camera -> its name in robosuite.
CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
NOTHING = np.array([0, 0, 0, 0, 0, 0, -1], np.float64)
MESHES = ("articulated_objects", "stable_scanned_objects", "turbosquid_objects", "stable_hope_objects", "scenes")
ATTEMPTS = 100  # attempts to place fixtures; LIBERO itself tries for ever


class Libero(Simulator):
    """One task of LIBERO."""

    settings: ClassVar[Mapping[str, Any]] = {
        # all suites but libero_90, whose 90 tasks are used only if a recipe names it
        "suites": tuple(name for name in SUITES if name != "libero_90"),
        "limits": "common",  # environment steps of an episode: 512 in all suites; `openvla`: by suite, 220 to 520
        "max_steps": None,  # environment steps of an episode; overrides `limits`
        "size": 256,  # height and width of the pictures
        "cameras": tuple(CAMERAS),
        "settle": 10,  # number of actions that do nothing, while objects placed in the air fall
        "shadows": True,  # shadows and reflections: up to a third of a picture's time without a GPU
        # kinds of LIBERO-Plus' perturbations, names in `PERTURBATIONS` of libero_plus.py; empty: LIBERO's own tasks
        "perturbations": (),
        "levels": (),  # difficulty levels of these perturbations, 1 to 5; empty: all
        "assets": None,  # folder of the meshes, if LIBERO does not find it by itself
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the tasks of all `suites`, in LIBERO's order."""
        chosen = {**cls.settings, **settings}
        return [spec for suite in chosen["suites"] for spec in _specs(suite, chosen)]

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        chosen = {**self.settings, **settings}
        _check(chosen)
        suite, number = _find(task, chosen["suites"])
        suite_tasks = _suite(suite)
        self.spec = _spec(suite, number, suite_tasks, chosen)
        self._settle = int(chosen["settle"])
        _use_meshes(chosen["assets"], perturbed=bool(chosen["perturbations"]))
        self._states = np.asarray(suite_tasks.get_task_init_states(number))
        with _silent():
            self._env = _construct(suite_tasks.get_task_bddl_file_path(number), self.spec.cameras)
        self._place()
        self._sensors = {name: _OnDemand(self._env.env, CAMERAS[name]) for name in self.spec.cameras}
        if not chosen["shadows"]:
            self._without_shadows()

    def _place(self) -> None:
        """Put the fixtures where one reset after `seed(0)` puts them; resets of episodes do not rebuild the scene."""
        self._env.seed(0)
        self._reset()
        model = self._env.env.sim.model
        self._placed = (np.array(model.body_pos), np.array(model.body_quat))
        self._gripper = self._env.env.robots[0].gripper
        self._grip = np.array(self._gripper.current_action)
        self._env.env.hard_reset = False

    def _reset(self) -> None:
        from robosuite.utils.errors import RandomizationError

        for _ in range(ATTEMPTS):
            with contextlib.suppress(RandomizationError):
                self._env.env.reset()
                return
        raise RuntimeError(
            f"{self.spec.name}: LIBERO could not place the objects of the scene in {ATTEMPTS} attempts; leave the "
            "task's suite out of robot.simulator.suites"
        )

    def _without_shadows(self) -> None:
        import mujoco

        flags = self._env.env.sim._render_context_offscreen.scn.flags
        flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0

    def _as_constructed(self) -> None:
        """Reset the state that a reset without rebuilding the scene would keep from the last episode."""
        for observable in self._env.env._observables.values():
            observable.reset()
            observable._sampled = False
        self._env.seed(0)
        self._reset()
        model = self._env.env.sim.model
        model.body_pos[:], model.body_quat[:] = self._placed
        self._gripper.current_action = self._grip.copy()

    def reset(self, trial: int) -> Observation:
        """Begin an episode in LIBERO's start state `trial`, and let the objects settle."""
        self.begin(trial)
        self._render(False)
        self._as_constructed()
        self._render(self._settle == 0)
        raw = self._env.set_init_state(self._states[trial])
        for left in reversed(range(self._settle)):
            self._render(left == 0)
            raw = self._env.step(NOTHING)[0]
        return self._observation(raw)

    def step(self, actions: Numbers) -> Outcome:
        """Execute actions [K, 7]: up to K environment steps, fewer at success or the limit."""
        self.refuse_ended()
        began, before = time.perf_counter(), self._render_seconds()
        chunk = np.clip(np.asarray(actions, np.float64), -1, 1)[: self.spec.max_steps - self._steps]
        executed, success = 0, False
        for action in chunk:
            executed += 1
            self._render(executed == len(chunk))
            raw, _, success, _ = self._env.step(action)
            if success:
                break
        # the picture after this action was not requested, because the chunk was expected to continue
        if success and executed < len(chunk):
            self._render(True)
            self._env.env._update_observables(force=True)
            raw = self._env.env._get_observations()
        self._steps += executed
        self._over = bool(success) or self._steps >= self.spec.max_steps
        render = self._render_seconds() - before
        seconds = {"physics": time.perf_counter() - began - render, "render": render}
        goals = self._env.env.parsed_problem["goal_state"]
        progress = sum(bool(self._env.env._eval_predicate(goal)) for goal in goals) / len(goals)
        return Outcome(self._observation(raw), executed, bool(success), self._over, progress, seconds)

    def _render(self, wanted: bool) -> None:
        for sensor in self._sensors.values():
            sensor.wanted = wanted

    def _render_seconds(self) -> float:
        return sum(sensor.seconds for sensor in self._sensors.values())

    def _observation(self, raw: Mapping[str, Any]) -> Observation:
        frames = {name: np.asarray(raw[f"{CAMERAS[name]}_image"], np.uint8) for name in self.spec.cameras}
        parts = raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]
        return Observation(frames, np.concatenate(parts).astype(np.float32))

    def close(self) -> None:
        """Free the renderer and the model."""
        self._env.close()


class _OnDemand:
    """A camera's sensor that renders only on request and reports the time it took."""

    def __init__(self, env: Any, camera: str) -> None:
        self.wanted, self.seconds = True, 0.0
        observable = env._observables[f"{camera}_image"]
        self._sensor: Callable[[Any], Any] = observable._sensor
        self._blank = np.zeros_like(self._sensor({}))
        self.__modality__ = self._sensor.__modality__
        observable.set_sensor(self)

    def __call__(self, cache: Any) -> Any:
        if not self.wanted:
            return self._blank
        began = time.perf_counter()
        picture = self._sensor(cache)
        self.seconds += time.perf_counter() - began
        return picture


def axis_angle(quaternion: Sequence[float]) -> Any:
    """Return the rotation vector [3] of a unit quaternion (x, y, z, w); no rotation is (0, 0, 0)."""
    xyz, w = np.asarray(quaternion[:3], np.float64), float(np.clip(quaternion[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    return np.zeros(3) if np.isclose(sine, 0.0) else xyz * 2.0 * np.arccos(w) / sine


def _construct(problem: str, cameras: Mapping[str, tuple[int, int]]) -> Any:
    from libero.libero.envs import OffScreenRenderEnv

    ((height, width),) = set(cameras.values())
    return OffScreenRenderEnv(
        bddl_file_name=problem,
        camera_names=[CAMERAS[name] for name in cameras],
        camera_heights=height,
        camera_widths=width,
        ignore_done=True,  # turns robosuite's own limit of 1000 steps off
    )


def _specs(suite: str, chosen: Mapping[str, Any]) -> list[TaskSpec]:
    """Return the tasks of a suite: all of LIBERO's, or LIBERO-Plus' with the chosen perturbations and levels."""
    _check(chosen)
    tasks, root = _suite(suite), _prepare()
    perturbations, levels = chosen["perturbations"] or (), chosen["levels"] or ()
    check_kinds(root, perturbations, levels)
    if not perturbations:
        return [_spec(suite, number, tasks, chosen) for number in range(tasks.get_num_tasks())]
    kinds = perturbed_tasks(root, suite, perturbations, levels)
    return [_spec(suite, number, tasks, chosen, kind) for number, kind in kinds.items()]


def _spec(suite: str, number: int, tasks: Any, chosen: Mapping[str, Any], kind: str = "") -> TaskSpec:
    """Return task `number` of a suite; `kind`: its kind of perturbation, looked up if empty."""
    if chosen["perturbations"] and not kind:
        kind = perturbed_tasks(_prepare(), suite, chosen["perturbations"], chosen["levels"] or ())[number]
    return TaskSpec(
        name=f"{suite}/{number}",
        instruction=tasks.get_task(number).language,
        # LIBERO-Plus plays each perturbed task once, from the first of LIBERO's start states.
        trials=1 if kind else len(tasks.get_task_init_states(number)),
        max_steps=chosen["max_steps"] or LIMITS[chosen["limits"]][suite],
        action_dim=len(NOTHING),
        state_dim=8,
        cameras=dict.fromkeys(chosen["cameras"], (chosen["size"], chosen["size"])),
        source=f"{suite}/{kind}" if kind else "",
        part=kind,
    )


def _check(chosen: Mapping[str, Any]) -> None:
    """Raise ValueError if the setting `limits`, `max_steps` or `cameras` is invalid."""
    limits = LIMITS.get(chosen["limits"])
    if limits is None:
        raise ValueError(f"LIBERO: invalid value of `limits`: {chosen['limits']!r}; allowed: {', '.join(LIMITS)}")
    most = chosen["max_steps"]
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(
            f"LIBERO: invalid value of `max_steps`: {most!r}; allowed: an integer above 0, or null to use `limits`"
        )
    if not chosen["cameras"] or set(chosen["cameras"]) - set(CAMERAS):
        cameras = list(chosen["cameras"])
        raise ValueError(f"LIBERO: invalid value of `cameras`: {cameras}; allowed: one or more of {', '.join(CAMERAS)}")


def _find(task: str, suites: Sequence[str]) -> tuple[str, int]:
    """Return suite and number of a task."""
    sizes = {suite: _suite(suite).get_num_tasks() for suite in suites}
    for suite, size in sizes.items():
        for number in range(size):
            if task == f"{suite}/{number}":
                return suite, number
    allowed = ", ".join(f"{suite}/0 to {suite}/{size - 1}" for suite, size in sizes.items())
    raise ValueError(f"LIBERO has no task {task!r}; allowed: {allowed}")


def _suite(name: str) -> Any:
    """Return LIBERO's object for a suite; the first call imports LIBERO."""
    if name not in SUITES:
        raise ValueError(f"LIBERO: invalid value of `suites`: {name!r}; allowed: {', '.join(SUITES)}")
    _prepare()
    with _silent():
        from libero.libero import benchmark

        return benchmark.get_benchmark(name)()


def _prepare() -> Path:
    """Write the configuration that `import libero.libero` would ask for on standard input; return LIBERO's folder."""
    try:
        import libero
    except ImportError as error:
        raise ImportError(
            "LIBERO is not installed in this interpreter: run `make libero-env`, and set `python` to its interpreter "
            f"({error})"
        ) from error
    root = Path(libero.__file__).parent / "libero"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megarl"
    default = cache / "libero-config" / hashlib.sha256(str(root).encode()).hexdigest()[:12]
    folder = Path(os.environ.setdefault("LIBERO_CONFIG_PATH", str(default)))
    if not (folder / "config.yaml").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        names = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "datasets", "assets": "assets"}
        paths = {"benchmark_root": str(root), **{key: str(root / name) for key, name in names.items()}}
        partial = folder / f".{os.getpid()}"
        partial.write_text(json.dumps(paths))  # JSON is valid YAML, which LIBERO reads
        partial.replace(folder / "config.yaml")
    software = not Path("/dev/nvidia0").exists() and ctypes.util.find_library("OSMesa")
    os.environ.setdefault("MUJOCO_GL", "osmesa" if software else "egl")
    return root


def _use_meshes(configured: str | None, *, perturbed: bool) -> None:
    """Make LIBERO use the meshes in a local folder. Without this it would download them, in every process at once.

    For the `perturbed` tasks of LIBERO-Plus, whose package contains all meshes, only check that they are there.

    Raises:
        FileNotFoundError: meshes are missing; the message says how to get them.
    """
    root = _prepare()
    if perturbed:
        missing = [name for name in (*MESHES, *ASSETS) if not (root / "assets" / name).is_dir()]
        if missing:
            raise FileNotFoundError(
                f"LIBERO-Plus' assets are missing: {root / 'assets'} has no {', '.join(missing)}. Run `hf download "
                f"Sylvest/LIBERO-plus assets.zip --repo-type dataset`, and unpack assets.zip in {root}"
            )
        return
    places = [Path(configured).expanduser()] if configured else [root / "assets", Path.home() / ".cache/libero/assets"]
    for folder in places:
        if all((folder / name).is_dir() for name in MESHES):
            import libero.libero

            libero.libero._assets_path_cache = str(folder)
            return
    raise FileNotFoundError(
        f"LIBERO's meshes are missing: {' and '.join(map(str, places))} should have {', '.join(MESHES)}. "
        "The package does not contain them (206 MB). Run `hf download lerobot/libero-assets --repo-type dataset "
        f"--local-dir {places[-1]}`, or `git clone https://github.com/Lifelong-Robot-Learning/LIBERO` "
        "and set the environment's `assets` to LIBERO/libero/libero/assets"
    )


def _silent() -> contextlib.AbstractContextManager[Any]:
    """Redirect standard output, which may be a pipe, to standard error while LIBERO and robosuite load."""
    return contextlib.redirect_stdout(sys.stderr)
