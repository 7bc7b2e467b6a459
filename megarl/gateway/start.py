"""Runs `main` of a module of megarl with another interpreter than the trainer's: `python start.py MODULE ARGUMENTS...`.

That interpreter needs neither megarl nor its packages: the modules that run this way import the standard library and
the package that they are for, which `make lint` checks.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

if __name__ == "__main__":
    sys.path[0] = ""  # modules of the working folder, as with `python -m`, and not the files of this folder
    package = ModuleType("megarl")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["megarl"] = package
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()
