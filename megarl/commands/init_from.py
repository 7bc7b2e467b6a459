"""`megarl init --from`: write a recipe for settings of TRL, verl or NeMo-RL. Settings without a key become comments."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.commands.translate import Translation, read_settings, translate
from megarl.config.engines import ENGINES
from megarl.system.errors import ConfigError, UserError, shortened
from megarl.system.machine import Machine

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

_RESPONSES = ("completion", "response", "answer", "output", "text")
#: Keys that stay in the recipe even when they have a problem: without them the recipe would describe another run.
_KEPT = ("model.path", "data.train_files", "data.val_files", "cluster.nproc", "cluster.nnodes", "algorithm.pipeline")
_SERVERS = "rollout.sglang."


def settings_from(
    arguments: argparse.Namespace, machine: Machine, prompts: Sequence[str], answers: Sequence[str]
) -> Translation:
    """Translate the settings in `arguments.source` to a recipe; options of the command override them. Raise UserError
    if the file cannot be read, has settings of no known trainer, or names no model. `prompts` and `answers` are the
    usual names of these columns.
    """
    made = translate(read_settings(arguments.source), arguments.gpus)
    given = {
        "model.path": arguments.model,
        "data.train_files": [arguments.data] if arguments.data else None,
        "data.val_files": [arguments.val] if arguments.val else None,
        "data.prompt_key": arguments.prompt_key,
        "data.answer_key": arguments.answer_key,
        "reward.name": arguments.reward,
    }
    given = {key: value for key, value in given.items() if value is not None}
    made.settings |= given
    for key, option in (("model.path", "--model"), ("data.train_files", "--data")):
        if key not in made.settings:
            raise UserError(f"the settings lack {key}, which a recipe needs", where=key, fix=f"add {option}")
    made.settings.pop("name", None)  # the recipe is named after its file
    devices = made.settings["cluster.nproc"] if arguments.gpus is None else arguments.gpus
    if arguments.gpus is None and devices == 1 and not machine.has_gpu:
        devices = 0
    _place(made, devices, arguments.engine, machine)
    _complete(made, prompts, answers, given)
    return made


def _place(made: Translation, gpus: int, engine: str, machine: Machine) -> None:
    """Set the keys of devices and engine in `made`. Without GPUs, remove parallel layouts and launch keys."""
    settings = made.settings
    if gpus:
        settings |= {"cluster.nproc": gpus, "cluster.device_memory_gb": 80.0}
        settings.setdefault("model.dtype", "bf16")
    else:
        for key in [key for key in settings if key.startswith(("actor.parallel.", "cluster.", "launch."))]:
            value = settings.pop(key)
            if value not in (1, False):
                made.notes[f"{key}: {value}"] = "the recipe is for the CPU; --gpus writes one for GPUs"
        batch = settings.get("data.batch_size", 64)
        settings["cluster.nproc"] = 2 if machine.cores > 1 and batch % 2 == 0 else 1
        if (dtype := settings.get("model.dtype", "fp32")) != "fp32":
            made.notes[f"model.dtype: {dtype}"] = (
                "auto uses bf16 on processors with bf16 instructions, and fp32 on others"
            )
        settings["model.dtype"] = "fp32"
    if made.algorithm in ("dpo", "sft"):
        return
    settings["rollout.engine"] = engine
    if ENGINES[engine].servers is not None:
        tp = settings.get("actor.parallel.tp", 1)
        settings |= {f"{_SERVERS}servers": max(1, gpus // tp), f"{_SERVERS}tp_size": tp, f"{_SERVERS}colocated": True}
        settings.setdefault(f"{_SERVERS}memory_fraction", 0.6)
        settings["actor.engine.offload"] = True
        return
    for key in [key for key in settings if key.startswith(_SERVERS)]:
        made.notes[f"{key}: {settings.pop(key)}"] = "used for SGLang servers, with --engine sglang"


def _complete(made: Translation, prompts: Sequence[str], answers: Sequence[str], given: Mapping[str, object]) -> None:
    """Complete the recipe `made`: set its task graph, its reward and, if the rows can be read here, the names of the
    columns that are not `given`.
    """
    from megarl.checks.rows import is_readable_here
    from megarl.commands.init import ALGORITHMS, answers_of, reward_for
    from megarl.data.sources import load_rows

    settings = made.settings
    if made.algorithm in ALGORITHMS:
        settings["algorithm.pipeline"] = ALGORITHMS[made.algorithm]["algorithm.pipeline"]
    source = settings["data.train_files"][0]
    rows = load_rows(source) if is_readable_here(source) else []
    for key, names in (("data.prompt_key", prompts), ("data.answer_key", answers)) if rows else ():
        column = next((name for name in names if rows[0].has(name)), None)
        translated = settings.get(key)
        if column is None or key in given or (translated is not None and rows[0].has(translated)):
            continue
        settings[key] = column
        if translated is not None:
            made.notes[f"{key}: {translated}"] = f"the rows do not have this column; they have {column!r}"
    if rows:
        settings.setdefault("data.prompt_key", "prompt")
    if settings.get("algorithm.loss.aggregation") == "seq-mean-token-sum-norm":
        settings.setdefault("algorithm.loss.sum_norm", settings.get("rollout.sampling.max_new_tokens", 256))
    for key in [key for key in settings if key.startswith("critic.") and made.algorithm != "ppo"]:
        made.notes[f"{key}: {settings.pop(key)}"] = f"{made.algorithm} has no critic"
    image_key = settings.get("data.image_key")
    if rows and image_key is not None and not rows[0].has(image_key):
        made.notes[f"data.image_key: {settings.pop('data.image_key')}"] = "the rows do not have this column"
    if rows and made.algorithm == "sft" and "sft.response_key" not in settings:
        prompt = settings["data.prompt_key"]
        response = next((name for name in _RESPONSES if rows[0].has(name)), prompt)
        settings["sft.response_key"] = prompt if prompt == "messages" else response
    if made.algorithm in ("dpo", "sft"):
        settings.pop("data.answer_key", None)
        # The other trainer measures the loss on these rows. Validation here needs a reward, so one is set.
        if made.algorithm == "sft" and "data.val_files" in settings:
            settings.setdefault("reward.name", "format")
        return
    if "reward.name" not in settings:
        row_answers = answers_of(rows, settings)
        settings |= reward_for(row_answers, []) if row_answers else {"reward.name": "exact_match"}
        made.notes[f"reward of {made.trainer}"] = (
            f"the settings have no reward for these rows; {settings['reward.name']} is a guess, see reward.name"
        )


def write_fitting(
    file: Path, made: Translation, write: Callable[[Mapping[str, Any]], str], machine: Machine
) -> tuple[RunConfig, list[ConfigError]]:
    """Write the recipe without the settings that fail the checks here, and note the reason of each; return it and the
    problems that remain.
    """
    from megarl.checks.recipe import check_config
    from megarl.config.base import ConfigErrors
    from megarl.config.load import load_config
    from megarl.config.yamlio import read_yaml
    from megarl.recipes.components import COMPONENTS

    job = "sft" if made.algorithm == "sft" else "train"
    while True:
        file.write_text(write(made.settings) + "\n".join(_notes(made)), encoding="utf-8")
        config = None
        try:
            config = load_config(file, components=COMPONENTS)
            checks = check_config(config, launcher=config.launch.launcher, job=job, machine=machine)
            problems = [(check.key or "", check.problem()) for check in checks.items if check.status == "fail"]
        except ConfigErrors as errors:
            # file and line -> key
            keys = {origin: ".".join(path) for path, origin in read_yaml(file).origins.items()}
            problems = [(keys.get(error.where or "", ""), error) for error in errors.problems]
        unfit = {key: error for key, error in problems if key in made.settings and key not in _KEPT}
        if not unfit:
            failed = {check.name for check in checks.items if check.status == "fail"} if config is not None else set()
            # Only the memory check decides about the layout: other problems, such as missing files, are reported later.
            if "memory" in failed and _split_further(made):
                continue
            if config is None:
                raise problems[0][1]
            return config, [error for _, error in problems]
        for key, error in unfit.items():
            made.notes[f"{key}: {made.settings.pop(key)}"] = error.what


def _split_further(made: Translation) -> bool:
    """Split each layer over twice as many GPUs; return False, without a change, if the run's devices do not allow
    it.
    """
    tp, devices = made.settings.get("actor.parallel.tp", 1), made.settings["cluster.nproc"]
    if tp >= 8 or devices % (2 * tp) or "cluster.device_memory_gb" not in made.settings:
        return False
    made.settings |= {"actor.parallel.tp": 2 * tp, "actor.parallel.sp": True}
    if f"{_SERVERS}servers" in made.settings:
        made.settings |= {f"{_SERVERS}tp_size": 2 * tp, f"{_SERVERS}servers": devices // (2 * tp)}
    return True


def _notes(made: Translation) -> Iterator[str]:
    if made.notes:
        yield f"\n# Settings of {made.trainer} that this recipe does not have:"
    by_reason: dict[str, list[str]] = {}
    for setting, why in made.notes.items():
        by_reason.setdefault(" ".join(why.split()), []).append(shortened(" ".join(setting.split()), 90))
    for why, settings in by_reason.items():
        yield from textwrap.wrap("; ".join(settings), 110, initial_indent="#   ", subsequent_indent="#   ")
        yield from textwrap.wrap(why, 110, initial_indent="#       ", subsequent_indent="#       ")
    yield ""
