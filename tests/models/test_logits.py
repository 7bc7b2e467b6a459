"""Models in bf16, without packing, and with a value head; test_families.py compares models with transformers."""

import pytest
import torch

from megarl.models.packing import pack_stream
from tests.dist import single_process
from tests.models.tiny import build_tiny, save_tiny

LENGTHS = [32, 7, 19, 1, 28, 13, 32, 5]


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
    return list(model.logits(hidden[:, 0]).split([len(s) for s in seqs]))


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
