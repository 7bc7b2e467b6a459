"""Fused routing: there, and not used by this project."""


def fused_topk_with_score_function(
    logits,
    topk,
    use_pre_softmax,
    num_groups,
    group_topk,
    scaling_factor,
    score_function,
    expert_bias,
    routing_map_format=None,
    topk_indices=None,
    qb_histogram=None,
    qb_bin_bounds=None,
    qb_histogram_mode=None,
):
    raise NotImplementedError


def fused_compute_score_for_moe_aux_loss(logits, topk, score_function, routing_map_format=None):
    raise NotImplementedError


def fused_moe_aux_loss(probs, tokens_per_expert, total_num_tokens, num_experts, topk, coeff):
    raise NotImplementedError
