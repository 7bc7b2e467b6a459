"""Generation inside the training process, on the training parameters.

    requests --(context parallel: shared out)--> Session: prefill, decode, draw, retire --(gathered)--> completions

There is nothing to synchronise after an optimizer step: the next call reads the parameters as they are then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.comm import all_gather_json
from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.device import DTYPES
from megarl.rollout.embedded.model import DecoderStage
from megarl.rollout.embedded.parallel import Mesh
from megarl.rollout.embedded.session import Limits, Session
from megarl.rollout.engine import Completion, Request

if TYPE_CHECKING:
    from megarl.models.policy import PolicyModel


class EmbeddedEngine:
    """A `RolloutEngine` over the pipeline chunks of this process.

    `generate` is collective: all ranks of a replica call it with the same arguments, and all ranks that share experts
    call it together, each replica with its own requests (which may be none).

    Args:
        chunks: this process's PolicyModels, unwrapped, in pipeline order.
        config: batch limits and decoding dtype.

    Attributes:
        weight_version: stamped on completions; whoever updates the parameters counts it up.
    """

    def __init__(self, chunks: Sequence[PolicyModel], config: RolloutConfig) -> None:
        self._chunks, self._config = list(chunks), config
        self._mesh = Mesh.current()
        model_dtype = chunks[0].config.params_dtype
        self._dtype = model_dtype if config.dtype == "model" else DTYPES[config.dtype]
        self.weight_version = 0

    def generate(
        self, requests: Sequence[Request], sampling: SamplingConfig, eos_ids: Sequence[int]
    ) -> list[list[Completion]]:
        """Completions of every request, in order; see `RolloutEngine`."""
        shares = share_out(requests, self._mesh.cp.size)
        mine = [requests[i] for i in shares[self._mesh.cp.rank]]
        stop_ids = [] if sampling.ignore_eos else [*eos_ids, *sampling.stop_token_ids]
        results: list[Any] = self._run(mine, sampling, stop_ids)
        if self._mesh.cp.group is not None:
            results = [sample for part in all_gather_json(results, self._mesh.cp.group) for sample in part]
        completions: list[list[Completion]] = [[] for _ in requests]
        samples = iter(results)
        for number in (i for share in shares for i in share):
            completions[number] = [
                Completion(*next(samples), weight_version=self.weight_version) for _ in requests[number].seeds
            ]
        return completions

    def _run(self, requests: list[Request], sampling: SamplingConfig, stop_ids: list[int]) -> list[Any]:
        running = max(1, self._config.max_running // self._mesh.cp.size)
        rows = min(running, sum(len(r.seeds) for r in requests))
        stage = DecoderStage(self._chunks, self._mesh, self._dtype, rows=rows, steps=sampling.max_new_tokens)
        limits = Limits(running, self._config.max_prefill_tokens, self._config.cuda_graphs)
        return Session(stage, requests, sampling, stop_ids, limits).run()


def share_out(requests: Sequence[Request], parts: int) -> list[list[int]]:
    """Request numbers of each part: heaviest first to the lightest part, deterministic, order kept within a part."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    load = [0] * parts
    for number in sorted(range(len(requests)), key=lambda i: -len(requests[i].seeds)):
        lightest = load.index(min(load))
        shares[lightest].append(number)
        load[lightest] += len(requests[number].seeds)
    return [sorted(share) for share in shares]
