"""Where a run's numbers go: files, console, MLflow, trace and report."""
