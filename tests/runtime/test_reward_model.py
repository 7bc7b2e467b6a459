"""A reward model of the run: its scores are those of transformers, in every layout, and one of the weighted rewards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.load import load_config
from tests import forked
from tests.dist import fresh_layout, run_distributed
from tests.runtime import harness
from tests.runtime.harness import of_training
from tests.runtime.test_teams import assert_near, placed

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]

CHARACTERS = "0123456789+-*/=."
LONGEST = 24
#: Prompts and responses as tokens: of usual length, with padding in the middle, ended by it, and too long.
SAMPLES = [([5, 6, 14], [7, 8, 2]), ([9], [0, 4]), ([9, 10], [4, 11, 0, 0]), ([5] * 20, [6] * 9)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier with random weights, of other sizes than the policy, and with its tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, Qwen3Config

    from megarl.data.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("classifier")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LONGEST, "pad_token_id": 0}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=20, num_labels=1, bos_token_id=1, eos_token_id=2, **sizes, **more)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    character_tokenizer(CHARACTERS).save_pretrained(path)
    return path


def of_transformers(folder: Path, rows: list[list[int]]) -> list[float]:
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.inference_mode():
        return [float(model(torch.tensor([row])).logits[0, 0]) for row in rows]


def scores_of_samples(recipe: str, folder: str, parallel: str) -> list[float]:
    """What the role says of SAMPLES, as one of its ranks."""
    import torch

    from megarl.data.batch import Batch, Jagged
    from megarl.data.tokenizer import character_tokenizer
    from megarl.models.config import load_hf_config
    from megarl.models.weights import load_weights
    from megarl.runtime.roles import RewardModelRole
    from megarl.runtime.setup import build_engine
    from megarl.system.offload_schedule import OffloadSchedule

    more = [f"actor.parallel={parallel}", f"reward_model.path={folder}", "reward.on_error=-3"]
    config = load_config(Path(recipe), more)
    own = config.model.model_copy(update={"path": folder, "hf_config": None})
    engine = build_engine(
        config,
        load_hf_config(own),
        fresh_layout(config.actor.parallel),
        lambda chunks: load_weights(chunks, folder),
        trainable=False,
        name="reward_model",
    )
    c = SimpleNamespace(config=config, offload=OffloadSchedule())
    role = RewardModelRole(engine, c, character_tokenizer(CHARACTERS), offloads=())
    prompts, responses = (Jagged.from_list(list(rows), dtype=torch.int64) for rows in zip(*SAMPLES, strict=True))
    batch = Batch({"prompt_ids": prompts, "response_ids": responses, "sample_id": ["0", "1", "2", "3"]})
    return role.scores(batch).tolist()


@pytest.mark.parametrize("parallel", ["{tp: 2, sp: true}", "{pp: 2}"])
def test_its_scores_are_those_of_transformers_and_one_that_is_too_long_has_none(folder, parallel, tmp_path):
    recipe = harness.write_recipe(tmp_path)
    for found in run_distributed(scores_of_samples, 2, 240, str(recipe), str(folder), parallel):
        wanted = of_transformers(folder, [[*prompt, *response] for prompt, response in SAMPLES[:3]])
        assert found[:3] == pytest.approx(wanted, abs=1e-5)
        assert found[3] != found[3], "longer than its positions: nothing"


def settings(folder: Path, *more: str, **parts: str) -> list[str]:
    """Settings of a run whose score is half the model's and a function's, with further parts."""
    of_model = "{name: reward_model, weight: 0.5}"
    function = "{name: 'reward.py:closeness'}"
    others = "".join(f", {name}: {part}" for name, part in parts.items())
    return [
        f"reward=!replace {{parts: {{digits: {function}, model: {of_model}{others}}}, timeout_s: 50}}",
        f"reward_model.path={folder}",
        "algorithm.kl.use=none",
        "sft.steps=0",
        "trainer.steps=2",
        "trainer.export_hf=false",
        *more,
    ]


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, float]]]:
    """A run in one process, in which the reward `classifier` has transformers score the same text."""
    recipe = harness.write_recipe(tmp_path_factory.mktemp("reward_model"))
    same = f"{{name: classifier, weight: 0, kwargs: {{path: {folder}}}}}"
    more = settings(folder, "cluster.nproc=1", "reward_model.form=text", same=same)
    return recipe, harness.train(recipe, recipe.parent / "one", *more)


def closeness(row: dict) -> float:
    """The function of the recipe, for a row of a file."""
    return sum(c.isdigit() for c in row["response"]) / 6 + (row["response"] == row["answer"])


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def of_rows(folder: Path, rows: list[dict]) -> list[float]:
    """What transformers says of samples in a file, whose responses are shorter than the limit."""
    from megarl.data.tokenizer import character_tokenizer

    tokenizer = character_tokenizer(CHARACTERS)
    texts = [row["prompt"] + row["response"] + tokenizer.eos_token for row in rows]
    return of_transformers(folder, [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])


def test_its_score_is_a_weighted_part_of_the_reward_in_training_and_validation(one, folder):
    recipe, steps = one
    for numbers in (steps[1], steps[2]):
        assert numbers["reward/model"] == pytest.approx(numbers["reward/same"], abs=1e-5)
        total = 0.5 * numbers["reward/model"] + numbers["reward/digits"]
        assert numbers["reward/overall"] == pytest.approx(total, abs=1e-5) == numbers["critic/score/mean"]
    rows = lines(recipe.parent / "one" / "samples.jsonl")[:8]
    scores = of_rows(folder, rows)
    wanted = [0.5 * score + closeness(row) for score, row in zip(scores, rows, strict=True)]
    assert [row["score"] for row in rows] == pytest.approx(wanted, abs=1e-5)


def test_eval_chooses_the_best_of_n_by_the_model(one, folder):
    recipe, _ = one
    best = (
        "validation.sampling.n=4",
        "validation.log_samples=64",
        "validation.sampling.temperature=1",
        "validation.select_by=model",
    )
    latest = f"trainer.resume={recipe.parent}/one/checkpoints/step_2"
    given = [*settings(folder, "cluster.nproc=1", "reward_model.form=text"), latest, *best]
    ended = forked.run(["eval", recipe, *given, "--run-dir", recipe.parent / "eval"], recipe.parent)
    assert ended.code == 0, ended.output
    [numbers] = lines(recipe.parent / "eval" / "metrics.jsonl")
    rows = lines(recipe.parent / "eval" / "samples.jsonl")
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, chosen_by in zip(rows, of_rows(folder, rows), strict=True):
        groups.setdefault(row["prompt"], []).append((chosen_by, closeness(row)))
    assert {len(group) for group in groups.values()} == {4}
    best_of_4 = [max(group)[1] for group in groups.values()]
    assert numbers["val/selected@4"] == pytest.approx(sum(best_of_4) / len(best_of_4), abs=1e-5)


def test_a_run_with_the_model_in_a_team_of_its_own_is_the_same_up_to_rounding(one, folder):
    recipe, steps = one
    same = f"{{name: classifier, weight: 0, kwargs: {{path: {folder}}}}}"
    teams = {"train": (["actor", "rollout"], 1), "judge": (["reward_model"], 2)}
    layout = ("reward_model.parallel={tp: 2}", "reward_model.form=text")
    apart = harness.train(recipe, recipe.parent / "apart", *settings(folder, *layout, *placed(teams), same=same))

    def trained(found: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
        """Validation asks the model only in the rollout's team."""
        return {
            step: {name: value for name, value in numbers.items() if not name.startswith("val/")}
            for step, numbers in of_training(found).items()
            if step
        }

    assert_near(trained(apart), trained(steps))
