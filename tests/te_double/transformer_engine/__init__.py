"""A double of Transformer Engine 2.20 that computes with torch, on CPUs.

It has the modules and arguments that Megatron-Core 0.16 and 0.19 use, and refuses what the real package refuses.
tests/models/test_te_double.py compares the arguments with the real package's. Put tests/te_double on the import path
before Megatron is imported: tests/dist.py, `run_with_te`.
"""

from transformer_engine import common, pytorch  # noqa: F401

__version__ = "2.20.2"
