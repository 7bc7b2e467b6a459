"""SGLang reads block FP8 as it is sent: its own class computes in the numbers that the sender's blocks stand for.

No CPU server generates with FP8 weights, because SGLang has no kernels for them there. Its reader, its layout of fused
projections and all other layers run on a CPU.
"""

import json
from pathlib import Path

import pytest
import torch

from megarl.models.hf import facts_of
from megarl.models.weight_table import Coordinate, WeightTable
from megarl.models.weights.metadata import write_metadata
from megarl.rollout.sglang.block_fp8 import write_block_fp8
from megarl.rollout.sglang.layout import ServerLayout
from megarl.sync.plan import Bucket, holdings, is_sent_as_fp8, make_plan
from megarl.sync.source import dequantize_blocks, quantize_blocks
from megarl.system.compat.sglang import LOADERS, STAND_INS
from tests.rollout.forked import run_program
from tests.rollout.servers import need_interpreter
from tests.sync.layouts import HERE, config, ranks_of

pytestmark = pytest.mark.servers
PROGRAM = Path(__file__).with_name("server_fp8.py")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TOKENS = [5, 1, 17, 40, 3, 3, 60, 22, 9]


def filled(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Header and bytes of a bucket as megarl's loader gets them."""
    flat = torch.zeros(bucket.nbytes, dtype=torch.uint8)
    for entry in bucket.entries:
        part = tensors[entry.name].contiguous()
        assert str(part.dtype) == f"torch.{entry.dtype}"
        flat[entry.offset : entry.offset + entry.nbytes] = part.view(-1).view(torch.uint8)
    entries = [[e.name, e.shape, e.dtype, e.offset, e.nbytes] for e in bucket.entries]
    return json.dumps({"tensors": entries, "update": "1", "sender": "a", "last": False}), flat


def logits(hf, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What transformers computes from these weights in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(hf).float().eval()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def test_sglang_computes_in_the_numbers_that_fp8_blocks_stand_for(tmp_path):
    need_interpreter()
    hf = config("qwen3", num_hidden_layers=2, tie_word_embeddings=False, **SIZES)
    table, at, g = WeightTable.of(hf), [Coordinate()], torch.Generator().manual_seed(1)
    exact = {name: torch.randn(shape, generator=g).mul(0.05).bfloat16() for name, shape in table.shapes().items()}
    exact |= {name: torch.ones_like(tensor) for name, tensor in exact.items() if tensor.dim() == 1}
    sent, held = {}, {}
    for name, tensor in exact.items():
        sent[name] = held[name] = tensor
        if tensor.dim() == 2 and is_sent_as_fp8(name):
            sent[name], sent[f"{name}_scale_inv"] = quantize_blocks(tensor)
            held[name] = dequantize_blocks(sent[name], sent[f"{name}_scale_inv"])
    layout = ServerLayout.of(hf, 1, 1)
    settings = {"bucket_bytes": 300_000, "dtype": "bfloat16", "fp8": True}
    plan = make_plan(holdings(table, at), ranks_of(at), [HERE], together=layout.together, **settings)
    buckets = plan.routes[0].senders[0]
    assert len(buckets) > 2
    torch.save([filled(bucket, sent) for bucket in buckets], tmp_path / "buckets")
    write_metadata(tmp_path, hf, None, torch.bfloat16)
    write_block_fp8(tmp_path, facts_of(hf))
    case = {"folder": str(tmp_path), "dtype": "bfloat16", "tp": 1, "ep": 1, "attention": "torch_native"}
    case |= {"buckets": str(tmp_path / "buckets"), "out": str(tmp_path / "out"), "tokens": TOKENS}
    (tmp_path / "case").write_text(json.dumps(case))
    log = tmp_path / "log"
    paths = [str(tmp_path / "case"), *map(str, (LOADERS.parent, LOADERS, *STAND_INS))]
    assert run_program(PROGRAM, paths, log) == 0, log.read_text()[-3000:]
    found = torch.load(tmp_path / "out")
    parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert found["quantised"] == sorted(f"model.layers.{layer}.{part}" for layer in range(2) for part in parts)
    expected = logits(hf, held)
    # float32 on both sides, with sums in another order
    torch.testing.assert_close(found["logits"], expected, rtol=1e-4, atol=1e-5)
    assert (expected - logits(hf, exact)).abs().max() > 1e-3, "what FP8 rounds is 100 times what float32 rounds"
