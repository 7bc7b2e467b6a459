"""`megarl bench algorithms`: CPU-seconds and memory of the pure functions, one thread, against their targets.

    megarl bench algorithms
    megarl bench algorithms --json algorithms.json
    megarl bench algorithms --only gae grpo

Batches have 4096 responses of 4096 tokens, float32, padded form. Seconds are CPU-seconds, the least of several calls in
a process of its own with the environment of a worker; memory is how far the first call raised the process's peak
resident set (on Linux), including the result. Losses go forward and backward over micro-batches of 64 responses.
rollout_correction has 1024 responses. `scorers` reads hostile texts of 64k characters with every included reward but
`math`, and its number is the time for texts of twice the length over that (2 is linear). CPU-seconds are more robust on
a busy machine than wall seconds, but caches are shared: numbers mean something only while nothing else runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.system.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

ROWS, LENGTH, GROUP = 4096, 4096, 8
MICRO_ROWS = 64  # number of responses per call of a loss; each call costs another 50 to 100 us in autograd
REPEATS = 7

VERDICT = {True: "yes", False: "no", None: ""}

#: A function that makes one call, and a function from its result to a number that measures its quality, if any.
Made = tuple[Callable[[], Any], Callable[[Any], float] | None]


@dataclass(frozen=True)
class Case:
    """One function on one batch.

    Attributes:
        name: as on the command line.
        make: builds the inputs; what it returns is measured.
        seconds: CPU-seconds not to exceed.
        megabytes: extra memory not to exceed.
        quality: name and largest value of the number that `make` gives with the call.
        comparable: what another library's function costs, for the table.
    """

    name: str
    make: Callable[[], Made]
    seconds: float | None = None
    megabytes: float | None = None
    quality: tuple[str, float] | None = None
    comparable: str = ""


def _tokens(count: int) -> list[Tensor]:
    """Return float32 noise [ROWS, LENGTH]; made in place, so that no freed memory is left for the measured call."""
    import torch

    g = torch.Generator().manual_seed(0)
    return [torch.empty(ROWS, LENGTH).normal_(generator=g) for _ in range(count)]


def _mask() -> Tensor:
    import torch

    return torch.ones(ROWS, LENGTH, dtype=torch.bool)


def _uid() -> list[int]:
    return [row // GROUP for row in range(ROWS)]


def _grpo() -> Made:
    from megarl.algorithms.advantages import grpo

    (rewards,), mask, uid = _tokens(1), _mask(), _uid()
    return lambda: grpo(rewards, mask, uid), None


def _gae() -> Made:
    from megarl.algorithms.advantages import gae

    (rewards, values), mask = _tokens(2), _mask()
    return lambda: gae(rewards, values, mask, gamma=0.99, lam=0.95), None


def _reinforce_pp() -> Made:
    from megarl.algorithms.advantages import reinforce_pp

    (rewards,), mask = _tokens(1), _mask()
    return lambda: reinforce_pp(rewards, mask, gamma=0.99), None


def _value_loss() -> Made:
    from megarl.algorithms.losses import value_loss

    inputs, mask = _tokens(3), _mask()
    return lambda: _train(lambda *args: value_loss(*args, clip=0.2)[0], [*inputs, mask], MICRO_ROWS), None


def _policy_loss(name: str, rows: int) -> Callable[[], Made]:
    def make() -> Made:
        from megarl.algorithms.losses import POLICY_LOSSES

        logp, old, advantages = _tokens(3)
        old.mul_(0.1).add_(logp)
        mask, cfg = _mask(), POLICY_LOSSES.spec(name).settings()
        loss = POLICY_LOSSES.get(name)
        return lambda: _train(lambda *args: loss(*args, cfg)[0], [logp, old, advantages, mask], rows), None

    return make


def _train(loss_of: Callable[..., Tensor], inputs: list[Tensor], rows: int) -> None:
    """Run forward and backward over micro-batches of `rows` responses."""
    for parts in zip(*(x.split(rows) for x in inputs), strict=True):
        leaf = parts[0].detach().requires_grad_()
        loss = loss_of(leaf, *parts[1:])
        loss.backward(loss.new_full((), 1.0 / inputs[0].numel()).expand_as(loss))


def _rollout_correction() -> Made:
    """Return the token weights, sequence rejection and all metrics, of 1024 responses between half and full length."""
    import torch

    from megarl.algorithms.correction import Rule, correct

    rows, g = 1024, torch.Generator().manual_seed(0)
    old = -torch.rand(rows, LENGTH, generator=g)
    new = torch.empty(rows, LENGTH).normal_(generator=g).mul_(0.01).add_(old)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=g)
    mask, rules = torch.arange(LENGTH) < lengths, [Rule("sequence", upper=2.0)]
    return lambda: correct(new, old, mask, is_level="token", is_threshold=2.0, rules=rules), None


def _partition() -> Made:
    import torch

    from megarl.data.balance import balance

    g = torch.Generator().manual_seed(0)
    lengths = torch.empty(8192).exponential_(generator=g).mul_(1000).clamp_(1, 16384).long().numpy()

    def imbalance(parts: list[list[int]]) -> float:
        totals = [int(lengths[part].sum()) for part in parts]
        return max(totals) / (sum(totals) / len(totals))

    return lambda: balance(lengths, 512, equal_counts=True), imbalance


def _scorers() -> Made:
    from megarl.benchmarks.scorers import growth, score_all

    return score_all, lambda result: growth()


CASES = [
    Case("grpo", _grpo, seconds=0.05, comparable="0.106 s"),
    Case("gae", _gae, seconds=0.2, megabytes=150, comparable="2.13 s, 548 MB"),
    Case("reinforce_pp", _reinforce_pp, seconds=0.15, comparable="1.57 s"),
    Case("value_loss", _value_loss),
    Case("ppo", _policy_loss("ppo", MICRO_ROWS)),
    Case("ppo_at_once", _policy_loss("ppo", ROWS)),
    Case("gspo", _policy_loss("gspo", MICRO_ROWS)),
    Case("cispo", _policy_loss("cispo", MICRO_ROWS)),
    Case("rollout_correction", _rollout_correction, seconds=0.15, comparable="0.506 s"),
    Case(
        "partition",
        _partition,
        seconds=0.05,
        quality=("max/mean", 1.02),
        comparable="0.018 s, max/mean 1.515",
    ),
    Case("scorers", _scorers, quality=("time of twice the text", 3.0)),
]


def measure(case: Case) -> dict[str, Any]:
    """Run one case in this process."""
    import torch

    torch.set_num_threads(1)
    call, judge = case.make()
    gc.collect()
    gc.disable()  # as timeit does: the time of a garbage collection depends on the objects of other modules
    before = _reset_peak()
    result = call()
    extra = _peak() - before
    quality = None if judge is None else judge(result)
    del result
    seconds = min(_cpu_seconds(call) for _ in range(REPEATS))
    return {"case": case.name, "cpu_s": seconds, "extra_mb": extra, "quality": quality}


def _cpu_seconds(call: Callable[[], Any]) -> float:
    start = time.process_time()
    result = call()
    spent = time.process_time() - start
    del result
    return spent


def _status(key: str) -> float:
    """Return the value in MB of a line in /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{key}:")) * 1024 / 1e6


def _reset_peak() -> float:
    """Set the peak resident set to the present one, and return it, in megabytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> float:
    return _status("VmHWM")


def judged(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """Return the measured numbers with the target in words, and whether they meet it."""
    words, met = [], True
    if case.seconds is not None:
        words.append(f"{case.seconds:g} s")
        met &= found["cpu_s"] <= case.seconds
    if case.megabytes is not None:
        words.append(f"{case.megabytes:g} MB")
        met &= found["extra_mb"] <= case.megabytes
    if case.quality is not None:
        words.append(f"{case.quality[0]} {case.quality[1]:g}")
        met &= found["quality"] <= case.quality[1]
    return {**found, "target": ", ".join(words), "met": bool(met) if words else None, "comparable": case.comparable}


def table(results: list[dict[str, Any]]) -> Table:
    """Return one line per case."""
    from rich.table import Table

    title = f"{ROWS} responses of {LENGTH} tokens, one thread, CPU-seconds"
    made = Table(title=title, title_justify="left")
    for column in ("case", "CPU-s", "extra MB", "target", "met", "comparable"):
        made.add_column(column, justify="right" if column in ("CPU-s", "extra MB") else "left")
    for r in results:
        name = r["case"] + ("" if r["quality"] is None else f" ({r['quality']:.3f})")
        made.add_row(name, f"{r['cpu_s']:.3f}", f"{r['extra_mb']:.0f}", r["target"], VERDICT[r["met"]], r["comparable"])
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl bench algorithms` to those of `megarl bench`."""
    names = ", ".join(case.name for case in CASES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"bench algorithms: these of {names}")


def run(arguments: argparse.Namespace) -> int:
    """Measure all cases, each in a process of its own, show and save; returns the exit code."""
    from megarl.benchmarks.program import run_program
    from megarl.benchmarks.report import show_and_save
    from megarl.launchers.common import KEEP_FREED_MEMORY

    by_name = {case.name: case for case in CASES}
    unknown = [name for name in arguments.only or [] if name not in by_name]
    if unknown:
        raise UserError("unknown case", where="--only", found=unknown[0], allowed=list(by_name))
    environment = os.environ | KEEP_FREED_MEMORY | {"OMP_NUM_THREADS": "1"}
    results, shares = [], []
    for case in [by_name[name] for name in arguments.only or by_name]:
        text, others = run_program([sys.executable, "-m", __spec__.name, case.name], environment)
        results.append(judged(case, json.loads(text)))
        shares.append(others)
    show_and_save("algorithms", table(results), {"results": results}, max(shares), arguments.json)
    return 0


if __name__ == "__main__":
    print(json.dumps(measure(next(case for case in CASES if case.name == sys.argv[1]))))
