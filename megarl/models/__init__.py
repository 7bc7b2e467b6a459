"""Hugging Face models as Megatron-Core models: configuration, attention, weights in and out."""

from megarl.system.compat import megatron as _megatron

_megatron.install()  # rewrites modules of megatron.core when they are imported, so this call must come first
