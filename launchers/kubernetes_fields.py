"""Checks of fields that a recipe adds to pods, against those of the manifests and against the cluster's rules."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from megarl.config.launch import KubernetesConfig
from megarl.system.errors import ConfigError

RECIPE_FOLDER = "/etc/megarl"
#: Fields that the manifests set, and the keys that they come from.
_POD = {
    "containers": "launch.kubernetes.container",
    "restartPolicy": "cluster.max_restarts",
    "serviceAccountName": "launch.kubernetes.service_account",
    "imagePullSecrets": "launch.kubernetes.image_pull_secret",
    "nodeSelector": "launch.kubernetes.node_selector",
}
_CONTAINER = {
    "name": "the launcher's own",
    "image": "launch.kubernetes.image",
    "command": "--job",
    "args": "--job",
    "env": "launch.kubernetes.environment and secrets",
}
_KEY = "launch.kubernetes"


def mounts_of(settings: KubernetesConfig) -> dict[str, str]:
    """Return the volumes of every pod by name, with their mount paths in the container."""
    return {"runs": settings.mount, "recipe": RECIPE_FOLDER, "shared-memory": "/dev/shm"}


def claims_of(settings: KubernetesConfig) -> list[dict[str, Any]]:
    """Return the pod's resource claims that its container uses."""
    return (settings.container.get("resources") or {}).get("claims") or []


def check_fields(settings: KubernetesConfig, launcher: str) -> None:
    """Check the added fields of pods and containers against those of the manifests, and against each other. Raise
    ConfigError if a field has its own recipe key, or a cluster would accept the job but create no pod.
    """
    resources = settings.container.get("resources") or {}
    if not isinstance(resources, dict):
        problem = "invalid resources of a container"
        raise ConfigError(problem, where=f"{_KEY}.container.resources", found=resources, allowed="claims, a list")
    places = (("pod", settings.pod, _POD), ("container", settings.container, _CONTAINER))
    others = {name: "launch.kubernetes.resources" for name in resources if name != "claims"}
    for place, fields, keys in (*places, ("container.resources", resources, others)):
        for name in fields:
            if name in keys:
                raise ConfigError("other keys set this field", where=f"{_KEY}.{place}.{name}", fix=f"see {keys[name]}")
    for name in ("hostname", "subdomain") if launcher == "torchrun" else ():
        if name in settings.pod:
            problem = "pods find each other by the names that the JobSet gives them"
            raise ConfigError(problem, where=f"{_KEY}.pod.{name}", found=settings.pod[name], fix="remove it")
    mounts = mounts_of(settings)
    _check_once("pod.volumes", "name", _entries("pod.volumes", settings.pod, "name"), list(mounts))
    _check_once("mount", "mountPath", [settings.mount], [path for name, path in mounts.items() if name != "runs"])
    added = _entries("container.volumeMounts", settings.container, "mountPath")
    _check_once("container.volumeMounts", "mountPath", added, list(mounts.values()))
    claims = _entries("pod.resourceClaims", settings.pod, "name")
    for name in _entries("container.resources.claims", resources, "name"):
        if name not in claims:
            raise ConfigError(
                "the pod does not have this claim",
                where=f"{_KEY}.container.resources.claims",
                found=name,
                allowed=f"names of {_KEY}.pod.resourceClaims: {', '.join(map(str, claims)) or 'it has none'}",
            )


def _entries(place: str, fields: dict[str, Any], key: str) -> list[Any]:
    """Return the values of `key` in the list of mappings that `fields` has at the last part of `place`; null is an
    empty list.
    """
    entries = fields.get(place.rpartition(".")[2]) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        allowed = "a list of mappings, as in Kubernetes"
        raise ConfigError("invalid list", where=f"{_KEY}.{place}", found=entries, allowed=allowed)
    return [entry.get(key) for entry in entries]


def _check_once(place: str, key: str, given: list[Any], written: list[str]) -> None:
    """Check that entries which a pod may have only once are unique. A path with a trailing / is the same path."""
    before = {str(PurePosixPath(entry)) for entry in written}
    for entry in given:
        if str(PurePosixPath(str(entry))) in before:
            raise ConfigError(
                f"a pod may have each {key} only once, and this one exists already",
                where=f"{_KEY}.{place}",
                found=entry,
                allowed=f"any except {', '.join(written)}, each once",
            )
        before.add(str(PurePosixPath(str(entry))))
