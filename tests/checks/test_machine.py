"""What does not fit a machine is refused before a process starts, with what takes the most."""

from __future__ import annotations

import pytest

from megarl.artifacts.facts import model_facts
from megarl.checks.checklist import Check
from megarl.checks.host import host_memory
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.config.model import ParallelConfig
from megarl.dag.placement import MODEL_ROLES, place, together
from megarl.dag.stage import Role
from megarl.planning.memory import device_memory
from megarl.planning.shards import parameter_bytes
from megarl.recipes.build import build_task_graph
from megarl.system.machine import Machine

LAPTOP = Machine(cores=2, memory=24e9)
SERVER = Machine(cores=64, memory=2e12, has_gpu=True, gpu_memory=85e9)
# A model of 1.5 billion parameters: 25 GB with gradients and moments in fp32.
BILLION = ["model.hf_config.hidden_size=2048", "model.hf_config.num_hidden_layers=40", "model.dtype=fp32"]
BILLION += ["model.hf_config.intermediate_size=6144", "actor.engine.micro_batch_tokens=256"]


@pytest.fixture
def judged(config_of):
    """judged(machine, *overrides) -> the checks of machine and memory of a start there; `starts=False`: a dry run."""

    def judge(
        machine: Machine, *overrides: str, recipe=None, launcher: str = "local", starts: bool = True, job="train"
    ):
        config = load_config(recipe, overrides) if recipe else config_of(*overrides)
        checks = check_config(config, launcher=launcher, job=job, machine=machine, starts=starts).items
        return [check for check in checks if check.name in ("machine", "memory")]

    return judge


def sizes_of(config):
    """All models are as large as the policy."""
    return dict.fromkeys(MODEL_ROLES, model_facts(config.model))


def not_ok(checks: list[Check]) -> Check:
    found = [check for check in checks if check.status != "ok"]
    assert len(found) == 1, checks
    return found[0]


def test_a_small_recipe_fits_a_laptop(judged):
    assert {check.status for check in judged(LAPTOP, "cluster.nproc=8", "data.batch_size=32")} == {"ok"}


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (BILLION, "model", ["the actor's update needs", "this machine's memory has 24.0", "actor optimizer 12."]),
        (
            [
                "rollout.sampling.max_new_tokens=10000000",
                "model.hf_config.max_position_embeddings=20000000",
                "actor.engine.recompute=full",
            ],
            "rollout.sampling.max_new_tokens",
            ["generation needs at least 36.3 GB", "responses of 256 samples of 10000000 tokens"],
        ),
        (
            ["actor.engine.micro_batch_tokens=8000000", "data.batch_size=200000"],
            "actor.engine.micro_batch_tokens",
            ["actor activations"],
        ),
        (
            ["model.hf_config.vocab_size=10000000", "actor.engine.logits_chunk_tokens=512"],
            "actor.engine.logits_chunk_tokens",
            ["logits of one chunk"],
        ),
        (
            ["cluster.nproc=100", "data.batch_size=100", "cluster.timeout_s=900"],
            "cluster.nproc",
            ["100 worker processes 43.3 GB"],
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_its_largest_terms(judged, overrides, key, words):
    found = [check for check in judged(LAPTOP, *overrides) if check.status == "fail"]
    assert [check.key for check in found] == [key], found
    for word in words:
        assert word in found[0].message
    assert key == "model" or key in found[0].fix


def test_a_long_response_limit_is_refused_in_generation_too(judged):
    overrides = ["validation.sampling.max_new_tokens=100000000", "model.hf_config.max_position_embeddings=200000000"]
    overrides += ["data.val_files=['text:1+1=']", "rollout.max_running=1"]
    found = not_ok(judged(LAPTOP, *overrides, job="generate"))
    assert found.status == "fail"
    assert "generation needs" in found.message


def test_processes_that_cannot_start_in_time_are_refused(judged):
    found = [check for check in judged(LAPTOP, "cluster.nproc=500", "data.batch_size=500") if check.status == "fail"]
    assert [check.key for check in found] == ["cluster.nproc"] * 2  # too slow, and too large
    assert "500 processes need about 1250 s to start on 2 cores" in found[0].message
    assert found[0].fix.startswith("set cluster.nproc=2;")


def test_many_processes_per_core_warn(judged):
    found = not_ok(judged(LAPTOP, "cluster.nproc=16"))
    assert (found.status, found.key) == ("warn", "cluster.nproc")
    assert "take turns, which is slow" in found.message


def test_more_processes_than_cores_have_a_note(judged):
    messages = [judged(LAPTOP, f"cluster.nproc={nproc}", "data.batch_size=32")[0].message for nproc in (2, 8)]
    assert messages[0] == "2 processes on 2 cores, no GPU"
    assert messages[1] == "8 processes on 2 cores, no GPU; they take turns; about one per core is fast"


def test_threads_beyond_the_cores_are_told_in_a_dry_run(judged):
    settings = ["cluster.nproc=2", "cluster.threads=4"]
    found = not_ok(judged(LAPTOP, *settings, starts=False))
    assert (found.status, found.key) == ("warn", "cluster.threads")
    assert "2 processes of 4 threads share 2 cores" in found.message
    assert found.fix == "set cluster.threads=1, or null"
    assert {check.status for check in judged(LAPTOP, *settings)} == {"ok"}  # the launcher tells it


def test_one_thread_each_is_not_told_to_be_one(judged):
    settings = ["cluster.nproc=4", "cluster.threads=1"]
    found = not_ok(judged(LAPTOP, *settings, starts=False))
    assert found.fix == (
        "threads cannot be lowered: use fewer processes (cluster.nproc), one per core, or a machine with 4 cores"
    )
    teams = ["placement.teams={a: {roles: [actor], devices: 2}, b: {roles: [rollout, reference], devices: 2}}"]
    found = not_ok(judged(LAPTOP, *settings, *teams, starts=False))
    assert "(cluster.nproc, and the devices of placement.teams)" in found.fix


def test_one_process_is_no_processes(judged):
    assert judged(Machine(cores=1, memory=24e9))[0].message == "1 process on 1 core, no GPU"


def test_a_recipe_for_gpus_does_not_start_without_one(judged):
    found = not_ok(judged(LAPTOP, recipe="grpo_qwen3_8b_8gpu"))
    assert (found.status, found.key) == ("fail", "cluster.device_memory_gb")
    assert "needs 8 GPUs, but this machine has none" in found.message
    assert "cluster.device_memory_gb=null" in found.fix


def test_its_dry_run_on_a_laptop_only_says_so(judged):
    checks = judged(LAPTOP, recipe="grpo_qwen3_8b_8gpu", starts=False)
    assert {check.status for check in checks} == {"ok"}
    assert "which this machine does not have" in checks[0].message


def test_a_model_too_large_for_the_recipes_gpus_is_refused_in_a_dry_run(judged):
    found = not_ok(judged(LAPTOP, "model.path=Qwen/Qwen3-32B", recipe="grpo_qwen3_8b_8gpu", starts=False))
    assert found.status == "fail"
    assert "a GPU of 80 GB (cluster.device_memory_gb) has 80.0" in found.message
    assert "actor gradients" in found.message


def test_the_machines_own_gpus_count_when_a_run_starts(judged):
    small = Machine(cores=64, memory=2e12, has_gpu=True, gpu_memory=25e9)
    assert "this machine's GPU of 25 GB" in not_ok(judged(small, recipe="grpo_qwen3_8b_8gpu")).message
    assert {check.status for check in judged(SERVER, recipe="grpo_qwen3_8b_8gpu")} == {"ok"}


def test_a_gpu_of_which_it_is_not_certain_that_it_is_used_only_warns(judged):
    small = Machine(cores=64, memory=2e12, has_gpu=True, gpu_memory=25e9, gpu_certain=False)
    assert not_ok(judged(small, recipe="grpo_qwen3_8b_8gpu")).status == "warn"
    found = not_ok(judged(small, "model.path=Qwen/Qwen3-32B", recipe="grpo_qwen3_8b_8gpu"))
    assert found.status == "fail"
    assert "cluster.device_memory_gb" in found.message


SERVED = ["rollout.engine=sglang", "cluster.device_memory_gb=80", "model.dtype=bf16"]
LLAMA_70B = ["model_type=llama", "hidden_size=8192", "num_hidden_layers=80", "num_attention_heads=64", "head_dim=128"]
LLAMA_70B += ["num_key_value_heads=8", "intermediate_size=28672", "vocab_size=128256"]
# Divided among 64 GPUs for training, so that only the server is too large.
SPLIT = ["cluster.nproc=64", "actor.parallel={tp: 8, pp: 8}", "data.batch_size=32"]


@pytest.mark.parametrize(
    ("overrides", "does_not_fit"),
    [
        (["rollout.sglang.tp_size=1"], "a server"),
        (["rollout.sglang.tp_size=4"], None),
        (["rollout.sglang={tp_size: 2, colocated: true}"], "generation"),  # 70 GB, and the trainer's own 7 to 17
        (["rollout.sglang.urls=['http://127.0.0.1:1']"], None),
        (["rollout.sglang={tp_size: 1, extra_args: [--quantization, fp8]}"], None),
    ],
)
def test_servers_have_to_fit_their_gpus(judged, overrides, does_not_fit):
    model = [f"model.hf_config.{pair}" for pair in LLAMA_70B]
    checks = judged(LAPTOP, *SERVED, *model, *SPLIT, *overrides, starts=False)
    failed = [check for check in checks if check.status == "fail"]
    assert [check.key for check in failed] == (["rollout.sglang.tp_size"] if does_not_fit else [])
    assert all(f"{does_not_fit} needs" in check.message for check in failed)


def test_a_share_of_the_gpu_is_named_for_servers_of_one_team_of_two(judged):
    teams = "placement.teams={main: {roles: [actor, rollout], devices: 1}, ref: {roles: [reference], devices: 1}}"
    served = ["rollout.engine=sglang", "rollout.sglang.colocated=true", "actor.engine.offload=true"]
    settings = ["cluster.nproc=2", "cluster.device_memory_gb=80", "algorithm.kl.use=loss"]
    checks = judged(SERVER, *served, *settings, teams, recipe="grpo_quickstart", starts=False)
    (share,) = [check for check in checks if check.key == "rollout.sglang.memory_fraction"]
    assert "set rollout.sglang.memory_fraction=0." in str(share.fix)


@pytest.mark.parametrize("colocated", [True, False])
def test_weights_of_servers_that_share_the_devices_count_wherever_they_stay(config_of, colocated):
    engines = ["actor.engine.offload=true", "critic.engine.offload=true"]
    config = config_of("rollout.engine=sglang", f"rollout.sglang.colocated={colocated}", *engines)
    memory = device_memory(config, sizes_of(config), together(config, MODEL_ROLES).teams[0], gpu=True)
    with_weights = {
        moment.name for moment in memory.moments for part in moment.terms if "server's weights" in part.what
    }
    theirs = {"generation", "new weights for servers", "a checkpoint", "log-probs", "values", "scores"}
    assert with_weights == (theirs if colocated else {"a server"})


def test_of_held_out_rows_only_what_is_known_counts(judged):
    held_out = ["data.val_files=[val.jsonl]", "data.val_batch_size=100000", "validation.sampling.max_new_tokens=100000"]
    held_out.append("model.hf_config.max_position_embeddings=200000")
    assert {check.status for check in judged(LAPTOP, *held_out)} == {"ok"}  # 120 GB, if the file has as many rows


def test_the_smaller_of_two_bounds_counts_for_held_out_rows(config_of):
    config = config_of("data.val_files=[val.jsonl]", "data.val_batch_size=1000", "data.max_val_samples=7")
    memory = host_memory(config, sizes_of(config), together(config), gpu=False, job="eval")
    assert any(part.what.startswith("responses of 7 samples") for part in memory.terms())


def test_buffers_of_responses_are_those_of_embedded_generation(judged):
    long = ["rollout.sampling.max_new_tokens=10000000", "model.hf_config.max_position_embeddings=20000000"]
    long += ["rollout.engine=sglang", "actor.engine.micro_batch_tokens=256"]
    assert not any("generation needs" in check.message for check in judged(LAPTOP, *long))


@pytest.mark.parametrize(
    ("job", "overrides"),
    [
        ("sft", ["rollout.sampling.max_new_tokens=100000000"]),
        ("sft", ["data.batch_size=100000000"]),
        ("eval", ["rollout.sampling.max_new_tokens=100000000", "validation.sampling.max_new_tokens=8"]),
        ("generate", ["data.batch_size=100000000", "rollout.sampling.n=1000"]),
    ],
)
def test_training_settings_do_not_count_for_other_jobs(judged, job, overrides):
    positions = "model.hf_config.max_position_embeddings=200000000"
    files = "data.val_files=['text:1+1=']"
    checks = judged(LAPTOP, *overrides, positions, files, "actor.engine.micro_batch_tokens=4096", job=job)
    assert {check.status for check in checks} == {"ok"}


def test_a_dry_run_of_what_does_not_fit_here_warns(judged):
    found = not_ok(judged(LAPTOP, *BILLION, starts=False))
    assert found.status == "warn"


def test_ray_chooses_the_machines(judged):
    cores, memory = judged(LAPTOP, *BILLION, "cluster.nproc=500", launcher="ray")
    assert (cores.status, cores.message) == ("skip", "unknown: Ray chooses the machines")
    assert memory.status == "warn"


def test_what_is_tight_warns(judged):
    needed = judged(Machine(cores=2, memory=1e12), *BILLION)[-1].message  # "... takes about 27.5 of 1,000.0 GB ..."
    about = float(needed.partition("about ")[2].split()[0]) * 1e9
    assert not_ok(judged(Machine(cores=2, memory=about), *BILLION)).status == "warn"
    assert {check.status for check in judged(Machine(cores=2, memory=about * 1.2), *BILLION)} == {"ok"}


# Peak resident sets of real runs on two AMD cores (second step of two, summed over the ranks; docs/performance.md).
MEASURED = [
    ([], 3.74e9),
    (
        [
            "model.dtype=bf16",
            "rollout.sampling.max_new_tokens=512",
            "data.batch_size=4",
            "actor.engine.micro_batch_tokens=4096",
        ],
        3.03e9,
    ),
    (
        [
            "model.hf_config.vocab_size=100000",
            "model.hf_config.num_hidden_layers=2",
            "rollout.sampling.max_new_tokens=64",
        ],
        4.44e9,
    ),
    (["cluster.nproc=2"], 6.45e9),
]
CASE = [
    *(
        "model.hf_config.hidden_size=512",
        "model.hf_config.num_hidden_layers=8",
        "model.hf_config.num_attention_heads=8",
    ),
    *("model.hf_config.num_key_value_heads=4", "model.hf_config.head_dim=64", "model.hf_config.intermediate_size=1536"),
    *("model.hf_config.vocab_size=32000", "model.hf_config.max_position_embeddings=2048", "model.dtype=fp32"),
    *("data.batch_size=8", "data.max_prompt_tokens=6", "rollout.sampling.max_new_tokens=128"),
]


@pytest.mark.parametrize(("overrides", "peak"), MEASURED)
def test_the_estimate_is_near_what_was_measured(config_of, overrides, peak):
    config = config_of(*CASE, *overrides)
    memory = host_memory(config, sizes_of(config), together(config), gpu=False)
    # 0.80 to 1.25: what malloc keeps, and what the libraries keep for the gradient, are not counted byte by byte.
    assert 0.8 < max(m.bytes for m in memory.moments if "update" in m.name) / peak < 1.25
    assert memory.needed.least < peak


DISTILS = "algorithm.distillation={coef: 1, estimator: jsd, topk: null}"


def host_of(config, *, gpu):
    """The estimate of host memory, with the roles that the recipe has."""
    return host_memory(config, sizes_of(config), place(build_task_graph(config), config), gpu=gpu)


@pytest.mark.parametrize("gpu", [False, True])
def test_hidden_states_of_a_teacher_are_in_host_memory_twice(config_of, gpu):
    memory = host_of(config_of(*CASE, DISTILS, "rollout.sampling.n=2", "teacher.path=."), gpu=gpu)
    # 2 samples of 8 prompts, 128 tokens of 512 numbers in fp32.
    states = {moment.name: part.bytes for moment in memory.moments for part in moment.terms if "hidden" in part.what}
    assert states == {"a step" if gpu else "log-probs": 2 * 16 * 128 * 512 * 4}


@pytest.mark.parametrize("gpu", [False, True])
def test_all_teachers_are_in_host_memory(config_of, gpu):
    models = ", ".join(f"t{at}: {{path: .}}" for at in range(3))
    overrides = [*CASE, "algorithm.distillation.coef=1", "actor.engine.offload=true"]
    one, many = (
        host_of(config_of(*overrides, teachers), gpu=gpu).peak.bytes
        for teachers in ("teacher.path=.", f"teacher.models={{{models}}}")
    )
    size = parameter_bytes(sizes_of(config_of(*CASE))[Role.TEACHER], ParallelConfig(), "fp32")
    assert many - one == pytest.approx(2 * size)


# -- teams -----------------------------------------------------------------------------------------------------------

PPO = ("algorithm.pipeline=ppo", "algorithm.advantage.name=gae", "algorithm.kl.use=reward", "cluster.nproc=4")
TEAMS = (
    "placement.teams.train={roles: [actor], devices: 2}",
    "placement.teams.value={roles: [critic, reference], devices: 1}",
    "placement.teams.draw={roles: [rollout], devices: 1}",
)


@pytest.fixture
def by_team(config_of):
    """by_team(*overrides) -> recipe, sizes, placement and the estimate of each team's rank on a GPU."""

    def estimate(*overrides: str):
        config = config_of(*PPO, *TEAMS, *CASE, *overrides)
        placement = place(build_task_graph(config), config)
        sizes = sizes_of(config)
        memory = {team.name: device_memory(config, sizes, team, gpu=True) for team in placement.teams}
        return config, sizes, placement, memory

    return estimate


def test_a_rank_holds_the_models_of_its_team_only(by_team):
    _, _, _, memory = by_team()
    held = {name: {part.what.split()[0] for part in found.terms()} for name, found in memory.items()}
    models = {"actor", "critic", "reference", "rollout"}
    assert {name: parts & models for name, parts in held.items()} == {
        "train": {"actor"},
        "value": {"critic", "reference"},
        "draw": {"rollout"},
    }
    assert [moment.name for moment in memory["draw"].moments] == ["generation"]


def test_a_team_with_a_layout_of_its_own_holds_its_part_of_the_model(by_team):
    def share(*overrides: str) -> float:
        *_, memory = by_team("cluster.nproc=5", "placement.teams.value.devices=2", *overrides)
        return next(part.bytes for part in memory["value"].terms() if part.what == "reference parameters")

    assert share("critic.parallel.pp=2", "reference.parallel.pp=2") < 0.8 * share()


def test_teams_work_at_the_same_time_in_the_memory_of_one_machine(by_team):
    config, sizes, placement, _ = by_team()
    apart = host_memory(config, sizes, placement, gpu=False)
    alone = [device_memory(config, sizes, team, gpu=False) for team in placement.teams]
    ranks = [team.devices for team in placement.teams]
    assert apart.peak.bytes > sum(n * memory.peak.bytes for n, memory in zip(ranks, alone, strict=True))
    assert apart.needed.least > sum(n * memory.needed.least for n, memory in zip(ranks, alone, strict=True))


@pytest.mark.parametrize(
    ("settings", "copies"),
    [("{max_staleness: 1}", 0), ("{max_staleness: 3}", 4), ("{max_staleness: 3, order: as_ready}", 0)],
)
def test_weights_that_wait_until_they_are_drawn_with_are_in_host_memory(by_team, settings, copies):
    config, sizes, placement, memory = by_team(f"async={settings}", "model.dtype=fp32")
    own = next(part.bytes for part in memory["train"].terms() if part.what == "actor parameters")
    waiting = [
        (part.bytes, part.least)
        for part in host_memory(config, sizes, placement, gpu=True).peak.terms
        if part.keys == "async.max_staleness"
    ]
    assert waiting == ([(2 * copies * own, 0.0)] if copies else [])


def test_the_team_that_does_not_fit_is_named(judged):
    overrides = [*PPO, *TEAMS, *BILLION, "data.batch_size=8", "rollout.sampling.n=1", "cluster.device_memory_gb=30"]
    failed = [check for check in judged(SERVER, *overrides) if check.status == "fail"]
    assert [check.message.partition(":")[0] for check in failed] == ["team value"]
