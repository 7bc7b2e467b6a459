"""`megarl train`, `sft`, `eval` and `generate`: check the recipe, start the workers, and print how to continue
a run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.artifacts.pipes import refuse_pipes
from megarl.artifacts.records import read_run
from megarl.artifacts.run_folder import refuse_other_files
from megarl.artifacts.trained import steps_in
from megarl.rollout.families import family_of
from megarl.system.credentials import mask
from megarl.system.errors import ConfigError, UserError

if TYPE_CHECKING:
    from megarl.artifacts.trained import Which
    from megarl.checks.checklist import Checklist
    from megarl.config.run import RunConfig

# Command -> (entry point of its workers, help)
JOBS = {
    "train": (
        "megarl.recipes.entry:train",
        "train with the recipe's pipeline (RL or preferences), after its cold start",
    ),
    "sft": ("megarl.recipes.entry:sft", "supervised fine-tuning only"),
    "eval": ("megarl.recipes.entry:evaluate", "score the model on the held-out prompts"),
    "generate": ("megarl.recipes.entry:generate", "write responses to the held-out prompts"),
}
LAUNCHERS = ("local", "torchrun", "ray")


def add_job(parser: argparse.ArgumentParser, job: str) -> None:
    """Add the arguments of the command `job`."""
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="a recipe file or the name of a shipped one"
        + (", or a run folder, to use the model of that run" if job in ("eval", "generate") else ""),
    )
    parser.add_argument("overrides", metavar="KEY.PATH=VALUE", nargs="*", help="overrides of the recipe's values")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="how worker processes start (default: launch.launcher)")
    more = "; a run in it is continued" if job in ("train", "sft") else ""
    text = f"run folder, created when it is missing{more} (default: a new one below tracking.dir)"
    parser.add_argument("--run-dir", type=Path, help=text)
    text = "print configuration, graph, layout and checks, and stop"
    parser.add_argument("--dry-run", action="store_true", help=text)
    parser.add_argument("--full", action="store_true", help="with --dry-run: also print keys that have their default")
    text = "form of the printed output (default: tracking.console)"
    parser.add_argument("--console", choices=("auto", "plain", "quiet", "json"), help=text)
    parser.set_defaults(run=run, results=None)


def read_recipe(arguments: argparse.Namespace) -> RunConfig:
    """Return the recipe with its overrides, or that of a run folder given in its place, without credentials."""
    from megarl.config.load import find_recipe, hide_credentials, load_config
    from megarl.recipes.components import COMPONENTS

    if getattr(arguments, "console", None) is not None:
        arguments.overrides, arguments.console = [*arguments.overrides, f"tracking.console={arguments.console}"], None
    takes_runs = hasattr(arguments, "weights")
    of_run = takes_runs and Path(arguments.recipe).is_dir()
    of_model = _use_run(arguments) if of_run else None
    find_recipe(arguments.recipe, takes_runs=takes_runs)
    run_dir = getattr(arguments, "run_dir", None)
    try:
        config = load_config(arguments.recipe, arguments.overrides, components=COMPONENTS, run_dir=run_dir)
    except ConfigError as error:
        if not of_run:
            raise
        # This command does not use the components of the run's algorithm, such as its loss and its estimator. It only
        # warns about wrong keys of these components, and raises all other problems.
        config = load_config(arguments.recipe, arguments.overrides, components=COMPONENTS, check_own=False)
        print(f"megarl: warning: not used by megarl {arguments.command}: {error}", file=sys.stderr)
    if getattr(arguments, "job", arguments.command) == "sft":
        _refuse_steps_of_rl(arguments.overrides)
    config = hide_credentials(config)
    if of_model is not None:
        print(f"model: {of_model}", file=config.tracking.messages, flush=True)
    if getattr(arguments, "prompt", None):
        config = _with_prompts(config, arguments.prompt)
    return config


def _refuse_steps_of_rl(overrides: Sequence[str]) -> None:
    """Refuse `trainer.steps` and `trainer.epochs` for `megarl sft`, which would ignore them."""
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip() in ("trainer.steps", "trainer.epochs"):
            problem = f"megarl sft does not use {key.strip()}, which is the length of megarl train"
            fix = f"write {key.strip().replace('trainer', 'sft')}={value}"
            raise ConfigError(problem, where=f"override {text!r}", fix=fix)


def _with_prompts(config: RunConfig, texts: list[str]) -> RunConfig:
    """Return the recipe with `texts` as prompts, and with the system message of its training data."""
    from megarl.data.sources import as_prompts, system_messages

    data = config.data
    if data.system_prompt is None:
        messages = system_messages(data)
        if len(messages) == 1 and "" not in messages:
            data = data.model_copy(update={"system_prompt": messages.pop()})
        elif messages - {""} or (data.train_files and not messages):
            why = "has several" if messages else "cannot be read here"
            text = f"system message: none; the training data {why}: set data.system_prompt if the model expects one"
            print(text, file=config.tracking.messages)
    if data.system_prompt is not None:
        print(f"system message of the training data: {data.system_prompt}", file=config.tracking.messages, flush=True)
    return config.model_copy(update={"data": as_prompts(data, texts)})


def _dry_run(config: RunConfig, arguments: argparse.Namespace) -> int:
    from megarl.checks.checklist import Checklist
    from megarl.checks.dry_run import make_plan
    from megarl.checks.hub import check_hub
    from megarl.checks.recipe import ConfigWarning
    from megarl.config.base import raise_problems

    rows = Checklist(name="rows")
    with warnings.catch_warnings(record=True) as doubts:
        warnings.simplefilter("always", ConfigWarning)
        try:
            if _check_inputs(config, arguments.command, rows):
                rows.ok("columns and texts, where they can be read here")
            else:
                rows.skip("these sources are read when the run starts")
        except UserError as error:
            rows.from_error(error)
    for doubt in doubts:
        if issubclass(doubt.category, ConfigWarning):
            rows.of("inputs").warn_of(ConfigError(str(doubt.message)))
    launcher = arguments.launcher or config.launch.launcher
    plan = make_plan(config, launcher, arguments.command, rows.items, full=arguments.full)
    print(plan.text, flush=True)
    raise_problems(plan.problems)
    check_hub(config, arguments.command, ask=False)
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Run the command on the launcher's workers, or print its plan; return the exit code."""
    if arguments.run_dir is not None:
        refuse_pipes(arguments.run_dir)
        refuse_other_files(arguments.run_dir)
    from megarl.checks.before_start import with_steps

    config = with_steps(read_recipe(arguments), arguments.command, dry=arguments.dry_run)
    if arguments.dry_run:
        return _dry_run(config, arguments)
    from megarl.checks.hub import check_hub
    from megarl.checks.recipe import ConfigWarning, validate
    from megarl.dag.placement import settled
    from megarl.launchers.common import make_run_dir, process_of, run_workers

    launcher = arguments.launcher or config.launch.launcher
    checked = validate(config, launcher=launcher, job=arguments.command, run_dir=arguments.run_dir)
    if arguments.command == "train" and checked.placement is not None:
        config = settled(config, checked.placement)
    check_hub(config, arguments.command, ask=True)
    _check_inputs(config, arguments.command)
    if arguments.command in ("eval", "generate") and arguments.run_dir is not None:
        refuse_trained(arguments.run_dir, arguments.command)
    if arguments.command != "generate":
        warn_of_mlflow(config)
    if arguments.command != "sft" and (silent := family_of(config).silent_servers(config)) is not None:
        # warn now, since workers would notice it only after the cold start
        warnings.warn(silent, ConfigWarning, stacklevel=2)
    run_dir = make_run_dir(config, arguments.run_dir, arguments.command, inside=arguments.results)
    print(f"run folder: {run_dir}", file=config.tracking.messages, flush=True)
    before = process_of(run_dir)
    code = run_workers(launcher, JOBS[arguments.command][0], config, run_dir, checked.placement)
    # An unchanged record is an earlier run's: this start was refused.
    begun = process_of(run_dir) != before
    if (
        arguments.command in ("train", "sft")
        and (code or read_run(run_dir).get("status") == "stopped")
        and (code != UserError.exit_code or (begun and steps_in(run_dir / "checkpoints")))
    ):
        first = "fix the problem above, then " if code == UserError.exit_code else ""
        command = continue_command(arguments, run_dir, config.trainer.resume, begun=begun)
        print(f"to continue: {first}{command}", file=sys.stderr)
    return code


def _check_inputs(config: RunConfig, job: str, checks: Checklist | None = None) -> bool:
    """Check the run's inputs that can be read in seconds: rows and their tokens, reward and environment. Return whether
    there was a row that can be read here.
    """
    from megarl.checks.recipe import ConfigWarning
    from megarl.checks.references import check_arguments
    from megarl.checks.rows import check_rows
    from megarl.envs.registry import check_environment
    from megarl.rewards.parts import functions_of, located
    from megarl.rewards.preflight import check_import
    from megarl.rewards.references import gives_images
    from megarl.tracking.mlflow_store import check_default_store, check_store

    if job != "generate" and config.tracking.mlflow:
        uri = config.tracking.mlflow_uri
        check_default_store(Path(config.tracking.dir)) if uri is None else check_store(uri)
    ignored = check_environment(config)  # before `check_rows`: whether rows need answers depends on the environment
    read = check_rows(config, job, checks=checks)
    check_arguments(config)
    if job != "generate":
        for place, function in functions_of(config).items():
            with located(place):
                check_import(function, images=gives_images(config))
    if ignored is not None and job in ("train", "eval"):
        warnings.warn(str(ignored), ConfigWarning, stacklevel=2)
    return read


def warn_of_mlflow(config: RunConfig) -> None:
    """Warn now that the MLflow server is down, since workers would notice it only after loading their models."""
    from megarl.checks.recipe import ConfigWarning
    from megarl.tracking.mlflow_store import down_text, unreachable

    uri = config.tracking.mlflow_uri
    reason = unreachable(uri) if config.tracking.mlflow and uri is not None else None
    if uri is not None and reason is not None:
        warnings.warn(down_text(uri, reason), ConfigWarning, stacklevel=2)


def _use_run(arguments: argparse.Namespace) -> str:
    """Use the configuration and model of the run folder given in place of a recipe; return the model's description."""
    from megarl.artifacts.trained import check_holds_run, overrides_for_model, untrained_best_note
    from megarl.tracking.close import close_if_killed

    run_dir = Path(arguments.recipe).resolve()
    refuse_pipes(run_dir)
    close_if_killed(run_dir)
    arguments.recipe = str(run_dir / "config.yaml")
    _enter_start_folder(arguments, run_dir)
    if not any(text.startswith("tracking.dir=") for text in arguments.overrides):
        arguments.results = run_dir
    resumed = [text.partition("=")[2] for text in arguments.overrides if text.startswith("trainer.resume=")]
    checkpoint = resumed[-1] if resumed else "auto"
    # A checkpoint that `trainer.resume` names is loaded into the model with which the run began, so the run's exported
    # model is not used.
    if checkpoint not in ("auto", "never"):
        check_holds_run(run_dir)
        if arguments.weights is not None:
            raise UserError(
                "the weights are given twice",
                where="--weights",
                found=f"--weights {arguments.weights} trainer.resume={checkpoint}",
                allowed="either --weights or trainer.resume",
                fix="leave out --weights to use the checkpoint, or trainer.resume to use a model of the run",
            )
        return f"{checkpoint} (from trainer.resume)"
    which: Which = arguments.weights or "best"
    overrides, model_text = overrides_for_model(run_dir, which)
    arguments.overrides = [*overrides, *arguments.overrides]
    better = untrained_best_note(run_dir) if which == "best" else None
    if better is not None:
        print(f"megarl: warning: {better}", file=sys.stderr)
    return model_text


def _enter_start_folder(arguments: argparse.Namespace, run_dir: Path) -> None:
    """Change to the folder in which the run was started, since the run's relative paths refer to it."""
    from megarl.config.load import with_absolute_paths

    start = read_run(run_dir).get("folder")
    if start is None or start == os.getcwd():
        return
    if not os.path.isdir(start):
        text = f"the run was started in {start}, which does not exist here; its relative paths now start at"
        print(f"megarl: warning: {text} {os.getcwd()}", file=sys.stderr)
        return
    arguments.overrides = with_absolute_paths(arguments.overrides)
    if arguments.run_dir is not None:
        arguments.run_dir = arguments.run_dir.resolve()
    os.chdir(start)


def refuse_trained(run_dir: Path, command: str) -> None:
    """Refuse a run folder of training, whose metrics and configuration would be overwritten."""
    if read_run(run_dir).get("stage") in ("train", "sft") or (run_dir / "checkpoints").is_dir():
        raise UserError(
            "this folder holds a training run",
            where="--run-dir",
            found=str(run_dir),
            allowed=f"a new folder, or the folder of an earlier megarl {command}",
            fix=f"leave out --run-dir; megarl {command} {run_dir} uses the model of that run",
        )


def continue_command(arguments: argparse.Namespace, run_dir: Path, resume: str, *, begun: bool) -> str:
    """Return the command that continues the run, followed by a line with the checkpoint's description. The arguments
    from `run_dir` on are those of `next_start`.
    """
    from megarl.launchers.attempts import next_start

    # a file gets an absolute path, to work from any folder; a bare name is a shipped recipe
    is_file = Path(arguments.recipe).is_file()
    recipe = str(Path(arguments.recipe).absolute()) if is_file else arguments.recipe
    command = ["megarl", arguments.command, recipe, *map(mask, arguments.overrides)]
    start, key = next_start(run_dir, resume, begun=begun)
    if key != resume:
        command.append(f"trainer.resume={key}")
    if arguments.launcher is not None:
        command += ["--launcher", arguments.launcher]
    return f"{shlex.join([*command, '--run-dir', str(run_dir)])}\n            ({start})"
