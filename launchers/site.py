"""Settings of a site: keys of `launch.slurm` by cluster name, in one file of the user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megarl.config.base import ConfigErrors
from megarl.config.fields import fields_of, wrong_value
from megarl.config.launch import SlurmConfig
from megarl.config.run import RunConfig
from megarl.config.yamlio import NO_MAPPING, read_yaml
from megarl.system.errors import ConfigError, close_matches


def clusters_file() -> Path:
    """Return $MEGARL_CLUSTERS, or else `megarl/clusters.yaml` in the user's configuration folder."""
    named = os.environ.get("MEGARL_CLUSTERS")
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(named) if named else folder / "megarl" / "clusters.yaml"


def with_site(config: RunConfig) -> RunConfig:
    """Return the configuration with the site file's values where `launch.slurm` has its defaults; environment variables
    are merged by name. Raise ConfigError if the file is invalid or lacks the cluster, or if it has several and the
    recipe chooses none.
    """
    file, name = clusters_file(), config.launch.cluster
    clusters = _read(file)
    if name is None and len(clusters) == 1:
        (name,) = clusters
    # a recipe with keys in launch.slurm may need no cluster of the site file
    if name is None and clusters and config.launch.slurm == SlurmConfig():
        raise ConfigError(
            "the site file has several clusters, and launch.cluster chooses none",
            where="launch.cluster",
            found=None,
            allowed=sorted(clusters),
            fix=f"set launch.cluster={min(clusters)}, or another cluster of {file}",
        )
    if name is None:
        return config
    if name not in clusters:
        raise ConfigError(
            "the site file does not have this cluster",
            where="launch.cluster",
            found=name,
            allowed=sorted(clusters) or f"names in {file}, which has none",
            fix=f"add it to {file}: its name, and below it keys of launch.slurm",
        )
    site, recipe = clusters[name].model_dump(), config.launch.slurm.model_dump()
    defaults = SlurmConfig().model_dump()
    merged = {key: site[key] if value == defaults[key] else value for key, value in recipe.items()}
    slurm = SlurmConfig(**(merged | {"environment": site["environment"] | recipe["environment"]}))
    return config.model_copy(update={"launch": config.launch.model_copy(update={"slurm": slurm, "cluster": name})})


@contextlib.contextmanager
def naming_site(own: RunConfig, filled: RunConfig) -> Iterator[None]:
    """Add the site file and the cluster to an error raised in the block if it is about a value from the site file."""
    before, after = own.launch.slurm.model_dump(), filled.launch.slurm.model_dump()
    keys = [key for key in after if key != "environment" and after[key] != before[key]]
    keys += [f"environment.{name}" for name in after["environment"] if name not in before["environment"]]
    try:
        yield
    except ConfigError as error:
        raise _named(error, keys, f"of {filled.launch.cluster} in {clusters_file()}") from error


def _named(error: ConfigError, keys: list[str], origin: str) -> ConfigError:
    """Return `error` with `origin` added if it is about one of `keys` of `launch.slurm`."""
    if isinstance(error, ConfigErrors):
        return ConfigErrors([_named(problem, keys, origin) for problem in error.problems])
    where = f"{error.where}."
    if not any(where.startswith(f"launch.slurm.{key}.") for key in keys):
        return error
    place = f"{error.where} ({origin})"
    return type(error)(error.what, where=place, found=error.found, allowed=error.allowed, fix=error.fix)


def _read(file: Path) -> dict[str, SlurmConfig]:
    if not file.is_file():
        if named := os.environ.get("MEGARL_CLUSTERS"):
            fix = "correct the path, or unset the variable"
            problem = "the site file is a folder" if file.is_dir() else "the site file does not exist"
            raise ConfigError(problem, where="MEGARL_CLUSTERS", found=named, fix=fix)
        return {}
    try:
        data: Any = read_yaml(file).data
    except ConfigError as error:
        no_mapping = error.what == NO_MAPPING
        if no_mapping and error.found is None:  # a file with only comments lists no clusters
            return {}
        problem = "invalid file of clusters" if no_mapping else error.what
        remedy = None if no_mapping else error.fix
        raise ConfigError(problem, where=error.where, found=error.found, allowed=_FORM, fix=remedy) from error
    return {name: _cluster(file, name, values) for name, values in data.items()}


def _cluster(file: Path, name: str, values: Any) -> SlurmConfig:
    """Check the mapping of the cluster `name` in the site file `file`, and return it as keys of `launch.slurm`."""
    where, known = f"{file}: {name}", fields_of(SlurmConfig)
    if not isinstance(values or {}, dict):
        raise ConfigError("a cluster must be a mapping", where=where, found=values, allowed=_FORM)
    for key in values or {}:
        if key not in known:
            near = close_matches(str(key), known)
            fix = f"did you mean {near[0]}?" if near else None
            raise ConfigError(
                "launch.slurm does not have this key", where=f"{where}.{key}", allowed=list(known), fix=fix
            )
    try:
        return SlurmConfig.model_validate(values or {})
    except ValidationError as error:
        detail = error.errors()[0]
        key, place = str(detail["loc"][0]), ".".join(map(str, detail["loc"]))
        value = values[key] if place == key else detail["input"]
        raise wrong_value(detail, place, known[key], value, where=f"{where}.{place}") from error


_FORM = "names of clusters, and below each of them keys of launch.slurm"
