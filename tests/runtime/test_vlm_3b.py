"""A vision-language model of a published size, with random weights in bf16: one step of GRPO on a CPU.

Adapters are trained: with all 3.75 billion weights the update would take 69 GB, of which 45 are optimizer state and 15
gradients. A step takes 8.5 GB.
"""

import json
from pathlib import Path

import pytest

from megarl.artifacts.facts import facts_from_config
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.campaign("vlm-3b"), pytest.mark.timeout(1500)]

#: config.json of Qwen/Qwen2.5-VL-3B-Instruct, with the ids of a character tokenizer.
PUBLISHED = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 11008,
        "vocab_size": 151936,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
    "tie_word_embeddings": True,
    "vision_start_token_id": 4,
    "image_token_id": 5,
    "vision_end_token_id": 6,
    "video_token_id": 7,
}
#: The published model's number of parameters.
PARAMETERS = 3_754_622_976
REWARD = '''
import itertools

calls = itertools.count()


def alternating(samples):
    """A score that differs between the two answers of a prompt, which are tokens without a text."""
    return [float(next(calls) % 2) for _ in samples]
'''


def test_one_step_of_grpo_of_a_published_size(tmp_path: Path) -> None:
    assert facts_from_config(PUBLISHED, "config.json", vision=True).parameters == PARAMETERS
    (tmp_path / "score.py").write_text(REWARD)
    settings = [
        "model.hf_config=null",
        f"model.hf_config={json.dumps(PUBLISHED)}",
        "model.dtype=bf16",
        "model.lora={rank: 8, alpha: 16, targets: [attention, mlp, tower, merger]}",
        "data={batch_size: 2, min_pixels: 12544, max_pixels: 12544, max_prompt_tokens: 32, val_files: []}",
        f"reward={{name: {tmp_path}/score.py:alternating}}",
        "rollout.sampling={n: 2, max_new_tokens: 4}",
        "actor.engine={micro_batch_tokens: 64, recompute: full, logits_chunk_tokens: 16}",
        "sft.steps=0",
        "validation.every=0",
        "trainer={steps: 1, save_every: 0, export_hf: false}",
        "cluster={nproc: 1, threads: 2, timeout_s: 1200}",
        "tracking={mlflow: false, report: false}",
    ]
    process = harness.start(Path("grpo_shapes_quickstart"), tmp_path / "run", *settings)
    output = harness.finish(process, timeout=1400)
    assert process.returncode == 0, output[-4000:]
    (step,) = harness.metrics(tmp_path / "run").values()
    assert step["actor/grad_norm"] > 0
