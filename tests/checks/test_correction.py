"""The knobs of rollout correction: presets, overrides, contradictions, and what a plan says about them."""

import pytest

from megarl.checks.dry_run import make_plan
from megarl.config.correction import PRESETS, ResolvedCorrection, RolloutCorrectionConfig, describe_correction
from megarl.config.load import dump_config, load_config
from megarl.dag.pipeline import Pipeline
from megarl.recipes.build import build_task_graph
from megarl.runtime.stages import logprob, rollout
from megarl.system.errors import ConfigError

CORRECTION = "rollout_correction"
AHEAD = (
    "async.max_staleness=1",
    "cluster.nproc=2",
    "placement.teams={train: {roles: [actor], devices: 1}, draw: {roles: [rollout], devices: 1}}",
)


def nodes(config):
    return list(build_task_graph(config).order())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_the_checks_and_builds_a_graph(failures, config_of, preset):
    assert not failures(f"{CORRECTION}.preset={preset}")
    config = config_of(f"{CORRECTION}.preset={preset}")
    knobs = config.rollout_correction.resolved()
    order = nodes(config)
    assert ("rollout_as_old" in order) == knobs.bypass
    assert ("old_logp" in order) == ("rollout_correction" in order) == (knobs.active and not knobs.bypass)


def test_presets_by_hand():
    def resolved(preset):
        return RolloutCorrectionConfig(preset=preset).resolved()

    assert resolved("disabled") == ResolvedCorrection()
    assert resolved("decoupled_token_is") == ResolvedCorrection(is_level="token", is_threshold=2.0)
    assert resolved("decoupled_geo_rs") == ResolvedCorrection(
        rs_level="geometric", rs_threshold=1.001, veto_threshold=1e-4
    )
    assert resolved("ppo_is_bypass") == ResolvedCorrection(mode="bypass", rs_affects_baseline=False)
    pg = ResolvedCorrection(mode="bypass", loss="pg", is_level="sequence", is_threshold=2.0, rs_affects_baseline=False)
    assert resolved("pg_is") == pg
    icepop = resolved("bypass_pg_token_icepop")
    assert (icepop.loss, icepop.is_level, icepop.is_threshold) == ("pg", "token", (0.5, 5.0))
    assert resolved("decoupled_k3_rs").rules == [{"level": "geometric", "stat": "k3", "lower": None, "upper": 0.01}]


def test_any_knob_of_a_preset_can_be_overridden(config_of):
    knobs = config_of(
        f"{CORRECTION}.preset=decoupled_geo_rs",
        f"{CORRECTION}.rs_threshold=1.05",
        f"{CORRECTION}.veto_threshold=0",
        f"{CORRECTION}.is_level=token",
        f"{CORRECTION}.is_threshold=[0.2,3]",
        f"{CORRECTION}.rs=[{{level: seq_max, stat: k2, upper: 2}}]",
    ).rollout_correction.resolved()
    assert (knobs.rs_threshold, knobs.veto_threshold, knobs.is_level, knobs.is_threshold) == (
        1.05,
        0,
        "token",
        (0.2, 3),
    )
    assert [(rule["level"], rule["stat"]) for rule in knobs.rules] == [("geometric", "k1"), ("seq_max", "k2")]


def test_a_dumped_recipe_is_the_same_recipe(config_of, write):
    config = config_of(
        f"{CORRECTION}.preset=pg_is",
        f"{CORRECTION}.is_threshold=[0.5,5]",
        f"{CORRECTION}.rs=[{{level: token, lower: 0.1, upper: 3}}]",
    )
    assert load_config(write(dump_config(config), "again.yaml")) == config


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["mode=bypass", "is_level=token"], "is_level", ["count it twice", "rollout_correction.loss=pg"]),
        (["preset=decoupled_seq_is", "mode=bypass"], "is_level", ["count it twice"]),
        (["loss=pg"], "loss", ["mode bypass"]),
        (["is_level=token", "is_threshold=[3,2]"], "is_threshold", ["larger upper bound"]),
        (["is_level=token", "is_threshold=[1,2,3]"], "is_threshold", ["low < high"]),
        (["preset=ppo_is_bypass", "../algorithm.advantage.name=optimal_token_baseline"], "mode", ["does not compute"]),
        (["rs_level=sequence"], "rs_threshold", ["has no bound", "rs_threshold=2"]),
        (["rs_level=geometric", "rs_threshold=0.9"], "rs_threshold", ["everything would be rejected"]),
        (["rs_level=token", "rs_threshold=2", "rs_threshold_lower=3"], "rs_threshold", ["everything would be"]),
        (["rs=[{level: token, stat: k2}]"], "rs", ["rejects nothing"]),
        (
            ["rs=[{level: token, upper: 2}, {level: token, upper: 3}]"],
            "rs",
            ["two rejection rules have the level token and the stat k1"],
        ),
        (
            ["preset=pg_is", "is_batch_normalize=true", "../algorithm.kl.use=loss"],
            "is_batch_normalize",
            ["without a weight: algorithm.kl.use=loss"],
        ),
        (["veto_threshold=1.5"], "veto_threshold", ["all would be rejected"]),
        (["preset=pg_rs", "rs_affects_baseline=true"], "rs_affects_baseline", ["after the baseline was computed"]),
    ],
)
def test_contradictions_are_said_before_the_start(failures, overrides, key, words):
    found = failures(*(f"{CORRECTION}.{text}".replace(f"{CORRECTION}.../", "") for text in overrides))
    assert [check.key for check in found] == [f"{CORRECTION}.{key}"]
    for word in words:
        assert word in str(found[0].problem())


def test_weights_may_be_divided_by_their_mean_in_bypass(failures):
    assert not failures(f"{CORRECTION}.preset=pg_is", f"{CORRECTION}.is_batch_normalize=true")


def test_pg_and_the_policy_loss_must_agree(failures):
    assert [c.key for c in failures("algorithm.loss.name=pg_is")] == ["algorithm.loss.name"]
    other = failures("algorithm.loss.name=my_mod:fn", f"{CORRECTION}.preset=pg_is")
    assert "algorithm.loss.name" in [check.key for check in other]
    assert not failures("algorithm.loss.name=pg_is", f"{CORRECTION}.preset=pg_is")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rs_threshold=2"], "rollout_correction.rs_level"),
        (["is_batch_normalize=true"], "rollout_correction.is_batch_normalize"),
        (["is_level=token", "is_threshold=0.5"], "rollout_correction.is_threshold"),
    ],
)
def test_doubtful_settings_are_warned_of(warned, overrides, key):
    assert [check.key for check in warned(*(f"{CORRECTION}.{text}" for text in overrides))] == [key]


def test_generation_in_another_precision_or_age_is_warned_of(warned):
    assert [c.key for c in warned("model.dtype=fp32", "rollout.dtype=bf16")] == ["rollout.dtype"]
    assert not warned("model.dtype=fp32", "rollout.dtype=bf16", f"{CORRECTION}.preset=decoupled_token_is")
    assert [c.key for c in warned("rollout.stale_steps=4")] == ["rollout.stale_steps"]
    assert "async.max_staleness" in [c.key for c in warned(*AHEAD)]
    assert not [c for c in warned(*AHEAD, f"{CORRECTION}.preset=decoupled_token_is") if c.key == "async.max_staleness"]


def test_the_default_costs_no_node(config_of):
    assert nodes(config_of()) == ["rollout", "reward_submit", "reward", "advantage", "actor_train"]


def test_several_updates_measure_in_a_node(config_of):
    order = nodes(config_of("data.batch_size=32", "actor.mini_batch_size=16"))
    assert order.index("old_logp") < order.index("rollout_gap") < order.index("advantage")


def test_bypass_has_no_forward_pass_even_with_several_updates_and_kl_in_the_reward(config_of):
    config = config_of(
        f"{CORRECTION}.preset=ppo_is_bypass",
        "data.batch_size=32",
        "actor.mini_batch_size=16",
        "actor.ppo_epochs=2",
        "algorithm.kl.use=reward",
    )
    assert "old_logp" not in nodes(config)
    assert "rollout_as_old" in nodes(config)


def without_correction(config):
    """A pipeline of a user who never heard of correction."""
    p = Pipeline("mine", "no correction", config)
    return p.add(rollout.rollout).add(logprob.old_logp).build()


def test_a_pipeline_that_would_leave_the_correction_out_is_refused(config_of):
    mine = "algorithm.pipeline=tests.checks.test_correction:without_correction"
    assert "old_logp" in nodes(config_of(mine))
    with pytest.raises(ConfigError, match="the pipeline has no node for it"):
        nodes(config_of(mine, f"{CORRECTION}.preset=decoupled_token_is"))


@pytest.mark.parametrize("pipeline", ["dapo", "ppo"])
def test_other_pipelines_correct_before_the_advantage(config_of, pipeline):
    estimator = "gae" if pipeline == "ppo" else "grpo"
    settings = [f"algorithm.pipeline={pipeline}", f"algorithm.advantage.name={estimator}"]
    graph = build_task_graph(config_of(*settings, f"{CORRECTION}.preset=decoupled_seq_is_rs"))
    assert "rollout_correction" in graph.upstream("advantage")


def test_a_plan_says_what_is_corrected_and_between_what(config_of):
    config = config_of(
        f"{CORRECTION}.preset=decoupled_geo_rs_token_tis",
        "model.dtype=fp32",
        "rollout.dtype=bf16",
        "rollout.stale_steps=2",
    )
    text = make_plan(config, "local").text
    for line in describe_correction(config):
        assert line in text
    assert "embedded engine bf16, weights 2 steps old -> trainer fp32" in text
    assert "token, at most 2.0" in text
    assert "geometric k1 below 1/1.001 or above 1.001" in text
