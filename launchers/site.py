"""What belongs to a site: keys of `launch.slurm` by name of a cluster, in one file of the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megarl.config.launch import SlurmConfig
from megarl.config.run import RunConfig
from megarl.config.yamlio import read_yaml
from megarl.errors import ConfigError


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
        return {}
    data: dict[str, Any] = read_yaml(file).data
    found = {}
    for name, values in data.items():
        try:
            found[name] = SlurmConfig.model_validate(values or {})
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"this file is wrong: {first['msg']}",
                where=f"{file}: {'.'.join(map(str, (name, *first['loc'])))}",
                found=first["input"],
                allowed="the keys of launch.slurm below the name of each cluster",
            ) from error
    return found
