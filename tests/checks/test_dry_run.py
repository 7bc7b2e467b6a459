import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.artifacts.facts import model_facts
from megarl.checks.dry_run import ROWS_SHOWN, coordinates, make_plan
from megarl.config.load import load_config
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig
from megarl.planning.memory import server_bytes
from megarl.planning.shards import stage_parameters, state_bytes

LAYOUTS = [
    (8, ParallelConfig(tp=2)),
    (8, ParallelConfig(tp=2, cp=2)),
    (16, ParallelConfig(tp=2, pp=2, cp=2)),
    (16, ParallelConfig(tp=2, pp=2, ep=4)),
    (16, ParallelConfig(tp=2, pp=2, cp=2, ep=4, etp=2)),
    (12, ParallelConfig(tp=2, pp=3, ep=2, etp=2)),
]


@pytest.mark.parametrize(("nproc", "parallel"), LAYOUTS)
def test_coordinates_are_megatrons(nproc, parallel):
    from megarl.system.compat import megatron as compat

    compat.install()
    from megatron.core.parallel_state import RankGenerator

    order, etp = "tp-cp-ep-dp-pp", parallel.expert_tp
    dp = nproc // parallel.model_parallel_size
    edp = nproc // (etp * parallel.ep * parallel.pp)
    dense = RankGenerator(tp=parallel.tp, ep=1, dp=dp, pp=parallel.pp, cp=parallel.cp, order=order)
    expert = RankGenerator(tp=etp, ep=parallel.ep, dp=edp, pp=parallel.pp, cp=1, order=order)
    groups = [(dense, "dp", "dp"), (dense, "tp", "tp"), (dense, "cp", "cp"), (dense, "pp", "pp")]
    groups += [(expert, "ep", "ep"), (expert, "tp", "etp"), (expert, "dp", "edp")]
    for generator, token, name in groups:
        for ranks in generator.get_ranks(token):
            assert [coordinates(rank, nproc, parallel)[name] for rank in ranks] == list(range(len(ranks)))


def test_plan_shows_everything_and_starts_nothing(config_of, tmp_path):
    before = set(tmp_path.iterdir())
    plan = make_plan(config_of("cluster.nproc=2"), "local")
    for title in ("Configuration", "Task graph", "Ranks (local launcher)", "Memory per rank", "Checks"):
        assert f"== {title}" in plan.text
    assert plan.problems == []
    assert "rollout" in plan.text.partition("== Task graph ==")[2].partition("== Ranks")[0]
    assert set(tmp_path.iterdir()) == before


def test_plan_folds_the_defaults(config_of):
    config = config_of("cluster.nproc=2", "actor.optim.lr=3e-7")
    text = make_plan(config, "local", full=False).text.partition("== Steps ==")[0]
    assert "    lr: 3.0e-07\n" in text
    assert "warmup_steps" not in text
    assert len(text.splitlines()) < 50
    assert "keys with their defaults, which --full shows" in text
    assert "warmup_steps" in make_plan(config, "local", full=True).text


def test_steps_are_epochs_of_the_rows(config_of, write):
    write('{"prompt": "1+1=", "answer": "2"}\n' * 20, "rows.jsonl")
    given = ("data.train_files=rows.jsonl", "data.batch_size=8", "trainer.steps=10")
    text = make_plan(config_of(*given), "local").text.partition("== Steps ==\n")[2]
    assert text.startswith("10 steps of 8 = 4 epochs of 20 prompts\n")


def test_memory_of_servers_is_theirs(config_of):
    embedded = make_plan(config_of("cluster.nproc=2"), "local").text.partition("== Memory")[2]
    served = make_plan(config_of("cluster.nproc=2", "rollout.engine=sglang"), "local").text.partition("== Memory")[2]
    assert ("key/value cache" in embedded, "a server's weights" in embedded) == (True, False)
    assert ("key/value cache" in served, "a server's weights" in served) == (False, True)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (4, 4), (4, 2)])
def test_ranks_of_a_server_share_its_weights(config_of, tp, ep):
    facts = model_facts(ModelConfig(path="Qwen/Qwen3-30B-A3B"))
    config = config_of(f"rollout.sglang.tp_size={tp}", f"rollout.sglang.ep_size={ep}", "model.dtype=bf16")
    # Routers and norms are on all ranks.
    assert server_bytes(config, facts) == pytest.approx(30_532_122_624 * 2 / tp, rel=2e-3)


@pytest.mark.parametrize(
    ("job", "words", "absent"),
    [
        ("sft", ["fine-tunes a fresh model", "7 steps of 16 examples", "checkpoints/ and hf/"], "estimator"),
        (
            "eval",
            ["generates responses of org/trained to megarl", "2 per prompt, greedy", "scores them with"],
            "[  ok] batch",
        ),
        ("generate", ["generates responses of org/trained", "at most 8 tokens", "responses.jsonl"], "reward:"),
    ],
)
def test_plan_of_another_command_says_what_that_one_does(config_of, job, words, absent):
    settings = ["sft={steps: 7, batch_size: 16}", "data.val_files=megarl.recipes.arithmetic:make_rows"]
    trained = ["model.hf_config=null", "model.path=org/trained"] if job != "sft" else []
    plan = make_plan(config_of(*settings, *trained, "validation.sampling.n=2"), "local", job)
    assert plan.problems == []
    text = plan.text.partition(f"== What megarl {job} does ==")[2]
    assert all(word in text for word in words), text
    assert "Task graph" not in text
    assert absent not in text


def test_a_kl_term_that_is_off_is_said_to_be_off(config_of):
    assert "[  ok] KL: off\n" in make_plan(config_of(), "local").text
    assert "[  ok] KL: low_var_kl\n" in make_plan(config_of("algorithm.kl.use=loss"), "local").text


def test_failed_checks_are_named_in_the_text_and_told_in_the_problems(config_of):
    plan = make_plan(config_of("cluster.nproc=4", "actor.parallel.tp=4"), "local")
    assert "[fail] actor tensor split: actor.parallel.tp, see the end" in plan.text
    assert [problem.where for problem in plan.problems] == ["actor.parallel.tp"]


def test_plan_of_a_layout_that_does_not_divide(config_of):
    plan = make_plan(config_of("cluster.nproc=3", "actor.parallel.tp=2"), "local")
    assert "the processes do not divide into replicas" in plan.text


TEAMS = (
    "algorithm.kl.use=loss",
    "cluster.nproc=5",
    "data.batch_size=256",
    "rollout.sampling={n: 8, max_new_tokens: 240}",
    "reference.parallel.pp=2",
    "placement.teams={train: {roles: [actor, rollout], devices: 1}, frozen: {roles: [reference], devices: 4}}",
)


def test_plan_of_several_teams_shows_them_their_ranks_memory_and_samples(config_of):
    plan = make_plan(config_of(*TEAMS), "ray")
    assert plan.problems == []
    lines = [" ".join(line.split()) for line in plan.text.splitlines()]
    frozen = next(line for line in lines if line.startswith("frozen reference"))
    assert frozen.startswith("frozen reference pp 2, dp 2 4 0.")
    assert frozen.endswith(" ref_logp")
    assert "frozen 4 3 1 1 0 0" in lines, "worker 4 is rank 3 of its team: replica 1, stage 1"
    # 256 prompts * (8 samples * (8 bytes * 2 fields * (16 + 240) tokens + 256) + 4096)
    assert lines[lines.index("rollout train frozen 9.96") + 1] == "fields: prompt_ids, response_ids"
    assert lines[lines.index("ref_logp frozen train 5.77") + 1] == "fields: ref_logp"
    assert "object store of a Ray that the run starts: 0.134 GB" in plan.text
    assert lines.index("team train") < lines.index("team frozen") < lines.index("== Checks ==")


def test_plan_of_one_team_does_not_speak_of_teams(config_of):
    text = make_plan(config_of("cluster.nproc=2"), "local").text
    assert "== Teams ==" not in text
    assert "handed over" not in text


def test_a_team_that_does_not_divide_is_in_the_table_all_the_same(config_of):
    plan = make_plan(config_of(*TEAMS, "placement.teams={train: {devices: 2}, frozen: {devices: 3}}"), "ray")
    assert [problem.where for problem in plan.problems] == ["placement.teams.frozen.devices"]
    assert "frozen  reference" in plan.text
    assert "the processes do not divide into replicas" in plan.text


def test_long_rank_tables_are_shortened(config_of):
    plan = make_plan(config_of(f"cluster.nproc={4 * ROWS_SHOWN}", f"data.batch_size={4 * ROWS_SHOWN}"), "torchrun")
    table = plan.text.partition("== Ranks")[2].partition("==")[2].partition("== Memory")[0]
    assert f"... {3 * ROWS_SHOWN} ranks left out ..." in table
    assert len(table.strip().splitlines()) == ROWS_SHOWN + 2


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "p.add(same, 'a', deps=['b'])\n    p.add(same, 'b', deps=['a'])\n    return p.build()",
            ["cycle"],
        ),
        (
            "p.add(stage(reads=['no_such_field'], writes=[])(same), 'a')\n    return p.build()",
            ["no_such_field", "'a'"],
        ),
        ("p.add(same, 'a', deps=['nowhere'])\n    return p.build()", ["nowhere"]),
    ],
)
def test_unsound_user_pipeline_is_refused(write, config_of, monkeypatch, tmp_path, body, words):
    name = f"pipeline_{abs(hash(body))}"
    write(
        "from megarl.dag.pipeline import Pipeline\nfrom megarl.dag.stage import stage\n"
        "def same(worker, batch): return batch\n"
        f"def build(config):\n    p = Pipeline('mine')\n    {body}\n",
        f"{name}.py",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = make_plan(config_of(f"algorithm.pipeline={name}:build"), "local")
    assert len(plan.problems) == 1
    for word in words:
        assert word in str(plan.problems[0])


def test_pipeline_module_that_raises_is_named(write, config_of, monkeypatch, tmp_path):
    write("raise RuntimeError('boom')\ndef build(config): ...", "broken_pipeline.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = make_plan(config_of("algorithm.pipeline=broken_pipeline:build"), "local")
    assert "RuntimeError: boom" in str(plan.problems[0])


# -- memory ----------------------------------------------------------------------------------------------------------


def test_one_process_holds_the_whole_model():
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"):
        facts = model_facts(ModelConfig(path=name))
        dense, expert = stage_parameters(facts, ParallelConfig())
        assert dense + expert == pytest.approx(facts.parameters, rel=1e-5)


def test_optimizer_state_is_shared_by_the_replicas():
    facts = replace(model_facts(ModelConfig(path="Qwen/Qwen3-30B-A3B")), layers=4)
    whole = state_bytes(facts, ParallelConfig(), EngineConfig(), "bf16", dp=1)
    shared = state_bytes(facts, ParallelConfig(), EngineConfig(), "bf16", dp=4)
    spread = state_bytes(facts, ParallelConfig(ep=4), EngineConfig(), "bf16", dp=4)
    own = state_bytes(facts, ParallelConfig(), EngineConfig(distributed_optimizer=False), "bf16", dp=4)
    assert shared["optimizer"] == pytest.approx(whole["optimizer"] / 4)
    assert spread["optimizer"] == pytest.approx(shared["optimizer"])
    assert own["optimizer"] == whole["optimizer"]
    assert whole["optimizer"] == pytest.approx(6 * whole["parameters"])


# -- shipped recipes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "grpo_quickstart",
        "ppo_quickstart",
        "dapo_quickstart",
        "dpo_quickstart",
        "reward_model_quickstart",
        "grpo_tools_quickstart",
        "grpo_agent_quickstart",
        pytest.param(
            "grpo_code_quickstart", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
        ),
        "grpo_self_play_quickstart",
        "grpo_gsm8k_calc",
        "grpo_qwen3_8b_8gpu",
        "grpo_qwen2_5_7b_math_8gpu",
        "grpo_qwen3_30b_a3b_32gpu",
        "srpo_reach_quickstart",
        "ppo_reach_quickstart",
        "ppo_metaworld",
        "srpo_flow_reach_quickstart",
        "srpo_metaworld",
        "srpo_metaworld_ml10",
        "srpo_libero_openvla_oft_8gpu",
        "srpo_libero_spatial_openvla_oft_8gpu",
        "srpo_libero_object_openvla_oft_8gpu",
        "srpo_libero_goal_openvla_oft_8gpu",
        "srpo_libero_plus_openvla_oft_8gpu",
        "simplevla_robotwin_8gpu",
        "grpo_qwen2_5_vl_7b_8gpu",
        "grpo_qwen3_vl_8b_8gpu",
        "grpo_qwen3_vl_30b_a3b_32gpu",
    ],
)
def test_shipped_recipe_passes_its_dry_run(name, python):
    servers = [f"rollout.sglang.python={python}"] if load_config(name).rollout.engine == "sglang" else []
    plan = make_plan(load_config(name, servers), "torchrun")
    assert plan.problems == []
    assert " 0 warn" in plan.text


def test_layouts_of_large_models_in_the_docs_fit():
    page = (Path(__file__).parents[2] / "docs/planning.md").read_text()
    _, _, section = page.partition("## Large models")
    table, commands, _ = section.split("```")[:3]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    lines = [line for line in commands.splitlines() if line]
    assert len(rows) == len(lines)
    for (_, gpus, layers, memory, _), line in zip(rows, lines, strict=True):
        _, _, recipe, _, *overrides = line.split()
        config = load_config(recipe, overrides)
        plan = make_plan(config, "torchrun")
        assert plan.problems == [], line
        assert config.cluster.nproc == int(gpus)
        assert f"chunks of {layers}\n" in plan.text, line
        assert f"the actor's update needs about {memory} of 80.0 GB" in plan.text, line


@pytest.mark.parametrize("name", ["grpo_quickstart", "srpo_libero_openvla_oft_8gpu"])
def test_dry_run_is_quick_and_needs_no_torch(name):
    code = (
        "import sys; from megarl.config.load import load_config; from megarl.checks.dry_run import make_plan;"
        f"make_plan(load_config('{name}'), 'local');"
        "print([m for m in ('torch', 'ray', 'transformers', 'megatron', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env={**os.environ})
    assert done.stdout.strip() == "[]", done.stderr
