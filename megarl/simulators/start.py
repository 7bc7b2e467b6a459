"""The program of a simulator's process: `python -I start.py SOCKET MEMORY`.

The interpreter is the simulator's, and megarl need not be installed in it. So this folder becomes `megarl.simulators`
of a package `megarl` that holds nothing else: included simulators and a user's file import the same names here and in
the trainer. Neither the trainer's packages nor the files of this folder are on the path (a simulator in `metaworld.py`
finds the real `metaworld`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGE = "megarl.simulators"


def load(folder: Path) -> None:
    """Make `folder` importable as PACKAGE, in an interpreter without megarl."""
    above = ModuleType(PACKAGE.partition(".")[0])
    above.__path__ = []
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules.update({above.__name__: above, PACKAGE: package})
    spec.loader.exec_module(package)


if __name__ == "__main__":
    load(Path(__file__).resolve().parent)
    given = list(map(int, sys.argv[1:]))
    importlib.import_module(f"{PACKAGE}.reaper").guarded(*given)  # before NumPy starts its threads
    importlib.import_module(f"{PACKAGE}.worker").serve(*given)
