"""The effect of settings that have changed since a checkpoint on the run that resumes from it, key by key.

Most of what a run knows comes from the recipe again when it resumes. What comes from the checkpoint instead: weights,
optimizer state and steps, random states, the loader's order and place, the adaptive KL coefficient, samples that wait,
the best value so far. Layouts and teams may change: a checkpoint is read by parts of a model, wherever those go now.

A rollout in a team of its own generates ahead of training (megarl/disaggregated). Its checkpoints say of how many steps
they hold samples, in which order, with which settings; a run whose settings or teams differ is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.config.fields import find_key, iter_keys, names_component
from megarl.dag.stage import Role
from megarl.dag.staleness import policy_of
from megarl.system.errors import ConfigError, count

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement


Command = Literal["train", "sft"]
Plain = Mapping[str, Any]
#: None: the new value is used from the next step on. A text: it is not, or not everywhere.
Effect = str | None

WEIGHTS = "the weights are those of the checkpoint"
ORDER = "the prompts keep the order of the checkpoint"
COLD_START = "not used: the cold start is over"
FIXED = "fixed"  # a checkpoint cannot be continued with another value
AHEAD_ORDER, STALENESS = "async.order", "async.max_staleness"


def _kl_coef(before: Plain, now: Plain) -> Effect:
    adaptive = all(value_at(config, "algorithm.kl.adaptive") is True for config in (before, now))
    return "not used: the adaptive coefficient goes on from its value in the checkpoint" if adaptive else None


def _dtype(before: Plain, now: Plain) -> Effect:
    if value_at(now, "model.dtype") == "bf16":
        return FIXED  # a checkpoint of float32 parameters has no master weights
    return "from the parameters rounded to bf16, without their master weights"


def _model_path(before: Plain, now: Plain) -> Effect:
    if value_at(now, "model.lora") in (None, MISSING):
        return f"read for tokenizer and architecture only: {WEIGHTS}"
    return "the base model of the adapters, whose files have to be those of before"


def _init_seed(before: Plain, now: Plain) -> Effect:
    initialised = value_at(now, "model.lora") not in (None, MISSING) and value_at(now, "model.path") is None
    return FIXED if initialised else f"not used: {WEIGHTS}"  # the checkpoint has only adapters


def _staleness(before: Plain, now: Plain) -> Effect:
    ready = not any(_is_in_order(config) for config in (before, now))
    fewer = ready and value_at(now, STALENESS) < value_at(before, STALENESS)
    return "groups of the checkpoint that no step could use in time any more are generated again" if fewer else None


#: By key, or by section where all its keys behave alike. The data must stay the same: the loader refuses other prompts.
EFFECTS: dict[str, Effect | Callable[[Plain, Plain], Effect]] = {
    "name": "the run folder and an MLflow run keep theirs",
    "model.path": _model_path,
    "model.hf_config": None,
    "model.tokenizer": None,
    "model.init_seed": _init_seed,
    "model.dtype": _dtype,
    "model.trust_remote_code": None,
    "model.lora": FIXED,
    "model.freeze": FIXED,  # a checkpoint has no optimizer state of what was frozen
    "algorithm.pipeline": None,
    "algorithm.advantage": None,
    "algorithm.loss": None,
    "algorithm.kl.use": None,
    "algorithm.kl.estimator": None,
    "algorithm.kl.coef": _kl_coef,
    "algorithm.kl.adaptive": None,
    "algorithm.kl.target": None,
    "algorithm.kl.horizon": None,
    "algorithm.distillation": None,
    "algorithm.filter": None,
    "algorithm.resampling": None,
    "algorithm.dynamic_sampling": None,
    "algorithm.overlong": None,
    "data.train_files": None,
    "data.val_files": None,
    "data.val_split": None,
    "data.system_prompt": None,
    "data.prompt_key": None,
    "data.answer_key": None,
    "data.image_key": None,
    "data.image_dir": None,
    "data.min_pixels": None,
    "data.max_pixels": None,
    "data.limit_images": None,
    "data.format_prompt": None,
    "data.chat_template": None,
    "data.chat_template_kwargs": None,
    "data.override_chat_template": None,
    "data.date": None,
    "data.max_prompt_tokens": None,
    "data.overlong": None,
    "data.batch_size": None,
    "data.val_batch_size": None,
    "data.max_val_samples": None,
    "data.shuffle": f"not used: {ORDER}",
    "data.loader_kwargs": None,
    "reward": None,
    "env": None,
    "robot": None,
    "rollout": None,
    "sync": None,
    "rollout_correction": None,
    "validation.sampling": None,
    "validation.before_train": "not used: the first step is over",
    "validation.every": None,
    "validation.select_by": None,
    "validation.log_samples": None,
    "actor": None,
    "critic.path": f"not used: {WEIGHTS}",
    "critic.parallel": None,
    "critic.engine": None,
    "critic.optim": None,
    "critic.mini_batch_size": None,
    "critic.ppo_epochs": None,
    "critic.shuffle": None,
    "critic.aggregation": None,
    "critic.sum_norm": None,
    "critic.value_clip": None,
    "critic.warmup_steps": None,
    "reference": None,
    "teacher": None,
    "reward_model": None,
    "sft": COLD_START,
    "preference": None,
    "trainer.steps": None,
    "trainer.epochs": None,
    "trainer.seed": f"used for what is sampled from now on; {ORDER}",
    "trainer.save_every": None,
    "trainer.resume_every": None,
    "trainer.save_by_s": None,
    "trainer.keep_last": None,
    "trainer.best_metric": None,
    "trainer.early_stop": None,
    "trainer.resume": None,
    "trainer.export_hf": None,
    "cluster": None,
    "placement": None,
    STALENESS: _staleness,
    AHEAD_ORDER: None,
    "async.partial": None,
    "launch": None,
    "tracking": None,
}

#: How samples are generated and scored, which a rollout may have done already for the next step; by key or section.
SAMPLING = ("algorithm.overlong", "async", "data", "env", "reward", "robot", "rollout", "trainer.seed")
#: What chooses samples with what generates them, where they are handed over as they get ready.
CHOOSING = ("algorithm.dynamic_sampling", "algorithm.filter")
HELD_OUT = ("data.val_files", "data.val_batch_size", "data.max_val_samples")

#: Used by a run that resumes from the end of its cold start.
BEFORE_FIRST_STEP = ("validation.before_train", "critic.path")


def effect_of(key: str, before: Plain, now: Plain, command: Command) -> Effect:
    """Return what a changed `key` does to a run that resumes; the longest entry of EFFECTS counts.

    An own key of a component needs no entry: components are made from the recipe again.

    Raises:
        KeyError: the key has no line in the table, which is a defect.
    """
    entry = key
    while entry not in EFFECTS and "." in entry:
        entry = entry.rpartition(".")[0]
    if (entry not in EFFECTS and _is_own(key)) or (command == "sft" and entry == "sft"):
        return None
    effect = EFFECTS[entry]
    return effect(before, now) if callable(effect) else effect


def _is_own(key: str) -> bool:
    """Say whether a component has this key for itself, in the section that names it."""
    above = find_key(tuple(key.split(".")))
    return above is not None and above.path != key and names_component(above.section)


def changed_keys(before: Plain, now: Plain) -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of every setting that both configurations know and that differs.

    Where the user names the keys (keyword arguments), one that only one side has is `not set` on the other. Keys of a
    component that only one side has say nothing: the other one names another component.

    >>> list(changed_keys({"trainer": {"steps": 3, "seed": 0}}, {"trainer": {"steps": 5, "seed": 0}}))
    [('trainer.steps', 3, 5)]
    """
    for key in iter_keys():
        old, new = value_at(before, key.path), value_at(now, key.path)
        if old is MISSING or new is MISSING or old == new or key.path == "trainer.resume":
            continue  # a section comes again with its keys, and a key of another version says nothing
        if names_component(key.section):
            shared = {other.path.rpartition(".")[2] for other in iter_keys() if other.path.startswith(f"{key.path}.")}
            for name in (name for name in old if name in new and name not in shared):
                yield from _differences(f"{key.path}.{name}", old[name], new[name])
        elif key.section is None or not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            yield from _differences(key.path, old, new)


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Old and new value; of mappings those of each name that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            values = old.get(name, "not set"), new.get(name, "not set")
            if values[0] != values[1]:
                yield f"{path}.{name}", *values
    elif old != new:
        yield path, old, new


def announcements(
    before: Plain, now: Plain, command: Command, *, begun: bool = True, generated: int | None = None
) -> list[str]:
    """Return a line for every setting that has changed since the checkpoint, with what it does not do.

    Args:
        begun: False: the checkpoint is that of a cold start, and what comes before the first step is still to come.
        generated: the last step for which the checkpoint holds samples that were not trained on; None: it holds none.

    Raises:
        ConfigError: the checkpoint cannot be continued with one of them.
    """
    lines = []
    for key, old, new in changed_keys(before, now):
        effect = None if not begun and key in BEFORE_FIRST_STEP else effect_of(key, before, now, command)
        if effect == FIXED:
            raise ConfigError(
                "the checkpoint cannot be continued with another value",
                where=key,
                found=new,
                allowed=str(old),
                fix=f"set {key}={old}; trainer.resume=never starts from the beginning",
            )
        notes = [effect] if effect else []
        if generated is not None and _is_of_sampling(key, now) and not (effect or "").startswith("not used"):
            notes += _late(key, now, generated)
        lines.append(f"{key}: {old} -> {new}" + (f" ({'; '.join(notes)})" if notes else ""))
    return lines


def refuse_other_batches(step: int, loader: Plain, before: Plain, now: Plain, command: Command = "train") -> None:
    """Refuse to count steps by epochs where those until the checkpoint had batches of another size.

    Args:
        step: of the checkpoint.
        loader: state of its loader; `samples` is the number of prompts.
        before: the configuration that wrote it.
        now: that of this start.
        command: whose epochs they are.

    Raises:
        ConfigError: the run would end before its epochs, or after them.
    """
    section, key = ("sft", "sft.batch_size") if command == "sft" else ("trainer", "data.batch_size")
    epochs = value_at(now, f"{section}.epochs")
    old, new = value_at(before, key), value_at(now, key)
    if epochs in (None, MISSING) or MISSING in (old, new) or old == new or not step:
        return
    steps = step + max(0, math.ceil((epochs * loader["samples"] - step * old) / new - 1e-9))
    raise ConfigError(
        f"the {count(step, 'step')} until the checkpoint had batches of another size, so {section}.epochs={epochs:g} "
        "does not say how many steps are left",
        where=key,
        found=new,
        allowed=f"{old}, or another one with {section}.epochs=null",
        fix=f"set {key}={old}; or {section}.epochs=null and {section}.steps={steps}, which is as many epochs",
    )


def _late(key: str, now: Plain, generated: int) -> list[str]:
    """Say from when on a changed setting of sampling counts, where samples were generated before the change."""
    if _is_in_order(now):
        return [f"from step {generated + 1} on: samples until step {generated} are generated and scored already"]
    if key.startswith("async."):
        return []  # these count at once, for all groups
    return ["not for the finished groups of the checkpoint, which are generated and scored already"]


def _is_of_sampling(key: str, now: Plain) -> bool:
    entries = SAMPLING if _is_in_order(now) else (*SAMPLING, *CHOOSING)
    return key not in HELD_OUT and any(key == entry or key.startswith(f"{entry}.") for entry in entries)


def _is_in_order(config: Plain) -> bool:
    return value_at(config, AHEAD_ORDER) in ("in_order", MISSING)


MISSING = object()


def value_at(config: Plain, path: str) -> Any:
    """Return the value at a dotted path; MISSING where there is none."""
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def describe_buffered(config: RunConfig, placement: Placement, step: int) -> dict[str, Any] | None:
    """Describe the samples of later steps in the checkpoint after `step`, for its state; None: it has none.

    With `steps` 0 it has no samples: at the end of a run as ready there may still be prompts that it left out.
    """
    team, left = placement.of_role(Role.ROLLOUT), max(0, config.trainer.steps - step)
    if not config.async_.max_staleness or team is None or (not left and config.async_.in_order):
        return None
    fields: dict[str, list[str]] = {}
    for one in placement.given_by(team.name):
        fields.setdefault(one.node, []).extend(one.fields)
    return {
        "order": config.async_.order,
        "steps": policy_of(config).steps_ahead(step),
        "parts": team.replicas,
        "fields": fields,
        "settings": _settings(config),
    }


def steps_held(saved: Mapping[str, Any] | None) -> int:
    """Steps for which a checkpoint has samples, by what `describe_buffered` said when it was written."""
    return 0 if saved is None else saved["steps"]


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return by key the settings that must be the same when samples are generated and when they are trained on.

    The actor's log-probs are compared with those of generation, at one temperature. In order, training takes as many
    groups for a step as were generated for it.
    """
    settings: dict[str, Any] = {"rollout.sampling.temperature": config.rollout.sampling.temperature}
    if config.async_.in_order:
        settings["data.batch_size"] = config.data.batch_size
    return settings


def refuse_other_sampling(step: int, saved: Mapping[str, Any], config: RunConfig, placement: Placement) -> None:
    """Refuse to resume where what was generated for the next step cannot be trained on in this run.

    Args:
        saved: what `describe_buffered` said when it was written.

    Raises:
        ConfigError: a setting is another one, the rollout is in the actor's team now, or hands over something else.
    """
    order, held = saved["order"], steps_held(saved)
    if (order == "in_order") != config.async_.in_order:
        raise ConfigError(
            f"the checkpoint holds samples that were generated ahead of training, from step {step + 1} on, in another "
            "order",
            where="async.order",
            found=config.async_.order,
            allowed=order,
            fix=_way_out(step, held, f"async.order={order}"),
        )
    if order == "in_order" and config.async_.max_staleness < held - 1:
        raise ConfigError(
            f"the checkpoint holds samples of {held} steps that were generated ahead of training, and this run would "
            "not keep what is left of them in its next one",
            where="async.max_staleness",
            found=config.async_.max_staleness,
            allowed=f"{held - 1} or more",
            fix=f"set async.max_staleness={held - 1}; a run that goes on from its first checkpoint may have one less",
        )
    before = saved["settings"]
    for key, now in _settings(config).items():
        if key in before and before[key] != now:
            raise ConfigError(
                f"the checkpoint holds the samples of step {step + 1}, and they were generated with another value",
                where=key,
                found=now,
                allowed=str(before[key]),
                fix=_way_out(step, held, f"{key}={before[key]}"),
            )
    _refuse_other_fields(step, held, saved["fields"], placement)


def refuse_left_out(step: int, prompts: int, config: RunConfig) -> None:
    """Refuse to resume in order where a run as ready left out prompts, which would never be generated.

    Raises:
        ConfigError: there are some.
    """
    if not prompts or not config.async_.in_order:
        return
    steps = -(-prompts // config.data.batch_size)
    raise ConfigError(
        f"the run that wrote the checkpoint left out {count(prompts, 'prompt')} that were to be generated again, and "
        "in order nobody generates them",
        where="async.order",
        found=config.async_.order,
        allowed="as_ready",
        fix=_way_out(step, steps, "async.order=as_ready"),
    )


def _refuse_other_fields(step: int, held: int, kept: Mapping[str, Sequence[str]], placement: Placement) -> None:
    team = placement.of_role(Role.ROLLOUT)
    assert team is not None, "every run generates samples"
    if team == placement.of_role(Role.ACTOR):
        raise ConfigError(
            f"the checkpoint holds samples of step {step + 1} that were generated ahead of training, by a rollout in a "
            "team of its own, and only such a one can hand them over",
            where="placement",
            found="the rollout in the team of the actor",
            allowed="a team of its own for the rollout",
            fix=_way_out(step, held, "the placement of before"),
        )
    given = placement.given_by(team.name)
    lacking = [f"{field} of {one.node}" for one in given for field in one.fields if field not in kept.get(one.node, ())]
    if lacking:
        raise ConfigError(
            f"the checkpoint holds samples of step {step + 1} that were generated ahead of training, and they lack "
            "fields that nodes of this recipe hand over",
            where="recipe",
            found=", ".join(lacking),
            allowed="; ".join(f"{', '.join(fields)} of {node}" for node, fields in kept.items()),
            fix=_way_out(step, held, "the recipe of before"),
        )


def _way_out(step: int, held: int, before: str) -> str:
    """Say what to do first: `held` more steps use all that the checkpoint after `step` has, in either order."""
    last = step + held
    steps = f"step {last}" if held == 1 else f"steps {step + 1} to {last}"
    return (
        f"finish {steps} with {before} and trainer.steps={last}: that writes a checkpoint that holds no samples, from "
        "which other settings may go on (a learning rate that decays over the whole run is at its end in this step, "
        "unless optim.decay_steps says how long that is); or start with trainer.resume=never"
    )


def left_out(folder: Path, parts: int) -> int:
    """Of the checkpoint that `parts` replicas wrote into: how many prompts before its loader's place have no samples.

    It is one that holds no samples, so these are all that a run in order would miss.
    """
    return sum(len(json.loads((folder / f"flow_{part}.json").read_text())["again"]) for part in range(parts))
