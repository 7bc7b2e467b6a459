"""A case in the words that a peer's command is made of, its rows as files, and the peer's run.

The peers of this kind need GPUs and have an environment of their own: `--python` names its interpreter. Their commands
and logs are read as of the commits that `verl.py` and `slime.py` name; neither was run in this version.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from megarl.benchmarks.case import cache_folder
from megarl.benchmarks.measure import WARM_UP, settle
from megarl.benchmarks.program import run_program
from megarl.benchmarks.report import host_class, save
from megarl.benchmarks.throughput import RESULTS
from megarl.config.run import RunConfig
from megarl.system.errors import MegarlError, UserError, WorkerError

_IMPORT_S = 120.0  # for the import of a peer, whose packages may lie on a slow disk


@dataclass(frozen=True)
class Work:
    """The work of a peer.

    Attributes:
        steps: steps of the run, the warm-up included.
        rows: file with its prompts.
    """

    config: RunConfig
    steps: int
    rows: Path

    @property
    def gpus_per_node(self) -> int:
        """The GPUs of each machine."""
        return self.config.cluster.nproc // self.config.cluster.nnodes

    @property
    def mini_batch(self) -> int:
        """Prompts of an update."""
        return self.config.actor.mini_batch_size or self.config.data.batch_size

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its response, at most."""
        return self.config.data.max_prompt_tokens + self.config.rollout.sampling.max_new_tokens

    def reward(self, known: dict[str, str], peer: str) -> str:
        """Return the peer's word for the reward.

        Raises:
            UserError: it has none.
        """
        name = self.config.reward.name
        if name not in known:
            raise UserError(f"{peer} does not have this reward", where="reward.name", found=name, allowed=list(known))
        return known[name]


#: (recipe key, its value, whether the peer can do it, the values that the peer can do).
NoSuch: TypeAlias = Sequence[tuple[str, object, bool, str]]


def work_of(
    case: str, peer: str, steps: int | None, rows: Path, no_such_of: Callable[[RunConfig], NoSuch] = lambda config: ()
) -> Work:
    """Return the work of a case.

    Args:
        no_such_of: what this peer has no arguments for, of the settings that others have.

    Raises:
        UserError: the peer's command cannot have these settings.
    """
    config, _ = settle(case, steps=steps)
    kl, advantage, loss = config.algorithm.kl, config.algorithm.advantage, config.algorithm.loss
    no_such = [
        ("model.path", config.model.path, config.model.path is not None, "a model in Hugging Face form"),
        ("algorithm.pipeline", config.algorithm.pipeline, config.algorithm.pipeline == "grpo", "grpo"),
        ("algorithm.advantage.name", advantage.name, advantage.name == "grpo", "grpo"),
        ("algorithm.loss.name", loss.name, loss.name == "ppo", "ppo"),
        ("placement.teams", list(config.placement.teams), not config.placement.teams, "one team"),
        ("rollout.engine", config.rollout.engine, config.rollout.engine == "sglang", "sglang"),
        ("algorithm.kl.use", kl.use, kl.use != "reward", "none, loss"),
        *no_such_of(config),
    ]
    for key, value, fits, allowed in no_such:
        if not fits:
            raise UserError(
                f"no command of {peer} can be made for this setting", where=key, found=value, allowed=allowed
            )
    return Work(config, config.trainer.steps, rows)


def prompts(work: Work) -> list[tuple[str, Any]]:
    """Return (prompt, answer) of as many rows as the run needs, in the order of the files, without a chat template."""
    from megarl.data.render import render_prompts
    from megarl.data.sources import load_rows

    data = work.config.data
    kwargs = {"split": "train", **data.loader_kwargs}
    all_rows = itertools.chain.from_iterable(load_rows(source, kwargs) for source in data.train_files)
    rows = list(itertools.islice(all_rows, work.steps * data.batch_size))
    texts = render_prompts(data, None, rows)
    answers = [None if data.answer_key is None else row.column(data.answer_key, "data.answer_key") for row in rows]
    return list(zip(texts, answers, strict=True))


@dataclass(frozen=True)
class Peer:
    """A program to compare with.

    Attributes:
        name: name of its package, which has to import.
        suffix: suffix of the file with rows.
        write: rows into the file.
        per_gpu: tokens per second and GPU of every step, from its log and the number of GPUs.
        options: adds arguments of its own to the command line, and reads them.
        no_such: settings that it has no arguments for, see `work_of`.
    """

    name: str
    suffix: str
    command: Callable[[Work, argparse.Namespace], list[str]]
    write: Callable[[Work], None]
    per_gpu: Callable[[str, int], list[float]]
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    no_such: Callable[[RunConfig], NoSuch] = lambda config: ()


def main(peer: Peer, doc: str | None, argv: Sequence[str] | None = None) -> int:
    """Return the command line of a peer; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m megarl.benchmarks.peers.{peer.name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", required=True, help="of benchmarks/cases, or a recipe file")
    parser.add_argument("--steps", type=int, metavar="N", help="counted steps (default: the case's)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--print", action="store_true", help="only print the command; the rows that it reads, --write")
    only.add_argument("--write", action="store_true", help="only write the rows that the command reads")
    parser.add_argument(
        "--python",
        default=sys.executable,
        help=f"interpreter that has {peer.name} (default: this one; printed: python)",
    )
    folder = cache_folder() / "bench" / "peers"
    parser.add_argument("--data", type=Path, default=folder, help=f"folder of the rows (default: {folder})")
    parser.add_argument("--json", type=Path, help=f"file of the result (default: in {RESULTS})")
    peer.options(parser)
    arguments = parser.parse_args(argv)
    try:
        rows = arguments.data / f"{peer.name}{peer.suffix}"
        work = work_of(arguments.case, peer.name, arguments.steps, rows, peer.no_such)
        command = peer.command(work, arguments)
        if arguments.print:
            _print(work, command, arguments.python)
            return 0
        if arguments.write:
            _write(peer, work)
            print(f"wrote {work.rows}")
            return 0
        return _run(peer, work, command, arguments)
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return error.exit_code


def _print(work: Work, command: list[str], python: str) -> None:
    """Print the command as text, with `python` for this interpreter."""
    named = "python" if python == sys.executable else python
    print(shlex.join(named if part == sys.executable else part for part in command))
    if not work.rows.is_file():
        print(f"megarl: warning: it reads {work.rows}, which --write in place of --print writes", file=sys.stderr)


def _write(peer: Peer, work: Work) -> None:
    work.rows.parent.mkdir(parents=True, exist_ok=True)
    peer.write(work)


def _run(peer: Peer, work: Work, command: list[str], arguments: argparse.Namespace) -> int:
    from megarl.system.machine import machine_info

    _check_import(peer.name, arguments.python)
    _write(peer, work)
    output, others_share = run_program(command, merged=True)  # slime logs to standard error
    rates = peer.per_gpu(output, work.config.cluster.nproc)[WARM_UP:]
    if not rates:
        raise WorkerError(f"no step in the output of {peer.name}:\n{output[-3000:]}")
    machine = machine_info()
    numbers = {"tokens_per_s_per_gpu": rates, "median": statistics.median(rates), "others_share": others_share}
    case = work.config.name
    path = arguments.json or RESULTS / f"{peer.name}-{case}-{host_class(machine)}.json"
    save({"case": case, "peer": peer.name, "machine": machine, "command": command, **numbers}, path)
    print(f"{peer.name}, {case}: {numbers['median']:,.0f} tokens/s/GPU, median of {len(rates)} steps\nsaved: {path}")
    return 0


def _check_import(package: str, python: str) -> None:
    try:
        command = [python, "-c", f"import {package}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_S)
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except OSError as error:
        problem = [str(error)]
    except subprocess.TimeoutExpired:
        problem = [f"not within {_IMPORT_S:g} s"]
    if problem:
        raise UserError(
            f"this interpreter cannot import {package}",
            where="--python",
            found=f"{python}: {problem[0]}",
            fix=f"name the interpreter of {package}'s environment, or only show the command with --print",
        )
