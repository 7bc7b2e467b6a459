"""Names of metrics that every tracker takes, held against MLflow's own rules."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.tracking.names import SafeNames, safe_name

NAMES = st.text(st.sampled_from("ab/.@+ \n\t_-:é数\ud83d\0"), max_size=12) | st.text(max_size=400)


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("val/best@8", "val/best_at_8"),
        ("val//test/acc", "val/test/acc"),
        ("/", "_"),
        ("timing_s/step", "timing_s/step"),
    ],
)
def test_names_keep_what_can_stay(name, safe):
    assert safe_name(name) == safe


@pytest.mark.parametrize(
    ("name", "start"),
    [("val/gsm8k+aug/best@8", "val/gsm8k_aug/best_at_8_"), ("val/../acc", "val/__/acc_"), ("..a", "__a_"), ("é", "__")],
)
def test_a_name_that_loses_something_gets_a_hash_whatever_came_before(name, start):
    safe, other = safe_name(name), name.replace("+", "*").replace("..", "++").replace("é", "è")
    assert re.fullmatch(re.escape(start) + "[0-9a-f]{6}", safe)
    names = SafeNames()
    assert (names.of(other), names.of(name)) == (safe_name(other), safe)


@given(NAMES)
@settings(max_examples=75, deadline=None)
def test_mlflow_takes_every_safe_name(name):
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    safe = safe_name(name)
    _validate_metric_name(safe)
    _validate_param_name(safe)
    assert 0 < len(safe) <= 250
    assert safe_name(safe) == safe or len(name) > 200
    safe.encode()


@given(st.lists(NAMES, unique=True, max_size=8))
@settings(max_examples=50, deadline=None)
def test_no_two_metrics_share_a_safe_name(names):
    safe = SafeNames()
    assert len({safe.of(name) for name in names}) == len(names)
    assert [safe.of(name) for name in names] == [safe.of(name) for name in names]
