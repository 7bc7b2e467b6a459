"""Names of TRL, verl, NeMo-RL and EasyR1 lead to the key of this project, or to a sentence that it is not there."""

import re
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.config.fields import iter_keys
from megarl.config.load import load_config
from megarl.config.other_names import ABSENT, KEYS, METHODS, meaning_of, unknown_keys
from megarl.recipes.components import COMPONENTS, REGISTRIES
from megarl.system.errors import ConfigError

_OWN = {key.path for key in iter_keys()}

_PAGE = Path(__file__).resolve().parents[2] / "docs/other_trainers.md"


def rows_of_the_page() -> list[tuple[list[str], list[str]]]:
    """Names in other trainers and the keys here, of each row below a header that ends in `here`."""
    tables = re.findall(r"^\| (?:TRL|verl) \|.* here \|\n\|[-|]+\|\n((?:\|.*\n)+)", _PAGE.read_text(), re.MULTILINE)
    cells = [line.strip("| ").rpartition("|") for table in tables for line in table.splitlines()]
    return [(re.findall("`(.+?)`", theirs), re.findall("`(.+?)`", here)) for theirs, _, here in cells]


def is_a_key(dotted: str) -> bool:
    section, _, name = dotted.rpartition(".")
    return (
        dotted in _OWN
        or dotted in ("env.name", "env.parser", "env.tools")
        or (section in REGISTRIES and bool(COMPONENTS.readers(section, name)))
    )


def message(write, *overrides: str, text: str = "{}") -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), overrides, components=COMPONENTS)
    return str(caught.value)


def test_every_key_that_the_table_leads_to_exists():
    named = [key for text in KEYS.values() for key in re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)+", text)]
    named += re.findall(r"([a-z_]+(?:\.[a-z_0-9]+)+)", " ".join([*ABSENT.values(), *METHODS.values()]))
    assert len(KEYS) >= 60
    assert [key for key in named if not is_a_key(key) and key != "report.html"] == []


def test_no_key_of_this_project_is_taken_for_one_of_another():
    assert [path for path in _OWN if path in KEYS or path in ABSENT] == []


def test_keys_of_the_page_exist_and_take_the_values_that_it_says():
    named = [text for _, here in rows_of_the_page() for text in here]
    assert len(rows_of_the_page()) >= 100
    assert [text for text in named if not is_a_key(text.partition("=")[0]) and text != "name"] == []
    values = [text for text in named if "=" in text and text != "reward.name=classifier"]  # which needs a path
    load_config("grpo_quickstart", values, components=COMPONENTS)


@pytest.mark.parametrize(("theirs", "here"), rows_of_the_page(), ids=lambda names: "-".join(names))
def test_a_name_of_the_page_leads_to_the_key_in_its_row(theirs, here):
    for name in theirs:
        path = (*(["actor_rollout_ref"] if name.startswith(("actor.", "rollout.", "model.")) else []), *name.split("."))
        said = str(unknown_keys(path, "1", lambda path: "command line")[0]).partition("fix: ")[2]
        assert name in here or any(key.partition("=")[0] in said for key in here or [" here"]), (name, said)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.beta=0.1", "here this is algorithm.kl.coef"),
        ("beta=0.1", "here this is algorithm.kl.coef"),
        ("algorithm.loss.epsilon=0.2", "here this is algorithm.loss.clip_low and algorithm.loss.clip_high"),
        ("trainer.save_steps=5", "here this is trainer.save_every"),
        ("trainer.test_freq=5", "here this is validation.every"),
        ("data.train_batch_size=5", "here this is data.batch_size"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=5", "here this is actor.mini_batch_size"),
        ("actor_rollout_ref.rollout.n=5", "here this is rollout.sampling.n"),
        ("actor_rollout_ref.model.path=Q", "here this is model.path"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "here this is actor.optim.lr"),
        ("actor_rollout_ref.actor.optim.lrr=1e-6", "did you mean actor.optim.lr?"),
        ("actor_rollout_ref.ref.path=Q", "here this is reference.path"),
        ("actor_rollout_ref.actor.strategy=megatron", "the training engine is always Megatron-Core here"),
        ("actor_rollout_ref.hybrid_engine=true", "here this is rollout.engine=embedded"),
        ("actor_rollout_ref.rollout.mode=async", "here this is rollout.engine"),
        ("actor_rollout_ref.mine=1", "remove it"),
        ("data.return_raw_chat=true", "rows hold complete prompts here"),
        ("ray_init.num_cpus=8", "Ray is started by launch.launcher=ray"),
        ("algorithm.filter_groups.enable=true", "here this is algorithm.dynamic_sampling.enabled"),
        ("rollout.max_new_tokens=9", "here this is rollout.sampling.max_new_tokens"),
        ("rollout.name=vllm", "here this is rollout.engine (embedded or sglang; vLLM is not there)"),
        ("loss_type=dr_grpo", "here this is algorithm.loss.aggregation (token-mean for dapo"),
        ("model.name=x", "here this is model.path"),
        ("reward.function=f", "here this is reward.name"),
        ("optim.lr=1", "did you mean actor.optim.lr or "),
        ("worker.actor.global_batch_size=5", "here this is actor.mini_batch_size"),
        ("model.use_lora=true", "adapters are in section model.lora"),
        ("report_to=wandb", "here this is tracking.mlflow, and tracking.loggers"),
        ("actor.fsdp_config=x", "FSDP and DeepSpeed do not exist here"),
        ("actor.optim.beta=0.9", "did you mean actor.optim.beta1 or actor.optim.beta2?"),
        ("actor.optim.lrr=1", "did you mean actor.optim.lr?"),
    ],
)
def test_a_name_of_another_project_leads_to_the_key(write, override, words):
    text = message(write, override)
    assert f"unknown key {override.partition('=')[0]}" in text
    assert f"fix:     {words}" in text


def test_each_setting_in_a_section_of_another_project_is_explained_at_its_line(write):
    text = message(
        write, text="actor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 64\n    lora_rank: 8\n    mine: 1\n"
    )
    assert "recipe.yaml:3: unknown key actor_rollout_ref.actor.ppo_mini_batch_size" in text
    assert "recipe.yaml:4: unknown key actor_rollout_ref.actor.lora_rank" in text
    assert "recipe.yaml:5: unknown key actor_rollout_ref.actor.mine" in text


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("algorithm.pipeline", "simpo", "preference methods are DPO"),
        ("algorithm.pipeline", "sft", "megarl sft RECIPE"),
        ("algorithm.pipeline", "rloo", "set algorithm.advantage.name=rloo"),
        ("algorithm.pipeline", "gpro", "did you mean grpo?"),
        ("algorithm.loss.name", "DPO", "set algorithm.pipeline=dpo"),
        ("algorithm.advantage.name", "reinforce++", "set algorithm.advantage.name=reinforce_pp"),
        ("reward.name", "accuracy_reward", "set reward.name=math"),
    ],
)
def test_a_method_of_another_project_leads_to_what_to_set(failures, key, name, words):
    [failed] = [check for check in failures(f"{key}={name}") if check.key == key]
    assert words in failed.fix


def test_a_section_of_another_project_leads_to_the_keys_in_the_one_here(write):
    text = message(write, text="actor_rollout_ref:\n  actor: {optim: {lr: 1e-6, optim: adamw}}\n  model: {path: Q}\n")
    for key in ("actor.optim.lr", "model.path"):
        assert f"unknown key actor_rollout_ref.{key}\n" in text
        assert f"fix:     here this is {key}\n" in text + "\n"
    assert "the optimizer is always AdamW" in text, "TRL's optim is a value, not a section"


@pytest.mark.parametrize(("override", "listed"), [("save_steps=1", False), ("actr.x=1", False), ("zzz=1", True)])
def test_all_sections_are_listed_only_where_the_fix_names_none(write, override, listed):
    assert ("rollout_correction" in message(write, override)) == listed


def test_options_of_other_commands_are_explained(capsys):
    assert main(["train", "grpo_quickstart", "--learning_rate", "1e-6"]) == 2
    assert "here this is actor.optim.lr" in capsys.readouterr().err


def test_names_are_read_whatever_their_case_and_section():
    assert meaning_of(("trainer", "Save_Steps")) == "here this is trainer.save_every"
    assert meaning_of(("anything", "at", "all")) is None
