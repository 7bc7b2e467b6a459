"""Teams are checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.checks import dry_run as plan_module
from megarl.checks import environment
from megarl.checks.dry_run import make_plan
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.dag.stage import Role
from megarl.recipes.components import COMPONENTS
from megarl.system.errors import ConfigError
from megarl.system.machine import Machine

PPO = ("algorithm.pipeline=ppo", "algorithm.advantage.name=gae", "algorithm.kl.use=reward", "cluster.nproc=4")
FOUR = (
    "placement.teams.train={roles: [actor], devices: 1}",
    "placement.teams.value={roles: [critic], devices: 1}",
    "placement.teams.frozen={roles: [reference], devices: 1}",
    "placement.teams.draw={roles: [rollout], devices: 1}",
)
GRPO = ("algorithm.kl.use=loss", "cluster.nproc=4")
#: Several teams without it are warned of: they would start again from the beginning.
SAVED = "trainer.save_every=5"
TWO = (
    "placement.teams.train={roles: [actor, rollout], devices: 2}",
    "placement.teams.frozen={roles: [reference], devices: 2}",
)


def test_every_team_has_its_roles_workers_and_nodes(config_of):
    checked = check_config(config_of(*PPO, *FOUR), launcher="ray")
    assert [check for check in checked.items if check.status == "fail"] == []
    teams = {team.name: team for team in checked.placement.teams}
    assert {name: (team.roles, team.first) for name, team in teams.items()} == {
        "train": ((Role.ACTOR,), 0),
        "value": ((Role.CRITIC,), 1),
        "frozen": ((Role.REFERENCE,), 2),
        "draw": ((Role.ROLLOUT,), 3),
    }
    assert teams["value"].nodes == ("value", "critic_train")


@pytest.mark.parametrize("job", ["sft", "eval", "generate"])
def test_other_commands_have_one_team_of_all_workers(config_of, job):
    settings = ["sft.steps=1", "data.val_files=megarl.recipes.arithmetic:make_rows"]
    if job != "sft":
        settings += ["model.hf_config=null", "model.path=org/trained"]
    checked = check_config(config_of(*PPO, *FOUR, *settings), launcher="torchrun", job=job)
    assert [check for check in checked.items if check.status == "fail"] == []
    assert [team.devices for team in checked.placement.teams] == [4]
    odd = config_of(*PPO, *FOUR, *settings, "actor.parallel.pp=2", "cluster.nproc=5", "data.batch_size=10")
    assert [c.key for c in check_config(odd, job=job).items if c.status == "fail"] == ["cluster.nproc"]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([*GRPO, *TWO, "cluster.nproc=3"], "placement.teams", ["4 devices", "1 too many", "cluster.nproc=4"]),
        (
            [*GRPO, *TWO, "cluster.nproc=6"], "placement.teams",
            ["2 too few", "train (actor, rollout) 2; frozen (reference) 2", "cluster.nproc=6"],
        ),
        (
            [*GRPO, *TWO, "placement.teams.frozen.roles=[reference, rollout]"],
            "placement.teams",
            ["rollout is listed more than once", "train and frozen"],
        ),
        (
            [*GRPO, "placement.teams.train={roles: [actor, rollout], devices: 4}"],
            "placement.teams",
            ["no team has the role reference", "add reference"],
        ),
        (
            [*GRPO, *TWO, "placement.teams.frozen.roles=[critic]", "algorithm.kl.use=none"],
            "placement.teams.frozen.roles",
            ["this recipe's graph needs none of this team's roles", "actor, rollout"],
        ),
        (
            [*GRPO, *TWO, "reference.parallel.tp=2", "placement.teams={train: {devices: 1}, frozen: {devices: 3}}"],
            "placement.teams.frozen.devices",
            ["3 is not divisible by 2", "2 or", "4"],
        ),
        ([*GRPO, *TWO, "reference.parallel.pp=5", "cluster.nproc=7", "placement.teams.frozen.devices=5"],
         "reference.parallel.pp", ["4 layers", "at most 4"]),
        ([*GRPO, *TWO, "data.batch_size=5"], "data.batch_size", ["data parallel size of the team train", "4 or 6"]),
        (
            [*PPO, *FOUR[:1], "placement.teams.rest={roles: [critic, reference, rollout], devices: 3}",
             "data.batch_size=6", "critic.mini_batch_size=2"],
            "critic.mini_batch_size",
            ["divisible by 3", "team rest"],
        ),
        ([*GRPO, "placement.teams.a/b={roles: [actor], devices: 4}"], "placement.teams", ["'a/b'", "letters, digits"]),
        (["critic.parallel.tp=2", *PPO], "critic.parallel", ["a separate team"]),
        (["placement.auto=even", *GRPO, *TWO], "placement.auto", ["remove one of the two"]),
        (["placement.auto=even", *GRPO, "cluster.nproc=1"], "cluster.nproc", ["run has 1", "actor 1, reference 1"]),
        (
            [*GRPO, "algorithm.pipeline=dapo", "algorithm.dynamic_sampling.enabled=true", *TWO,
             "placement.teams={train: {roles: [actor]}, frozen: {roles: [reference, rollout]}}"],
            "placement.teams",
            ["requests more samples", "dynamic_sampling in train", "put rollout and actor into one team"],
        ),
    ],
)  # fmt: skip
def test_placements_that_cannot_be(failures, overrides, key, words):
    (check,) = failures(*overrides)
    assert check.key == key
    for word in words:
        assert word in str(check.problem())


SERVED = ("rollout.engine=sglang", "rollout.sglang.colocated=true", "actor.engine.offload=true")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (
            ["placement.teams={train: {roles: [actor]}, frozen: {roles: [reference, rollout]}}"],
            "rollout.sglang.colocated",
            [
                "rollout is in another team",
                "move rollout from placement.teams.frozen.roles to placement.teams.train.roles",
            ],
        ),
        (
            ["cluster.nproc=6", "placement.teams={train: {roles: [actor]}, draw: {roles: [rollout], devices: 2}}"],
            "rollout.sglang.colocated",
            ["from placement.teams.draw.roles", "train.roles, with its devices, and leave the team draw out"],
        ),
        (["rollout.sglang.servers=3"], "rollout.sglang.servers", ["team train, which has only 2", "at most 2"]),
    ],
)
def test_servers_on_the_trainers_devices_are_on_those_of_the_actors_team(failures, overrides, key, words):
    found = [check for check in failures(*GRPO, *TWO, *SERVED, *overrides) if check.name == "placement"]
    assert [check.key for check in found] == [key]
    for word in words:
        assert word in str(found[0].problem())


def test_moving_out_of_the_way_of_nobody_warns(warned):
    offload = ("actor.engine.offload=true", "critic.engine.offload=true")
    assert [check.key for check in warned(*PPO, *FOUR, *offload, SAVED)] == [
        "actor.engine.offload",
        "critic.engine.offload",
    ]
    assert [check.key for check in warned(*PPO, *offload)] == []
    assert [check.key for check in warned(*GRPO, *TWO, offload[0], SAVED)] == [], "generation needs room for its cache"


@pytest.mark.parametrize("parts", ["[parameters]", "[parameters, optimizer]"])
def test_parameters_of_a_critic_do_not_leave_alone(failures, parts):
    found = failures(*PPO, "actor.engine.offload=[parameters]", f"critic.engine.offload={parts}")
    assert [check.key for check in found] == ["critic.engine.offload"]
    assert "[gradients, optimizer]" in str(found[0].problem())


DRAWS = (
    "algorithm.kl.use=none",
    "cluster.nproc=4",
    "placement.teams.train={roles: [actor], devices: 2}",
    "placement.teams.draw={roles: [rollout], devices: 2}",
)


def test_weights_are_sent_to_an_engine_in_another_team(warned):
    assert [check.key for check in warned(*DRAWS, "sync.timeout_s=60", SAVED)] == []
    assert [check.key for check in warned("sync.timeout_s=60")] == ["sync.timeout_s"]
    (check,) = warned(*DRAWS, "sync.timeout_s=60", "rollout.sglang.servers=2", SAVED)
    assert "sync" not in check.message


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["rollout.parallel={pp: 2}"], True),
        (["rollout.parallel={tp: 2}"], False),
        (["rollout.parallel={pp: 2}", "placement.teams={train: {devices: 6}, draw: {devices: 2}}"], False),
        (["rollout.parallel={pp: 2}", "cluster.nnodes=1"], False),
    ],
)
def test_replicas_that_take_weights_are_on_one_machine(failures, overrides, refused):
    many = ["cluster={nproc: 8, nnodes: 4}", "placement.teams={train: {devices: 4}, draw: {devices: 4}}"]
    found = failures(*DRAWS, *many, "data.batch_size=24", *overrides)
    assert [check.key for check in found] == (["placement.teams.draw.devices"] if refused else [])
    assert all("at most 2" in str(check.problem()) for check in found)


def test_an_engine_in_another_team_takes_fp8_as_whole_tensors_only(failures, warned):
    assert failures(*DRAWS, "sync.fp8=true") == []
    assert "sync.verify" in [check.key for check in warned(*DRAWS, "sync.fp8=true")], "it compares nothing of FP8"
    assert "sync.verify" not in [check.key for check in warned(*DRAWS, "sync.fp8=true", "sync.verify=off")]
    for overrides in (["sync.fp8=true", "sync.transport=delta"], ["sync.transport=shards"]):
        (check,) = failures(*DRAWS, *overrides)
        assert check.key == "sync.transport"
        assert "the team draw" in str(check.problem())


@pytest.mark.parametrize(
    ("held", "sent", "refused"),
    [("fp32", "bf16", True), ("bf16", "fp32", True), ("bf16", "bf16", False), ("fp32", "model", False)],
)
def test_an_engine_in_another_team_takes_weights_in_its_own_dtype(failures, held, sent, refused):
    found = failures(*DRAWS, f"model.dtype={held}", f"sync.dtype={sent}")
    assert [check.key for check in found] == (["sync.dtype"] if refused else [])
    assert all(f"whose weights are {held}" in str(check.problem()) for check in found)


LENT = (
    *DRAWS,
    "rollout.engine=sglang",
    "cluster={nproc: 12, nnodes: 3, device_memory_gb: 80}",
    "placement.teams={train: {devices: 4}, draw: {devices: 8}}",
    "data.batch_size=24",
)


def test_servers_of_a_team_on_several_machines_are_on_the_gpus_that_its_workers_lend(failures):
    for servers in (1, 3, 8):
        assert failures(*LENT, f"rollout.sglang.servers={servers}") == []
    assert failures(*LENT, "rollout.sglang={servers: 2, tp_size: 4}") == []


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["servers=9"], "placement.teams.draw.devices", ["9 servers", "which need 9", "servers=8"]),
        (["servers=3", "tp_size=4"], "placement.teams.draw.devices", ["which need 12", "servers=2"]),
        (["servers=2", "gpus=[0, 1]"], "rollout.sglang.gpus", ["other GPUs on each"]),
        (["servers=2", "extra_args=[--base-gpu-id=1]"], "rollout.sglang.extra_args", ["--base-gpu-id"]),
    ],
)
def test_servers_that_no_worker_has_a_gpu_for_are_refused(failures, overrides, key, words):
    found = {check.key: check for check in failures(*LENT, *(f"rollout.sglang.{one}" for one in overrides))}
    assert [word for word in words if word not in str(found[key].problem())] == []


def test_workers_of_several_machines_that_hold_models_lend_no_gpus(failures):
    held = "placement.teams={train: {roles: [actor], devices: 4}, draw: {roles: [rollout, reference], devices: 8}}"
    found = failures(*LENT, held, "algorithm.kl.use=loss", "rollout.sglang.servers=3")
    assert [check.key for check in found] == ["placement.teams.draw.roles"]


@pytest.mark.parametrize(
    ("teams", "servers", "spread", "most"),
    [
        ({"train": 4, "draw": 8}, "{servers: 2, tp_size: 4}", None, 2),
        ({"train": 22, "frozen": 5, "draw": 5}, "{servers: 1, tp_size: 4}", "", 0),
        ({"train": 24, "draw": 12}, "{servers: 3, tp_size: 4}", "6 + 6", 2),
        ({"train": 6, "draw": 12}, "{servers: 3, tp_size: 4}", None, 3),
    ],
)
def test_servers_are_where_the_launcher_will_seat_the_workers(failures, teams, servers, spread, most):
    """On machines of four, eight, and of six workers."""
    workers = sum(teams.values())
    here = {12: 4, 32: 8, 36: 6, 18: 6}[workers]
    roles = {"train": "actor", "frozen": "reference", "draw": "rollout"}
    placed = ", ".join(f"{name}: {{roles: [{roles[name]}], devices: {number}}}" for name, number in teams.items())
    kept = ("algorithm.kl.use=loss", "reference.parallel={tp: 1}") if "frozen" in teams else ()
    found = failures(
        *LENT, *kept, f"placement.teams=!replace {{{placed}}}", f"rollout.sglang={servers}", "data.batch_size=3960",
        "actor.mini_batch_size=3960", f"cluster={{nproc: {workers}, nnodes: {workers // here}}}",
    )  # fmt: skip
    found = [check for check in found if check.name == "placement"]
    if spread == "":
        (check,) = found
        assert "3 workers at most" in check.message
        return
    assert [check.key for check in found] == ([] if spread is None else ["placement.teams.draw.devices"])
    for check in found:
        assert f"which need 12, each on one machine, and have {spread}" in check.message
        assert f"servers={most}" in check.fix


def test_fewer_workers_than_machines_are_no_crash(failures):
    few = failures(*LENT, "cluster={nproc: 3, nnodes: 4}", "placement.teams={train: {devices: 2}, draw: {devices: 1}}")
    assert "cluster.nnodes" in {check.key for check in few}
    failures(*LENT, "launch.slurm.teams={draw: {nodes: 16}}")  # `megarl launch` says that these divide no 8 workers


def test_a_server_may_be_as_large_as_a_node_of_its_team(failures):
    one = (*LENT, "cluster.nnodes=6", "rollout.sglang={servers: 2, tp_size: 4}")
    (check,) = failures(*one)
    assert check.key == "rollout.sglang.tp_size"
    assert "2 workers at most" in str(check.problem())
    assert failures(*one, "launch.slurm.teams={draw: {nodes: 2}}") == []


@pytest.mark.parametrize(
    ("servers", "nnodes", "words"),
    [
        ("{servers: 1, tp_size: 8, nnodes: 2}", 3, None),
        ("{servers: 2, tp_size: 4, nnodes: 2}", 3, None),
        ("{servers: 1, tp_size: 16, nnodes: 2}", 3, ["on 2 machines, where the team draw has 8 workers at most"]),
        ("{servers: 1, tp_size: 8}", 3, ["on one machine, where", "4 workers at most", "rollout.sglang.nnodes=2"]),
        ("{servers: 1, tp_size: 6, nnodes: 3}", 3, ["servers on 2 machines at most", "lower rollout.sglang.nnodes"]),
        ("{servers: 3, tp_size: 4, nnodes: 2}", 3, ["which need 12", "servers=2"]),
    ],
)
def test_servers_of_several_machines_have_room_on_each(failures, servers, nnodes, words):
    """Eight workers lend their GPUs on two machines of four."""
    found = [
        c for c in failures(*LENT, f"rollout.sglang={servers}", f"cluster.nnodes={nnodes}") if c.name == "placement"
    ]
    if words is None:
        assert found == []
        return
    (check,) = found
    assert [word for word in words if word not in str(check.problem())] == []


ON_GPUS = (*LENT, "cluster={nproc: 20, nnodes: 5, device_memory_gb: 80}", "placement.teams.draw.devices=16")
ON_ONE = (*ON_GPUS, "cluster={nproc: 8, nnodes: 1}", "placement.teams.draw.devices=4")


@pytest.mark.parametrize(
    ("overrides", "words", "fix"),
    [
        ([*ON_GPUS, "rollout.sglang.servers=8"], "8 of the 16 GPUs", "set rollout.sglang.servers=16, or"),
        ([*ON_GPUS, "rollout.sglang={servers: 2, tp_size: 2}"], "12 of the 16 GPUs", "set rollout.sglang.servers=8"),
        ([*ON_GPUS, "rollout.sglang={servers: 1, tp_size: 3}"], "13 of the 16 GPUs", "set rollout.sglang.servers=5"),
        ([*ON_GPUS, "rollout.sglang={servers: 5, tp_size: 3}"], "1 of the 16 GPUs", "change rollout.sglang.tp_size"),
        ([*ON_GPUS, "rollout.sglang.servers=16"], None, None),
        ([*ON_ONE, "rollout.sglang.servers=3"], "1 of the 4 GPUs", "set rollout.sglang.servers=4"),
        ([*ON_ONE, "rollout.sglang.servers=4"], None, None),
        ([*ON_ONE, "rollout.sglang.servers=3", "cluster.device_memory_gb=null"], None, None),
    ],
)
def test_gpus_that_are_lent_to_no_server_are_told(warned, overrides, words, fix):
    found = [check for check in warned(*overrides) if check.name == "placement"]
    assert [check.key for check in found] == ([] if words is None else ["rollout.sglang.servers"])
    for check in found:
        assert f"{words} that the workers of the team draw lend have no server" in check.message
        assert check.fix.startswith(fix)


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        (ON_GPUS, "set placement.teams.draw.devices=1 cluster.nproc=5,"),
        ([*ON_GPUS, "rollout.parallel={tp: 2}"], "set placement.teams.draw.devices=6 cluster.nproc=10,"),
        ([*ON_GPUS, "launch.slurm.teams={draw: {nodes: 2}}"], "set placement.teams.draw.devices=2 cluster.nproc=6,"),
        (ON_ONE, "set placement.teams.draw.devices=1 cluster.nproc=5,"),
        ([*ON_ONE, "cluster.nproc=5", "placement.teams.draw.devices=1"], None),
        ([*ON_ONE, "cluster.device_memory_gb=null"], None),
    ],
)
def test_gpus_beside_servers_that_run_already_are_told(warned, overrides, fix):
    urls = "rollout.sglang.urls=[http://127.0.0.1:1]"
    found = [check for check in warned(*overrides, urls) if check.key == "placement.teams.draw.devices"]
    assert [check.fix.partition(" the fewest")[0] for check in found] == ([] if fix is None else [fix])


def test_a_layout_of_workers_that_only_ask_servers_is_told(warned):
    (check,) = [check for check in warned(*LENT, "rollout.parallel={tp: 2}") if check.key == "rollout.parallel"]
    assert "only send requests" in check.message
    for other in ("rollout.parallel=null", "rollout.parallel={tp: 1}"):
        assert [check for check in warned(*LENT, other) if check.key == "rollout.parallel"] == []


def test_torchrun_has_one_team(config_of):
    config = config_of(*GRPO, *TWO)
    for launcher in ("local", "ray"):
        assert [c for c in check_config(config, launcher=launcher).items if c.status == "fail"] == []
    (check,) = (c for c in check_config(config, launcher="torchrun").items if c.status == "fail")
    assert "--launcher ray" in str(check.problem())
    one_team = config_of(*GRPO, *TWO, "placement=!replace {}")  # the other fix that it names
    assert "placement='!replace {}'" in str(check.problem())
    assert [c for c in check_config(one_team, launcher="torchrun").items if c.status == "fail"] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("devises: 2", ["unknown key placement.teams.train.devises", "did you mean placement.teams.train.devices"]),
        ("devices: 2", ["placement.teams.train.roles is missing", "list of actor, critic"]),
        ("roles: [actor], devices: two", ["placement.teams.train.devices", "integer > 0"]),
    ],
)  # fmt: skip
def test_mistakes_in_a_team_name_its_key(write, text, words):
    file = write(f"name: case\nplacement:\n  teams:\n    train: {{{text}}}\n", "teams.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    for word in (*words, "teams.yaml:4"):
        assert word in str(caught.value)


def test_several_teams_on_this_machine_need_ray(config_of, monkeypatch):
    monkeypatch.setattr(environment, "_is_installed", lambda module: module != "ray")
    found = {}
    for name, overrides in {"two": [*GRPO, *TWO], "one": GRPO}.items():
        items = check_config(config_of(*overrides), launcher="local").items
        found[name] = [check.key for check in items if check.status == "fail"]
    assert found == {"two": ["placement"], "one": []}


def test_the_dry_run_shows_what_workers_were_shared_out_by(config_of, tmp_path):
    order = ("rollout", "reward_submit", "reward", "old_logp", "ref_logp", "advantage", "actor_train")
    seconds = {f"timing_s/{id}": {"rollout": 2.0, "ref_logp": 2.0}.get(id, 0.0) for id in order}
    lines = [{"step": step, "stage": "train", **seconds} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(json.dumps({"config": {"cluster": {"nproc": 3}, "placement": {"teams": {}}}}))
    measured = ("placement.auto=measured", f"placement.measured={tmp_path}")
    text = make_plan(config_of(*GRPO, *measured), "ray").text
    assert f"shared out by device-seconds of a step in {tmp_path} (medians of steps 3 to 4):" in text
    assert "\n  actor      6 = rollout 2 s x 3 + " in text
    assert "\n  reference  6 = ref_logp 2 s x 3\n" in text


def test_an_earlier_run_that_nothing_is_shared_out_by_is_warned_of(warned):
    assert [check.key for check in warned(*GRPO, *TWO, "placement.measured=runs/first", SAVED)] == [
        "placement.measured"
    ]


def test_the_documented_example_and_its_dry_run_are_those_of_the_code(write, monkeypatch):
    monkeypatch.setattr(plan_module, "this_machine", lambda: Machine(cores=2, memory=24e9))
    page = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
    recipe, shown = page.partition("```yaml")[2], page.partition("## Reading the dry run")[2]
    plan = make_plan(load_config(write(recipe.partition("```")[0], "four.yaml"), components=COMPONENTS), "ray")
    assert plan.problems == []
    lines = plan.text.splitlines()
    for line in shown.split("```")[1].strip().splitlines():
        assert line in lines


SHORT = ("rollout.sampling.max_new_tokens=8",)


@pytest.mark.parametrize(
    ("launcher", "address", "free", "settings", "status"),
    [
        ("local", "", 1 << 40, (), "ok"),
        ("local", "head:1", 1 << 20, (), "fail"),
        ("ray", "", 1 << 20, (), "fail"),
        ("local", "", 200 << 20, ("placement.spill=true",), "ok"),
        ("local", "", 200 << 20, SHORT, "ok"),
        ("local", "", 64 << 20, SHORT, "warn"),
        ("local", "", 64 << 20, ("placement.spill=true",), "warn"),
        ("ray", "head:1", 1 << 20, (), None),
    ],
)
def test_samples_between_teams_fit_into_shared_memory(
    config_of, monkeypatch, launcher, address, free, settings, status
):
    monkeypatch.setenv("RAY_ADDRESS", address)
    long = ("rollout.sampling.max_new_tokens=100000", "model.hf_config.max_position_embeddings=200000", *settings)
    machine = Machine(cores=64, memory=1e13, shared_memory=free)
    for starts in (True, False):
        items = check_config(config_of(*GRPO, *TWO, *long), launcher=launcher, machine=machine, starts=starts).items
        found = [check.status for check in items if check.name == "shared memory"]
        assert found == ([] if status is None else ["warn" if status == "fail" and not starts else status])
