"""Default kinds of layers in classes where every n-th layer has no window (`sliding_window_pattern`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.architectures.base import FULL, SLIDING, Refuse
from megarl.models.layers.mixer import Mixer


def period_of(values: Mapping[str, Any]) -> int | None:
    """Return n if every n-th layer has no window; None: `sliding_window_pattern` is not a positive integer."""
    pattern = values["sliding_window_pattern"]
    return pattern if isinstance(pattern, int) and pattern > 0 else None


def pattern_types(values: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer by `sliding_window_pattern`: every n-th layer has full attention, the others have a
    window. Without a pattern all layers have full attention.
    """
    count, period = values["num_hidden_layers"], period_of(values)
    return [SLIDING if period and (layer + 1) % period else FULL for layer in range(count)]


def refuse_no_pattern(raw: Mapping[str, Any], values: Mapping[str, Any], refuse: Refuse) -> None:
    """Refuse a `sliding_window_pattern` from which transformers cannot compute which layers have a window, unless
    `layer_types` lists the kinds of layers.
    """
    if values["layer_types"] is None and period_of(values) is None:
        text = "a config without layer_types needs a pattern from which the kinds of layers are computed"
        refuse("sliding_window_pattern", values["sliding_window_pattern"], "integer > 0", text)


def odd_windows(mixers: Sequence[Mixer]) -> str | None:
    """Return why SGLang, which leaves out the window of every n-th layer, would give windows to other layers; None if
    it gives them to the same layers."""
    windows = [mixer.window is not None for mixer in mixers]
    period = windows.index(False) + 1 if not all(windows) else len(windows) + 1
    if windows != [any(windows) and layer % period != 0 for layer in range(1, len(windows) + 1)]:
        return "SGLang expects a layer without a window after every n layers with one, and this model has other layers"
    return None
