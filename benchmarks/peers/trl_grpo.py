"""One side of the comparison: TRL's GRPOTrainer on a benchmark case. Runs in its own environment, imports no megarl.

    python trl_grpo.py CASE.json MODEL_DIR OUT.json

CASE.json holds: prompts (list of str), answers, samples_per_prompt, prompts_per_step, max_new_tokens, exact_length,
micro_batch_sequences, lr, steps, dtype (fp32 | bf16), threads. Prints nothing; OUT.json gets wall and CPU seconds of
each step, split into generation and the rest, and the peak resident set.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Wall and CPU seconds of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._start = (0.0, 0.0)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = (time.perf_counter(), time.process_time())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        wall, cpu = self._start
        self.steps.append({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})


def exact_match(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the right text, else 0."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def build_trainer(case: dict[str, Any], model_dir: str, clock: StepClock) -> GRPOTrainer:
    """GRPO with the case's sampling and update, and TRL's defaults for the rest."""
    per_step = case["prompts_per_step"] * case["samples_per_prompt"]
    micro = min(case["micro_batch_sequences"], per_step)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    generation: dict[str, Any] = {}
    if case["exact_length"]:
        generation = {"min_new_tokens": case["max_new_tokens"]}
    config = GRPOConfig(
        output_dir="/tmp/trl_grpo_out",
        use_cpu=True,
        bf16=case["dtype"] == "bf16",
        seed=case.get("seed", 0),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_step // micro,
        generation_batch_size=per_step,
        num_generations=case["samples_per_prompt"],
        max_completion_length=case["max_new_tokens"],
        generation_kwargs=generation or None,
        learning_rate=case["lr"],
        lr_scheduler_type="constant",
        max_steps=case["steps"],
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=10_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rows = Dataset.from_list([{"prompt": p, "answer": a} for p, a in zip(case["prompts"], case["answers"], strict=True)])
    return GRPOTrainer(
        model=model,
        reward_funcs=exact_match,
        args=config,
        train_dataset=rows,
        processing_class=tokenizer,
        callbacks=[clock],
    )


def main() -> None:
    case_file, model_dir, out_file = sys.argv[1:4]
    with open(case_file) as file:
        case = json.load(file)
    torch.set_num_threads(case["threads"])
    clock = StepClock()
    trainer = build_trainer(case, model_dir, clock)
    generation: list[float] = []
    inner = trainer._generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = inner(*args, **kwargs)
        generation.append(time.perf_counter() - start)
        return result

    trainer._generate = timed
    start = (time.perf_counter(), time.process_time())
    trainer.train()
    total = {"wall_s": time.perf_counter() - start[0], "cpu_s": time.process_time() - start[1]}
    with open(out_file, "w") as file:
        json.dump(
            {
                "steps": clock.steps,
                "generation_s": generation,
                "total": total,
                "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
            },
            file,
        )


if __name__ == "__main__":
    main()
