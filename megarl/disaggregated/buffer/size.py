"""How much shared memory the samples between teams take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.dag.staleness import policy_of
from megarl.planning.workload import token_bytes
from megarl.system.errors import UnavailableError, count

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Handover, Placement

#: Of a Ray that hands over nothing but arguments and exit codes.
LEAST = 128 << 20
_BYTES_PER_SAMPLE = 256  # of one handover: its names, offsets, and what JSON puts around them
_BYTES_PER_GROUP = 4096  # of one handover: the header of a block, and Ray's own


def handover_bytes(config: RunConfig, handover: Handover) -> int:
    """About what one handover takes in a step in which all samples are as long as they may be.

        samples of a step x (`token_bytes` of all fields x tokens of the longest sample + 256) + groups x 4096

    Columns of text count like tokens. Pictures and other inputs of vision models, and transcripts that say more than
    the tokens of a sample, come on top of it.
    """
    sampling = config.rollout.sampling
    longest = config.data.max_prompt_tokens + config.response_tokens(sampling)
    per_sample = sum(token_bytes(config, name) for name in handover.fields) * longest + _BYTES_PER_SAMPLE
    return config.data.batch_size * (sampling.n * per_sample + _BYTES_PER_GROUP)


def steps_held(config: RunConfig) -> int:
    """Steps whose samples may be there at the same time, in either order.

    Groups that have begun and are not trained on yet; and what one team has finished another one may still read.
    """
    return 1 + policy_of(config).capacity // config.data.batch_size


def object_store_bytes(config: RunConfig, placement: Placement | None) -> int:
    """Size of the object store of a Ray that is started for a run: `steps_held` of all handovers, and at least `LEAST`.

    Where it is exceeded, handing samples over fails; with `placement.spill` Ray moves objects to disk.
    """
    if placement is None:
        return LEAST
    return max(LEAST, steps_held(config) * sum(handover_bytes(config, one) for one in placement.handovers))


def refuse_too_large(config: RunConfig, placement: Placement | None, free: int | None) -> UnavailableError | None:
    """Why Ray cannot be started here with the object store that the run needs; None: it can, or may use the disk.

    Args:
        free: bytes of shared memory; None: there is no such file system.
    """
    wanted = object_store_bytes(config, placement)
    if free is None or config.placement.spill or wanted <= max(free, LEAST):
        return None
    return UnavailableError(
        "the samples between teams do not fit into this machine's shared memory",
        where="data.batch_size",
        found=f"{wanted / 1e9:.1f} GB for {count(steps_held(config), 'step')} of the longest samples",
        allowed=f"{free / 1e9:.1f} GB, which is what /dev/shm has",
        fix="enlarge /dev/shm (docker run --shm-size), lower data.batch_size, rollout.sampling.n or max_new_tokens, or "
        "let Ray move samples to disk, which is slow: placement.spill=true",
    )
