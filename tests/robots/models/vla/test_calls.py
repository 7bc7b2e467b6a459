"""The sequence of a policy call, column by column, and its prompt."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from megarl.data.light_tokenizer import WrittenTokenizer
from megarl.robots.config import RobotConfig
from megarl.robots.models.vla.calls import FAMILIES, CallLayout, PolicyFamily, prompt_ids, prompt_text
from megarl.system.errors import ConfigError


def columns(layout: CallLayout) -> list[tuple]:
    """What is in each column, put together piece by piece."""
    sequence: list[tuple] = [("prompt", 0)]
    sequence += [("patch", camera, patch) for camera in range(layout.cameras) for patch in range(layout.patches)]
    sequence += [("state",)] if layout.state else []
    sequence += [("prompt", token) for token in range(1, layout.prompt)]
    sequence += [("slot", k, d) for k in range(layout.chunk) for d in range(layout.dim)]
    return sequence + ([("stop",)] if layout.parallel else [])


@pytest.mark.parametrize(("dim", "chunk"), [(7, 8), (14, 25), (7, 25), (14, 8), (1, 1)])
@pytest.mark.parametrize(("cameras", "state"), [*itertools.product([1, 2, 3], [False, True])])
@pytest.mark.parametrize("parallel", [True, False])
def test_every_column_is_where_it_is_said_to_be(dim, chunk, cameras, state, parallel):
    for prompt, patches in itertools.product([2, 30], [1, 256]):
        layout = CallLayout(prompt, patches, dim, chunk, cameras, state, parallel)
        sequence = columns(layout)

        assert len(sequence) == layout.length
        assert {what for what, *_ in sequence[layout.visual]} == {"patch"}
        assert len(sequence[layout.visual]) == sum(what == "patch" for what, *_ in sequence)
        assert sequence[layout.text] == [("prompt", token) for token in range(1, prompt)]
        assert [number for number, (what, *_) in enumerate(sequence) if what == "slot"] == list(
            range(layout.length)[layout.slots]
        )
        assert len(range(layout.length)[layout.predictors]) == layout.actions == dim * chunk
        for column in range(layout.length)[layout.predictors]:
            assert sequence[column + 1][0] == "slot"
        k, d = chunk - 1, dim // 2
        assert sequence[layout.slots.start + k * dim + d] == ("slot", k, d)
        assert layout.state_at == (sequence.index(("state",)) if state else None)
        assert layout.stop == (sequence.index(("stop",)) if parallel else None)


def test_openvla_ofts_sequence():
    """Two cameras of 256 patches, proprioception, 35 tokens of prompt, 8 actions of 7 numbers."""
    layout = CallLayout(prompt=35, patches=256, dim=7, chunk=8, cameras=2, state=True)
    assert layout.predictors == slice(513 + 34, 513 + 34 + 56)  # patches and state, prompt without BOS
    assert layout.length == 35 + 513 + 56 + 1


@pytest.mark.parametrize("wrong", [{"prompt": 1}, {"patches": 0}, {"dim": 0}, {"chunk": 0}, {"cameras": 0}])
def test_a_call_without_one_of_its_parts_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CallLayout(**{"prompt": 5, "patches": 4, "dim": 7, "chunk": 8} | wrong)


def test_the_prompt_is_written_in_small_letters():
    assert prompt_text("Pick Up {this}", FAMILIES["openvla-oft"]) == (
        "In: What action should the robot take to pick up {this}?\nOut:"
    )
    assert prompt_text("Pick", PolicyFamily("{task}!", lower=False)) == "Pick!"


@pytest.mark.parametrize("name", ["openvla-oft", "openvla"])
def test_bos_and_the_last_token_are_there_once(name):
    family = FAMILIES[name]
    tokenizer = WrittenTokenizer("chars:" + "".join(sorted(set(prompt_text("abc", family)))))
    plain = tokenizer(prompt_text("abc", family))["input_ids"]

    def complete(text):
        return {"input_ids": [1, *tokenizer(text)["input_ids"], 29871]}

    complete.bos_token_id = 1
    expected = [1, *plain, 29871]
    assert prompt_ids("ABC", family, tokenizer) == expected
    assert prompt_ids("abc", family, complete) == expected
    assert prompt_ids("abc", PolicyFamily(last_token=None), tokenizer) == expected[:-1]


def test_a_tokenizer_without_bos_is_refused():
    with pytest.raises(ConfigError, match=r"model\.tokenizer: the tokenizer has no BOS token"):
        prompt_ids("abc", FAMILIES["openvla"], lambda text: {"input_ids": [5]})


def test_recipes_may_name_every_family_and_no_other():
    assert set(get_args(RobotConfig.model_fields["family"].annotation)) == set(FAMILIES)
