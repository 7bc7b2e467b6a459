"""CPU-seconds of log-probs and of an update with and without shared prefixes: `python -m megarl.benchmarks.prefixes`.

Both engines get the same random groups in turn, and the best of several rounds counts, because other work on the
machine only adds time.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megarl.benchmarks.case import case_file
from megarl.data.batch import Batch, Jagged

if TYPE_CHECKING:
    from megarl.training.engine import MegatronEngine
    from megarl.training.parallel import Layout

_DEADLINE_S = 3600.0


def groups(options: argparse.Namespace, vocabulary: int) -> Batch:
    """Return groups of samples with random prompts and answers of exact lengths."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda length: torch.randint(0, vocabulary, (length,), generator=rng)  # noqa: E731
    prompts = [draw(options.prompt) for _ in range(options.groups)]
    responses = [draw(options.answer) for _ in range(options.groups * options.samples)]
    rows = {
        "prompt_ids": [prompt for prompt in prompts for _ in range(options.samples)],
        "response_ids": responses,
        "loss_weights": [torch.full((options.answer,), 1 / len(responses) / options.answer) for _ in responses],
    }
    return Batch(
        {name: Jagged.from_list(values) for name, values in rows.items()},
        {"sample_id": [f"s{number}" for number in range(len(responses))]},
    )


def make_engine(options: argparse.Namespace, layout: Layout, *, share: bool) -> MegatronEngine:
    """Return the engine of a case's model, or of the model in a folder."""
    from megarl.config.load import load_config
    from megarl.models.config import load_hf_config
    from megarl.runtime.setup import build_engine, weights_of

    changes = [f"actor.engine.share_prefixes={str(share).lower()}", f"model.dtype={options.dtype}"]
    changes += [f"actor.engine.micro_batch_tokens={options.micro_batch_tokens}"]
    changes += [f"model.path={options.path}", "model.hf_config=null"] if options.path else []
    config = load_config(str(case_file(options.case)), changes)
    hf = load_hf_config(config.model)
    return build_engine(config, hf, layout, weights_of(config, hf), trainable=True)


def best(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """Return the least seconds of each call by `clock`; each round makes each call once, after a round that does not
    count."""
    times: dict[str, float] = {}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = clock()
            call()
            seconds = clock() - start
            if number:
                times[name] = min(seconds, times.get(name, seconds))
    return times


def main(argv: list[str] | None = None) -> int:
    """Print the seconds of both engines and their ratio; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="M", help="case whose model is trained")
    parser.add_argument("--path", help="folder of a model that is trained in its place")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--samples", type=int, default=16, help="answers to each prompt")
    parser.add_argument("--groups", type=int, default=1, help="number of prompts")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(argv)
    from megarl.config.model import ParallelConfig
    from megarl.system.comm import single_world
    from megarl.system.device import dist_backend
    from megarl.training.parallel import init_parallel

    layout = init_parallel(ParallelConfig(), single_world(dist_backend(), _DEADLINE_S))
    engines = {name: make_engine(options, layout, share=name == "shared") for name in ("whole", "shared")}
    batch = groups(options, engines["whole"].hf_config.vocab_size)
    print(
        f"{options.groups} x {options.samples} samples of {options.prompt} + {options.answer} tokens, {options.dtype}"
    )
    for phase in ("log-probs", "update"):
        calls: dict[str, Callable[[], Any]] = {
            name: partial(engine.logprobs if phase == "log-probs" else engine.sft_step, batch)
            for name, engine in engines.items()
        }
        times = best(calls, options.rounds)
        ratio = times["whole"] / times["shared"]
        print(
            f"{phase}: whole {times['whole']:.3f} CPU-s, shared {times['shared']:.3f} CPU-s, {ratio:.2f} times faster",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # a communication thread can abort the interpreter's teardown
