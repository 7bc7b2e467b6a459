"""The sections of the certificate, in their order."""

from __future__ import annotations

from megarl.certificate.harness import Section
from megarl.certificate.sections import environment, kernels, training

SECTIONS = (
    Section("environment", "driver, compiler, NCCL, topology, shared memory", environment.run, 300, 120),
    Section("kernels", "attention, log-probs, norm, activation against float64", kernels.run, 300, 120),
    Section("training", "dense, tied, mixture, critic against float64, offload round trips", training.run, 600, 180),
)
