"""The best of a search as a recipe: `extends` the one that was searched, and only the keys that differ."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megarl.components import COMPONENTS
from megarl.config.load import dump_config, find_recipe, load_config, recipe_names
from megarl.config.yamlio import to_yaml
from megarl.planning.search import FoundPlan, describe_layout


def write_recipe(file: Path, recipe: str, best: FoundPlan) -> None:
    """Write what `best` changes of `recipe`, overrides included."""
    before = load_config(recipe, components=COMPONENTS)
    changed = differences(before.model_dump(mode="json"), best.config.model_dump(mode="json"))
    changed.pop("name", None)
    spread = best.choice.spread
    head = [
        f"# By megarl plan --search: {best.plan.step_s:.3g} s a step by formulas on {best.plan.hardware.describe()};",
        f"# {spread.describe()}; {describe_layout(best.choice.parallel, spread.trainers())}",
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    body = to_yaml({"extends": _parent(recipe, file), **changed})
    text = "\n".join([*head, _replacing(body, before.placement.teams, best.config.placement.teams)])
    draft = file.with_name(f".{file.stem}.draft.yaml")  # beside it, since the recipe is named from there
    try:
        draft.write_text(text)
        again = load_config(draft, components=COMPONENTS)
        assert dump_config(again) == dump_config(best.config.model_copy(update={"name": again.name})), (
            "what is written is read"
        )
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _parent(recipe: str, file: Path) -> str:
    """How `file` names the recipe: shipped ones by name, others relative to it."""
    found = find_recipe(recipe)
    if found.stem in recipe_names() and find_recipe(found.stem) == found and not Path(recipe).is_file():
        return found.stem
    return os.path.relpath(found.resolve(), file.resolve().parent)


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Keys of `after` with other values than in `before`, nested; a mapping that lost keys is there as a whole."""
    found: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if set(old) - set(value):
                found[key] = value
            elif inner := differences(old, value):
                found[key] = inner
        elif key not in before or value != old:
            found[key] = value
    return found


def _replacing(body: str, before: dict[str, Any], after: dict[str, Any]) -> str:
    """Where teams are gone, those that are left replace all: mappings are merged otherwise."""
    if not set(before) - set(after):
        return body
    lines = body.splitlines(keepends=True)
    at = next((n for n, line in enumerate(lines) if line.startswith("  teams:")), None)
    assert at is not None, "teams are among the differences"
    lines[at] = lines[at].replace("  teams:", "  teams: !replace", 1)
    return "".join(lines)
