"""Checks of robots' recipes before a start."""
