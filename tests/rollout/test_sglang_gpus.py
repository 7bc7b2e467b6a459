"""Which GPUs a server sees."""

from typing import Any

import pytest

from megarl.config.run import ClusterConfig
from megarl.config.sglang import SGLangConfig
from megarl.launchers.seats import gpus_of, rank_order
from megarl.rollout.sglang.gpus import SERVER_GPUS, TRAINER_GPUS, most_servers, place_servers, server_gpus
from megarl.rollout.sglang.launch import WorkerPlace
from megarl.system.errors import ConfigError
from megarl.system.processes import nvidia_devices


def seen(workers: int, environment: dict[str, str], present: int, **settings: Any) -> list[tuple[str, ...] | None]:
    """GPUs of two servers of two ranks."""
    config = SGLangConfig(servers=2, tp_size=2, **settings)
    return [server_gpus(config, 2, local, workers, environment, present) for local in (0, 1)]


@pytest.mark.parametrize(
    ("servers", "ranks", "workers", "dealt"),
    [
        (4, 2, [8, 8], [2, 2]),  # beside the workers, or on their GPUs
        (8, 1, [4, 4], [4, 4]),
        (3, 2, [5, 3], [2, 1]),
        (3, 4, [4, 8], [1, 2]),
        (1, 8, [4, 8, 4], [0, 1, 0]),
        (2, 1, [1], [2]),
    ],
)
def test_servers_are_where_workers_have_gpus_to_lend(
    servers: int, ranks: int, workers: list[int], dealt: list[int]
) -> None:
    found = place_servers(servers, ranks, workers)
    assert [len(parts) for parts in found] == dealt
    assert [part for parts in found for part in parts] == [(number, 0) for number in range(servers)]


@pytest.mark.parametrize(
    ("servers", "ranks", "nnodes", "workers", "dealt"),
    [
        (1, 8, 2, [8, 8], [[(0, 0)], [(0, 1)]]),
        (2, 8, 2, [8, 8, 8, 8], [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)]]),
        (2, 4, 2, [8, 8], [[(0, 0), (1, 0)], [(0, 1), (1, 1)]]),
        (2, 4, 2, [4, 8, 4], [[(0, 0)], [(0, 1), (1, 0)], [(1, 1)]]),
        (1, 8, 2, [4, 8, 8], [[], [(0, 0)], [(0, 1)]]),
    ],
)
def test_the_nodes_of_a_server_are_on_machines_of_their_own(
    servers: int, ranks: int, nnodes: int, workers: list[int], dealt: list[list[tuple[int, int]]]
) -> None:
    assert place_servers(servers, ranks, workers, nnodes) == dealt
    assert most_servers(ranks, workers, nnodes) == servers


def test_machines_too_few_or_too_small_hold_no_server() -> None:
    assert most_servers(8, [16], nnodes=2) == 0
    assert most_servers(8, [8, 4], nnodes=2) == 0


def test_a_part_of_a_server_has_the_gpus_of_its_ranks_on_this_machine() -> None:
    config = SGLangConfig(servers=2, tp_size=4, nnodes=2)
    found = [server_gpus(config, 2, local, 4, {}, 8) for local in (0, 1)]
    assert found == [("4", "5"), ("6", "7")]


def test_servers_are_on_the_gpus_after_the_trainers() -> None:
    assert seen(4, {}, 8) == [("4", "5"), ("6", "7")]
    assert seen(2, {"CUDA_VISIBLE_DEVICES": "7,GPU-a,5,4,3,2"}, 8) == [("5", "4"), ("3", "2")]


def test_named_gpus_are_the_machines_own_numbers() -> None:
    assert seen(4, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 8, gpus=[7, 6, 5, 4]) == [("7", "6"), ("5", "4")]


def test_colocated_servers_are_on_the_trainers_and_see_all_of_them() -> None:
    assert seen(4, {}, 8, colocated=True) == [("0", "1", "2", "3"), ("2", "3", "0", "1")]
    assert seen(6, {}, 8, gpus=[2, 3, 4, 5], colocated=True) == [
        ("2", "3", "4", "5", "0", "1"),
        ("4", "5", "2", "3", "0", "1"),
    ]


def test_with_ray_a_worker_sees_only_its_own_and_servers_get_the_others() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "5", TRAINER_GPUS: "5,2,0,7"}
    assert seen(4, environment, 8) == [("1", "3"), ("4", "6")]
    assert seen(4, environment, 8, colocated=True)[0] == ("5", "2", "0", "7")


def test_servers_of_workers_that_lend_their_gpus_get_all_that_no_other_team_has() -> None:
    assert seen(1, {"CUDA_VISIBLE_DEVICES": "5", TRAINER_GPUS: "0,1,2,3"}, 8) == [("4", "5"), ("6", "7")]
    assert seen(1, {"CUDA_VISIBLE_DEVICES": "5", TRAINER_GPUS: ""}, 4) == [("0", "1"), ("2", "3")]


def test_servers_are_on_the_gpus_that_the_launcher_has_reserved() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "5", TRAINER_GPUS: "5,2", SERVER_GPUS: "0,7,1,6"}
    assert seen(2, environment, 8) == [("0", "7"), ("1", "6")]
    assert seen(2, environment, 8, gpus=[3, 4, 6, 7]) == [("3", "4"), ("6", "7")], "the recipe's own word"
    uuids = {TRAINER_GPUS: "GPU-a,GPU-b", SERVER_GPUS: "GPU-c,GPU-d,GPU-e,GPU-f"}
    assert seen(2, uuids, 8) == [("GPU-c", "GPU-d"), ("GPU-e", "GPU-f")]
    with pytest.raises(ConfigError, match=r"need 4 GPUs, but 2 are free"):
        seen(2, {TRAINER_GPUS: "5,2", SERVER_GPUS: "0,7"}, 8)


def test_colocated_servers_are_on_the_trainers_by_whatever_names_ray_tells() -> None:
    environment = {TRAINER_GPUS: "GPU-a,GPU-b,GPU-c,GPU-d"}
    assert seen(4, environment, 8, colocated=True)[0] == ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def test_ray_s_ranks_are_in_the_order_of_their_gpus_numbers() -> None:
    places = [("b", ["0"]), ("a", ["10"]), ("a", ["9"]), ("a", ["GPU-b"]), ("a", ["GPU-a"]), ("a", []), ("a", [])]
    assert rank_order(places) == [5, 6, 2, 1, 4, 3, 0]


def test_ray_s_gpus_of_a_node_are_told_in_the_order_of_its_ranks() -> None:
    places = [("a", ["1"]), ("a", ["0"]), ("b", ["3"])]
    assert [gpus_of(node, places) for node in "ab"] == ["1,0", "3"]
    assert gpus_of("a", [("a", []), ("a", [])]) == ""


def test_servers_are_started_where_the_team_of_their_workers_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterConfig(nproc=8, nnodes=2)
    told = {"RANK": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert WorkerPlace.from_environment(cluster) == WorkerPlace(machine=1, machines=2, is_first=True, workers=1)
    for name in told:
        monkeypatch.delenv(name)
    assert WorkerPlace.from_environment(ClusterConfig(nproc=2)) == WorkerPlace(workers=2)


@pytest.mark.parametrize(
    ("workers", "settings", "reason"),
    [
        (5, {}, "3 are free: this process sees 8, of which the trainer uses 5"),
        (3, {"colocated": True}, "the trainer, whose GPUs they share, has 3"),
        (3, {"gpus": [0, 1]}, "the recipe lists 2"),
    ],
)
def test_a_machine_with_too_few_is_refused(workers: int, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"need 4 GPUs, but {reason}"):
        seen(workers, {}, 8, **settings)


def test_the_server_chooses_where_there_is_no_gpu_or_the_user_has_chosen() -> None:
    assert seen(4, {}, 0) == [None, None]
    assert seen(4, {}, 8, extra_args=["--base-gpu-id=6"]) == [None, None]


def test_gpus_of_a_machine_are_counted_by_their_device_files(tmp_path) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert nvidia_devices(tmp_path) == 2
