"""Kernels, each with a torch reference."""
