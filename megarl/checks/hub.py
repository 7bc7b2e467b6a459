"""Checks, within seconds, that a recipe's files from the Hugging Face hub are cached or can be downloaded."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from megarl.artifacts.facts import is_hub_name
from megarl.checks.recipe import ConfigWarning
from megarl.config.base import raise_problems
from megarl.config.run import RunConfig
from megarl.data import hub
from megarl.data.hub import HubSource, hub_dataset


def sources(config: RunConfig, job: str) -> list[HubSource]:
    """Return the sources that `job` (train, sft, eval, generate) may download from the hub."""
    models = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    data = {"data.val_files": config.data.held_out}
    if job in ("train", "sft"):
        data |= {"data.train_files": config.data.train_files, "sft.train_files": config.sft.train_files or []}
    if job == "train":
        models |= {"reference.path": config.reference.path, **config.teacher.paths}
        models["critic.path"] = config.critic.path
    if job == "train" or (job == "eval" and config.reward.of_model is not None):
        models["reward_model.path"] = config.reward_model.path
    models_here = [
        HubSource(key, "models", name)
        for key, name in models.items()
        if name and is_hub_name(name) and not name.startswith(("chars:", "words:")) and not Path(name).exists()
    ]
    return models_here + [
        HubSource(key, "datasets", name)
        for key, files in data.items()
        for name in dict.fromkeys(filter(None, map(hub_dataset, files)))
    ]


def check_hub(config: RunConfig, job: str, *, ask: bool) -> None:
    """Refuse sources that are neither in the cache nor available from the hub. Takes at most `hub.ASK_S` seconds.

    If the hub cannot be reached and everything is in the cache, a warning is issued, and HF_HUB_OFFLINE is set for the
    workers, each of which would otherwise wait for the hub. Raise ConfigError, which lists all missing sources.

    Args:
        ask: also contact the hub; otherwise only look at this machine.
    """
    wanted = sources(config, job)
    missing = [source for source in wanted if not source.cached]
    if not wanted or hub.offline() is not None:
        raise_problems([hub.problem_of(source, None) for source in missing])
        return
    if not ask:
        return
    answers, why = hub.ask(wanted)
    problems = [hub.problem_of(source, why) for source in missing if why is not None or answers[source] == "not there"]
    raise_problems(problems)
    if why is not None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        names = ", ".join(dict.fromkeys(source.name for source in wanted))
        warnings.warn(f"the hub cannot be reached ({why}): {names} come from the cache", ConfigWarning, stacklevel=2)
