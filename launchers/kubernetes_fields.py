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
        what = "invalid resources of a container"
        raise ConfigError(what, where=f"{_KEY}.container.resources", found=resources, allowed="claims, a list")
    places = (("pod", settings.pod, _POD), ("container", settings.container, _CONTAINER))
    others = {name: "launch.kubernetes.resources" for name in resources if name != "claims"}
    for place, fields, own in (*places, ("container.resources", resources, others)):
        for name in fields:
            if name in own:
                what = "other keys set this field"
                raise ConfigError(what, where=f"{_KEY}.{place}.{name}", fix=f"see {own[name]}")
    for name in ("hostname", "subdomain") if launcher == "torchrun" else ():
        if name in settings.pod:
            what = "pods find each other by the names that the JobSet gives them"
            raise ConfigError(what, where=f"{_KEY}.pod.{name}", found=settings.pod[name], fix="remove it")
    own_mounts = mounts_of(settings)
    volumes = _entries("pod.volumes", settings.pod.get("volumes"))
    _check_once("pod.volumes", "name", [one.get("name") for one in volumes], list(own_mounts))
    added = _entries("container.volumeMounts", settings.container.get("volumeMounts"))
    _check_once("mount", "mountPath", [settings.mount], [path for name, path in own_mounts.items() if name != "runs"])
    _check_once(
        "container.volumeMounts", "mountPath", [one.get("mountPath") for one in added], list(own_mounts.values())
    )
    named = [one.get("name") for one in _entries("pod.resourceClaims", settings.pod.get("resourceClaims"))]
    for claim in _entries("container.resources.claims", resources.get("claims")):
        if claim.get("name") not in named:
            raise ConfigError(
                "the pod does not have this claim",
                where=f"{_KEY}.container.resources.claims",
                found=claim,
                allowed=f"names of {_KEY}.pod.resourceClaims: {', '.join(map(str, named)) or 'it has none'}",
            )


def _entries(place: str, found: Any) -> list[dict[str, Any]]:
    """Return a list of mappings, which is the form of most lists in Kubernetes; null is an empty list."""
    if not isinstance(found or [], list) or not all(isinstance(one, dict) for one in found or []):
        what, allowed = "invalid list", "a list of mappings, as in Kubernetes"
        raise ConfigError(what, where=f"{_KEY}.{place}", found=found, allowed=allowed)
    return found or []


def _check_once(place: str, key: str, given: list[Any], written: list[str]) -> None:
    """Check that entries which a pod may have only once are unique. A path with a trailing / is the same path."""
    taken = {str(PurePosixPath(one)) for one in written}
    for one in given:
        if str(PurePosixPath(str(one))) in taken:
            raise ConfigError(
                f"a pod may have each {key} only once, and this one exists already",
                where=f"{_KEY}.{place}",
                found=one,
                allowed=f"any except {', '.join(written)}, each once",
            )
        taken.add(str(PurePosixPath(str(one))))
