"""Which NCCL wheels two interpreters have, from package metadata: NCCL does not talk to another version of itself."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

from megarl.errors import ConfigError


def nccl_wheel(*folders: str) -> tuple[str, str] | None:
    """(package, version) of the NCCL wheel in these site-packages folders; None without one."""
    for found in importlib.metadata.distributions(path=list(folders)):
        name = (found.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("nvidia-nccl-"):
            return name, found.version
    return None


def wheel_of(python: Path) -> tuple[str, str] | None:
    """`nccl_wheel` of an interpreter in a virtual environment."""
    return nccl_wheel(*map(str, (python.parent.parent / "lib").glob("python3*/site-packages")))


def check_same_nccl(servers: Path, *, trainer: str | None = None) -> None:
    """Refuse interpreters whose NCCL wheels differ; one without a wheel (a CPU build, an image's own) is not judged.

    Args:
        servers: the servers' interpreter, in a virtual environment.
        trainer: site-packages of the trainer; None: of this interpreter.

    Raises:
        ConfigError: the versions differ.
    """
    theirs = wheel_of(servers)
    ours = nccl_wheel(trainer or sysconfig.get_paths()["purelib"])
    if ours is None or theirs is None or ours[1] == theirs[1]:
        return
    number = [tuple(int(part) for part in version.split(".") if part.isdigit()) for _, version in (ours, theirs)]
    newer = ours if number[0] > number[1] else theirs
    older = ours if newer is theirs else theirs
    where = "the trainer's interpreter" if older is ours else str(servers)
    raise ConfigError(
        "the trainer and its servers have different versions of NCCL, which do not join one group",
        where="sync.transport",
        found=f"trainer {ours[1]}, servers {theirs[1]}",
        allowed="one version in both",
        fix=f"run `make sglang-env`, or in {where}: pip install --no-deps {older[0]}=={newer[1]}; or set "
        "sync.transport=disk or delta",
    )
