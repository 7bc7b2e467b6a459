"""The choice of experts against the routers of transformers, given routes, and the correction of the load."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.models.layers.experts.plain import RouterRules
from megarl.models.layers.experts.router import route, update_corrections

EXPERTS, CHOSEN, HIDDEN = 16, 4, 12
SIGMOID = {"score": "sigmoid", "normalized": True, "correction": True}
GROUPS = {"groups": 4, "chosen_groups": 2}

#: model type, its router's class, keys of its config, rules
ROUTERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        {**SIGMOID, **GROUPS, "epsilon": 1e-20, "scale": 2.5},
    ),
    "deepseek_v3 without norm": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        {"n_group": 4, "topk_group": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": False},
        {**SIGMOID, "groups": 4, "chosen_groups": 3, "normalized": False, "scale": 2.5},
    ),
    "glm4_moe": (
        "glm4_moe",
        "Glm4MoeTopkRouter",
        {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
        {**SIGMOID, "epsilon": 1e-20, "scale": 1.5},
    ),
    "minimax_m2": ("minimax_m2", "MiniMaxM2TopKRouter", {}, {**SIGMOID, "wide": False}),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeTopKRouter", {"norm_topk_prob": False}, {"score": "softmax", "wide": False}),
    "qwen2_moe with norm": (
        "qwen2_moe",
        "Qwen2MoeTopKRouter",
        {"norm_topk_prob": True},
        {"score": "softmax", "normalized": True, "wide": False},
    ),
    "gpt_oss": ("gpt_oss", "GptOssTopKRouter", {}, {"score": "softmax_of_chosen", "bias": True, "wide": False}),
}


@pytest.mark.parametrize(("module", "kind", "keys", "rules"), ROUTERS.values(), ids=ROUTERS)
def test_weights_experts_and_gradients_are_those_of_transformers(module, kind, keys, rules):
    modelling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "num_local_experts": EXPERTS}
    sizes |= {"num_experts": EXPERTS, "n_routed_experts": EXPERTS}
    theirs = getattr(modelling, kind)(SimpleNamespace(**sizes, **keys))
    random = torch.Generator().manual_seed(0)
    correction = torch.randn(EXPERTS, generator=random) * 0.2
    weight = torch.randn(EXPERTS, HIDDEN, generator=random)
    bias = torch.randn(EXPERTS, generator=random)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        if "bias" in rules:
            theirs.bias.copy_(bias)
        if hasattr(theirs, "e_score_correction_bias"):
            theirs.e_score_correction_bias.copy_(correction)
    x = torch.randn(64, HIDDEN, generator=random)
    probe = torch.randn(EXPERTS, generator=random)
    results = []
    for ours in (True, False):
        inputs = x.clone().requires_grad_()
        if ours:
            logits = inputs @ weight.T + (bias if "bias" in rules else 0)
            weights, experts = route(
                logits,
                correction if "correction" in rules else None,
                RouterRules(experts=EXPERTS, chosen=CHOSEN, **rules),
            )
        else:
            _, weights, experts = theirs(inputs, *([correction] if module == "minimax_m2" else []))
        (weights * probe[experts]).sum().backward()
        results.append((torch.zeros(64, EXPERTS).scatter(1, experts, weights), inputs.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


RULES = RouterRules(experts=6, chosen=2, score="sigmoid", normalized=True, epsilon=1e-20, scale=2.5, correction=True)


def test_given_routes_replace_the_choice_and_take_their_weights_from_the_scores():
    logits = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = route(logits, None, RULES)
    routes = torch.tensor([[5, 0], [-1, -1], [2, 3]])
    weights, experts = route(logits, None, RULES, routes)
    assert experts.tolist() == [[5, 0], own[1][1].tolist(), [2, 3]]
    scores = 1 / (1 + (-logits).exp())
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights[0], 2.5 * scores[0, [5, 0]] / scores[0, [5, 0]].sum())
    torch.testing.assert_close(weights[1], own[0][1])


def test_a_correction_changes_the_choice_but_not_the_scores():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0]])
    weights, experts = route(logits, torch.tensor([0, 0, 0, 0, 0, 9.0]), RULES)
    assert experts.tolist() == [[5, 0]]
    scores = logits.sigmoid()[0, [5, 0]]
    torch.testing.assert_close(weights[0], 2.5 * scores / scores.sum())


def test_corrections_raise_experts_below_the_mean_load_and_lower_the_others():
    router: Any = SimpleNamespace(counts=torch.tensor([1, 2, 2, 3]), expert_bias=torch.tensor([0.0, 1.0, 2.0, 3.0]))
    update_corrections([router], 0.5, [])
    assert router.expert_bias.tolist() == [0.5, 1.0, 2.0, 2.5]
    assert router.counts.tolist() == [0, 0, 0, 0]
