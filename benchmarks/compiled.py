"""Log-probs and an update with and without torch.compile: `python -m megarl.benchmarks.compiled`.

Engines of one model get the same random groups in turn; the best of several rounds counts. Compiling is counted by
itself: it happens in the first pass, once for each form of a pass.

* `kernels`: the layers as they are, with megarl's kernels;
* `plain`: the same with torch's operators in MLPs and norms on CPUs;
* `compiled`: the plain MLPs and norms under torch.compile.

Attention and RoPE are left out: torch 2.13 compiles RoPE's `out=` arguments to code that fails, and traces attention
again for every set of lengths in a micro-batch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megarl.benchmarks.prefixes import best, groups, make_engine

if TYPE_CHECKING:
    from megarl.training.engine import MegatronEngine

_DEADLINE_S = 3600.0


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Use torch's operators in place of the CPU kernels of MLPs and norms."""
    from unittest import mock

    from megarl.kernels import cpu

    with mock.patch.object(cpu, "kernels_for", return_value=None):
        yield


def compile_parts(engine: MegatronEngine) -> None:
    """Have torch.compile trace MLPs and norms when they run first, for any number of tokens."""
    for chunk in engine.chunks:
        for layer in chunk.decoder.layers:
            for part in (layer.mlp, layer.input_layernorm, layer.pre_mlp_layernorm):
                part.forward = torch.compile(part.forward, dynamic=True)


def main(argv: list[str] | None = None) -> int:
    """Print the milliseconds of each engine, and what compiling took; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.compiled", description=__doc__)
    parser.add_argument("--case", default="grpo_quickstart", help="case or recipe whose model is trained")
    parser.add_argument("--path", help="folder of a model that is trained in its place")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--prompt", type=int, default=6, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--groups", type=int, default=32, help="number of prompts")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)

    from megarl.config.model import ParallelConfig
    from megarl.system.comm import single_world
    from megarl.system.device import dist_backend, has_cuda
    from megarl.training.parallel import init_parallel

    layout = init_parallel(ParallelConfig(), single_world(dist_backend(), _DEADLINE_S))
    engines = {name: make_engine(options, layout, share=False) for name in ("kernels", "plain", "compiled")}
    batch = groups(options, engines["compiled"].hf_config.vocab_size)
    compile_parts(engines["compiled"])
    print(f"{options.case}: {options.groups} x {options.samples} samples of {options.prompt} + {options.answer} tokens")
    for phase in ("log-probs", "update"):

        def run(name: str, phase: str = phase) -> None:
            engine = engines[name]
            with contextlib.nullcontext() if name == "kernels" else without_kernels():
                (engine.logprobs if phase == "log-probs" else engine.sft_step)(batch)
            if has_cuda():
                torch.cuda.synchronize()

        start = time.perf_counter()
        run("compiled")
        compiling = time.perf_counter() - start
        calls: dict[str, Callable[[], Any]] = {name: partial(run, name) for name in engines}
        times = best(calls, options.rounds, time.perf_counter if has_cuda() else time.process_time)
        shown = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in times.items())
        print(f"{phase}: {shown}; first compiled pass {compiling:.1f} s", flush=True)
    from torch._dynamo.utils import counters  # importing it earlier would change what it traces

    breaks = Counter(dict(counters["graph_break"]))
    for reason, number in breaks.most_common(5):
        print(f"graph breaks: {number} x {' '.join(reason.split())[:160]}")
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # a communication thread can abort the interpreter's teardown
