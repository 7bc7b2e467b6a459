"""The integers that a layer of experts keeps of its rows: by formula, and as tensors saved for the backward pass."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megarl.artifacts.facts import facts_from_config
from megarl.config.model import ParallelConfig
from megarl.config.training import EngineConfig
from megarl.kernels import gpu
from megarl.models.layers.experts.training import TokenDispatcher
from megarl.planning.activations import Activations, Passes
from tests.models.tiny import tiny_dict

TOKENS, EXPERTS, EACH, WIDTH = 64, 4, 2, 16


def sum_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """As the kernel of a GPU, of tokens with as many rows each."""
    return rows[places.long()].sum(1)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_route_keeps_the_bytes_that_the_planner_counts(kernels, ranks, monkeypatch):
    monkeypatch.setattr(gpu, "expert_kernels", lambda rows: SimpleNamespace(sum_rows=sum_rows) if kernels else None)
    monkeypatch.setattr("megarl.models.layers.experts.training.all_to_all", lambda group, rows, *sizes: rows.clone())
    dispatcher, storages = dispatcher_of(ranks), dict[int, torch.UntypedStorage]()

    def keep(saved: torch.Tensor) -> torch.Tensor:
        if not saved.is_floating_point():
            storages[saved.untyped_storage().data_ptr()] = saved.untyped_storage()
        return saved

    random = torch.Generator().manual_seed(0)
    chosen = torch.rand(TOKENS, EXPERTS, generator=random).topk(EACH, 1).indices
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    tokens, probs = (torch.rand(TOKENS, 1, n, generator=random).requires_grad_() for n in (WIDTH, EXPERTS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        rows, share = dispatcher.dispatch_preprocess(tokens, routing, probs.squeeze(1))
        rows, _, share = dispatcher.dispatch_postprocess(*dispatcher.token_dispatch(rows, share))
        rows = dispatcher.combine_preprocess(rows * share[:, None])
        out = dispatcher.combine_postprocess(dispatcher.token_combine(rows))
    out.sum().backward()
    assert sum(storage.nbytes() for storage in storages.values()) == planned(kernels, ranks).route


def dispatcher_of(ranks: int) -> TokenDispatcher:
    """The dispatcher of the only process, or of one of two, whose experts get all of its rows and no others."""
    group, config = SimpleNamespace(size=lambda: 1, rank=lambda: 0), SimpleNamespace(moe_router_topk=EACH)
    found = TokenDispatcher(EXPERTS // ranks, config, SimpleNamespace(ep=group, expt_tp=group, tp_ep=group))
    if ranks > 1:
        found._alone, found._exchange_counts = False, lambda counts: None
        found._sizes = SimpleNamespace(tolist=lambda: [TOKENS * EACH] * 3)
        found._held = torch.full((1, ranks, EXPERTS // ranks), TOKENS * EACH // EXPERTS)
    return found


def planned(kernels: bool, ranks: int) -> Activations:
    model = tiny_dict("qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=EACH)
    facts, parallel = facts_from_config(model, "here"), ParallelConfig(ep=ranks)
    return Activations(facts, parallel, EngineConfig(), Passes(TOKENS, TOKENS, TOKENS), element=4, gpu=kernels)
