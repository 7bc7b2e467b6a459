"""Sizes of all known models, and FLOPs of some, exactly as published.

The file holds, for each model of known_models.json: the number of parameters that the hub shows (of tied models without
the copy of the embeddings that some files hold), the number that one token uses, the bytes that decoding in bfloat16
caches of a token and keeps of a sequence, worked out by hand from the config's fields, and FLOPs in the same way: 2 x
rows x columns of every matrix that a token meets, and 4 x heads x width of a head for each key it sees, or 2 x heads x
(width of a key + width of a value) in latent attention. Not counted: correction biases, layers that predict more than
one token ahead, and the vision encoders of Qwen3.5. Parameters of robot policies have 64 rows that pad the vocabulary,
and not the 43,080,480 of blocks and of a pooling that are never run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl import artifacts
from megarl.architectures import standard_config, supported_model_types
from megarl.architectures.decoders import DECODERS
from megarl.artifacts.facts import facts_from_config
from megarl.planning.flops import FlopCounter, pair_flops, token_flops
from megarl.planning.shards import key_value_bytes, sequence_state_bytes
from megarl.system.errors import ConfigError

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published.json").read_text())
KNOWN = json.loads((Path(artifacts.__file__).parent / "known_models.json").read_text())
COUNTED = [name for name, each in PUBLISHED.items() if "forward_flops_per_token" in each]


def facts_of(name):
    return facts_from_config(KNOWN[name], name)


def test_sizes_are_those_that_were_published():
    assert set(PUBLISHED) == set(KNOWN)
    for name, published in PUBLISHED.items():
        facts = facts_of(name)
        assert facts.parameters == published["parameters"], name
        assert facts.active_parameters == published.get("active", facts.parameters), name
        assert sum(facts.parameters_of.values()) == facts.parameters - facts.visual_parameters, name
        assert key_value_bytes(facts, 1, "bf16") == published["cached"], name
        assert sequence_state_bytes(facts, 1, 2) == published.get("state", 0), name


@pytest.mark.campaign("families")
def test_parameters_are_those_of_transformers_classes():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    texts = {
        name: raw for name, raw in KNOWN.items() if raw["model_type"] != "openvla" and "vl" not in raw["model_type"]
    }
    for name, raw in texts.items():
        whole = AutoConfig.for_model(**standard_config(raw))
        config = whole.get_text_config()
        config.tie_word_embeddings = whole.tie_word_embeddings
        with torch.device("meta"):
            tensors = dict(AutoModelForCausalLM.from_config(config).named_parameters())
        facts = facts_of(name)
        experts = sum(tensor.numel() for key, tensor in tensors.items() if ".experts." in key)
        total = sum(tensor.numel() for tensor in tensors.values())
        idle = experts * (facts.experts - config.num_experts_per_tok) // facts.experts if experts else 0
        assert (facts.parameters, facts.active_parameters) == (total, total - idle), name


@pytest.mark.campaign("families")
def test_parameters_with_a_vision_encoder_are_those_of_transformers_classes():
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    for name, raw in KNOWN.items():
        if raw["model_type"] in DECODERS:
            with torch.device("meta"):
                model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**raw))
            total = sum(parameter.numel() for parameter in model.parameters())
            assert facts_from_config(raw, name, vision=True).parameters == total, name


@pytest.mark.parametrize("name", COUNTED)
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
    assert caught.value.allowed == ", ".join(supported_model_types())


def test_tensor_parallel_ranks_share_states_and_not_latents():
    latent, recurrent = facts_of("zai-org/GLM-4.7-Flash"), facts_of("Qwen/Qwen3.5-35B-A3B")
    assert key_value_bytes(latent, 4, "bf16") == key_value_bytes(latent, 1, "bf16")
    assert sequence_state_bytes(recurrent, 4, 2) == sequence_state_bytes(recurrent, 1, 2) / 4


def test_tokens_of_deepseek_v3_are_multiplied_by_what_its_paper_says():
    """37 billion parameters are activated for each token (arXiv:2412.19437), the embedding among them."""
    facts = facts_of("deepseek-ai/DeepSeek-V3")
    assert facts.active_parameters == pytest.approx(37e9, rel=0.02)
    # 128 heads of 61 layers: training reads keys of 192 and values of 128 numbers, decoding 576 and 512 of latents
    assert pair_flops(facts) == {None: 61 * 128 * 2 * (192 + 128)}
    assert pair_flops(facts, decoding=True) == {None: 61 * 128 * 2 * (576 + 512)}
