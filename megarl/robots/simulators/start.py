"""The program of a simulator's process: `python -I start.py SOCKET MEMORY`.

The interpreter is the simulator's, and megarl need not be installed in it. So the folder of this package becomes a
package `megarl` whose own `__init__` does not run: built-in simulators and a user's file import the same names here and
in the trainer. They may use `megarl.robots.simulators` and those modules of `megarl.system` that import nothing but the
standard library and numpy, which `make lint` checks. Neither the trainer's packages nor the files of this folder are on
the path (a simulator in `metaworld.py` finds the real `metaworld`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def load(folder: Path) -> None:
    """Make the modules in `folder` importable as those of `megarl`, in an interpreter without megarl."""
    package = ModuleType("megarl")
    package.__path__ = [str(folder)]
    sys.modules["megarl"] = package


if __name__ == "__main__":
    load(Path(__file__).resolve().parents[2])
    from megarl.system.reaper import guarded

    descriptors = list(map(int, sys.argv[1:]))
    guarded(*descriptors)  # forks, which must happen before the import of NumPy starts threads
    from megarl.robots.simulators.worker import serve

    serve(*descriptors)
