"""Starts Ray on a node of a job: `python -m megarl.launchers.ray_start OPTIONS`, with the options of `ray start`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megarl.launchers.ray_folder import INNER, make_ray_folder
from megarl.system.compat.ray_session import without_unused_programs
from megarl.system.errors import MegarlError


def main(arguments: Sequence[str]) -> None:
    """Run `ray start` in its own folder and without the Ray services that no run needs; does not return."""
    try:
        folder = make_ray_folder() / INNER
    except MegarlError as error:
        sys.exit(f"megarl: {error}")
    # Skip the import of Ray Serve (with FastAPI and pandas): it takes half of the start-up time of Ray's command line,
    # which needs it only for Serve's commands.
    sys.modules["ray.serve.scripts"] = None  # type: ignore[assignment]
    from ray.scripts import scripts

    with without_unused_programs():
        scripts.cli(["start", f"--temp-dir={folder}", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
