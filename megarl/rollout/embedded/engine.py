"""Generation inside the training process, on the training parameters.

    requests --(split over context-parallel ranks, then over CPU threads)--> Sessions --(gathered)--> completions

Weights need no synchronisation after an optimizer step, because generation reads the training parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.models.hf import route_form
from megarl.models.layers.mesh import Mesh
from megarl.rollout.batched import BatchedGeneration
from megarl.rollout.embedded.model import DecoderStage
from megarl.rollout.embedded.session import Session, SessionLimits
from megarl.rollout.embedded.turns import TurnSession
from megarl.rollout.engine import Completion, Generation, Request, ignore_progress
from megarl.rollout.stop_strings import StopStrings
from megarl.system.device import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.models.policy import PolicyModel
    from megarl.training.parallel import Layout

_LANE_ROWS = 32  # fewer rows than this do not keep a core's matmuls busy


class EmbeddedEngine:
    """A `RolloutEngine` over the pipeline chunks of this process.

    `generate` is collective: all ranks of a replica call it with the same arguments, and all ranks that share experts
    call it together, each replica with its own requests (which may be none).

    Args:
        chunks: this process's PolicyModels, unwrapped, in pipeline order.
        tokenizer: decodes responses to find stop strings; only needed if sampling has any.

    Attributes:
        weight_version: written into completions; the trainer increments it with each update of the parameters.
    """

    def __init__(
        self,
        chunks: Sequence[PolicyModel],
        config: RolloutConfig,
        layout: Layout,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.chunks, self._config, self._tokenizer = list(chunks), config, tokenizer
        self._mesh = Mesh.of(layout)
        model_dtype = chunks[0].config.params_dtype
        self._dtype = model_dtype if config.dtype == "model" else DTYPES[config.dtype]
        self.weight_version = 0
        self._route_form = route_form(chunks[0].hf_config) if config.replay_routes else None

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        eos_ids: Sequence[int],
        advance: Callable[[int], None] = ignore_progress,
    ) -> list[list[Completion]]:
        """Decode all requests, and return the completions of each request in the order of its seeds. Context-parallel
        ranks share the requests."""
        shares = share_out(requests, self._mesh.cp.size)
        share = [requests[i] for i in shares[self._mesh.cp.rank]]
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]
        parts = [self._run(share, sampling, stop_ids, advance)]
        if self._mesh.cp.group is not None:
            gathered = self._mesh.cp.group.all_gather_json([sample.to_json() for sample in parts[0]])
            parts = [[Completion.from_json(fields) for fields in part] for part in gathered]
        samples = iter(in_order(parts, requests, shares))
        return [list(itertools.islice(samples, len(request.seeds))) for request in requests]

    def open(self, sampling: SamplingConfig, eos_ids: Sequence[int], sequences: int, longest: int) -> Generation:
        """Return a `Generation` for up to `sequences` sequences of up to `longest` tokens. Models with experts or
        context parallelism generate in rounds."""
        if self._mesh.cp.size > 1 or self.chunks[0].config.num_moe_experts is not None:
            return BatchedGeneration(self.generate, self._any_replica, sampling, eos_ids)
        running = max(1, min(self._config.max_running, sequences))
        stage = DecoderStage(self.chunks, self._mesh, self._dtype, rows=running, steps=sampling.max_new_tokens)
        limits = self._limits(sampling, running, 1, routes=False)
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]
        strings = StopStrings.of(sampling, self._tokenizer)
        session = TurnSession(stage, sampling, stop_ids, limits, sequences, longest, strings)
        session.weight_version = self.weight_version
        return session

    def _any_replica(self, busy: bool) -> bool:
        """Return whether any replica that shares experts with this one is busy."""
        if self.chunks[0].config.num_moe_experts is None:
            return busy
        return bool(self._mesh.expert.all_max(int(busy), next(self.chunks[0].parameters()).device))

    def _run(
        self, requests: list[Request], sampling: SamplingConfig, stop_ids: list[int], advance: Callable[[int], None]
    ) -> list[Completion]:
        """Return the samples of this process's requests, in order."""
        running = max(1, self._config.max_running // self._mesh.cp.size)
        lanes = self._lanes(requests, running)
        running = max(1, running // lanes)
        shares = share_out(requests, lanes)
        rows = min(running, max(sum(len(requests[i].seeds) for i in share) for share in shares))
        stage = DecoderStage(self.chunks, self._mesh, self._dtype, rows=rows, steps=sampling.max_new_tokens)
        limits = self._limits(sampling, running, lanes)
        strings = StopStrings.of(sampling, self._tokenizer)
        sessions = [
            (
                lambda share=share: Session(
                    stage, [requests[i] for i in share], sampling, stop_ids, limits, advance, strings
                ).completions(self.weight_version)
            )
            for share in shares
        ]
        if lanes == 1:
            return sessions[0]()
        return in_order(run_lanes(sessions), requests, shares)

    def _limits(self, sampling: SamplingConfig, running: int, sessions: int, *, routes: bool = True) -> SessionLimits:
        config = self._config
        form = self._route_form if routes else None
        limits = running, config.max_prefill_tokens, config.cuda_graphs, sessions, form
        return SessionLimits(*limits, kept_tokens=config.replay_kept_tokens and sampling.is_bounded)

    def _lanes(self, requests: Sequence[Request], running: int) -> int:
        """Return how many sessions run at the same time on this process's CPU threads; 1 on GPUs, and with several
        ranks, whose collectives need one order."""
        if not self._mesh.is_trivial or next(self.chunks[0].parameters()).is_cuda:
            return 1
        rows = min(running, sum(len(r.seeds) for r in requests))
        return max(1, min(torch.get_num_threads(), len(requests), rows // _LANE_ROWS))


def run_lanes(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run `jobs` in one Python thread each, which share the OpenMP threads of this process; return their results.

    A decode step is a few hundred small operations. Splitting each over all cores costs a barrier per operation, which
    takes longer than the operation when another process has one of the cores; splitting the samples costs nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // len(jobs)))  # each thread of the pool starts with this limit
    try:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [future.result() for future in [pool.submit(job) for job in jobs]]
    finally:
        torch.set_num_threads(threads)


def share_out(requests: Sequence[Request], parts: int) -> list[list[int]]:
    """Split requests into `parts` of similar numbers of samples; return the request numbers of each part, ascending."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for number in sorted(range(len(requests)), key=lambda i: -len(requests[i].seeds)):
        lightest = load.index(min(load))
        shares[lightest].append(number)
        load[lightest] += len(requests[number].seeds)
    return [sorted(share) for share in shares]


def in_order(parts: Sequence[Sequence[Any]], requests: Sequence[Request], shares: Sequence[Sequence[int]]) -> list[Any]:
    """Return the samples of all requests in the order of the requests. `shares`: the numbers of the requests in each
    part, as `share_out` returns them; `parts`: the samples of each part, in that order."""
    groups: dict[int, list[Any]] = {}
    for part, share in zip(parts, shares, strict=True):
        samples = iter(part)
        for number in share:
            groups[number] = list(itertools.islice(samples, len(requests[number].seeds)))
    return [sample for number in range(len(requests)) for sample in groups[number]]
