"""One side of the comparison: TRL's GRPOTrainer on a benchmark case. Runs in its own environment, imports no megarl.

    python trl_grpo.py CASE.json OUT.json

CASE.json holds: model (folder), prompts (list of str, `steps` times `prompts_per_step` of them), samples_per_prompt,
prompts_per_step, max_new_tokens, exact_length, micro_batch_sequences, lr, clip_grad, steps, dtype (fp32 | bf16),
threads, seed. OUT.json gets wall and CPU seconds of each step, the part of it that is generation, the tokens generated,
and the peak resident set.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """The wall and CPU seconds from the end of a step to the end of the next one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.generation_s = 0.0
        self.tokens = 0
        self._start = (0.0, 0.0)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note that the first step starts."""
        self._start = (time.perf_counter(), time.process_time())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note that a step ends and the next one starts."""
        now = (time.perf_counter(), time.process_time())
        self.steps.append(
            {
                "wall_s": now[0] - self._start[0],
                "cpu_s": now[1] - self._start[1],
                "generation_s": self.generation_s,
                "generated_tokens": self.tokens,
            }
        )
        self._start, self.generation_s, self.tokens = now, 0.0, 0


class TimedTrainer(GRPOTrainer):
    """A trainer that notes which part of a step is generation."""

    def __init__(self, clock: Clock, **settings: Any) -> None:
        super().__init__(callbacks=[clock], **settings)
        self._clock = clock

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self._clock.generation_s += time.perf_counter() - start
        self._clock.tokens += sum(len(ids) for ids in result[0])
        return result


def digit_share(completions: list[str], **_: Any) -> list[float]:
    """Share of digits in a response."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def build_trainer(case: dict[str, Any], clock: Clock, folder: str) -> TimedTrainer:
    """Return a GRPO trainer with the case's sampling and update, and otherwise TRL's defaults (mean over tokens)."""
    per_step = case["prompts_per_step"] * case["samples_per_prompt"]
    micro = min(case["micro_batch_sequences"], per_step)
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=case["dtype"] == "bf16",
        seed=case["seed"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_step // micro,
        generation_batch_size=per_step,
        num_generations=case["samples_per_prompt"],
        max_completion_length=case["max_new_tokens"],
        generation_kwargs={"min_new_tokens": case["max_new_tokens"]} if case["exact_length"] else None,
        learning_rate=case["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=case["clip_grad"],
        max_steps=case["steps"],
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",
        gradient_checkpointing=False,
        logging_steps=10_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    return TimedTrainer(
        clock,
        model=AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32),
        reward_funcs=digit_share,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in case["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(case["model"], padding_side="left"),
    )


def main() -> None:
    """Train for the case's number of steps, and write the measurements."""
    with open(sys.argv[1]) as file:
        case = json.load(file)
    torch.set_num_threads(case["threads"])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        build_trainer(case, clock, folder).train()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    with open(sys.argv[2], "w") as file:
        json.dump({"steps": clock.steps, "memory_gb": peak}, file)


if __name__ == "__main__":
    main()
