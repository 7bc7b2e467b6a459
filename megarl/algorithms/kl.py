"""KL to the reference policy: estimators from sampled tokens, the penalty in the reward, and its adaptive weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from megarl.algorithms.lazy import Tensor, no_grad, torch
from megarl.algorithms.registry import Registry, Spec
from megarl.algorithms.rows import at_least_float32
from megarl.algorithms.user_code import check_tokens, from_users, located

if TYPE_CHECKING:
    from megarl.config.base import ComponentSection


@dataclass(frozen=True)
class KLSpec(Spec):
    """The declaration of a KL estimator."""

    # Only for distillation, with `DivergenceSettings`: the estimator compares whole distributions instead of sampled
    # tokens, and fn(teacher, policy, **settings) returns a term per token; see `megarl.algorithms.divergences`.
    distributions: bool = False
    # Only for `algorithm.kl` with `use: loss`: the term is multiplied by r = pi / old, which has a gradient.
    weighted: bool = False
    # Only for `algorithm.kl` with `use: loss`: fn(reference, policy) returns the terms of each token of the vocabulary
    # from the log-probs of both; their sum is the KL.
    whole: bool = False

    @property
    def loss_only(self) -> bool:
        """Whether the estimator can be used only with `algorithm.kl.use: loss`."""
        return self.weighted or self.whole


#: fn(d, **settings) -> float in the shape of d
KL = Registry("KL estimator", "algorithm.kl.estimator", KLSpec)
#: fn(d) -> float in the shape of d: an estimator whose settings are set; d = log pi - log ref
Estimator: TypeAlias = "Callable[[Tensor], Tensor]"


@KL.register("kl", "k1")
def k1(d: Tensor) -> Tensor:
    """Return d = log pi - log ref. Unbiased, often negative."""
    return d


@KL.register("abs")
def absolute(d: Tensor) -> Tensor:
    """Return |d|."""
    return d.abs()


@KL.register("mse", "k2")
def k2(d: Tensor) -> Tensor:
    """Return d^2 / 2. The value is biased, but its gradient is that of the KL."""
    return 0.5 * d.square()


@KL.register("low_var_kl", "k3")
def k3(d: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, with d limited to +-20 and the value to +-10. Unbiased, never negative."""
    d = d.clamp(-20, 20)
    return ((-d).exp() - 1 + d).clamp(-10, 10)


@KL.register("unbiased_k3", weighted=True)
def unbiased_k3(d: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d, with d limited to +-20; the loss term is r times this, r = pi / old.

    On samples of an older policy it is unbiased, and so is its gradient, r d grad(log pi), which `low_var_kl+` has at
    r = 1 only. d is limited, not the value, which would have no gradient where the policy is far from the reference.

    Source: DeepSeek-V3.2 (arXiv 2512.02556).
    """
    d = d.clamp(-20, 20)
    return (-d).exp() - 1 + d


@KL.register("full", whole=True)
def full(reference: Tensor, policy: Tensor) -> Tensor:
    """Return pi (log pi - log ref) of each token of the vocabulary: their sum is KL(pi || ref), without sampling."""
    return policy.exp() * (policy - reference)


def _straight_through(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def plus(d: Tensor) -> Tensor:
        right_gradient = k2(d)
        # This order adds zero to the value; adding a large k2 first would lose the value's last digits.
        return value(d).detach() + (right_gradient - right_gradient.detach())

    plus.__doc__ = f"{value.__doc__} The gradient is that of k2."
    return plus


for _names in (("kl", "k1"), ("abs",), ("mse", "k2"), ("low_var_kl", "k3")):
    KL.register(*(name + "+" for name in _names))(_straight_through(KL.get(_names[0])))


def chosen_estimator(section: ComponentSection) -> Estimator:
    """Return the estimator that `algorithm.kl` or `algorithm.distillation` names, with its settings."""
    chosen = KL.choose(section)
    plain = partial(chosen.function, **chosen.own) if chosen.own else chosen.function
    return partial(_checked, chosen.function, plain) if from_users(chosen.function) else plain


def _checked(function: Callable[..., Tensor], estimator: Estimator, d: Tensor) -> Tensor:
    """Call a user's KL estimator with the log-ratios `d`, and check that it returns one finite number per token."""
    with located(KL.kind, function):
        terms = estimator(d)
    check_tokens(KL.kind, function, "term", terms, d, inputs=(d,))
    return terms


def kl_tokens(estimator: str | Estimator, logp: Tensor, ref_logp: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(pi || ref) at each sampled token, zero where masked; differentiable in `logp`.

    An estimator with "+" has the value of the one without, and the gradient of k2, d grad(log pi). Its expectation
    under pi is the gradient of the KL, unlike that of the plain gradients of k1 (zero on average) and k3.

    Args:
        estimator: kl | abs | mse | low_var_kl (aliases k1, k2, k3), each also with "+"; or a function of d.
        logp, ref_logp: float [N] or [B, T], log pi and log ref of the sampled tokens.
        mask: bool, same shape.

    Returns:
        The inputs' shape; half precision is returned as float32.

    Source: Schulman, Approximating KL Divergence (2020); gradients: arXiv 2506.09477.
    """
    function = KL.get(estimator) if isinstance(estimator, str) else estimator
    d = torch.where(mask, at_least_float32(logp) - at_least_float32(ref_logp).detach(), 0)
    return torch.where(mask, function(d), 0)  # a user's estimator may not be 0 at 0


@no_grad
def kl_in_reward(
    token_rewards: Tensor,
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    *,
    coef: float,
    estimator: str | Estimator = "kl",
) -> tuple[Tensor, Tensor]:
    """Subtract coef * KL from the token rewards.

    Args:
        token_rewards, logp, ref_logp: float [N] or [B, T]; `logp` is of the policy before the update.
        mask: bool, same shape.
        coef: weight of the penalty.
        estimator: name of the estimator (`kl_tokens`), or a function of the log-ratio d.

    Returns:
        New token rewards, zero where the mask is False, and float64 [2] on the CPU: the sum of the KL and the number of
        tokens. After adding these over ranks, their quotient is the input of `KLController.update`.
    """
    kl = kl_tokens(estimator, logp, ref_logp, mask)
    rewards = torch.where(mask, token_rewards, 0) - coef * kl
    return rewards, torch.stack([kl.double().sum(), mask.sum().double()]).cpu()


@dataclass
class KLController:
    """The weight of the KL penalty; it adapts if `target` is set.

    update: coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon.

    Source: Ziegler et al. (arXiv 1909.08593).

    >>> c = KLController(0.1, target=1.0, horizon=100)
    >>> c.update(kl=5.0, samples=50); round(c.coef, 6)
    0.11
    """

    coef: float
    target: float | None = None
    horizon: int = 10_000

    def update(self, kl: float, samples: int) -> None:
        """Update `coef` after a step of `samples` samples (over all ranks) with mean token KL `kl`."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint; empty for a constant weight."""
        return {} if self.target is None else {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore an adaptive controller; a constant one keeps its configured weight."""
        if self.target is not None:
            self.coef = float(state.get("coef", self.coef))


# At the end, because divergences.py registers its estimators in the registry above.
import megarl.algorithms.divergences  # noqa: E402, F401
