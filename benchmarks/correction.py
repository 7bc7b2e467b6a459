"""Cost of rollout correction: `python -m megarl.benchmarks.correction`."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

ROWS, WIDTH, REPEATS = 1024, 4096, 5


def rollout_correction() -> dict[str, Any]:
    """CPU-seconds of one correction of 1024 x 4096 tokens on one thread: token weights, sequence rejection, metrics.

    The median of 5 runs behind one that is not counted, for the padded and for the packed form.
    """
    import torch

    from megarl.algorithms.correction import Rule, correct

    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(ROWS, WIDTH, generator=g)
    new = old + 0.01 * torch.randn(ROWS, WIDTH, generator=g)
    lengths = torch.randint(WIDTH // 2, WIDTH + 1, (ROWS,), generator=g)
    mask = torch.arange(WIDTH) < lengths[:, None]
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    knobs: dict[str, Any] = {"is_level": "token", "is_threshold": 2.0, "rules": [Rule("sequence", upper=2.0)]}
    packed = (new[mask], old[mask], mask[mask])
    forms = {
        "padded": lambda: correct(new, old, mask, **knobs),
        "packed": lambda: correct(*packed, offsets=offsets, **knobs),
    }
    seconds = {}
    for name, call in forms.items():
        call()
        seconds[name] = statistics.median(_cpu_seconds(call) for _ in range(REPEATS))
    return {"name": "rollout correction", "rows": ROWS, "width": WIDTH, "tokens": int(mask.sum()), "cpu_s": seconds}


def _cpu_seconds(call: Any) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    print(json.dumps(rollout_correction(), indent=1))
