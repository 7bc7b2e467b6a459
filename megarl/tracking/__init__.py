"""Where a run's metrics go: files, console, MLflow, trace and report."""
