"""Demonstrations for robots: LIBERO's files, no-ops, and the project's own form."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from megarl.robots.data.demonstration_sources import find_demonstrations
from megarl.robots.data.demonstrations import (
    Demonstration,
    OpenDemonstration,
    moves,
    open_demonstrations,
    open_libero,
    write_demonstrations,
)
from megarl.robots.simulators.protocol import TaskSpec
from megarl.system.errors import ConfigError, DataError, UnavailableError


def demonstration(task: str = "push", steps: int = 4, seed: int = 0) -> Demonstration:
    random = np.random.default_rng(seed)
    frames = {"agentview": random.integers(0, 255, (steps, 6, 5, 3), np.uint8)}
    states, actions = (random.normal(size=(steps, width)).astype(np.float32) for width in (8, 7))
    return Demonstration(task, frames, states, actions)


def whole(one: OpenDemonstration) -> Demonstration:
    frames = {camera: np.stack([one.frame(camera, step) for step in range(len(one))]) for camera in one.cameras}
    return Demonstration(one.task, frames, one.states, one.actions)


def same(opened: OpenDemonstration, other: Demonstration) -> bool:
    one = whole(opened)
    pairs = [(one.states, other.states), (one.actions, other.actions)]
    pairs += [(one.frames[camera], other.frames[camera]) for camera in one.frames]
    equal = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
    return one.task == other.task and one.frames.keys() == other.frames.keys() and equal


def published_filter(actions: np.ndarray) -> list[int]:
    """The rule in the words of OpenVLA's script, one action after the other."""
    kept: list[int] = []
    for step, action in enumerate(actions):
        still = np.linalg.norm(action[:-1]) < 1e-4
        before = actions[kept[-1]] if kept else None
        if not (still if before is None else still and action[-1] == before[-1]):
            kept.append(step)
    return kept


def test_an_action_that_only_moves_the_gripper_is_kept():
    actions = np.zeros((7, 7), np.float32)
    actions[:, -1] = [-1, -1, -1, 1, 1, 1, -1]
    actions[1, 0] = 0.5
    assert list(np.flatnonzero(moves(actions))) == [1, 3, 6]


def test_no_ops_are_those_of_the_published_script():
    random = np.random.default_rng(0)
    actions = random.normal(size=(200, 7)).astype(np.float32)
    actions[:, :-1] *= random.choice([0, 3e-5, 1], size=(200, 1))
    actions[:, -1] = random.choice([-1, 1], size=200)
    expected = published_filter(actions)
    assert 50 < len(expected) < 190
    assert list(np.flatnonzero(moves(actions))) == expected


def test_a_folder_gives_back_what_was_written_in_order(tmp_path):
    written = [demonstration("push", 4), demonstration("reach", 2, seed=1), demonstration("push", 3, seed=2)]
    assert write_demonstrations(tmp_path, written[:1]) == 1
    assert write_demonstrations(tmp_path, written[1:]) == 2
    assert all(map(same, open_demonstrations(tmp_path), written))
    assert [len(one) for one in open_demonstrations(tmp_path, tasks=["push"])] == [4, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"00000{n}.safetensors" for n in range(3)]


def test_one_demonstration_is_read_at_a_time(tmp_path):
    write_demonstrations(tmp_path, [demonstration(), demonstration(seed=1)])
    (tmp_path / "000001.safetensors").write_bytes(b"no such thing")
    reader = open_demonstrations(tmp_path)
    assert same(next(reader), demonstration())
    with pytest.raises(DataError, match=r"000001.safetensors: this file cannot be read"):
        next(reader)


def test_what_is_no_folder_of_demonstrations_is_refused(tmp_path):
    from safetensors.numpy import save_file

    with pytest.raises(DataError, match="folder has no demonstrations"):
        next(open_demonstrations(tmp_path))
    save_file({"weight": np.zeros(2)}, tmp_path / "000000.safetensors")
    with pytest.raises(DataError, match="this file is not a demonstration"):
        next(open_demonstrations(tmp_path))


def test_parts_of_other_lengths_are_refused():
    one = demonstration()
    with pytest.raises(DataError, match="differ in length"):
        Demonstration("push", one.frames, one.states, one.actions[1:])
    with pytest.raises(DataError, match=r"wrong dtype or shape(?s:.*)uint8 \[T, H, W, 3\]"):
        Demonstration("push", {"agentview": one.frames["agentview"] / 255}, one.states, one.actions)


@pytest.fixture
def libero_file(tmp_path):
    """Eleven demonstrations in LIBERO's layout, so that their names are not in the order of their numbers."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demo.hdf5"
    with h5py.File(path, "w") as file:
        for number in range(11):
            group = file.create_group(f"data/demo_{number}")
            actions = np.full((5, 7), (number + 1) / 20)
            actions[1, :6] = 0
            group["actions"] = actions
            steps = np.arange(5.0)[:, None]
            for name, width in {"ee_pos": 3, "ee_ori": 3, "gripper_states": 2, "joint_states": 7}.items():
                group[f"obs/{name}"] = np.repeat(steps + {"ee_pos": 0, "ee_ori": 10}.get(name, 20), width, axis=1)
            for number_of_camera, name in enumerate(("agentview_rgb", "eye_in_hand_rgb")):
                frames = np.arange(5, dtype=np.uint8)[:, None, None, None] + 100 * number_of_camera
                group[f"obs/{name}"] = np.broadcast_to(frames, (5, 4, 4, 3))
    return path


def test_liberos_file_is_read_in_order_without_no_ops(libero_file):
    found = list(map(whole, open_libero(libero_file, "libero_goal/0")))
    assert [len(one) for one in found] == [4] * 11
    third = found[2]
    assert third.task == "libero_goal/0"
    np.testing.assert_allclose(third.actions, np.full((4, 7), 0.15), rtol=1e-6)
    np.testing.assert_array_equal(third.states[:, 0], [0, 2, 3, 4])  # step 1 does nothing
    np.testing.assert_array_equal(third.states[1], [2, 2, 2, 12, 12, 12, 22, 22])
    np.testing.assert_array_equal(third.frames["wrist"][:, 0, 0, 0], [100, 102, 103, 104])
    assert third.frames["agentview"].shape == (4, 4, 4, 3)
    assert third.states.dtype == third.actions.dtype == np.float32


def test_liberos_file_can_be_read_by_camera(libero_file):
    found = list(map(whole, open_libero(libero_file, "t", cameras=["agentview"])))
    assert list(found[0].frames) == ["agentview"]
    np.testing.assert_allclose([one.actions[0, 0] for one in found], np.arange(1, 12) / 20, rtol=1e-6)


def test_a_part_that_a_file_lacks_is_named(libero_file):
    import h5py

    with h5py.File(libero_file, "a") as file:
        del file["data/demo_3/obs/ee_ori"]
    reader = open_libero(libero_file, "t")
    assert len([next(reader) for _ in range(3)]) == 3
    with pytest.raises(DataError, match=r"demo.hdf5: the group /data/demo_3/obs lacks 'ee_ori'"):
        next(reader)
    with pytest.raises(DataError, match="cannot be read"):
        next(open_libero(libero_file.with_name("other.hdf5"), "t"))


def test_without_h5py_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UnavailableError, match=r"need h5py(.|\n)*pip install h5py"):
        next(open_libero("demo.hdf5", "t"))


def spec(name: str, cameras: tuple[str, ...] = ("agentview",)) -> TaskSpec:
    return TaskSpec(name, name, 5, 10, 7, 8, dict.fromkeys(cameras, (6, 5)))


def test_frames_of_a_folder_are_read_one_step_at_a_time(tmp_path):
    written = [demonstration(), demonstration("reach", 2, 1)]
    write_demonstrations(tmp_path, written)
    opened = list(open_demonstrations(tmp_path))
    for one, whole in zip(opened, written, strict=True):
        assert (one.task, one.cameras, len(one)) == (whole.task, ("agentview",), len(whole))
        np.testing.assert_array_equal(one.states, whole.states)
        np.testing.assert_array_equal(one.actions, whole.actions)
        for step in reversed(range(len(whole))):
            np.testing.assert_array_equal(one.frame("agentview", step), whole.frames["agentview"][step])
    (tmp_path / "000001.safetensors").unlink()
    assert opened[0].frame("agentview", 0).shape == (6, 5, 3)
    with pytest.raises(DataError, match=r"000001\.safetensors"):
        opened[1].frame("agentview", 0)


def test_sources_are_folders_and_liberos_files_in_their_order(tmp_path, libero_file):
    folder = tmp_path / "lr=3"
    write_demonstrations(folder, [demonstration("push"), demonstration("other"), demonstration("reach", 3)])
    tasks = {name: spec(name) for name in ("push", "reach", "goal/0")}
    found = find_demonstrations([f"goal/0={libero_file}", str(folder)], tasks)
    assert [one.task for one in found] == ["goal/0"] * 11 + ["push", "reach"]
    assert found[0].cameras == ("agentview",)
    assert found[12].where == str(folder / "000002.safetensors")
    np.testing.assert_array_equal(found[12].frame("agentview", 2), demonstration("reach", 3).frames["agentview"][2])


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("expert", ["sft.train_files[0]: demonstrations not found", "did you mean 'experts'?"]),
        ("nowhere/at/all", ["demonstrations not found", "'nowhere/at/all'", "TASK=FILE.hdf5"]),
        ("a.hdf5", ["write TASK=a.hdf5"]),
        ("pus=a.hdf5", ["unknown task", "did you mean 'push'?"]),
        ("push=a.hdf5", ["LIBERO's files have no pictures of this camera of push", "'front'"]),
    ],
)
def test_what_is_no_source_is_refused_with_its_place(source, parts):
    with pytest.raises(ConfigError) as caught:
        find_demonstrations([source], {"push": spec("push", ("front",))})
    for part in ["sft.train_files[0]", *parts]:
        assert part in str(caught.value)


def test_demonstrations_of_another_robot_are_refused_with_their_file(tmp_path):
    write_demonstrations(tmp_path, [demonstration()])
    for changes, text in (
        ({"action_dim": 4}, r"000000.safetensors: (.|\n)*does not fit push"),
        ({"cameras": {"wrist": (6, 5)}}, r"000000.safetensors: (.|\n)*no pictures of the camera 'wrist'"),
    ):
        with pytest.raises(DataError, match=text):
            find_demonstrations([str(tmp_path)], {"push": replace(spec("push"), **changes)})
    with pytest.raises(DataError, match="no demonstration of any of the tasks"):
        find_demonstrations([str(tmp_path)], {"reach": spec("reach")})
