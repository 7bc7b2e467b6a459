"""Checks of a loaded recipe before a start, by subject, and the memory that a run needs."""
