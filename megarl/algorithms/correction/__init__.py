"""Rollout correction: importance weights and rejection for samples that another policy generated.

pi_rollout generated the samples (in the generation engine: other kernels, other precision, older weights); pi_old is
the trainer's policy at the start of the update; pi_theta is the policy in training. The weight rho = pi_old /
pi_rollout of each token corrects the first difference; policy losses clip the second, pi_theta / pi_old. In bypass mode
pi_old := pi_rollout, so that both are one, and rho = pi_theta / pi_rollout is only known in the update.

    correction = correct(logp, rollout_logp, mask, is_level="token", is_threshold=2.0)
    finish(correction.moments)               # after merging over micro-batches and ranks
"""

from megarl.algorithms.correction.correct import Correction, correct, mean_weight, rules_of
from megarl.algorithms.correction.metrics import finish, staleness
from megarl.algorithms.correction.ratios import Ratios, importance_weights
from megarl.algorithms.correction.rejection import Rule, reject, rejected_by, rule_value, vetoed

__all__ = [
    "Correction",
    "Ratios",
    "Rule",
    "correct",
    "finish",
    "importance_weights",
    "mean_weight",
    "reject",
    "rejected_by",
    "rule_value",
    "rules_of",
    "staleness",
    "vetoed",
]
