"""Checks of the models that a recipe names: policy, reference, critic, teacher, reward model."""

import json

import pytest

from megarl.checks.recipe import check_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32,
}
ROLES = {
    "reference": ["algorithm.kl.use=loss"],
    "critic": ["algorithm.pipeline=ppo", "algorithm.advantage.name=gae"],
    "teacher": ["algorithm.pipeline=distillation", "algorithm.distillation.coef=1"],
}


@pytest.fixture
def failures(config_of):
    def find(*overrides, job="train"):
        return [c for c in check_config(config_of(*overrides), job=job).items if c.status == "fail"]

    return find


@pytest.fixture
def folder(tmp_path):
    def make(**changes):
        path = tmp_path / "other"
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return path

    return make


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantised in a way that is not supported"),
        ({"attention_bias": True}, "variant is not supported"),
        ({"vocab_size": 16}, "different vocabularies"),
    ],
    ids=["quantised", "biases", "vocabulary"],
)
def test_other_models_that_cannot_be_used_are_refused(failures, folder, role, changes, words):
    path = folder(**changes)
    found = [c.message for c in failures(*ROLES[role], f"{role}.path={path}") if c.name == role]
    assert [words in message for message in found if "neither model.safetensors" not in message] == [True]


@pytest.mark.parametrize(("labels", "refused"), [({}, True), ({"id2label": {"0": "value"}}, False)])
def test_a_critic_gives_one_number_per_token(failures, folder, labels, refused):
    path = folder(architectures=["LlamaForTokenClassification"], **labels)  # transformers leaves two labels out
    found = [c.found for c in failures(*ROLES["critic"], f"critic.path={path}") if c.name == "critic"]
    assert [text for text in found if text is not None] == (["2 labels"] if refused else [])


@pytest.mark.parametrize(
    ("model_type", "asked", "refused"),
    [
        ("qwen3", {"attention_dropout": 0.1}, ["attention_dropout"]),
        ("mixtral", {"router_jitter_noise": 0.01}, ["router_jitter_noise"]),
        ("mixtral", {"output_router_logits": "true"}, ["output_router_logits"]),
        ("mixtral", {"output_router_logits": "true", "router_aux_loss_coef": 0.0}, []),
        ("qwen3_moe", {"router_jitter_noise": 0.01}, []),  # this class does not read it
        ("qwen3", {"output_router_logits": "true"}, []),
    ],
)
def test_what_transformers_does_in_training_only_is_refused_for_training_only(failures, model_type, asked, refused):
    overrides = [f"model.hf_config.model_type={model_type}", *(f"model.hf_config.{k}={v}" for k, v in asked.items())]

    def keys(job):
        return [c.key.rpartition(" ")[2] for c in failures(*overrides, job=job) if c.name == "training options"]

    assert keys("train") == keys("sft") == refused
    assert keys("eval") == keys("generate") == []


CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "score"}}
JUDGED = "reward.name=reward_model"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "this is not a classifier"),
        ({**CLASSIFIER, "id2label": {"0": "a", "1": "b"}}, "returns several numbers"),
        ({**CLASSIFIER, "vocab_size": 16}, "reward_model and policy have different vocabularies"),
        ({**CLASSIFIER, "max_position_embeddings": 4}, "fewer tokens than the longest sample"),
    ],
    ids=["language model", "labels", "vocabulary", "positions"],
)
def test_a_reward_model_that_cannot_score_the_samples_is_refused(failures, folder, changes, words):
    found = [f"{c.message}" for c in failures(JUDGED, f"reward_model.path={folder(**changes)}")]
    assert [words in message for message in found if "neither model.safetensors" not in message] == [True], found


@pytest.mark.parametrize(
    ("overrides", "job", "words"),
    [
        ([], "train", "needs a reward model"),
        (["env={name: tools, functions: [game.py:f]}", "reward_model.form=text"], "train", "episodes have turns"),
        (["data.image_key=images"], "train", "a reward model reads only text"),
        (["sft.steps=4", "data.val_files=[v.jsonl]"], "train", "a cold start comes before the reward model"),
        (["data.val_files=[v.jsonl]"], "sft", "megarl sft has no reward model"),
        (["algorithm.advantage.name=remax"], "train", "samples need their scores right after generation"),
        (["reward_model.max_tokens=3"], "eval", "fewer tokens"),
    ],
)
def test_where_a_reward_model_cannot_be_asked_the_recipe_is_refused(failures, overrides, job, words):
    found = [c.message for c in failures(JUDGED, *overrides, job=job)]
    assert [message for message in found if words in message], found


WITHOUT_MODEL = """
from megarl.dag.pipeline import Pipeline
from megarl.runtime.stages import advantage, reward, rollout, update

def build(config):
    p = Pipeline("mine", "rewards of functions", config)
    for stage in (rollout.rollout, reward.reward_submit, reward.reward, advantage.advantage, update.actor_train):
        p.add(stage)
    return p.build()
"""
PARTS = "reward.parts={right: {name: exact_match}, liked: {name: reward_model, weight: 0}}"


def test_a_pipeline_that_never_asks_the_reward_model_is_refused(failures, write):
    write(WITHOUT_MODEL, "without_model.py")
    mine = "algorithm.pipeline=without_model.py:build"
    assert not [c.message for c in failures(mine)]
    refused = [c for c in failures(PARTS, "reward_model.path=org/judge", mine) if c.name == "reward model"]
    assert [(c.key, c.fix) for c in refused] == [
        ("reward.parts.liked.name", "add the nodes by megarl.recipes.grpo.add_reward")
    ]


APART = [
    "cluster.nproc=2",
    "placement.teams={train: {roles: [actor, rollout], devices: 1}, judge: {roles: [reward_model], devices: 1}}",
]


@pytest.mark.parametrize(
    ("overrides", "job", "refused"),
    [
        ([], "train", []),
        (["sft.steps=4"], "train", ["liked"]),
        (APART, "train", ["liked"]),
        ([], "sft", ["liked"]),
        (["sft.steps=4"], "eval", []),
        (["sft.steps=4", "validation.select_by=right"], "train", []),
        (["sft.steps=4", "data.val_files=[]"], "train", []),
    ],
)
def test_no_validation_chooses_by_a_reward_model_that_is_not_there(failures, overrides, job, refused):
    best = ["data.val_files=[v.jsonl]", "validation.sampling={n: 4, temperature: 1.0}", "validation.select_by=liked"]
    found = failures(PARTS, "reward_model.path=org/judge", *best, *overrides, job=job)
    assert [c.found for c in found if c.key == "validation.select_by"] == refused
    assert not [c.message for c in found if c.key in ("reward.parts", "reward.parts.liked.name")]


def test_eval_scores_by_the_reward_model_alone_whatever_comes_before_rl(failures):
    alone = JUDGED, "reward_model.path=org/judge", "data.val_files=[v.jsonl]", "sft.steps=4"
    assert [c.key for c in failures(*alone) if c.name == "reward model"] == ["reward.parts"]
    assert not [c.key for c in failures(*alone, job="eval") if c.name == "reward model"]


@pytest.mark.parametrize(("job", "key"), [("train", "reward_model.parallel.tp"), ("eval", "actor.parallel.tp")])
def test_a_job_without_a_graph_has_the_actors_layout_for_all_models(failures, folder, job, key):
    other = folder(**CLASSIFIER, hidden_size=24, num_attention_heads=3, max_position_embeddings=64)
    layouts = "cluster.nproc=2", "actor.parallel.tp=2", "reward_model.parallel={tp: 2}"
    found = failures(JUDGED, f"reward_model.path={other}", *layouts, job=job)
    assert [c.key for c in found if c.name == "reward_model tensor split"] == [key], found


def test_a_named_reward_model_that_nothing_uses_is_doubtful(config_of):
    found = [c for c in check_config(config_of("reward_model.path=org/judge")).items if c.status == "warn"]
    assert [c.name for c in found if "a reward model is set, but nothing uses it" in c.message] == ["reward model"]


STAGES = """
from dataclasses import replace
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Kind, Role, stage
from megarl.recipes.grpo import add_advantage, add_scoring
from megarl.runtime.stages import rollout, update

@stage(reads=["prompt_ids", "response_ids"], writes=[], kind=Kind.MODEL_TRAIN, role=Role("judge"))
def learn(c, samples, *, judge):
    return samples

def build(config):
    p = Pipeline("judged", "", config).add(rollout.rollout)
    add_scoring(p, config)
    add_advantage(p, config)
    return p.add(update.actor_train).add(learn).build()
"""


@pytest.mark.parametrize(
    ("models", "key", "words"),
    [
        ("{}", "models.judge", "works with the model 'judge'"),
        ("{judge: {train: false}}", "models.judge.path", "a frozen model needs a folder"),
        ("{judge: {path: m}}", "models.judge.train", "the node 'learn' trains this model"),
        ("{judge: {train: true, mini_batch_size: 7}}", "models.judge.mini_batch_size", "mini-batches of 7"),
    ],
)
def test_further_models_that_stages_cannot_use_are_refused(failures, write, models, key, words):
    write(STAGES, "judged.py")
    refused = {check.key: check for check in failures("algorithm.pipeline=judged.py:build", f"models={models}")}
    assert words in refused[key].message
    assert refused[key].fix


def test_keys_that_only_updates_of_megarl_follow_are_doubtful_with_a_stage_of_the_user(config_of, write):
    write(STAGES, "judged.py")
    config = config_of("algorithm.pipeline=judged.py:build", "models={judge: {train: true, ppo_epochs: 2}}")
    found = [c.key for c in check_config(config).items if c.status == "warn" and "models" in c.key]
    assert found == ["models.judge.ppo_epochs"]
