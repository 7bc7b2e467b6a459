"""Parameters and FLOPs of published models, exactly.

The file holds the fields of their config.json files that say sizes, the numbers of parameters that the hub shows for
them (of tied models without the copy of the embeddings that some files hold), and FLOPs worked out by hand from the
fields: 2 x rows x columns of every matrix that a token meets, and 4 x heads x width of a head for each key it sees, or
2 x heads x (width of a key + width of a value) in latent attention. Models with latent attention are counted without
correction biases and without layers that predict more than one token ahead; Kimi-K2 has DeepSeek-V3's architecture.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.architectures import ARCHITECTURES
from megarl.architectures.vision_language import DECODERS, TEXT_PARTS
from megarl.artifacts.facts import facts_from_config
from megarl.planning.flops import FlopCounter, token_flops
from megarl.planning.shards import key_value_bytes
from megarl.system.errors import ConfigError

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published.json").read_text())


def facts_of(name):
    return facts_from_config(PUBLISHED[name]["config"], name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name):
    facts = facts_of(name)
    assert facts.parameters == PUBLISHED[name]["parameters"]
    assert sum(facts.parameters_of.values()) == facts.parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_of_a_token_by_component(name):
    by_hand = dict(PUBLISHED[name]["forward_flops_per_token"])
    scores = by_hand.pop("scores_at_8192")
    assert token_flops(facts_of(name), pairs=8192) == by_hand | {"scores": scores}


def test_a_sequence_is_the_sum_of_its_tokens():
    facts = facts_of("mistralai/Mistral-7B-v0.1")  # with a window
    length = 4099
    ends = (1, 2, 100, 4095, 4096, 4097, length)
    sums = {end: FlopCounter.of(facts).forward([end]) for end in (*ends, *(end - 1 for end in ends))}
    for end in ends:
        token = sum(token_flops(facts, pairs=end).values())
        assert sums[end] - sums[end - 1] == token


def test_architectures_that_cannot_be_loaded_are_not_counted():
    with pytest.raises(ConfigError, match="the model's architecture is not supported"):
        facts_from_config({"model_type": "deepseek_v2", "hidden_size": 5120}, "deepseek-ai/DeepSeek-V2")


def test_supported_architectures_are_listed_with_the_vision_language_ones():
    with pytest.raises(ConfigError) as caught:
        facts_from_config({"model_type": "deepseek_v2"}, "some model")
    assert caught.value.allowed == ", ".join(sorted([*ARCHITECTURES, *DECODERS, *TEXT_PARTS]))


CACHED = {  # bytes of bfloat16 numbers per token: layers x (latent + rope key) x 2
    "deepseek-ai/DeepSeek-V3": 61 * 576 * 2,
    "moonshotai/Moonlight-16B-A3B": 27 * 576 * 2,
    "moonshotai/Kimi-K2-Instruct": 61 * 576 * 2,
    "zai-org/GLM-4.7-Flash": 47 * 576 * 2,
}


@pytest.mark.parametrize("name", CACHED)
def test_latent_attention_caches_as_much_on_every_rank(name):
    for tp in (1, 4):
        assert key_value_bytes(facts_of(name), tp, "bf16") == CACHED[name]


def test_tokens_of_deepseek_v3_are_multiplied_by_what_its_paper_says():
    """37 billion parameters are activated for each token (arXiv:2412.19437), the embedding among them."""
    facts = facts_of("deepseek-ai/DeepSeek-V3")
    assert facts.computing_parameters + facts.parameters_of["embedding"] == pytest.approx(37e9, rel=0.02)
