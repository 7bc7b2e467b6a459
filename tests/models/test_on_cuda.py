"""Every architecture on a pretended GPU: read from files, trained for a step, exported, all against transformers.

In both forms of layers: `local`, and `te` as the double of Transformer Engine computes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.batch import Batch
from tests.campaigns import chosen, split
from tests.dist import run_pretending_with_te
from tests.models.tiny import ARCHITECTURES, LOCAL_ONLY, save_tiny, two_layers
from tests.training import cases
from tests.training.cases import outputs, train

FORMS = {"local": "ColumnParallelLinear", "te": "TELayerNormColumnParallelLinear"}
# Layers other than attention have a `local` form only, whose first projection of the first layer has another name.
CASES = [
    (kind, layers, dtype)
    for kind in ARCHITECTURES
    for layers in FORMS
    if layers != "te" or kind not in LOCAL_ONLY
    for dtype in ("float32", "bfloat16")
]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Each part with tensors of its own in float32; delta nets also in bf16. Others have the same parts with other numbers,
# and tests/training/test_on_cuda.py trains dense models.
PARTS = ("deepseek_v3", "gemma2", "gpt_oss", "minimax_m2", "olmo2")
KEPT = (
    *((kind, "local", "float32") for kind in (*PARTS, "qwen3_next")),
    ("qwen3", "te", "float32"),
    ("qwen3_next", "local", "bfloat16"),
    ("glm4_moe", "te", "bfloat16"),
)


def make_batch() -> Batch:
    """Few samples, which one micro-batch holds: every operation of the pretended device takes long."""
    return cases.make_batch(4, longest=24)


def life(folder: Path, out: Path, layers: str, dtype: torch.dtype) -> dict[str, Any]:
    """Log-probs of the files' model and of the trained one, which is exported to `out`; losses of two steps."""
    from megarl.config.model import ModelConfig, ParallelConfig
    from megarl.config.training import EngineConfig, OptimConfig
    from megarl.models.config import load_hf_config
    from megarl.models.weights import export_weights, load_weights
    from megarl.training.engine import MegatronEngine
    from tests.dist import layout_for, world

    hf, parallel, batch = load_hf_config(ModelConfig(path=str(folder))), ParallelConfig(), make_batch()
    engine = MegatronEngine(
        hf,
        parallel,
        EngineConfig(layers=layers, micro_batch_tokens=200, logits_chunk_tokens=40),
        OptimConfig(lr=1e-3),
        dtype=dtype,
        layout=layout_for(parallel),
        total_steps=10,
        weights=lambda chunks: load_weights(chunks, folder),
    )
    places = sorted({str(p.device) for chunk in engine.chunks for p in chunk.parameters()})
    mixer = engine.chunks[0].decoder.layers[0].self_attention
    names = ("linear_qkv", "in_proj", "linear_kv_up_proj")  # of attention, gated delta nets, latent attention
    form = next(type(getattr(mixer, name)).__name__ for name in names if hasattr(mixer, name))
    found = {"form": form, "places": places, "read": outputs(engine, batch)["logp"].values}
    found["losses"] = [train(engine, batch).result()["loss"] for _ in range(2)]
    found["trained"] = outputs(engine, batch)["logp"].values
    export_weights(engine.chunks, out, hf, world=world())
    return found


def lives(root: str, cases: list[tuple[str, str, str]]) -> dict[str, dict[str, Any]]:
    from tests.pretend_cuda import Pretend

    with Pretend():
        return {
            (name := " ".join(case)): life(Path(root, case[0]), Path(root, name), case[1], DTYPES[case[2]])
            for case in cases
        }


def by_transformers(folder: Path) -> torch.Tensor:
    """Log-probs of all response tokens of the batch, one sample at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    batch, found = make_batch(), []
    for prompt, response in zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True):
        ids = torch.cat([prompt, response])
        with torch.no_grad():
            logp = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(logp.gather(1, response[:, None])[:, 0])
    return torch.cat(found)


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in {kind for kind, _, _ in chosen(request, "case")}:
        save_tiny(folder / kind, kind, **two_layers(kind))
    return folder


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, root: Path) -> dict[str, dict[str, Any]]:
    return run_pretending_with_te(lives, 1, 240, str(root), chosen(request, "case"))[0]


@pytest.mark.procs
@pytest.mark.parametrize("case", split("families", CASES, KEPT), ids=" ".join)
def test_a_model_is_read_trained_and_exported_as_transformers_sees_it(found, root, case):
    kind, layers, dtype = case
    got = found[" ".join(case)]
    assert got["form"] == FORMS[layers]
    assert got["places"] == ["cuda:0"]
    assert got["losses"][1] < got["losses"][0]
    exported = by_transformers(root / " ".join(case))
    if dtype == "float32":  # summed in other orders: log-probs reach -20
        torch.testing.assert_close(got["read"], by_transformers(root / kind), rtol=0, atol=1e-4)
        torch.testing.assert_close(got["trained"], exported, rtol=0, atol=1e-4)
    else:  # the same weights, with a bfloat16 sum in every layer: 8 bits of numbers up to 20, on average
        assert (got["trained"] - exported).abs().mean() < 0.2
