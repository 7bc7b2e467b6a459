"""Plain policy gradient (REINFORCE, GPG)."""

from __future__ import annotations

from megarl.algorithms.lazy import Tensor
from megarl.algorithms.losses.base import POLICY_LOSSES, LossInputs
from megarl.system.metrics import Metrics


@POLICY_LOSSES.register("gpg", ratio_free=True)
def gpg(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cfg: object,
    *,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Compute -A logp: no ratio, no clip; only correct for samples of the current policy.

    Source: GPG (arXiv 2504.02546); Williams (1992). Arguments and result: see `losses.base`.
    """
    p = LossInputs.of(logp, old_logp, advantages, mask)
    return -p.advantages * p.logp, p.metrics()
