"""gpt-oss: generation and random models against transformers, layouts, and what is refused."""

from __future__ import annotations

import random

import pytest
import torch

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig
from megarl.models.config import load_hf_config, transformer_config
from megarl.models.weight_table import as_index
from megarl.models.weights import export_weights
from megarl.models.weights.files import CheckpointReader
from megarl.models.weights.fill import local_shards
from megarl.rollout.engine import Request
from megarl.system.errors import ConfigError
from tests.dist import single_process, world
from tests.models.test_logits import logits, sequences
from tests.models.tiny import build_tiny, save_tiny, tiny_dict
from tests.rollout.cases import engine, sampled, tokens

ROPES = (
    {"rope_scaling": None, "rope_parameters": None},  # transformers' default: yarn with a factor of 32
    {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}},
    {"rope_scaling": {"rope_type": "default"}, "rope_theta": 1e4},
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {},
)


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


def weighted_nll(per_sequence: list[torch.Tensor], seqs: list[torch.Tensor]) -> torch.Tensor:
    pairs = zip(per_sequence, seqs, strict=True)
    return sum(torch.nn.functional.cross_entropy(out[:-1], seq[1:], reduction="sum") for out, seq in pairs)


def greedy(chunks, prompts: list[list[int]], count: int) -> list[list[int]]:
    requests = [Request(prompt, [number]) for number, prompt in enumerate(prompts)]
    made = engine(chunks, max_running=4).generate(requests, sampled(temperature=0.0, max_new_tokens=count), [])
    return [group[0] for group in tokens(made)]


def greedy_of(reference, prompts: list[list[int]], count: int) -> list[list[int]]:
    made = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(count):
            ids = torch.cat([ids, reference(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        made.append(ids[0, len(prompt) :].tolist())
    return made


def draw_prompts(number: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(131) for _ in range(draw.randint(1, 24))] for _ in range(number)]


@pytest.mark.parametrize("compiled", [True, False])
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(compiled, tmp_path, monkeypatch):
    if not compiled:
        monkeypatch.setattr("megarl.rollout.embedded.model.load_kernels", lambda: None)
    reference, prompts = save_tiny(tmp_path, "gpt_oss"), draw_prompts(3, 0)
    assert greedy(build_tiny(tmp_path), prompts, 10) == greedy_of(reference, prompts, 10)


def drawn(seed: int) -> dict:
    """A random config."""
    draw = random.Random(seed)
    layers, groups = draw.randint(1, 4), draw.choice([1, 2, 3])
    heads, experts = groups * draw.choice([1, 2, 4]), draw.randint(2, 8)
    types = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(layers)]
    return {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": draw.choice([8, 16, 24, 64]),
        "hidden_size": draw.choice([32, 48, 64]),
        "intermediate_size": draw.choice([16, 24, 48, 64]),
        "num_local_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "layer_types": draw.choice([None, types]),
        "sliding_window": draw.choice([1, 3, 8, 40]),
        "attention_bias": draw.random() < 0.7,
        "swiglu_limit": draw.choice([0.5, 1.5, 7.0]),
        "swiglu_alpha": draw.choice([1.0, 1.702]),
        "tie_word_embeddings": draw.random() < 0.3,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        **draw.choice(ROPES),
    }


@pytest.mark.campaign("families")
@pytest.mark.parametrize("seed", range(40))
def test_random_models_are_those_of_transformers(seed, tmp_path):
    from transformers import AutoModelForCausalLM

    reference = save_tiny(tmp_path, "gpt_oss", **drawn(seed))
    chunks, seqs, prompts = build_tiny(tmp_path), sequences(), draw_prompts(20, seed)
    packed, wanted = logits(chunks[0], seqs), [reference(input_ids=s[None]).logits[0] for s in seqs]
    for ours, theirs, seq in zip(packed, wanted, seqs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        torch.testing.assert_close(logits(chunks[0], [seq])[0], theirs, atol=1e-5, rtol=0)
    with torch.no_grad():
        assert greedy(chunks, prompts, 8) == greedy_of(reference, prompts, 8)
    export_weights(chunks, tmp_path / "exported", chunks[0].hf_config, world=world())
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(read[name], tensor), name
    weighted_nll(packed, seqs).backward()
    weighted_nll(wanted, seqs).backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    reference.save_pretrained(tmp_path / "gradients")
    gradients = CheckpointReader(tmp_path / "gradients")
    for shard, parameter in local_shards(chunks):
        for piece in shard.pieces:
            theirs = gradients.read(piece.source, piece.source_region)
            torch.testing.assert_close(parameter.grad[as_index(piece.target_region)], theirs, atol=2e-4, rtol=1e-4)


def test_transformer_engine_layers_are_refused():
    hf = load_hf_config(ModelConfig(path=None, hf_config=tiny_dict("gpt_oss")))
    with pytest.raises(ConfigError, match=r"gpt_oss[\s\S]*set actor\.engine\.layers=local"):
        transformer_config(hf, ParallelConfig(), dtype=torch.bfloat16, engine=EngineConfig(layers="te"))
