"""Hugging Face models as Megatron-Core models: configuration, attention, weights in and out."""

from megarl.system.compat import megatron as _megatron

_megatron.install()  # it rewrites modules of megatron.core when they are imported, so it must come first
