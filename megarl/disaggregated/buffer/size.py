"""The shared memory that samples between teams need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.staleness import policy_of
from megarl.planning.workload import token_bytes
from megarl.system.errors import UnavailableError, count

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Handover, Placement

#: Bytes of the object store of a Ray that transfers nothing but arguments and exit codes.
LEAST = 128 << 20
_BYTES_PER_SAMPLE = 256  # bytes per sample in a handover: ids, offsets, and JSON syntax
_BYTES_PER_GROUP = 4096  # bytes per group in a handover: headers of a block, and Ray's own


def handover_bytes(config: RunConfig, handover: Handover) -> int:
    """Return the approximate bytes of one handover in a step whose samples all have the maximum length.

        samples of a step x (`token_bytes` of all fields x tokens of the longest sample + 256) + groups x 4096

    Text columns count like tokens, and expert responses like samples. Further sequences of an agent's episode, images
    and other inputs of vision models, and transcripts with more text than the sample's tokens, are not included.
    """
    sampling = config.rollout.sampling
    longest = config.data.max_prompt_tokens + config.response_tokens(sampling)
    per_sample = sum(token_bytes(config, name) for name in handover.fields) * longest + _BYTES_PER_SAMPLE
    experts = 0 if config.data.experts is None else config.data.experts.per_group
    return config.data.batch_size * ((sampling.n + experts) * per_sample + _BYTES_PER_GROUP)


def steps_held(config: RunConfig) -> int:
    """Return the number of steps whose samples may exist at the same time, for any `async.order`.

    Counted are all groups that have begun and are not trained on yet, and one more step, which some teams have finished
    and others may still read.
    """
    return 1 + policy_of(config).capacity // config.data.batch_size


def object_store_bytes(config: RunConfig, placement: Placement | None) -> int:
    """Return the bytes of Ray's object store for a run: all handovers of `steps_held` steps, at least `LEAST`.

    If a run hands over more samples, it fails; with `placement.spill` Ray moves objects to disk.
    """
    if placement is None:
        return LEAST
    return max(LEAST, steps_held(config) * sum(handover_bytes(config, handover) for handover in placement.handovers))


def refuse_too_large(config: RunConfig, placement: Placement | None, free: int | None) -> UnavailableError | None:
    """Return an error if the run's object store does not fit into this machine's memory and may not use the disk.

    Args:
        free: free bytes of /dev/shm; None: this machine has no /dev/shm.
    """
    wanted = object_store_bytes(config, placement)
    if free is None or config.placement.spill or wanted <= max(free, LEAST):
        return None
    return UnavailableError(
        "the samples between teams do not fit into this machine's shared memory",
        where="data.batch_size",
        found=f"{wanted / 1e9:.1f} GB for {count(steps_held(config), 'step')} of the longest samples",
        allowed=f"{free / 1e9:.1f} GB, the free part of /dev/shm",
        fix="enlarge /dev/shm (docker run --shm-size), lower data.batch_size, rollout.sampling.n or max_new_tokens, or "
        "let Ray move samples to disk, which is slow: placement.spill=true",
    )
