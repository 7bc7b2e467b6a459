"""A recipe for GPUs says how many a machine needs, and advice about machines keeps the teams."""

from __future__ import annotations

import pytest

from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.recipes.components import COMPONENTS

#: Three machines that train and one with eight servers, eight GPUs each.
RECIPE = "grpo_async_qwen3_8b_32gpu"
EIGHT = ("rollout.sglang={servers: 8, tp_size: 1}",)
ONE = ("placement=!replace {}", "async=!replace {}")


def checks_of(*overrides, names=("machines", "placement"), job="train", launcher="ray"):
    config = load_config(RECIPE, [*EIGHT, *overrides], components=COMPONENTS)
    found = check_config(config, job=job, launcher=launcher, here=False).items
    return [check for check in found if check.name in names and check.status != "ok"]


def test_a_recipe_for_gpus_says_how_many_a_machine_has():
    config = load_config(RECIPE, components=COMPONENTS)
    said = [check.message for check in check_config(config, here=False).items if check.name == "machines"]
    assert "4 machines of 8 GPUs (8 for workers, 0 for servers beside them)" in said
    assert checks_of() == []


@pytest.mark.parametrize(
    ("overrides", "words", "fix"),
    [
        (["placement.teams.draw.devices=16", "cluster.nproc=40"], "4 machines of 10 GPUs", "set cluster.nnodes=5"),
        (["cluster.nnodes=1"], "1 machine of 32 GPUs", "set cluster.nnodes=4"),
        (
            ["cluster={nproc: 4, nnodes: 1}", "placement.teams={train: {devices: 2}, draw: {devices: 2}}",
             "rollout.sglang.servers=8"],
            "1 machine of 10 GPUs (4 for workers, 6 for servers",
            "set placement.teams.draw.devices=8 cluster.nproc=10 cluster.nnodes=2",
        ),
        ([*ONE], "4 machines of 10 GPUs (8 for workers, 2 for servers", "set cluster.nnodes=8"),
        (
            [*ONE, "cluster={nproc: 8, nnodes: 1}", "rollout.sglang.servers=7"],
            "1 machine of 15 GPUs",
            "change cluster.nnodes and rollout.sglang.servers together",
        ),
    ],
)  # fmt: skip
def test_more_gpus_than_a_machine_has_are_warned_of(overrides, words, fix):
    found = [check for check in checks_of(*overrides) if check.key == "cluster.nnodes"]
    assert [(check.status, check.name) for check in found] == [("warn", "machines")]
    assert words in found[0].message
    assert found[0].fix.startswith(fix)
    fixed = fix.removeprefix("set ").split()
    if len(fixed) < 4:  # else it says which keys go together
        assert [check for check in checks_of(*overrides, *fixed) if check.status == "fail"] == []
        assert [check for check in checks_of(*overrides, *fixed) if check.key == "cluster.nnodes"] == []


@pytest.mark.parametrize(
    ("job", "overrides", "fix"),
    [
        ("eval", ["rollout.sglang={servers: 4, tp_size: 2}"], "change cluster.nnodes and rollout.sglang"),
        ("train", ["cluster={nproc: 4, nnodes: 1}", "placement.teams={train: {devices: 2}, draw: {devices: 2}}",
                   "rollout.sglang={servers: 1, tp_size: 8}"], "change cluster.nnodes and rollout.sglang.servers"),
        ("train", [*ONE, "cluster={nproc: 8, nnodes: 1}", "rollout.sglang={servers: 1, tp_size: 8}"], "change"),
    ],
)  # fmt: skip
def test_a_server_stays_whole_in_what_is_advised(job, overrides, fix):
    (check,) = [check for check in checks_of(*overrides, job=job) if check.key == "cluster.nnodes"]
    assert check.fix.startswith(fix)


def test_a_machine_has_the_gpus_that_the_recipe_says():
    assert [check.key for check in checks_of("cluster.nnodes=2")] == ["cluster.nnodes"]
    for launcher in ("slurm", "kubernetes"):
        assert checks_of("cluster.nnodes=2", f"launch.{launcher}.gpus_per_node=16") == []


@pytest.mark.parametrize(
    ("job", "overrides"),
    [
        ("sft", []),
        ("train", ["rollout.sglang={urls: [http://a:1], colocated: false}"]),
        ("train", ["cluster.device_memory_gb=null", "cluster.nnodes=1"]),
        ("train", ["launch.slurm.teams={draw: {nodes: 1}}", "cluster.nnodes=2"]),
    ],
)
def test_gpus_that_this_run_does_not_take_from_its_machines_do_not_count(job, overrides):
    assert [check for check in checks_of(*overrides, job=job) if check.key == "cluster.nnodes"] == []


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (["placement.teams.draw.devices=16"], "set cluster.nproc=40 cluster.nnodes=5, or other"),
        (["placement.teams.draw.devices=16", "cluster={nproc: 48, nnodes: 5}"], "set cluster.nproc=40, or other"),
        (["cluster={nproc: 30, nnodes: 3}"], "set cluster.nproc=32 cluster.nnodes=4, or other"),
        (["placement.teams.draw.devices=10"], "add up to 32 (the run as it is) or 40 (cluster.nproc=40 cluster.nnodes"),
        (["cluster={nproc: 8, nnodes: 1}"], "set cluster.nproc=32 cluster.nnodes=4, or other"),
        (["cluster={nproc: 8, nnodes: 1, device_memory_gb: null}"], "set cluster.nproc=32, or other"),
        (["cluster.nproc=16"], "set cluster.nproc=32, or other"),
        (
            ["placement.teams.draw.devices=16", "launch.slurm.teams={draw: {nodes: 1}}"],
            "set cluster.nproc=40, or other",
        ),
    ],
)  # fmt: skip
def test_teams_with_another_number_of_devices_are_told_their_machines(overrides, fix):
    (check,) = [check for check in checks_of(*overrides) if check.key == "placement.teams"]
    assert fix in check.fix


def test_workers_that_do_not_fill_the_machines_keep_their_teams():
    (check,) = checks_of("cluster.nnodes=3", names=("machines", "placement", "servers"))[:1]
    assert (check.key, check.status) == ("cluster.nnodes", "fail")
    assert check.fix.startswith("set cluster.nnodes=4, or change placement.teams, cluster.nproc")
    assert checks_of("cluster.nnodes=4") == []
    odd = checks_of("cluster={nproc: 34, nnodes: 3}", "placement.teams.draw.devices=10", "rollout.sglang.servers=10")
    (check,) = [check for check in odd if check.status == "fail"]
    assert check.fix.startswith("change placement.teams, cluster.nproc and cluster.nnodes together")
    (check,) = checks_of("cluster.nnodes=3", *ONE)
    assert (check.key, check.fix) == ("cluster.nproc", "set cluster.nproc to 30 or 33")


def test_more_servers_than_a_team_has_gpus_are_one_problem():
    (check,) = checks_of("rollout.sglang.tp_size=2")
    fix = "set placement.teams.draw.devices=16 cluster.nproc=40 cluster.nnodes=5, or rollout.sglang.servers=4"
    assert (check.status, check.fix) == ("fail", fix)
    assert checks_of(*fix.partition(", or")[0].split()[1:], "rollout.sglang.tp_size=2") == []
    found = checks_of("rollout.sglang.dp_size=2", names=("machines", "placement", "servers"))
    assert [check.key for check in found if check.status == "fail"] == ["rollout.sglang.dp_size"]
    assert [check.key for check in found if check.name == "machines"] == []


def test_servers_of_teams_that_are_not_known_are_not_shared_out():
    unknown = ["placement.teams.draw.devices=16", "cluster={nproc: 30, nnodes: 3}"]
    assert [check.key for check in checks_of(*unknown, names=("placement", "servers")) if check.status == "fail"] == [
        "placement.teams"
    ]


@pytest.mark.parametrize(("overrides", "other"), [([], False), ([*ONE], True)])
def test_several_machines_are_told_the_launchers_that_start_these_teams(overrides, other):
    (check,) = checks_of(*overrides, launcher="local", names=("launcher",))
    assert check.fix == f"use {'--launcher torchrun or ' if other else ''}--launcher ray"
    (check,) = checks_of(*overrides, "cluster.device_memory_gb=null", launcher="local", names=("launcher",))
    assert check.fix.endswith("--launcher ray, or set cluster.nnodes=1")


def test_nsys_is_refused_under_ray_which_starts_workers_out_of_its_sight():
    assert checks_of("trainer.profile={}", names=("profile",)) == []
    (check,) = checks_of("trainer.profile={tool: nsys, ranks: [31]}", names=("profile",))
    assert (check.status, check.key) == ("fail", "trainer.profile.tool")
    assert checks_of("trainer.profile={tool: nsys}", names=("profile",), launcher="torchrun") == []
    (check,) = checks_of("trainer.profile={ranks: [32]}", names=("profile",))
    assert "0 to 31" in str(check.problem())
