"""Which tasks of LIBERO-Plus to play, by the kind of their perturbation and its level.

LIBERO-Plus (Fei et al. 2025, arXiv:2510.13626) is a package that takes LIBERO's place, with thousands of tasks in each
of four suites. Each is one of LIBERO's ten tasks with one perturbation. Its file `benchmark/task_classification.json`
lists for every suite the tasks in their order, with their category and, for most of them, a level of difficulty.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .protocol import SettingError

#: Name of a kind of perturbation -> its category in LIBERO-Plus.
PERTURBATIONS = {
    "background": "Background Textures",
    "camera": "Camera Viewpoints",
    "language": "Language Instructions",
    "layout": "Objects Layout",
    "light": "Light Conditions",
    "noise": "Sensor Noise",
    "robot": "Robot Initial States",
}
LEVELS = (1, 2, 3, 4, 5)
_FILE = "benchmark/task_classification.json"
#: Folders of meshes and textures that LIBERO-Plus needs in addition to LIBERO's (`MESHES`).
ASSETS = ("new_objects", "textures")
_FIX = (
    "install https://github.com/sylvestf/LIBERO-plus in place of LIBERO in an interpreter of its own, and set `python` "
    "to it"
)


def check_kinds(root: Path, kinds: Sequence[str], levels: Sequence[int]) -> None:
    """Check the settings `perturbations` and `levels` against LIBERO's package in the folder `root`.

    Raises:
        SettingError: a name or level is unknown; perturbations are chosen, but the package is LIBERO; or none are
            chosen, but it is LIBERO-Plus.
    """
    for kind in kinds:
        if kind not in PERTURBATIONS:
            raise SettingError(
                "unknown kind of perturbation of LIBERO-Plus", "perturbations", kind, list(PERTURBATIONS)
            )
    for level in levels:
        if level not in LEVELS or isinstance(level, bool):
            problem = "LIBERO-Plus has no tasks with this difficulty level of perturbations"
            raise SettingError(problem, "levels", level, ", ".join(map(str, LEVELS)))
    if levels and not kinds:
        problem = "`levels` are difficulty levels of perturbations, so this setting needs `perturbations`, too"
        raise SettingError(problem, "levels", list(levels), "none")
    plus = (root / _FILE).is_file()
    if kinds and not plus:
        problem = f"this interpreter has LIBERO without perturbations: {root} has no {_FILE}; {_FIX}"
        raise SettingError(problem, "perturbations", list(kinds), "none with LIBERO")
    if plus and not kinds:
        problem = "this interpreter has LIBERO-Plus, all of whose tasks are perturbed; name kinds of perturbations"
        raise SettingError(problem, "perturbations", [], list(PERTURBATIONS))


def perturbed_tasks(root: Path, suite: str, kinds: Collection[str], levels: Collection[int]) -> dict[int, str]:
    """Return the chosen tasks of a suite: number of the task, from 0 -> its kind of perturbation.

    Args:
        root: folder of LIBERO-Plus' package `libero.libero`.
        kinds: chosen kinds of perturbations, names in `PERTURBATIONS`.
        levels: chosen levels of difficulty; empty: all levels, and tasks without a level.

    Raises:
        SettingError: LIBERO-Plus has no such suite.
    """
    entries: Mapping[str, Sequence[Mapping[str, Any]]] = json.loads((root / _FILE).read_text(encoding="utf-8"))
    if suite not in entries:
        raise SettingError("LIBERO-Plus has no perturbed tasks of this suite", "suites", suite, list(entries))
    names = {category: kind for kind, category in PERTURBATIONS.items()}
    return {
        entry["id"] - 1: names[entry["category"]]
        for entry in entries[suite]
        if names.get(entry["category"]) in kinds and (not levels or entry["difficulty_level"] in levels)
    }
