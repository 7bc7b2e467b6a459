"""Every estimator against its formula written as loops, and what must never change its answer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import (
    ADVANTAGES,
    estimate,
    gae,
    gdpo,
    gigpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    optimal_token_baseline,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    tir_optimal_token_baseline,
)
from megarl.system.errors import ConfigError, UserError
from tests.algorithms import oracle
from tests.algorithms.cases import Case, cases, close, make_case, poisoned

PARTS = {"right": 1.0, "short": -0.5}
OPTIONS = {"gamma": 0.9, "lam": 0.8, "norm_by_std": True, "allow_singleton": False, "parts": PARTS}
BUILT_IN = ADVANTAGES.names()
PER_SAMPLE = ("greedy_score", "running_baseline", "reward_parts")


def fields(case: Case, packed: bool = False, poison: bool = False) -> dict:
    def form(x):
        x = poisoned(x, case.mask) if poison else x
        return case.pack(x) if packed else x

    out = {"token_rewards": form(case.rewards), "values": form(case.values), "uid": case.uid}
    out |= {"old_logp": form(case.old_logp), "teacher_logp": form(case.ref_logp), "sum_pi_squared": form(squares(case))}
    out |= {"greedy_score": case.greedy, "running_baseline": case.greedy / 2, "reward_parts": case.parts}
    out["turn_keys"] = case.pack(turn_keys(case)) if packed else turn_keys(case)
    out["mask"] = case.pack(case.mask) if packed else case.mask
    return out | ({"offsets": case.offsets} if packed else {})


def turn_keys(case: Case) -> torch.Tensor:
    """Places where turns begin, with one of three states; they follow from the rewards, so they move with a sample."""
    begins = case.owned & (case.rewards > 0.4)
    return torch.where(begins, 1 + (case.values * 100).long() % 3, 0)


def squares(case: Case) -> torch.Tensor:
    """What a sum of squared probabilities can be: at least the sampled one's square."""
    p = case.old_logp.exp().clamp(max=1)
    return p.square() + (1 - p).square() * 0.3


def run(name: str, case: Case, **kwargs):
    return estimate(name, of(name, fields(case, **kwargs)), OPTIONS)


def of(name: str, given: dict) -> dict:
    """The fields, in a form that the estimator accepts."""
    return given | {"token_rewards": given["token_rewards"].abs()} if name == "maxrl" else given


@given(cases)
@settings(max_examples=15, deadline=None)
def test_each_equals_its_formula(case):
    r, v, m = case.lists("rewards"), case.lists("values"), case.lists("mask")
    logp, teacher = case.lists("old_logp"), case.lists("ref_logp")
    close(run("grpo", case).advantages, oracle.grpo(r, m, case.uid), 1e-7)
    close(grpo(case.rewards, case.mask, case.uid, norm_by_std=False).advantages, oracle.grpo(r, m, case.uid, False))
    close(run("rloo", case).advantages, oracle.rloo(r, m, case.uid))
    close(run("maxrl", case).advantages, oracle.maxrl([[abs(x) for x in row] for row in r], m, case.uid), 1e-7)
    close(run("remax", case).advantages, oracle.remax(r, m, case.greedy.tolist()))
    close(run("rae", case).advantages, oracle.remax(r, m, (case.greedy / 2).tolist()))
    close(run("reinforce_pp_baseline", case).advantages, oracle.reinforce_pp_baseline(r, m, case.uid), 1e-7)
    close(run("grpo_passk", case).advantages, oracle.grpo_passk(r, m, case.uid), 1e-7)
    close(run("opo", case).advantages, oracle.opo(r, m, case.uid))
    close(run("gpg", case).advantages, oracle.gpg(r, m, case.uid))
    close(run("gdpo", case).advantages, oracle.gdpo(case.parts.tolist(), [1.0, -0.5], m, case.uid), 1e-6)
    theirs = oracle.gigpo(r, turn_keys(case).tolist(), m, case.uid, 0.9)
    close(run("gigpo", case).advantages, theirs)
    difference = [[b - a for a, b in zip(*rows, strict=True)] for rows in zip(logp, teacher, strict=True)]
    close(run("reverse_kl", case).advantages, torch.tensor(difference, dtype=torch.float64) * case.mask)
    for name, skip in (("optimal_token_baseline", False), ("tir_optimal_token_baseline", True)):
        theirs = oracle.optimal_token_baseline(r, logp, squares(case).tolist(), m, case.uid, skip_holes=skip)
        close(run(name, case).advantages, theirs, 1e-7)
    for mine, theirs in (
        (run("reinforce_pp", case), oracle.reinforce_pp(r, m, 0.9)),
        (run("gae", case), oracle.gae(r, v, m, 0.9, 0.8)),
    ):
        close(mine.advantages, theirs[0], 1e-7)
        close(mine.returns, theirs[1], 1e-9)


@pytest.mark.parametrize("name", BUILT_IN)
@given(case=cases, seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_what_must_not_change_the_answer(name, case, seed):
    plain = run(name, case)
    assert torch.isfinite(plain.advantages).all()
    assert (plain.advantages[~case.mask] == 0).all()

    nan_in_padding = run(name, case, poison=True)
    close(nan_in_padding.advantages, plain.advantages, 1e-12)

    packed = run(name, case, packed=True, poison=True)
    close(packed.advantages, case.pack(plain.advantages))
    close(packed.returns, case.pack(plain.returns))

    order = torch.randperm(len(case.uid), generator=torch.Generator().manual_seed(seed)).tolist()
    close(run(name, case.select(order)).advantages, plain.advantages[order])

    relabelled = Case(**{**vars(case), "uid": ["x" + u[::-1] for u in case.uid]})
    close(run(name, relabelled).advantages, plain.advantages, 1e-12)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_masked_row_changes_nothing(name):
    case = make_case(3)
    more = of(name, fields(case))
    for key in ("token_rewards", "values", "old_logp", "teacher_logp", "sum_pi_squared", "turn_keys", *PER_SAMPLE):
        more[key] = torch.cat([more[key], torch.full_like(more[key][:1], 1e9)])
    more["mask"] = torch.cat([more["mask"], torch.zeros_like(more["mask"][:1])])
    more["uid"] = [*more["uid"], more["uid"][0]]
    close(estimate(name, more, OPTIONS).advantages[:-1], run(name, case).advantages, 1e-12)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline", "gae", "gpg", "gdpo"])
def test_statistics_span_ranks(name):
    """Two shards in two threads, whose sums are added, answer like one batch."""
    case = make_case(5, groups=2, size=4)
    case = case.select(sorted(range(8), key=lambda i: case.uid[i]))
    cut = case.uid.count("g0")
    shards = [case.select(list(range(cut))), case.select(list(range(cut, 8)))]
    meet, boxes = threading.Barrier(2), [None, None]

    def on_rank(rank):
        def all_sum(x):
            boxes[rank] = x
            meet.wait(120)
            total = boxes[0] + boxes[1]
            meet.wait(120)
            return total

        return estimate(name, fields(shards[rank]), OPTIONS | {"all_sum": all_sum, "allow_singleton": True}).advantages

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(on_rank, range(2)))
    close(torch.cat(parts), run(name, case).advantages)


@pytest.mark.parametrize("fn", [grpo, grpo_passk, gpg, maxrl, opo, rloo, reinforce_pp_baseline])
def test_group_of_one_is_an_error_unless_allowed(fn):
    rewards, mask = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(UserError, match="allow_singleton"):
        fn(rewards, mask, ["a", "a", "lonely"])
    assert (fn(rewards, mask, ["a", "a", "lonely"], allow_singleton=True).advantages[2] == 0).all()


def test_singletons_of_the_other_group_estimators():
    ones, uid = torch.ones(3, 2), ["a", "a", "lonely"]
    with pytest.raises(UserError, match="allow_singleton"):
        gdpo(ones, ones.bool(), uid)
    with pytest.raises(UserError, match="allow_singleton"):
        optimal_token_baseline(ones, -ones, ones, ones.bool(), uid)
    out = optimal_token_baseline(ones, -ones, ones, ones.bool(), uid, allow_singleton=True)
    assert (out.advantages[2] == 0).all()


def test_gpg_by_hand_makes_up_for_the_group_without_a_signal():
    """Scores 1, 0 | 0.1, 0.1, 0.1 (no signal): 5 samples, 2 of them in a group with a signal."""
    rewards = torch.tensor([[1.0], [0.0], [0.1], [0.1], [0.1]], dtype=torch.float64)
    out = gpg(rewards, torch.ones(5, 1, dtype=torch.bool), list("aabbb")).advantages.flatten()
    assert out.tolist() == [1.25, -1.25, 0, 0, 0]


def test_gdpo_by_hand():
    """Both parts differ in one sample of two; std of 0, 1 is 0.7071, so A = +-0.7071 per part before weights."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 100.0]], dtype=torch.float64)
    mask = torch.ones(2, 1, dtype=torch.bool)
    out = gdpo(parts, mask, ["a", "a"], parts={"right": 3.0, "long": 1.0}).advantages.flatten()
    close(out, [2**-0.5, -(2**-0.5)], 1e-5)  # 2 * 0.7071, whitened: the raw sum would have preferred the other


def test_optimal_token_baseline_by_hand():
    """One token each, pi = 0.5 and 0.9 with the rest spread thin: w = 0.25 and 0.01."""
    rewards, p = (torch.tensor(x, dtype=torch.float64)[:, None] for x in ([1.0, 0.0], [0.5, 0.9]))
    out = optimal_token_baseline(rewards, p.log(), p.square(), torch.ones(2, 1, dtype=torch.bool), ["a", "a"])
    close(out.advantages, [[1 - 0.25 / 0.26], [-0.25 / 0.26]])


@given(case=cases, packed=st.booleans())
@settings(max_examples=15, deadline=None)
def test_optimal_token_baselines_with_importance_weights(case, packed):
    """w times the square of the weight; what has weight 0 has no part in the baseline."""
    rho = (case.logp - case.old_logp).exp().clamp(max=1.2)
    given_fields = fields(case, packed, poison=True)
    given_fields["is_weights"] = poisoned(rho, case.mask) if not packed else case.pack(poisoned(rho, case.mask))
    r, m, logp = (case.lists(n) for n in ("rewards", "mask", "old_logp"))
    for name, skip in (("optimal_token_baseline", False), ("tir_optimal_token_baseline", True)):
        found = estimate(name, given_fields, OPTIONS | {"is_weighted": True}).advantages
        theirs = oracle.optimal_token_baseline(
            r, logp, squares(case).tolist(), m, case.uid, skip_holes=skip, rho=rho.tolist()
        )
        theirs = torch.tensor(theirs, dtype=torch.float64)
        close(found, case.pack(theirs) if packed else theirs, 1e-7)
        plain = estimate(name, given_fields, OPTIONS).advantages  # the weights are there, and not asked for
        close(plain, run(name, case, packed=packed).advantages, 1e-12)


def test_optimal_token_baseline_by_hand_with_importance_weights():
    """w = 0.25 and 0.01, weights 0.2 and 2: 0.25 * 0.04 = 0.01 and 0.01 * 4 = 0.04."""
    rewards, p, rho = (torch.tensor(x, dtype=torch.float64)[:, None] for x in ([1.0, 0.0], [0.5, 0.9], [0.2, 2.0]))
    mask = torch.ones(2, 1, dtype=torch.bool)
    out = optimal_token_baseline(
        rewards, p.log(), p.square(), mask, ["a", "a"], is_weights=rho, is_weighted=True
    ).advantages
    close(out, [[1 - 0.01 / 0.05], [-0.01 / 0.05]])
    with pytest.raises(ConfigError, match="rollout_correction"):
        optimal_token_baseline(rewards, p.log(), p.square(), mask, ["a", "a"], is_weighted=True)


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_lone_sample_may_be_worth_its_score(norm_by_std):
    """As with a mean of 0 and a deviation of 1; the same for the only one that masking left of a group."""
    rewards = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.5, 0.5], [9.0, 9.0]], dtype=torch.float64)
    mask = torch.ones(4, 2, dtype=torch.bool)
    mask[3] = False
    options = {"allow_singleton": True, "norm_by_std": norm_by_std}
    uid = ["lonely", "a", "b", "b"]
    out = grpo(rewards, mask, uid, lone_score=True, **options).advantages
    eps = 1e-6 if norm_by_std else 0.0
    close(out, [[3 / (1 + eps)] * 2, [1 / (1 + eps)] * 2, [1 / (1 + eps)] * 2, [0.0, 0.0]], 1e-12)
    assert (grpo(rewards, mask, uid, **options).advantages == 0).all()


def test_the_tail_that_one_sample_alone_reaches_has_no_advantage():
    rewards, mask = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.0, 0.0]]), torch.tensor([[True] * 3, [True, False, False]])
    for fn in (optimal_token_baseline, tir_optimal_token_baseline):
        out = fn(rewards, torch.full((2, 3), -0.3), torch.full((2, 3), 0.6), mask, ["a", "a"])
        assert out.advantages[0].bool().tolist() == [True, False, False]


def test_turns_are_lined_up_by_tokens_that_the_policy_wrote():
    """The second sample has tool output between its two tokens; only the multi-turn form compares token 2 with it."""
    mask = torch.tensor([[True, True, False], [True, False, True]])
    rewards = torch.tensor([[0.0, 1.0, 9.0], [0.0, 9.0, 0.0]])
    case = {"old_logp": torch.zeros(2, 3) - 1, "sum_pi_squared": torch.full((2, 3), 0.5), "uid": ["a", "a"]}
    case |= {"token_rewards": rewards, "mask": mask}
    alone = estimate("optimal_token_baseline", case, OPTIONS).advantages
    together = estimate("tir_optimal_token_baseline", case, OPTIONS).advantages
    close(alone, [[0.5, 0, 0], [-0.5, 0, 0]], 1e-6)
    close(together, [[0.5, 0.5, 0], [-0.5, 0, -0.5]], 1e-6)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ([1.0, 1.0, 1.0, 0.0], [1 / 3, 1 / 3, 1 / 3, -1.0]),
        ([0.5, 0.0, 1.5, 0.0], [0.0, -1.0, 2.0, -1.0]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([1.0, 1.0], [0.0, 0.0]),
    ],
)
def test_maxrl_by_hand(scores, expected):
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None]
    out = maxrl(rewards, torch.ones_like(rewards).bool(), ["a"] * len(scores)).advantages.flatten()
    close(out, expected, 1e-12)


def test_maxrl_refuses_negative_scores():
    rewards = torch.tensor([[1.0], [-0.5], [9.0]])
    mask = torch.tensor([[True], [True], [False]])
    with pytest.raises(ConfigError, match=r"no score may be negative[\s\S]*-0\.5"):
        maxrl(rewards, mask, ["a"] * 3)
    maxrl(-rewards.where(mask, 0) + 1, mask, ["a"] * 3)


def test_gigpo_by_hand():
    """Two turns begin in state 5 of the first episode and one of the second; 7 and 9 have nothing to compare with."""
    keys = torch.tensor([[5, 0, 7, 5, 0], [5, 0, 9, 0, 0]])
    mask = torch.tensor([[True, True, True, False, True], [True, True, True, False, False]])
    rewards = torch.zeros(2, 5, dtype=torch.float64)
    rewards[0, 4] = 1
    out = gigpo(rewards, keys, mask, ["a", "a"]).advantages
    first, second = [0.768333, 0.768333, 0.5, 0, 0.865833], [-1.134167, -1.134167, -0.5, 0, 0]
    close(out, [first, second], 1e-6)


def test_group_with_equal_scores_gives_exactly_zero():
    rewards = torch.full((4, 1), 0.1)
    assert (grpo(rewards, torch.ones(4, 1, dtype=torch.bool), ["a"] * 4).advantages.abs() < 1e-9).all()


def test_grpo_by_hand():
    """Scores 0, 0, 1, 1: mean 0.5, unbiased std 0.57735."""
    rewards = torch.tensor([[0.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
    out = grpo(rewards, torch.ones(4, 1, dtype=torch.bool), [7] * 4).advantages.flatten()
    close(out, [-0.866024, -0.866024, 0.866024, 0.866024], 1e-5)


def test_gae_by_hand_skips_the_hole():
    """r = 1 at the end, V = 0.5: delta_1 = 1 - 0.5, delta_0 = 0.5 - 0.5; lam 0.5 carries half of A_1 over the hole."""
    mask = torch.tensor([[True, False, True]])
    out = gae(torch.tensor([[0.0, 9.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.5]]), mask, lam=0.5, whiten=False)
    assert out.advantages.tolist() == [[0.25, 0.0, 0.5]]
    assert out.returns.tolist() == [[0.75, 0.0, 1.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0), (0.0, 1.0)])
def test_long_rows_keep_precision_in_fp32(gamma, lam):
    g = torch.Generator().manual_seed(0)
    r, v = (torch.randn(3, 1000, generator=g) for _ in range(2))
    mask = torch.rand(3, 1000, generator=g) < 0.9
    mine = gae(r, v, mask, gamma=gamma, lam=lam, whiten=False)
    _, returns = oracle.gae(r.tolist(), v.tolist(), mask.tolist(), gamma, lam)
    close(mine.returns, returns, 2e-5)


def test_one_valid_token_in_the_whole_batch():
    mask = torch.tensor([[True, False], [False, False]])
    out = reinforce_pp(torch.tensor([[3.0, float("nan")], [0.0, 0.0]]), mask)
    assert out.advantages.tolist() == [[0, 0], [0, 0]]
    assert out.returns[0, 0] == 3


@pytest.mark.parametrize("name", BUILT_IN)
def test_empty_batch(name):
    empty = torch.zeros(0)
    tokens = ("token_rewards", "values", "old_logp", "teacher_logp", "sum_pi_squared", "turn_keys")
    given_fields = {
        **dict.fromkeys((*tokens, "greedy_score", "running_baseline"), empty),
        "uid": [],
        "reward_parts": empty.view(0, 2),
    }
    form = {"mask": empty.bool(), "offsets": torch.zeros(1, dtype=torch.int64)}
    assert estimate(name, given_fields | form, OPTIONS).advantages.shape == (0,)


def test_user_function_gets_what_it_names():
    out = estimate("tests.algorithms.test_advantages:twice_the_reward", fields(make_case(0)), OPTIONS)
    close(out.advantages, 2 * make_case(0).rewards)


def twice_the_reward(token_rewards, gamma):
    assert gamma == 0.9
    return 2 * token_rewards, token_rewards


def test_remax_subtracts_a_share_from_whole_scores():
    scores, mask = torch.tensor([[0, 1], [0, 0]]), torch.ones(2, 2, dtype=torch.bool)
    out = remax(scores, mask, torch.tensor([0.25, 0.25])).advantages
    assert out.tolist() == [[0.75, 0.75], [-0.25, -0.25]]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_narrow_and_whole_inputs_are_worked_on_in_float32(name, dtype, packed):
    """The same numbers in float64 are the oracle: nothing is rounded to the dtype in which rewards came."""
    narrow = of(name, fields(make_case(2), packed=packed))
    for key, x in narrow.items():
        if key not in ("mask", "offsets", "uid"):
            narrow[key] = (3 * x).to(dtype)
    exact = {key: x.double() if key not in ("mask", "offsets", "uid") else x for key, x in narrow.items()}
    found, expected = estimate(name, narrow, OPTIONS), estimate(name, exact, OPTIONS)
    assert expected.advantages.any()
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        # float32 has 7 digits; sums over a dozen samples of size 10 and a division by their spread cost two.
        close(mine, theirs.float(), 2e-5)


def test_one_wide_input_makes_a_scan_wide():
    rewards, values = torch.ones(1, 2), torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64)
    out = gae(rewards, values, torch.ones(1, 2, dtype=torch.bool), whiten=False)
    close(out.advantages, [[2 - 1 / 3, 1 - 2 / 3]], 1e-15)
    assert out.advantages.dtype == torch.float64


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        ADVANTAGES.get("grppo")


def test_missing_input_is_named():
    case = fields(make_case(0))
    del case["values"]
    with pytest.raises(ConfigError, match="'gae' needs values"):
        estimate("gae", case, OPTIONS)


def test_required_inputs_are_known_before_a_run():
    assert ADVANTAGES.required("gae") == ["token_rewards", "values", "mask"]


def test_plain_calls_agree_with_estimate():
    case = make_case(1)
    close(rloo(case.rewards, case.mask, case.uid).advantages, run("rloo", case).advantages)
    close(remax(case.rewards, case.mask, case.greedy).advantages, run("remax", case).advantages)
