"""What single estimators, losses and filters need of the rest of a recipe is said before anything starts."""

import pytest

from megarl.algorithms.advantages import ADVANTAGES
from megarl.checks.recipe import check_config
from megarl.system.errors import ConfigError

GDPO = "algorithm.advantage.name=gdpo"
PARTS = "algorithm.advantage.parts={right: 1.0}"
WHOLE = "algorithm.distillation={coef: 1, estimator: jsd, topk: null}"
DISTIL = "algorithm.advantage.name=reverse_kl"
DAPO = ["algorithm.pipeline=dapo", "algorithm.dynamic_sampling.enabled=true"]
WITHOUT_CRITIC = sorted(set(ADVANTAGES.names()) - {"gae"})


def estimator(name: str) -> list[str]:
    """The overrides that choose it, with what it cannot do without."""
    needs = {"gdpo": [PARTS], "gigpo": ["env={name: game.py:Game}", "rollout.limits.tokens=9"]}
    return [f"algorithm.advantage.name={name}", *needs.get(name, [])]


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (
            ["algorithm.advantage.name=remax", "algorithm.pipeline=ppo"],
            "algorithm.pipeline",
            ["remax", "greedy rollout"],
        ),
        (
            ["algorithm.overlong.buffer_tokens=9", "env={name: game.py:Game}", "rollout.limits.tokens=9"],
            "algorithm.overlong.buffer_tokens",
            ["longest response (9 tokens)"],
        ),
        (["algorithm.advantage.name=gigpo"], "algorithm.advantage.name", ["no environment of text"]),
        ([GDPO], "algorithm.advantage.parts", ["none is set"]),
        ([GDPO, PARTS], "algorithm.advantage.parts", ["exact_match returns one number", "'right'"]),
        ([GDPO, PARTS, "algorithm.kl.use=reward"], "algorithm.kl.use", ["penalty", "none or loss"]),
        ([GDPO, PARTS, "algorithm.overlong.buffer_tokens=2"], "algorithm.overlong.buffer_tokens", ["penalty"]),
        (["model.lora.targets=[experts]"], "model.lora.targets", ["no layers for experts", "attention", "mlp"]),
        (["model.lora={dropout: 0.1, targets: [experts]}"], "model.lora.dropout", ["dropout is not supported"]),
        (["model.lora.targets=[experts]", "actor.parallel.etp=2"], "actor.parallel.etp", ["1 or actor.parallel.tp"]),
        ([DISTIL], "teacher.path", ["needs a teacher"]),
        ([DISTIL, "teacher.path=no/such/model"], "teacher.path", ["model folder does not exist"]),
        ([DISTIL, "teacher.path=."], "teacher.path", ["no config.json"]),
        ([DISTIL, "teacher.path=Qwen/Qwen3-8B"], "teacher.path", ["different vocabularies", "'151936", "32 tokens"]),
        (["algorithm.distillation.coef=0.1"], "teacher.path", ["needs a teacher"]),
        (
            [DISTIL, "teacher={path: a, models: {b: {path: b}}}"],
            "teacher.path",
            ["both teacher.path and teacher.models"],
        ),
        ([DISTIL, "teacher.models={'a/b': {path: .}}"], "teacher.models.a/b", ["becomes part of metric names"]),
        (
            [DISTIL, "teacher.models={b: {path: no/such/model}}"],
            "teacher.models.b.path",
            ["model folder does not exist"],
        ),
        (["algorithm.distillation.estimator=klx"], "algorithm.distillation.estimator", ["did you mean"]),
        (["algorithm.kl={use: reward, estimator: full}"], "algorithm.kl.estimator", ["both distributions", "use=loss"]),
        (
            ["algorithm.kl={use: loss, estimator: full}", WHOLE, "teacher.path=."],
            "algorithm.kl.estimator",
            ["with one model only"],
        ),
        (["algorithm.kl={use: reward, estimator: unbiased_k3}"], "algorithm.kl.estimator", ["pi / old", "use=loss"]),
        (
            ["algorithm.distillation={coef: 1, estimator: unbiased_k3}"],
            "algorithm.distillation.estimator",
            ["only the KL to the reference in the loss"],
        ),
        (
            ["algorithm.distillation={coef: 1, estimator: full}"],
            "algorithm.distillation.estimator",
            ["algorithm.distillation.estimator=reverse_kl algorithm.distillation.topk=null"],
        ),
        (
            ["algorithm.distillation={coef: 1, estimator: jsd, topk: null, tail: ignore}", "teacher.path=."],
            "algorithm.distillation.tail",
            ["no other tokens are left"],
        ),
        (["algorithm.filter.low=0.9", "algorithm.filter.high=0.1"], "algorithm.filter.low", ["between 0.9 and 0.1"]),
        (
            ["algorithm.loss.name=clip_cov", "algorithm.loss.cov_low=5"],
            "algorithm.loss.cov_low",
            ["between cov_low and cov_high"],
        ),
        (
            ["algorithm.kl={use: reward, adaptive: true, horizon: 51}"],
            "algorithm.kl.horizon",
            ["> 51.2"],
        ),
        (["algorithm.advantage.name=opo", "rollout.sampling.n=1"], "rollout.sampling.n", ["opo compares"]),
        (["algorithm.kl={use: loss, estimator: forward_kl_topk}"], "algorithm.kl.estimator", ["with a teacher"]),
        (["algorithm.distillation.task_loss=false"], "algorithm.distillation.task_loss", ["nothing is trained"]),
        (
            ["algorithm.distillation={coef: 1, through: policy}", "algorithm.loss.name=kl_cov", "teacher.path=."],
            "algorithm.distillation.through",
            ["kl_cov chooses tokens"],
        ),
        (["algorithm.advantage.lone_score=true"], "algorithm.advantage.lone_score", ["allow_singleton=true"]),
        (
            ["algorithm.advantage={name: optimal_token_baseline, is_weighted: true}"],
            "algorithm.advantage.is_weighted",
            ["decoupled_token_is"],
        ),
        (
            ["algorithm.loss.name=m2po", "rollout_correction.preset=decoupled_token_is"],
            "rollout_correction.is_level",
            ["m2po already has the ratio pi_theta / pi_rollout"],
        ),
        (["algorithm.loss.echo_coef=0.05"], "algorithm.loss.echo_coef", ["an environment that returns text"]),
        (
            ["algorithm.loss.echo_coef=0.05", "env={name: agent, command: [python, a.py]}"],
            "algorithm.loss.echo_coef",
            ["other than agent"],
        ),
        (
            [
                *("algorithm.loss.echo_coef=0.05", "env={name: game.py:Game}"),
                "rollout_correction.preset=bypass_ppo_clip_k3_rs",
            ],
            "algorithm.loss.echo_coef",
            ["another divisor"],
        ),
        (["algorithm.resampling.name=maxmin"], "algorithm.resampling.name", ["did you mean max_min?"]),
        (
            ["algorithm.pipeline=ppo", "algorithm.advantage.name=gae", "critic.aggregation=seq-mean-token-sum-norm"],
            "critic.sum_norm",
            ["critic.sum_norm=8"],
        ),
    ],
)
def test_what_cannot_work_is_refused(failures, overrides, key, words):
    found = [check for check in failures(*overrides) if check.key == key]
    assert found
    text = "\n".join(str(check.problem()) for check in found)
    assert all(word in text for word in words), text
    assert found[0].fix


def test_a_loss_of_a_file_that_chooses_tokens_before_the_teacher_speaks_is_refused_too(failures, tmp_path):
    (tmp_path / "choosing.py").write_text(
        "from megarl.algorithms.losses import POLICY_LOSSES\n"
        "def look(old_logp, advantages, mask, cfg):\n    return {'chosen': advantages > 0}\n"
        "@POLICY_LOSSES.register(prepare=look)\n"
        "def choosing(logp, old_logp, advantages, mask, cfg, *, offsets, chosen):\n    return -advantages * logp, {}\n"
    )
    through = ("algorithm.distillation={coef: 1, through: policy}", "teacher.path=.")
    found = failures(f"algorithm.loss.name={tmp_path / 'choosing.py'}:choosing", *through)
    assert "algorithm.distillation.through" in [check.key for check in found]


def test_the_ppo_pipeline_has_no_filter(failures):
    ppo = ("algorithm.pipeline=ppo", "algorithm.advantage.name=gae", "algorithm.filter.truncated=true")
    assert "algorithm.filter" in [check.key for check in failures(*ppo)]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.loss.name=gspo"], "algorithm.loss.aggregation"),
        (["algorithm.loss.name=ipo"], "rollout_correction.mode"),
        (["algorithm.loss.name=m2po", "rollout_correction.preset=ppo_is_bypass"], "rollout_correction.mode"),
        (["algorithm.loss.name=gpg", "actor.ppo_epochs=2"], "algorithm.loss.name"),
        (["algorithm.loss.name=gpg", "rollout_correction.preset=ppo_is_bypass"], "algorithm.loss.name"),
        (["algorithm.loss.name=gpg", *DAPO], "algorithm.dynamic_sampling.surplus"),
        (["teacher.path=."], "teacher.path"),
        (["actor.shuffle=true"], "actor.shuffle"),
        (["algorithm.distillation={coef: 1, estimator: k1}"], "algorithm.distillation.estimator"),
        (
            ["algorithm.distillation={coef: 1, estimator: forward_kl_topk, through: policy}"],
            "algorithm.distillation.through",
        ),
    ],
)
def test_what_is_doubtful_is_said(warned, overrides, key):
    assert key in [check.key for check in warned(*overrides)]


@pytest.mark.parametrize(
    ("override", "key", "reader"),
    [
        (PARTS, "parts", "gdpo"),
        ("algorithm.advantage.gamma=0.9", "gamma", "gae, gigpo, reinforce_pp"),
        ("algorithm.advantage={name: reinforce_pp, lam: 0.9}", "lam", "gae"),
        ("algorithm.advantage={name: rloo, norm_by_std: false}", "norm_by_std", "grpo, grpo_passk"),
        ("algorithm.advantage={name: remax, allow_singleton: true}", "allow_singleton", "gdpo, gigpo, gpg, grpo"),
    ],
)
def test_what_the_estimator_does_not_read_is_refused(config_of, override, key, reader):
    with pytest.raises(ConfigError, match=rf"unknown key algorithm\.advantage\.{key}: (?s:.*) reads it: {reader}"):
        config_of(override)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.advantage.name=remax", "rollout.sampling.n=1"],
        [GDPO, "algorithm.advantage.parts={overall: 1.0}"],
        [GDPO, "algorithm.advantage.parts={overall: 1.0, right: 1.0}", "reward.parts.right={name: exact_match}"],
        ["algorithm.advantage={name: reinforce_pp, gamma: 0.9}"],
        ["algorithm.advantage={norm_by_std: false, allow_singleton: true}"],
        ["algorithm.advantage={name: 'mine:estimate', gamma: 0.9, parts: {right: 1.0}}"],
        ["algorithm.loss.name=gspo", "algorithm.loss.aggregation=seq-mean-token-mean"],
        ["algorithm.loss={name: gspo, aggregation: seq-mean-token-sum, clip_low: 2e-3, clip_high: 2.5e-3}"],
        ["algorithm.loss.name=vespo", "rollout_correction.preset=ppo_is_bypass"],
        ["algorithm.loss.name=m2po"],
        ["algorithm.filter.high=0.9", *DAPO],
    ],
)
def test_what_works_passes(write, failures, warned, overrides):
    write("def estimate(token_rewards, mask, gamma, parts):\n    return token_rewards, token_rewards", "mine.py")
    assert not failures(*overrides)
    assert not warned(*overrides)


def test_the_graph_of_every_estimator_holds_what_it_reads(config_of):
    from megarl.recipes.build import build_task_graph

    for name in WITHOUT_CRITIC:
        for pipeline in ([], DAPO):
            settings = [*estimator(name), "algorithm.filter.high=0.9", *pipeline]
            graph = build_task_graph(config_of(*settings))
            assert graph.order()[-2:] == ["advantage", "actor_train"], (name, pipeline)


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_no_estimator_is_refused_in_the_dapo_pipeline(failures, name):
    found = failures(*estimator(name), *DAPO)
    assert "algorithm.pipeline" not in [check.key for check in found]


def test_parts_are_looked_for_in_the_source_of_the_reward(write, failures, warned):
    source = "def score(samples):\n    return [dict(overall=1.0, right=1.0) | {'short': 0.0} for s in samples]"
    write(source, "rewards.py")
    mine = [GDPO, "reward.name=rewards.py:score"]
    assert not warned(*mine, "algorithm.advantage.parts={right: 1.0, short: 1.0, overall: 1.0}")
    (doubtful,) = warned(*mine, "algorithm.advantage.parts={right: 1.0, shrt: 1.0}")
    assert (doubtful.key, doubtful.found) == ("algorithm.advantage.parts", ["shrt"])
    assert not failures(*mine, "algorithm.advantage.parts={right: 1.0, shrt: 1.0}")


@pytest.mark.parametrize(("last", "doubtful"), [("advantages", True), ("advantages, actor_train", False)])
def test_a_pipeline_in_which_no_model_learns_is_doubtful(warned, last, doubtful):
    doubts = warned(f"algorithm.pipeline=[rollout, scoring, {last}]")
    assert any("no node trains a model" in check.message for check in doubts) == doubtful


POLICIES = "policies={white: {}, black: {advantage: {name: rloo}, compare: episode}}"
AGENT = "env={name: agent, function: 'megarl.recipes.self_play:play'}"
OWN = ("policies.white.model=white", "models={white: {train: true}}")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ([POLICIES], "env.name", "called by an agent"),
        ([POLICIES, AGENT, "env.train=main"], "env.train", "policies.NAME.train chooses"),
        ([POLICIES, AGENT, "data.curriculum.pools={all: {}}"], "data.curriculum", "counts the samples"),
        ([POLICIES, AGENT, "policies.white.advantage={name: remax}"], "policies.white.advantage.name", "greedy_score"),
        (
            [POLICIES, AGENT, "policies.white.advantage={name: rae, decay: 2}"],
            "policies.white.advantage.decay",
            "out of range",
        ),
        ([POLICIES, AGENT, "rollout.sampling.n=1"], "rollout.sampling.n", "only one of white"),
        ([POLICIES, AGENT, "policies.white.train=false", "policies.black.train=false"], "policies", "no policy is"),
        ([POLICIES, AGENT, "policies.black.sampling.max_new_tokens=900"], "policies.black.sampling.max_new_tokens", ""),
        ([POLICIES, AGENT, "policies.white.model=grey"], "policies.white.model", "no model of this name"),
        ([POLICIES, AGENT, "policies.white.sampling.top_k=5"], "policies.white.sampling.top_k", "share weights"),
        ([POLICIES, AGENT, *OWN, "rollout.stale_steps=1"], "rollout.stale_steps", "embedded engine"),
        ([POLICIES, AGENT, "algorithm.filter.low=0.1"], "algorithm.filter", "counts the samples"),
        (
            [POLICIES, AGENT, *OWN, "algorithm.kl.use=loss", "policies.white.sampling.temperature=0.5"],
            "algorithm.kl.use",
            "not at the temperature of white",
        ),
        (
            [POLICIES, AGENT, OWN[0], "models={white: {train: true, path: m}}", "algorithm.kl.use=loss"],
            "algorithm.kl.use",
            "does not begin as the run's policy",
        ),
        ([POLICIES, AGENT, "policies.white.reward.name=numeric"], "policies.white.reward", "gives the rewards"),
        (
            [POLICIES, AGENT, "env.score=reward", "policies.white.reward.name=reward_model"],
            "policies.white.reward.name",
            "samples of all policies",
        ),
        (
            [POLICIES, AGENT, "env.score=reward", "policies.white.reward={name: numeric, kwargs: {tolerence: 1}}"],
            "policies.white.reward.kwargs.tolerence",
            "unknown key",
        ),
        ([POLICIES, AGENT, *OWN, "models.white.engine.offload=true"], "models.white.engine.offload", "generate at"),
    ],
)
def test_what_does_not_go_with_several_policies_is_refused(failures, overrides, key, words):
    refused = {check.key: check for check in failures("sft.steps=0", *overrides)}
    assert words in refused[key].message
    assert refused[key].fix or refused[key].allowed


def test_evaluation_refuses_what_generation_with_several_policies_does_not_support(config_of):
    config = config_of("data.val_files=[v.jsonl]", POLICIES, AGENT, *OWN, "env.models=[gpt]")
    found = {check.key: check.fix for check in check_config(config, job="eval").items if check.status == "fail"}
    assert found["env.models"].startswith("set env.models=[], or")
    assert found["policies"] == "set policies.white.model=null"


def test_several_policies_with_an_agent_pass(failures):
    more = ("algorithm.kl.use=loss", "data.batch_size=4", "models.white.mini_batch_size=2", "actor.mini_batch_size=1")
    assert failures("sft.steps=0", "cluster.timeout_s=600", POLICIES, AGENT, *OWN, *more) == []
