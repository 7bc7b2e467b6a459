"""The effect of each recipe key that has changed since a checkpoint on the run that resumes from it.

A resumed run takes most settings from the recipe. From the checkpoint come weights, optimizer state and steps, random
states, the loader's order and position, the adaptive KL coefficient, buffered samples, and the best metric so far.
Layouts and teams may change: a checkpoint stores tensors by name, and each rank reads its shards.

A rollout in a team of its own generates ahead of training (megarl/disaggregated). Its checkpoints record for how many
steps they hold samples, in which order, with which settings; a run that cannot use these samples is rejected.
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
from megarl.data.fields import current_name
from megarl.system.errors import ConfigError, count

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement


Command = Literal["train", "sft"]
Plain = Mapping[str, Any]
#: What a changed value does to a resumed run. None: the run uses it from the next step on; a text: what the run does
#: with it; `FIXED`: the run cannot be resumed.
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
        return FIXED  # training in bf16 needs master weights, which a checkpoint of float32 parameters lacks
    return "from the parameters rounded to bf16, without their master weights"


def _model_path(before: Plain, now: Plain) -> Effect:
    if value_at(now, "model.lora") in (None, MISSING):
        return f"read for tokenizer and architecture only: {WEIGHTS}"
    return "the base model of the adapters, whose files must be unchanged"


def _init_seed(before: Plain, now: Plain) -> Effect:
    random_base = value_at(now, "model.lora") not in (None, MISSING) and value_at(now, "model.path") is None
    # A checkpoint of adapters lacks the base model, which the seed must initialise as before.
    return FIXED if random_base else f"not used: {WEIGHTS}"


def _mtp(before: Plain, now: Plain) -> Effect:
    trains = [value_at(config, "actor.mtp") not in (None, MISSING) for config in (before, now)]
    if trains[0] == trains[1]:
        return None
    # actor.mtp must stay as it is: checkpoints hold a draft head with its optimizer state only if the head was trained
    return FIXED


def _staleness(before: Plain, now: Plain) -> Effect:
    ready = not any(_is_in_order(config) for config in (before, now))
    fewer = ready and value_at(now, STALENESS) < value_at(before, STALENESS)
    return "groups in the checkpoint that are too old under the new value are generated again" if fewer else None


def _model(key: str, before: Plain, now: Plain) -> Effect:
    """Return the effect of a changed `key` of a further model, models.NAME or below it."""
    models = [value_at(config, ".".join(key.split(".")[:2])) for config in (before, now)]
    trained = [isinstance(model, Mapping) and model.get("train", False) for model in models]
    if trained[0] != trained[1]:
        return FIXED  # a checkpoint has the weights and optimizer states of those models that were trained
    return f"not used: {WEIGHTS}" if trained[0] and key.endswith(".path") else None


#: Keys whose new value is used from the next step on: first whole sections, then single keys of other sections.
_USED_AT_ONCE = """
    reward env robot rollout sync rollout_correction reference teacher reward_model preference cluster
        placement launch tracking policies models
    model.hf_config model.tokenizer model.trust_remote_code
    algorithm.pipeline algorithm.advantage algorithm.loss algorithm.kl.use algorithm.kl.estimator
        algorithm.kl.adaptive algorithm.kl.target algorithm.kl.horizon algorithm.distillation algorithm.filter
        algorithm.resampling algorithm.dynamic_sampling algorithm.overlong
    data.train_files data.val_files data.val_split data.system_prompt data.prompt_key data.answer_key
        data.image_key data.image_dir data.min_pixels data.max_pixels data.limit_images data.format_prompt
        data.video_key data.video_fps data.max_frames data.video_min_pixels data.video_max_pixels
        data.chat_template data.chat_template_kwargs data.override_chat_template data.date
        data.max_prompt_tokens data.overlong data.batch_size data.val_batch_size data.max_val_samples
        data.loader_kwargs data.loader_workers data.curriculum data.experts data.replay
    validation.sampling validation.every validation.select_by validation.log_samples
    actor.parallel actor.engine actor.optim actor.mini_batch_size actor.ppo_epochs actor.shuffle
    critic.parallel critic.engine critic.optim critic.mini_batch_size critic.ppo_epochs critic.shuffle
        critic.aggregation critic.sum_norm critic.value_clip critic.warmup_steps
    trainer.steps trainer.epochs trainer.save_every trainer.resume_every trainer.save_by_s trainer.keep_last
        trainer.best_metric trainer.early_stop trainer.resume trainer.export_hf trainer.profile
    async.order async.partial
"""

#: What a changed key does to a resumed run; by section if all its keys do the same. The loader rejects changed data.
EFFECTS: dict[str, Effect | Callable[[Plain, Plain], Effect]] = {
    **dict.fromkeys(_USED_AT_ONCE.split()),
    "name": "the run folder and an MLflow run keep theirs",
    "model.path": _model_path,
    "model.init_seed": _init_seed,
    "model.dtype": _dtype,
    "model.lora": FIXED,
    "model.vision": FIXED,  # a checkpoint has only those vision parts that the run had
    "actor.mtp": _mtp,
    "model.freeze": FIXED,  # a checkpoint has no optimizer state of frozen parameters
    "algorithm.kl.coef": _kl_coef,
    "data.shuffle": f"not used: {ORDER}",
    "validation.before_train": "not used: the first step is over",
    "critic.path": f"not used: {WEIGHTS}",
    "sft": COLD_START,
    "trainer.seed": f"used for what is sampled from now on; {ORDER}",
    STALENESS: _staleness,
}

#: Keys and sections of generation and scoring. The checkpoint may hold samples generated with their old values.
SAMPLING = ("algorithm.overlong", "async", "data", "env", "reward", "robot", "rollout", "trainer.seed")
#: Sections that select groups. With async.order=as_ready, a new value does not apply to the groups in the checkpoint,
#: which were selected with the old one.
CHOOSING = ("algorithm.dynamic_sampling", "algorithm.filter")
HELD_OUT = ("data.val_files", "data.val_batch_size", "data.max_val_samples")

#: Keys that are used before the first RL step only: a run that resumes from the end of its cold start uses new values.
BEFORE_FIRST_STEP = ("validation.before_train", "critic.path")


def effect_of(key: str, before: Plain, now: Plain, command: Command) -> Effect:
    """Return the effect of a changed `key` on a resumed run, from the longest matching entry of EFFECTS.

    A component's own keys need no entry: components are built from the recipe again.

    Raises:
        KeyError: EFFECTS lacks the key, which is a bug.
    """
    entry = key
    while entry not in EFFECTS and "." in entry:
        entry = entry.rpartition(".")[0]
    if command == "sft" and entry == "sft":
        return None
    if entry not in EFFECTS:
        above = find_key(tuple(key.split(".")))
        if above is not None and above.path != key and names_component(above.section):
            return None  # a component's own key, such as `reward.X` of a reward function with an argument X
    if entry == "models":
        return _model(key, before, now)
    effect = EFFECTS[entry]
    return effect(before, now) if callable(effect) else effect


def changed_keys(before: Plain, now: Plain) -> Iterator[tuple[str, Any, Any]]:
    """Yield key, old and new value of every setting in both configurations that differs.

    In sections with free keys (keyword arguments), a key that only one configuration has is `not set` in the other.
    A component's own keys are compared only if both have them, because different components have different keys.

    >>> list(changed_keys({"trainer": {"steps": 3, "seed": 0}}, {"trainer": {"steps": 5, "seed": 0}}))
    [('trainer.steps', 3, 5)]
    """
    for key in iter_keys():
        old, new = value_at(before, key.path), value_at(now, key.path)
        if old is MISSING or new is MISSING or old == new or key.path == "trainer.resume":
            # only one version of megarl has the key, or its value is unchanged, or it only chooses the checkpoint
            continue
        if names_component(key.section):
            shared = {other.path.rpartition(".")[2] for other in iter_keys() if other.path.startswith(f"{key.path}.")}
            for name in (name for name in old if name in new and name not in shared):
                yield from _differences(f"{key.path}.{name}", old[name], new[name])
        elif key.section is None or not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            yield from _differences(key.path, old, new)


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value if they differ; for two mappings, those of each name that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(f"{path}.{name}", old.get(name, "not set"), new.get(name, "not set"))
    elif old != new:
        yield path, old, new


def announcements(
    before: Plain, now: Plain, command: Command, *, begun: bool = True, generated: int | None = None
) -> list[str]:
    """Return one line per setting that has changed since the checkpoint, with where the old value still applies.

    Args:
        before: the configuration of the checkpoint.
        now: the configuration of this start.
        command: the megarl command, `train` or `sft`.
        begun: whether RL has begun; False: the checkpoint is the result of a cold start.
        generated: the last step for which the checkpoint holds untrained samples; None: no such samples.

    Raises:
        ConfigError: the checkpoint cannot be continued with one of the new values.
    """
    lines = []
    for key, old, new in changed_keys(before, now):
        effect = None if not begun and key in BEFORE_FIRST_STEP else effect_of(key, before, now, command)
        if effect == FIXED:
            raise ConfigError(
                "the checkpoint cannot be continued with a different value",
                where=key,
                found=new,
                allowed=str(old),
                fix=(f"remove {key}" if old == "not set" else f"set {key}={old}")
                + "; trainer.resume=never starts from the beginning",
            )
        notes = [effect] if effect else []
        if generated is not None and not (effect or "").startswith("not used"):
            notes += _late(key, now, generated)
        lines.append(f"{key}: {old} -> {new}" + (f" ({'; '.join(notes)})" if notes else ""))
    return lines


def refuse_other_batches(step: int, loader: Plain, before: Plain, now: Plain, command: Command = "train") -> None:
    """Reject a changed batch size if the number of steps is computed from epochs, because it would then be wrong.

    Args:
        step: step of the checkpoint.
        loader: the loader's state in the checkpoint; `samples` is the number of prompts.
        before: the configuration that wrote the checkpoint.
        now: the configuration of this start.
        command: `sft`: check `sft.epochs`; `train`: check `trainer.epochs`.

    Raises:
        ConfigError: the batch size has changed.
    """
    section, key = ("sft", "sft.batch_size") if command == "sft" else ("trainer", "data.batch_size")
    epochs = value_at(now, f"{section}.epochs")
    old, new = value_at(before, key), value_at(now, key)
    if epochs in (None, MISSING) or MISSING in (old, new) or old == new or not step:
        return
    steps = step + max(0, math.ceil((epochs * loader["samples"] - step * old) / new - 1e-9))
    raise ConfigError(
        f"the batch size has changed since the checkpoint (after {count(step, 'step')}), so the remaining steps of "
        f"{section}.epochs={epochs:g} cannot be computed",
        where=key,
        found=new,
        allowed=f"{old}, or a different one with {section}.epochs=null",
        fix=f"set {key}={old}; or {section}.epochs=null and {section}.steps={steps}, which is as many epochs",
    )


def _late(key: str, now: Plain, generated: int) -> list[str]:
    """Return a list with a note on the samples to which a changed setting of generation does not apply.

    The checkpoint has samples up to step `generated`. The list is empty if the key does not concern generation, or if
    its new value applies to all groups at once.
    """
    entries = SAMPLING if _is_in_order(now) else (*SAMPLING, *CHOOSING)
    if key in HELD_OUT or not any(key == entry or key.startswith(f"{entry}.") for entry in entries):
        return []
    if _is_in_order(now):
        return [f"from step {generated + 1} on: samples until step {generated} are generated and scored already"]
    if key.startswith("async."):
        return []
    return ["not used for finished groups in the checkpoint, which are generated and scored already"]


def _is_in_order(config: Plain) -> bool:
    return value_at(config, AHEAD_ORDER) in ("in_order", MISSING)


MISSING = object()


def value_at(config: Plain, path: str) -> Any:
    """Return the value at a dotted path of a configuration as plain data; MISSING if the path does not exist."""
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def describe_buffered(config: RunConfig, placement: Placement, step: int) -> dict[str, Any] | None:
    """Describe the samples for later steps that the checkpoint of `step` holds; None: it cannot hold any.

    The entry `steps` is 0 at the end of a run with async.order=as_ready; prompts to generate again may still remain.
    """
    team, left = placement.of_role(Role.ROLLOUT), max(0, config.trainer.steps - step)
    if not config.async_.max_staleness or team is None or (not left and config.async_.in_order):
        return None
    fields: dict[str, list[str]] = {}
    for handover in placement.given_by(team.name):
        fields.setdefault(handover.node, []).extend(handover.fields)
    return {
        "order": config.async_.order,
        "steps": policy_of(config).steps_ahead(step),
        "parts": team.replicas,
        "fields": fields,
        "settings": _settings(config),
    }


def buffered_entry(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the result of `describe_buffered` in a checkpoint's state, or None; older versions named it `drawn`."""
    entry: dict[str, Any] | None = state.get("generated", state.get("drawn"))
    return entry


def steps_held(saved: Mapping[str, Any] | None) -> int:
    """Return for how many steps a checkpoint holds samples; `saved`: the checkpoint's `describe_buffered` entry."""
    return 0 if saved is None else saved["steps"]


def _settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings, by key, that must be equal when samples are generated and when they are trained on.

    The temperature must be equal because old log-probs are compared with rollout log-probs. With
    async.order=in_order the batch size must be equal too, because a step trains on the groups generated for it.
    """
    settings: dict[str, Any] = {"rollout.sampling.temperature": config.rollout.sampling.temperature}
    if config.async_.in_order:
        settings["data.batch_size"] = config.data.batch_size
    return settings


def refuse_other_sampling(step: int, saved: Mapping[str, Any], config: RunConfig, placement: Placement) -> None:
    """Reject a resume whose configuration cannot train on the samples in the checkpoint.

    Args:
        step: step of the checkpoint.
        saved: the result of `describe_buffered` in the checkpoint.
        config: the configuration of this start.
        placement: the teams of this start.

    Raises:
        ConfigError: a setting has changed, the actor's team now also generates, or the samples lack fields.
    """
    order, held = saved["order"], steps_held(saved)
    if (order == "in_order") != config.async_.in_order:
        raise ConfigError(
            f"the order has changed, but the checkpoint holds samples generated ahead of training, "
            f"from step {step + 1} on",
            where="async.order",
            found=config.async_.order,
            allowed=order,
            fix=_resume_fix(step, held, f"async.order={order}"),
        )
    if order == "in_order" and config.async_.max_staleness < held - 1:
        raise ConfigError(
            f"the checkpoint holds samples for {held} steps, generated ahead of training, and this value allows fewer",
            where="async.max_staleness",
            found=config.async_.max_staleness,
            allowed=f"{held - 1} or more",
            fix=f"set async.max_staleness={held - 1}; after this run's first checkpoint it may be one less",
        )
    before = saved["settings"]
    for key, now in _settings(config).items():
        if key in before and before[key] != now:
            raise ConfigError(
                f"the value has changed, but the checkpoint holds samples of step {step + 1} generated "
                "with the old value",
                where=key,
                found=now,
                allowed=str(before[key]),
                fix=_resume_fix(step, held, f"{key}={before[key]}"),
            )
    _refuse_other_fields(step, held, saved["fields"], placement)


def refuse_left_out(step: int, prompts: int, config: RunConfig) -> None:
    """Reject async.order=in_order if the checkpoint lists prompts to generate again, which only as_ready supports.

    Raises:
        ConfigError: `prompts`, the number of these prompts, is not 0.
    """
    if not prompts or not config.async_.in_order:
        return
    steps = -(-prompts // config.data.batch_size)
    raise ConfigError(
        f"the checkpoint has {count(prompts, 'prompt')} to generate again, which async.order=in_order cannot do",
        where="async.order",
        found=config.async_.order,
        allowed="as_ready",
        fix=_resume_fix(step, steps, "async.order=as_ready"),
    )


def _refuse_other_fields(step: int, held: int, kept: Mapping[str, Sequence[str]], placement: Placement) -> None:
    team = placement.home(Role.ROLLOUT)
    if team == placement.of_role(Role.ACTOR):
        raise ConfigError(
            f"the checkpoint holds samples of step {step + 1}, generated ahead of training by a rollout in a team of "
            "its own, so the rollout cannot move to the actor's team",
            where="placement",
            found="the rollout in the actor's team",
            allowed="a team of its own for the rollout",
            fix=_resume_fix(step, held, "the earlier placement"),
        )
    given = placement.given_by(team.name)
    lacking = [
        f"{field} of {handover.node}"
        for handover in given
        for field in handover.fields
        if field not in map(current_name, kept.get(handover.node, ()))
    ]
    if lacking:
        raise ConfigError(
            f"the checkpoint's samples of step {step + 1}, generated ahead of training, lack fields that "
            "this recipe needs",
            where="recipe",
            found=", ".join(lacking),
            allowed="; ".join(f"{', '.join(fields)} of {node}" for node, fields in kept.items()),
            fix=_resume_fix(step, held, "the earlier recipe"),
        )


def _resume_fix(step: int, held: int, before: str) -> str:
    """Return the fix for a message: train `held` more steps on the checkpoint's samples with the setting `before`."""
    last = step + held
    steps = f"step {last}" if held == 1 else f"steps {step + 1} to {last}"
    return (
        f"train {steps} with {before} and trainer.steps={last}: this writes a checkpoint without samples, from which "
        "you can resume with the new setting (a learning rate that decays over the whole run reaches its end in this "
        "step, unless optim.decay_steps is set); or start again with trainer.resume=never"
    )


def left_out(folder: Path, parts: int) -> int:
    """Return how many prompts have to be generated again after a checkpoint that was saved without their samples.

    `parts` is the number of replicas that wrote the checkpoint.
    """
    return sum(len(json.loads((folder / f"flow_{part}.json").read_text())["again"]) for part in range(parts))
