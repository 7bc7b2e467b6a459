"""Rows that are preference pairs or labelled examples, in the forms in which they are found."""

import json

import pytest

from megarl.config.data import DataConfig
from megarl.config.training import PreferenceConfig
from megarl.data.loader import PromptLoader, rounds
from megarl.data.pairs import as_examples, as_pairs, label_of
from megarl.data.preferences import LabelledDataset, PairDataset
from megarl.data.rows import Row
from megarl.data.tokenizer import character_tokenizer
from megarl.system.errors import DataError

USER = {"role": "user", "content": "2+2="}
GOOD, BAD = {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}
SYSTEM = {"role": "system", "content": "count"}


def pairs(*rows, **settings):
    found = [Row(row, "pairs.jsonl", number, "line") for number, row in enumerate(rows, 1)]
    return as_pairs(found, DataConfig(), PreferenceConfig(**settings))


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", "4", "5"),
        ({"chosen": "2+2= 4", "rejected": "2+2= 5"}, "2+2=", " 4", " 5"),  # as in TRL
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER], [GOOD], [BAD]),
        ({"chosen": [SYSTEM, USER, GOOD], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER], [GOOD], [BAD]),
        ({"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD, USER, BAD]}, [USER, GOOD, USER], [GOOD], [BAD]),
        ({"prompt": "2+2=", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], [GOOD], [BAD]),  # UltraFeedback
        ({"prompt": "2+2=", "chosen": [SYSTEM, GOOD], "rejected": [SYSTEM, BAD]}, [SYSTEM], [GOOD], [BAD]),
        ({"prompt": "2+2=", "chosen": [GOOD], "rejected": [BAD]}, "2+2=", [GOOD], [BAD]),
    ],
)  # fmt: skip
def test_forms_of_pairs(row, prompt, chosen, rejected):
    (pair,) = pairs(row)
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (prompt, chosen, rejected)
    assert pair.where == "pairs.jsonl:1"


def test_columns_have_the_names_of_the_recipe():
    (pair,) = pairs(
        {"prompt": "p", "scores": {"good": "4", "bad": "5"}}, chosen_key="scores.good", rejected_key="scores.bad"
    )
    assert pair.column("scores.good", "") == "4"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "chosen": "4"}, "no column 'rejected'"),
        ({"prompt": "p", "chosen": "4", "rejected": None}, "column 'rejected' has no response"),
        ({"prompt": "p", "chosen": "", "rejected": "5"}, "column 'chosen' has no response"),
        ({"prompt": "p", "chosen": "4", "rejected": [BAD]}, "one response is text and the other a list of messages"),
        ({"chosen": "4", "rejected": "5"}, "the two responses have no common beginning"),
        ({"chosen": "2+2=4", "rejected": "2+2=45"}, "no prompt: the two responses"),
        ({"chosen": [USER], "rejected": [USER, BAD]}, "no prompt: the two responses"),
    ],
)
def test_bad_rows_are_refused_by_name(row, words):
    with pytest.raises(DataError, match=words) as error:
        pairs({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, row)
    assert "pairs.jsonl:2" in str(error.value)


def test_batches_hold_each_pair_as_two_samples(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}\n'
        '{"prompt": "1+1=", "chosen": "2", "rejected": "2"}\n'
        '{"prompt": "9+9=", "chosen": "18", "rejected": "99999999"}\n'
        '{"prompt": "3+4=", "chosen": "7", "rejected": "12"}\n'
    )
    config = DataConfig(train_files=[str(file)])
    tokenizer = character_tokenizer("0123456789+=")
    data = PairDataset(config, PreferenceConfig(max_tokens=10), tokenizer)
    assert (len(data), data.equal, data.overlong) == (2, 1, 1)
    assert data.describe() == (
        "train: 2 pairs of at most 6-7 tokens a sequence; 1 with equal responses dropped; "
        "1 with a prompt or a sequence that is too long dropped"
    )
    held_out = config.model_copy(update={"max_val_samples": 2, "val_files": [str(file)]})
    few = PairDataset(held_out, PreferenceConfig(), tokenizer, split="val")
    assert (len(few), few.overlong) == (2, 0), "others are not too long"
    batch = data.batch([1, 0], epoch=3)
    assert batch["response_text"] == ["7", "12", "4", "5"]
    assert batch["prompt_text"] == ["3+4="] * 2 + ["2+2="] * 2
    assert batch["uid"][0] == batch["uid"][1] != batch["uid"][2] == batch["uid"][3]
    assert [name.partition("#")[2] for name in batch["sample_id"]] == ["chosen", "rejected"] * 2
    end = tokenizer.eos_token_id
    assert [row[-1] for row in map(list, batch["response_ids"].unbind())] == [end] * 4
    assert batch["response_ids"].lengths.tolist() == [2, 3, 2, 2]
    assert len(data.batch([])) == 0
    with pytest.raises(DataError, match="too long"):
        PairDataset(config.model_copy(update={"overlong": "error"}), PreferenceConfig(max_tokens=10), tokenizer)
    other = PairDataset(
        config, PreferenceConfig(max_tokens=10, chosen_key="rejected", rejected_key="chosen"), tokenizer
    )
    assert other.fingerprint != data.fingerprint


def test_examples_are_rows_with_a_label_and_both_responses_of_pairs():
    rows = [
        {"prompt": "1+1=", "completion": "2", "label": True},
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": "3+3=", "completion": [BAD], "label": 0},
    ]
    found = as_examples(
        [Row(row, "rows.jsonl", number, "line") for number, row in enumerate(rows, 1)],
        DataConfig(),
        PreferenceConfig(loss="kto"),
    )
    said = [(row["prompt"], row["completion"], bool(row["label"]), row.where[-1]) for row in found]
    assert said == [
        ("1+1=", "2", True, "1"),
        ("3+3=", [BAD], False, "3"),
        ("2+2=", "4", True, "2"),
        ("2+2=", "5", False, "2"),
    ]


@pytest.mark.parametrize(("label", "desirable"), [("True", True), ("false", False), ("1", True), ("0", False)])
def test_labels_may_be_text_as_csv_has_them(label, desirable):
    assert label_of(Row({"label": label}, "rows.csv", 2, "line"), PreferenceConfig(loss="kto")) is desirable


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "completion": "4"}, "no column 'label'"),
        ({"prompt": "p", "label": True}, "no column 'completion'"),
        ({"completion": "4", "label": True}, "no column 'prompt'"),
        ({"prompt": "p", "completion": "", "label": True}, "column 'completion' has no response"),
        ({"prompt": "p", "completion": "4", "label": "good"}, "is not a label of true or false"),
        ({"prompt": "p", "completion": "4", "label": None}, "is not a label of true or false"),
    ],
)
def test_bad_examples_are_refused_by_name(row, words):
    rows = [Row(row, "rows.jsonl", 7, "line")]
    with pytest.raises(DataError, match=words) as error:
        as_examples(rows, DataConfig(), PreferenceConfig(loss="kto"))
    assert "rows.jsonl:7" in str(error.value)


def test_examples_have_the_response_before_them_in_the_global_batch_on_any_number_of_ranks(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}", "label": n % 2 == 0} for n in range(5)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config, tokenizer = DataConfig(train_files=[str(file)], val_files=[str(file)]), character_tokenizer("0123456789+=")
    data = LabelledDataset(config, PreferenceConfig(loss="kto"), tokenizer)
    assert data.describe() == "train: 5 examples of 6 tokens, 3 desirable"
    whole = PromptLoader(data, 4, shuffle=True)
    parts = [PromptLoader(data, 4, rank, 2, shuffle=True) for rank in range(2)]
    for _ in range(3):  # also over the end of an epoch
        batch, (first, second) = next(whole), (next(part) for part in parts)
        said, others = ([row.tolist() for row in batch[f"{name}_ids"].unbind()] for name in ("response", "mismatched"))
        before = [[*said[place:], *said[:place]] for place in range(4)]  # of each example, the last one at the end
        assert others == [next(b for b in reversed(row) if b != a) for a, row in zip(said, before, strict=True)]
        for rank, part in enumerate((first, second)):
            assert [row.tolist() for row in part["mismatched_ids"].unbind()] == others[rank::2]
            assert part["label"].tolist() == batch["label"].tolist()[rank::2]
    (one,) = rounds(data, None)
    halves = [next(iter(rounds(data, None, rank, 2))) for rank in range(2)]
    joined = [row.tolist() for half in halves for row in half["mismatched_ids"].unbind()]
    assert joined == [row.tolist() for row in one["mismatched_ids"].unbind()]
    settings = PreferenceConfig(loss="kto", max_tokens=5)
    with pytest.raises(DataError, match="prompt and response are too long") as error:
        LabelledDataset(config.model_copy(update={"overlong": "error"}), settings, tokenizer)
    assert "preference.max_tokens" in str(error.value)


def test_a_mismatched_response_is_another_example_s(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": f"{n + 1}", "label": n % 2 == 0} for n in range(2)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config, tokenizer = DataConfig(train_files=[str(file)], val_files=[str(file)]), character_tokenizer("0123456789+=")
    data = LabelledDataset(config, PreferenceConfig(loss="kto"), tokenizer)
    loader = PromptLoader(data, 3)  # two examples, so that one of them is there twice
    for batch in (next(loader) for _ in range(4)):
        said, others = (batch[f"{name}_ids"].unbind() for name in ("response", "mismatched"))
        assert all(a.tolist() != b.tolist() for a, b in zip(said, others, strict=True))
    whole, halves = (
        [row.tolist() for batch in rounds(data, size) for row in batch["mismatched_ids"].unbind()] for size in (None, 1)
    )
    assert whole == halves == [row.tolist() for row in data.response_ids.unbind()[::-1]]
    batch = data.batch([0, 0])
    data.set_mismatched(batch, [0, 0], [0, 0])
    assert not batch["mismatched_mask"].values.any(), "there is no other example: z is 0"


def test_a_mismatched_response_ends_where_its_sequence_is_as_long_as_it_may_be(tmp_path):
    file = tmp_path / "rows.jsonl"
    pairs = [("1+1+1+1=", "4"), ("2=", "2+0+0+0")]
    file.write_text("".join(json.dumps({"prompt": a, "completion": b, "label": True}) + "\n" for a, b in pairs))
    config, tokenizer = DataConfig(train_files=[str(file)]), character_tokenizer("0123456789+=")
    data = LabelledDataset(config, PreferenceConfig(loss="kto", max_tokens=12), tokenizer)
    batch = data.batch([0, 1])
    data.set_mismatched(batch, [0, 1], [1, 0])
    long, short = (row.tolist() for row in data.response_ids.unbind()[::-1])
    room = 12 - int(batch["prompt_ids"].lengths[0])
    assert 0 < room < len(long)
    assert [row.tolist() for row in batch["mismatched_ids"].unbind()] == [long[:room], short]
    assert batch["mismatched_mask"].lengths.tolist() == batch["mismatched_ids"].lengths.tolist()


def test_margins_are_numbers_of_both_samples(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        '{"prompt": "2+2=", "chosen": "4", "rejected": "5", "gap": 0.5}\n'
        '{"prompt": "3+4=", "chosen": "7", "rejected": "12", "gap": 2}\n'
    )
    config, tokenizer = DataConfig(train_files=[str(file)]), character_tokenizer("0123456789+=")
    settings = PreferenceConfig(loss="bradley_terry", margin_key="gap")
    assert PairDataset(config, settings, tokenizer).batch([1, 0])["margin"].tolist() == [2, 2, 0.5, 0.5]
    with pytest.raises(DataError, match="column 'chosen' is not a number"):
        PairDataset(config, settings.model_copy(update={"margin_key": "chosen"}), tokenizer)
