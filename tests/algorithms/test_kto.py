"""The loss of KTO against a loop over tokens in float64."""

import math

import pytest
import torch

from megarl.algorithms.kto import Counts, baseline, kto_loss
from megarl.algorithms.preference import Responses
from megarl.config.training import PreferenceConfig
from tests.algorithms.test_preference import assert_slope, cases

LABELS = [True, False, False, True, True, False]
SETTINGS = {
    "kto": ({}, 0.0),
    "with a baseline": ({"beta": 0.5}, 0.7),
    "weighted": ({"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.2}, 0.3),
}


def oracle(logp: list[float], responses: Responses, s: PreferenceConfig, z: float) -> list[tuple[float, float, float]]:
    """Loss, reward and log-prob of each example."""
    mask, ref, ends = responses.mask.tolist(), responses.ref_logp.tolist(), responses.offsets.tolist()
    found = []
    for i, desirable in enumerate(LABELS):
        tokens = [t for t in range(ends[i], ends[i + 1]) if mask[t]]
        r = sum(logp[t] - ref[t] for t in tokens)
        gain, weight = (r - z, s.desirable_weight) if desirable else (z - r, s.undesirable_weight)
        loss = weight * (1 - 1 / (1 + math.exp(-s.beta * gain)))
        found.append((loss, s.beta * r, sum(logp[t] for t in tokens)))
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_gradient_and_metrics_equal_a_loop_over_tokens(name):
    keys, z = SETTINGS[name]
    settings, (logp, responses) = PreferenceConfig(loss="kto", **keys), cases()
    logp.requires_grad_()
    loss, metrics = kto_loss(logp, responses, torch.tensor(LABELS), z, settings, Counts(3, 3))
    found = oracle(logp.tolist(), responses, settings, z)
    assert loss.item() == pytest.approx(sum(one[0] for one in found) / 6, rel=1e-12)
    numbers = metrics.result()
    for kind, wanted in (("chosen", True), ("rejected", False)):
        own = [one for one, label in zip(found, LABELS, strict=True) if label is wanted]
        assert numbers[f"rewards/{kind}"] == pytest.approx(sum(one[1] for one in own) / 3, rel=1e-12)
        assert numbers[f"logps/{kind}"] == pytest.approx(sum(one[2] for one in own) / 3, rel=1e-12)
    assert numbers["rewards/margins"] == pytest.approx(numbers["rewards/chosen"] - numbers["rewards/rejected"])
    right = [(one[1] > settings.beta * z) is label for one, label in zip(found, LABELS, strict=True)]
    assert numbers["rewards/accuracies"] == sum(right) / 6
    (gradient,) = torch.autograd.grad(loss, logp)
    assert len(gradient) == len(logp)
    assert_slope(
        gradient, logp.tolist(), lambda moved: sum(one[0] for one in oracle(moved, responses, settings, z)) / 6
    )


def test_parts_add_up_also_where_one_has_only_one_label():
    settings, (logp, responses) = PreferenceConfig(loss="kto", desirable_weight=2.0), cases()
    labels, counts = torch.tensor([True, True, False, False, False, False]), Counts(2, 4)
    whole, metrics = kto_loss(logp, responses, labels, 0.1, settings, counts)
    cut = int(responses.offsets[2])
    first = Responses(responses.mask[:cut], responses.offsets[:3], responses.ref_logp[:cut])
    rest = Responses(responses.mask[cut:], responses.offsets[2:] - cut, responses.ref_logp[cut:])
    parts = [
        kto_loss(logp[:cut], first, labels[:2], 0.1, settings, counts),
        kto_loss(logp[cut:], rest, labels[2:], 0.1, settings, counts),
    ]
    assert float(whole) == pytest.approx(sum(float(part) for part, _ in parts), rel=1e-14)
    assert parts[0][1].merge(parts[1][1]).result() == pytest.approx(metrics.result(), rel=1e-14)


def test_the_baseline_is_never_negative():
    assert (baseline(6.0, 4), baseline(-6.0, 4)) == (1.5, 0.0)
