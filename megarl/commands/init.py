"""`megarl init`: write a commented recipe for a model, data and a reward, with a layout that passes the checks."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.engines import DEFAULT, ENGINES
from megarl.system.errors import ConfigError, UserError, count
from megarl.system.machine import Machine, this_machine

if TYPE_CHECKING:
    from megarl.artifacts.facts import ModelFacts
    from megarl.checks.recipe import Checked
    from megarl.config.model import ParallelConfig
    from megarl.config.run import RunConfig
    from megarl.data.rows import Row

_MODEL = "Qwen/Qwen3-0.6B"
_NODE = 8  # GPUs per machine
_GPU_GB = 80.0
_SLOW_S = 120.0  # seconds of a step on a CPU above which a smaller model is suggested, because a run would take hours
_PROMPTS = ("messages", "prompt", "question", "problem", "instruction", "query", "input")
_ANSWERS = ("answer", "solution", "ground_truth", "reward_model.ground_truth", "target", "label", "output", "response")
#: Columns of rows that algorithms without a reward learn from.
_LEARNT = {"dpo": ("chosen", "rejected"), "kto": ("completion", "label")}
_NUMBER = re.compile(r"\s*[-+]?[\d,]*\.?\d+\s*")
#: Data sources when the command names none: prompts, and pairs of responses.
_PROBLEMS, _PAIRS = "megarl.recipes.word_problems:make_rows", "megarl.recipes.arithmetic:make_pairs"

_Settings = dict[str, Any]
#: Dotted keys that select each algorithm.
ALGORITHMS: Mapping[str, _Settings] = {
    "grpo": {"algorithm.pipeline": "grpo"},
    "dapo": {
        "algorithm.pipeline": "dapo",
        "algorithm.loss.clip_high": 0.28,
        "algorithm.loss.aggregation": "token-mean",
        "algorithm.dynamic_sampling.enabled": True,
        "algorithm.overlong.buffer_tokens": 128,
    },
    "ppo": {
        "algorithm.pipeline": "ppo",
        "algorithm.advantage.name": "gae",
        "rollout.sampling.n": 1,
        "critic.optim.lr": 1e-5,
        "critic.warmup_steps": 5,
    },
    "dr_grpo": {
        "algorithm.pipeline": "grpo",
        "algorithm.advantage.norm_by_std": False,
        "algorithm.loss.aggregation": "seq-mean-token-sum-norm",
    },
    "gspo": {
        "algorithm.pipeline": "grpo",
        "algorithm.loss.name": "gspo",
        "algorithm.loss.clip_low": 3e-4,
        "algorithm.loss.clip_high": 4e-4,
        "algorithm.loss.aggregation": "seq-mean-token-mean",
    },
    "rloo": {"algorithm.pipeline": "grpo", "algorithm.advantage.name": "rloo"},
    "reinforce_pp": {"algorithm.pipeline": "grpo", "algorithm.advantage.name": "reinforce_pp"},
    "dpo": {"algorithm.pipeline": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.1},
    "kto": {"algorithm.pipeline": "kto", "preference.loss": "kto", "preference.beta": 0.1},
    "reward_model": {"algorithm.pipeline": "reward_model", "preference.loss": "bradley_terry"},
}
#: Comments written after keys whose names do not explain them.
_COMMENTS = {
    "model.path": "Hugging Face folder or hub name",
    "model.dtype": "bf16, fp32, or auto: the fastest on this processor",
    "algorithm.pipeline": "the task graph: grpo, dapo, ppo, dpo, kto, reward_model, or file.py:fn",
    "algorithm.advantage.name": "how scores become advantages",
    "algorithm.loss.clip_low": "how far a ratio may fall below 1",
    "algorithm.loss.clip_high": "how far a ratio may rise above 1",
    "algorithm.loss.aggregation": "how the losses of tokens are combined",
    "algorithm.loss.sum_norm": "divisor of sums over tokens",
    "algorithm.dynamic_sampling.enabled": "replace groups whose samples all have the same score",
    "algorithm.overlong.buffer_tokens": "responses that end this close to the limit get a small penalty",
    "preference.beta": "weight of a log-ratio to the reference",
    "data.train_files": "jsonl, json, csv, parquet files, folders, hub names, pkg.mod:fn",
    "data.val_files": "held-out rows, never trained on",
    "data.prompt_key": "column of the prompt: text, or chat messages",
    "data.answer_key": "column of the reference answer, for the reward",
    "data.max_prompt_tokens": "longer prompts are left out",
    "reward.name": "a built-in reward, or file.py:function of yours",
    "reward.kwargs.extract": "which number of the response counts: whole, first, last",
    "rollout.engine": "embedded: on the training weights; sglang: on servers",
    "rollout.replay_routes": "training uses the experts that generation chose",
    "rollout.sampling.n": "samples per prompt",
    "rollout.sampling.max_new_tokens": "maximum tokens of a response",
    "rollout.sglang.servers": "number of servers, with tp_size GPUs each",
    "rollout.sglang.colocated": "servers use the training GPUs",
    "rollout.sglang.memory_fraction": "share of a GPU for a server's weights and cache",
    "validation.every": "steps",
    "actor.parallel.tp": "GPUs that share each layer",
    "actor.parallel.sp": "also share the activations between these GPUs",
    "actor.parallel.pp": "stages of layers, one GPU after another",
    "actor.parallel.ep": "GPUs that share the experts",
    "actor.engine.micro_batch_tokens": "tokens in one pass: more is faster and needs more memory",
    "actor.engine.recompute": "full: less memory, a third more compute",
    "actor.engine.offload": "training state moves to host memory while servers generate",
    "actor.optim.lr": "peak learning rate",
    "actor.optim.warmup_steps": "steps until the peak",
    "critic.optim.lr": "the critic learns faster than the policy",
    "critic.warmup_steps": "first steps, in which only the critic learns",
    "trainer.steps": "or epochs: passes over the data",
    "trainer.save_every": "steps between checkpoints",
    "cluster.nproc": "number of processes, one per device",
    "cluster.nnodes": "machines",
    "cluster.device_memory_gb": "GB per GPU, against which checks compare the estimate",
}
#: Comments on keys that count samples; the unit depends on the algorithm.
_COUNTS = {
    "data.batch_size": "{} per step, over all devices",
    "data.max_val_samples": "maximum number of held-out {} per validation",
}
# other algorithms count prompts
_SAMPLES = {"kto": "examples", "reward_model": "pairs", "dpo": "pairs", "sft": "examples"}
_LORA = ("model.lora", "train adapters in place of all weights: {rank: 16, alpha: 32}")
_LOGGERS = ("tracking.loggers", "[wandb], [tensorboard], [trackio]")
_LIMIT = ("preference.max_tokens", "longer sequences (prompt and response) are left out")
_GENERATING = (
    ("algorithm.kl", "penalise distance from the first policy: {use: loss, coef: 0.001}"),
    ("data.format_prompt", 'a template around each prompt: "{{ content }}\\nEnd with the answer after ####."'),
    ("validation.sampling.n", "several responses per held-out prompt"),
)
#: Keys that users often set next, by algorithm; other algorithms use `_GENERATING`.
_NEXT = {
    "kto": (
        ("preference.desirable_weight", "weight of desirable examples, when there are fewer of them"),
        ("preference.completion_key", "column of the response; preference.label_key names the column of its label"),
        _LIMIT,
    ),
    "reward_model": (
        ("preference.margin_key", "column of the smallest difference between the scores of a pair"),
        ("preference.center_coef", "keep scores near 0: 0.01"),
        _LIMIT,
    ),
    "dpo": (
        ("preference.label_smoothing", "assumed share of pairs with a wrong label"),
        ("preference.sft_coef", "weight of a supervised term on the chosen responses"),
        ("preference.chosen_key", "column of the better response; preference.rejected_key names the worse one"),
        _LIMIT,
    ),
    "sft": (
        ("sft.max_tokens", "longer sequences (prompt and response) are left out"),
        ("sft.eval_every", "steps between validations"),
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl init`."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the recipe to write, for example my_run.yaml")
    parser.add_argument("--algorithm", choices=tuple(ALGORITHMS), help="default: grpo")
    parser.add_argument(
        "--model", help=f"folder or hub name of a supported model, see docs/models.md (default: {_MODEL})"
    )
    other = "file with settings of TRL, verl or NeMo-RL to translate: YAML or JSON, or a text file with a command line"
    parser.add_argument("--from", dest="source", metavar="FILE", type=Path, help=other)
    kinds = "jsonl, json, csv, parquet file, folder, hub name org/name@split or pkg.mod:fn"
    parser.add_argument("--data", help=f"{kinds} (default: invented word problems)")
    parser.add_argument("--val", help="held-out rows, in the same forms")
    for name in ("prompt", "answer"):
        text = f"column of the {name} (default: found by its usual names)"
        parser.add_argument(f"--{name}-key", metavar="COLUMN", help=text)
    text = "a built-in reward or file.py:function (default: chosen by the answers in the data)"
    parser.add_argument("--reward", help=text)
    parser.add_argument("--engine", choices=tuple(ENGINES), default=DEFAULT, help="of generation")
    text = "GPUs over all machines; 0: run on the CPU (default: one GPU if there is one)"
    parser.add_argument("--gpus", type=int, help=text)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the recipe, then raise the errors that its dry run would report; return the exit code."""
    from megarl.artifacts.facts import model_facts
    from megarl.checks.checklist import problems_of
    from megarl.checks.rows import check_rows
    from megarl.config.base import raise_problems
    from megarl.config.model import ModelConfig

    file = arguments.file if arguments.file.suffix in (".yaml", ".yml") else Path(f"{arguments.file}.yaml")
    if file.exists():
        fix = "name another file, or remove this one"
        raise UserError("the file already exists", where="megarl init", found=str(file), fix=fix)
    if arguments.gpus is not None and arguments.gpus < 0:
        raise ConfigError(
            "the number of GPUs is negative",
            where="--gpus",
            found=arguments.gpus,
            allowed="0 (the CPU) or more",
            fix="leave --gpus out to use a GPU if there is one",
        )
    machine = this_machine()
    if arguments.source is not None:
        if arguments.algorithm is not None:
            problem, fix = "--from takes the algorithm from the settings that it translates", "leave out one of the two"
            raise ConfigError(problem, where="--algorithm", found=arguments.algorithm, fix=fix)
        return _run_from(arguments, file, machine)
    arguments.algorithm = arguments.algorithm or "grpo"
    arguments.model = arguments.model or _MODEL
    gpus = int(machine.has_gpu) if arguments.gpus is None else arguments.gpus
    facts = model_facts(ModelConfig(path=arguments.model))
    settings = _settings(arguments, gpus)
    if facts is not None and facts.is_moe and "rollout.engine" in settings:
        settings["rollout.replay_routes"] = True
    layouts = _layouts(gpus, arguments.engine, machine, facts)
    if not layouts:
        raise _uneven(gpus)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        config, checked = _write_first_fit(file, arguments, settings, layouts, machine)
        problems = problems_of(checked.items)
        # if anything else fails, the file may have a layout that was not chosen for its memory: leave that check out
        raise_problems(problems_of([check for check in checked.items if check.name != "memory"]))
    # on an error, such as an unknown reward, remove the recipe: the corrected command refuses to overwrite a file
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    devices = count(gpus, "GPU") if gpus else "the CPU"
    print(f"wrote {file}: {arguments.algorithm} of {arguments.model} on {devices}")
    _print_time(checked, gpus)
    raise_problems(problems)
    check_rows(config, "train")
    print(f"  megarl train {file} --dry-run    every check; starts nothing\n  megarl train {file}")
    return 0


def _run_from(arguments: argparse.Namespace, file: Path, machine: Machine) -> int:
    """Write a recipe for the settings of another trainer, check it and print the commands that run it.

    The recipe stays on disk if a check fails, because its data or model may be on another machine.
    """
    from megarl.checks.rows import check_rows
    from megarl.commands.init_from import settings_from, write_fitting
    from megarl.config.base import raise_problems

    made = settings_from(arguments, machine, _PROMPTS, _ANSWERS)
    arguments.algorithm, arguments.model = made.algorithm, made.settings["model.path"]
    job = "sft" if made.algorithm == "sft" else "train"
    file.parent.mkdir(parents=True, exist_ok=True)
    config, problems = write_fitting(
        file, made, lambda settings: _recipe_text(file, arguments, dict(settings)), machine
    )
    left_out = f", with {count(len(made.notes), 'setting')} left out; the reasons are at its end" if made.notes else ""
    print(f"wrote {file}: {made.algorithm} of {arguments.model}, from settings of {made.trainer}{left_out}")
    raise_problems(problems)
    check_rows(config, job)
    print(f"  megarl {job} {file} --dry-run    every check; starts nothing\n  megarl {job} {file}")
    return 0


def _write_first_fit(
    file: Path, arguments: argparse.Namespace, settings: _Settings, layouts: Sequence[_Settings], machine: Machine
) -> tuple[RunConfig, Checked]:
    """Write the recipe with the first layout that passes the checks without a warning of memory, or else with the last
    one that has no problem but memory; return it and the checks.
    """
    from megarl.checks.recipe import check_config
    from megarl.config.load import load_config
    from megarl.recipes.components import COMPONENTS

    written: tuple[str, RunConfig, Checked] | None = None
    for layout in layouts:
        text = _recipe_text(file, arguments, settings | layout)
        file.write_text(text, encoding="utf-8")
        config = load_config(file, components=COMPONENTS)
        checked = check_config(config, launcher=config.launch.launcher, machine=machine)
        problems = [check for check in checked.items if check.status == "fail"]
        if written is None or all(check.name == "memory" for check in problems):
            written = text, config, checked
        if not problems and not any(check.status == "warn" and check.name == "memory" for check in checked.items):
            break
    assert written is not None, "at least one layout was tried"
    text, config, checked = written
    file.write_text(text, encoding="utf-8")
    return config, checked


def _print_time(checked: Checked, gpus: int) -> None:
    """Print the estimated time of a step and of the run; suggest a smaller model for slow steps on the CPU."""
    from megarl.artifacts.facts import SMALL_MODEL

    for check in checked.items:
        if check.name == "time" and check.status in ("ok", "warn"):
            print(f"  {'WARNING: ' if check.status == 'warn' else ''}{check.message}")
    if not gpus and checked.step_s is not None and checked.step_s > _SLOW_S:
        text = "a model for CPUs: make smollm2 (135 million parameters), then the same command with --model"
        print(f"{text} {SMALL_MODEL}")


def _uneven(gpus: int) -> UserError:
    even = [number for number in range(gpus - _NODE, gpus + _NODE) if not number % math.ceil(number / _NODE)]
    fewer, more = max(n for n in even if n < gpus), min(n for n in even if n > gpus)
    return UserError(
        f"the number of GPUs does not divide evenly over the {math.ceil(gpus / _NODE)} machines of {_NODE} GPUs that "
        "it takes",
        where="--gpus",
        found=gpus,
        allowed=f"up to {_NODE}, or equally many on every machine",
        fix=f"--gpus {fewer} or --gpus {more}",
    )


def _settings(arguments: argparse.Namespace, gpus: int) -> _Settings:
    chosen = ALGORITHMS[arguments.algorithm]
    settings: _Settings = {"model.path": arguments.model, "model.dtype": "bf16" if gpus else "fp32"}
    pairs = any(key.startswith("preference.") for key in chosen)
    settings |= _data_settings(arguments, pairs=pairs)
    named = {"data.prompt_key": arguments.prompt_key, "data.answer_key": arguments.answer_key}
    settings |= {key: column for key, column in named.items() if column is not None}
    settings |= {"data.max_prompt_tokens": 512}
    lr = 1e-6 if not pairs else 1e-5 if arguments.algorithm == "reward_model" else 5e-7
    if not pairs:
        tokens = 1024 if gpus else 256
        settings |= {"rollout.engine": arguments.engine, "rollout.sampling.n": 8}
        settings |= {"rollout.sampling.temperature": 1.0, "rollout.sampling.max_new_tokens": tokens}
        if chosen.get("algorithm.loss.aggregation") == "seq-mean-token-sum-norm":
            settings |= {"algorithm.loss.sum_norm": tokens}
    settings |= {"actor.optim.lr": lr, "actor.optim.schedule": "linear", "actor.optim.warmup_steps": 5}
    settings |= {"trainer.steps": 100, "trainer.save_every": 20}
    if "data.val_files" in settings:
        settings |= {"data.max_val_samples": 256, "validation.every": 10}
    return settings | chosen


def _data_settings(arguments: argparse.Namespace, *, pairs: bool) -> _Settings:
    """Return the keys of data and reward: columns found by their usual names, and a reward that fits the answers."""
    from megarl.checks.rows import is_readable_here
    from megarl.data.sources import load_rows

    if arguments.data is None:
        source = _PAIRS if pairs else _PROBLEMS
        settings: _Settings = {"data.train_files": [source], "data.val_files": [arguments.val or source]}
        if pairs:
            return settings
        settings |= {"data.prompt_key": "messages", "reward.name": arguments.reward or "numeric"}
        return settings | ({} if arguments.reward else {"reward.kwargs.extract": "last"})
    _check_sources({"--data": arguments.data, "--val": arguments.val})
    settings = {"data.train_files": [arguments.data]}
    settings |= {"data.val_files": [arguments.val]} if arguments.val else {}
    if pairs:
        return settings
    rows = load_rows(arguments.data) if is_readable_here(arguments.data) else []
    answers: list[Any] = []
    if rows:
        prompt = next((name for name in _PROMPTS if rows[0].has(name)), "prompt")
        answer = arguments.answer_key or next((name for name in _ANSWERS if rows[0].has(name)), None)
        settings |= {"data.prompt_key": prompt, "data.answer_key": answer}
        answers = answers_of(rows, settings)
    elif arguments.data.startswith("openai/gsm8k"):
        settings, answers = settings | {"data.prompt_key": "question"}, ["#### 1"]
    return settings | (
        {"reward.name": arguments.reward} if arguments.reward else reward_for(answers, list(rows[0]) if rows else [])
    )


def _check_sources(sources: Mapping[str, str | None]) -> None:
    """Refuse files and folders that do not exist. `sources` maps an option to its source of rows."""
    from megarl.checks.checklist import Checklist, problems_of
    from megarl.checks.files import check_source
    from megarl.config.base import raise_problems

    checks = Checklist(name="data")
    for option, source in sources.items():
        if source is not None:
            check_source(source, option, checks)
    raise_problems(problems_of(checks.items))


def answers_of(rows: Sequence[Row], settings: _Settings) -> list[Any]:
    """Return the answers of the first rows; an empty list when the rows lack the column `data.answer_key`."""
    answer = settings.get("data.answer_key")
    return [row.column(answer, "data.answer_key") for row in rows[:100] if answer and row.has(answer)]


def reward_for(answers: list[Any], columns: Sequence[str]) -> _Settings:
    """Return the keys of the built-in reward that reads answers of this form. Raise UserError if there are no
    answers.
    """
    from megarl.rewards import REWARDS

    texts = [str(answer) for answer in answers]
    if not texts:
        algorithm = next((name for name, needed in _LEARNT.items() if set(needed) <= set(columns)), None)
        pairs = f"--algorithm {algorithm}, which learns from {' and '.join(_LEARNT[algorithm])}; " if algorithm else ""
        if not columns:
            raise UserError(
                "no reward is given, and none can be chosen because there are no rows on this machine",
                where="--data",
                allowed=f"rows on this machine; or a reward: {', '.join(REWARDS.names())} or file.py:function",
                fix="give --reward my_reward.py:score, or download the data",
            )
        raise UserError(
            "no reward is given, and no column has a usual name for answers or that of --answer-key",
            where="--data",
            found=f"columns here: {', '.join(columns)}",
            allowed=f"a column {', '.join(_ANSWERS)}; or a reward: {', '.join(REWARDS.names())} or file.py:function",
            fix=f"give {pairs}--answer-key COLUMN, or --reward my_reward.py:score",
        )
    if all("####" in text for text in texts):
        return {"reward.name": "gsm8k"}
    if all(_NUMBER.fullmatch(text) for text in texts):
        return {"reward.name": "numeric", "reward.kwargs.extract": "last"}
    return {"reward.name": "math" if any("\\" in text or "$" in text for text in texts) else "exact_match"}


def _layouts(gpus: int, engine: str, machine: Machine, facts: ModelFacts | None) -> list[_Settings]:
    """Return layouts to try, the fastest first. Later layouts need less memory."""
    full: _Settings = {"actor.engine.recompute": "full"}
    if not gpus:
        cores = max(1, min(2, machine.cores))
        tries: list[tuple[int, int, _Settings]] = [(cores, 4096, {}), (cores, 1024, full), (1, 1024, full)]
        return [
            _batch(8, nproc) | {"actor.engine.micro_batch_tokens": tokens, "cluster.nproc": nproc} | saving
            for nproc, tokens, saving in tries
        ]
    layouts = []
    memory = round(machine.gpu_memory / 1e9, 1) if machine.has_gpu and machine.gpu_memory else _GPU_GB
    nodes = math.ceil(gpus / _NODE)
    for parallel in _splits(gpus, nodes, memory, facts):
        tp, pp, ep = parallel.tp, parallel.pp, parallel.ep
        for saving in ({}, full):
            layout: _Settings = _batch(64, gpus // (tp * pp))
            layout |= {"cluster.nproc": gpus, "cluster.device_memory_gb": memory}
            layout |= {"cluster.nnodes": nodes, "launch.launcher": "torchrun"} if nodes > 1 else {}
            layout |= {"actor.parallel.tp": tp, "actor.parallel.sp": True} if tp > 1 else {}
            layout |= {"actor.parallel.pp": pp} if pp > 1 else {}
            layout |= {"actor.parallel.ep": ep, "actor.parallel.etp": 1} if ep > 1 else {}
            if ENGINES[engine].servers is not None:
                layout |= {"rollout.sglang.servers": gpus // tp, "rollout.sglang.tp_size": tp}
                layout |= {"rollout.sglang.colocated": True, "rollout.sglang.memory_fraction": 0.6}
                layout |= {"actor.engine.offload": True}
            layouts.append(layout | {"actor.engine.micro_batch_tokens": 8192} | saving)
    return layouts


def _splits(gpus: int, nodes: int, memory: float, facts: ModelFacts | None) -> list[ParallelConfig]:
    """Return the divisions of a model to try, from few model-parallel ranks to many.

    Where the model's sizes are known, only those are returned that the model allows and whose state fits into the
    memory of a GPU in GB; the last one that the model allows if none fits.
    """
    from megarl.artifacts.layout import layout_problems, makes_replicas
    from megarl.config.model import ParallelConfig
    from megarl.config.training import EngineConfig
    from megarl.planning.shards import state_bytes

    if gpus % nodes:
        return []
    sizes = [
        (tp, pp, ep)
        for tp in (1, 2, 4, 8)
        for pp in ((1, 2, 4, 8, 16) if nodes > 1 else (1,))
        for ep in ((1, 8, 16, 32, 64) if facts is not None and facts.is_moe else (1,))
        if gpus // nodes % tp == 0
    ]
    splits = []
    for tp, pp, ep in sorted(sizes, key=lambda size: (size[0] * size[1], size)):
        parallel = ParallelConfig(tp=tp, pp=pp, ep=ep, etp=1 if ep > 1 else None, sp=tp > 1)
        allowed = facts is None or not layout_problems("actor.parallel", parallel, facts)
        if allowed and makes_replicas(gpus, parallel):
            splits.append(parallel)
    if facts is None:
        return splits
    engine = EngineConfig()

    def state(split: ParallelConfig) -> float:
        return sum(state_bytes(facts, split, engine, "bf16", gpus // split.model_parallel_size).values())

    return [split for split in splits if state(split) < memory * 1e9] or splits[-1:]


def _batch(prompts: int, replicas: int) -> _Settings:
    return {"data.batch_size": replicas * max(1, math.ceil(prompts / replicas))}


def _recipe_text(file: Path, arguments: argparse.Namespace, settings: _Settings) -> str:
    from megarl.config.fields import fields_of
    from megarl.config.run import RunConfig

    tree: dict[str, Any] = {}
    order = list(fields_of(RunConfig))  # sections in the order of docs/keys.md
    for path, value in sorted(settings.items(), key=lambda setting: order.index(setting[0].split(".")[0])):
        place = tree
        *above, name = path.split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[name] = value
    head = [
        f"# {arguments.algorithm} of {arguments.model}, written by `megarl init`.",
        "# Keys that are not here have their defaults: `megarl keys SECTION` lists them.",
        f"name: {_written(file.stem)}",
    ]
    samples = _SAMPLES.get(arguments.algorithm, "prompts")
    comments = _COMMENTS | {key: text.format(samples) for key, text in _COUNTS.items()}
    body = [line for section, keys in tree.items() for line in ["", f"{section}:", *_lines(keys, (section,), comments)]]
    more = [f"#   {key:<27} {text}" for key, text in (_LORA, *_NEXT.get(arguments.algorithm, _GENERATING), _LOGGERS)]
    return "\n".join([*head, *body, "", "# Often set next; megarl keys KEY explains each:", *more, ""])


def _lines(keys: Mapping[str, Any], path: tuple[str, ...], comments: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len(path)
    for name, value in keys.items():
        here = (*path, name)
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(value, here, comments)
            continue
        line, comment = f"{indent}{name}: {_written(value)}", comments.get(".".join(here))
        yield f"{line:<40}  # {comment}" if comment else line


def _written(value: Any) -> str:
    from megarl.config.yamlio import parse_value

    if isinstance(value, str):
        with contextlib.suppress(Exception):
            if parse_value(value) == value and parse_value(f"[{value}]") == [value]:
                return value
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(json.dumps(entry, ensure_ascii=False) for entry in value)}]"
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else json.dumps(value)
