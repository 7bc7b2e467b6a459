"""Metrics of validation."""

from megarl.evaluation.metrics import (
    Scored,
    best_at_k,
    from_reward,
    majority,
    pass_at_k,
    validation_metrics,
    worst_at_k,
)

__all__ = ["Scored", "best_at_k", "from_reward", "majority", "pass_at_k", "validation_metrics", "worst_at_k"]
