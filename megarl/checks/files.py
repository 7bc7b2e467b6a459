"""Checks that everything that a recipe names exists: model, tokenizer, chat template, data, reward, checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from megarl.algorithms.needs import estimator_fields
from megarl.algorithms.registry import Settings
from megarl.architectures import standard_config
from megarl.architectures.known_keys import ignored_keys, unknown_keys
from megarl.architectures.values import training_problems
from megarl.artifacts.facts import ARCHITECTURES, ModelFacts, hub_cache_folder, is_hub_name, local_folder, model_facts
from megarl.artifacts.model_files import GENERATION_CONFIG, check_tokenizer_files, end_token_ids
from megarl.artifacts.pipes import is_special
from megarl.checks.checklist import Checklist, Roles
from megarl.checks.components import check_function
from megarl.checks.references import check_reference, check_reward_kwargs, signature_of, strings
from megarl.checks.weights import check_weights
from megarl.config.base import as_config_error
from megarl.config.data import RewardConfig
from megarl.config.model import ModelConfig
from megarl.config.other_names import method_fix
from megarl.config.run import RunConfig
from megarl.dag.stage import Role
from megarl.data.light_tokenizer import brings_chat_template, chat_template_of
from megarl.data.render import uses_chat
from megarl.data.sources import (
    HUB,
    SUFFIXES,
    TEXT,
    close_sources,
    files_of_folder,
    other_forms,
    special_source,
    unknown_form_fix,
)
from megarl.data.templates import check_chat_template as parse_chat_template
from megarl.data.templates import check_template_kwargs, read_template
from megarl.data.tokenizer import CHARS, SPECIAL_TOKENS, WORDS, written_tokens
from megarl.planning.shards import BYTES, key_value_bytes, sequence_state_bytes
from megarl.rewards import REWARDS
from megarl.rewards.parts import functions_of, located, raise_part_problems
from megarl.rewards.references import gives_images, uses_reward
from megarl.rewards.registry import refuse_images, reward_settings
from megarl.system.errors import ConfigError, count, relative_path_fix
from megarl.system.imports import is_file_reference, is_module_reference

# Number of tokens by which a model's vocabulary may exceed the policy's: models of one family pad vocab_size to
# different multiples. Their tokenizers are compared when the run starts.
_PADDING = 1024


def check_model(model: ModelConfig, facts: ModelFacts | None, checks: Checklist) -> ModelFacts | None:
    """Check where the policy comes from, and return the model's facts; None when they are unknown."""
    checks = checks.of("model")
    if model.path is not None and model.hf_config is not None:
        checks.fail(
            "model",
            "both model.path and model.hf_config are set: a model is either loaded or randomly initialised",
            found=model.path,
            allowed="one of model.path, model.hf_config",
            fix="set the other to null",
        )
        return None
    if facts is None:
        try:
            facts = model_facts(model)
        except ConfigError as error:
            checks.from_error(error)
            return None
    if facts is None:
        checks.skip(f"{model.path} is not a folder here and is not in the local hub cache: taken as a hub name")
    else:
        checks.ok(f"{facts.source}: {facts.model_type}, {_sizes(facts, model)}")
        checks.from_error(model.freeze_problem(facts.visual_parts))
        check_local_weights("model", model.path, facts, checks)
    if model.hf_config is not None and model.path is None:
        _check_spelling(model.hf_config, checks)
    _check_tokenizer(model, facts, checks.of("tokenizer"))
    return facts


def _sizes(facts: ModelFacts, model: ModelConfig) -> str:
    """Describe the number of parameters, and the bytes of KV cache and states that decoding needs without tp."""
    active = f", {facts.active_parameters:,} of them for a token" if facts.is_moe else ""
    cached = key_value_bytes(facts, 1, model.dtype)
    state = sequence_state_bytes(facts, 1, BYTES[model.dtype])
    fixed = f" and {state:,.0f} of a sequence" if state else ""
    if facts.draft_layers:
        active += " without the draft head"
    return f"{facts.parameters:,} parameters{active}; decoding keeps {cached:,.0f} bytes of a token{fixed}"


def check_local_weights(role: str, path: str | None, facts: ModelFacts, checks: Checklist) -> None:
    """Check the weight files of a model on this machine; `role` names it (model, critic, ...)."""
    checks = checks.of(role)
    folder = Path(path).expanduser() if path is not None else None
    if folder is None or not folder.is_dir():
        return
    with checks.recorded():
        checks.ok(f"{folder}: {check_weights(folder, facts, value_head=role in ('critic', 'reward_model'))}")


def check_only_in_training(facts: ModelFacts | None, checks: Checklist) -> None:
    """Refuse to train a model whose config enables a training feature of transformers that this trainer lacks."""
    for error in training_problems(facts.only_in_training, facts.source) if facts is not None else ():
        checks.of("training options").from_error(error)


def _check_spelling(hf_config: dict[str, Any], checks: Checklist) -> None:
    hf_config = standard_config(hf_config)
    known = hf_config.get("model_type") in ARCHITECTURES
    for key, fix in unknown_keys(hf_config) if known else ():
        checks.fail(
            f"model.hf_config.{key}",
            f"transformers' {hf_config['model_type']} does not read this key, so it has no effect",
            found=functools.reduce(lambda section, name: section[name], key.split("."), hf_config),
            fix=fix,
        )
    ignored = ignored_keys(hf_config) if known else []
    if ignored:
        checks.warn(
            "model.hf_config",
            f"transformers' {hf_config['model_type']} does not read these keys, so they have no effect",
            found=ignored,
            fix="remove them",
        )


def _check_tokenizer(model: ModelConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    name = model.tokenizer
    if name is None:
        if model.path is None:
            checks.fail(
                "model.tokenizer",
                "a randomly initialised model needs a tokenizer",
                found="null",
                allowed="a folder, a hub name, chars:<alphabet>, or words:<word> ...",
                fix="set model.tokenizer, for example to 'chars:0123456789+='",
            )
        elif (folder := Path(model.path).expanduser()).is_dir():
            _check_tokenizer_files(folder, "model.path", checks)
        return
    if name.startswith((CHARS, WORDS)):
        with checks.recorded():
            _check_vocabulary(name, facts, checks)
    elif Path(name).expanduser().is_dir():
        _check_tokenizer_files(Path(name).expanduser(), "model.tokenizer", checks)
    elif not is_hub_name(name):
        checks.fail(
            "model.tokenizer",
            "tokenizer folder not found",
            found=name,
            allowed="a folder, a hub name, chars:<alphabet>, or words:<word> ...",
            fix=relative_path_fix(),
        )
    elif hub_cache_folder(name) is None:
        checks.skip(f"{name} is a hub name that is not in the local cache")


def _check_tokenizer_files(folder: Path, key: str, checks: Checklist) -> None:
    checks = checks.of("tokenizer")
    if checks.failed(key):  # an error about this folder is recorded already
        return
    with checks.recorded():
        check_tokenizer_files(folder, key)
        checks.ok(str(folder))


def _check_vocabulary(name: str, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that the model's vocabulary has all tokens of a tokenizer written out in the recipe."""
    tokens, special = written_tokens(name), len(SPECIAL_TOKENS)
    tokens_text, needed = count(len(tokens), "word" if name.startswith(WORDS) else "character"), len(tokens) + special
    if facts is not None and facts.vocab < needed:
        checks.of("vocabulary").fail(
            "model.hf_config.vocab_size",
            f"the model's vocabulary is smaller than the tokenizer's ({tokens_text} + {special} special)",
            found=facts.vocab,
            allowed=f"integer >= {needed}",
            fix=f"set model.hf_config.vocab_size={needed}",
        )
    else:
        checks.ok(f"{tokens_text} + {special} special tokens")


def check_data(config: RunConfig, job: str, checks: Checklist) -> None:
    """Check every source of rows that `job` (train, sft, eval, generate) needs."""
    checks = checks.of("data")
    data, examples = config.data, config.sft.train_files or []
    needed = "train_files" if job in ("train", "sft") else "val_files"
    found_here = data.train_files if needed == "train_files" else data.held_out
    if not found_here and not (job == "sft" and examples):
        checks.fail(
            f"data.{needed}",
            "training data is missing" if needed == "train_files" else "held-out prompts are missing",
            found=[],
            allowed="files, folders, hub names org/name@split, or pkg.mod:fn",
            fix=f"set data.{needed}, for example to [{needed.partition('_')[0]}.jsonl]",
        )
    _check_held_out(config, checks)
    sources_by_key = {"data.val_files": data.val_files}
    if job in ("train", "sft") or data.val_split is not None:
        sources_by_key = {"data.train_files": data.train_files} | sources_by_key
    if trains_supervised(config, job):
        sources_by_key["sft.train_files"] = examples
    for key, sources in sources_by_key.items():
        for source in sources:
            check_source(source, key, checks)


def _check_held_out(config: RunConfig, checks: Checklist) -> None:
    """Check `data.val_split`, and warn when held-out prompts are also trained on; not for data functions, which get the
    name of their split.
    """
    data = config.data
    _check_split(config, checks)
    trained = {_same(source) for source in [*data.train_files, *(config.sft.train_files or [])]}
    both = [source for source in data.val_files if _same(source) in trained and not is_module_reference(source)]
    if both and config.task.writes_text:
        checks.warn(
            "data.val_files",
            "these held-out prompts are also trained on, so validation does not measure generalisation",
            found=both,
            fix="hold rows out, and name them here",
        )


def _check_split(config: RunConfig, checks: Checklist) -> None:
    """Check that rows can be held out by `data.val_split`."""
    data, examples = config.data, config.sft.train_files
    if data.val_split is None:
        return
    problem = None
    if data.val_files:
        problem = (
            "held-out prompts are already named in data.val_files",
            "set data.val_split=null, or data.val_files=[]",
        )
    elif config.task.split_problem is not None:
        problem = (config.task.split_problem, "remove it")
    elif examples and data.val_split >= 1:
        problem = ("examples of sft.train_files cannot be held out by a number", "name a share, such as 0.05")
    elif data.val_split > 1 and data.val_split != int(data.val_split):
        problem = ("neither a share nor a whole number of prompts", f"set data.val_split={int(data.val_split)}")
    if problem is not None:
        checks.fail("data.val_split", problem[0], found=f"{data.val_split:g}", fix=problem[1])


def _same(source: str) -> str:
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def trains_supervised(config: RunConfig, job: str) -> bool:
    """Return whether `job` (train, sft, eval, generate) trains on examples: `megarl sft`, or a cold start."""
    return job == "sft" or (job == "train" and config.sft.steps > 0)


def check_source(source: str, key: str, checks: Checklist) -> None:
    """Check that a source of rows, given at `key`, is a data file, a folder of them, a function or a hub name."""
    if source.startswith(TEXT):
        checks.ok(f"{key}: one prompt")
        return
    path = Path(source).expanduser()
    if path.is_file() and path.suffix.lower() not in SUFFIXES:
        fix = unknown_form_fix(path)
        checks.fail(key, "unknown format of a data file", found=source, allowed=SUFFIXES, fix=fix)
    elif path.is_dir() and (error := other_forms(path, key)) is not None:
        checks.from_error(error)
    elif path.is_dir() and not files_of_folder(path):
        checks.fail(key, "the folder has no data file", found=source, allowed=SUFFIXES, fix="check the folder's name")
    elif is_special(path):
        checks.from_error(special_source(source, key))
    elif path.exists() or Path(source.rpartition("@")[0] or "?").expanduser().is_dir():
        checks.ok(f"{key}: {source}")
    elif is_module_reference(source):
        check_function(source, key, checks)
    elif path.suffix.lower() in SUFFIXES or not HUB.fullmatch(source) or any(map(Path.is_file, path.parents)):
        close = close_sources(path)
        checks.fail(
            key,
            "file or folder not found",
            found=source,
            allowed=f"{', '.join(SUFFIXES)} files, folders, hub names org/name@split, or pkg.mod:fn",
            fix=f"did you mean {path.parent / close[0]}?" if close else relative_path_fix(),
        )
    else:
        checks.skip(f"{key}: {source} is not a local path: taken as a hub name")


def check_reward(config: RunConfig, checks: Checklist) -> None:
    """Check the rewards' names or functions, their arguments and their parts, as far as these can be read from source
    code.
    """
    checks = checks.of("reward")
    with checks.recorded():
        raise_part_problems(config.reward)
        for place, reward in functions_of(config).items():
            _check_function(config, place, reward, checks)
        if config.reward.parts and "reward_parts" in estimator_fields(config.algorithm):
            _check_weighted_parts(config, checks.of("reward parts"))


def check_reward_is_named(config: RunConfig, job: str, roles: Roles, checks: Checklist) -> None:
    """Warn if the default reward scores samples because no recipe file or override names a reward."""
    named = any(key.startswith(("reward.name", "reward.parts")) for key in config.given)
    named = named or (bool(config.policies) and config.policy_rewards.keys() == config.policies.keys())
    scores = bool(config.data.held_out) or (job == "train" and (roles is None or Role.REWARD in roles))
    if not config.given or named or not scores or not uses_reward(config):
        return
    checks.of("reward").warn(
        "reward.name",
        f"the recipe names no reward, so {config.reward.name} is used: the whole response has to be the answer",
        fix=f"set reward.name: {', '.join(REWARDS.names())}, or file.py:function",
    )


def _check_function(config: RunConfig, place: str, reward: RewardConfig, checks: Checklist) -> None:
    """Check the reward function that the recipe's section `place` names."""
    name, included = reward.name, reward.name in REWARDS.names()
    key, whole = f"{place}.name", place == "reward"
    if included or is_file_reference(name) or is_module_reference(name):
        tree = None
        with checks.recorded():
            with located(place):
                if included:
                    _check_text(name, reward)
                    _check_deadline(reward_settings(name, reward.kwargs, REWARDS.spec(name)), reward)
                else:
                    tree = check_reference(name, "reward.name")
                    if tree is not None:
                        check_reward_kwargs(tree, name, reward.kwargs)
                        signature = signature_of(tree, name)
                        if signature is not None and not gives_images(config):
                            refuse_images(name, signature, reward.kwargs)
            use = "" if uses_reward(config) else ", which scores only if the environment sets scores = False"
            checks.ok((name if whole and included else f"{key}: {name}") + use)
            if whole and "reward_parts" in estimator_fields(config.algorithm):
                _check_parts(config, strings(tree) if tree is not None else None, checks.of("reward parts"))
    else:
        missing_function = name.endswith(".py")
        checks.fail(
            key,
            "the name of the function in the file is missing" if missing_function else "unknown reward",
            found=name,
            allowed=[*REWARDS.names(), "file.py:function", "pkg.mod:fn"],
            fix=f"write {name}:function"
            if missing_function
            else method_fix(name, REWARDS.names()) or f"set {key} to one of these",
        )


def _check_text(name: str, reward: RewardConfig) -> None:
    """Refuse special tokens in the responses of a built-in reward that would count them as part of the answer."""
    if REWARDS.spec(name).whole and not reward.skip_special_tokens:
        raise ConfigError(
            f"{name} reads whole responses, so it would find every response wrong that ends with a special token",
            where="reward.skip_special_tokens",
            found="false",
            allowed="true with this reward; false with functions that search in the text",
            fix="set reward.skip_special_tokens: true, or compare in a function of yours",
        )


def _check_deadline(settings: Settings, reward: RewardConfig) -> None:
    """Refuse a deadline of requests that is not below the deadline of the whole batch of rewards."""
    deadline = getattr(settings, "deadline_s", None)
    if deadline is not None and deadline >= reward.timeout_s:
        raise ConfigError(
            "the request deadline must be shorter than the reward timeout",
            where="reward.kwargs.deadline_s",
            found=f"{deadline:g}",
            allowed=f"seconds below reward.timeout_s, which is {reward.timeout_s:g}",
            fix=f"set reward.timeout_s={deadline + 60:g}",
        )


def _check_weighted_parts(config: RunConfig, checks: Checklist) -> None:
    """Check that the recipe has the parts to which the estimator gives weights."""
    known = {"overall", *config.reward.parts}
    missing = [name for name in config.algorithm.advantage.parts if name.partition("/")[0] not in known]
    if missing:
        checks.of("reward parts").fail(
            "algorithm.advantage.parts",
            "no part of the reward has this name" if len(missing) == 1 else "no parts of the reward have these names",
            found=missing,
            allowed=", ".join(config.reward.parts),
            fix="name parts of reward.parts; NAME/PART is what the function of one returns",
        )


def _check_parts(config: RunConfig, names: set[str] | None, checks: Checklist) -> None:
    """Check the parts that the estimator weighs. `names` are the parts that the reward may return according to its
    source code; None if they are unknown.
    """
    reward, key = config.reward.name, "algorithm.advantage.parts"
    parts = [name for name in config.algorithm.advantage.parts if name != "overall"]
    if reward in REWARDS.names() and parts:
        checks.fail(
            key,
            f"the reward {reward} returns one number, overall, and no parts",
            found=parts,
            allowed="parts that the reward function returns",
            fix="write a reward function that returns them, and name it: reward.name=file.py:function",
        )
    missing = [name for name in parts if names is not None and name not in names]
    if reward not in REWARDS.names() and missing:
        checks.warn(
            key,
            f"the source code of {reward} does not contain {'this name' if len(missing) == 1 else 'these names'}",
            found=missing,
            fix="name parts that the reward function returns for every sample",
        )


def check_other_models(
    config: RunConfig, roles: Roles, facts: ModelFacts | None, checks: Checklist
) -> dict[Role, ModelFacts | None]:
    """Check the files of reference, critic, teacher, reward model and further models if they are on this machine.
    `facts` are the policy's sizes.

    Returns:
        The sizes of each role's model (of the largest teacher, if there are several); None if they are unknown here.
    """
    sizes: dict[Role, ModelFacts | None] = {}
    teachers: dict[str, str | None] = {**config.teacher.paths} or {"teacher.path": None}
    for work, key, path in (
        (Role.REFERENCE, "reference.path", config.reference.path),
        (Role.CRITIC, "critic.path", config.critic.path),
        *((Role.TEACHER, key, path) for key, path in teachers.items()),
        (Role.REWARD_MODEL, "reward_model.path", config.reward_model.path),
        *((Role(name), f"models.{name}.path", further.path) for name, further in config.models.items()),
    ):
        largest = sizes.get(work)
        sizes[work] = facts if path is None else largest
        if path is None or (roles is not None and work not in roles):
            continue
        role = work.value
        try:
            model = model_facts(ModelConfig(path=path, freeze=config.model.freeze))
        except ConfigError as error:
            where = error.where if error.where != "model.path" else key
            checks.of(role).from_error(as_config_error(error, where=where))
            continue
        if model is None:
            checks.of(role).skip(f"{path} is not a folder here and is not in the local hub cache: taken as a hub name")
            continue
        sizes[work] = max(filter(None, (largest, model)), key=lambda one: one.parameters)
        if role == "critic" or (role in config.models and config.models[role].train):
            check_only_in_training(model, checks)
        if work is Role.REWARD_MODEL:
            fits = _is_reward_model(key, model, facts if config.reward_model.form == "tokens" else None, checks)
        else:
            fits = _fits_the_policy(role, key, model, facts, checks)
        if fits:
            checks.of(role).ok(f"{model.source}: {model.model_type}, {model.parameters:,} parameters")
            check_local_weights(role, path, model, checks)
    return sizes


def _fits_the_policy(role: str, key: str, found: ModelFacts, policy: ModelFacts | None, checks: Checklist) -> bool:
    """Return whether a model's vocabulary has the size of the policy's, or more for padding; a critic must also return
    one value per token.
    """
    checks = checks.of(role)
    if role == "critic" and found.labels not in (None, 1):
        checks.fail(
            "critic.path",
            "this classifier returns several numbers per token, but a critic returns one",
            found=f"{found.labels} labels",
            allowed="a language model, or a classifier with one label",
            fix="train a classifier with num_labels=1, or remove critic.path to start the critic from the policy",
        )
        return False
    if policy is None or 0 <= found.vocab - policy.vocab <= _PADDING:
        return True
    why = "distillation compares token by token" if role == "teacher" else "both read the same tokens"
    other_form = " (or set reward_model.form=chat or text)" if role == "reward_model" else ""
    checks.fail(
        key,
        f"{role} and policy have different vocabularies, but {why}",
        found=f"{found.vocab} tokens",
        allowed=f"{policy.vocab} tokens, and up to {_PADDING} more that pad the {role}'s embedding",
        fix=f"choose a {role} with the policy's tokenizer, and with as large a vocab_size{other_form}",
    )
    return False


def _is_reward_model(key: str, found: ModelFacts, policy: ModelFacts | None, checks: Checklist) -> bool:
    """Return whether this model is a reward model with one score, and has the vocabulary of `policy` (None: any
    vocabulary).
    """
    role = Role.REWARD_MODEL.value
    if found.labels == 1:
        return _fits_the_policy(role, key, found, policy, checks)
    checks.of(role).fail(
        key,
        "this is not a classifier, so it has no score"
        if found.labels is None
        else "this classifier returns several numbers",
        found=found.source if found.labels is None else f"{found.labels} labels",
        allowed="a ...ForSequenceClassification with one label",
        fix="name a reward model, such as the result of algorithm.pipeline=reward_model",
    )
    return False


def check_places(config: RunConfig, checks: Checklist) -> None:
    """Check the folder of the checkpoint to resume from, the folder of runs, and the run's name."""
    resume = config.trainer.resume
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        checks.of("resume").fail(
            "trainer.resume",
            "checkpoint folder not found",
            found=resume,
            allowed="auto, never, or a checkpoint folder",
            fix="use auto to resume from the newest complete checkpoint of this run",
        )
    elif resume not in ("auto", "never") and not (Path(resume).expanduser() / "meta.json").is_file():
        inside = sorted(Path(resume).expanduser().glob("**/step_*/meta.json"), key=lambda file: file.stat().st_mtime)
        checks.of("resume").fail(
            "trainer.resume",
            "this folder is not a complete checkpoint: it has no meta.json",
            found=resume,
            allowed="auto, never, or RUN_DIR/checkpoints/step_N",
            fix=f"did you mean {inside[-1].parent}?" if inside else "name the folder of one step",
        )
    if Path(config.tracking.dir).is_file():
        checks.of("run folder").fail(
            "tracking.dir",
            "this is a file, but run folders are created below it",
            found=config.tracking.dir,
            fix="name a folder",
        )
    if Path(config.name).name != config.name or config.name in ("", ".", ".."):
        last = Path(config.name).name
        checks.of("run folder").fail(
            "name",
            "the run's name is not a valid folder name, but its folder gets this name",
            found=config.name,
            allowed="text without slashes, other than . and ..",
            fix=f"set name={'my_run' if last in ('', '..') else last}",
        )


def check_chat_template(config: RunConfig, checks: Checklist) -> None:
    """Check the chat template, and record whether prompts go through it, which changes the model's input."""
    checks = checks.of("chat template")
    data, brings = config.data, brings_chat_template(config.model)
    if data.override_chat_template is not None:
        key = "data.override_chat_template"
        with checks.recorded():
            text = read_template(data.override_chat_template, key)
            parse_chat_template(text, key)
            check_template_kwargs(text, data.chat_template_kwargs)
            checks.ok(key)
    elif brings is None:
        checks.skip("known when the tokenizer is here")
    elif uses_chat(data, brings):
        with checks.recorded():
            template = chat_template_of(config.model)
            if template is not None:
                check_template_kwargs(template, data.chat_template_kwargs)
            checks.ok("the tokenizer's, around every prompt")
        if template is None and data.chat_template_kwargs:
            checks.skip("data.chat_template_kwargs: which variables it reads is known when the run starts")
    elif brings and config.model.named_base:
        checks.ok("none: model.path names a base model; data.chat_template=true uses the tokenizer's")
    elif brings:
        checks.ok("none; the tokenizer's is not used")


def check_end_tokens(config: RunConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check that the ids of the model's end tokens can be read and are in its vocabulary."""
    checks = checks.of("end tokens")
    folder = None if config.model.path is None else local_folder(config.model.path)
    if folder is None or not (folder / GENERATION_CONFIG).is_file():
        return
    with checks.recorded():
        ids = end_token_ids(folder)
        if facts is not None and any(token >= facts.vocab for token in ids):
            raise ConfigError(
                "this end token is not in the vocabulary",
                where=f"{folder / GENERATION_CONFIG}: eos_token_id",
                found=[token for token in ids if token >= facts.vocab],
                allowed=f"0 to {facts.vocab - 1}",
                fix="correct it, or copy or download the model again",
            )
        names = ", ".join(map(str, ids)) or "none"
        checks.ok(f"{names} of {GENERATION_CONFIG}, the tokenizer's, and that of the chat template")
