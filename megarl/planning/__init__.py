"""Formulas for the needs and the speed of a run: parameters, FLOPs, bytes, seconds. No torch.

Each formula is derived in docs/planning.md.
"""
