"""The gap of generation in other numbers than training: `python -m megarl.benchmarks.precision`.

The embedded engine generates with float32 weights, in bf16, in fp16, and with projections rounded to FP8 by blocks as
`sync.fp8` sends them. The trainer computes the log-probs of the same tokens in float32. The table shows what rollout
correction measures and does. FP8 here rounds weights only; servers on GPUs also round the inputs of projections.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from megarl.data.batch import Batch, Jagged

if TYPE_CHECKING:
    from megarl.training.engine import MegatronEngine

_DEADLINE_S = 3600.0
ARMS = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp32, FP8 weights": "fp32", "bf16, FP8 weights": "bf16"}
_COLUMNS = ("k3_kl", "chi2_seq", "logp_diff_max", "prob_corr", "ess", "is_weight_max", "is_truncated")


@contextlib.contextmanager
def in_fp8(engine: MegatronEngine) -> Iterator[None]:
    """Give the engine, inside the block, the numbers that its projections have on servers with `sync.fp8`."""
    from megarl.models.copies import ParameterCopies
    from megarl.models.weights.export import iter_on_all_ranks
    from megarl.models.weights.receive import WeightWriter
    from megarl.sync.plan import is_sent_as_fp8
    from megarl.sync.source import dequantize_blocks, quantize_blocks

    copies = ParameterCopies(engine.chunks)
    exact, writer = copies.take(), WeightWriter(engine.chunks)
    for name, weight in iter_on_all_ranks(engine.chunks, engine.layout.world, torch.device("cpu")):
        if weight.dim() == 2 and is_sent_as_fp8(name):
            writer.write(name, dequantize_blocks(*quantize_blocks(weight.clone())))
    try:
        yield
    finally:
        copies.put(exact)


def main(argv: list[str] | None = None) -> int:
    """Print a table with one row for each way to generate; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.precision", description=__doc__)
    parser.add_argument("--recipe", default="grpo_smollm2_words", help="recipe whose model and prompts are used")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of a sample")
    options = parser.parse_args(argv)
    from megarl.config.load import load_config
    from megarl.config.model import ParallelConfig
    from megarl.data.prompts import PromptDataset
    from megarl.data.tokenizer import load_tokenizer
    from megarl.models.config import load_hf_config
    from megarl.rollout.embedded.engine import EmbeddedEngine
    from megarl.rollout.engine import Request
    from megarl.runtime.setup import build_engine, weights_of
    from megarl.system.comm import single_world
    from megarl.system.device import dist_backend
    from megarl.training.parallel import init_parallel

    config = load_config(options.recipe, ["model.dtype=fp32", f"rollout.sampling.max_new_tokens={options.tokens}"])
    tokenizer, hf = load_tokenizer(config.model), load_hf_config(config.model)
    layout = init_parallel(ParallelConfig(), single_world(dist_backend(), _DEADLINE_S))
    engine = build_engine(config, hf, layout, weights_of(config, hf), trainable=False)
    prompts = PromptDataset(config.data, tokenizer).prompt_ids.unbind()[: options.prompts]
    requests = [
        Request(ids.tolist(), [options.samples * number + k for k in range(options.samples)])
        for number, ids in enumerate(prompts)
    ]
    print("| generation | " + " | ".join(_COLUMNS) + " |")
    print("|---" * (1 + len(_COLUMNS)) + "|")
    for label, dtype in ARMS.items():
        rollout = config.rollout.model_copy(update={"dtype": dtype})
        with in_fp8(engine) if "FP8" in label else contextlib.nullcontext():
            made = EmbeddedEngine(engine.chunks, rollout, layout, tokenizer)
            groups = made.generate(requests, rollout.sampling, [tokenizer.eos_token_id])
        numbers = gap(engine, requests, groups)
        print(f"| {label} | " + " | ".join(f"{numbers[name]:.3g}" for name in _COLUMNS) + " |", flush=True)
    return 0


def gap(engine: MegatronEngine, requests: list[Any], groups: list[list[Any]]) -> dict[str, float]:
    """Return the metrics of token weights, at most 2, for the samples in `groups`, by their last names."""
    from megarl.algorithms.correction import correct, finish

    pairs = [(request, sample) for request, group in zip(requests, groups, strict=True) for sample in group]
    responses = Jagged.from_list([torch.tensor(sample.token_ids) for _, sample in pairs])
    batch = Batch(
        {
            "prompt_ids": Jagged.from_list([torch.tensor(request.prompt_ids) for request, _ in pairs]),
            "response_ids": responses,
        },
        {"sample_id": [f"s{number}" for number in range(len(pairs))]},
    )
    logp = engine.logprobs(batch, entropy=False)[0].values
    rollout = torch.cat([torch.tensor(sample.logprobs) for _, sample in pairs])
    mask = torch.ones_like(rollout, dtype=torch.bool)
    result = correct(logp, rollout, mask, offsets=responses.offsets, is_level="token", is_threshold=2.0)
    return {name.rpartition("/")[2]: value for name, value in finish(result.moments).result().items()}


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # a communication thread can abort the interpreter's teardown
