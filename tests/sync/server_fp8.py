"""Runs in the servers' interpreter: SGLang's class loads FP8 buckets, and computes in the numbers that they stand for.

    python server_fp8.py CASE.json FOLDER...         FOLDERs are put on the path

CASE.json has the keys of a case of server_class.py, and `tokens`. SGLang has kernels for block FP8 on GPUs only, so
each projection multiplies by what SGLang's own function makes of its values and scales, in float32; everything else is
SGLang's. Attention is written out, because its backends need a server around them. The logits, and the names of the
quantised modules, go to `out`.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F


class InFloat32:
    """A quantised projection as SGLang's class `LinearMethodBase`, in the numbers that its weight stands for."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def apply(self, layer, x, bias=None):
        return F.linear(x, self.weight, bias)


class Prefill(types.SimpleNamespace):
    """A server's batch of one new sequence; what it does not have is None."""

    def __getattr__(self, name):
        return None


def attention(self, q, k, v, forward_batch, *more, **settings):
    """Causal attention of one sequence in place of `RadixAttention.forward`."""
    q, k, v = (x.view(len(x), -1, self.head_dim).transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True)
    return out.transpose(0, 1).reshape(q.shape[1], -1)


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    sys.path[:0] = sys.argv[2:]
    import megarl_loader
    import server_class
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    (model,), *_ = server_class.built(case, 0)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    for header, flat in torch.load(case["buckets"]):
        megarl_loader.load(model, [(header, flat)])
    quantised = {}
    for name, module in model.named_modules():
        if getattr(module, "weight_scale_inv", None) is not None:
            assert module.weight.dtype == torch.float8_e4m3fn, name
            weight = block_quant_dequant(module.weight, module.weight_scale_inv, [128, 128], torch.float32)
            quantised[name] = module, weight
    model.float()
    for module in model.modules():
        if hasattr(module, "cos_sin_cache"):  # made in bf16, as the class was
            module.cos_sin_cache = module._compute_cos_sin_cache()
    for module, weight in quantised.values():
        module.quant_method = InFloat32(weight)
    RadixAttention.forward = attention
    tokens = torch.tensor(case["tokens"])
    batch = Prefill(forward_mode=ForwardMode.EXTEND, input_ids=tokens)
    with torch.no_grad():
        hidden = model.model(tokens, torch.arange(len(tokens)), batch)
        logits = F.linear(hidden, model.lm_head.weight)[:, : model.config.vocab_size]
    torch.save({"logits": logits, "quantised": sorted(quantised)}, case["out"])


if __name__ == "__main__":
    main()
