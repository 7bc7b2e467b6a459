"""Models with gated delta nets against transformers: gradients of every parameter."""

import pytest
import torch
import torch.nn.functional as F

from megarl.models.packing import pack_stream
from megarl.models.weight_table import as_index
from megarl.models.weights.fill import local_shards
from tests.dist import single_process
from tests.models.tiny import build_tiny, save_tiny

MODELS = ["qwen3_5_text"]
LENGTHS = [70, 3, 1, 25]


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:-1], tokens[1:], reduction="sum") if len(tokens) > 1 else logits.sum()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_all_parameters_equal_transformers(name, tmp_path):
    single_process()
    reference = save_tiny(tmp_path, name)
    (model,) = build_tiny(tmp_path)
    tokens = torch.randint(0, 131, (sum(LENGTHS),), generator=torch.Generator().manual_seed(4))
    stream = pack_stream(LENGTHS)
    hidden = model(stream.input_ids(tokens), stream.position_ids, None, packed_seq_params=stream.params)
    logits = F.linear(hidden[:, 0], model.lm_head_weight)
    parts = list(zip(logits.split(LENGTHS), tokens.split(LENGTHS), strict=True))
    sum(loss(out, part) for out, part in parts).backward()
    sum(loss(reference(input_ids=part[None]).logits[0], part) for _, part in parts).backward()
    theirs = {parameter: tensor.grad for parameter, tensor in reference.named_parameters()}
    for shard, parameter in local_shards([model]):
        for piece in shard.pieces:
            torch.testing.assert_close(
                parameter.grad[as_index(piece.target_region)],
                theirs[piece.source][as_index(piece.source_region)],
                atol=5e-4,
                rtol=1e-3,
                msg=lambda text, piece=piece: f"{piece.source}: {text}",
            )
