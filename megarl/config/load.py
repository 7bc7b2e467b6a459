"""Loading a recipe file as a RunConfig: inheritance, overrides, and errors that name file, line, key and fix."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megarl.config.base import ComponentSection, Section, raise_problems
from megarl.config.components import Components, settle
from megarl.config.data import IMAGES_BESIDE
from megarl.config.fields import (
    INTEGER,
    Key,
    alternatives,
    describe_allowed,
    entries_of,
    fields_of,
    find_key,
    iter_keys,
    names_component,
    section_of,
    wrong_value,
)
from megarl.config.model import ModelConfig
from megarl.config.other_names import unknown_keys
from megarl.config.precision import with_precision
from megarl.config.run import RunConfig
from megarl.config.training import ADAPTER_LR, FRESH_LR, TRAINED_LR
from megarl.config.yamlio import Document, parse_tagged, parse_texts, parse_value, read_yaml, to_yaml
from megarl.system.credentials import take_out
from megarl.system.errors import ConfigError, close_files, close_matches
from megarl.system.imports import is_file_reference

_PATHS = (
    *(("model", "path"), ("model", "tokenizer"), ("reference", "path"), ("reward_model", "path")),
    *(("critic", "path"), ("teacher", "path")),
    *(("data", "train_files"), ("data", "val_files"), ("sft", "train_files")),
    *(("trainer", "resume"), ("tracking", "dir"), ("placement", "measured")),
)
#: Keys that hold a name or `file.py:fn`. Relative paths are not resolved for a plain name, as a folder may have that
#: name.
_FUNCTIONS = (("reward", "name"), ("algorithm", "pipeline"))
_TEMPLATE = ("data", "override_chat_template")  # holds the text of a template, or the name of a file with it
_NULLS = ("null", "~")
#: Sections that name a component.
_COMPONENTS = {
    key.path: key.section.named_by
    for key in iter_keys()
    if key.section is not None and issubclass(key.section, ComponentSection)
}
_RECORD = "run.json"  # the file that marks a run folder
#: Components that are registered in layers above this one: the recipe key that names the component, the section that
#: holds the component's own keys, and the keys of this section that all components share.
_OTHERS = (("env.name", "env", ("name", "on_error")), ("reward.name", "reward.kwargs", ()))
_NAMED = [*((f"{path}.{key}", path) for path, key in _COMPONENTS.items()), *((name, path) for name, path, _ in _OTHERS)]


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    components: Components | None = None,
    check_own: bool = True,
    run_dir: Path | None = None,
) -> RunConfig:
    """Read a recipe file, or a shipped recipe by its bare name, and apply `key.path=value` overrides in order.

    `extends:` (a file, a bare name, or a list of them; relative to the file that holds it) is merged below the file,
    key by key; `name` is not inherited and defaults to the file's stem. ConfigError lists all problems.

    With `components`, the own keys of the components in section `algorithm` (such as the loss) are validated, and their
    defaults filled in; with `check_own=False`, or without `components`, these keys stay as given. If a file or override
    names a different component (also a reward or an environment) from the one in the files it extends, the keys that
    only the replaced component has are dropped; this needs `components`. `run_dir` is the folder of a run that may be
    continued; `model.dtype: auto` then keeps the precision of that run.
    """
    file = find_recipe(path)
    document = _read_with_parents(file, ())
    document.data.setdefault("name", file.stem)
    layers = set(_value_paths(document.data))
    # Some sections have defaults that differ from their model's (rollout.sampling.n is 8, not 1). Setting one key of
    # such a section keeps the others.
    defaults = Document(RunConfig(name="").model_dump())
    del defaults.data["cluster"]["max_restarts"]  # the default of max_restarts depends on the placement
    del defaults.data["sft"]["optim"]["lr"]  # the default of the learning rate depends on the model
    _merge(defaults, document)
    document = defaults
    overrides, problems = split_overrides(overrides)
    given: set[tuple[str, ...]] = set()
    for text in overrides:
        try:
            given |= _apply_override(document, text, components)
        except ConfigError as problem:
            problems.append(problem)
    # An override of a component's key belongs to the new component, even if the override that names it comes later.
    document.inherited -= given
    dropped = _drop_inherited(document, components) if components is not None else []
    _expand_home(document.data)
    config, invalid = _validate(document, str(file), components if check_own else None)
    raise_problems(problems + invalid)
    assert config is not None
    if config.model.dtype == "auto":
        config, line = with_precision(config, run_dir)
        dropped.append(line)
    for line in dropped:
        print(f"megarl: {line}", file=sys.stderr)
    config = config.with_written(_written(document, file), _given(document, layers))
    if "lr" not in document.data["sft"]["optim"]:
        optim = config.sft.optim.model_copy(update={"lr": _fine_tuning_lr(config.model)})
        config = config.model_copy(update={"sft": config.sft.model_copy(update={"optim": optim})})
    if "max_restarts" in document.data["cluster"]:
        return config
    restarts = config.placement.default_max_restarts
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"max_restarts": restarts})})


def _written(document: Document, file: Path) -> set[str]:
    """Return the dotted keys that the user set, in an override or in `file`, unless `file` is a shipped recipe or a
    run's record.
    """
    shipped = file.resolve().parent == recipe_folder()
    # the recipe in a run folder lists every key, so it does not show which keys the user set
    user_file = () if shipped or (file.parent / _RECORD).exists() else (f"{file}:",)
    places = ("override ", *user_file)
    return {".".join(path) for path in _value_paths(document.data) if _origin(document, path, "").startswith(places)}


def _given(document: Document, layers: set[tuple[str, ...]]) -> set[str]:
    """Return the dotted keys of `document` that an override or a recipe file (`layers`: its paths) sets."""
    paths = _value_paths(document.data)
    return {".".join(path) for path in paths if path in layers or _origin(document, path, "").startswith("override ")}


def _value_paths(data: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _value_paths(value, (*above, name))
        else:
            yield (*above, name)


def _fine_tuning_lr(model: ModelConfig) -> float:
    """Return the default learning rate of fine-tuning, which is smaller for a model that is already trained."""
    if model.path is None:
        return FRESH_LR
    return TRAINED_LR if model.lora is None else ADAPTER_LR


def _expand_home(data: dict[str, Any]) -> None:
    """Replace a leading `~` in the values of path keys, in place, so that readers of a path need not do it."""
    teacher = data.get("teacher")
    models = teacher.get("models") if isinstance(teacher, dict) else None
    several = list(models.values()) if isinstance(models, dict) else []
    for part, name in [(data.get(section), name) for section, name in (*_PATHS, *_FUNCTIONS)] + [
        (model, "path") for model in several
    ]:
        if not isinstance(part, dict):
            continue
        value = part.get(name)
        if isinstance(value, str):
            part[name] = os.path.expanduser(value)
        elif isinstance(value, list):
            part[name] = [os.path.expanduser(item) if isinstance(item, str) else item for item in value]


def with_absolute_paths(overrides: Sequence[str]) -> list[str]:
    """Return the overrides, in which relative paths to existing files and folders are replaced by absolute ones."""
    return [_with_absolute_path(text) for text in overrides]


def _with_absolute_path(text: str) -> str:
    dotted, _, raw = text.partition("=")
    path = tuple(dotted.strip().split("."))
    key = find_key(path)
    if key is None or key.section or key.path != ".".join(path):
        return text
    try:
        value = _parse_for(key, raw)
    except yaml.YAMLError:
        return text  # reading the recipe with this override raises the error
    if isinstance(value, list):
        return f"{dotted}={json.dumps([_absolute(item, path) for item in value], ensure_ascii=False)}"
    return f"{dotted}={_absolute(value, path)}" if isinstance(value, str) else text


def _absolute(value: Any, path: tuple[str, ...]) -> Any:
    """Return `value` of the key `path` as an absolute path if it is `file.py:fn` or an existing path."""
    if isinstance(value, dict):  # an entry of algorithm.pipeline
        return {key: _absolute(item, path) if key == "stage" else item for key, item in value.items()}
    if not isinstance(value, str) or os.path.isabs(value):
        return value
    places = [value, value.rpartition("@")[0]] if path in _PATHS or path == _TEMPLATE or path[-1] == "path" else []
    if is_file_reference(value) or any(place and os.path.exists(place) for place in places):
        return os.path.join(os.getcwd(), value)
    return value


def hide_credentials(config: RunConfig) -> RunConfig:
    """Return the recipe with user name and password moved from `tracking.mlflow_uri` to environment variables. Call
    this before anything is written: the run writes, shows and passes on the returned recipe.
    """
    uri = config.tracking.mlflow_uri
    if uri is None or (masked := take_out(uri, os.environ)) == uri:
        return config
    tracking = config.tracking.model_copy(update={"mlflow_uri": masked})
    return config.model_copy(update={"tracking": tracking})


def dump_config(config: RunConfig) -> str:
    """Return the resolved recipe as YAML; `load_config` of that text gives an equal configuration."""
    return to_yaml(config.model_dump(mode="python"))


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of `after` whose values differ from those in `before`, as nested mappings. A mapping that lost
    keys is returned whole.
    """
    changed: dict[str, Any] = {}
    for key, value in after.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            if set(old) - set(value):
                changed[key] = value
            elif inner := differences(old, value):
                changed[key] = inner
        elif key not in before or value != old:
            changed[key] = value
    return changed


def changed_keys(config: RunConfig, components: Components) -> tuple[dict[str, Any], int]:
    """Return the keys whose values are not the defaults, nested, and the number of all other keys. A section that is
    null by default is included even when all of its keys have their defaults.
    """
    optional = []
    defaults, data = RunConfig(name="").model_dump(), config.model_dump()
    defaults["cluster"]["max_restarts"] = config.placement.default_max_restarts
    for key in iter_keys():
        above, _, name = key.path.rpartition(".")
        if key.section is not None and isinstance(_value_at(data, key.path), dict):
            place = _at(defaults, above) if above else defaults
            if place.get(name) is None:
                place[name] = _defaults_of(key.section)
                optional.append(key.path)
        if key.path in _COMPONENTS:
            settings = components.settings_of(key.path, str(_value_at(data, f"{key.path}.{_COMPONENTS[key.path]}")))
            shared = key.section.model_fields if key.section is not None else {}
            shared_values = {field: value for field, value in _at(defaults, key.path).items() if field in shared}
            _at(defaults, above)[name] = shared_values | (_defaults_of(settings) if settings is not None else {})
    changed = differences(defaults, data)
    for path in optional:
        place = changed
        for part in path.split("."):
            place = place.setdefault(part, {})
    return changed, _leaves(data) - _leaves(changed)


def _defaults_of(model: type[Section]) -> dict[str, Any]:
    """Return the defaults of a section; required keys have none and are left out."""
    defaults = {}
    for name, info in model.model_fields.items():
        value = None if info.is_required() else info.get_default(call_default_factory=True)
        if not info.is_required():
            defaults[name] = value.model_dump() if isinstance(value, Section) else value
    return defaults


def _leaves(data: dict[str, Any]) -> int:
    return sum(_leaves(value) if isinstance(value, dict) and value else 1 for value in data.values())


def recipe_folder() -> Path | None:
    """Return the folder of the shipped recipes, or None when they are not installed."""
    spec = importlib.util.find_spec("megarl.recipes")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def recipe_names() -> list[str]:
    """Return the bare names of the shipped recipes."""
    folder = recipe_folder()
    return sorted(file.stem for file in folder.glob("*.yaml")) if folder else []


def recipe_titles() -> dict[str, str]:
    """Return a short title of each shipped recipe, from its first comment, by bare name."""
    folder, titles = recipe_folder(), {}
    for file in sorted(folder.glob("*.yaml")) if folder else []:
        first = file.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
        titles[file.stem] = re.split(r"[.:,;](?: |$)", re.sub(r" \([^)]*\)", "", first))[0]
    return titles


def find_recipe(
    path: str | Path, *, relative_to: Path | None = None, said_in: str | None = None, takes_runs: bool = False
) -> Path:
    """Return the recipe file for a path (with or without `.yaml`) or for the bare name of a shipped recipe. Raise
    ConfigError if neither exists.

    Args:
        path: path or name as the user wrote it.
        relative_to: folder that the path is relative to; None: the current folder.
        said_in: the line of another recipe that names this one; None: the command line names it.
        takes_runs: whether the command also accepts a run folder (which `path` is not).
    """
    recipe = Path(path).expanduser()
    base = (relative_to or Path()) / recipe
    for candidate in (base, base.with_name(base.name + ".yaml") if base.name else base):
        if candidate.is_file():
            return candidate
    folder = recipe_folder()
    if folder is not None and len(recipe.parts) == 1 and (folder / f"{recipe.stem}.yaml").is_file():
        return folder / f"{recipe.stem}.yaml"
    neighbours = [file.name for file in sorted(base.parent.glob("*.y*ml"))] if base.parent.is_dir() else []
    close = close_files(recipe.name, [*neighbours, *recipe_names()])
    problem = "recipe or run folder not found" if takes_runs else "recipe not found"
    raise ConfigError(
        problem if not base.is_dir() else "this is a folder, not a recipe file",
        where=said_in or str(path),
        found=str(path),
        allowed=allowed_recipes(takes_runs=takes_runs),
        fix=_recipe_fix(base, close),
    )


def allowed_recipes(*, takes_runs: bool) -> str:
    """Describe what a recipe argument may be; with `takes_runs` it may also be a run folder."""
    forms = "a YAML file, the folder of a run" if takes_runs else "a YAML file"
    text = f"{forms}, or a shipped recipe: {', '.join(recipe_names()) or 'none installed'}"
    return textwrap.fill(text, 110, subsequent_indent=" " * 11)


def _recipe_fix(path: Path, close: list[str]) -> str:
    name = path.name
    if (path / "config.yaml").is_file():
        return f"to continue the run in this folder: {path / 'config.yaml'} --run-dir {path}"
    if "=" in name:
        return "name the recipe first, for example: megarl train grpo_quickstart trainer.steps=10"
    return f"did you mean {close[0]}?" if close else "check the path"


def _read_with_parents(file: Path, chain: tuple[Path, ...]) -> Document:
    """Read `file` and merge it over everything it extends. `chain` holds the files whose `extends` lines led to it."""
    resolved = file.resolve()
    if resolved in chain:
        cycle = [*chain[chain.index(resolved) :], resolved]
        raise ConfigError(
            "extends leads back to a file that is already being read",
            where=str(file),
            found=" -> ".join(link.name for link in cycle),
            fix="remove one of these `extends` lines",
        )
    document = read_yaml(file)
    parents = document.data.pop("extends", [])
    where = document.origins.pop(("extends",), str(file))
    if isinstance(parents, str):
        parents = [parents]
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise ConfigError("extends has a wrong type", where=where, found=parents, allowed="a path, or a list of paths")
    merged = Document({})
    for parent in parents:
        above = _read_with_parents(
            find_recipe(parent, relative_to=file.parent, said_in=f"{where}: extends"), (*chain, resolved)
        )
        above.data.pop("name", None)
        _merge(merged, above)
    _merge(merged, document)
    return merged


def _merge(below: Document, above: Document) -> None:
    """Merge `above` over `below` in place: mappings key by key, anything else as a whole."""
    _note_inherited(below, above)
    _count_by_steps(below, above)
    _merge_values(below.data, above.data, (), above.replaced)
    below.origins.update(above.origins)
    below.replaced.update(above.replaced)


def _count_by_steps(below: Document, above: Document) -> None:
    """Clear the epochs that `below` sets where `above`, which overrides it, sets only steps: epochs would win."""
    for section in ("trainer", "sft"):
        length = _at(above.data, section)
        if "steps" in length and "epochs" not in length and "epochs" in _at(below.data, section):
            below.data[section]["epochs"] = None


def _note_inherited(below: Document, above: Document) -> None:
    """Mark keys of a component that `above` replaces by another component as inherited."""
    for name, path in _NAMED:
        old, new = _value_at(below.data, name), _value_at(above.data, name)
        if new is not None and new != old:
            below.inherited |= _paths(path, _at(below.data, path))
        below.inherited -= _paths(path, _at(above.data, path))
    below.inherited |= above.inherited


def _drop_inherited(document: Document, components: Components) -> list[str]:
    """Remove inherited keys that the newly named reward or environment does not have; return notes about them. If a
    component's keys are unknown, inherited keys are kept; validation later refuses the wrong keys by name.
    """
    lines = []
    for name_key, path, shared in _OTHERS:
        mapping, name = _at(document.data, path), _value_at(document.data, name_key)
        inherited = {key for *above, key in document.inherited if ".".join(above) == path and key not in shared}
        left = [key for key in mapping if key in inherited]
        if left and isinstance(name, str):
            known = components.own_keys(name_key.rpartition(".")[0], name)
            dropped = [key for key in left if known is not None and key not in known]
            for key in dropped:
                del mapping[key]
            if dropped:
                keys = ", ".join(f"{path}.{key}" for key in dropped)
                lines.append(f"dropped inherited keys that {name} does not have: {keys}")
    return lines


def _at(data: dict[str, Any], path: str) -> dict[str, Any]:
    value = _value_at(data, path)
    return value if isinstance(value, dict) else {}


def _value_at(data: dict[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = data
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _paths(path: str, mapping: dict[str, Any]) -> set[tuple[str, ...]]:
    return {(*path.split("."), str(key)) for key in mapping}


def _merge_values(
    below: dict[str, Any], above: dict[str, Any], path: tuple[str, ...], replaced: set[tuple[str, ...]]
) -> None:
    for key, value in above.items():
        here = (*path, str(key))
        if isinstance(value, dict) and isinstance(below.get(key), dict) and here not in replaced:
            _merge_values(below[key], value, here, replaced)
        else:
            below[key] = copy.deepcopy(value)


def _apply_override(document: Document, text: str, components: Components | None) -> set[tuple[str, ...]]:
    """Apply one override to the document and return the paths of the component keys that it sets."""
    dotted, equals, raw = text.partition("=")
    dotted = dotted.strip()
    where = f"override {text!r}"
    if not equals or not dotted:
        raise ConfigError(FORM, where=where, fix="for example actor.optim.lr=1e-6")
    path = tuple(dotted.split("."))
    key = find_key(path)
    if key is None:
        raise unknown_keys(path, None, lambda path: where, functools.partial(_owned, components))[0]
    free = len(path) - len(key.path.split("."))
    if free and not key.free_form:
        raise ConfigError(
            f"{key.path} is a single value, so it has no keys below it",
            where=where,
            allowed=describe_allowed(key.info),
            fix=f"write {key.path}=...",
        )
    replaced: set[tuple[str, ...]] = set()
    try:
        if free or key.section or key.free_form:
            value, replaced = parse_tagged(raw, path, where)
        else:
            value = _parse_for(key, raw)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"the value of {dotted} cannot be read ({problem})",
            where=where,
            found=raw,
            allowed=describe_allowed(key.info),
        ) from error
    for part in reversed(path):
        value = {part: value}
    # An override may replace a value of a wrong type, so only mappings are merged.
    _merge(document, Document(value, {path: where}, replaced))
    return {here for _, section in _NAMED for here in _paths(section, _at(value, section))}


def _parse_for(key: Key, raw: str) -> Any:
    """Parse override text by the type of its field. Text that fits no type is returned unchanged; validation refuses
    it.
    """
    text = raw.strip()
    kinds = alternatives(key.info.annotation)
    if text in _NULLS and type(None) in kinds:
        return None
    for kind in kinds:
        origin = get_origin(kind)
        if origin is Literal and text in get_args(kind):
            return text
        if origin is list:
            if str in kinds and not text.startswith("["):
                return raw
            if not text.startswith("["):
                return [raw] if str in get_args(kind) else parse_value(f"[{text}]")
            return parse_texts(text) if str in get_args(kind) else parse_value(text)
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind is int and INTEGER.fullmatch(text):
            return int(text)
        if kind is float:
            try:
                return float(text)
            except ValueError:
                continue
    return raw


def _validate(
    document: Document, file: str, components: Components | None
) -> tuple[RunConfig | None, list[ConfigError]]:
    problems: list[ConfigError] = []
    data = _known_part(document.data, RunConfig, (), document, file, problems, components)
    try:
        config = RunConfig.model_validate(data, strict=True)
    except ValidationError as error:
        seen: set[tuple[str, ...]] = set()
        for detail in error.errors(include_url=False):
            path = _key_path(detail["loc"])
            if path not in seen:  # pydantic reports an error for each member of a union
                seen.add(path)
                problems.append(_wrong_value(detail, path, document, file))
        return None, problems
    if components is not None:
        config = _settle(config, document, file, components, problems)
    # Replace `auto` now: the name of an exported model of this run would no longer show that it began as a base model.
    if config.data.chat_template == "auto" and config.model.named_base:
        config = config.model_copy(update={"data": config.data.model_copy(update={"chat_template": False})})
    if config.data.video_key is not None and config.data.image_key is None:
        # Videos are read by the code for images, which needs `image_key`.
        config = config.model_copy(update={"data": config.data.model_copy(update={"image_key": IMAGES_BESIDE})})
    if config.model.vision is None and config.data.image_key is not None:
        # set here, because the code that reads the model's config later has only the section `model`
        config = config.model_copy(update={"model": config.model.model_copy(update={"vision": True})})
    return config, problems


def _settle(
    config: RunConfig, document: Document, file: str, components: Components, problems: list[ConfigError]
) -> RunConfig:
    """Return the recipe with the keys of its named components validated and complete; append errors to `problems`."""
    filled = config.model_dump()
    for dotted in _COMPONENTS:
        path = tuple(dotted.split("."))
        section: Any = config
        for part in path:
            section = getattr(section, part)
        model = components.settings_of(dotted, section.component)
        if model is None:
            continue  # a later check reports the unknown name
        settings, errors = settle(
            dotted,
            section.component,
            section.own,
            model,
            functools.partial(components.readers, dotted),
            name_key=f"{dotted}.{section.named_by}",
            shared=list(type(section).model_fields),
            where=lambda key, path=path: _origin(document, (*path, key), file),  # type: ignore[misc]
            inherited={key for *above, key in document.inherited if tuple(above) == path},
        )
        problems += errors
        mapping = _at(filled, dotted)
        for key in section.own:
            del mapping[key]
        mapping |= {} if settings is None else settings.model_dump()
    return RunConfig.model_validate(filled)


def _known_part(
    data: dict[str, Any],
    model: type[Section],
    path: tuple[str, ...],
    document: Document,
    file: str,
    problems: list[ConfigError],
    components: Components | None,
) -> dict[str, Any]:
    """Return a copy of `data` without keys that `model` lacks; append an error for each to `problems`."""
    known, known_fields = {}, fields_of(model)
    for name, value in data.items():
        here = (*path, str(name))
        info = known_fields.get(name) if isinstance(name, str) else None
        if info is None and names_component(model) and isinstance(name, str):
            known[name] = value
            continue
        if info is None:
            owned = functools.partial(_owned, components)
            problems += unknown_keys(here, value, lambda path: _origin(document, path, file), owned)
            continue
        section, entries = section_of(info), entries_of(info)
        if section is not None and isinstance(value, dict):
            value = _known_part(value, section, here, document, file, problems, components)
        elif entries is not None and isinstance(value, dict):
            value = {
                entry: _known_part(keys, entries, (*here, str(entry)), document, file, problems, components)
                if isinstance(keys, dict)
                else keys
                for entry, keys in value.items()
            }
        known[name] = value
    return known


def _owned(components: Components | None, key: str) -> list[str]:
    places = {**dict.fromkeys(_COMPONENTS), "reward": "reward.kwargs"} if components is not None else {}
    return [f"{place or path}.{key}" for path, place in places.items() if components and components.readers(path, key)]


def _key_path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the configuration key of a pydantic error location, which may end with list indices and union members."""
    path = tuple(str(part) for part in location)
    key = find_key(path)
    while key is None:
        path = path[:-1]
        key = find_key(path)
    return tuple(key.path.split("."))


def _wrong_value(detail: ErrorDetails, path: tuple[str, ...], document: Document, file: str) -> ConfigError:
    key = find_key(path)
    assert key is not None
    if detail["type"] == "missing":
        # The missing key belongs beside its siblings, which may come from an override.
        beside = [origin for other, origin in document.origins.items() if other[: len(path) - 1] == path[:-1]]
        place = beside[-1] if beside and len(path) > 1 else _origin(document, path, file)
        meant = _entry_meant(path[:-1], document)
        fix = f"add {path[-1]}" if meant is None else f"did you mean {meant}? Otherwise add {path[-1]}"
        return ConfigError(f"{key.path} is missing", where=place, allowed=describe_allowed(key.info), fix=fix)
    value = _value_at(document.data, key.path)
    return wrong_value(detail, key.path, key.info, value, where=_origin(document, path, file))


def _entry_meant(path: tuple[str, ...], document: Document) -> str | None:
    """Return the existing entry of a mapping (such as a team) that the misspelt entry at `path` may stand for."""
    above, key = ".".join(path[:-1]), find_key(path[:-1])
    if key is None or entries_of(key.info) is None:
        return None
    close = close_matches(path[-1], [name for name in _at(document.data, above) if name != path[-1]])
    return f"{above}.{close[0]}" if close else None


def _origin(document: Document, path: tuple[str, ...], file: str) -> str:
    """Return where a key was set: its own line, else that of the nearest parent, else the file."""
    for depth in range(len(path), 0, -1):
        if path[:depth] in document.origins:
            return document.origins[path[:depth]]
    return file


FORM = "an override has the form key.path=value"


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[ConfigError]]:
    """Return the well-formed overrides, and an error for each key that is separate from its value, as in `trainer.steps
    10`.

    >>> split_overrides(["trainer.steps", "10", "data.shuffle=true"])[0]
    ['data.shuffle=true']
    """
    overrides_left, problems, waiting = [], [], list(overrides)
    while waiting:
        key = waiting.pop(0)
        if "=" in key or find_key(tuple(key.split("."))) is None or not waiting or "=" in waiting[0].lstrip("="):
            overrides_left.append(key)
            continue
        value = waiting.pop(0)
        if value == "=" and waiting:
            value = waiting.pop(0)
        fix = f"write {key}={value.removeprefix('=')}, without spaces"
        problems.append(ConfigError(FORM, where=f"override {key!r}", fix=fix))
    return overrides_left, problems
