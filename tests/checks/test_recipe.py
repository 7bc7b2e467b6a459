import json
import shlex

import pytest

from megarl.artifacts.facts import ModelFacts
from megarl.checks.recipe import ConfigWarning, check_config, validate
from megarl.checks.rows import check_rows
from megarl.config.base import ConfigErrors
from megarl.config.load import load_config
from megarl.data.tokenizer import character_tokenizer
from megarl.system.errors import ConfigError, DataError
from tests.config.conftest import RECIPE

MOE = ModelFacts("test", "qwen3_moe", 8, 64, 8, 4, 16, 96, 1000, 512, False, experts=12, experts_per_token=2)
DENSE = ModelFacts("test", "qwen3", 12, 64, 12, 4, 16, 96, 1000, 512, False)


def test_whether_prompts_go_through_a_chat_template_is_told(config_of, tmp_path):
    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "chat")

    def said(*overrides: str) -> list[str]:
        items = check_config(config_of(*overrides)).items
        return [check.message for check in items if check.name == "chat template"]

    assert said() == []
    assert said("model.tokenizer=chat") == ["the tokenizer's, around every prompt"]
    assert said("model.tokenizer=chat", "data.chat_template=false") == ["none; the tokenizer's is not used"]
    [base] = said("model.path=org/some-Base", "model.hf_config=null", "model.tokenizer=chat")
    assert "data.chat_template=true uses the tokenizer's" in base


@pytest.mark.parametrize(
    ("name", "content", "where", "words"),
    [
        ("no.jinja", None, "data.override_chat_template", "the template file does not exist"),
        ("a.jinja", b"{% for m in messages %}\n{{ m.content }\n", "data.override_chat_template, line 2", "broken"),
        ("a.jinja", "{{ '\xe4' }}".encode("latin-1"), "data.override_chat_template", "not UTF-8"),
        ("a.jinja", "{{ messages }}".encode("utf-16"), "data.override_chat_template", "not UTF-8"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused_before_the_start(
    failures, tmp_path, name, content, where, words
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    failed = only(failures(f"data.override_chat_template={name}"))
    assert failed.key == where
    assert words in failed.message


def test_templates_of_transformers_parse(failures):
    text = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert failures(f"data.override_chat_template={text}") == []


def test_held_out_rows_that_are_trained_on_are_a_warning(warned, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    files = ["data.train_files=[a.jsonl]", f"data.val_files=[{tmp_path}/../{tmp_path.name}/a.jsonl,b.jsonl]"]
    [check] = warned(*files)
    assert (check.key, len(check.found)) == ("data.val_files", 1)
    assert warned("data.train_files=[a.jsonl]", "data.val_files=[b.jsonl]") == []
    assert warned("data.val_files=['megarl.recipes.arithmetic:make_rows']") == []  # it is told the split


def only(failures):
    assert len(failures) == 1, failures
    return failures[0]


def test_a_good_recipe_passes_every_check(config_of):
    assert {check.status for check in check_config(config_of()).items} == {"ok"}


PAIRS = ("algorithm.pipeline=dpo", "preference={}", "algorithm.kl.use=none")


# -- one case per way to be wrong: overrides, key to change, words of the message ------------------------------------


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        # processes
        (
            ["cluster.nproc=3", "actor.parallel.tp=2"],
            "cluster.nproc",
            ["3 is not divisible by 2", "set cluster.nproc to 2 or 4, or actor.parallel.tp to 1"],
        ),
        (
            ["cluster.nproc=2", "actor.parallel.tp=3"],
            "actor.parallel.tp",
            ["4 attention heads", "nor do 2 processes make whole replicas of 3", "set actor.parallel.tp to 2"],
        ),
        (
            ["cluster.nproc=2", "actor.parallel.tp=3", "model.hf_config.num_key_value_heads=4"],
            "actor.parallel.tp",
            ["allowed: 1, 2\n", "set actor.parallel.tp to 2, or to 4 with cluster.nproc=4"],
        ),
        (["cluster.nproc=2", "actor.parallel.pp=4"], "cluster.nproc", ["set cluster.nproc to 4"]),
        (
            ["cluster.nproc=6", "cluster.nnodes=4", "data.batch_size=6"],
            "cluster.nproc",
            ["6 is not divisible by 4", "4 or 8"],
        ),
        (["cluster.nproc=2", "cluster.timeout_s=300"], "reward.timeout_s", ["give up after", "timeout_s=150"]),
        (["cluster.nnodes=2"], "cluster.nnodes", ["cannot be spread over 2 machines"]),
        # batches
        (
            ["cluster.nproc=4", "data.batch_size=30"],
            "data.batch_size",
            ["data.batch_size 30 is not divisible by 4 (the data parallel size)", "28 or 32"],
        ),
        (["data.batch_size=32", "actor.mini_batch_size=12"], "actor.mini_batch_size", ["8, 16, 32"]),
        (["data.batch_size=32", "actor.mini_batch_size=64"], "actor.mini_batch_size", ["mini-batches of 64"]),
        (
            ["cluster.nproc=2", "data.batch_size=6", "actor.mini_batch_size=3"],
            "actor.mini_batch_size",
            ["actor.mini_batch_size 3 is not divisible by 2", "2 or 4"],
        ),
        (["cluster.nproc=2", "sft.steps=1", "sft.batch_size=5"], "sft.batch_size", ["4 or 6"]),
        # layout rules
        (["actor.parallel.vpp=2"], "actor.parallel.vpp", ["more than one pipeline stage"]),
        (["actor.parallel.sp=true"], "actor.parallel.sp", ["tp is 1"]),
        (["cluster.nproc=3", "actor.parallel.tp=3", "data.batch_size=3"], "actor.parallel.tp", ["4 attention heads"]),
        (
            ["cluster.nproc=4", "actor.parallel.tp=4"],
            "actor.parallel.tp",
            ["2 key/value heads", "never copied", "allowed: 1, 2", "set actor.parallel.tp to 2"],
        ),
        (["cluster.nproc=6", "actor.parallel.pp=6"], "actor.parallel.pp", ["4 layers are fewer", "at most 4"]),
        (
            ["cluster.nproc=2", "actor.parallel.pp=2", "actor.parallel.last_stage_layers=4"],
            "actor.parallel.last_stage_layers",
            ["4 layers cannot be split into 2 chunks", "at least one layer"],
        ),
        (["actor.parallel.first_stage_layers=2"], "actor.parallel.first_stage_layers", ["without pipeline stages"]),
        (
            ["cluster.nproc=2", "actor.parallel.pp=2", "actor.parallel.vpp=3"],
            "actor.parallel.vpp",
            ["4 layers are fewer than 6 pipeline chunks", "at most 2"],
        ),
        (["cluster.nproc=2", "actor.parallel.ep=2"], "actor.parallel.ep", ["qwen3 has none"]),
        (["actor.parallel.etp=1"], "actor.parallel.etp", ["qwen3 has none"]),
        # objective
        (["algorithm.advantage.name=gpro"], "algorithm.advantage.name", ["unknown advantage estimator", "mean grpo?"]),
        (["algorithm.loss.name=vtrace"], "algorithm.loss.name", ["unknown policy loss", "allowed: cispo, "]),
        (["algorithm.loss.name=pppo"], "algorithm.loss.name", ["unknown policy loss", "mean ppo?"]),
        (["algorithm.pipeline=grop"], "algorithm.pipeline", ["unknown pipeline", "mean grpo?"]),
        (["algorithm.kl.estimator=low_var"], "algorithm.kl.estimator", ["unknown KL estimator", "low_var_kl"]),
        (["algorithm.advantage.name=no_such_pkg.mod:fn"], "algorithm.advantage.name", ["no_such_pkg"]),
        (["algorithm.advantage.name=json:lods"], "algorithm.advantage.name", ["defines no lods", "json:loads?"]),
        (["rollout.sampling.n=1"], "rollout.sampling.n", ["compares the samples", ">= 2"]),
        (["rollout.sampling.n=1", "algorithm.advantage.name=rloo"], "rollout.sampling.n", ["rloo"]),
        (["algorithm.advantage.name=gae"], "algorithm.advantage.name", ["values of a critic", "pipeline=ppo"]),
        (["algorithm.loss.aggregation=seq-mean-token-sum-norm"], "algorithm.loss.sum_norm", ["=8"]),
        (["algorithm.overlong.buffer_tokens=8"], "algorithm.overlong.buffer_tokens", ["from 1 to 7"]),
        (["algorithm.kl.adaptive=true"], "algorithm.kl.adaptive", ["reward term"]),
        # sampling
        (["rollout.sampling.temperature=0"], "rollout.sampling.temperature", ["all the same"]),
        (["rollout.sampling.min_new_tokens=9"], "rollout.sampling.min_new_tokens", ["from 0 to 8"]),
        (
            ["data.max_prompt_tokens=249", "validation.sampling.max_new_tokens=7"],
            "rollout.sampling.max_new_tokens",
            ["249 + 8", "256 positions", "at most 7"],
        ),
        (["rollout.sampling.stop_token_ids=[3, 32]"], "rollout.sampling.stop_token_ids", ["[32]", "from 0 to 31"]),
        (
            ["rollout.sampling={stop: [a], min_new_tokens: 2}"],
            "rollout.sampling.min_new_tokens",
            ["cannot suppress a stop string"],
        ),
        (
            ["rollout.sampling={stop: [a], ignore_eos: true}"],
            "rollout.sampling.ignore_eos",
            ["['a']", "allowed: false"],
        ),
        (["validation.sampling={stop: [a], ignore_eos: true}"], "validation.sampling.ignore_eos", ["nothing ends"]),
        # schedules
        (["actor.optim.min_lr=1"], "actor.optim.min_lr", ["would rise"]),
        (
            ["actor.optim.schedule=linear", "actor.optim.decay_steps=10", "actor.optim.warmup_steps=10"],
            "actor.optim.warmup_steps",
            ["10 optimizer steps", "from 0 to 9"],
        ),
        (["actor.optim={warmup_steps: 3, warmup_ratio: 0.1}"], "actor.optim.warmup_ratio", ["twice", "one of them"]),
        (["sft.steps=5", "sft.stop_at_accuracy=0.5"], "sft.eval_every", ["needs evaluations"]),
        # files
        (["algorithm.dynamic_sampling.enabled=true"], "algorithm.dynamic_sampling.enabled", ["pipeline=dapo"]),
        (
            ["algorithm.pipeline=dapo", "algorithm.dynamic_sampling={enabled: true, low: 0.9, high: 0.1}"],
            "algorithm.dynamic_sampling.low",
            ["between 0.9 and 0.1", "exchange"],
        ),
        (["data.train_files=[]"], "data.train_files", ["training data is missing"]),
        (["data.train_files=missing.jsonl"], "data.train_files", ["not found", "missing.jsonl"]),
        (["data.train_files=megarl.recipes.arithmetic:make_row"], "data.train_files", ["arithmetic:make_rows?"]),
        (["reward.name=exact_mach"], "reward.name", ["unknown reward", "mean exact_match?"]),
        (["reward.name=missing.py:score"], "reward.name", ["file not found: missing.py"]),
        (["reward.name=missing.py"], "reward.name", ["is missing", "missing.py:function"]),
        (["trainer.resume=no/such"], "trainer.resume", ["auto, never"]),
        (["reference.path=no/such/model", "algorithm.kl.use=loss"], "reference.path", ["model folder does not exist"]),
        (["name=a/b"], "name", ["without slashes"]),
        # preference pairs
        (["preference={}"], "algorithm.pipeline", ["grpo pipeline generates its responses"]),
        (["algorithm.pipeline=dpo"], "preference", ["needs the section preference", "preference: {loss: sigmoid}"]),
        (["algorithm.pipeline=reward_model", "preference={}"], "preference.loss", ["bradley_terry"]),
        ([*PAIRS, "rollout.sampling.temperature=0.5"], "rollout.sampling.temperature", ["1.0"]),
        (
            [*PAIRS, "rollout={engine: sglang, sglang: {urls: [http://127.0.0.1:1]}}"],
            "rollout.engine",
            ["nothing is generated"],
        ),
        (
            [*PAIRS, "preference={loss: ipo, label_smoothing: 0.1}"],
            "preference.label_smoothing",
            ["does not use this key"],
        ),
        ([*PAIRS, "preference.margin_key=gap"], "preference.margin_key", ["does not use this key"]),
        # model
        (["model.hf_config.model_type=gpt2"], "model.hf_config", ["not supported", "qwen3_moe"]),
        (["model.hf_config.model_type=null"], "model.hf_config", ["no model_type"]),
        (["model.hf_config.hidden_size=0"], "model.hf_config.hidden_size", ["hidden_size must be a positive integer"]),
        (["model.path=/no/such/model", "model.hf_config=null"], "model.path", ["model folder does not exist"]),
        (["model.hf_config=null"], "model", ["the recipe names no model"]),
        (["model.hf_config.hiden_size=64"], "model.hf_config.hiden_size", ["has no effect", "mean hidden_size?"]),
        (
            ["model.hf_config.norm_topk_prob=true"],
            "model.hf_config.norm_topk_prob",
            ["qwen3 does not read", "remove it"],
        ),
        (["model.path=Qwen/Qwen3-8B"], "model", ["both model.path and model.hf_config"]),
        (["model.tokenizer=null"], "model.tokenizer", ["needs a tokenizer"]),
        (["model.tokenizer=chars:aba"], "model.tokenizer", ["repeats characters: 'a'", "chars:ab"]),
        (["model.tokenizer=words:up down up"], "model.tokenizer", ["repeats words: 'up'", "words:up down"]),
        (["model.tokenizer=words:"], "model.tokenizer", ["list of words is empty"]),
        (
            ["model.tokenizer=words:a b c", "model.hf_config.vocab_size=6"],
            "model.hf_config.vocab_size",
            [">= 7", "3 words + 4 special"],
        ),
        (["model.tokenizer=no/such/folder"], "model.tokenizer", ["tokenizer folder not found"]),
        (["model.hf_config.vocab_size=8"], "model.hf_config.vocab_size", [">= 16"]),
    ],
)
def test_one_mistake_gives_one_failure(failures, config_of, overrides, key, words):
    failed = only(failures(*overrides))
    assert failed.key == key
    with pytest.raises(ConfigError) as caught:
        validate(config_of(*overrides))
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.sampling.top_p=0.9"], "rollout.sampling.top_p"),
        (["rollout.sampling.min_new_tokens=2"], "rollout.sampling.min_new_tokens"),
        (["rollout.sampling.top_k=5"], "rollout.sampling.top_k"),
        (["rollout.sampling.min_p=0.1"], "rollout.sampling.min_p"),
        (["validation.sampling.n=4"], "validation.sampling.n"),
        (["rollout.dtype=bf16", "model.dtype=fp32"], "rollout.dtype"),
        (["reference.path=org/model"], "reference.path"),
        (["algorithm.kl.use=loss", "algorithm.kl.coef=0"], "algorithm.kl.coef"),
        (["algorithm.kl.use=reward", "algorithm.kl.estimator=kl+"], "algorithm.kl.estimator"),
        (["algorithm.pipeline=dapo"], "algorithm.dynamic_sampling.enabled"),
        (["algorithm.loss.sum_norm=4"], "algorithm.loss.sum_norm"),
        (["validation.every=5"], "data.val_files"),
        (["actor.optim.warmup_steps=100"], "actor.optim.warmup_steps"),
        (["actor.optim.lr=0.5"], "actor.optim.lr"),
        (["sft={steps: 300, optim: {lr: 0.011}}"], "sft.optim.lr"),
        (["model.path=org/model", "model.hf_config=null", "actor.optim.lr=2e-4"], "actor.optim.lr"),
        (["actor.optim={schedule: linear, warmup_steps: 10}", "trainer.steps=10"], "actor.optim.warmup_steps"),
    ],
)
def test_doubtful_setting_warns_and_passes(warned, failures, config_of, overrides, key):
    assert only(warned(*overrides)).key == key
    assert failures(*overrides) == []
    with pytest.warns(ConfigWarning, match=key.replace(".", r"\.")):
        validate(config_of(*overrides))


def test_no_warm_up_is_meant_for_a_run_of_some_steps(warned):
    assert warned("actor.optim={schedule: linear, warmup_steps: 10}", "trainer.steps=9") == []


def test_adapters_learn_at_rates_that_break_trained_weights(warned):
    adapters = ("model.path=org/model", "model.hf_config=null", "model.lora.rank=16")
    assert warned(*adapters, "actor.optim.lr=2e-3") == []
    assert "adapters are far more likely" in only(warned(*adapters, "actor.optim.lr=0.02")).message


PPO = ("algorithm.pipeline=ppo", "algorithm.advantage.name=gae", "cluster.nproc=2")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["critic.parallel.tp=2"], "critic.parallel"),
        (["critic.path=/nowhere"], "critic.path"),
        (["critic.mini_batch_size=5"], "critic.mini_batch_size"),
        (["critic.optim.min_lr=1"], "critic.optim.min_lr"),
    ],
)
def test_critic_settings_that_cannot_be(failures, overrides, key):
    assert {check.key for check in failures(*PPO, *overrides)} == {key}


def test_the_critic_takes_the_layout_of_the_actor(failures):
    assert failures(*PPO, "actor.parallel.tp=2") == []
    assert failures(*PPO, "actor.parallel.tp=2", "critic.parallel.tp=2") == []


def test_doubtful_ppo_warns(warned):
    assert only(warned("algorithm.pipeline=ppo")).key == "algorithm.advantage.name"
    assert only(warned(*PPO, "critic.warmup_steps=100")).key == "critic.warmup_steps"


def test_several_failures_come_as_one_numbered_list(config_of):
    with pytest.raises(ConfigErrors, match="2 problems") as caught:
        validate(config_of("reward.name=nope", "algorithm.advantage.name=nope"))
    assert len(caught.value.problems) == 2


def test_singleton_groups_are_legal_when_asked_for(failures):
    assert failures("rollout.sampling.n=1", "algorithm.advantage.allow_singleton=true") == []


def test_local_launcher_has_one_machine(config_of):
    config = config_of("cluster.nproc=2", "cluster.nnodes=2")
    assert [c.key for c in check_config(config, launcher="local").items if c.status == "fail"] == ["cluster.nnodes"]
    assert [c.key for c in check_config(config, launcher="torchrun").items if c.status == "fail"] == []


def test_launchers_of_several_machines_do_not_start_a_run_again(config_of):
    config = config_of("cluster.nproc=2", "cluster.nnodes=2", "cluster.max_restarts=1", "trainer.save_every=5")
    keys = {
        launcher: [c.key for c in check_config(config, launcher=launcher).items if c.status == "fail"]
        for launcher in ("torchrun", "ray")
    }
    assert keys == {"torchrun": ["cluster.max_restarts"], "ray": []}


def test_restarts_without_checkpoints_are_warned_of(warned):
    assert only(warned("cluster.max_restarts=1", "trainer.save_every=0")).key == "trainer.save_every"
    assert warned("cluster.max_restarts=1", "trainer.save_every=5") == []


def test_evaluation_needs_held_out_prompts_only(config_of):
    settings = ["data.train_files=[]", "data.val_files=megarl.recipes.arithmetic:make_rows", "sft.steps=1"]
    config = config_of(*settings, "model.hf_config=null", "model.path=org/trained")
    assert [c for c in check_config(config, job="eval").items if c.status == "fail"] == []
    assert [c.key for c in check_config(config, job="sft").items if c.status == "fail"] == ["data.train_files"]


# -- mixture of experts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["cluster.nproc=4", "actor.parallel.ep=4"], []),
        (["cluster.nproc=4", "actor.parallel.ep=3"], ["actor.parallel.ep"]),
        (["cluster.nproc=8", "actor.parallel.ep=8"], ["actor.parallel.ep"]),
        (["cluster.nproc=4", "actor.parallel.tp=2"], []),
        (["cluster.nproc=4", "actor.parallel.tp=2", "actor.parallel.sp=true"], []),
        (["cluster.nproc=4", "actor.parallel.tp=2", "actor.parallel.sp=true", "actor.parallel.ep=4"], []),
        (["cluster.nproc=4", "actor.parallel.ep=2", "actor.parallel.cp=2"], []),
        (["cluster.nproc=4", "actor.parallel.ep=4", "actor.parallel.etp=2"], ["actor.parallel.ep"]),
        (["cluster.nproc=5", "actor.parallel.etp=5", "data.batch_size=5"], ["actor.parallel.etp"]),
        (["cluster.nproc=4", "actor.parallel.pp=2", "actor.parallel.ep=2"], []),
        (["cluster.nproc=4", "actor.parallel.ep=4", "actor.parallel.dispatch=deepep", "model.dtype=bf16"], []),
        (
            ["cluster.nproc=4", "actor.parallel.ep=4", "actor.parallel.dispatch=deepep", "model.dtype=fp32"],
            ["actor.parallel.dispatch"],
        ),
        (["cluster.nproc=4", "actor.parallel.pp=2", "actor.parallel.ep=4"], ["actor.parallel.ep"]),
    ],
)
def test_expert_layouts(config_of, overrides, keys):
    failed = [check.key for check in check_config(config_of(*overrides), hf=MOE).items if check.status == "fail"]
    assert failed == keys


def test_deepep_is_for_a_model_with_experts(config_of):
    config = config_of("cluster.nproc=4", "actor.parallel.dispatch=deepep", "model.dtype=bf16", "algorithm.kl.use=loss")
    (failed,) = [check for check in check_config(config).items if check.status == "fail"]
    assert failed.key == "actor.parallel.dispatch"
    assert "no experts" in failed.message


def test_every_layout_that_passes_divides_the_model(config_of):
    """Against the definition: all sizes integral."""
    for tp in (1, 2, 3, 4):
        for pp in (1, 2, 3, 5):
            for cp in (1, 2):
                config = config_of(
                    "cluster.nproc=24",
                    "data.batch_size=24",
                    f"actor.parallel={{tp: {tp}, pp: {pp}, cp: {cp}}}",
                )
                sound = 24 % (tp * pp * cp) == 0 and 12 % tp == 0 and 4 % tp == 0 and 96 % tp == 0 and 12 % pp == 0
                failed = [check for check in check_config(config, hf=DENSE).items if check.status == "fail"]
                assert (failed == []) == sound, (tp, pp, cp, failed)


# -- files -----------------------------------------------------------------------------------------------------------


def test_reward_file_is_read_and_not_run(write, config_of):
    write("raise SystemExit('must not run')\ndef score(samples): ...", "rewards.py")
    good = config_of("reward.name=rewards.py:score")
    assert [c for c in check_config(good).items if c.status == "fail"] == []
    bad = check_config(config_of("reward.name=rewards.py:scores")).items
    assert [c.fix for c in bad if c.status == "fail"] == ["did you mean rewards.py:score?"]


@pytest.mark.parametrize(
    ("takes", "kwargs", "fix"),
    [
        ("samples", "{}", None),
        ("samples", "{a: 1}", "remove a;"),
        ("samples, a", "{a: 1}", None),
        ("samples, a", "{}", "set reward.kwargs.a"),
        ("samples, a, *, b", "{c: 1}", "set reward.kwargs.a and reward.kwargs.b, and remove c;"),
        ("samples, /, a=1, *, b", "{b: 1}", None),
        ("samples, /, a=1, *, b", "{samples: 1, b: 1}", "remove samples;"),
        ("samples, *rest, a=1, **more", "{c: 1}", None),
        ("*, samples", "{}", "write its parameters so"),
    ],
)
def test_arguments_of_a_reward_are_those_that_python_would_take(write, failures, takes, kwargs, fix):
    write(f"def score({takes}): ...", "rewards.py")
    found = failures("reward.name=rewards.py:score", f"reward.kwargs={kwargs}")
    assert [check.key for check in found] == ([] if fix is None else ["reward.kwargs"])
    assert fix is None or found[0].fix.startswith(fix)


def test_a_decorated_reward_may_take_anything(write, failures):
    write("import functools\n@functools.cache\ndef score(samples): ...", "rewards.py")
    assert failures("reward.name=rewards.py:score", "reward.kwargs={a: 1}") == []


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ("{tolerence: 1}", ["unknown key reward.kwargs.tolerence: numeric", "did you mean reward.kwargs.tolerance?"]),
        ("{method: strict}", ["unknown key reward.kwargs.method", "allowed: tolerance, extract, evaluated"]),
        ("{extract: frist}", ["reward.kwargs.extract has an unknown value", "did you mean first?"]),
    ],
)
def test_what_is_no_setting_of_an_included_reward_is_refused(failures, kwargs, words):
    text = str(only(failures("reward.name=numeric", f"reward.kwargs={kwargs}")).problem())
    assert all(word in text for word in words), text


def test_arguments_of_a_users_reward_that_do_not_fit_are_refused_and_the_way_out_works(write):
    write("def first(samples, a): ...\ndef second(samples, b=1): ...", "rewards.py")
    file = write(RECIPE + "reward: {name: 'rewards.py:second', kwargs: {a: 1}}")
    with pytest.raises(ConfigError, match="unexpected keyword argument 'a'") as caught:
        validate(load_config(file))
    way_out = "reward='!replace {name: rewards.py:second}'"
    assert way_out in str(caught.value)
    validate(load_config(file, shlex.split(way_out)))


def test_reward_file_with_a_syntax_error_names_the_line(write, failures):
    write("x = 1\ndef score(samples) ...", "rewards.py")
    assert "rewards.py:2: the file is not valid Python" in only(failures("reward.name=rewards.py:score")).message


def test_truncated_sampling_is_fine_where_its_log_probs_are_kept_and_corrected(warned):
    top_p = ("rollout.sampling.top_p=0.9", "rollout.sampling.logprobs=processed")
    assert [check.key for check in warned(*top_p)] == ["rollout.sampling.top_p"]
    assert warned(*top_p, "rollout_correction.preset=decoupled_token_is") == []
    assert warned(*top_p, "rollout.replay_kept_tokens=true", "rollout.sampling.top_k=50") == []


@pytest.mark.parametrize("top_k", [0, 3000])
def test_a_record_of_kept_tokens_needs_a_bound(failures, top_k):
    problem = only(failures("rollout.replay_kept_tokens=true", f"rollout.sampling.top_k={top_k}"))
    assert problem.key == "rollout.sampling.top_k"


def test_a_model_without_experts_has_no_routes(failures):
    assert only(failures("rollout.replay_routes=true")).key == "rollout.replay_routes"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("model.lora={rank: 2, dropout: 0.1}", "dropout draws another mask"),
        ("actor.parallel.cp=2", "context parallelism cuts samples"),
        ("actor.engine.layers=te", "Transformer Engine's attention"),
    ],
)
def test_prefixes_are_not_shared_where_samples_have_none(failures, more, problem):
    share = "actor.engine.share_prefixes=true"
    assert failures(share) == []
    assert any(
        problem in check.message and check.key == "actor.engine.share_prefixes" for check in failures(share, more)
    )


def test_user_module_in_the_current_folder_is_found(write, failures):
    write("from megarl.recipes.grpo import build_graph as build", "my_pipelines.py")
    assert failures("algorithm.pipeline=my_pipelines:build") == []
    assert failures("algorithm.pipeline=my_pipelines.py:build") == []
    assert "did you mean my_pipelines.py:build?" in only(failures("algorithm.pipeline=my_pipelines.py:biuld")).fix
    assert only(failures("algorithm.pipeline=my_pipes.py:build")).key == "algorithm.pipeline"
    assert "did you mean my_pipelines:build?" in only(failures("algorithm.pipeline=my_pipelines:biuld")).fix


def test_data_files_and_folders(write, failures):
    write("{}", "data/train.jsonl")
    write("{}", "notes/readme.txt")
    assert failures("data.train_files=[data, data/train.jsonl, org/name@train]") == []
    assert "did you mean data/train.jsonl?" in only(failures("data.train_files=data/trian.jsonl")).fix
    assert "did you mean" not in only(failures("data.train_files=data/a.jsonl")).fix  # only the suffix is shared
    assert "unknown format" in only(failures("data.train_files=notes/readme.txt")).message
    assert "has no data file" in only(failures("data.train_files=notes")).message


def test_model_folder(write, failures, tmp_path):
    overrides = ["model.hf_config=null", "model.path=model"]
    (tmp_path / "model").mkdir()
    assert "no config.json" in only(failures(*overrides)).message
    write("{", "model/config.json")
    assert "cannot read the model's config" in only(failures(*overrides)).message
    write(json.dumps({"model_type": "gpt2"}), "model/config.json")
    assert "not supported" in only(failures(*overrides)).message
    write(json.dumps({"model_type": "llama", "num_attention_heads": 6, "hidden_size": 72}), "model/config.json")
    missing = failures(*overrides, "cluster.nproc=4", "actor.parallel.tp=4")
    assert [check.key for check in missing] == ["model", "actor.parallel.tp"]
    assert "neither model.safetensors nor" in missing[0].message


def test_unknown_hub_name_skips_what_it_cannot_know(config_of):
    checks = check_config(config_of("model.hf_config=null", "model.path=nobody/nothing")).items
    assert [check.name for check in checks if check.status == "skip"] == ["model", "actor model split"]
    assert [check for check in checks if check.status == "fail"] == []


# -- commands other than train ---------------------------------------------------------------------------------------


def test_sft_needs_steps_and_either_kind_of_examples(config_of):
    def keys(*overrides):
        return [check.key for check in check_config(config_of(*overrides), job="sft").items if check.status == "fail"]

    assert keys() == ["sft.steps"]
    assert keys("sft.epochs=2") == []
    alone = ["sft.steps=1", "data.train_files=[]"]
    assert keys(*alone) == ["data.train_files"]
    assert keys(*alone, "sft.train_files=megarl.recipes.arithmetic:make_rows") == []
    assert keys("sft.steps=1", "sft.train_files=missing.jsonl") == ["sft.train_files"]


def test_the_cold_start_reads_its_own_examples(write, config_of):
    write('{"prompt": "1", "answer": "2"}', "rl.jsonl")
    write('{"prompt": "1", "answer": "2", "solution": "12"}', "sft.jsonl")
    files = ["data.train_files=rl.jsonl", "sft.response_key=solution", "sft.steps=1"]
    check_rows(config_of(*files, "sft.train_files=sft.jsonl"), "train")
    for job, overrides in (("train", []), ("sft", ["sft.train_files=rl.jsonl"])):
        with pytest.raises(DataError, match=r"rl.jsonl:1: no column 'solution'"):
            check_rows(config_of(*files, *overrides), job)
    check_rows(config_of(*files, "sft.steps=0"), "train")


@pytest.mark.parametrize("job", ["eval", "generate"])
def test_random_weights_are_not_scored(config_of, tmp_path, job):
    files = "data.val_files=megarl.recipes.arithmetic:make_rows"
    failed = only([c for c in check_config(config_of(files), job=job).items if c.status == "fail"])
    assert "model.path=RUN_DIR/hf model.hf_config=null, or trainer.resume=" in failed.fix
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "meta.json").write_text("{}")
    config = config_of(files, f"trainer.resume={tmp_path / 'step_1'}")
    assert [c for c in check_config(config, job=job).items if c.status == "fail"] == []


def test_a_key_of_wandb_that_nobody_knows_is_a_warning_and_stops_a_start(config_of, warned, monkeypatch, tmp_path):
    def said() -> list[str]:
        return [check.message for check in warned("tracking.loggers=[wandb]") if check.key == "tracking.loggers"]

    def stops() -> bool:
        checks = check_config(config_of("tracking.loggers=[wandb]"), starts=True)
        return any(check.status == "fail" and check.key == "tracking.loggers" for check in checks.items)

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("NETRC", "WANDB_API_KEY", "WANDB_CONFIG_DIR", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert ["no API key of W&B is known here" in text for text in said()] == [True]
    assert stops()
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert said() == []
    assert not stops()
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n")
    assert said() == []
