"""As `tests.preload`, with the double of Transformer Engine in front of Megatron, which computes on CPUs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("te_double")))

import tests.preload  # noqa: F401
from megarl.models import layer_forms

layer_forms.refuse_device = lambda key, found, dtype: None
