"""Kernels, each with its torch reference."""
