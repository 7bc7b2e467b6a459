"""Every policy loss against its formula written as loops, its numerical gradient, and what must never change it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megarl.algorithms.losses import POLICY_LOSSES
from tests.algorithms import oracle
from tests.algorithms.cases import Case, cases, close, make_case, poisoned

TOKEN_LOSSES = ["ppo", "cispo", "sapo", "cpgd", "gpg", "dro", "dppo_tv", "dppo_kl", "ipo", "kpop", "luffy"]
ROW_LOSSES = ["gspo", "gmpo", "vespo", "opsm"]
PREPARED_LOSSES = ["clip_cov", "kl_cov", "m2po"]
ALL = TOKEN_LOSSES + ROW_LOSSES + PREPARED_LOSSES
STOPPED = {"cispo", "gspo", "cpgd", "vespo"}  # stop the gradient of a factor; numerical derivatives do not
INPUTS = ("logp", "old_logp", "advantages")
Settings = POLICY_LOSSES.every_setting()  # one model for all losses: each reads its own keys of it


def test_every_loss_has_a_formula():
    assert {*ALL, "pg_is"} == set(POLICY_LOSSES.names())  # pg_is: test_correction.py


configs = st.builds(
    Settings,
    clip_low=st.sampled_from([0.0, 0.1, 0.4]),
    clip_high=st.sampled_from([0.0, 0.2, 0.4]),
    dual_clip=st.sampled_from([None, 3.0]),
    tau_pos=st.sampled_from([0.5, 1.0]),
    tau_neg=st.sampled_from([1.05, 3.0]),
    drift_coef=st.sampled_from([0.0, 0.3]),
    drift_clip=st.sampled_from([0.2, 2.0]),
    trust_region=st.sampled_from([0.01, 0.1]),
    ratio_cap=st.sampled_from([None, 1.2, 20.0]),
    quadratic_coef=st.sampled_from([0.05, 1.0]),
    cov_fraction=st.sampled_from([0.01, 0.3, 1.0]),
    cov_low=st.just(0.0),
    cov_high=st.sampled_from([0.5, 5.0]),
    kl_tau=st.sampled_from([0.0, 0.3]),
    k_pos=st.sampled_from([0.7, 2.0]),
    lambda_neg=st.sampled_from([1.3, 2.0]),
    off_policy_threshold=st.sampled_from([0.0, 0.1]),
    second_moment=st.sampled_from([1e-3, 0.04, 0.3]),
)


def probabilities(case: Case) -> Case:
    """Log-probs that are those of probabilities below 1."""
    for name in ("logp", "old_logp"):
        setattr(case, name, -getattr(case, name).abs() - 1e-3)
    return case


def keys_of(case: Case) -> torch.Tensor:
    """A key per token that belongs to its sample and place."""
    rows, width = case.mask.shape
    return torch.randperm(rows * width, generator=torch.Generator().manual_seed(1)).view(rows, width)


def run(name: str, case: Case, cfg, *, packed=False, poison=False, logp=None, keys=None):
    form = (lambda x: case.pack(x)) if packed else (lambda x: x)
    mask = form(case.mask)
    values = [form(poisoned(getattr(case, n), case.mask)) if poison else form(getattr(case, n)) for n in INPUTS]
    values[0] = values[0] if logp is None else logp
    fn = POLICY_LOSSES.get(name)
    prepare = POLICY_LOSSES.spec(name).prepare
    keys = form(keys_of(case) if keys is None else keys)
    fields = {"rollout_logp": form(poisoned(case.ref_logp, case.mask))} if name == "m2po" else {}
    prepared = prepare(values[1], values[2], mask, cfg, keys=keys, **fields) if prepare else {}
    values[1] = fields.get("rollout_logp", values[1])
    return fn(*values, mask, cfg, offsets=case.offsets if packed else None, **prepared)


def by_tokens(name, case, cfg):
    columns = [case.lists(n) for n in (*INPUTS, "mask")]
    return [
        [oracle.loss_token(name, x, o, a, cfg) if m else 0.0 for x, o, a, m in zip(*row, strict=True)]
        for row in zip(*columns, strict=True)
    ]


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@given(case=cases, cfg=configs)
@settings(max_examples=13, deadline=None)
def test_token_losses_equal_their_formula(name, case, cfg):
    close(run(name, probabilities(case), cfg, poison=True)[0], by_tokens(name, case, cfg))


@pytest.mark.parametrize("name", ROW_LOSSES)
@given(case=cases, cfg=configs)
@settings(max_examples=13, deadline=None)
def test_sequence_losses_equal_their_formula(name, case, cfg):
    expected = []
    for x, o, a, ms in zip(*(case.lists(n) for n in (*INPUTS, "mask")), strict=True):
        valid = [t for t, m in enumerate(ms) if m]
        row = [0.0] * len(ms)
        if valid:
            found = oracle.loss_row(name, *([values[t] for t in valid] for values in (x, o, a)), cfg)
            for t, value in zip(valid, found, strict=True):
                row[t] = value
        expected.append(row)
    close(run(name, case, cfg, poison=True)[0], expected)


@given(case=cases, cfg=configs)
@settings(max_examples=10, deadline=None)
def test_clip_cov_silences_the_tokens_it_draws(case, cfg):
    cov = oracle.covariances(case.lists("old_logp"), case.lists("advantages"), case.lists("mask"))
    keys = keys_of(case)
    candidates = sorted((key for key, c in cov.items() if cfg.cov_low < c < cfg.cov_high), key=lambda k: int(keys[k]))
    drawn = candidates[: max(1, math.floor(cfg.cov_fraction * len(cov)))]
    expected = by_tokens("ppo", case, cfg)
    for i, t in drawn:
        expected[i][t] = 0.0
    close(run("clip_cov", case, cfg, poison=True)[0], expected)


@given(case=cases, cfg=configs)
@settings(max_examples=10, deadline=None)
def test_kl_cov_penalises_the_largest_covariances(case, cfg):
    logp, old, a, mask = (case.lists(n) for n in (*INPUTS, "mask"))
    cov = oracle.covariances(old, a, mask)
    ranked = sorted((key for key, c in cov.items() if c > 0), key=lambda key: -cov[key])
    chosen = ranked[: max(1, math.floor(cfg.cov_fraction * len(cov)))]
    if chosen:  # equal ones come along; nearly equal ones would be a matter of rounding
        least = cov[chosen[-1]]
        gaps = [abs(cov[key] / least - 1) for key in ranked[len(chosen) :]]
        assume(all(gap < 1e-12 or gap > 1e-6 for gap in gaps))
        chosen += [key for key, gap in zip(ranked[len(chosen) :], gaps, strict=True) if gap < 1e-12]
    expected = [[0.0] * len(ms) for ms in mask]
    for i, t in cov:
        d = oracle.clamped(logp[i][t], old[i][t])
        expected[i][t] = -a[i][t] * oracle.capped(d, cfg.ratio_cap)
    for i, t in chosen:
        expected[i][t] += cfg.cov_kl_coef * abs(oracle.clamped(logp[i][t], old[i][t]))
    close(run("kl_cov", case, cfg, poison=True)[0], expected)


@given(case=cases, cfg=configs)
@settings(max_examples=10, deadline=None)
def test_m2po_drops_the_farthest_tokens_of_the_mini_batch(case, cfg):
    where = case.mask.nonzero().tolist()
    logp, old, rollout, a = (case.lists(n) for n in ("logp", "old_logp", "ref_logp", "advantages"))
    dropped = oracle.farthest(*([x[i][t] for i, t in where] for x in (old, rollout, a)), cfg.second_moment)
    expected = [[0.0] * len(ms) for ms in case.lists("mask")]
    for number, (i, t) in enumerate(where):
        if number not in dropped:
            expected[i][t] = -a[i][t] * oracle.capped(oracle.clamped(logp[i][t], rollout[i][t]), cfg.ratio_cap)
    close(run("m2po", case, cfg, poison=True)[0], expected)


@pytest.mark.parametrize("name", ALL)
@given(case=cases, cfg=configs, seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_packing_padding_and_order_change_nothing(name, case, cfg, seed):
    plain, metrics = run(name, probabilities(case), cfg)
    assert (plain[~case.mask] == 0).all()
    logp = case.pack(poisoned(case.logp, case.mask)).requires_grad_()
    packed, packed_metrics = run(name, case, cfg, packed=True, poison=True, logp=logp)
    close(packed.detach(), case.pack(plain), 1e-12)
    assert packed_metrics.result() == pytest.approx(metrics.result())
    packed.sum().backward()
    assert torch.isfinite(logp.grad).all()
    assert (logp.grad[~case.pack(case.mask)] == 0).all()
    order = torch.randperm(len(case.uid), generator=torch.Generator().manual_seed(seed)).tolist()
    close(run(name, case.select(order), cfg, keys=keys_of(case)[order])[0], plain[order], 1e-12)


def away_from_corners(case: Case, cfg) -> torch.Tensor:
    """Log-probs that keep their distance from the corners of clipped losses, where no derivative exists."""
    d = case.logp - case.old_logp
    corners = (1 - cfg.clip_low, 1 + cfg.clip_high, cfg.dual_clip, math.exp(-cfg.clip_low), math.exp(cfg.clip_high), 1)
    for corner in map(math.log, corners):
        d = torch.where((d - corner).abs() < 1e-3, corner + 0.02, d)
    return case.old_logp + d


@pytest.mark.parametrize("name", sorted(set(ALL) - STOPPED))
@pytest.mark.parametrize("seed", range(2))
def test_gradients_are_the_numerical_ones(name, seed):
    case, cfg = probabilities(make_case(seed, width=4)), Settings(cov_fraction=0.2, cov_low=0.0)
    logp = away_from_corners(case, cfg).requires_grad_()
    weights = torch.rand(case.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    assert torch.autograd.gradcheck(lambda x: (weights * run(name, case, cfg, logp=x)[0]).sum(), (logp,))


def test_cispo_gradient_is_that_of_its_weighted_log_probs():
    case, cfg = make_case(2), Settings()
    logp = case.logp.clone().requires_grad_()
    run("cispo", case, cfg, logp=logp)[0].sum().backward()
    weight = (case.logp - case.old_logp).exp().clamp(0.8, 1.2)
    close(logp.grad, torch.where(case.mask, -weight * case.advantages, 0))


@pytest.mark.parametrize("far", [0.0, 3.0])
def test_cpgd_pulls_drifted_tokens_back_however_far_they_are(far):
    """The gradient is that of the clipped log-ratio plus that of k3, whose factor r - 1 stops at 0.2."""
    case, cfg = make_case(2), Settings(drift_coef=0.3, drift_clip=0.2)
    logp = (case.logp + far).requires_grad_()
    run("cpgd", case, cfg, logp=logp)[0].sum().backward()
    d = (logp - case.old_logp).detach()
    stopped = torch.where(case.advantages > 0, d > math.log(1.2), d < math.log(0.8))
    factor = torch.where(d.exp() < 1.2, d.exp() - 1, 0.2)
    close(logp.grad, torch.where(case.mask, torch.where(stopped, 0, -case.advantages) + 0.3 * factor, 0))


def test_gspo_gradient_reaches_tokens_with_the_sequence_ratio():
    """With one advantage per sequence it is the gradient of -A s, averaged over tokens."""
    case, cfg = make_case(4), Settings(clip_low=9.0, clip_high=9.0, dual_clip=None)
    advantages = case.advantages[:, :1].expand_as(case.advantages)
    case = Case(**{**vars(case), "advantages": advantages})
    logp = case.logp.clone().requires_grad_()
    n = case.mask.sum(1, keepdim=True).clamp(min=1)
    (run("gspo", case, cfg, logp=logp)[0] / n).sum().backward()

    def by_sequence(x):
        d = torch.where(case.mask, x - case.old_logp, 0).sum(1, keepdim=True) / n
        return torch.where(case.mask.any(1, keepdim=True), -advantages[:, :1] * d.exp(), 0).sum()

    (expected,) = torch.autograd.grad(by_sequence(logp), logp)
    close(logp.grad, expected)


def prepared_for(name: str, selected: torch.Tensor) -> dict[str, torch.Tensor]:
    """The keyword argument of a loss that has a `prepare`, with these tokens selected."""
    if not POLICY_LOSSES.spec(name).prepare:
        return {}
    return {"stopped" if name == "m2po" else "selected": selected}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("far", [1e4, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_extreme_log_ratios_stay_finite(name, far, dtype):
    """exp(20) is no float16: narrow inputs are worked on, and answered, in float32."""
    mask = torch.ones(2, 3, dtype=torch.bool)
    old = (torch.full((2, 3), -1.0) if far < 0 else torch.full((2, 3), -1e4)).to(dtype)
    logp = (old + far).requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]]).to(dtype)
    fn, cfg = POLICY_LOSSES.get(name), Settings()
    loss, metrics = fn(logp, old, advantages, mask, cfg, **prepared_for(name, mask))
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logp.grad).all()
    assert all(math.isfinite(value) for value in metrics.result().values())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(0,), (2, 3)])
def test_nothing_valid_gives_zero_and_no_metrics(name, shape):
    nan, mask = torch.full(shape, float("nan")), torch.zeros(shape, dtype=torch.bool)
    logp = nan.clone().requires_grad_()
    offsets = torch.zeros(1, dtype=torch.int64) if len(shape) == 1 else None
    fn, cfg = POLICY_LOSSES.get(name), Settings()
    prepare = POLICY_LOSSES.spec(name).prepare
    fields = {"rollout_logp": nan} if name == "m2po" else {}
    prepared = prepare(nan, nan, mask, cfg, keys=torch.zeros(shape, dtype=torch.int64), **fields) if prepare else {}
    loss, metrics = fn(logp, nan, nan, mask, cfg, offsets=offsets, **prepared)
    loss.sum().backward()
    assert (loss == 0).all()
    assert (logp.grad == 0).all()
    assert not list(metrics)


@pytest.mark.parametrize("name", ALL)
def test_every_loss_reports_the_same_metrics(name):
    metrics = run(name, make_case(0), Settings())[1]
    names = ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "ratio_min", "ratio_mean", "ratio_max")
    assert set(metrics) == {f"actor/{name}" for name in names}


@pytest.mark.parametrize("name", sorted(set(ALL) - {"sapo", *PREPARED_LOSSES}))
def test_at_the_old_policy_the_gradient_is_the_policy_gradient(name):
    """One advantage per sequence, clip ranges of any size: d loss / d logp = -A."""
    case = make_case(1)
    advantages = torch.where(case.mask, case.advantages[:, :1], 0)
    logp = case.old_logp.clone().requires_grad_()
    n = case.mask.sum(1, keepdim=True).clamp(min=1)
    cfg = Settings(clip_low=0.0, clip_high=0.0) if name not in ("gmpo", "cpgd") else Settings()
    loss, _ = POLICY_LOSSES.get(name)(logp, case.old_logp, advantages, case.mask, cfg)
    (loss / n).sum().backward()
    close(logp.grad, -advantages / n, 1e-9)


def test_sapo_gate_has_slope_one_at_ratio_one():
    logp = torch.zeros(2, requires_grad=True)
    cfg = SimpleNamespace(tau_pos=0.7, tau_neg=3.0)
    ones = torch.ones(2, dtype=torch.bool)
    POLICY_LOSSES.get("sapo")(logp, torch.zeros(2), torch.tensor([1.0, -2.0]), ones, cfg)[0].sum().backward()
    close(logp.grad, [-1.0, 2.0], 1e-6)


def test_dppo_by_hand():
    """0.6 -> 0.9 moves 0.3 of mass outward, 0.1 -> 0.2 moves 0.1 though its ratio is 2; back is always free."""
    logp, old = torch.tensor([0.9, 0.2, 0.9]).log(), torch.tensor([0.6, 0.1, 0.6]).log()
    advantages, mask = torch.tensor([1.0, 1.0, -1.0]), torch.ones(3, dtype=torch.bool)
    loss, metrics = POLICY_LOSSES.get("dppo_tv")(logp, old, advantages, mask, Settings(trust_region=0.2))
    close(loss, [0.0, -2.0, 1.5], 1e-6)
    assert metrics.result()["actor/pg_clipfrac"] == pytest.approx(1 / 3)


def slopes(name: str, **settings) -> dict[float, float]:
    """Largest |d loss / d logp| over |A| of a response of one token, for A = 1 and A = -1, however far it moved."""
    spec = POLICY_LOSSES.spec(name)
    cfg, found = spec.settings(**settings), {}
    if name == "pg_is":
        cfg = SimpleNamespace(is_level="token", is_threshold=2.0)
    d = torch.linspace(-19.9, 19.9, 797, dtype=torch.float64)
    for sign in (1.0, -1.0):
        old = torch.where(d > 0, -d - 0.01, -0.01)[:, None]
        logp = (old + d[:, None]).requires_grad_()
        mask = torch.ones(len(d), 1, dtype=torch.bool)
        chosen = prepared_for(name, ~mask)
        loss, _ = POLICY_LOSSES.get(name)(logp, old, sign * torch.ones_like(old), mask, cfg, **chosen)
        loss.sum().backward()
        found[sign] = float(logp.grad.abs().max())
    return found


#: What docs/algorithms.md says: the largest weight of a token, for A > 0 and for A < 0; None: nothing bounds it.
WEIGHTS = {
    "ppo": (1.2, 3.0),
    "clip_cov": (1.2, 3.0),
    "gspo": (1.2, None),
    "gmpo": (math.exp(0.2), None),
    "cispo": (1.2, 1.2),
    "sapo": (1.6, 1.6),
    "cpgd": (1.1, 1.1),
    "gpg": (1.0, 1.0),
    "pg_is": (2.0, 2.0),
    "dro": (2.0, 2.0),
    "dppo_tv": (20.0, 20.0),
    "dppo_kl": (20.0, 20.0),
    "kl_cov": (None, None),
    "ipo": (20.1, 20.1),
    "luffy": (20.0, 20.0),
    "kpop": (20.1, 20.1),
    "vespo": (1.3, 1.3),
    "opsm": (1.2, 3.0),
    "m2po": (20.0, 20.0),
}


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_no_token_owns_a_step_where_the_documentation_says_so(name):
    """A token whose log-prob went from -18 to -2 has a ratio of nine million."""
    for (sign, found), most in zip(slopes(name).items(), WEIGHTS[name], strict=True):
        assert (found > 1e7) if most is None else (found <= most + 1e-6), (sign, found)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gspo", {"dual_clip": 4.0}), ("gmpo", {"dual_clip": 4.0}), ("kl_cov", {"ratio_cap": 4.0})],
)
def test_losses_without_a_bound_have_an_option_for_one(name, settings):
    assert max(slopes(name, **settings).values()) <= 4.0 + 1e-6


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl", "kl_cov", "m2po"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_truncated_token_still_learns_with_the_weight_of_the_cap(name, advantage):
    """Its old log-prob is -18 and its new one -2, which moves less mass than either trust region allows."""
    logp = torch.tensor([-2.0, -1.0], dtype=torch.float64, requires_grad=True)
    old, ones = torch.tensor([-18.0, -1.5], dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    cfg, chosen = Settings(trust_region=10.0, ratio_cap=20.0), prepared_for(name, ~ones)
    loss, metrics = POLICY_LOSSES.get(name)(logp, old, torch.full_like(old, advantage), ones, cfg, **chosen)
    loss.sum().backward()
    close(logp.grad, [-advantage * 20.0, -advantage * math.exp(0.5)], 1e-9)
    assert metrics.result()["actor/pg_clipfrac_lower"] == 0.5
    assert metrics.result()["actor/ratio_max"] == pytest.approx(math.exp(16.0))


@pytest.mark.parametrize("name", ["ipo", "kpop"])
def test_a_token_that_the_old_policy_gave_no_probability_is_kept_and_finite(name):
    logp = torch.tensor([math.log(0.05)], requires_grad=True)
    old, one = torch.tensor([-math.inf]), torch.ones(1, dtype=torch.bool)
    cfg = Settings(trust_region=0.06 if name == "ipo" else 1e9, kl_tau=1e-3, ratio_cap=None)
    loss, metrics = POLICY_LOSSES.get(name)(logp, old, torch.ones(1), one, cfg)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logp.grad).all()
    assert metrics.result()["actor/pg_clipfrac"] == (name == "kpop")  # KL(pi, old) is infinite


def test_kpop_keeps_the_surest_tokens():
    """In float32 1 - 1e-9 is 1: a formula that clamps there gives NaN, and so rejects them."""
    logp, old = torch.tensor([0.0, -1e-9, 0.0]), torch.tensor([0.0, -2e-9, -0.5])
    ones = torch.ones(3, dtype=torch.bool)
    loss, _ = POLICY_LOSSES.get("kpop")(logp, old, ones.float(), ones, Settings(trust_region=0.1, kl_tau=0.0))
    close(loss, [-1.0, -1.0, 0.0], 1e-6)
