"""Formulas for the needs and the speed of a run: parameters, FLOPs, bytes, seconds. No torch is used.

docs/planning.md has the formulas.
"""
