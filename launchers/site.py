"""What belongs to a site: keys of `launch.slurm` by name of a cluster, in one file of the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megarl.config.fields import fields_of, wrong_value
from megarl.config.launch import SlurmConfig
from megarl.config.run import RunConfig
from megarl.config.yamlio import read_yaml
from megarl.errors import ConfigError, close_matches


def clusters_file() -> Path:
    """MEGARL_CLUSTERS, else `megarl/clusters.yaml` in the user's configuration folder."""
    named = os.environ.get("MEGARL_CLUSTERS")
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(named) if named else folder / "megarl" / "clusters.yaml"


def with_site(config: RunConfig) -> RunConfig:
    """The configuration with the site's values where `launch.slurm` is null or empty; variables are merged by name.

    Raises:
        ConfigError: the file has no such cluster, or is wrong.
    """
    file, name = clusters_file(), config.launch.cluster
    clusters = _read(file)
    if name is None and len(clusters) == 1:
        (name,) = clusters
    if name is None and clusters and config.launch.slurm == SlurmConfig():  # else it may mean to stand by itself
        raise ConfigError(
            "there are several clusters, and none is chosen",
            where="launch.cluster",
            found=None,
            allowed=sorted(clusters),
            fix=f"launch.cluster={min(clusters)}, or another of {file}",
        )
    if name is None:
        return config
    if name not in clusters:
        raise ConfigError(
            "there is no such cluster",
            where="launch.cluster",
            found=name,
            allowed=sorted(clusters) or f"names in {file}, which has none",
            fix=f"add it to {file}: its name, and below it keys of launch.slurm",
        )
    site, own = clusters[name].model_dump(), config.launch.slurm.model_dump()
    environment = {**site["environment"], **own["environment"]}
    defaults = SlurmConfig().model_dump()
    merged = {key: site[key] if value == defaults[key] else value for key, value in own.items()}
    slurm = SlurmConfig(**{**merged, "environment": environment})
    return config.model_copy(update={"launch": config.launch.model_copy(update={"slurm": slurm, "cluster": name})})


def _read(file: Path) -> dict[str, SlurmConfig]:
    if not file.is_file():
        if named := os.environ.get("MEGARL_CLUSTERS"):
            raise ConfigError("there is no such file", where="MEGARL_CLUSTERS", found=named, fix="name it, or unset it")
        return {}
    if all(not line.strip() or line.lstrip().startswith("#") for line in file.read_text().splitlines()):
        return {}
    try:
        data: Any = read_yaml(file).data
    except ConfigError as error:
        what = "this is no file of clusters" if "recipe" in error.what else error.what
        raise ConfigError(what, where=error.where, found=error.found, allowed=_FORM) from error
    return {name: _cluster(file, name, values) for name, values in data.items()}


def _cluster(file: Path, name: str, values: Any) -> SlurmConfig:
    """The keys of one cluster."""
    where, known = f"{file}: {name}", fields_of(SlurmConfig)
    if not isinstance(values or {}, dict):
        raise ConfigError("a cluster is a mapping", where=where, found=values, allowed=_FORM)
    for key in values or {}:
        if key not in known:
            near = close_matches(str(key), known)
            fix = f"did you mean {near[0]}?" if near else None
            raise ConfigError("launch.slurm has no such key", where=f"{where}.{key}", allowed=list(known), fix=fix)
    try:
        return SlurmConfig.model_validate(values or {})
    except ValidationError as error:
        detail = error.errors()[0]
        key, place = str(detail["loc"][0]), ".".join(map(str, detail["loc"]))
        value = values[key] if place == key else detail["input"]
        raise wrong_value(detail, place, known[key], value, where=f"{where}.{place}") from error


_FORM = "names of clusters, and below each of them keys of launch.slurm"
