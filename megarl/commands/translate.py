"""Translates settings of TRL, verl or NeMo-RL to recipe keys, for `megarl init --from`.

file -> read_settings   names and values: a YAML or JSON mapping, or a command line (--name value, key.path=value)
     -> translate       settings that depend on each other: batch sizes, KL, devices, rewards; then every other
                        name by `megarl.config.other_names`; settings without a key become notes with the reason
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

from megarl.config.fields import alternatives, find_key
from megarl.config.other_names import METHODS, key_of, meaning_of
from megarl.config.other_values import VALUES, lora_targets, value_fix
from megarl.config.yamlio import flatten, parse_value, read_yaml
from megarl.system.errors import UserError, relative_path_fix

_KEY_VALUE = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<braced>\w+)(?P<sign>\}|:?-))")  # with a sign -, a default follows
_BRACE = re.compile(r"\$\{|\}")
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_OF_GRPO = {"num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon", "scale_rewards"}
_OF_SFT = {"packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "eos_token"}
_OF_DPO = {"beta", "label_smoothing", "precompute_ref_log_probs", "rpo_alpha", "loss_type", "ref_model_name_or_path"}
_OF_NEMO = {"grpo", "dpo", "sft", "loss_fn", "cluster", "checkpointing"}


@dataclass
class OtherSettings:
    """Settings of another trainer by their dotted names. `take` removes the settings that it returns."""

    values: dict[str, Any]
    words: list[str] = field(default_factory=list)

    def take(self, *names: str) -> Any:
        """Remove the settings whose dotted names end with one of `names`, up to the first that is not null; return its
        value, or None if there is none.
        """
        for name in names:
            for path in list(self.values):
                if path == name or path.endswith(f".{name}"):
                    value = self.values.pop(path)
                    if value is not None:
                        return value
        return None

    def drop(self, unused: Callable[[str], bool]) -> None:
        """Remove the settings for which `unused` is true, such as the settings of a feature that is off."""
        self.values = {name: value for name, value in self.values.items() if not unused(name)}

    def has(self, name: str) -> bool:
        """Return whether there is a setting `name`, or a setting in a section `name`."""
        return any(path == name or path.startswith(f"{name}.") for path in self.values)


@dataclass
class Translation:
    """The recipe keys for another trainer's settings, and the settings that have no key.

    Attributes:
        trainer: TRL, verl or NeMo-RL.
        algorithm: name of the algorithm for `megarl init --algorithm`, or sft.
        settings: dotted key -> value.
        notes: `name: value` in the other trainer -> why it was left out.
    """

    trainer: str
    algorithm: str
    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, value: Any) -> None:
        """Set a key, unless `value` is None."""
        if value is None:
            return
        value = VALUES.get(key, {}).get(str(value).lower(), value)
        place = find_key(tuple(key.split(".")))
        kinds = [] if place is None else [k for k in alternatives(place.info.annotation) if k is not type(None)]
        takes_list = bool(kinds) and all(get_origin(kind) is list for kind in kinds)
        self.settings[key] = [value] if takes_list and not isinstance(value, list) else value

    def note(self, name: str, value: Any, why: str) -> None:
        """Record that a setting cannot be translated, and why."""
        self.notes[f"{name}: {value}"] = why


def read_settings(file: Path) -> OtherSettings:
    """Return the settings in a YAML or JSON file, or in the words of a command line."""
    if file.suffix.lower() in (".yaml", ".yml", ".json"):
        values = dict(flatten(read_yaml(file).data))
        return OtherSettings({name: _resolved(value, values) for name, value in values.items()})
    try:
        words = shlex.split(file.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as error:
        raise UserError(
            "the file cannot be read as a command line",
            where=str(file),
            found=str(error),
            allowed="a shell script with one command, or a file .yaml, .yml or .json",
            fix=relative_path_fix() if isinstance(error, OSError) else "leave only the training command in the file",
        ) from error
    return _of_words(words)


def _of_words(words: list[str]) -> OtherSettings:
    """Return the settings among the words of a shell script. Shell variables in them are replaced by the values that
    the script sets, or by their defaults."""
    settings, variables = OtherSettings({}), {"HOME": os.path.expanduser("~")}
    name = ""
    for raw in words:
        word = _put_in(raw, variables)
        pair = _KEY_VALUE.fullmatch(word)
        if word == "--":
            name = ""
        elif word.startswith("--"):
            option, equals, value = word[2:].partition("=")
            option = option.replace("-", "_")
            settings.values[option] = _value(value) if equals else True
            name = "" if equals else option
        elif pair is not None and "." not in pair[1]:
            variables[pair[1]] = pair[2]
        elif pair is not None:
            settings.values[pair[1]] = _value(pair[2])
        elif name and not word.endswith(".py"):
            before, value = settings.values[name], _value(word)
            several = [*(before if isinstance(before, list) else [before]), value]
            settings.values[name] = value if before is True else several
        else:
            settings.words.append(word)
            name = ""
    return settings


def _put_in(word: str, variables: Mapping[str, str]) -> str:
    """Return a word of a script with its variables replaced as by a shell. Unknown variables without a default stay.

    >>> _put_in("${A:-${B}/c} $D", {"B": "b"})
    'b/c $D'
    """
    match = _VARIABLE.search(word)
    if match is None:
        return word
    end, default = match.end(), match[0]
    if match["sign"] in ("-", ":-"):
        closing = _closing_brace(word, end)
        if closing is None:
            return word
        end, default = closing + 1, _put_in(word[end:closing], variables)
    value = variables.get(match["plain"] or match["braced"])
    if value is None or (not value and match["sign"] == ":-"):
        value = default
    return word[: match.start()] + value + _put_in(word[end:], variables)


def _closing_brace(word: str, start: int) -> int | None:
    """Return the position of the brace that ends the default that begins at `start`; None if there is none."""
    depth = 1
    for brace in _BRACE.finditer(word, start):
        depth += 1 if brace[0] == "${" else -1
        if depth == 0:
            return brace.start()
    return None


def _value(text: str) -> Any:
    try:
        return parse_value(text) if text else None
    except Exception:  # the text may have any form
        return text


def _resolved(value: Any, values: Mapping[str, Any]) -> Any:
    """Return a value with each reference `${a.b}` to another setting replaced by that setting's value."""
    seen: set[str] = set()
    while isinstance(value, str) and (match := _REFERENCE.fullmatch(value)) and value not in seen:
        seen.add(value)
        value = values.get(match[1], value)
    return value


def translate(source: OtherSettings, gpus: int | None) -> Translation:
    """Return the recipe's keys for the settings of TRL, verl or NeMo-RL; `gpus` is the number of devices; None: the
    number in the settings.
    """
    heads = {name.partition(".")[0] for name in source.values}
    if "actor_rollout_ref" in heads:
        made = _verl(source, gpus)
    elif "policy" in heads and heads & _OF_NEMO:
        made = _nemo(source, gpus)
    elif any(meaning_of((name,)) is not None for name in source.values):
        made = _trl(source, gpus)
    else:
        raise UserError(
            "these are not settings of TRL, verl or NeMo-RL",
            where="--from",
            found=", ".join(sorted(heads)[:8]) or "no setting",
            allowed="a YAML or JSON file of one of these trainers, or a text file with its command line",
        )
    _the_others(source, made)
    return made


def _the_others(source: OtherSettings, made: Translation) -> None:
    """Translate every remaining setting whose name belongs to exactly one recipe key, and list the others."""
    for name, value in source.values.items():
        if value is None or value in ([], {}, "") or name.rpartition(".")[2].startswith("_"):
            continue
        if isinstance(value, str) and (sign := next((sign for sign in ("${", "$(") if sign in value), None)):
            made.note(name, value, f"a reference that only {made.trainer if sign == '${' else 'the shell'} can resolve")
            continue
        path = tuple(name.split("."))
        key = key_of(path)
        fix = value_fix(key, value) if key else None
        if key and key in made.settings:
            made.note(name, value, f"another setting sets {key}")
        elif key and (fix is None or fix.startswith("write ")):
            made.set(key, value)
        elif fix or meaning_of(path) or value is not False:  # an unknown setting that is off needs no note
            made.note(name, value, fix or meaning_of(path) or "these have no counterpart here")


def _positive(value: Any) -> Any:
    """Return `value` if it is a number above 0; else None, as for -1, which means none in other trainers."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def _texts(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])] if value else []


def _devices(made: Translation, nodes: Any, per_node: Any, gpus: int | None) -> int:
    """Set the recipe's processes and machines; return the number of devices, `gpus` if the user named it."""
    nodes = int(_positive(nodes) or 1)
    devices = int(gpus if gpus is not None else nodes * int(_positive(per_node) or 1))
    made.set("cluster.nproc", max(1, devices))
    if nodes > 1 and devices % nodes == 0 and devices:
        made.set("cluster.nnodes", nodes)
        made.set("launch.launcher", "torchrun")
    return max(1, devices)


def _trackers(made: Translation, names: list[str]) -> None:
    for name in names:
        if name in ("wandb", "tensorboard", "trackio"):
            made.settings.setdefault("tracking.loggers", []).append(name)
        elif name != "mlflow":
            made.note("trackers", name, value_fix("tracking.loggers", name) or "this tracker is not supported")
    if "mlflow" in names:
        made.set("tracking.mlflow", True)


def _kl(made: Translation, use: str, coef: Any) -> None:
    if use != "none" and _positive(coef):
        made.set("algorithm.kl.use", use)
        made.set("algorithm.kl.coef", float(coef))


def _dual_clip(made: Translation, value: Any) -> None:
    """Set the bound on ratios with negative advantages. TRL and NeMo-RL have none by default."""
    if "algorithm.loss.name" not in made.settings:
        made.settings["algorithm.loss.dual_clip"] = value


def _steps(source: OtherSettings, made: Translation, steps: str, epochs: str, section: str = "trainer") -> None:
    """Set the run's length in steps or epochs. If the other trainer's settings have both, a very large number of steps
    means that epochs decide."""
    number, passes = _positive(source.take(steps)), _positive(source.take(epochs))
    if number and (not passes or number < 100_000):
        made.set(f"{section}.steps", int(number))
    else:
        made.set(f"{section}.epochs", passes)


def _betas(made: Translation, betas: Any) -> None:
    if isinstance(betas, list) and len(betas) == 2:
        made.set("actor.optim.beta1", betas[0])
        made.set("actor.optim.beta2", betas[1])


def _lora(source: OtherSettings, made: Translation, names: tuple[str, str, str, str]) -> None:
    rank, alpha, dropout, targets = (source.take(name) for name in names)
    if not _positive(rank):
        source.drop(lambda name: "lora" in name)
        return
    made.set("model.lora.rank", rank)
    made.set("model.lora.alpha", alpha)
    made.set("model.lora.dropout", dropout)
    chosen = lora_targets(targets) if targets is not None else None
    if chosen is False:
        made.note("targets of adapters", targets, "targets here are attention, mlp and experts (model.lora.targets)")
    else:
        made.set("model.lora.targets", chosen)


# -- TRL ---------------------------------------------------------------------------------------------------------


def _trl(source: OtherSettings, gpus: int | None) -> Translation:
    names, words = set(source.values), " ".join(source.words).lower()
    kinds = {"grpo": _OF_GRPO, "sft": _OF_SFT, "dpo": _OF_DPO}
    of_command = next((kind for kind in kinds if kind in words), None)
    algorithm = of_command or next((kind for kind, options in kinds.items() if options & names), "grpo")
    made = Translation("TRL", algorithm)
    nodes, processes = int(_positive(source.take("num_machines")) or 1), source.take("num_processes")
    # accelerate's num_processes counts the processes of all machines
    devices = _devices(made, nodes, int(_positive(processes) or nodes) // nodes, gpus)
    _trl_data(source, made)
    batch = int(source.take("per_device_train_batch_size") or 8) * devices
    accumulated = int(source.take("gradient_accumulation_steps") or 1)
    section = "sft" if algorithm == "sft" else "actor"
    if algorithm == "grpo":
        _trl_grpo(source, made, batch, accumulated)
    elif algorithm == "dpo":
        made.set("data.batch_size", batch * accumulated)
        made.set("preference.beta", source.take("beta"))
        made.set("preference.loss", source.take("loss_type"))
        made.set("preference.max_tokens", source.take("max_length"))
    else:
        made.set("sft.batch_size", batch * accumulated)
        made.set("sft.max_tokens", source.take("max_length"))
    _trl_optimizer(source, made, section)
    steps, epochs = _positive(source.take("max_steps")), _positive(source.take("num_train_epochs"))
    length = "sft" if section == "sft" else "trainer"
    made.set(*((f"{length}.steps", int(steps)) if steps else (f"{length}.epochs", epochs or 3)))
    if str(source.take("eval_strategy") or "no") == "no":
        source.take("eval_steps")
        made.settings.pop("data.val_files", None)
    elif section == "sft":
        made.set("sft.eval_every", source.take("eval_steps"))
    if str(source.take("save_strategy") or "steps") == "no":
        source.take("save_steps")
        made.set("trainer.save_every", 0)
    _trackers(made, _texts(source.take("report_to")))
    return made


def _trl_data(source: OtherSettings, made: Translation) -> None:
    made.set("model.path", source.take("model_name_or_path"))
    if source.take("bf16") is True:
        made.set("model.dtype", "bf16")
    if source.take("fp16") is True:
        made.note("fp16", True, "training is in bf16 or fp32 here")
    made.set("model.dtype", source.take("torch_dtype", "dtype"))
    name, config = source.take("dataset_name"), source.take("dataset_config", "dataset_config_name")
    if name is not None:
        name = f"{name}:{config}" if config else str(name)
        split = source.take("dataset_train_split")
        made.set("data.train_files", [f"{name}@{split}" if split else name])
        made.set("data.val_files", [f"{name}@{source.take('dataset_test_split') or 'test'}"])
    if source.take("use_peft") is not False:
        _lora(source, made, ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"))


def _trl_optimizer(source: OtherSettings, made: Translation, section: str) -> None:
    optim = f"{section}.optim"
    made.set(f"{optim}.lr", source.take("learning_rate"))
    made.set(f"{optim}.schedule", VALUES["actor.optim.schedule"].get(kind := source.take("lr_scheduler_type"), kind))
    warmup = source.take("warmup_steps")
    made.set(f"{optim}.warmup_steps" if isinstance(warmup, int) else f"{optim}.warmup_ratio", warmup)
    made.set(f"{optim}.warmup_ratio", source.take("warmup_ratio"))
    made.set(f"{optim}.weight_decay", source.take("weight_decay"))
    made.set(f"{optim}.beta1", source.take("adam_beta1"))
    made.set(f"{optim}.beta2", source.take("adam_beta2"))
    made.set(f"{optim}.eps", source.take("adam_epsilon"))
    made.set(f"{optim}.clip_grad", source.take("max_grad_norm"))
    if source.take("gradient_checkpointing") is True:
        made.set("actor.engine.recompute", "full")


def _trl_grpo(source: OtherSettings, made: Translation, batch: int, accumulated: int) -> None:
    """Translate the keys of TRL's GRPOConfig, whose batch sizes count responses; those of a recipe count prompts."""
    samples = int(source.take("num_generations") or 8)
    made.set("rollout.sampling.n", samples)
    generated = source.take("generation_batch_size") or batch * int(source.take("steps_per_generation") or accumulated)
    made.set("data.batch_size", max(1, int(generated) // samples))
    made.set("actor.mini_batch_size", max(1, batch * accumulated // samples))
    _kl(made, "loss", source.take("beta"))
    made.set("algorithm.loss.clip_low", low := source.take("epsilon"))
    made.set("algorithm.loss.clip_high", source.take("epsilon_high") or low)
    loss = str(source.take("loss_type") or "dapo")
    if loss in VALUES["algorithm.loss.aggregation"]:
        made.set("algorithm.loss.aggregation", loss)
    elif loss in ("cispo", "sapo"):
        made.set("algorithm.loss.name", loss)
    else:
        made.note("loss_type", loss, "this loss does not exist here")
    _dual_clip(made, source.take("delta"))
    scaled = source.take("scale_rewards")
    if scaled is False or scaled == "none":
        made.set("algorithm.advantage.norm_by_std", False)
    elif scaled == "batch":
        why = "advantages are divided by the standard deviation of their group, or not at all"
        made.note("scale_rewards", scaled, why)
    if source.take("importance_sampling_level") == "sequence":
        made.set("algorithm.loss.name", "gspo")
    made.set("rollout.sampling.top_k", _positive(source.take("top_k")))
    if source.take("use_vllm") is True:
        made.note("use_vllm", True, str(value_fix("rollout.engine", "vllm")))
    _trl_rewards(source, made)


def _trl_rewards(source: OtherSettings, made: Translation) -> None:
    functions = _texts(source.take("reward_funcs"))
    weights = source.take("reward_weights")
    for name in functions:
        fix = METHODS.get(name.rpartition(".")[2], "")
        if len(functions) == 1 and fix.startswith("set reward.name="):
            made.set("reward.name", fix.rpartition("=")[2])
        else:
            made.note("reward_funcs", name, "write it as file.py:function(samples) in reward.name or reward.parts")
    if weights is not None:
        made.note("reward_weights", weights, "set weights in reward.parts.NAME.weight")


# -- verl --------------------------------------------------------------------------------------------------------


def _verl(source: OtherSettings, gpus: int | None) -> Translation:
    estimator = str(source.take("algorithm.adv_estimator") or "gae")
    made = Translation("verl", {"gae": "ppo", "rloo": "rloo"}.get(estimator, "grpo"))
    made.set("algorithm.advantage.name", estimator)
    _devices(made, source.take("trainer.nnodes"), source.take("trainer.n_gpus_per_node") or 8, gpus)
    made.set("model.path", source.take("actor_rollout_ref.model.path"))
    for key in ("data.train_files", "data.val_files"):
        made.set(key, _texts(source.take(key)) or None)
    made.set("data.prompt_key", source.take("data.prompt_key") or "prompt")
    made.set("data.answer_key", "reward_model.ground_truth")
    filtered = source.take("data.filter_overlong_prompts")
    made.set("data.overlong", "filter" if filtered else "error" if source.take("data.truncation") == "error" else None)
    source.take("data.truncation")
    if not source.take("distillation.enabled"):
        source.drop(lambda name: name.startswith("distillation."))
    if not source.take("algorithm.use_pf_ppo"):
        source.drop(lambda name: name.startswith("algorithm.pf_ppo"))
    if source.values.get("algorithm.rollout_correction.rollout_is") is None:
        source.drop(lambda name: name.startswith("algorithm.rollout_correction.rollout_is"))
    _verl_reward(source, made)
    source.drop(lambda name: "profiler" in name)
    in_loss, in_reward = source.take("actor.use_kl_loss"), source.take("algorithm.use_kl_in_reward")
    of_loss, of_reward = source.take("actor.kl_loss_coef"), source.take("algorithm.kl_ctrl.kl_coef")
    _kl(made, "loss" if in_loss else "reward" if in_reward else "none", of_loss if in_loss else of_reward)
    kinds = source.take("actor.kl_loss_type"), source.take("algorithm.kl_penalty")
    made.set("algorithm.kl.estimator", (kinds[0] if in_loss else kinds[1]) if in_loss or in_reward else None)
    clip = source.take("actor.clip_ratio")
    made.set("algorithm.loss.clip_low", source.take("actor.clip_ratio_low") or clip)
    made.set("algorithm.loss.clip_high", source.take("actor.clip_ratio_high") or clip)
    if source.take("filter_groups.enable"):
        made.algorithm = "dapo"
        made.set("algorithm.dynamic_sampling.enabled", True)
    length, factor = source.take("overlong_buffer.len"), source.take("overlong_buffer.penalty_factor")
    if source.take("overlong_buffer.enable"):
        made.set("algorithm.overlong.buffer_tokens", length)
        made.set("algorithm.overlong.factor", factor)
    _betas(made, source.take("actor.optim.betas"))
    may_be_off = ("actor.optim.lr_warmup_steps", "trainer.save_freq", "trainer.test_freq")
    # A value that is not above 0 sets no number of warm-up steps, and turns saving or validation off.
    source.drop(lambda name: name.endswith(may_be_off) and not _positive(source.values[name]))
    _steps(source, made, "trainer.total_training_steps", "trainer.total_epochs")
    _rollout(source, made, source.take("rollout.name"))
    made.set("rollout.sampling.top_k", _positive(source.take("rollout.top_k")))
    if source.take("model.enable_gradient_checkpointing"):
        made.set("actor.engine.recompute", "full")
    _lora(source, made, ("model.lora_rank", "model.lora_alpha", "model.lora_dropout", "model.target_modules"))
    _trackers(made, [name for name in _texts(source.take("trainer.logger")) if name != "console"])
    if source.take("trainer.val_before_train") is False:
        made.set("validation.before_train", False)
    return made


def _verl_reward(source: OtherSettings, made: Translation) -> None:
    path = source.take("custom_reward_function.path")
    name = source.take("custom_reward_function.name") or "compute_score"
    if path is not None:
        made.set("reward.name", f"{path}:{name}")
    for key in [key for key in source.values if "reward_kwargs." in key]:
        made.set(f"reward.kwargs.{key.rpartition('reward_kwargs.')[2]}", source.values.pop(key))


def _rollout(source: OtherSettings, made: Translation, engine: Any) -> None:
    """Add notes to the translated recipe: the generation engine and its tensor parallel size are left out, because
    `megarl init --engine` sets the engine."""
    if engine is not None:
        made.note("engine of generation", engine, "use megarl init --engine sglang or embedded; vLLM is not supported")
    size = source.take("rollout.tensor_model_parallel_size", "vllm_cfg.tensor_parallel_size")
    if size is not None:
        made.note("tensor parallel size of generation", size, "set rollout.sglang.tp_size with rollout.engine=sglang")


# -- NeMo-RL -----------------------------------------------------------------------------------------------------


def _nemo(source: OtherSettings, gpus: int | None) -> Translation:
    algorithm = next((kind for kind in ("grpo", "dpo", "sft") if source.has(kind)), "grpo")
    made = Translation("NeMo-RL", algorithm)
    _devices(made, source.take("cluster.num_nodes"), source.take("cluster.gpus_per_node"), gpus)
    made.set("model.path", source.take("policy.model_name"))
    samples = int(source.take("grpo.num_generations_per_prompt") or 16)
    trained = source.take("policy.train_global_batch_size")
    if algorithm == "grpo":
        made.set("rollout.sampling.n", samples)
        if isinstance(trained, int) and trained >= samples:
            made.set("actor.mini_batch_size", trained // samples)
        _dual_clip(made, source.take("loss_fn.ratio_clip_c"))
        _kl(made, "loss", source.take("loss_fn.reference_policy_kl_penalty"))
        _rollout(source, made, source.take("generation.backend"))
        made.set("rollout.sampling.top_k", _positive(source.take("generation.top_k")))
        if source.take("loss_fn.token_level_loss") is False:
            made.set("algorithm.loss.aggregation", "seq-mean-token-mean")
        if source.take("grpo.use_leave_one_out_baseline"):
            made.set("algorithm.advantage.name", "rloo")
        else:
            made.set("algorithm.advantage.norm_by_std", source.take("grpo.normalize_rewards"))
    elif algorithm == "dpo":
        made.set("data.batch_size", trained)
        made.set("preference.beta", source.take("dpo.reference_policy_kl_penalty"))
    else:
        made.set("sft.batch_size", trained)
        made.set("sft.max_tokens", source.take("policy.max_total_sequence_length"))
    section = "sft" if algorithm == "sft" else "trainer"
    _steps(source, made, f"{algorithm}.max_num_steps", f"{algorithm}.max_num_epochs", section)
    if algorithm == "sft":
        made.set("sft.eval_every", _positive(source.take("sft.val_period")))
    else:
        _betas(made, source.take("optimizer.kwargs.betas"))
    tokenizer = source.take("policy.tokenizer.name")
    made.set("model.tokenizer", tokenizer if tokenizer != made.settings.get("model.path") else None)
    if source.has("env.math"):
        made.set("reward.name", "math")
    longest = source.take("policy.max_total_sequence_length")
    made.set("preference.max_tokens", longest if algorithm == "dpo" else None)
    for name in ("lr", "weight_decay", "eps"):
        optimizer = "sft.optim" if algorithm == "sft" else "actor.optim"
        made.set(f"{optimizer}.{name}", source.take(f"optimizer.kwargs.{name}"))
    if source.take("megatron_cfg.activation_checkpointing", "dtensor_cfg.activation_checkpointing"):
        made.set("actor.engine.recompute", "full")
    if source.has("policy.megatron_cfg"):  # the backend is Megatron, so settings of the DTensor backend are unused
        source.drop(lambda name: name.startswith("policy.dtensor_cfg."))
    if source.take("checkpointing.enabled") is False:
        source.take("checkpointing.save_period")
        made.set("trainer.save_every", 0)
    metric = source.take("checkpointing.metric_name")
    if metric is not None:
        made.note("checkpointing.metric_name", metric, "trainer.best_metric has names such as val/acc")
    enabled = {kind: source.take(f"logger.{kind}_enabled") for kind in ("wandb", "tensorboard", "mlflow")}
    _trackers(made, [kind for kind, on in enabled.items() if on])
    return made
