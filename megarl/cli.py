"""The `megarl` command. Nothing heavy is imported before a subcommand runs."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import os
import select
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

from megarl import __version__
from megarl.benchmarks import algorithms, checkpoint, envs, oversample, plan_truth, throughput
from megarl.benchmarks.sync import measure as sync_bench
from megarl.certificate import command as certificate
from megarl.commands import cluster, init, job
from megarl.commands import plan as planning
from megarl.commands import simulate as simulation
from megarl.commands.parser import Parser
from megarl.system.credentials import mask
from megarl.system.errors import MegarlError, UserError, describe, printable, shortened, text_of
from megarl.system.imports import location
from megarl.system.processes import Stopped, signals_raise

START = """\
Start here:
  megarl doctor                                what this installation can do
  megarl train grpo_quickstart --dry-run       every check, and what would be started; starts nothing
  megarl train grpo_quickstart                 a tiny model learns two-digit addition; the first line names RUN_DIR
  megarl eval RUN_DIR                          held-out accuracy of its model
  megarl generate RUN_DIR --prompt "47+85="    what the model answers
  megarl init my_run.yaml --data train.jsonl   a recipe for your own rows, model and reward
  megarl keys actor.optim                      what a recipe can set: defaults, values, meaning
  megarl report RUN_DIR                        its curves as a page, also while it runs
"""

COMPLETION = """\
Print a script that completes commands, options, recipes, keys and their values. Write it once:
  megarl completion bash > ~/.local/share/bash-completion/completions/megarl
  megarl completion zsh > ~/.zfunc/_megarl        with `fpath+=~/.zfunc` before `compinit` in ~/.zshrc
or only for this shell:
  source <(megarl completion bash)
"""


def build_parser() -> Parser:
    """Return the parser with all subcommands and their arguments."""
    text, form = "Large-scale post-training of language models on Megatron-Core.", argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="megarl", description=text, epilog=START, formatter_class=form)
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    parser.set_defaults(run=_start_here)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (_, text) in job.JOBS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        job.add_job(command, name)
        if name in ("eval", "generate"):
            command.add_argument("--weights", choices=("best", "last"), help="of a run folder (default: best)")
        if name == "generate":
            text = "a prompt of your own; may be repeated"
            command.add_argument("--prompt", action="append", metavar="TEXT", help=text)
    cluster.add_arguments(commands, job.read_recipe)
    start = commands.add_parser("init", help="write a commented recipe for a model, data and a reward of yours")
    init.add_arguments(start)
    keys = commands.add_parser("keys", help="find keys of recipes: defaults, allowed values, meaning")
    text = "a key, a section, a part of a name or of a description, or a name in TRL or verl: actor.optim, clip"
    keys.add_argument("pattern", metavar="PATTERN", nargs="*", help=f"{text} (default: the sections)")
    keys.set_defaults(run=_keys)
    text = "print a script for bash or zsh that completes commands, recipes and keys"
    completion = commands.add_parser("completion", help=text, description=COMPLETION, formatter_class=form)
    completion.add_argument("shell", choices=("bash", "zsh"), help="the shell that reads it")
    completion.set_defaults(run=_completion)
    _add_convert(commands)
    _add_report(commands)
    bench = commands.add_parser(
        "bench",
        help="measure throughput on two fixed cases, the algorithms, weight synchronisation, checkpoints, simulators, "
        "oversampling",
        description="\n".join(
            str(part.__doc__) for part in (throughput, algorithms, sync_bench, checkpoint, envs, oversample, plan_truth)
        ),
        formatter_class=form,
    )
    throughput.add_arguments(bench)
    throughput.add_compare_arguments(bench)
    for module in (algorithms, sync_bench, envs, plan_truth):
        module.add_arguments(bench)
    bench.set_defaults(run=_bench)
    text = "what a step takes on some hardware, by formulas; with --search the layouts that are fastest"
    _add_module(commands, "plan", text, planning, planning.run)
    text = "what a run would do with its time on other devices, links, or with other settings"
    _add_module(commands, "simulate", text, simulation, _simulate)
    _add_doctor(commands)
    return parser


def _add_convert(commands: argparse._SubParsersAction[Parser]) -> None:
    convert = commands.add_parser("convert", help="write a model or a checkpoint of a run as a Hugging Face folder")
    convert.add_argument(
        "source", metavar="SOURCE", type=Path, help="folder of a Hugging Face model or of a checkpoint of a run"
    )
    target = "folder to write; must not exist, or be empty"
    convert.add_argument("target", metavar="TARGET", type=Path, help=target)
    convert.add_argument("--dtype", choices=("fp32", "bf16"), help="dtype of the tensors (default: as they are)")
    size = "size of one file in GB (default: 4)"
    convert.add_argument("--max-shard-gb", metavar="GB", type=float, default=4.0, help=size)
    push = "upload TARGET with a model card to this private repository of the Hugging Face hub, as its login"
    convert.add_argument("--push-to-hub", metavar="NAME", help=push)
    convert.add_argument("--public", action="store_true", help="make that repository public")
    convert.set_defaults(run=_convert)


def _add_report(commands: argparse._SubParsersAction[Parser]) -> None:
    report = commands.add_parser("report", help="write report.html of a run again")
    report.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="run folder, RUNS/<name>/<stamp>")
    other = "another run to draw beside it; may be repeated"
    report.add_argument("--compare", metavar="RUN_DIR", type=Path, action="append", default=[], help=other)
    report.add_argument(
        "--serve",
        metavar="PORT",
        type=_port,
        nargs="?",
        const=8470,
        help="serve it to browsers of this machine instead, and follow a run that is under way (default port: 8470)",
    )
    report.set_defaults(run=_report)


def _add_doctor(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add `megarl doctor`, which describes and checks an installation."""
    doctor = commands.add_parser(
        "doctor",
        help="show versions, devices, and what optional packages would enable",
        usage="megarl doctor [-h] [--clean] [CHECK ...]",
    )
    doctor.add_argument("--clean", action="store_true", help="remove what killed processes left in /tmp and /dev/shm")
    doctor.set_defaults(run=_doctor)
    checks = doctor.add_subparsers(dest="check", metavar="CHECK", prog="megarl doctor")
    _add_parity(checks)
    text = "certify this machine: what works on its GPUs, and how fast"
    _add_module(checks, "gpu", text, certificate, certificate.run)


def _add_module(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    text: str,
    module: ModuleType,
    run: Callable[[argparse.Namespace], int],
) -> None:
    """Add a command whose description and arguments come from a module."""
    form = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(name, help=text, description=module.__doc__, formatter_class=form)
    module.add_arguments(command)
    command.set_defaults(run=run)


def _add_parity(checks: argparse._SubParsersAction[Parser]) -> None:
    parity = checks.add_parser(
        "parity",
        help="find where transformers, the Megatron engine and an SGLang server differ on the same tokens",
        description="Compare hidden states layer by layer and log-probs on the same tokens; exit code 1 when they "
        "differ by more than rounding.",
    )
    source = "folder of a Hugging Face model or of a checkpoint of a run"
    parity.add_argument("source", metavar="MODEL", type=Path, help=source)
    parity.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the computation (default: fp32)")
    parity.add_argument("--no-server", action="store_true", help="leave the server out")
    parity.set_defaults(run=_parity)


def _simulate(arguments: argparse.Namespace) -> int:
    from megarl.checks.planned import refuse_simulated

    return simulation.run(arguments, refuse_simulated)


def _start_here(arguments: argparse.Namespace) -> int:
    """Print the first commands to try, since the user named no command; return the exit code."""
    print(f"megarl: no command is named\n\n{START}\nAll commands: megarl --help; of one: megarl COMMAND --help")
    return UserError.exit_code


def _bench(arguments: argparse.Namespace) -> int:
    alone = {"algorithms": algorithms, "sync": sync_bench, "checkpoint": checkpoint, "oversample": oversample}
    subject, *rest = arguments.overrides or [""]
    module = {"envs": envs, "plan": plan_truth}.get(subject) or (not rest and alone.get(subject)) or throughput
    return module.run(arguments)


def _keys(arguments: argparse.Namespace) -> int:
    from megarl.commands.keys import show_keys

    print(show_keys(" ".join(arguments.pattern) or None))
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from argcomplete import shellcode

    print(shellcode(["megarl"], shell=arguments.shell))
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from megarl.commands.convert import convert, describe

    name = arguments.push_to_hub
    if name is not None:
        from megarl.commands.push import check_push, push, write_card

        check_push(name)
    convert(arguments.source, arguments.target, dtype=arguments.dtype, max_shard_gb=arguments.max_shard_gb)
    print(describe(arguments.target), flush=True)
    if name is not None:
        write_card(arguments.target, arguments.source)
        print(push(arguments.target, name, public=arguments.public))
    return 0


def _port(text: str) -> int:
    """Return the number of a port; argparse shows what is wrong with it."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port must be 0 (any free port) to 65535, not {text!r}")
    return int(text)


def _report(arguments: argparse.Namespace) -> int:
    from megarl.artifacts.pipes import refuse_pipes
    from megarl.artifacts.trained import run_folder_fix
    from megarl.tracking.close import close_if_killed
    from megarl.tracking.report import write_report

    for folder in [arguments.run_dir, *arguments.compare]:
        if not folder.is_dir():
            fix = run_folder_fix(folder)
            problem = "this is not a folder" if folder.exists() else "this run folder does not exist"
            raise UserError(problem, where="megarl report", found=str(folder), fix=fix)
        refuse_pipes(folder)
        close_if_killed(folder)
    if arguments.serve is not None:
        from megarl.tracking.report_server import serve

        serve([arguments.run_dir.resolve(), *arguments.compare], arguments.serve)
        return 0
    print(write_report(arguments.run_dir.resolve(), arguments.compare))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from megarl.commands.doctor import clean, report

    print(clean() if arguments.clean else report())
    return 0


def _parity(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from megarl.artifacts.conversion import refuse_without_model

    source = arguments.source
    if not any((source / name).is_file() for name in ("meta.json", "config.json")):
        allowed = "a folder with config.json and *.safetensors, or a checkpoint (step_N)"
        refuse_without_model(source, "megarl doctor parity", allowed)
    from megarl.commands.parity import as_table, parity

    differences = parity(source, arguments.dtype, server=not arguments.no_server)
    Console().print(as_table(differences))
    print(differences.verdict)
    return 0 if differences.first is None else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (failed), 2 (the user can fix it), 128 + the number of a signal.

    It is 141, as shells report the signal SIGPIPE, if nobody reads the output any more, as with `| head -1`; nothing is
    printed then. Raise BrokenPipeError if another pipe is broken.
    """
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # the interpreter flushes at exit, where the error could not be caught
    except (BrokenPipeError, SystemExit) as end:  # rich turns the error into SystemExit and closes the output
        unread = _unread_outputs()
        if not (unread if isinstance(end, BrokenPipeError) else isinstance(end.__context__, BrokenPipeError)):
            raise
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for file in unread:
        os.dup2(nowhere, file)  # discard buffered output
    return 141


def _unread_outputs() -> list[int]:
    """Return the file descriptors of stdout and stderr whose reader has closed its end; a stream without a descriptor,
    as in a test, has none."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            poll.register(stream.fileno(), 0)
    return [file for file, event in poll.poll(0) if event & select.POLLERR]


def _run(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        from megarl.commands.completion import complete

        complete(parser)
    arguments, rest = parser.parse_known_args(argv)
    # argparse accepts overrides only in one block and returns later ones in `rest`; megarl accepts them after options,
    # too.
    rest = [text for text in rest if text != "--"]
    unknown = [text for text in rest if text.startswith("-") or "overrides" not in arguments]
    if rest and not unknown:
        arguments.overrides = [*arguments.overrides, *rest]
    warnings.showwarning = _show_warning
    return _guarded(functools.partial(_refuse, parser, unknown) if unknown else arguments.run, arguments)


def _refuse(parser: Parser, unknown: Sequence[str], arguments: argparse.Namespace) -> NoReturn:
    """Refuse arguments that the command does not have."""
    command = " ".join(filter(None, ["megarl", arguments.command, getattr(arguments, "check", None)]))
    from megarl.config.other_names import option_meaning

    near = parser.nearest_option(arguments.command, unknown[0])
    keys = "; keys of the recipe are written key.path=value" if "recipe" in arguments else ""
    raise UserError(
        "unknown argument" if len(unknown) == 1 else "unknown arguments",
        where=command,
        found=" ".join(unknown),
        fix=f"did you mean {near}?" if near else f"{command} --help lists its arguments{keys}{option_meaning(unknown)}",
    )


def _guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        with signals_raise():  # by default a signal does not end the first process of a container
            return run(arguments)
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stopped:
        print(f"megarl: stopped by {stopped}", file=sys.stderr)
        return 128 + stopped.number
    except KeyboardInterrupt:  # outside of the main thread, where no handler may be set
        print("megarl: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if (limit := _limit(error)) is not None:
            print(f"megarl: {limit}", file=sys.stderr)
            return limit.exit_code
        if isinstance(error, BrokenPipeError) and _unread_outputs():
            raise
        # A new file for its owner only, with an unpredictable name.
        with tempfile.NamedTemporaryFile(
            "w", prefix="megarl-", suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as log:
            log.write(mask(traceback.format_exc()))
        print(mask(f"megarl: {describe(error)}\n  log: {log.name}"), file=sys.stderr)
        return 1


def _limit(error: Exception) -> UserError | None:
    """Return a user error if `error` means that an input exceeds a limit of this machine or of Python, else None."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return UserError(
            "a path is longer than the file system allows",
            found=shortened(str(error.filename)),
            allowed="255 bytes for each name in a path, 4,095 in all",
            fix="shorten it; text that is meant as text, not as the name of a file, is written in another way",
        )
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    # the dynamic loader's message for a library that does not fit into memory
    if isinstance(error, MemoryError) or refused or "failed to map segment" in text_of(error):
        fix = "free memory, or raise the limit that `ulimit -v` shows"
        return UserError("not enough memory for this command", found=describe(error), fix=fix)
    if isinstance(error, RecursionError):
        problem = "an input has too many lists or objects inside one another"
        return UserError(problem, found=location(error, ""), fix="flatten it")
    return None


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print warnings of this package in the form of its errors; drop warnings of libraries."""
    if category.__module__.startswith("megarl."):
        print(f"megarl: warning: {printable(str(message))}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
