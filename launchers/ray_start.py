"""Start Ray on a node of a job: `python -m megarl.launchers.ray_start OPTIONS`, which are those of `ray start`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megarl.launchers.ray_folder import INNER, make_ray_folder
from megarl.system.compat.ray_session import only_what_runs_ask
from megarl.system.errors import MegarlError


def main(arguments: Sequence[str]) -> None:
    """Do what `ray start` does, in a folder of its own and without the programs that no run asks; ends this process."""
    try:
        folder = make_ray_folder() / INNER
    except MegarlError as error:
        sys.exit(f"megarl: {error}")
    # Ray's command line imports Ray Serve, with FastAPI and pandas, for commands of its own: half of its start.
    sys.modules["ray.serve.scripts"] = None  # type: ignore[assignment]
    from ray.scripts import scripts

    with only_what_runs_ask():
        scripts.cli(["start", f"--temp-dir={folder}", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
