"""Waits for the nodes of a Ray cluster: `python -m megarl.launchers.ray_nodes ADDRESS NODES SECONDS`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from megarl.system.errors import MegarlError, UnavailableError

_LOOK_S = 0.5


def wait_for_nodes(address: str, count: int, limit_s: float) -> None:
    """Return when `count` nodes of the cluster at `address` are alive. Raise UnavailableError if there were fewer
    within `limit_s`.
    """
    import ray

    until, alive = time.monotonic() + limit_s, 0
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        while time.monotonic() < until:
            alive = sum(bool(node["Alive"]) for node in ray.nodes())
            if alive >= count:
                return
            time.sleep(_LOOK_S)
    finally:
        ray.shutdown()
    raise UnavailableError(
        "Ray has too few nodes",
        where=f"Ray at {address}",
        found=f"{alive} after {limit_s:g} s",
        allowed=f"cluster.nnodes = {count}",
        fix="read the output of the other nodes (RUN_DIR/launch/job-*.*.txt), or raise cluster.start_timeout_s",
    )


def main(arguments: Sequence[str]) -> int:
    """Wait for the nodes; exit code 0 when they are alive."""
    address, count, limit_s = arguments
    try:
        wait_for_nodes(address, int(count), float(limit_s))
    except MegarlError as error:
        print(f"megarl: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
