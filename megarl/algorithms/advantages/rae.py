"""Role-conditioned advantage estimation (RAE): a running baseline for each policy."""

from __future__ import annotations

from pydantic import Field

from megarl.algorithms.advantages.base import ADVANTAGES, Estimate, for_all_tokens
from megarl.algorithms.lazy import Tensor, no_grad
from megarl.algorithms.registry import Settings
from megarl.algorithms.rows import Rows

DECAY = 0.95


class RaeSettings(Settings):
    """Settings of role-conditioned advantages (RAE), which subtract a running baseline of each policy."""

    decay: float = Field(DECAY, ge=0, lt=1, description="share of the old baseline after a sample")


@ADVANTAGES.register("rae", settings=RaeSettings)
@no_grad
def rae(
    token_rewards: Tensor,
    mask: Tensor,
    running_baseline: Tensor,
    *,
    offsets: Tensor | None = None,
    decay: float = DECAY,
) -> Estimate:
    """Compute A = score - b, the same for all tokens of a sample; b is its policy's baseline before the sample.

    Args:
        running_baseline: float32 [B], from `RunningBaselines`, which uses `decay`.

    Source: SPIRAL (arXiv 2506.24119). Other arguments and result: see `advantages.base`.
    """
    rows = Rows.of(mask, offsets)
    scores, _ = rows.masked_sum(token_rewards, mask)
    return for_all_tokens(scores - running_baseline.to(scores), rows, mask, token_rewards)


class RunningBaselines:
    """The running mean score of each policy, from 0: b = decay b + (1 - decay) score after every sample.

    >>> baselines = RunningBaselines()
    >>> [round(baselines.before("white", score, 0.95), 6) for score in (1.0, 1.0, -1.0)], round(baselines["white"], 6)
    ([0.0, 0.05, 0.0975], 0.042625)
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def __getitem__(self, policy: str) -> float:
        """Return the baseline of a policy."""
        return self._values.get(policy, 0.0)

    def before(self, policy: str, score: float | None, decay: float) -> float:
        """Return a policy's baseline for its next sample, and update it by the sample's score (None: leave it)."""
        baseline = self[policy]
        if score is not None:
            self._values[policy] = decay * baseline + (1 - decay) * score
        return baseline

    def state_dict(self) -> dict[str, float]:
        """Return the baselines by policy, for a checkpoint."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the baselines."""
        self._values = dict(state)
