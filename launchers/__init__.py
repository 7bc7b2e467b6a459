"""Launchers, which start the workers of a run: local processes, torchrun, Ray."""
