"""How much shared memory the samples between teams take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Handover, Placement

#: Of a Ray that hands over nothing but arguments and exit codes.
LEAST = 128 << 20
_BYTES_PER_TOKEN = 8  # of one field: token ids are int64, log-probs and values fp32
_STEPS = 2  # what one team has finished another may still read, while the next step is given


def handover_bytes(config: RunConfig, handover: Handover) -> int:
    """Most that one handover takes in a step.

        8 bytes x fields x tokens of the longest sample x samples of a step

    An upper bound for fields with one value per token or sample; pictures and other inputs of vision models come on top
    of it.
    """
    sampling = config.rollout.sampling
    longest = config.data.max_prompt_tokens + config.response_tokens(sampling)
    return _BYTES_PER_TOKEN * len(handover.fields) * longest * config.data.batch_size * sampling.n


def object_store_bytes(config: RunConfig, placement: Placement | None) -> int:
    """Size of the object store of a Ray that is started for a run: two steps of all handovers, and at least `LEAST`.

    Where it is exceeded, Ray moves objects to disk.

    Args:
        config: of the run.
        placement: its teams; None: there is one.
    """
    handovers = () if placement is None else placement.handovers
    return max(LEAST, _STEPS * sum(handover_bytes(config, handover) for handover in handovers))
