"""Policy loss, value loss and the joined objective against loops, with gradients."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.aggregation import aggregation_weights, local_counts
from megarl.algorithms.losses import POLICY_LOSSES, ppo, value_loss
from megarl.algorithms.losses.base import DualClipSettings
from megarl.algorithms.objective import actor_loss
from megarl.config.algorithm import KLConfig, PolicyLossConfig
from megarl.system.errors import ConfigError
from megarl.system.metrics import Metrics
from tests.algorithms import oracle
from tests.algorithms.cases import cases, close, make_case, poisoned

settings_st = st.builds(
    DualClipSettings,
    clip_low=st.sampled_from([0.0, 0.1, 0.2]),
    clip_high=st.sampled_from([0.0, 0.2, 0.28]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
)
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum"]


@given(cases, settings_st)
@settings(max_examples=20, deadline=None)
def test_ppo_equals_its_formula(case, cfg):
    mine, _ = ppo(case.logp, case.old_logp, case.advantages, case.mask, cfg)
    theirs = [
        [
            oracle.ppo_token(*token[:3], cfg.clip_low, cfg.clip_high, cfg.dual_clip) if token[3] else 0.0
            for token in zip(*row, strict=True)
        ]
        for row in zip(*(case.lists(n) for n in ("logp", "old_logp", "advantages", "mask")), strict=True)
    ]
    close(mine, theirs)


@given(cases, settings_st)
@settings(max_examples=13, deadline=None)
def test_ppo_padded_packed_and_nan_in_padding_agree(case, cfg):
    names = ("logp", "old_logp", "advantages")
    plain, metrics = ppo(*(getattr(case, n) for n in names), case.mask, cfg)
    packed = [case.pack(poisoned(getattr(case, n), case.mask)).requires_grad_() for n in names]
    loss, packed_metrics = ppo(*packed, case.pack(case.mask), cfg, offsets=case.offsets)
    close(loss.detach(), case.pack(plain), 1e-12)
    loss.sum().backward()
    assert torch.isfinite(packed[0].grad).all()
    assert packed_metrics.result() == pytest.approx(metrics.result(), nan_ok=True)


def kink_free(case, cfg):
    """Move log-probs away from the corners of the clipped loss, where no derivative exists."""
    d = (case.logp - case.old_logp).detach()
    for corner in (1 - cfg.clip_low, 1 + cfg.clip_high, cfg.dual_clip or 1.0):
        log = torch.log(torch.tensor(corner, dtype=torch.float64))
        d = torch.where((d - log).abs() < 1e-3, log + 0.01, d)
    return case.old_logp + d


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_all_terms(seed):
    case, cfg = make_case(seed, width=4), PolicyLossConfig(clip_low=0.1, clip_high=0.3, dual_clip=3.0, entropy_coef=0.2)
    counts = local_counts(case.mask)
    weights = aggregation_weights("seq-mean-token-mean", case.mask, counts).double()

    def objective(logp, entropy):
        return actor_loss(
            logp,
            case.old_logp,
            case.advantages,
            case.mask,
            weights,
            cfg,
            tokens=float(counts[0]),
            entropy=entropy,
            ref_logp=case.ref_logp,
            kl=KLConfig(estimator="mse", coef=0.3),
        )[0]

    logp = kink_free(case, cfg).requires_grad_()
    assert torch.autograd.gradcheck(objective, (logp, case.values.abs().requires_grad_()))


@given(cases, st.sampled_from([None, 0.1, 0.5]))
@settings(max_examples=10, deadline=None)
def test_value_loss_equals_its_formula(case, clip):
    old = case.values + case.rewards * 0.3
    names = (case.values.tolist(), old.tolist(), case.advantages.tolist(), case.lists("mask"))
    theirs = [
        [oracle.value_token(*token[:3], clip) if token[3] else 0.0 for token in zip(*row, strict=True)]
        for row in zip(*names, strict=True)
    ]
    args = [poisoned(x, case.mask) for x in (case.values, old, case.advantages)]
    close(value_loss(*args, case.mask, clip=clip)[0], theirs)


def test_value_loss_gradient():
    case = make_case(1, width=4)
    old = case.values + 0.3 * case.rewards

    def total(v):
        return value_loss(v, old, case.advantages, case.mask, clip=0.2)[0].sum()

    assert torch.autograd.gradcheck(total, (case.values.clone().requires_grad_(),))


@given(cases, st.sampled_from(MODES), st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_loss_and_gradient_do_not_depend_on_the_split(case, mode, parts):
    """One objective, cut into uneven parts (as micro-batches or ranks are), some of them empty."""
    cfg, kl = PolicyLossConfig(entropy_coef=0.1), KLConfig(estimator="low_var_kl+", coef=0.2)
    counts = local_counts(case.mask)
    names = ("logp", "old_logp", "advantages", "mask")
    logp = case.logp.clone().requires_grad_()

    def part_loss(rows):
        picked = {n: getattr(case, n)[rows] for n in names} | {"logp": logp[rows]}
        weights = aggregation_weights(mode, picked["mask"], counts, sum_norm=10.0).double()
        return actor_loss(
            **picked,
            weights=weights,
            cfg=cfg,
            tokens=float(counts[0]),
            entropy=picked["logp"].square(),
            ref_logp=case.ref_logp[rows],
            kl=kl,
        )

    whole, whole_metrics = part_loss(torch.arange(len(case.uid)))
    (expected,) = torch.autograd.grad(whole, logp)
    cuts = torch.linspace(0, 1, parts + 1).pow(2).mul(len(case.uid)).round().long().tolist()
    losses, merged = [], Metrics()
    for a, b in itertools.pairwise(cuts):
        loss, metrics = part_loss(torch.arange(a, b))
        losses.append(loss)
        merged.merge(metrics)
    (actual,) = torch.autograd.grad(sum(losses), logp)
    close(sum(losses).detach(), whole.detach(), 1e-6)
    close(actual, expected, 1e-7)
    assert merged.result() == pytest.approx(whole_metrics.result(), rel=1e-6, abs=1e-9)


@given(cases, st.sampled_from(MODES))
@settings(max_examples=15, deadline=None)
def test_weights_equal_the_aggregation_formula(case, mode):
    weights = aggregation_weights(mode, case.mask, local_counts(case.mask), sum_norm=7.0).double()
    expected = oracle.aggregate(mode, case.lists("advantages"), case.lists("mask"), 7.0)
    close((weights * case.advantages).sum(), torch.tensor(expected), 1e-6)
    packed_mask = case.pack(case.mask)
    counts = local_counts(packed_mask, case.offsets)
    packed = aggregation_weights(mode, packed_mask, counts, offsets=case.offsets, sum_norm=7.0)
    close(packed, case.pack(weights).float(), 1e-7)


def test_extreme_log_ratios_stay_finite():
    logp = torch.tensor([1e4, -1e4, 1e4, -1e4], dtype=torch.float32, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, metrics = ppo(logp, torch.zeros(4), advantages, torch.ones(4, dtype=torch.bool), DualClipSettings())
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logp.grad).all()
    assert all(abs(v) < 1e9 for v in metrics.result().values())


def test_clip_range_zero_still_moves_on_policy():
    """At ratio 1 the gradient of the clipped loss is that of -A r."""
    logp = torch.zeros(2, requires_grad=True)
    cfg = DualClipSettings(clip_low=0.0, clip_high=0.0)
    ppo(logp, torch.zeros(2), torch.tensor([1.0, -2.0]), torch.ones(2, dtype=torch.bool), cfg)[0].sum().backward()
    assert logp.grad.tolist() == [-1.0, 2.0]


def test_ppo_by_hand():
    """Ratios 1.5, 0.5, 5 with advantages 1, -1, -1: clipped above, clipped below, dual clip at 3."""
    logp = torch.tensor([1.5, 0.5, 5.0]).log()
    mask = torch.ones(3, dtype=torch.bool)
    loss, metrics = ppo(logp, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), mask, DualClipSettings())
    close(loss, [-1.2, 0.8, 3.0], 1e-6)
    numbers = metrics.result()
    assert numbers["actor/pg_clipfrac"] == pytest.approx(2 / 3)
    assert numbers["actor/pg_clipfrac_lower"] == pytest.approx(1 / 3)
    assert numbers["actor/ratio_max"] == pytest.approx(5)


@pytest.mark.parametrize("shape", [(0,), (2, 3)])
def test_empty_or_fully_masked_part_is_zero_with_zero_gradient(shape):
    nan = torch.full(shape, float("nan"))
    logp = nan.clone().requires_grad_()
    mask = torch.zeros(shape, dtype=torch.bool)
    offsets = torch.zeros(1, dtype=torch.int64) if len(shape) == 1 else None
    weights = aggregation_weights("seq-mean-token-mean", mask, torch.zeros(2), offsets=offsets)
    cfg = PolicyLossConfig(entropy_coef=0.1)
    loss, metrics = actor_loss(
        logp, nan, nan, mask, weights, cfg, tokens=0, offsets=offsets, entropy=nan, ref_logp=nan, kl=KLConfig()
    )
    loss.backward()
    assert loss.item() == 0
    assert (logp.grad == 0).all()
    assert not list(metrics)


def test_masked_sequences_are_outside_the_mean():
    """A rejected sequence leaves the normaliser: the mean is over the one that is left."""
    mask = torch.tensor([[True, True], [False, False]])
    weights = aggregation_weights("seq-mean-token-sum", mask, local_counts(mask))
    assert weights.tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    ("mode", "message"), [("tokenmean", "unknown aggregation"), ("seq-mean-token-sum-norm", "needs a divisor")]
)
def test_wrong_aggregation_is_explained(mode, message):
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ConfigError, match=message):
        aggregation_weights(mode, mask, local_counts(mask))


def test_user_loss_by_import_path():
    cfg = PolicyLossConfig(name="tests.algorithms.test_losses:minus_logp")
    logp, ones = torch.tensor([-1.0, -3.0]), torch.ones(2)
    offsets = torch.tensor([0, 2])
    loss, _ = actor_loss(logp, ones, ones, ones.bool(), ones / 2, cfg, tokens=2, offsets=offsets)
    assert loss.item() == 2.0


def minus_logp(logp, old_logp, advantages, mask, cfg, *, offsets):
    return -logp, Metrics()


def test_unknown_loss_lists_the_known():
    with pytest.raises(ConfigError, match="ppo"):
        POLICY_LOSSES.get(SimpleNamespace(name="ppoo").name)
