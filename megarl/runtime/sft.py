"""Supervised fine-tuning, as the cold start of a run or a run of its own.

A text policy is trained on the answers of the rows; another task has examples of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.config.run import RunConfig
from megarl.data.announcement import NO_TOOLS
from megarl.data.loader import PromptLoader, rounds
from megarl.data.sft import SFTDataset, open_examples
from megarl.runtime.checkpoint_part import FOLDER, finishing_save
from megarl.runtime.checkpoints import Checkpoints
from megarl.runtime.cold_start import ColdStartCheckpoints
from megarl.runtime.export import export, show_export
from megarl.runtime.frozen_models import record_base
from megarl.runtime.recorder import VALIDATE, Recorder
from megarl.runtime.setup import build_rank_state, check_epochs, image_prompts, open_loader
from megarl.runtime.validate import due, evaluate
from megarl.system.errors import DataError
from megarl.system.offload_schedule import ACTOR
from megarl.system.tracing import phase, set_step

if TYPE_CHECKING:
    from megarl.data.batch import Batch
    from megarl.data.render import Split
    from megarl.runtime.rank_state import RankState


def cold_start(c: RankState, examples: PromptLoader, checkpoints: ColdStartCheckpoints) -> None:
    """Fine-tune on `examples` before RL, continuing from the checkpoint of an interrupted cold start."""
    if c.layout.rank == 0:
        print("first phase: supervised fine-tuning; the recipe's pipeline follows", flush=True)
    c.actor.reset_optimizer(c.config.sft.optim, c.config.sft.steps)
    checkpoints.load()
    with Recorder(c, "sft", c.config.sft.steps, checkpoints.step, part="first") as recorder:
        _steps(c, recorder, examples, checkpoints, checkpoints.step or 0)
    set_step(0)  # the number is now that of RL steps, of which none has begun


def train(config: RunConfig, run_dir: Path) -> None:
    """Run supervised fine-tuning as a separate run, with checkpoints and an export at the end."""
    c = build_rank_state(config, run_dir, scored=("val",))
    try:
        c.loader = load_examples(c)
        checkpoints = Checkpoints(c)
        resumed_at = checkpoints.find("sft.steps", config.sft.steps)
        record_base(c, ACTOR, checkpoints.source)
        c.actor.reset_optimizer(config.sft.optim, config.sft.steps)
        if checkpoints.source is not None:  # before a record is opened: a rejected start must not change the run folder
            with phase("resume"):
                checkpoints.load(checkpoints.source)
        checkpoints.begin()
        with Recorder(c, "sft", config.sft.steps, resumed_at) as recorder:
            with finishing_save(checkpoints):
                _steps(c, recorder, c.loader, checkpoints, resumed_at or 0)
            if checkpoints.must_stop:
                recorder.status = "stopped"
            else:
                export(c, run_dir / FOLDER)
        if not checkpoints.must_stop:
            show_export(c)
    finally:
        c.close()


def load_examples(c: RankState) -> PromptLoader:
    """Read the rows with answers that fine-tuning trains on.

    Raises:
        DataError: a row cannot be trained on.
    """
    if c.rollout.player is not None:
        return c.rollout.player.load_examples(c)
    data = _examples(c, "train")
    check_epochs(c.config, len(data), "sft")
    return open_loader(c.config, data, c.layout, "sft")


def _examples(c: RankState, split: Split) -> SFTDataset:
    return open_examples(
        c.config,
        c.tokenizer,
        c.hf_config.max_position_embeddings,
        split,
        stop_ids=c.rollout.eos_ids,
        tools=NO_TOOLS if c.rollout.episodes is None else c.rollout.episodes.tools,
        images=image_prompts(c.config, c.hf_config, c.tokenizer),
    )


def load_held_out(c: RankState) -> SFTDataset | None:
    """Read the held-out rows as examples for `val/loss`; None without rows, or if they have no usable responses.

    With `sft.train_files` the result is None, because rows of `data.val_files` may have another format.
    """
    if not c.config.task.writes_text or not c.config.data.held_out:
        return None
    if c.config.sft.train_files:
        if c.layout.rank == 0:
            print(
                "val/loss is not measured: sft.train_files is set, and data.val_files may have another format; use "
                "data.train_files to measure it",
                flush=True,
            )
        return None
    try:
        return _examples(c, "val")
    except DataError as error:
        if c.layout.rank == 0:
            print(f"val/loss is not measured: {error.what} ({error.where})", flush=True)
        return None


def _measure_loss(c: RankState, examples: SFTDataset) -> None:
    """Add `val/loss`, the cross entropy per response token of the held-out examples, to the step's metrics."""
    with phase(VALIDATE):
        for batch in rounds(examples, c.config.data.val_batch_size, c.layout.dp_rank, c.layout.dp_size):
            logp = c.actor.score(batch, temperature=1.0)
            if not len(batch):  # this rank's share is finished, but scoring is collective
                continue
            mask = batch["response_mask"].values.to(logp.values.device)
            total = -(logp.values * mask).sum(dtype=torch.float64)
            c.context.metrics.mean("val/loss", float(total), int(mask.sum()))


def _steps(
    c: RankState,
    recorder: Recorder,
    loader: PromptLoader,
    checkpoints: Checkpoints | ColdStartCheckpoints,
    begun: int,
) -> None:
    """Train from step `begun` + 1 to `sft.steps`, or until `sft.stop_at_accuracy` is reached."""
    settings = c.config.sft
    goal = settings.stop_at_accuracy
    if goal is not None and checkpoints.accuracy is not None and checkpoints.accuracy >= goal:
        if c.layout.rank == 0:
            print(f"sft.stop_at_accuracy was met at step {begun}: there is nothing left to train", flush=True)
        return
    if checkpoints.stopped_early:
        return
    held_out = load_held_out(c)
    for step in range(begun + 1, settings.steps + 1):
        set_step(step)
        recorder.start_step(step)
        last = step == settings.steps
        accuracy = None
        with phase("sft"):
            with phase("load"):
                batch = next(loader)
            with phase("train"):
                sft_step(c, batch)
            early = checkpoints.ends_early(step)
            if last or early or due(step, settings.eval_every):
                accuracy = evaluate(c, recorder, step)
                if held_out is not None:
                    _measure_loss(c, held_out)
        if accuracy is not None and goal is not None and accuracy >= goal:
            last = True
            if c.layout.rank == 0:
                print(f"sft.stop_at_accuracy = {goal:g} is reached: {accuracy:.3f} at step {step}", flush=True)
        numbers = recorder.end_step(step)
        if isinstance(checkpoints, Checkpoints):  # steps of a cold start are not counted as steps of the run
            c.context.step = step
        checkpoints.after_step(step, numbers, accuracy, last=last)
        if last or checkpoints.must_stop or checkpoints.stopped_early:
            break


def sft_step(c: RankState, batch: Batch) -> None:
    """Take one optimizer step on the mean of -logp over the response tokens of the global batch."""
    mask = batch["response_mask"]
    tokens = c.context.all_sum(mask.values.sum(dtype=torch.float64))
    batch.set("loss_weights", mask.like(mask.values / tokens.float()))
    metrics = c.actor.sft_step(batch)
    c.context.count_pass(batch, train=True)
    if c.layout.rank == 0:  # the metrics are already merged over all ranks
        c.context.metrics.merge(metrics)
    columns = sum(map(sum, c.context.sequences.sample_columns(batch)))
    c.context.metrics.sum("perf/total_tokens", float(columns))
