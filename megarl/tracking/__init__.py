"""Destinations of a run's numbers: files, console, MLflow, trace and report."""
