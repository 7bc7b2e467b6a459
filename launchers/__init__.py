"""Launchers start a run's workers (as local processes, with torchrun or with Ray) or submit it to Slurm or
Kubernetes.
"""
