"""What a run leaves for others: hf/ is the trained model, and transformers gives the trainer's log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tests.dist import run_distributed
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]

TEXTS = ["3+4=7", "9+9=18", "12+5=1"]


def trainer_logprobs(run_dir: str) -> torch.Tensor:
    """Log-probs of TEXTS after the "=" from the last checkpoint, loaded into the engine of the run's recipe."""
    from megarl.artifacts.trained import steps_in
    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch, Jagged
    from megarl.runtime.setup import build_rank_state
    from megarl.training.checkpoint import load

    config = RunConfig.model_validate(yaml.safe_load((Path(run_dir) / "config.yaml").read_text()))
    c = build_rank_state(config, Path(run_dir))
    checkpoints = Path(run_dir) / "checkpoints"
    load(checkpoints / f"step_{steps_in(checkpoints)[-1]}", {"actor": c.actor.engine})
    encode = c.tokenizer.encode
    split = [text.index("=") + 1 for text in TEXTS]
    batch = Batch(
        {
            "prompt_ids": Jagged.from_list([encode(t[:n]) for t, n in zip(TEXTS, split, strict=True)]),
            "response_ids": Jagged.from_list([encode(t[n:]) for t, n in zip(TEXTS, split, strict=True)]),
        },
        {},
    )
    return c.actor.engine.logprobs(batch)[0].values


def transformers_logprobs(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            logp = model(ids).logits[0].log_softmax(-1)
        start = text.index("=") + 1
        parts.append(logp[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0])
    return torch.cat(parts)


def test_transformers_agrees_with_the_trainer_about_the_exported_model(tmp_path):
    recipe = harness.write_recipe(tmp_path)
    run_dir = tmp_path / "run"
    harness.run(recipe, run_dir, "trainer.steps=2")
    ours = run_distributed(trainer_logprobs, 2, 120, str(run_dir))[0]
    # Two float32 implementations of a 4-layer model: sums in another order, 1e-6 in practice.
    torch.testing.assert_close(transformers_logprobs(run_dir / "hf"), ours, atol=1e-4, rtol=0)
