"""Every knob and metric of rollout correction against loops, and what must never change the answer."""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import grpo
from megarl.algorithms.correction import Ratios, Rule, correct, finish, importance_weights, staleness
from megarl.algorithms.losses import pg_is, ppo
from megarl.algorithms.losses.base import DualClipSettings
from megarl.algorithms.objective import actor_loss
from megarl.config.algorithm import KLConfig, PolicyLossConfig
from megarl.system.metrics import Metrics
from tests.algorithms import correction_oracle as oracle
from tests.algorithms.cases import cases, close, make_case, poisoned

LEVELS, STATS = ["token", "sequence", "geometric", "seq_max"], ["k1", "k2", "k3"]
rule_st = st.builds(
    lambda level, stat, lower, upper: Rule(level, stat, lower, upper),
    st.sampled_from(LEVELS),
    st.sampled_from(STATS),
    st.sampled_from([None, 0.01, 0.7]),
    st.sampled_from([None, 0.8, 1.2, 2.0]),
)
knobs_st = st.fixed_dictionaries(
    {
        "is_level": st.sampled_from(["none", "token", "sequence"]),
        "is_threshold": st.sampled_from([0.9, 1.3, 2.0, [0.8, 1.4]]),
        "is_batch_normalize": st.booleans(),
        "is_normalize_over": st.sampled_from(["trained", "all"]),
        "rules": st.lists(rule_st, max_size=3, unique_by=lambda rule: rule.name),
        "veto": st.sampled_from([0.0, 0.5]),
    }
)


def run(case, knobs, *, packed=False, poison=False, **more):
    """The correction of a case, rollout log-probs being `old_logp`."""

    def form(x):
        x = poisoned(x, case.mask) if poison else x
        return case.pack(x) if packed else x

    offsets = case.offsets if packed else None
    mask = case.pack(case.mask) if packed else case.mask
    return correct(form(case.logp), form(case.old_logp), mask, offsets=offsets, **{**knobs, **more})


def result_of(correction):
    numbers = finish(Metrics().merge(correction.moments)).result()
    return {name.removeprefix("rollout_corr/"): value for name, value in numbers.items()}


def expected(case, knobs):
    """Fates, weights, factor, weighed items, rows: all from the loops."""
    rows = oracle.rows_of(case.lists("logp"), case.lists("old_logp"), case.lists("mask"))
    fates = [oracle.accepted(row, knobs["rules"], knobs["veto"]) for row in rows]
    weights, factor, items = oracle.token_weights(
        rows, fates, knobs["is_level"], knobs["is_threshold"], knobs["is_batch_normalize"], knobs["is_normalize_over"]
    )
    return rows, fates, weights, factor, items


def spread(per_valid, mask, fill=0.0):
    """Values of the valid tokens put back in their places."""
    out = []
    for values, ms in zip(per_valid, mask, strict=True):
        left = iter(values)
        out.append([next(left) if m else fill for m in ms])
    return out


@given(cases, knobs_st)
@settings(max_examples=38, deadline=None)
def test_weights_mask_and_keep_equal_the_loops(case, knobs):
    mine = run(case, knobs)
    rows, fates, weights, factor, _ = expected(case, knobs)
    close(mine.weights, spread(weights, case.lists("mask")), 1e-9)
    assert mine.mask.tolist() == spread(fates, case.lists("mask"), False)
    assert mine.keep.tolist() == [any(fate) or not row for row, fate in zip(rows, fates, strict=True)]
    if knobs["is_batch_normalize"] and knobs["is_level"] != "none":
        assert result_of(mine)["is_batch_norm"] == pytest.approx(factor)


@given(cases, knobs_st)
@settings(max_examples=25, deadline=None)
def test_metrics_equal_the_loops(case, knobs):
    numbers = result_of(run(case, {**knobs, "is_batch_normalize": False}))
    rows, fates, _, _, items = expected(case, {**knobs, "is_batch_normalize": False})
    tokens = [t for row in rows for t in row]
    want = oracle.gap(rows)
    if knobs["rules"] or knobs["veto"]:
        lost = [not ok for fate in fates for ok in fate]
        want["rejected"] = sum(lost) / len(tokens)
        live = [fate for fate in fates if fate]
        want["rejected_seqs"] = sum(not any(fate) for fate in live) / len(live)
    for rule in knobs["rules"]:
        alone = [not ok for row in rows if row for ok in oracle.token_fate(rule, row)]
        want[f"rejected/{rule.name}"] = sum(alone) / len(tokens)
    if knobs["veto"]:
        alone = [not ok for row in rows for ok in oracle.accepted(row, [], knobs["veto"])]
        want["rejected/veto"] = sum(alone) / len(tokens)
    if items and knobs["is_level"] != "none":
        if knobs["is_level"] == "token":
            pairs = [(oracle.rho(t), ok) for row, fate in zip(rows, fates, strict=True) for t, ok in zip(row, fate)]  # noqa: B905
        else:
            pairs = [(oracle.seq_ratio(row), any(fate)) for row, fate in zip(rows, fates, strict=True) if row]
        cut = [r != oracle.bounded(r, knobs["is_threshold"]) for r, ok in pairs if ok]
        want |= oracle.weight_metrics(items, cut)
    assert numbers.keys() == {name for name, value in want.items() if value is not None}
    for name, value in numbers.items():
        # A correlation of few tokens divides by a small variance; the root of a variance of zero is rounding.
        loose = name == "prob_corr" or name.endswith("_std")
        assert value == pytest.approx(want[name], rel=1e-7, abs=1e-6 if loose else 1e-9), name


def test_without_variance_there_is_no_correlation():
    old = torch.full((2, 3), -0.7)
    mask = torch.ones_like(old, dtype=torch.bool)
    assert "prob_corr" not in result_of(correct(old - torch.rand(2, 3), old, mask))
    assert "prob_corr" not in result_of(correct(old, old, mask))


@given(cases, knobs_st, st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_what_must_not_change_the_answer(case, knobs, seed):
    plain = run(case, knobs)
    numbers = result_of(plain)
    assert torch.isfinite(plain.weights).all()
    assert (plain.weights[~plain.mask] == 0).all()
    assert not (plain.mask & ~case.mask).any()

    for packed in (False, True):
        other = run(case, knobs, packed=packed, poison=True)
        close(other.weights, case.pack(plain.weights) if packed else plain.weights, 1e-12)
        assert torch.equal(other.mask, case.pack(plain.mask) if packed else plain.mask)
        assert torch.equal(other.keep, plain.keep)
        assert result_of(other) == pytest.approx(numbers, rel=1e-9, abs=1e-7)

    order = torch.randperm(len(case.uid), generator=torch.Generator().manual_seed(seed)).tolist()
    moved = run(case.select(order), knobs)
    close(moved.weights, plain.weights[order], 1e-12)
    assert torch.equal(moved.mask, plain.mask[order])
    assert result_of(moved) == pytest.approx(numbers, rel=1e-9, abs=1e-7)


@given(cases, knobs_st)
@settings(max_examples=15, deadline=None)
def test_a_masked_row_changes_nothing(case, knobs):
    plain = run(case, knobs)
    longer = {n: torch.cat([getattr(case, n), torch.full_like(case.logp[:1], 1e9)]) for n in ("logp", "old_logp")}
    mask = torch.cat([case.mask, torch.zeros_like(case.mask[:1])])
    more = correct(longer["logp"], longer["old_logp"], mask, **knobs)
    close(more.weights[:-1], plain.weights, 1e-12)
    assert more.keep[-1], "a sample without tokens was not rejected"
    assert result_of(more) == pytest.approx(result_of(plain), rel=1e-9, abs=1e-7)


@given(cases, knobs_st, st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_moments_of_parts_add_up(case, knobs, parts):
    """Micro-batches and ranks merge their sums; the metrics are those of the whole."""
    knobs = {**knobs, "is_batch_normalize": False}
    whole, merged = run(case, knobs), Metrics()
    cuts = torch.linspace(0, 1, parts + 1).pow(2).mul(len(case.uid)).round().long().tolist()
    for a, b in itertools.pairwise(cuts):
        part = correct(case.logp[a:b], case.old_logp[a:b], case.mask[a:b], **knobs)
        close(part.weights, whole.weights[a:b], 1e-12)
        merged.merge(Metrics.from_json(part.moments.to_json()))
    assert finish(merged).result() == pytest.approx(finish(whole.moments).result(), rel=1e-9, abs=1e-7)


def test_batch_normalisation_spans_ranks():
    """Two shards in two threads, whose sums are added, answer like one batch."""
    case, knobs = make_case(5), {"is_level": "token", "is_threshold": 1.2, "is_batch_normalize": True}
    meet, boxes = threading.Barrier(2), [None, None]

    def on_rank(rank):
        def all_sum(x):
            boxes[rank] = x
            meet.wait(120)
            total = boxes[0] + boxes[1]
            meet.wait(120)
            return total

        rows = slice(0, 5) if rank == 0 else slice(5, None)
        return correct(case.logp[rows], case.old_logp[rows], case.mask[rows], **knobs, all_sum=all_sum).weights

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(on_rank, range(2)))
    close(torch.cat(parts), run(case, knobs).weights, 1e-12)


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_log_ratios_stay_finite(size, level):
    new = torch.tensor([[size, 0.1, -size], [0.0, 0.0, 0.0]])
    rules = [Rule(a, b, upper=2.0) for a in LEVELS for b in STATS]
    mask = torch.ones(2, 3, dtype=torch.bool)
    out = correct(new, torch.zeros(2, 3), mask, is_level=level, is_threshold=5.0, is_batch_normalize=True, rules=rules)
    assert torch.isfinite(out.weights).all()
    assert out.keep.tolist() == [False, True]
    assert all(math.isfinite(value) for value in result_of(out).values())
    assert result_of(out)["logp_diff_max"] == pytest.approx(1e4)


@pytest.mark.parametrize("shape", [(0,), (2, 3), (3, 0)])
def test_empty_or_fully_masked_batch(shape):
    nan, mask = torch.full(shape, float("nan")), torch.zeros(shape, dtype=torch.bool)
    offsets = torch.zeros(1, dtype=torch.int64) if len(shape) == 1 else None
    rules = [Rule(level, stat, upper=2.0) for level in LEVELS for stat in STATS]
    out = correct(nan, nan, mask, offsets=offsets, is_level="sequence", is_batch_normalize=True, rules=rules, veto=1e-4)
    assert out.weights.shape == shape
    assert (out.weights == 0).all()
    assert out.keep.all()
    assert set(finish(out.moments).result()) == {"rollout_corr/is_batch_norm"}


def test_a_fully_rejected_batch_has_no_weight_and_no_nan():
    out = correct(torch.zeros(2, 2), torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), is_level="token",
                  is_batch_normalize=True, rules=[Rule("token", upper=1.1)])  # fmt: skip
    assert not out.mask.any()
    assert not out.keep.any()
    assert (out.weights == 0).all()
    assert result_of(out)["rejected"] == result_of(out)["rejected_seqs"] == 1.0
    assert result_of(out)["is_batch_norm"] == 1.0


def test_k1_bounds_the_ratio_and_not_its_inverse():
    """rho = 3 is above an upper bound of 2; with a lower bound of its own, 1 / 3 is inside [0.1, 2]."""
    new = torch.log(torch.tensor([[3.0], [1 / 3]]))
    out = correct(new, torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool), rules=[Rule("token", "k1", 0.1, 2.0)])
    assert out.mask.tolist() == [[False], [True]]


def test_by_hand():
    """Ratios 1/2 and 4 (product 2, geometric mean 1.414), and 1, 1: C = 1.5 cuts the product, [0.5, 5] does not."""
    new = torch.log(torch.tensor([[0.5, 4.0], [1.0, 1.0]]))
    old, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    close(correct(new, old, mask, is_level="token", is_threshold=1.5).weights, [[0.5, 1.5], [1, 1]], 1e-6)
    close(correct(new, old, mask, is_level="sequence", is_threshold=1.5).weights, [[1.5, 1.5], [1, 1]], 1e-6)
    close(correct(new, old, mask, is_level="token", is_threshold=[0.6, 5]).weights, [[0, 4], [1, 1]], 1e-6)
    # Mean of the truncated token weights: (0.5 + 1.5 + 1 + 1) / 4 = 1; of the sequence weights: (1.5 + 1) / 2 = 1.25.
    both = {"is_threshold": 1.5, "is_batch_normalize": True}
    close(correct(new, old, mask, is_level="token", **both).weights, [[0.5, 1.5], [1, 1]], 1e-6)
    close(correct(new, old, mask, is_level="sequence", **both).weights, [[1.2, 1.2], [0.8, 0.8]], 1e-6)
    for rule, rejected in (
        (Rule("geometric", upper=1.4), True),
        (Rule("geometric", upper=1.5), False),
        (Rule("sequence", upper=1.9), True),
        (Rule("sequence", upper=2.1), False),
        (Rule("seq_max", upper=3.9), True),
        (Rule("seq_max", upper=4.1), False),
    ):
        assert correct(new, old, mask, rules=[rule]).mask.tolist() == [[not rejected] * 2, [True, True]], rule
    assert correct(new, old, mask, veto=0.6).keep.tolist() == [False, True]
    assert correct(new, old, mask, veto=0.4).keep.tolist() == [True, True]
    numbers = result_of(correct(new, old, mask))
    assert numbers["kl"] == pytest.approx(-math.log(2) / 4)
    assert numbers["chi2_token"] == pytest.approx((0.25 + 16 + 1 + 1) / 4 - 1)
    assert numbers["chi2_seq"] == pytest.approx((4 + 1) / 2 - 1)
    assert numbers["ess"] == pytest.approx(6.5**2 / (4 * 18.25))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stat", STATS)
def test_a_ratio_that_is_not_a_number_is_within_no_bounds(level, stat):
    rollout = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    out = correct(torch.zeros(2, 2), rollout, torch.ones(2, 2, dtype=torch.bool), is_level="token",
                  rules=[Rule(level, stat, upper=2.0)])  # fmt: skip
    assert out.mask.tolist() == [[level == "token", False], [True, True]]
    assert torch.equal(out.weights, out.mask.float())


@pytest.mark.parametrize("over", ["trained", "all"])
def test_a_rejected_ratio_that_is_not_a_number_does_not_turn_off_the_normalisation(over):
    rollout = torch.tensor([[0.0, math.nan], [math.log(2.0), math.log(4.0)]])
    out = correct(torch.zeros(2, 2), rollout, torch.ones(2, 2, dtype=torch.bool), is_level="token",
                  is_batch_normalize=True, is_normalize_over=over, rules=[Rule("token", upper=2.5)])  # fmt: skip
    mean = (1 + 1 / 2) / 2 if over == "trained" else (1 + 1 / 2 + 1 / 4) / 3
    close(out.weights, [[1 / mean, 0.0], [0.5 / mean, 0.0]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_log_probs_are_corrected_in_float32(dtype):
    """Ratios of exp(20): their squares are in no float16."""
    new, old = (torch.tensor([[-1.0, x]]).to(dtype) for x in (-1.0, -50.0))
    mask = torch.ones(1, 2, dtype=torch.bool)
    out, wide = correct(new, old, mask, is_level="token"), correct(new.float(), old.float(), mask, is_level="token")
    assert torch.equal(out.weights, wide.weights)
    assert result_of(out) == result_of(wide)
    assert Ratios.of(new, old, mask).rho.tolist() == Ratios.of(new.float(), old.float(), mask).rho.tolist()


def test_the_veto_sees_what_the_clamp_hides():
    """exp(-30) is below a threshold of exp(-25); clamped to exp(-20) it would not be."""
    new, mask = torch.tensor([[0.0, -30.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert correct(new, torch.zeros(1, 2), mask, veto=math.exp(-25)).keep.tolist() == [False]


def test_weights_have_no_gradient():
    logp = torch.zeros(1, 2, requires_grad=True)
    out = correct(logp, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), is_level="sequence")
    assert not out.weights.requires_grad


def test_small_gaps_are_not_lost_in_float32():
    """rho = 1 +- 1e-3: chi^2 of 1e-6 and KL of 5e-7 survive sums over many float32 tokens."""
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(64, 2000, generator=g)
    new = old + 1e-3 * torch.randn(64, 2000, generator=g)
    mask = torch.ones_like(old, dtype=torch.bool)
    single, double = (result_of(correct(a, b, mask)) for a, b in ((new, old), (new.double(), old.double())))
    for name in ("k3_kl", "chi2_token", "ratio_std"):
        assert single[name] == pytest.approx(double[name], rel=2e-2), name
    assert 1 - single["prob_corr"] == pytest.approx(1 - double["prob_corr"], rel=1e-2)


def test_no_sample_is_younger_than_the_trainer():
    with pytest.raises(ValueError, match="weight version 999 is newer than the trainer's, 5"):
        staleness(torch.tensor([4, 999]), torch.tensor([3, 1]), now=5, buckets=3)


def test_staleness_by_hand():
    """Three tokens of version 4, one of version 1, trained at version 5."""
    numbers = staleness(torch.tensor([4, 1]), torch.tensor([3, 1]), now=5, buckets=3).result()
    assert numbers == {
        "rollout_corr/staleness/0": 0,
        "rollout_corr/staleness/1": 0.75,
        "rollout_corr/staleness/2_or_more": 0.25,
        "rollout_corr/staleness_mean": 1.75,
        "rollout_corr/staleness_max": 4,
    }


@given(cases, st.sampled_from(["none", "token", "sequence"]), st.sampled_from([1.3, [0.5, 1.5]]))
@settings(max_examples=15, deadline=None)
def test_pg_is_equals_its_formula(case, level, threshold):
    cfg = SimpleNamespace(is_level=level, is_threshold=threshold)
    names = ("logp", "old_logp", "advantages")
    plain, _ = pg_is(*(getattr(case, n) for n in names), case.mask, cfg)
    rows = oracle.rows_of(case.lists("logp"), case.lists("old_logp"), case.lists("mask"))
    weights, _, _ = oracle.token_weights(rows, [[True] * len(row) for row in rows], level, threshold, False)
    spread_weights = spread(weights, case.lists("mask"))
    want = [
        [-w * n * a if m else 0.0 for w, n, a, m in zip(*row, strict=True)]
        for row in zip(spread_weights, *(case.lists(n) for n in ("logp", "advantages", "mask")), strict=True)
    ]
    close(plain, want)
    packed = [case.pack(poisoned(getattr(case, n), case.mask)).requires_grad_() for n in names]
    loss, _ = pg_is(*packed, case.pack(case.mask), cfg, offsets=case.offsets)
    close(loss.detach(), case.pack(plain), 1e-12)
    # The weight is a constant: the gradient is -w A, not that of the product.
    loss.sum().backward()
    close(
        packed[0].grad,
        case.pack(-torch.tensor(spread_weights, dtype=torch.float64) * case.advantages * case.mask),
        1e-9,
    )


def test_weights_multiply_the_policy_loss_and_nothing_else():
    """The entropy bonus and the KL term are those of the tokens as they are."""
    case, cfg = make_case(4), PolicyLossConfig(entropy_coef=0.3)
    per_token, factors = torch.full_like(case.logp, 0.01) * case.mask, torch.rand_like(case.logp)
    terms = (case.logp, case.old_logp, case.advantages, case.mask, per_token)
    token_loss, _ = ppo(*terms[:4], DualClipSettings())
    more = {"tokens": 1.0, "entropy": case.values, "ref_logp": case.ref_logp, "kl": KLConfig(coef=0.1)}
    plain, _ = actor_loss(*terms, cfg, **more)
    weighed, _ = actor_loss(*terms, cfg, **more, is_weights=factors)
    close(weighed - plain, ((factors - 1) * per_token * token_loss).sum(), 1e-9)


def test_gradient_of_pg_is_is_that_of_its_expectation_with_fixed_weights():
    case, cfg = make_case(2, width=4), SimpleNamespace(is_level="sequence", is_threshold=2.0)
    ratios = Ratios.of(case.logp, case.old_logp, case.mask)
    fixed = importance_weights(ratios, "sequence", 2.0)[:, None]

    def total(logp):
        return (-fixed * case.advantages * torch.where(case.mask, logp, 0)).sum()

    logp = case.logp.clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (logp,))
    (want,) = torch.autograd.grad(total(logp), logp)
    (have,) = torch.autograd.grad(pg_is(logp, case.old_logp, case.advantages, case.mask, cfg)[0].sum(), logp)
    close(have, want, 1e-12)


@given(cases)
@settings(max_examples=10, deadline=None)
def test_rejected_samples_leave_the_baseline_of_their_group(case):
    """Their mask is empty for the estimator, so the others are compared as if the sample had never been drawn."""
    keep = run(case, {"rules": [Rule("geometric", upper=1.1)]}).keep
    assume(bool(keep.any()))
    with_keep = grpo(case.rewards, case.mask & keep[:, None], case.uid, allow_singleton=True).advantages
    left = case.select(keep.nonzero()[:, 0].tolist())
    close(with_keep[keep], grpo(left.rewards, left.mask, left.uid, allow_singleton=True).advantages, 1e-12)


def test_unknown_level_is_refused():
    ratios = Ratios.of(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="token or sequence"):
        importance_weights(ratios, "geometric", 2.0)
    with pytest.raises(ValueError, match="a rejection rule needs a level of"):
        Rule("batch")
