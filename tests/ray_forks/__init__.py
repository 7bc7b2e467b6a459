"""Ray for tests: its workers are forked from a process that has done their imports (clusters.py tells more)."""
