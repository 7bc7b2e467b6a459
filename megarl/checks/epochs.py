"""Number of training steps that `trainer.epochs` makes of the training prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.errors import ConfigError, count

if TYPE_CHECKING:
    from megarl.config.run import RunConfig


def with_steps(config: RunConfig) -> RunConfig:
    """Return the recipe with `trainer.steps` computed from `trainer.epochs` and printed; unchanged without epochs.

    Prompts are read, rendered and tokenised as the workers do it, since `data.overlong` may drop some.

    Raises:
        ConfigError: an epoch is not a number of steps: groups are replaced, or prompts are the trials of a simulator.
        DataError: as `PromptDataset` raises it.
    """
    epochs = config.trainer.epochs
    if epochs is None:
        return config
    reason = _why_not(config)
    if reason is not None:
        raise ConfigError(
            f"epochs do not say how many steps there are: {reason}",
            where="trainer.epochs",
            found=epochs,
            allowed="null",
            fix="set trainer.steps, and trainer.epochs=null",
        )
    from megarl.data.prompts import PromptDataset
    from megarl.data.tokenizer import load_tokenizer

    tokenizer, whole = load_tokenizer(config.model), config.whole_conversations
    prompts = len(PromptDataset(config.data, tokenizer, "train", whole=whole, answered=False))
    trainer = config.trainer
    steps = trainer.steps_of(prompts, config.data.batch_size)
    named = trainer.steps not in (steps, type(trainer).model_fields["steps"].default)
    print(
        f"trainer.epochs={epochs:g} of {count(prompts, 'prompt')} in batches of {config.data.batch_size}: "
        f"trainer.steps={steps}{f' (not {trainer.steps}, which trainer.epochs=null would use)' if named else ''}",
        flush=True,
    )
    return config.model_copy(update={"trainer": trainer.model_copy(update={"steps": steps})})


def _why_not(config: RunConfig) -> str | None:
    """Explain why epochs are not a number of steps; None: they are."""
    if config.robot is not None:
        return "the trials of a simulator are known only when it runs"
    if config.algorithm.dynamic_sampling.enabled:
        return "with dynamic sampling a step takes as many prompts as it needs"
    if config.filter_admits:
        return "with a filter and async.order=as_ready a step takes as many prompts as it needs"
    return None
