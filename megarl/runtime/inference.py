"""Runs that do not train: scores on held-out prompts, and responses written to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.artifacts.lock import refuse_if_taken
from megarl.config.run import RunConfig
from megarl.data.loader import rounds
from megarl.data.sources import TEXT
from megarl.offload_schedule import ACTOR
from megarl.runtime.frozen_models import check_base
from megarl.runtime.generation import open_rollout, publish
from megarl.runtime.recorder import Recorder
from megarl.runtime.role_models import make_reward_model
from megarl.runtime.setup import build_rank_state
from megarl.runtime.stages import rollout
from megarl.runtime.validate import evaluate as evaluate_controller
from megarl.tracing import phase, set_step

if TYPE_CHECKING:
    from megarl.runtime.rank_state import RankState

RESPONSES = "responses.jsonl"
_ROUND = 1024  # prompts whose responses are in memory at the same time


def evaluate(config: RunConfig, run_dir: Path) -> None:
    """Score `data.val_files` with `validation.sampling`; metrics go where a training run's go, as stage `eval`."""
    c = build_rank_state(config, run_dir, trainable=False)
    try:
        _restore(c)
        if config.reward.of_model is not None:
            c.held["reward_model"] = make_reward_model(c, None)
        with Recorder(c, "eval", total_steps=c.context.step) as recorder:
            recorder.start_step()
            with phase("step"):
                evaluate_controller(c, recorder, c.context.step)
            recorder.end_step(c.context.step)
    finally:
        c.close()


def generate(config: RunConfig, run_dir: Path) -> None:
    """Write RUN_DIR/responses.jsonl: one line per response to `data.val_files`, by `validation.sampling`."""
    c = build_rank_state(config, run_dir, trainable=False, scored=())
    try:
        _restore(c)
        _write_responses(c)
    finally:
        c.close()


def _write_responses(c: RankState) -> None:
    assert c.val_data is not None, "checks refuse the job without data.val_files"
    refuse_if_taken(c.run_dir)
    config, target = c.config, c.run_dir / RESPONSES
    columns = ("uid", "sample_id", "data_source", "prompt_text", "response_text", "finish_reason")
    size = config.data.val_batch_size or _ROUND
    output = target if c.layout.rank == 0 else Path(os.devnull)
    # A server's answer may hold half a surrogate pair; backslashreplace writes the escape that JSON has for it.
    with output.open("w", encoding="utf-8", errors="backslashreplace") as file, phase("generate"):
        for prompts in rounds(c.val_data, size, c.layout.dp_rank, c.layout.dp_size):
            samples = rollout.generate(c.context, c.rollout, prompts, config.validation_sampling)
            mine = [dict(zip(columns, row, strict=True)) for row in zip(*(samples[n] for n in columns), strict=True)]
            parts = c.layout.dp_group.all_gather_json(mine)
            lines = [line for part in parts for line in part]
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            if c.layout.rank == 0:
                _show([line for line in lines if line["data_source"] == "text"], config.data.val_files)
    if c.layout.rank == 0:
        print(f"responses: {target}\n{config.name}: generate finished", flush=True)


def _restore(c: RankState) -> None:
    """Take weights and step from `trainer.resume` when it names a checkpoint; else keep `model.path`, step 0."""
    from megarl.training.checkpoint import load

    resume = c.config.trainer.resume
    if resume not in ("auto", "never"):
        with phase("resume"), c.offload.phase("restore", ACTOR):
            if c.config.model.lora is not None:
                check_base(Path(resume), c.config.model.path, c.layout.world)
            c.context.step, _ = load(Path(resume), {ACTOR: c.actor.engine})
        set_step(c.context.step)
    open_rollout(c)
    publish(c, c.context.step)


def _show(lines: list[dict[str, str]], sources: Sequence[str]) -> None:
    """Print responses to prompts that were given as text, each after its text without the chat template around it."""
    given = [source.removeprefix(TEXT) for source in sources if source.startswith(TEXT)]
    for line in lines:
        whole = line["prompt_text"]
        print(f"\n> {max((text for text in given if text in whole), key=len, default=whole)}", flush=True)
        print(line["response_text"], flush=True)
