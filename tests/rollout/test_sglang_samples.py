"""What is asked of a server and how its answers add up to a sample."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.config.rollout import SamplingConfig
from megarl.rollout.engine import Completion, Request
from megarl.rollout.sglang.samples import BadAnswerError, ServedSample
from megarl.rollout.stop_strings import StopStrings
from tests.data.templates import tokenizer_of
from tests.rollout.fake_servers import samples_of

SAMPLING = SamplingConfig(max_new_tokens=6, temperature=0.7, top_k=5, top_p=0.9)
STOP = [2, 9]
NOW = "5@run"


def answer(ids: list[int], reason: str, spans: list[tuple[str, int, int]] | None = None) -> dict[str, Any]:
    spans = spans if spans is not None else [(NOW, 0, len(ids))]
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [[-0.5 - i, token, None] for i, token in enumerate(ids)],
            "weight_version": spans[-1][0] if spans else NOW,
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in spans],
        },
    }


def test_the_request_carries_ids_seed_and_limits() -> None:
    payload = ServedSample(0, [5, 6], seed=77).payload(SAMPLING, STOP)
    assert payload["input_ids"] == [5, 6]
    assert payload["sampling_params"] == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_new_tokens": 6,
        "sampling_seed": 77,
        "stop_token_ids": [2, 9],
    }
    for room in (0, 2):
        assert ServedSample(0, [5], 1, room=room).payload(SAMPLING, STOP)["sampling_params"]["max_new_tokens"] == room
    everything = SamplingConfig(ignore_eos=True, top_k=0)
    settings = ServedSample(0, [5], 1).payload(everything, [])["sampling_params"]
    assert settings["ignore_eos"] is True
    assert settings["top_k"] == -1


def test_an_answer_that_ends_completes_the_sample() -> None:
    sample = ServedSample(0, [5], 1)
    sample.add(answer([7, 9], "stop"), SAMPLING, STOP, NOW)
    done = sample.completion()
    assert (done.token_ids, done.logprobs, done.finish_reason) == ([7, 9], [-0.5, -1.5], "stop")
    assert done.versions == [[5, 2]]


def test_drafts_of_all_answers_are_counted() -> None:
    sample = ServedSample(0, [5], 1)
    for ids, reason, proposed, taken in (([7, 8], "abort", 8, 3), ([7], "abort", 0, 0), ([9], "stop", 4, 4)):
        body = answer(ids, reason)
        body["meta_info"] |= (
            {"spec_num_proposed_drafts": proposed, "spec_num_correct_drafts": taken} if proposed else {}
        )
        sample.add(body, SAMPLING, STOP, NOW)
    assert sample.drafts == (12, 7)


def test_an_interrupted_sample_goes_on_where_it_was_and_keeps_the_version_of_each_token() -> None:
    sample = ServedSample(0, [5], 1)
    sample.add(answer([7, 8], "abort", [("3@run", 0, 1), ("4@run", 1, 2)]), SAMPLING, STOP, "4@run")
    assert sample.finish_reason is None
    rest = sample.payload(SAMPLING, STOP)
    assert rest["input_ids"] == [5, 7, 8]
    assert rest["sampling_params"]["max_new_tokens"] == 4
    sample.add(answer([1, 1, 1, 1], "length", [(NOW, 0, 4)]), SAMPLING, STOP, NOW)
    done = sample.completion()
    assert done.token_ids == [7, 8, 1, 1, 1, 1]
    assert done.finish_reason == "length"
    assert done.versions == [[3, 1], [4, 1], [5, 4]]


def test_an_end_token_of_the_model_that_is_none_here_is_passed_by() -> None:
    sample = ServedSample(0, [5], 1)
    sample.add(answer([7, 3], "stop"), SAMPLING, STOP, NOW)
    assert sample.finish_reason is None
    sample.add(answer([9], "stop"), SAMPLING, STOP, NOW)
    assert sample.completion().token_ids == [7, 3, 9]


@pytest.mark.parametrize("cut", range(1, 6))
@pytest.mark.parametrize("begun", [0, 1, 2])
def test_a_sample_ends_with_the_token_that_completes_a_stop_string_wherever_it_was_interrupted(cut, begun) -> None:
    """Servers sample on, here to an end token; the turn may have begun before the sample."""
    tokenizer = tokenizer_of("bytes")
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("x", "a", "b", "!", "c", "</s>")]
    strings = StopStrings(["ab!"], tokenizer)
    sample = ServedSample(0, [5, *ids[:begun]], 1, strings=strings, begun=begun)
    rest = ids[begun:]
    for part, reason in ((rest[:cut], "abort"), (rest[cut:], "stop")):
        if part and sample.finish_reason is None:
            sample.add(answer(part, reason), SAMPLING, [2], NOW)
    done = sample.completion()
    assert (done.token_ids, done.finish_reason, done.versions) == (ids[begun:4], "stop", [[5, 4 - begun]])
    assert len(done.logprobs) == 4 - begun
    plain = samples_of([Request([5], [1], begun=0)], strings)[0]
    plain.add(answer([ids[0], ids[4], 2], "stop"), SAMPLING, [2], NOW)
    assert plain.completion().token_ids == [ids[0], ids[4], 2]


@pytest.mark.parametrize("said", ["stop", "length", "abort"])
def test_an_end_token_at_the_last_allowed_place_is_a_stop(said: str) -> None:
    sample = ServedSample(0, [5], 1)
    sample.add(answer([7, 7, 7, 7, 7, 9], said), SAMPLING, STOP, NOW)
    assert sample.finish_reason == "stop"
    endless = ServedSample(0, [5], 1)
    endless.add(answer([7, 7, 7, 7, 7, 9], said), SAMPLING, [], NOW)  # `ignore_eos`
    assert endless.finish_reason == "length"


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([("999@other", 0, 2)], ["'999@other' of another run", "'5@run'"]),
        ([("5@run", 0, 1), ("1@other", 1, 2)], ["'1@other' of another run"]),
        ([("1@other", 0, 1), ("5@run", 1, 2)], ["'1@other' of another run"]),
        ([("6@run", 0, 2)], ["'6@run'", "newest", "'5@run'"]),
        ([("4@run", 0, 2)], ["old weights '4@run'", "'5@run'"]),
        ([("default", 0, 2)], ["'default'", "was not sent by a run"]),
        ([("5", 0, 2)], ["'5'", "was not sent by a run"]),
        ([(None, 0, 2)], ["None", "was not sent by a run"]),
        ([(5, 0, 2)], ["5", "was not sent by a run"]),
    ],
)
def test_an_answer_of_other_weights_is_no_sample_of_ours(spans: Any, words: list[str]) -> None:
    sample = ServedSample(0, [5], 1)
    with pytest.raises(BadAnswerError) as caught:
        sample.add(answer([7, 9], "stop", spans), SAMPLING, STOP, NOW)
    assert all(word in str(caught.value) for word in words), caught.value
    assert sample == ServedSample(0, [5], 1)


def test_an_interruption_at_the_last_token_is_the_end() -> None:
    sample = ServedSample(0, [5], 1)
    sample.add(answer([7] * 6, "abort"), SAMPLING, STOP, NOW)
    assert sample.finish_reason == "length"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a["meta_info"]["output_token_logprobs"].pop(),
        lambda a: a["meta_info"]["output_token_logprobs"][0].__setitem__(1, 99),
        lambda a: a["meta_info"].pop("finish_reason"),
        lambda a: a["meta_info"]["weight_versions"][0].__setitem__("end", 1),
        lambda a: a["meta_info"]["weight_versions"][0].__setitem__("version", "default"),
        lambda a: a["meta_info"].pop("weight_version"),
        lambda a: a["meta_info"].update(weight_version=None),
        lambda a: a["meta_info"].update(weight_version=5),
        lambda a: a.pop("output_ids"),
        lambda a: a.update(answer([], "length")),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused_and_changes_nothing(spoil: Any) -> None:
    sample, bad = ServedSample(0, [5], 1), answer([7, 9], "stop")
    spoil(bad)
    with pytest.raises(BadAnswerError):
        sample.add(bad, SAMPLING, STOP, NOW)
    assert sample == ServedSample(0, [5], 1)


def test_every_seed_is_a_sample() -> None:
    samples = samples_of([Request([5], [1, 2]), Request([6, 7], []), Request([8], [3])])
    assert [(s.prompt, s.prompt_ids, s.seed) for s in samples] == [(0, [5], 1), (0, [5], 2), (2, [8], 3)]


def test_a_request_may_have_less_room_than_the_sampling_settings_give():
    [sample] = samples_of([Request([1, 2], [5], room=3)])
    assert sample.payload(SamplingConfig(max_new_tokens=8), [9])["sampling_params"]["max_new_tokens"] == 3


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_completion_passes_from_rank_to_rank_bit_for_bit(tokens: int) -> None:
    completion = Completion(
        [5, 0, 2**31 - 1][:tokens], [-0.1, -1e-300, float("-inf")][:tokens], "length", [[7, tokens]]
    )
    assert Completion.from_json(json.loads(json.dumps(completion.to_json()))) == completion
