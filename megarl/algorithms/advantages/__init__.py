"""Advantage estimators by name. `estimate` calls any of them, also a user's, with batch fields by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, checked_estimate
from megarl.algorithms.advantages.gae import gae
from megarl.algorithms.advantages.gdpo import gdpo
from megarl.algorithms.advantages.gigpo import gigpo
from megarl.algorithms.advantages.gpg import gpg
from megarl.algorithms.advantages.grpo import grpo
from megarl.algorithms.advantages.grpo_passk import grpo_passk
from megarl.algorithms.advantages.maxrl import maxrl
from megarl.algorithms.advantages.opo import opo
from megarl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from megarl.algorithms.advantages.rae import rae
from megarl.algorithms.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from megarl.algorithms.advantages.remax import remax
from megarl.algorithms.advantages.reverse_kl import reverse_kl
from megarl.algorithms.advantages.rloo import rloo
from megarl.algorithms.user_code import located
from megarl.system.errors import ConfigError

__all__ = [
    "ADVANTAGES",
    "Estimate",
    "estimate",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "maxrl",
    "opo",
    "optimal_token_baseline",
    "rae",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "reverse_kl",
    "rloo",
    "tir_optimal_token_baseline",
]


def estimate(name: str, fields: Mapping[str, Any], options: Mapping[str, Any]) -> Estimate:
    """Call an advantage estimator with the batch fields and settings that its parameters name.

    Args:
        name: registered name, or `pkg.mod:fn`.
        fields: batch fields: mask, offsets, token_rewards, uid, values, greedy_score, ...
        options: settings, such as gamma, lam, norm_by_std, allow_singleton, all_sum.
    """
    function = ADVANTAGES.get(name)
    offered = {**options, **fields}
    parameters = ADVANTAGES.parameters(name)
    missing = [key for key in ADVANTAGES.required(name) if key not in offered]
    if missing:
        raise ConfigError(
            f"estimator {name!r} needs {', '.join(missing)}, which this pipeline does not provide",
            where=ADVANTAGES.key,
            found=name,
            allowed=f"available fields: {', '.join(sorted(fields))}; options: {', '.join(sorted(options))}",
            fix="add the stage that writes it (values, greedy_score, teacher_logp have one), correct the name of the "
            "parameter in a function of yours, or choose another estimator",
        )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    given = {key: value for key, value in offered.items() if takes_all or key in parameters}
    with located(ADVANTAGES.kind, function):
        result = function(**given)
    return checked_estimate(function, result, fields, given.values())
