"""Losses, metrics and gradients of preference pairs and labelled examples against TRL's own trainers.

python -m pip install --no-deps --target DIR trl==1.16.0 accelerate==1.15.0
PYTHONPATH=DIR python -m pytest --campaign=trl tests/training/test_preference_trl.py
"""

from __future__ import annotations

import pytest
import torch

from tests.dist import run_distributed
from tests.training.test_preference import KTO, PAIRS, assert_gradients, engine_gradient, make_examples, make_pairs

#: Settings here -> those of TRL's DPOConfig.
SAME = {
    "sigmoid": ({"beta": 0.5}, {"loss_type": ["sigmoid"], "beta": 0.5}),
    "robust": (
        {"loss": "robust", "beta": 0.5, "label_smoothing": 0.1},
        {"loss_type": ["robust"], "beta": 0.5, "label_smoothing": 0.1},
    ),
    "hinge": ({"loss": "hinge", "beta": 0.5}, {"loss_type": ["hinge"], "beta": 0.5}),
    "ipo": ({"loss": "ipo", "beta": 0.2}, {"loss_type": ["ipo"], "beta": 0.2}),
    "of means": ({"beta": 2.0, "length_normalised": True}, {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
    "supervised": (
        {"beta": 0.5, "sft_coef": 0.3},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3], "beta": 0.5},
    ),
}


def padded(pad: int = 0) -> dict[str, torch.Tensor]:
    """The pairs as TRL's collator gives them: chosen sequences first, then rejected ones, padded on the right."""
    pairs, found = make_pairs(), []
    columns = ("prompt_ids", "response_ids", "response_mask", "ref_logp")
    for prompt, response, mask, ref in zip(*(pairs[name].unbind() for name in columns), strict=True):
        completion = torch.cat([torch.zeros(len(prompt), dtype=torch.int64), mask.long()])
        found.append((torch.cat([prompt, response]), completion, (ref * mask).sum()))
    ordered = found[::2] + found[1::2]
    pad_up = lambda rows, value: torch.nn.utils.rnn.pad_sequence(rows, True, value)  # noqa: E731
    ref = torch.stack([ref for _, _, ref in ordered])
    return {
        "input_ids": pad_up([tokens for tokens, _, _ in ordered], pad),
        "attention_mask": pad_up([torch.ones_like(tokens) for tokens, _, _ in ordered], 0),
        "completion_mask": pad_up([completion for _, completion, _ in ordered], 0),
        "ref_chosen_logps": ref[:PAIRS],
        "ref_rejected_logps": ref[PAIRS:],
    }


@pytest.mark.campaign("trl")
@pytest.mark.parametrize("name", SAME)
def test_a_step_is_that_of_trl(name, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is in no environment of this project; see the top of this file")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from megarl.data.tokenizer import character_tokenizer

    settings, theirs = SAME[name]
    (got,) = run_distributed(engine_gradient, 1, 300, str(tmp_path / "hf"), settings)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, **theirs
    )
    rows = Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}] * 2)
    trainer = trl.DPOTrainer(
        model, args=arguments, train_dataset=rows, processing_class=character_tokenizer("0123456789")
    )
    trainer.precompute_ref_logps = True  # with those of the pairs
    loss = trainer.compute_loss(trainer.model.train(), padded())
    loss.backward()
    mine = got["metrics"]["preference/loss"] + settings.get("sft_coef", 0) * got["metrics"].get(
        "preference/sft_loss", 0
    )
    assert mine == pytest.approx(loss.item(), rel=1e-5)
    for key in ("chosen", "rejected", "margins", "accuracies"):
        (theirs_of_it,) = trainer._metrics["train"][f"rewards/{key}"]
        assert got["metrics"][f"rewards/{key}"] == pytest.approx(theirs_of_it, rel=1e-5, abs=1e-5), key
    for key in ("chosen", "rejected"):
        assert got["metrics"][f"logps/{key}"] == pytest.approx(trainer._metrics["train"][f"logps/{key}"][0], rel=1e-5)
    # Both in float32, whose sums of thousands of products differ in the last places.
    assert_gradients(got, model, 5e-5)


def padded_examples() -> dict[str, torch.Tensor]:
    """The labelled examples as TRL's collator gives them, padded on the right."""
    examples, found = make_examples(), {"label": make_examples()["label"]}
    for ours, theirs, ref in (("response", "", "ref_logp"), ("mismatched", "KL_", "mismatched_ref_logp")):
        columns = ("prompt_ids", f"{ours}_ids", f"{ours}_mask", ref)
        rows = list(zip(*(examples[name].unbind() for name in columns), strict=True))
        whole = [torch.cat([prompt, response]) for prompt, response, _, _ in rows]
        counts = [torch.cat([torch.zeros(len(prompt), dtype=torch.int64), mask.long()]) for prompt, _, mask, _ in rows]
        columns = {"input_ids": whole, "attention_mask": list(map(torch.ones_like, whole)), "completion_mask": counts}
        for name, sequences in columns.items():
            found[f"{theirs}{name}"] = torch.nn.utils.rnn.pad_sequence(sequences, True, 0)
        found[f"ref_{theirs}logps"] = torch.stack([(ref * mask).sum() for _, _, mask, ref in rows])
    return found


@pytest.mark.campaign("trl")
def test_a_step_of_kto_is_that_of_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is in no environment of this project; see the top of this file")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    from megarl.data.tokenizer import character_tokenizer

    settings = {**KTO, "undesirable_weight": 0.7}
    (got,) = run_distributed(engine_gradient, 1, 300, str(tmp_path / "hf"), settings, make_examples)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    arguments = trl.KTOConfig(
        output_dir=str(tmp_path / "trl"),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        beta=KTO["beta"],
        desirable_weight=1.5,
        undesirable_weight=0.7,
    )
    rows = Dataset.from_list([{"prompt": "1", "completion": "2", "label": label} for label in (True, False)])
    trainer = trl.KTOTrainer(
        model, args=arguments, train_dataset=rows, processing_class=character_tokenizer("0123456789")
    )
    trainer.precompute_ref_logps = True  # with those of the examples
    loss = trainer.compute_loss(trainer.model.train(), padded_examples())
    loss.backward()
    assert got["metrics"]["preference/loss"] == pytest.approx(loss.item(), rel=1e-5)
    names = {"preference/kl": "kl"} | {
        name: name for name in got["metrics"] if name.startswith(("rewards/", "logps/")) and "acc" not in name
    }
    for ours, theirs in names.items():
        (expected,) = trainer._metrics["train"][theirs]
        assert got["metrics"][ours] == pytest.approx(expected, rel=1e-5, abs=1e-5), ours
    assert_gradients(got, model, 5e-5)
