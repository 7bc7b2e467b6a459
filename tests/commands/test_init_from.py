"""`megarl init --from`: short settings of TRL, verl and NeMo-RL become recipes that pass their dry run."""

import json

import pytest

from megarl.checks.dry_run import make_plan
from megarl.cli import main
from megarl.commands.translate import OtherSettings, _of_words, read_settings, translate
from megarl.config.load import load_config
from megarl.recipes.components import COMPONENTS
from megarl.system.errors import UserError

TRL_GRPO = """#!/bin/bash
export CUDA_VISIBLE_DEVICES=0,1,2,3
MODEL=Qwen/Qwen3-0.6B
accelerate launch --config_file zero3.yaml --num_processes 4 train_grpo.py \\
    --model_name_or_path $MODEL --dataset_name rows.jsonl --output_dir runs/grpo --run_name mine \\
    --learning-rate 1e-6 --lr_scheduler_type cosine --warmup_ratio 0.1 \\
    --per_device_train_batch_size=16 --gradient_accumulation_steps 2 --num_generations 8 \\
    --temperature 0.9 --top_p 0.95 \\
    --max_completion_length 512 --beta 0.04 --epsilon 0.2 --epsilon_high 0.28 \\
    --loss_type dr_grpo --scale_rewards none \\
    --use_vllm --vllm_gpu_memory_utilization 0.3 --bf16 --gradient_checkpointing --reward_funcs accuracy_reward \\
    --num_train_epochs 1 --save_steps 50 --logging_steps 1 --report_to tensorboard \\
    --use_peft --lora_r 16 --lora_alpha 32 --lora_target_modules q_proj v_proj --top_entropy_quantile 0.2
"""
TRL_DPO = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "dataset_name": "pairs.jsonl",
    "learning_rate": 5e-7,
    "beta": 0.2,
    "loss_type": "sigmoid",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_length": 1024,
    "num_train_epochs": 1,
    "max_steps": -1,
    "hub_model_id": None,
    "rpo_alpha": 1.0,
}
TRL_SFT = """model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: chats.jsonl
learning_rate: 2.0e-5
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
packing: true
max_steps: 100
warmup_steps: 0.03
"""
VERL = """set -x
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=verl.jsonl \\
    data.val_files="['verl.jsonl']" data.train_batch_size=1024 data.max_prompt_length=512 \\
    data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
    +actor_rollout_ref.actor.freeze_vision_tower=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False trainer.critic_warmup=0 \\
    trainer.logger='["console","tensorboard"]' trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 \\
    trainer.test_freq=5 trainer.total_epochs=15 $@
"""
VERL_YAML = """
algorithm: {adv_estimator: gae, lam: 0.95, use_kl_in_reward: true, kl_ctrl: {type: fixed, kl_coef: 0.01}}
data: {train_files: verl.jsonl, train_batch_size: 64}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-0.6B, lora_rank: 0, lora_alpha: 16}
  actor: {ppo_mini_batch_size: 32, clip_ratio: 0.1, optim: {lr_warmup_steps: -1, betas: [0.9, 0.95]}}
  rollout: {n: 1, top_k: -1, max_model_len: "${data.nowhere}"}
critic: {optim: {lr: 2.0e-5}}
trainer: {n_gpus_per_node: 8, nnodes: 1, total_training_steps: null, total_epochs: 3, test_freq: -1}
"""
NEMO = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_epochs: 1, max_num_steps: 1000000,
       use_leave_one_out_baseline: true, val_period: 10}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28, token_level_loss: true}
checkpointing: {enabled: true, save_period: 10, metric_name: "val:accuracy"}
policy:
  model_name: Qwen/Qwen3-0.6B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 512
  max_total_sequence_length: 512
  precision: bfloat16
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, betas: [0.9, 0.999]}}
  generation: {backend: vllm, max_new_tokens: "${policy.max_total_sequence_length}", top_k: null}
data: {train: {data_path: rows.jsonl}}
env: {math: {num_workers: 8}}
cluster: {gpus_per_node: 4, num_nodes: 1}
"""
NUMBERS = range(64)
ROWS = {
    "rows.jsonl": [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in NUMBERS],
    "pairs.jsonl": [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "x"} for n in NUMBERS],
    "chats.jsonl": [
        {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]}
        for n in NUMBERS
    ],
    "verl.jsonl": [
        {"prompt": [{"role": "user", "content": f"{n}+1="}], "reward_model": {"ground_truth": str(n + 1)}}
        for n in NUMBERS
    ],
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, text) -> its path, in the current folder, which has the rows of `ROWS`."""
    monkeypatch.chdir(tmp_path)
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write_file(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


@pytest.mark.parametrize(
    ("name", "text", "options", "expected", "left_out"),
    [
        (
            "grpo.sh",
            TRL_GRPO,
            [],
            {
                "data.batch_size": 16,
                "actor.mini_batch_size": 16,
                "rollout.sampling.n": 8,
                "cluster.nproc": 4,
                "rollout.sampling.max_new_tokens": 512,
                "rollout.sampling.temperature": 0.9,
                "rollout.sampling.top_p": 0.95,
                "algorithm.kl.coef": 0.04,
                "algorithm.kl.use": "loss",
                "algorithm.loss.clip_high": 0.28,
                "algorithm.loss.aggregation": "seq-mean-token-sum-norm",
                "algorithm.advantage.norm_by_std": False,
                "reward.name": "math",
                "model.lora.targets": ["attention"],
                "actor.optim.warmup_ratio": 0.1,
                "trainer.epochs": 1,
                "tracking.loggers": ["tensorboard"],
                "actor.engine.recompute": "full",
                "algorithm.loss.dual_clip": None,
            },
            {"use_vllm: True": "vLLM is not supported", "top_entropy_quantile: 0.2": "every token counts equally here"},
        ),
        (
            "dpo.json",
            json.dumps(TRL_DPO),
            ["--gpus", "2"],
            {
                "algorithm.pipeline": "dpo",
                "preference.beta": 0.2,
                "preference.max_tokens": 1024,
                "data.batch_size": 32,
                "trainer.epochs": 1,
                "cluster.nproc": 2,
            },
            {"rpo_alpha: 1": "keys of the section preference"},
        ),
        (
            "sft.yaml",
            TRL_SFT,
            ["--val", "chats.jsonl"],
            {
                "sft.steps": 100,
                "sft.batch_size": 16,
                "sft.optim.lr": 2e-5,
                "sft.optim.warmup_ratio": 0.03,
                "sft.response_key": "messages",
                "data.prompt_key": "messages",
                "data.val_files": ["chats.jsonl"],
                "reward.name": "format",
            },
            {"packing: True": "this is always on here"},
        ),
        (
            "verl.sh",
            VERL,
            [],
            {
                "data.batch_size": 1024,
                "actor.mini_batch_size": 256,
                "rollout.sampling.n": 5,
                "cluster.nproc": 8,
                "data.val_files": ["verl.jsonl"],
                "data.answer_key": "reward_model.ground_truth",
                "algorithm.kl.estimator": "low_var_kl",
                "algorithm.kl.coef": 0.001,
                "data.overlong": "filter",
                "algorithm.advantage.name": "grpo",
                "trainer.epochs": 15,
                "validation.every": 5,
            },
            {
                "reward of verl": "is a guess",
                "freeze_vision_tower: True": "model.freeze",
                "vllm": "vLLM is not supported",
            },
        ),
        (
            "verl.yaml",
            VERL_YAML,
            [],
            {
                "algorithm.pipeline": "ppo",
                "algorithm.advantage.lam": 0.95,
                "algorithm.kl.use": "reward",
                "algorithm.kl.coef": 0.01,
                "algorithm.loss.clip_low": 0.1,
                "algorithm.loss.clip_high": 0.1,
                "actor.optim.beta2": 0.95,
                "critic.optim.lr": 2e-5,
                "model.lora": None,
                "trainer.epochs": 3,
            },
            {"max_model_len: ${data.nowhere}": "a reference that only verl can resolve"},
        ),
        (
            "nemo.yaml",
            NEMO,
            [],
            {
                "data.batch_size": 32,
                "actor.mini_batch_size": 32,
                "rollout.sampling.n": 16,
                "cluster.nproc": 4,
                "rollout.sampling.max_new_tokens": 512,
                "algorithm.advantage.name": "rloo",
                "trainer.epochs": 1,
                "algorithm.kl.coef": 0.01,
                "algorithm.loss.clip_high": 0.28,
                "actor.optim.lr": 5e-6,
                "reward.name": "math",
                "model.dtype": "bf16",
                "trainer.save_every": 10,
            },
            {"val:accuracy": "trainer.best_metric"},
        ),
    ],
    ids=["trl-grpo", "trl-dpo", "trl-sft", "verl-overrides", "verl-yaml", "nemo-rl"],
)
def test_settings_become_a_recipe_that_passes_its_dry_run(write, capsys, name, text, options, expected, left_out):
    file = write(name, text)
    assert main(["init", "mine", "--from", str(file), *options]) == 0, capsys.readouterr().err
    config = load_config("mine.yaml", components=COMPONENTS)
    job = "sft" if name == "sft.yaml" else "train"
    assert make_plan(config, config.launch.launcher, job).problems == []
    values = {}
    for key in expected:
        value = config.model_dump()
        for part in key.replace("async", "async_").split("."):
            value = value[part]
        values[key] = value
    assert values == expected
    notes = " ".join((file.parent / "mine.yaml").read_text().partition("# Settings of")[2].replace("#", " ").split())
    for setting, reason in left_out.items():
        assert setting in notes
        assert reason in notes


def test_options_go_before_the_settings(write, capsys):
    file = write("verl.sh", VERL)
    options = [
        "--gpus",
        "0",
        "--reward",
        "exact_match",
        "--data",
        "rows.jsonl",
        "--val",
        "rows.jsonl",
        "--answer-key",
        "answer",
    ]
    assert main(["init", "mine", "--from", str(file), *options]) == 0, capsys.readouterr().err
    config = load_config("mine.yaml", components=COMPONENTS)
    assert (config.reward.name, config.data.train_files, config.model.dtype) == ("exact_match", ["rows.jsonl"], "fp32")
    assert config.cluster.device_memory_gb is None


def test_answers_come_from_the_column_that_the_rows_have(write, tmp_path, capsys):
    assert (
        main(["init", "mine", "--from", str(write("verl.sh", VERL)), "--data", "rows.jsonl", "--val", "rows.jsonl"])
        == 0
    )
    assert load_config("mine.yaml", components=COMPONENTS).data.answer_key == "answer"
    notes = (tmp_path / "mine.yaml").read_text().partition("# Settings of")[2]
    assert "data.answer_key: reward_model.ground_truth" in notes


def test_an_algorithm_beside_the_settings_is_refused(write, capsys):
    assert main(["init", "mine", "--from", str(write("a.sh", TRL_GRPO)), "--algorithm", "ppo"]) == 2
    assert "--from takes the algorithm from the settings that it translates" in capsys.readouterr().err


def test_bf16_of_a_gpu_is_named_as_left_out_of_a_recipe_for_the_cpu(write, tmp_path, capsys):
    file = write("trl.sh", "python train.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name rows --bf16\n")
    main(["init", "mine", "--from", str(file), "--gpus", "0", "--reward", "exact_match"])
    assert "model.dtype: bf16" in (tmp_path / "mine.yaml").read_text().partition("does not have")[2]


def test_staleness_that_the_placement_does_not_allow_is_left_out_with_the_reason(write, tmp_path, capsys):
    file = write("trl.sh", "python grpo.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name rows --async_grpo 2\n")
    main(["init", "mine", "--from", str(file), "--gpus", "0", "--reward", "exact_match"])
    assert "async.max_staleness: 2" in (tmp_path / "mine.yaml").read_text().partition("does not have")[2]


def test_the_recipe_stays_where_the_data_are_on_another_machine(write, tmp_path, capsys):
    big = VERL.replace("Qwen3-0.6B", "Qwen3-8B")
    assert main(["init", "here", "--from", str(write("here.sh", big))]) == 0, capsys.readouterr().err
    capsys.readouterr()
    file = write("verl.sh", big.replace("verl.jsonl", "/data/elsewhere.parquet"))
    assert main(["init", "mine", "--from", str(file)]) == 2
    problems = capsys.readouterr().err
    assert "file or folder not found" in problems
    assert "GB" not in problems
    assert "/data/elsewhere.parquet" in (tmp_path / "mine.yaml").read_text()
    here, mine = (load_config(f"{name}.yaml", components=COMPONENTS) for name in ("here", "mine"))
    assert mine.actor.parallel == here.actor.parallel
    assert mine.actor.parallel.tp > 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "a: {b: 1}\n", "these are not settings of TRL, verl or NeMo-RL"),
        ("a.sh", "--learning_rate 'x", "the file cannot be read as a command line"),
        ("a.json", '{"learning_rate": 1e-6}', "the settings lack model.path"),
    ],
)
def test_what_is_no_configuration_is_refused(write, capsys, name, text, words):
    assert main(["init", "mine", "--from", str(write(name, text))]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_file_is_refused(write, tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_settings(tmp_path / "nope.sh")


def test_a_setting_that_is_taken_is_not_translated_twice():
    made = translate(OtherSettings({"learning_rate": 1e-6, "num_generations": 4, "max_grad_norm": 0.5}), None)
    assert made.settings["actor.optim.clip_grad"] == 0.5
    assert made.notes == {}


def test_processes_of_accelerate_are_those_of_all_machines():
    values = {"num_machines": 2, "num_processes": 16, "per_device_train_batch_size": 4, "num_generations": 8}
    made = translate(OtherSettings(values), None)
    devices, prompts = made.settings["cluster.nproc"], made.settings["data.batch_size"]
    assert (devices, made.settings["cluster.nnodes"], prompts) == (16, 2, 8)


@pytest.mark.parametrize(
    "values",
    [
        {"packing": True, "eval_strategy": "steps", "eval_steps": 50},
        {"policy.model_name": "m", "sft.max_num_steps": 100, "sft.val_period": 50},
    ],
)
def test_fine_tuning_is_validated_by_a_key_of_its_own(values):
    made = translate(OtherSettings(values), None)
    assert made.settings["sft.eval_every"] == 50
    assert "validation.every" not in made.settings


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("${SET:-${UNSET}}/a", "b/a"),
        ("${EMPTY:-1}${EMPTY-2}c", "1c"),
        ("${A:-${B:-${C:-${D:-${E:-$SET}}}}}", "b"),
        ("a${UNSET:-{x}}", "a{x}"),
        ("${UNSET:-${SET}", "${UNSET:-${SET}"),
        ("$UNSET ${SET%%b}", "$UNSET ${SET%%b}"),
    ],
)
def test_a_variable_has_its_value_or_else_its_default(word, value):
    """As in a shell; what the shell would not find, or does by other signs, stays as it is."""
    words = ["SET=b", "EMPTY=", f"trainer.experiment_name={word}"]
    assert _of_words(words).values == {"trainer.experiment_name": value}


def test_variables_of_a_script_have_their_values(write, monkeypatch):
    monkeypatch.setenv("HOME", "/mine")
    script = """export adv_estimator=rloo
NNODES=${NNODES:-2}
DATA=${DATA:-"${HOME}/verl"}
longest=$((1024 * 2))
ray job submit --no-wait -- python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$adv_estimator \\
    actor_rollout_ref.model.path="${DATA}/model" trainer.nnodes="${NNODES}" data.max_prompt_length=${longest}
"""
    made = translate(read_settings(write("dapo.sh", script)), None)
    settings = [made.settings[key] for key in ("algorithm.advantage.name", "model.path", "cluster.nnodes")]
    assert settings == ["rloo", "/mine/verl/model", 2]
    notes = {"no_wait: True", "data.max_prompt_length: $((1024"}
    assert set(made.notes) == notes
