"""How much shared memory the samples between teams take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.run import RunConfig
    from megarl.dag.placement import Placement

#: Of a Ray that hands over nothing but arguments and exit codes.
LEAST = 128 << 20
_BYTES_PER_TOKEN = 8  # of one field: token ids are int64, log-probs and values fp32
_STEPS = 2  # what one team has finished another may still read, while the next step is given


def object_store_bytes(config: RunConfig, placement: Placement | None) -> int:
    """Size of the object store of a Ray that is started for a run; at least `LEAST`.

        8 bytes x fields of all handovers x tokens of the longest sample x samples of a step x 2 steps

    An upper bound for fields with one value per token or sample; pictures and other inputs of vision models come on top
    of it. Where it is exceeded, Ray moves objects to disk.

    Args:
        config: of the run.
        placement: its teams; None: there is one.
    """
    fields = sum(len(handover.fields) for handover in placement.handovers) if placement is not None else 0
    sampling = config.rollout.sampling
    longest = config.data.max_prompt_tokens + config.response_tokens(sampling)
    samples = config.data.batch_size * sampling.n
    return max(LEAST, _STEPS * _BYTES_PER_TOKEN * fields * longest * samples)
