"""The sections of the certificate, in their order."""

from __future__ import annotations

from megarl.certificate.harness import Section
from megarl.certificate.sections import (
    environment,
    generation,
    kernels,
    layouts,
    parity,
    performance,
    recovery,
    servers,
    steps,
    training,
)

SECTIONS = (
    Section("environment", "driver, compiler, NCCL, topology, shared memory", environment.run, 300, 400),
    Section("kernels", "attention, log-probs, norm, activation against float64", kernels.run, 300, 400),
    Section("training", "dense, tied, mixture, critic against float64, offload round trips", training.run, 600, 400),
    Section("parity", "log-probs of every architecture against transformers", parity.run, 600, 400),
    Section("layouts", "every layout that fits the devices against one process", layouts.run, 900, 400),
    Section("generation", "embedded generation: graphs, log-probs, memory", generation.run, 600, 400),
    Section("servers", "SGLang servers, colocated and apart, each transport, checksums", servers.run, 3600, 600),
    Section("recovery", "checkpoints, kill -9 of a worker, the run that goes on", recovery.run, 900, 400),
    Section("performance", "products, memory, copies, attention beside the data sheet", performance.run, 300, 400),
    Section("steps", "steps of GRPO: tokens/s, MFU by phase, decoding, weight updates", steps.run, 3600, 400),
)
