"""What a run asks a Ray cluster for."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config.launch import LaunchConfig, SlurmConfig, SlurmTeamConfig
from megarl.config.model import ParallelConfig
from megarl.config.placement import PlacementConfig
from megarl.config.run import ClusterConfig, RunConfig
from megarl.config.sglang import SGLangConfig
from megarl.dag.placement import TeamPlan
from megarl.dag.stage import Role
from megarl.launchers import bundles
from megarl.launchers.bundles import gpus_of_a_node, reserve, whole
from megarl.launchers.seats import resource
from megarl.system.errors import ConfigError


@pytest.fixture(autouse=True)
def no_driver_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "has_nvidia_device", lambda: False)


def recipe(nproc: int, nnodes: int = 1, **servers: Any) -> RunConfig:
    """With servers of the run's own, if any are named."""
    rollout: Any = {"engine": "sglang", "sglang": SGLangConfig(**servers)} if servers else {}
    return RunConfig(name="x", cluster=ClusterConfig(nproc=nproc, nnodes=nnodes), rollout=rollout)


PLACED = PlacementConfig.model_validate(
    {"teams": {"train": {"roles": ["actor"], "devices": 16}, "draw": {"roles": ["rollout"], "devices": 8}}}
)


def teams(*sizes: int, apart: bool = False) -> list[TeamPlan]:
    """The actor's, with the rollout unless it is apart, in the last team."""
    held: list[tuple[Role, ...]] = [(Role.ACTOR,) if apart else (Role.ACTOR, Role.ROLLOUT), (Role.CRITIC,)][
        : len(sizes) - apart
    ]
    held += [(Role.ROLLOUT,)] if apart else []
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [
        TeamPlan(roles[0].value, roles, size, first, ParallelConfig(), ())
        for roles, size, first in zip(held, sizes, firsts, strict=True)
    ]


def gpus(*numbers: int) -> list[dict[str, float]]:
    return [{"CPU": 64.0, "GPU": float(number)} if number else {"CPU": 64.0} for number in numbers]


@pytest.mark.parametrize(
    ("nnodes", "nproc", "nodes", "bundle"),
    [
        (1, 2, [{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 0.5}),
        (2, 2, [{"CPU": 1.0}, {"CPU": 1.0}], {"CPU": 1.0}),
        (1, 2, [{"CPU": 8.0}, {"CPU": 1.0, "GPU": 2.0}], {"CPU": 0.5, "GPU": 1.0}),
        (2, 8, gpus(4, 4), {"CPU": 1.0, "GPU": 1.0}),
    ],
)
def test_workers_of_one_machine_share_the_cpus_of_one_node(
    nnodes: int, nproc: int, nodes: list[dict[str, float]], bundle: dict[str, float]
) -> None:
    found = reserve(recipe(nproc, nnodes), teams(nproc), nodes)
    assert (found.bundles, found.places, found.servers) == ([bundle] * nproc, list(range(nproc)), 0)
    assert found.strategy == ("STRICT_PACK" if nnodes == 1 else "PACK")


def test_cpus_of_nodes_without_gpus_are_for_no_worker() -> None:
    head, small, large = {"CPU": 64.0}, {"CPU": 2.0, "GPU": 4.0}, {"CPU": 32.0, "GPU": 8.0}
    found = reserve(recipe(8, 2), teams(8), [head, small, small])
    assert found.bundles == [{"CPU": 0.5, "GPU": 1.0}] * 8
    found = reserve(recipe(4, 2, servers=2, tp_size=2), teams(4), [head, small, small])
    assert found.bundles == [{"CPU": 2.0, "GPU": 4.0}] * 2
    found = reserve(recipe(8, 2, servers=2, tp_size=4), teams(8), [head, small, large, large])
    assert found.bundles == [{"CPU": 4.0, "GPU": 8.0}] * 2, "the small one has too few GPUs for any machine's share"


def test_servers_have_gpus_beside_the_workers_of_their_machine() -> None:
    found = reserve(recipe(3, servers=2, tp_size=2), teams(2, 1), gpus(8))
    assert found.bundles == [{"CPU": 3.0, "GPU": 7.0}]
    assert (found.worker, found.places, found.servers) == ({"CPU": 1.0, "GPU": 1.0}, [0, 0, 0], 4)

    found = reserve(recipe(4, 2, servers=2, tp_size=4), teams(4), gpus(8, 6, 2))
    assert (found.bundles, found.strategy) == ([{"CPU": 2.0, "GPU": 6.0}] * 2, "STRICT_SPREAD")
    assert (found.places, found.servers) == ([0, 0, 1, 1], 4)


def test_servers_take_the_gpus_of_workers_that_only_ask_them_first() -> None:
    own = reserve(recipe(6, servers=4), teams(2, 4, apart=True), gpus(6))
    assert (len(own.bundles), own.servers) == (6, 0)
    more = reserve(recipe(6, servers=3, tp_size=2), teams(2, 4, apart=True), gpus(8))
    assert (more.bundles, more.servers) == ([{"CPU": 6.0, "GPU": 8.0}], 2)


def test_on_several_machines_servers_are_on_lent_gpus_only() -> None:
    config, plans = recipe(24, 3, servers=4, tp_size=2), teams(16, 8, apart=True)
    config = config.model_copy(update={"placement": PLACED})
    found = reserve(config, plans, gpus(8, 8, 8))
    assert (len(found.bundles), found.strategy, found.servers) == (24, "PACK", 0)
    assert [whole(config, plan) for plan in plans] == [1, 2]
    assert gpus_of_a_node(config, "train") == 8


def test_an_evaluation_has_one_team_beside_its_servers_and_fine_tuning_has_no_servers() -> None:
    config = recipe(24, 3, servers=6, tp_size=2).model_copy(update={"placement": PLACED})
    assert [gpus_of_a_node(config, job) for job in ("train", "eval", "sft")] == [8, 12, 8]
    apart = recipe(8, servers=4, tp_size=2)
    assert [gpus_of_a_node(apart, job) for job in ("train", "eval", "sft")] == [16, 16, 8]
    named = recipe(2, servers=2, gpus=[6, 7])
    assert [gpus_of_a_node(named, job) for job in ("train", "eval", "sft")] == [8, 8, 2]


@pytest.mark.parametrize(
    "servers",
    [
        {"urls": ["http://host:1"]},
        {"servers": 2, "colocated": True},
        {"servers": 2, "gpus": [6, 7]},
        {"servers": 2, "extra_args": ["--base-gpu-id=6"]},
    ],
)
def test_servers_that_are_somewhere_else_reserve_nothing(servers: dict[str, Any]) -> None:
    assert reserve(recipe(2, **servers), teams(2), gpus(2)).servers == 0
    assert reserve(recipe(2, servers=2), teams(2), gpus(0)).servers == 0, "on CPUs"


@pytest.mark.parametrize("nnodes", [1, 2])
def test_too_few_gpus_are_named_at_once(nnodes: int) -> None:
    missing, nodes = (6, "4, 4") if nnodes == 1 else (2, "4, 4")
    with pytest.raises(ConfigError) as caught:
        reserve(recipe(10, nnodes), teams(6, 4), gpus(4, 4))
    text = str(caught.value)
    assert f"{missing} missing" in text
    assert f"actor 6 + critic 4 = 10; nodes have {nodes}" in text
    assert f"allowed: at most {4 * nnodes}, one per worker\n" in text


@pytest.mark.parametrize(
    ("config", "held", "nodes", "words"),
    [
        (
            recipe(3, servers=3, tp_size=2),
            teams(2, 1),
            (8, 4),
            ["1 missing", "actor 2 + critic 1 + SGLang servers 6 = 9; nodes have 8, 4", "at most 8", "colocated=true"],
        ),
        (
            recipe(6, servers=4, tp_size=2),
            teams(2, 4, apart=True),
            (8,),
            ["2 missing", "actor 2 + rollout 4 (lent to servers) + SGLang servers 4 = 10"],
        ),
        (
            recipe(4, 2, servers=2, tp_size=4),
            teams(4),
            (8, 4, 0),
            ["2 missing", "actor 4 + SGLang servers 8 = 12; nodes have 8, 4, 0", "2 nodes of 6 GPUs"],
        ),
    ],
)
def test_servers_without_gpus_say_who_needs_how_many(
    config: RunConfig, held: list[TeamPlan], nodes: tuple[int, ...], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        reserve(config, held, gpus(*nodes))
    for word in words:
        assert word in str(caught.value)


def test_a_machine_with_a_driver_and_no_gpu_in_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "has_nvidia_device", lambda: True)
    with pytest.raises(ConfigError, match=r"cluster\.nproc: (?s:.*)2 missing"):
        reserve(recipe(2), teams(2), gpus(0))


def test_workers_of_a_team_with_nodes_of_its_own_are_bound_to_these() -> None:
    config = RunConfig(
        name="x",
        cluster=ClusterConfig(nproc=6, nnodes=2),
        launch=LaunchConfig(slurm=SlurmConfig(teams={"rollout": SlurmTeamConfig(nodes=1)})),
    )
    nodes = [{"CPU": 64.0, "GPU": 4.0, resource(""): 1000.0}, {"CPU": 64.0, "GPU": 2.0, resource("rollout"): 1000.0}]
    found = reserve(config, teams(4, 2, apart=True), nodes)
    assert [[name for name in bundle if name.startswith("megarl")] for bundle in found.bundles] == [
        *[["megarl_other_teams"]] * 4,
        *[["megarl_team_rollout"]] * 2,
    ]
    # A Ray whose nodes are nobody's, such as one on a laptop: workers are anywhere.
    plain = reserve(config, teams(4, 2, apart=True), gpus(4, 2))
    assert all(bundle.keys() == {"CPU", "GPU"} for bundle in plain.bundles)


def test_servers_on_more_gpus_do_not_go_with_nodes_of_teams() -> None:
    config = recipe(4, 2, servers=2).model_copy(
        update={"launch": LaunchConfig(slurm=SlurmConfig(teams={"critic": SlurmTeamConfig(nodes=1)}))}
    )
    nodes = [node | {resource(name): 1000.0} for node, name in zip(gpus(8, 8), ("", "critic"), strict=True)]
    with pytest.raises(ConfigError, match=r"launch\.slurm\.teams: servers with their own GPUs"):
        reserve(config, teams(2, 2), nodes)
