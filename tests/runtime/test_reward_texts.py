"""The texts that reward functions get: without special tokens, or of all tokens (`reward.skip_special_tokens`)."""

import torch

from megarl.data.batch import Batch, Jagged
from megarl.data.messages import PromptColumn
from megarl.data.tokenizer import character_tokenizer
from megarl.runtime.roles import whole_texts
from megarl.runtime.stages.reward import reward_inputs

TOKENIZER = character_tokenizer("ab?=")
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def test_functions_get_the_text_of_all_tokens_of_the_last_turn_and_of_the_episode():
    # "a" answered by "?", then "ab" with a stop string "b" that `response_text` is cut before; and one turn of a sample
    # that was cut
    tokens = [[*ids("a"), EOS, *ids("?"), *ids("ab"), EOS], ids("ba")]
    columns = {
        name: ["x", "y"] for name in ("uid", "prompt_text", "answer", "data_source", "finish_reason", "sample_id")
    }
    samples = Batch(
        {
            "response_ids": Jagged.from_list(tokens, dtype=torch.int64),
            "response_mask": Jagged.from_list([[1, 1, 0, 1, 1, 1], [1, 1]], dtype=torch.bool),
            "turn_starts": Jagged.from_list([[0, 3], [0]], dtype=torch.int64),
            "turn_ends": Jagged.from_list([[2, 6], [2]], dtype=torch.int64),
        },
        {**columns, "row": [{}, {}], "response_text": ["a", "ba"], "transcript": ["a?ab", "ba"]},
    )

    def texts(*more) -> list[tuple[str, str]]:
        return [(s["response"], s["transcript"]) for s in reward_inputs(samples, PromptColumn(), *more)]

    assert texts() == [("a", "a?ab"), ("ba", "ba")]
    eos = TOKENIZER.eos_token
    assert texts(lambda rows: whole_texts(TOKENIZER, rows)) == [(f"ab{eos}", f"a{eos}?ab{eos}"), ("ba", "ba")]
    assert samples["response_text"] == ["a", "ba"], "other readers keep their texts"
