"""Meta-World 3: the 50 tasks of MT50, a Sawyer arm over a table, 50 start states each. Needs metaworld and OpenGL.

A task has Meta-World's name, reach-v3 to window-close-v3. Meta-World has no instructions; those below were written for
this project. A trial is a number of MT1's `train_tasks` with `seed`; after these 50 come those of `seed` + 1, and so
on. An action is 4 numbers, -1 to 1: the gripper's motion in x, y and z, and the force of its fingers. The state is 4
numbers: position of the gripper, and how far it is open; only the picture shows the object and its goal.

Pictures of the corner cameras, which Meta-World renders upside down, are turned by 180 degrees. There are no shadows:
without a GPU they take most of a picture's time. `plain` pictures have no textures, one light, no background, hard
edges, and meshes without details of less than about half a pixel: they take a tenth of the remaining time.

`progress` is Meta-World's `in_place_reward` after the last environment step, 1 at success: the closeness, 0 to 1, of
the moved object to its goal, by the task's distances. In many tasks it changes little until the arm arrives.
"""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from .protocol import Frame, Numbers, Observation, Outcome, Simulator, TaskSpec

INSTRUCTIONS = {
    "assembly-v3": "pick up the nut and place it onto the peg",
    "basketball-v3": "dunk the basketball into the basket",
    "bin-picking-v3": "pick the object from one bin and place it into the other",
    "box-close-v3": "pick up the cover and close the box with it",
    "button-press-topdown-v3": "press the button from the top",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from the top",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "reach around the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the nut off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "hammer the nail into the wall",
    "hand-insert-v3": "put the gripper into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "insert the peg into the hole from the side",
    "peg-unplug-side-v3": "unplug the peg to the side",
    "pick-out-of-hole-v3": "pick the object out of the hole",
    "pick-place-v3": "pick up the object and hold it at the goal",
    "pick-place-wall-v3": "pick up the object and bring it over the wall to the goal",
    "plate-slide-back-side-v3": "slide the plate out of the net to the side",
    "plate-slide-back-v3": "slide the plate back out of the net",
    "plate-slide-side-v3": "slide the plate into the net on the side",
    "plate-slide-v3": "slide the plate into the net",
    "push-back-v3": "pull the object back to the goal",
    "push-v3": "push the object to the goal",
    "push-wall-v3": "push the object around the wall to the goal",
    "reach-v3": "reach the goal with the gripper",
    "reach-wall-v3": "reach over the wall to the goal with the gripper",
    "shelf-place-v3": "place the object on the shelf",
    "soccer-v3": "push the ball into the goal",
    "stick-pull-v3": "pull the container with the stick",
    "stick-push-v3": "push the container with the stick",
    "sweep-into-v3": "sweep the object into the hole",
    "sweep-v3": "sweep the object off the table",
    "window-close-v3": "close the window",
    "window-open-v3": "open the window",
}
BLOCK = 50  # number of start states that Meta-World makes from one seed
CAMERAS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
#: Ways of rendering, each with the system libraries that it loads and the Debian packages that hold them.
LIBRARIES = {
    "egl": {"EGL": "libegl1", "OpenGL": "libopengl0"},
    "osmesa": {"OSMesa": "libosmesa6"},
    "glfw": {"glfw": "libglfw3"},
}
LARGEST = 640  # largest height and width of MuJoCo's offscreen buffer


class MetaWorld(Simulator):
    """One task of MT50."""

    settings: ClassVar[Mapping[str, Any]] = {
        "max_steps": 150,  # environment steps of an episode
        "size": 64,  # height and width of the pictures
        "cameras": ("corner2",),
        "seed": 0,  # seed of Meta-World's start states
        "trials": BLOCK,  # number of start states
        "plain": False,  # simpler pictures, rendered in a tenth of the time
    }

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> list[TaskSpec]:
        """Return the 50 tasks of Meta-World."""
        chosen = {**cls.settings, **settings}
        _import()
        if not chosen["cameras"] or set(chosen["cameras"]) - set(CAMERAS):
            raise ValueError(
                f"Meta-World: invalid value of `cameras`: {list(chosen['cameras'])}; allowed: one or more of "
                f"{', '.join(CAMERAS)}"
            )
        for key, largest in (("size", LARGEST), ("max_steps", 10**6), ("trials", 10**6)):
            if not 1 <= chosen[key] <= largest:
                raise ValueError(f"Meta-World: invalid value of `{key}`: {chosen[key]}; allowed: 1 to {largest}")
        return [
            TaskSpec(
                name=name,
                instruction=instruction,
                trials=chosen["trials"],
                max_steps=chosen["max_steps"],
                action_dim=4,
                state_dim=4,
                cameras=dict.fromkeys(chosen["cameras"], (chosen["size"], chosen["size"])),
            )
            for name, instruction in INSTRUCTIONS.items()
        ]

    def __init__(self, task: str, settings: Mapping[str, Any]) -> None:
        chosen, self.spec = {**self.settings, **settings}, self.find_task(task, settings)
        metaworld = _import()
        from metaworld.policies import ENV_POLICY_MAP

        benchmark = metaworld.MT1(task, seed=chosen["seed"])
        self._blocks, self._seed, self._policy_class = {0: benchmark.train_tasks}, chosen["seed"], ENV_POLICY_MAP[task]
        self._env = benchmark.train_classes[task]()
        self._env.max_path_length = 10**9  # turns Meta-World's own limit of steps off
        self._renderer = _renderer(self._env.model, chosen["size"], chosen["plain"])
        self._seen: Any = None
        self._info: Mapping[str, Any] = {}

    def reset(self, trial: int) -> Observation:
        """Begin an episode in start state `trial`."""
        self.begin(trial)
        block, place = divmod(trial, BLOCK)
        if block not in self._blocks:
            self._blocks[block] = _import().MT1(self.spec.name, seed=self._seed + block).train_tasks
        self._env.set_task(self._blocks[block][place])
        self._env._did_see_sim_exception = False
        self._seen, _ = self._env.reset()
        self._policy = self._policy_class()
        return self._observation()

    def step(self, actions: Numbers) -> Outcome:
        """Execute actions [K, 4]: up to K environment steps, fewer at success or the limit."""
        outcome = self.execute(np.clip(np.asarray(actions, np.float32), -1, 1), self._act, self._observation)
        progress = 1.0 if outcome.success else float(np.clip(self._info["in_place_reward"], 0, 1))
        return replace(outcome, progress=progress)

    def _act(self, action: Numbers) -> bool:
        self._seen, _, _, _, self._info = self._env.step(action)
        return bool(self._info["success"])

    def expert(self) -> Numbers:
        """Return the action [4] of Meta-World's scripted policy, which reads the simulator's true state."""
        return np.clip(np.asarray(self._policy.get_action(self._seen), np.float32), -1, 1)

    def close(self) -> None:
        """Free the renderer and the model."""
        self._renderer.close()
        self._env.close()

    def _observation(self) -> Observation:
        frames: dict[str, Frame] = {}
        for camera in self.spec.cameras:
            self._renderer.update_scene(self._env.data, camera=camera)
            picture: Frame = self._renderer.render()
            frames[camera] = np.ascontiguousarray(picture[::-1, ::-1]) if camera.startswith("corner") else picture
        return Observation(frames, np.asarray(self._seen[:4], np.float32))


def _renderer(model: Any, size: int, plain: bool) -> Any:
    """Return a renderer of pictures of `size` x `size`; with `plain` it omits textures and small details.

    It changes the model's quality settings and meshes, which MuJoCo reads only before the first picture.
    """
    import mujoco

    model.vis.quality.shadowsize = 0
    if not plain:
        return mujoco.Renderer(model, size, size)
    model.vis.quality.offsamples = 0
    # MuJoCo clears its whole offscreen buffer for every picture, so make it no larger than the picture.
    model.vis.global_.offwidth = model.vis.global_.offheight = size
    model.mat_texid[:] = -1
    model.light_active[1:] = 0
    for mesh in range(model.nmesh):
        _coarsen(model, mesh, cell=1 / size)  # about half a pixel, because pictures of the corner cameras show 2 m
    renderer = mujoco.Renderer(model, size, size)
    flags = mujoco.mjtRndFlag
    for flag in (flags.mjRND_SHADOW, flags.mjRND_REFLECTION, flags.mjRND_SKYBOX, flags.mjRND_FOG, flags.mjRND_HAZE):
        renderer.scene.flags[flag] = 0
    return renderer


def _coarsen(model: Any, mesh: int, cell: float) -> None:
    """Draw the vertices of a mesh that lie in one cube of side `cell` (metres) as one, and drop triangles without area.

    The arm's 60,000 triangles, most of them smaller than a pixel, take most of a picture's time without a GPU. Physics
    stays the same: contacts are computed from vertices and convex hulls, which this function does not change.
    """
    first, number = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
    _, corners, cubes = np.unique(np.floor(vertices / cell), axis=0, return_index=True, return_inverse=True)
    faces = corners[cubes.reshape(-1)][model.mesh_face[first : first + number]]
    rows = np.sort(faces, axis=1)
    triangles = (rows[:, 0] < rows[:, 1]) & (rows[:, 1] < rows[:, 2])
    _, places = np.unique(rows[triangles], axis=0, return_index=True)
    chosen = np.flatnonzero(triangles)[places]
    if not len(chosen):  # no triangle would keep an area, and the mesh would be invisible: leave it as it is
        return
    for array in (model.mesh_facenormal, model.mesh_facetexcoord):
        array[first : first + len(chosen)] = array[first + chosen]
    model.mesh_face[first : first + len(chosen)] = faces[chosen]
    model.mesh_facenum[mesh] = len(chosen)


def _import() -> Any:
    """Choose MuJoCo's renderer, which is `MUJOCO_GL` if set, else EGL or OSMesa; then import and return `metaworld`."""
    if not os.environ.get("MUJOCO_GL"):
        os.environ["MUJOCO_GL"] = next((way for way in ("egl", "osmesa") if not _missing(way)), "egl")
    way = os.environ["MUJOCO_GL"].lower()
    if missing := _missing(way):
        raise RuntimeError(
            f"Meta-World cannot render with MUJOCO_GL={way}: the system lacks {', '.join(missing)}. "
            f"Run `apt install {' '.join(missing)}`, or set MUJOCO_GL to another of {', '.join(LIBRARIES)}"
        )
    try:
        import metaworld
    except ImportError as error:
        raise ImportError(
            "metaworld is not installed in this interpreter: run `make metaworld-env`, and set `python` to its "
            f"interpreter ({error})"
        ) from error
    return metaworld


def _missing(way: str) -> list[str]:
    """Return the Debian packages that MuJoCo's renderer `way` (such as egl) needs and this machine lacks."""
    return [package for name, package in LIBRARIES.get(way, {}).items() if not ctypes.util.find_library(name)]
