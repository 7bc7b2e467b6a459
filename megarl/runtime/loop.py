"""The training loop around a task graph. Every rank runs it by itself:

resume or cold start
validate
for each step:   load prompts -> walk the graph -> [validate] -> [checkpoint] -> log
export, report
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.run import RunConfig
from megarl.dag.executor import Executor
from megarl.phase import phase, set_step
from megarl.runtime import sft
from megarl.runtime.checkpoints import Checkpoints
from megarl.runtime.critic import add_critic
from megarl.runtime.recorder import Recorder
from megarl.runtime.reference import add_reference
from megarl.runtime.setup import build_controller
from megarl.runtime.validate import due, evaluate

if TYPE_CHECKING:
    from megarl.dag.graph import TaskGraph
    from megarl.runtime.controller import Controller


def train(config: RunConfig, run_dir: Path, graph: TaskGraph) -> None:
    """Train with a recipe's task graph until `trainer.steps`, from the newest checkpoint when there is one."""
    c = build_controller(config, run_dir)
    try:
        checkpoints = Checkpoints(c)
        resumed_at = checkpoints.find()
        if resumed_at is None and config.sft.steps:
            sft.cold_start(c)
        add_reference(c, graph, fresh=resumed_at is None)
        add_critic(c, graph)
        resting = config.critic.warmup_steps if c.critic is not None else 0
        c.actor.reset_optimizer(config.actor.optim, config.updates(config.actor, resting))
        with Recorder(c, "train", config.trainer.steps, resumed_at) as recorder:
            if resumed_at is None:
                _before_first_step(c, recorder, checkpoints)
            else:
                with phase("resume"):
                    checkpoints.load()
            _steps(c, Executor(graph, rank=c.layout.rank), recorder, checkpoints)
            _export(c)
    finally:
        c.close()


def _before_first_step(c: Controller, recorder: Recorder, checkpoints: Checkpoints) -> None:
    """Held-out numbers of the model that RL starts from, and a checkpoint that spares a resumed run the cold start."""
    numbers: dict[str, float] = {}
    if c.config.validation.before_train and c.val_data is not None:
        set_step(0)
        recorder.start_step()
        with phase("step"):
            evaluate(c, recorder, 0)
        numbers = recorder.end_step(0)
    if c.config.sft.steps:
        checkpoints.save(0, numbers)


def _steps(c: Controller, executor: Executor, recorder: Recorder, checkpoints: Checkpoints) -> None:
    config = c.config
    assert c.loader is not None, "checks refuse a training run without data"
    for step in range(c.step + 1, config.trainer.steps + 1):
        c.step = step
        set_step(step)
        last = step == config.trainer.steps
        recorder.start_step()
        with phase("step"):
            with phase("load"):
                prompts = next(c.loader)
            executor.run(c, prompts, step)
            c.rollout.weight_version = step  # the engine decodes on the weights that were just updated
            if last or due(step, config.validation.every):
                evaluate(c, recorder, step)
        numbers = recorder.end_step(step)
        if last or due(step, config.trainer.save_every):
            checkpoints.save(step, numbers)


def _export(c: Controller) -> None:
    from megarl.models.weights import export_weights

    if c.config.trainer.export_hf:
        with phase("export"):
            export_weights(c.actor.chunks, c.run_dir / "hf", c.hf_config, c.tokenizer)
            if c.critic is not None:
                with c.critic.onloaded():
                    export_weights(c.critic.chunks, c.run_dir / "hf_critic", c.hf_config, c.tokenizer)
