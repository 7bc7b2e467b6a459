"""The real GSM8K files, where they are at hand."""

from pathlib import Path

import pytest

from megarl.config.data import DataConfig
from megarl.data.loader import PromptLoader
from megarl.data.prompts import PromptDataset
from megarl.data.sources import load_rows
from megarl.data.tokenizer import character_tokenizer
from megarl.rewards.gsm8k import gsm8k
from megarl.system.errors import DataError

FOLDER = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "gsm8k"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no GSM8K at ../shared/data/gsm8k")


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_all_rows_are_read(split, count):
    rows = load_rows(str(FOLDER / f"{split}.jsonl"))
    assert len(rows) == count
    assert rows[-1].where.endswith(f"{split}.jsonl:{count}")
    assert all("####" in row["answer"] for row in rows)


def test_the_folder_must_not_mix_train_and_test():
    with pytest.raises(DataError, match="several splits"):
        load_rows(str(FOLDER))


def test_questions_become_prompts_and_long_ones_are_counted():
    rows = load_rows(str(FOLDER / "test.jsonl"))
    alphabet = "".join(sorted({character for row in rows for character in row["question"]}))
    config = DataConfig(
        train_files=[str(FOLDER / "test.jsonl")],
        prompt_key="question",
        format_prompt="{{ content | trim }}",
        max_prompt_tokens=400,
    )
    data = PromptDataset(config, character_tokenizer(alphabet))
    texts = [row["question"].strip() for row in rows]
    assert data.texts == [text for text in texts if len(text) <= 400]
    assert data.overlong == sum(len(text) > 400 for text in texts) > 0
    batch = next(PromptLoader(data, 32, seed=1))
    assert batch["prompt_ids"].lengths.tolist() == [len(text) for text in batch["prompt_text"]]


def test_every_reference_solution_answers_itself_and_no_other_question():
    answers = [row["answer"] for row in load_rows(str(FOLDER / "test.jsonl"))]
    for answer, other in zip(answers, answers[1:] + answers[:1], strict=True):
        number = answer.rpartition("####")[2].strip()
        sample = {"response": answer, "answer": answer}
        assert gsm8k(sample)["overall"] == gsm8k(sample, method="flexible")["overall"] == 1.0
        assert gsm8k({"response": f"{answer}%\n####", "answer": number})["overall"] == 1.0
        same = other.rpartition("####")[2].strip().replace(",", "") == number.replace(",", "")
        assert gsm8k({"response": answer, "answer": other})["overall"] == same
