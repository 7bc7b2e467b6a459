"""The choice of experts, the same for training and for decoding, and the correction of their load.

    x [n, h] -> logits [n, E] -> scores -> + correction bias -> the best groups -> k experts -> their weights

The correction bias evens out the load without a loss (Wang et al. 2024, Auxiliary-Loss-Free Load Balancing): it has no
gradient, and after an optimizer step the bias of an expert with fewer tokens than the mean grows by a fixed rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from torch import Tensor

from megarl.models.layers.experts.plain import RouterRules
from megarl.system.comm import WorkerGroup
from megarl.system.device import device

if TYPE_CHECKING:
    from megarl.models.config import PolicyConfig


def route(
    logits: Tensor, correction: Tensor | None, rules: RouterRules, routes: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k chosen experts of each token: their weights, float32 or wider, and their numbers, int64; both are
    [n, k].

    Args:
        logits: [n, E].
        correction: float32 [E], added to the scores for the choice; None: nothing is added.
        routes: int64 [n, k], experts that replace the choice, for example those of the rollout; rows of negative
            numbers keep their own choice.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    if rules.score == "softmax":
        scores = torch.softmax(logits, dim=-1, dtype=exact)
    else:
        scores = logits.to(exact)
        scores = scores.sigmoid() if rules.score == "sigmoid" else scores
    with torch.no_grad():
        choice = scores if correction is None else scores + correction
        if rules.chosen_groups < rules.groups:
            grouped = choice.unflatten(-1, (rules.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(rules.chosen_groups, dim=-1).indices
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            choice = grouped.masked_fill(outside[..., None], float("-inf")).flatten(-2)
        experts = choice.topk(rules.chosen, dim=-1).indices
        if routes is not None:
            experts = torch.where(routes >= 0, routes, experts)
    weights = scores.gather(1, experts)
    if rules.score == "softmax_of_chosen":
        weights = torch.softmax(weights, dim=-1)
    if rules.normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + rules.epsilon)
    return (weights if rules.scale == 1 else weights * rules.scale), experts


class ExpertRouter(MegatronModule):
    """The router of one layer, with the interface that Megatron's MoELayer needs and the names of its parameters.

    Megatron's own router needs a CUDA device for a correction bias, scores a group by another sum than the models do,
    and always normalises sigmoid scores.

    Args:
        pg_collection: not used; MoELayer passes it.

    Attributes:
        weight: [E, h]; bias: [E] or None.
        expert_bias: the correction bias, a float32 buffer [E], or None.
        routes: int64 [n, k], experts to choose in the next forward pass of the layer
            (`megarl.models.layers.experts.replay`); None: the router chooses.
        multiplicity: int64 [n], number of samples that share each token; None: one. Set like `routes`.
        counts: tokens that chose each expert since the last update of the bias, int64 [E]; None: not counted.
    """

    def __init__(self, config: PolicyConfig, pg_collection: ProcessGroupCollection | None = None, **_: object) -> None:
        super().__init__(config=config)
        assert config.mixture is not None, "a model with routers has a mixture"
        self.rules = config.mixture.router
        self.layer_number: int | None = None
        self.routes: Tensor | None = None
        self.multiplicity: Tensor | None = None
        where: dict[str, Any] = {"dtype": config.params_dtype, "device": device()}
        experts = self.rules.experts
        self.weight = torch.nn.Parameter(torch.empty(experts, config.hidden_size, **where))
        self.bias = torch.nn.Parameter(torch.empty(experts, **where)) if self.rules.bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        correction = torch.zeros(experts, device=device()) if self.rules.correction else None
        self.register_buffer("expert_bias", correction)
        self.register_buffer("counts", None, persistent=False)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer's number, from 1; MoELayer calls this."""
        self.layer_number = layer_number

    def forward(
        self, hidden: Tensor, padding_mask: Tensor | None = None, routes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return every token's weights of all experts, float32 [n, E], and which experts it chose, bool [n, E].

        Args:
            hidden: [t, 1, h].
            padding_mask: bool [t, 1], true for padding, which is not counted; None: no padding.
            routes: int64 [n, k], experts that replace the choice; None: the attribute `routes`.
        """
        x = hidden.view(-1, hidden.shape[-1])
        dtype = torch.promote_types(x.dtype, torch.float32) if self.rules.wide else x.dtype
        logits = router_gating_linear(x, self.weight, self.bias, dtype)
        routes = self.routes if routes is None else routes
        weights, experts = route(logits, self.expert_bias, self.rules, routes)
        weights_of_all = weights.new_zeros(logits.shape).scatter(1, experts, weights)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        # count tokens once: a layer that is recomputed runs first without gradients
        if self.counts is not None and self.training and torch.is_grad_enabled():
            counted = chosen if padding_mask is None else chosen & ~padding_mask.view(-1, 1)
            self.counts += (counted if self.multiplicity is None else counted * self.multiplicity[:, None]).sum(0)
        return weights_of_all, chosen


def corrected_routers(chunks: Sequence[torch.nn.Module]) -> list[ExpertRouter]:
    """Return the routers of this process's chunks that have a correction bias."""
    routers = (module for chunk in chunks for module in chunk.modules() if isinstance(module, ExpertRouter))
    return [router for router in routers if router.expert_bias is not None]


def count_tokens(routers: Sequence[ExpertRouter]) -> None:
    """Let the routers count their experts' tokens in training, from zero."""
    for router in routers:
        router.counts = torch.zeros(router.rules.experts, dtype=torch.int64, device=router.weight.device)


@torch.no_grad()
def update_corrections(routers: Sequence[ExpertRouter], rate: float, groups: Sequence[WorkerGroup]) -> None:
    """Raise the bias of experts with fewer tokens than the mean of their layer by `rate`, lower that of experts with
    more, and set the counts to 0. Collective over `groups`, whose ranks together counted all tokens of a batch.
    """
    if not routers:
        return
    counts = torch.stack([router.counts for router in routers])
    for group in groups:
        counts = group.all_reduce(counts)
    # This is the number of experts * (mean - count), which has the sign of mean - count. Integers need no rounding.
    less = counts.sum(1, keepdim=True) - counts * counts.shape[1]
    for router, direction in zip(routers, less.sign(), strict=True):
        router.expert_bias += direction * rate
        router.counts.zero_()
