"""Checks before a start, by subject, on the loaded recipe; the plan of a run, and the memory it needs."""
