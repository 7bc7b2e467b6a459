"""The number of steps of a recipe with epochs, computed from the training rows before the run starts."""

from __future__ import annotations

from pathlib import Path

from megarl.checks.hub import check_hub, sources
from megarl.checks.rows import is_readable_here
from megarl.config.run import RunConfig, steps_of_epochs
from megarl.data import hub
from megarl.data.tokenizer import CHARS, WORDS
from megarl.system.errors import ConfigError, UserError, count


def with_steps(config: RunConfig, job: str = "train", *, dry: bool = False) -> RunConfig:
    """Return the recipe with the steps of `job` computed from epochs (and printed); unchanged without epochs. Prompts
    are read, rendered and tokenised as the workers do it, since `data.overlong` may drop some.

    Args:
        dry: use no network. If the model or the rows are not on this machine, the result is `uncounted`.
    """
    supervised = config.sft.epochs is not None and job in ("train", "sft")
    trained = config.trainer.epochs is not None and job == "train"
    if not (supervised or trained):
        return config
    if trained and (reason := _why_not(config)) is not None:
        raise ConfigError(
            f"the number of steps cannot be computed from epochs: {reason}",
            where="trainer.epochs",
            found=config.trainer.epochs,
            allowed="null",
            fix="set trainer.steps, and trainer.epochs=null",
        )
    if supervised and not config.task.writes_text:
        raise ConfigError(
            "the number of steps cannot be computed from epochs: demonstrations are read when the run starts",
            where="sft.epochs",
            found=config.sft.epochs,
            allowed="null",
            fix="set sft.steps, and sft.epochs=null",
        )
    if dry and not config.task.writes_text:  # a simulator lists the training rows, and a dry run does not start it
        return config.with_uncounted(["trainer"])
    if not dry:
        check_hub(config, job, ask=True)  # the packages that read from the hub would retry for minutes
        return _counted(config, supervised=supervised, trained=trained)
    read = ("model.path", "model.tokenizer", "data.train_files", "sft.train_files")
    if all(source.cached for source in sources(config, job) if source.key in read):
        try:
            with hub.without_network():
                return _counted(config, supervised=supervised, trained=trained)
        except UserError:
            if _is_here(config):
                raise
    return config.with_uncounted([*["sft"] * supervised, *["trainer"] * trained])


def _is_here(config: RunConfig) -> bool:
    """Return whether the model is in a folder of this machine, and all training rows in files that are read here."""
    model = config.model.tokenizer or config.model.path
    files = [*config.data.train_files, *(config.sft.train_files or [])]
    known = model is not None and (model.startswith((CHARS, WORDS)) or Path(model).expanduser().is_dir())
    return known and all(map(is_readable_here, files))


def _counted(config: RunConfig, *, supervised: bool, trained: bool) -> RunConfig:
    """Return the recipe with `sft.steps` and `trainer.steps` computed from epochs, and print them."""
    if supervised and config.sft.epochs is not None:
        config = _with_sft_steps(config, config.sft.epochs)
    if not trained:
        return config
    prompts, unit = _prompts(config) if config.preference is None else _pairs(config), config.data_unit
    trainer = config.trainer
    steps = trainer.steps_of(prompts, config.data.batch_size)
    takes = config.algorithm.dynamic_sampling.enabled
    most = ", or fewer: the run ends when dynamic sampling has generated for so many prompts" if takes else ""
    named = trainer.steps not in (steps, type(trainer).model_fields["steps"].default)
    print(
        f"trainer.epochs={trainer.epochs:g} of {count(prompts, unit)} in batches of {config.data.batch_size}: "
        f"trainer.steps={steps}{f' (not {trainer.steps}, which trainer.epochs=null would use)' if named else ''}{most}",
        file=config.tracking.messages,
        flush=True,
    )
    return config.model_copy(update={"trainer": trainer.model_copy(update={"steps": steps})})


def _with_sft_steps(config: RunConfig, epochs: float) -> RunConfig:
    """Return the recipe with `sft.steps` computed from `sft.epochs`."""
    examples, sft = _examples(config), config.sft
    steps = steps_of_epochs(epochs, examples, sft.batch_size)
    print(
        f"sft.epochs={sft.epochs:g} of {count(examples, 'example')} in batches of {sft.batch_size}: sft.steps={steps}",
        file=config.tracking.messages,
        flush=True,
    )
    return config.model_copy(update={"sft": sft.model_copy(update={"steps": steps})})


def _examples(config: RunConfig) -> int:
    from megarl.data.end_tokens import end_tokens
    from megarl.data.sft import open_examples
    from megarl.data.tokenizer import load_tokenizer
    from megarl.models.config import load_hf_config

    tokenizer, positions = load_tokenizer(config.model), load_hf_config(config.model).max_position_embeddings
    stop_ids = end_tokens(tokenizer, config.model, config.data).ids
    return len(open_examples(config, tokenizer, positions, stop_ids=stop_ids))


def _prompts(config: RunConfig) -> int:
    if (rows := config.task.count_rows(config)) is not None:
        return rows
    from megarl.data.prompts import PromptDataset
    from megarl.data.tokenizer import load_tokenizer

    tokenizer, whole = load_tokenizer(config.model), config.whole_conversations
    return len(PromptDataset(config.data, tokenizer, "train", whole=whole, answered=False))


def _pairs(config: RunConfig) -> int:
    from megarl.data.preferences import open_preferences
    from megarl.data.tokenizer import load_tokenizer
    from megarl.models.config import load_hf_config

    assert config.preference is not None, "it has pairs"
    limit = load_hf_config(config.model).max_position_embeddings
    return len(open_preferences(config.data, config.preference, load_tokenizer(config.model), max_tokens=limit))


def _why_not(config: RunConfig) -> str | None:
    """Explain why epochs cannot be converted to a number of steps; None if they can."""
    sampling = config.algorithm.dynamic_sampling.enabled
    if config.filter_admits or (sampling and not config.async_.in_order):
        drops = "dynamic sampling" if sampling else "a filter"
        return f"with {drops} and async.order=as_ready a step takes as many prompts as it needs"
    if sampling and config.placement.has_several_teams:
        return "with dynamic sampling and several teams a step takes as many prompts as it needs"
    return None
