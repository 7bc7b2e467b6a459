"""Losses of preference pairs against a loop over tokens in float64."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from megarl.algorithms.kto import Counts, kto_loss
from megarl.algorithms.preference import Responses, local_pair_counts, preference_loss, score_loss
from megarl.config.training import PreferenceConfig

LENGTHS = [3, 5, 1, 2, 7, 4]  # of three pairs
SETTINGS = {
    "dpo": {},
    "dpo, sharp": {"beta": 2.5},
    "smoothed": {"label_smoothing": 0.2},
    "robust": {"loss": "robust", "label_smoothing": 0.2},
    "robust without wrong labels": {"loss": "robust"},
    "hinge": {"loss": "hinge", "beta": 0.8},
    "ipo": {"loss": "ipo"},
    "ipo of sums": {"loss": "ipo", "length_normalised": False},
    "of means": {"length_normalised": True, "beta": 2.0},
    "with a supervised term": {"sft_coef": 0.7},
}


def assert_slope(gradient: Sequence[float], at: list[float], function: Callable[[list[float]], float]) -> None:
    """Compare a gradient with central differences, which err by step^2 and by 1e-16 / step."""
    step = 1e-6
    for index, found in enumerate(gradient):
        ends = []
        for sign in (1, -1):
            moved = list(at)
            moved[index] += sign * step
            ends.append(function(moved))
        assert float(found) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-9)


def cases(seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    logp, ref = -2 * torch.rand(2, n, generator=g, dtype=torch.float64)
    mask = torch.rand(n, generator=g) < 0.8
    offsets = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    mask[offsets[:-1]] = True  # each response has a token that counts
    return logp, Responses(mask, offsets, ref)


def oracle(logp: list[float], responses: Responses, s: PreferenceConfig) -> tuple[float, list[dict[str, float]]]:
    """The loss of all pairs, and of each what the metrics are means of."""
    mask, ref, ends = responses.mask.tolist(), responses.ref_logp.tolist(), responses.offsets.tolist()
    counts = [range(ends[i], ends[i + 1]) for i in range(len(LENGTHS))]
    tokens = [[t for t in row if mask[t]] for row in counts]
    loss, pairs = 0.0, []
    chosen_tokens = sum(len(row) for row in tokens[::2])
    for better, worse in zip(tokens[::2], tokens[1::2], strict=True):
        ratio = [sum(logp[t] - ref[t] for t in row) for row in (better, worse)]
        per = [ratio[0] / len(better), ratio[1] / len(worse)] if s.means else ratio
        m = per[0] - per[1]
        minus_log_sigmoid = lambda x: math.log1p(math.exp(-x))  # noqa: E731
        right, flipped = minus_log_sigmoid(s.beta * m), minus_log_sigmoid(-s.beta * m)
        e = s.label_smoothing
        value = {
            "sigmoid": (1 - e) * right + e * flipped,
            "robust": ((1 - e) * right - e * flipped) / (1 - 2 * e),
            "hinge": max(0.0, 1 - s.beta * m),
            "ipo": (m - 1 / (2 * s.beta)) ** 2,
        }[s.loss]
        loss += value / 3 - s.sft_coef * sum(logp[t] for t in better) / chosen_tokens
        rewards = [s.beta * r for r in ratio]
        pairs.append(
            {
                "preference/loss": value,
                "rewards/chosen": rewards[0],
                "rewards/rejected": rewards[1],
                "rewards/margins": rewards[0] - rewards[1],
                "rewards/accuracies": float(rewards[0] > rewards[1]),
                "logps/chosen": sum(logp[t] for t in better),
                "logps/rejected": sum(logp[t] for t in worse),
            }
        )
    return loss, pairs


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_gradient_and_metrics_equal_a_loop_over_tokens(name):
    settings, (logp, responses) = PreferenceConfig(**SETTINGS[name]), cases()
    logp.requires_grad_()
    counts = local_pair_counts(responses.mask, responses.offsets)
    loss, metrics = preference_loss(logp, responses, settings, counts)
    expected, pairs = oracle(logp.tolist(), responses, settings)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    numbers = metrics.result()
    for key in pairs[0]:
        assert numbers[key] == pytest.approx(sum(pair[key] for pair in pairs) / 3, rel=1e-12, abs=1e-15), key
    (gradient,) = torch.autograd.grad(loss, logp)
    assert len(gradient) == len(logp)
    assert_slope(gradient, logp.tolist(), lambda moved: oracle(moved, responses, settings)[0])
    assert not gradient[~responses.mask].any()


def test_parts_of_whole_pairs_add_up():
    settings, (logp, responses) = PreferenceConfig(sft_coef=0.5), cases()
    counts = local_pair_counts(responses.mask, responses.offsets)
    whole, metrics = preference_loss(logp, responses, settings, counts)
    cut = int(responses.offsets[2])
    first = Responses(responses.mask[:cut], responses.offsets[:3], responses.ref_logp[:cut])
    rest = Responses(responses.mask[cut:], responses.offsets[2:] - cut, responses.ref_logp[cut:])
    parts = [preference_loss(logp[:cut], first, settings, counts), preference_loss(logp[cut:], rest, settings, counts)]
    assert float(whole) == pytest.approx(sum(float(part) for part, _ in parts), rel=1e-14)
    merged = parts[0][1].merge(parts[1][1]).result()
    assert merged == pytest.approx(metrics.result(), rel=1e-14)


def test_pairs_that_differ_by_rounding_only_are_ties():
    _, responses = cases()
    counts = local_pair_counts(responses.mask, responses.offsets)
    noise = torch.repeat_interleave(torch.tensor([-1.0, 1.0] * 3), responses.offsets.diff())  # chosen ones are likelier
    accuracies = [
        preference_loss(responses.ref_logp * (1 + scale * noise), responses, PreferenceConfig(), counts)[1].result()
        for scale in (0.0, 1e-7, 1e-2)
    ]
    assert [numbers["rewards/accuracies"] > 0 for numbers in accuracies] == [False, False, True]


@pytest.mark.parametrize(
    ("dtype", "scale", "tie"),
    [
        (torch.float32, 1e-7, True),
        (torch.float32, 1e-3, False),
        (torch.bfloat16, 1e-3, True),
        (torch.bfloat16, 0.1, False),
    ],
)
def test_a_tie_is_equality_up_to_the_rounding_of_the_model(dtype, scale, tie):
    _, responses = cases()
    counts, settings = local_pair_counts(responses.mask, responses.offsets), PreferenceConfig()
    noise = torch.repeat_interleave(torch.tensor([-1.0, 1.0] * 3), responses.offsets.diff())
    moved = responses.ref_logp * (1 + scale * noise)
    assert (preference_loss(moved, responses, settings, counts, dtype)[1].result()["rewards/accuracies"] == 0) is tie
    scores = torch.tensor([2.0, 1.0, -0.5]).repeat_interleave(2) + scale * torch.tensor([1.0, -1.0] * 3)
    assert (score_loss(scores, None, settings, 3.0, dtype)[1].result()["rewards/accuracies"] == 0) is tie
    labels = torch.tensor([True, False] * 3)
    examples = kto_loss(moved, responses, labels, 0.0, PreferenceConfig(loss="kto"), Counts(3, 3), dtype)[1].result()
    assert (examples["rewards/accuracies"] == 0) is tie


def test_what_a_long_response_has_learnt_is_no_tie_in_bf16():
    mask, offsets = torch.ones(2000, dtype=torch.bool), torch.tensor([0, 1000, 2000])
    reference = -torch.ones(2000)
    moved = reference.clone()
    moved[:1000] += 0.001
    responses = Responses(mask, offsets, reference)
    counts = local_pair_counts(mask, offsets)
    numbers = preference_loss(moved, responses, PreferenceConfig(), counts, torch.bfloat16)[1].result()
    assert numbers["rewards/accuracies"] == 1


@pytest.mark.parametrize("margins", [None, [0.5, -0.2, 1.0]])
def test_the_loss_of_scores_is_that_of_bradley_and_terry(margins):
    scores = torch.tensor([1.0, 0.2, -0.5, 0.7, 2.0, 2.0], dtype=torch.float64, requires_grad=True)
    settings = PreferenceConfig(loss="bradley_terry", center_coef=0.01)
    given = None if margins is None else torch.tensor(margins, dtype=torch.float64)
    loss, metrics = score_loss(scores, given, settings, 3.0)
    values, expected, slopes = scores.tolist(), 0.0, []
    for i in range(3):
        better, worse = values[2 * i : 2 * i + 2]
        d = better - worse - (margins[i] if margins else 0.0)
        expected += (math.log1p(math.exp(-d)) + 0.01 * (better + worse) ** 2) / 3
        pull, centre = -1 / (1 + math.exp(d)), 0.02 * (better + worse)
        slopes += [(pull + centre) / 3, (-pull + centre) / 3]
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.grad(loss, scores)[0].tolist() == pytest.approx(slopes, rel=1e-12)
    numbers = metrics.result()
    assert numbers["rewards/margins"] == pytest.approx((0.8 - 1.2 + 0.0) / 3)
    assert (numbers["rewards/accuracies"], numbers["rewards/chosen"]) == pytest.approx((1 / 3, 2.5 / 3))
    assert numbers["preference/loss"] == pytest.approx(expected)
