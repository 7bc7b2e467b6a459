"""The reward of a sequence classifier: its scores are those of transformers, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megarl.config.data import RewardConfig
from megarl.data.tokenizer import character_tokenizer
from megarl.rewards.registry import load_scorer, mode_of
from megarl.rewards.runner import reward_processes
from megarl.rewards.scoring import ScoringFailure, score
from megarl.system.errors import ConfigError

CHAT = "{% for m in messages %}<{{ m.content }}>{% endfor %}"


def tokenizer() -> Any:
    made = character_tokenizer("0123456789+-*/=<>")
    made.chat_template = CHAT
    return made


def config(**more: Any) -> transformers.Qwen3Config:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 24, "pad_token_id": 0, **more}
    return transformers.Qwen3Config(vocab_size=len(tokenizer()), **sizes, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of two labels with random weights."""
    path = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config(num_labels=2))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def samples(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"uid": str(i), "prompt": p, "response": r, "messages": None} for i, (p, r) in enumerate(pairs)]


def scores(given: list[dict[str, Any]], **kwargs: Any) -> list[Any]:
    scorer = load_scorer("classifier", "batch", {k: str(v) if k == "path" else v for k, v in kwargs.items()})
    return [outcome for _, outcome in sorted(score(scorer, given, stop_at_failure=False))]


def expected(folder: Path, text: str, label: int) -> float:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    ids = tokenizer()(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        return float(model(ids).logits[0, label])


def test_each_score_is_that_of_the_sample_alone_whatever_it_is_batched_with(folder):
    pairs = [("1+1=", "2"), ("12+34=", "46"), ("9*9=", "80"), ("7-", "77777")]
    end = tokenizer().eos_token
    for label, size in ((0, 3), (1, 1)):
        found = scores(samples(*pairs), path=folder, label=label, batch_size=size)
        alone = [expected(folder, p + r + end, label) for p, r in pairs]
        assert [one["overall"] for one in found] == pytest.approx(alone, abs=1e-5)  # float32 of sums of 16 values


def test_a_conversation_goes_through_its_own_template(folder):
    given = samples(("[prompt of the policy]", "2"))
    given[0]["messages"] = [{"role": "user", "content": "1+1="}]
    (found,) = scores(given, path=folder, form="chat", end=False)
    assert found["overall"] == pytest.approx(expected(folder, "<1+1=><2>", 0), abs=1e-5)


def test_a_sample_that_is_too_long_has_failed_and_the_others_have_not(folder):
    found = scores(samples(("1+1=", "2"), ("1" * 20, "2" * 20)), path=folder)
    assert isinstance(found[1], ScoringFailure)
    assert found[1].reason == "has 41 tokens, and the classifier accepts at most 24"
    assert "overall" in found[0]


def test_what_is_no_classifier_is_refused(folder, tmp_path):
    transformers.Qwen3ForCausalLM(config()).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    for path, words in ((tmp_path, "weights of the classifier are missing"), (tmp_path / "no", "does not exist")):
        with pytest.raises(ConfigError, match=rf"reward\.kwargs\.path: .*{words}"):
            scores(samples(("1", "2")), path=path)
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.label(?s:.*)0 to 1"):
        scores(samples(("1", "2")), path=folder, label=2)


def test_it_scores_in_a_process_of_its_own():
    kwargs = {"path": "x"}
    assert mode_of("classifier", "sequential") == "batch"
    assert reward_processes(RewardConfig(name="classifier", kwargs=kwargs)) == 1
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.path"):
        load_scorer("classifier", "batch", {})
