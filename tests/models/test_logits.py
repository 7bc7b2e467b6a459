"""Megatron's hidden states and gradients against transformers, packed and one by one, for every architecture."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from megarl.config.model import ModelConfig
from megarl.models.hf import load_hf_config
from megarl.models.packing import pack_stream
from megarl.models.weight_table import as_index
from megarl.models.weights.files import CheckpointReader
from megarl.models.weights.fill import local_shards
from megarl.models.weights.metadata import write_metadata
from tests.dist import single_process
from tests.models.tiny import ARCHITECTURES, build_tiny, save_tiny

LENGTHS = [32, 7, 19, 1, 28, 13, 32, 5]
HYBRID = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]
#: Absolute tolerance of logits; chunks sum a state in another order than transformers.
TOLERANCE = dict.fromkeys(ARCHITECTURES, 5e-6) | dict.fromkeys(HYBRID, 2e-5)


@pytest.fixture(autouse=True)
def _parallel():
    single_process()


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 131, (n,), generator=generator) for n in LENGTHS]


def logits(model, seqs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits of each sequence, all in one packed stream."""
    stream = pack_stream([len(s) for s in seqs])
    hidden = model(stream.input_ids(torch.cat(seqs)), stream.position_ids, None, packed_seq_params=stream.params)
    return list(F.linear(hidden[:, 0], model.lm_head_weight).split([len(s) for s in seqs]))


def weighted_nll(per_sequence: list[torch.Tensor], seqs: list[torch.Tensor]) -> torch.Tensor:
    return sum(F.cross_entropy(out[:-1], seq[1:], reduction="sum") for out, seq in zip(per_sequence, seqs, strict=True))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_transformers(name, tied, tmp_path):
    reference = save_tiny(tmp_path, name, tie_word_embeddings=tied)
    (model,) = build_tiny(tmp_path)
    with torch.no_grad():
        for ours, seq in zip(logits(model, sequences()), sequences(), strict=True):
            expected = reference(input_ids=seq[None]).logits[0]
            torch.testing.assert_close(ours, expected, atol=TOLERANCE[name], rtol=0)


ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scaling_equals_transformers(kind, tmp_path):
    reference = save_tiny(tmp_path, "llama", rope_parameters=ROPES[kind])
    (model,) = build_tiny(tmp_path)
    seq = torch.arange(100) % 131
    with torch.no_grad():
        torch.testing.assert_close(logits(model, [seq])[0], reference(input_ids=seq[None]).logits[0], atol=5e-6, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [{"norm_topk_prob": False}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}],
    ids=["raw-probabilities", "every-second-layer", "first-layer-dense"],
)
def test_mixture_variants_equal_transformers(changes, tmp_path):
    reference = save_tiny(tmp_path, "qwen3_moe", **changes)
    (model,) = build_tiny(tmp_path)
    seq = sequences()[0]
    with torch.no_grad():
        torch.testing.assert_close(logits(model, [seq])[0], reference(input_ids=seq[None]).logits[0], atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe"])
def test_packing_changes_no_gradient(name, tmp_path):
    save_tiny(tmp_path, name)
    (packed,), (alone,) = build_tiny(tmp_path), build_tiny(tmp_path)
    seqs = sequences()
    weighted_nll(logits(packed, seqs), seqs).backward()
    for seq in seqs:
        weighted_nll(logits(alone, [seq]), [seq]).backward()
    for (param, p), (_, q) in zip(packed.named_parameters(), alone.named_parameters(), strict=True):
        torch.testing.assert_close(
            p.grad, q.grad, atol=2e-4, rtol=1e-4, msg=lambda text, param=param: f"{param}: {text}"
        )


@pytest.mark.parametrize(
    "name", ["qwen3", "glm4_moe", "qwen2_moe", "minimax_m2", "gemma3_text", "granite", "olmo3", "phi3", "smollm3"]
)
def test_gradients_equal_transformers(name, tmp_path):
    reference = save_tiny(tmp_path, name)
    (model,) = build_tiny(tmp_path)
    seqs = sequences()
    weighted_nll(logits(model, seqs), seqs).backward()
    weighted_nll([reference(input_ids=s[None]).logits[0] for s in seqs], seqs).backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.grad)
    reference.save_pretrained(tmp_path / "gradients")  # under the names of checkpoints
    theirs = CheckpointReader(tmp_path / "gradients")
    for shard, parameter in local_shards([model]):
        for piece in shard.pieces if parameter.requires_grad else ():
            ours, wanted = parameter.grad[as_index(piece.target_region)], theirs.read(piece.source, piece.source_region)
            torch.testing.assert_close(
                ours, wanted, atol=2e-4, rtol=1e-4, msg=lambda text, name=piece.source: f"{name}: {text}"
            )


def test_bf16_stays_near_fp32(tmp_path):
    save_tiny(tmp_path, "qwen3")
    (exact,), (half,) = build_tiny(tmp_path), build_tiny(tmp_path, torch.bfloat16)
    with torch.no_grad():
        for a, b in zip(logits(exact, sequences()), logits(half, sequences()), strict=True):
            assert b.dtype == torch.bfloat16
            assert (a - b.float()).abs().max() < 0.1


def test_unpacked_input_is_refused(tmp_path):
    save_tiny(tmp_path, "llama")
    (model,) = build_tiny(tmp_path)
    with pytest.raises(ValueError, match="packed"):
        model(torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], None)


def test_value_model_starts_at_zero_and_has_no_language_head(tmp_path):
    save_tiny(tmp_path, "qwen3", tie_word_embeddings=True)
    (critic,) = build_tiny(tmp_path, value_head=True)
    assert critic.value_weight.shape == (1, 64)
    assert not critic.value_weight.any()
    with pytest.raises(ValueError, match="language-model head"):
        _ = critic.lm_head_weight


@pytest.mark.parametrize("name", ["gemma3_text", "olmo3", "phi3"])
def test_an_exported_config_has_the_same_positions(name, tmp_path):
    config = save_tiny(tmp_path / "source", name).config
    (tmp_path / "out").mkdir()
    write_metadata(tmp_path / "out", config, None, torch.float32)
    again = AutoConfig.from_pretrained(tmp_path / "out")
    kept = {key: value for key, value in config.rope_parameters.items() if key != "type"}  # the older name of rope_type
    assert again.rope_parameters == kept
    assert (again.layer_types if name != "phi3" else None) == getattr(config, "layer_types", None)
    load_hf_config(ModelConfig(path=str(tmp_path / "out")), follow_files=False)
