"""Hugging Face models as Megatron-Core models: configuration, attention, weights in and out."""

from megarl.system.compat import megatron as _megatron

_megatron.install()  # before any module of this package imports megatron.core
