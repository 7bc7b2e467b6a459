"""The sections of the certificate, in their order."""

from __future__ import annotations

from megarl.certificate.harness import CertificateSection
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
    CertificateSection("environment", "driver, compiler, NCCL, topology, shared memory", environment.run, 300, 400),
    CertificateSection("kernels", "attention, log-probs, norm, activation against float64", kernels.run, 300, 400),
    CertificateSection(
        "training", "dense, tied, mixture, critic against float64, offload round trips", training.run, 600, 400
    ),
    CertificateSection("parity", "log-probs of every architecture against transformers", parity.run, 600, 400),
    CertificateSection("layouts", "every layout that fits the devices against one process", layouts.run, 900, 400),
    CertificateSection("generation", "embedded generation: graphs, log-probs, memory", generation.run, 600, 400),
    CertificateSection(
        "servers", "SGLang servers, colocated and apart, each transport, checksums", servers.run, 3600, 600
    ),
    CertificateSection("recovery", "checkpoints, kill -9 of a worker, the run that goes on", recovery.run, 900, 400),
    CertificateSection(
        "performance", "products, memory, copies, attention beside the data sheet", performance.run, 300, 400
    ),
    CertificateSection(
        "steps", "steps of GRPO: tokens/s, MFU by phase, decoding, weight updates", steps.run, 7800, 400
    ),
)
