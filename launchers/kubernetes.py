"""Kubernetes manifests as plain data: this module queries and starts nothing, except in `create`.

    ConfigMap   the resolved recipe
    JobSet      one indexed job, a pod per node of the run: `megarl COMMAND --launcher torchrun`; ranks meet at pod 0
    RayJob      a Ray cluster of a pod per node, its head among them: `megarl COMMAND --launcher ray` on the head

Run folders are on a volume that all pods mount. Secrets are named; their values never appear here.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import yaml

from megarl.config.base import raise_problems
from megarl.config.launch import KubernetesConfig
from megarl.config.load import dump_config
from megarl.config.run import RunConfig
from megarl.dag.placement import Placement
from megarl.disaggregated.buffer.size import object_store_bytes
from megarl.launchers.bundles import MEETING, gpus_of_a_node
from megarl.launchers.relative_paths import relative_paths
from megarl.system.credentials import CREDENTIAL
from megarl.system.errors import ConfigError, UnavailableError, UserError, count

RECIPE = "recipe.yaml"
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
    "name": "no key; megarl names the container",
    "image": "launch.kubernetes.image",
    "command": "the option --job",
    "args": "the option --job",
    "env": "launch.kubernetes.environment and secrets",
}
_KEY = "launch.kubernetes"
_WORKERS, _PORT, _NAME = "workers", 29500, 40
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_ANSWER_S = 60.0
_ENDS_S = 10  # seconds for a run that has saved to end its processes and close its record
_IMAGE = re.compile(r"(?!.*//)[a-z0-9][a-z0-9._:/@-]*(?::[\w.-]+)?")
_LEAST = 16 * 1024.0**2  # minimum memory of a pod in bytes
_REFERENCE = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?/[-._a-zA-Z0-9]+")
Manifest = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes texts of several lines as literal blocks."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


@dataclass(frozen=True)
class KubernetesJob:
    """The Kubernetes job to submit.

    Attributes:
        name: name of its Kubernetes objects.
        run_dir: the run folder, as a path in the pods.
        command: train, sft or eval.
        launcher: torchrun or ray.
    """

    config: RunConfig
    name: str
    run_dir: PurePosixPath
    command: str
    launcher: str

    @property
    def settings(self) -> KubernetesConfig:
        """The section `launch.kubernetes`."""
        return self.config.launch.kubernetes

    @property
    def in_pods(self) -> RunConfig:
        """The recipe for the pods. With torchrun on several nodes it has no restarts: the JobSet restarts the pods, and
        launchers on several machines cannot restart a run.
        """
        cluster = self.config.cluster
        if self.launcher != "torchrun" or cluster.nnodes == 1:
            return self.config
        return self.config.model_copy(update={"cluster": cluster.model_copy(update={"max_restarts": 0})})


_NEEDED = (
    ("image", "an image with megarl", "the name of one", " (docs/launching.md says how to get one)"),
    ("claim", "a volume for the run folder", "the name of a PersistentVolumeClaim, ReadWriteMany", ""),
)


def make_job(config: RunConfig, command: str, launcher: str | None, run_dir: str | None, stamp: str) -> KubernetesJob:
    """Return the Kubernetes job for a recipe. Raise ConfigError if the image or the volume claim is missing, the recipe
    holds a credential, the run folder is not on the claim, or this kind of job cannot start the run.
    """
    settings = config.launch.kubernetes
    raise_problems(
        [
            ConfigError(
                f"pods need {thing}",
                where=f"launch.kubernetes.{key}",
                found=None,
                allowed=allowed,
                fix=f"set launch.kubernetes.{key}=NAME{hint}",
            )
            for key, thing, allowed, hint in _NEEDED
            if getattr(settings, key) is None
        ]
    )
    _refuse_credentials(settings)
    _check_settings(config, command)
    starts = _launcher(config, launcher)
    check_fields(settings, starts)
    name = object_name(config.name, stamp)
    mount = PurePosixPath(settings.mount)
    folder = PurePosixPath(run_dir) if run_dir is not None else mount / config.name / stamp
    if mount not in folder.parents or ".." in folder.parts:
        problem = "the run folder must be on the volume that all pods mount"
        allowed = f"a folder below launch.kubernetes.mount={mount}, without .. in its path"
        raise ConfigError(problem, where="--run-dir", found=str(folder), allowed=allowed)
    return KubernetesJob(config, name, folder, command, starts)


def _refuse_credentials(settings: KubernetesConfig) -> None:
    """Refuse credentials, since manifests are plain text; also refuse variables that the job sets itself, and secrets
    that are not given as SECRET/KEY. Messages name variables, never their values.
    """
    key = "launch.kubernetes.environment"
    for name in (*settings.environment, *settings.secrets):
        twice = name in settings.environment and name in settings.secrets
        if name in MEETING or twice:
            raise ConfigError(
                "this variable is also set from a secret" if twice else "the job itself sets this variable",
                where=f"{key if name in settings.environment else 'launch.kubernetes.secrets'}.{name}",
                fix="remove it",
            )
    for name in settings.environment:
        if CREDENTIAL.search(name):
            raise ConfigError(
                "manifests are plain text, but this variable looks like a credential",
                where=f"{key}.{name}",
                allowed="variables that are not credentials",
                fix=f"put the value into a secret, and name that: launch.kubernetes.secrets.{name}=SECRET/KEY",
            )
    for name, place in settings.secrets.items():
        if not _REFERENCE.fullmatch(place):
            raise ConfigError(
                "this value does not name a secret",
                where=f"launch.kubernetes.secrets.{name}",
                allowed="SECRET/KEY: a secret of the namespace (lower-case letters, digits, - and .), and a key in it "
                "(letters, digits, -, _ and .); never the value",
                fix="write both names; kubectl create secret generic SECRET --from-file=KEY=FILE creates a secret",
            )


def _check_settings(config: RunConfig, command: str) -> None:
    """Refuse impossible sizes, and settings that have no equivalent in Kubernetes."""
    settings, spares = config.launch.kubernetes, config.launch.spares
    if spares:
        problem = "Kubernetes replaces pods itself, and has no spare nodes"
        raise ConfigError(problem, where="launch.spares", found=spares, fix="set launch.spares=0")
    if settings.image is not None and not _IMAGE.fullmatch(settings.image):
        problem, allowed = "Kubernetes does not accept this image name", "REGISTRY/NAME:TAG"
        allowed += " in lower case (the tag may have capitals), without a scheme such as docker://"
        raise ConfigError(problem, where="launch.kubernetes.image", found=settings.image, allowed=allowed)
    if settings.memory is not None and quantity(settings.memory) < _LEAST:
        raise ConfigError(
            "too little memory for a pod",
            where="launch.kubernetes.memory",
            found=f"{settings.memory}, in bytes" if settings.memory.isdecimal() else settings.memory,
            allowed="16Mi or more",
            fix="name more memory, with a unit, such as 512Gi",
        )
    for name, key in (("cpu", "cpus_per_node"), ("memory", "memory"), ("nvidia.com/gpu", "gpus_per_node")):
        if name in settings.resources:
            raise ConfigError(
                f"the resource {name} is set by launch.kubernetes.{key}, not by launch.kubernetes.resources",
                where=f"launch.kubernetes.resources.{name}",
                found=settings.resources[name],
                fix=f"remove this key, and set launch.kubernetes.{key}",
            )
    needed, given = gpus_of_a_node(config, command), settings.gpus_per_node
    if config.cluster.device_memory_gb is not None and given is not None and 0 < given < needed:
        raise ConfigError(
            f"the run needs {count(needed, 'GPU')} per pod: one per worker, and those of its servers, counted from "
            "GPU 0",
            where="launch.kubernetes.gpus_per_node",
            found=given,
            allowed=f"{needed} or more; 0 if resources or claims request GPUs",
            fix=f"set launch.kubernetes.gpus_per_node={needed}, or divide the workers among more pods: cluster.nnodes",
        )


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
        raise ConfigError(
            problem, where=f"{_KEY}.container.resources", found=resources, allowed="a mapping: claims: [...]"
        )
    places = (("pod", settings.pod, _POD), ("container", settings.container, _CONTAINER))
    others = {name: "launch.kubernetes.resources" for name in resources if name != "claims"}
    for place, fields, keys in (*places, ("container.resources", resources, others)):
        for name in fields:
            if name in keys:
                raise ConfigError(
                    "megarl sets this field itself",
                    where=f"{_KEY}.{place}.{name}",
                    fix=f"remove it; what sets it: {keys[name]}",
                )
    for name in ("hostname", "subdomain") if launcher == "torchrun" else ():
        if name in settings.pod:
            raise ConfigError(
                "pods find each other by the names that the JobSet gives them",
                where=f"{_KEY}.pod.{name}",
                found=settings.pod[name],
                fix="remove it",
            )
    mounts = mounts_of(settings)
    _check_once("pod.volumes", "name", _entries("pod.volumes", settings.pod, "name"), list(mounts))
    _check_once("mount", "mountPath", [settings.mount], [path for name, path in mounts.items() if name != "runs"])
    added = _entries("container.volumeMounts", settings.container, "mountPath")
    _check_once("container.volumeMounts", "mountPath", added, list(mounts.values()))
    claims = _entries("pod.resourceClaims", settings.pod, "name")
    for name in _entries("container.resources.claims", resources, "name"):
        if name not in claims:
            raise ConfigError(
                "the container uses a claim that the pod does not define",
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
        allowed = "a list of mappings, as in a Kubernetes manifest"
        problem = "this key must be a list of mappings"
        raise ConfigError(problem, where=f"{_KEY}.{place}", found=entries, allowed=allowed)
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


def doubtful(config: RunConfig, command: str = "train", placement: Placement | None = None) -> list[str]:
    """Return warnings about settings that Kubernetes accepts but that are probably not intended."""
    settings, workers = config.launch.kubernetes, config.cluster.nproc // config.cluster.nnodes
    key, warnings = "launch.kubernetes", []
    needed, gpus = gpus_of_a_node(config, command), settings.gpus_per_node
    on_gpus = config.cluster.device_memory_gb is not None
    if not (any("gpu" in name for name in settings.resources) or claims_of(settings)):
        if on_gpus and gpus == 0:
            warnings.append(f"{key}.gpus_per_node: pods request no GPU, but the run needs {needed} per pod")
        elif not on_gpus and gpus is None:
            warnings.append(
                f"{key}: pods request no GPU: set cluster.device_memory_gb (such as 80) or "
                f"{key}.gpus_per_node={needed}; for a run on CPUs {key}.gpus_per_node=0 removes this warning"
            )
    if settings.cpus_per_node is not None and quantity(settings.cpus_per_node) < workers:
        warnings.append(
            f"{key}.cpus_per_node={settings.cpus_per_node} is less than one CPU per worker, of which a pod has "
            f"{workers}"
        )
    if settings.memory is not None and quantity(settings.memory) < quantity(settings.shared_memory):
        warnings.append(
            f"{key}.memory={settings.memory} is below shared_memory={settings.shared_memory}, which counts as memory"
        )
    samples = object_store_bytes(config, placement) if placement is not None and placement.separate else 0
    if quantity(settings.shared_memory) < samples:
        warnings.append(
            f"{key}.shared_memory={settings.shared_memory} is less than the {samples / 2**30:.1f}Gi that samples "
            "between teams may need; Ray then keeps them in files on the pod's disk, which is slow: set "
            f"{key}.shared_memory={math.ceil(samples / 2**30)}Gi or more, or lower data.batch_size, rollout.sampling.n "
            "or max_new_tokens"
        )
    if "workingDir" not in settings.container and (here := relative_paths(config)):
        names = "; ".join(f"{name}: {value}" for name, value in here.items())
        warnings.append(
            f"these paths are relative to this folder, but pods start in that of the image: {names}; copy the files "
            f"to the claim, and name them by absolute paths, such as {settings.mount}/..."
        )
    return warnings


def quantity(text: str) -> float:
    """Return a Kubernetes quantity as a number."""
    match = re.fullmatch(r"([\d.]+(?:[eE]\d+)?)(\w*)", text)
    assert match is not None, "the configuration checks quantities"
    number, unit = float(match[1]), match[2]
    if unit == "m":
        return number / 1000
    power = " KMGTPE".index(unit[:1].upper() or " ")
    return number * float((1024 if unit.endswith("i") else 1000) ** power)


def _launcher(config: RunConfig, requested: str | None) -> str:
    kind, teams = config.launch.kubernetes.kind, bool(config.placement.teams or config.placement.auto)
    named = requested or config.launch.launcher
    needed = {"jobset": "torchrun", "rayjob": "ray"}[kind] if kind else "ray" if teams or named == "ray" else "torchrun"
    if teams and needed != "ray":
        raise ConfigError(
            "the teams of placement.teams or placement.auto need Ray, but a jobset starts its workers with torchrun",
            where="launch.kubernetes.kind",
            found=kind,
            allowed="rayjob, or null",
            fix="set launch.kubernetes.kind=rayjob",
        )
    if requested not in (None, needed) and not (requested == "local" and needed == "torchrun"):
        other = "rayjob" if requested == "ray" else "jobset"
        raise ConfigError(
            f"{'a run with teams' if teams else f'a {kind}'} starts its workers with {needed}",
            where="--launcher",
            found=requested,
            allowed=needed,
            fix="leave --launcher out" + ("" if teams else f", or set launch.kubernetes.kind={other}"),
        )
    return needed


def object_name(name: str, stamp: str) -> str:
    """Return a valid Kubernetes name: lower-case letters, digits and dashes, short enough as a prefix of pod names."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "run"
    if not plain[0].isalpha():
        plain = f"run-{plain}"
    return f"{plain[: _NAME - len(stamp) - 1].rstrip('-')}-{stamp}".lower()


def manifests(job: KubernetesJob) -> list[Manifest]:
    """Return the Kubernetes objects of a job, in the order of their creation."""
    recipe = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, queued=False)}
    recipe["data"] = {RECIPE: dump_config(job.in_pods)}
    return [recipe, _ray_job(job) if job.launcher == "ray" else _job_set(job)]


def as_yaml(objects: list[Manifest]) -> str:
    """Return Kubernetes objects as YAML for kubectl."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)


def create(job: KubernetesJob) -> str:
    """Create the objects; return kubectl's output. Raise UserError if kubectl is missing or fails, UnavailableError if
    it takes longer than a minute.
    """
    if shutil.which("kubectl") is None:
        raise UserError(
            "kubectl is not installed on this machine",
            where="megarl launch --kubernetes",
            fix="install it, or submit the output of --dry-run in another way",
        )
    text = as_yaml(manifests(job))
    # Refuse a cluster that ignores unknown fields: without `authOptions` anybody could send jobs to a RayJob's Ray.
    command = ["kubectl", "create", "--validate=true", "-f", "-"]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"the cluster did not reply within {_ANSWER_S:.0f} s",
            where="kubectl",
            fix="check the current context with `kubectl cluster-info`",
        ) from error
    if done.returncode:
        raise UserError(
            f"kubectl could not create the job: {done.stderr.strip()}",
            where="kubectl create",
            fix="correct the keys of launch.kubernetes that it names (`megarl launch --dry-run` shows the manifest); "
            "if it names none, check with kubectl that the cluster replies and has JobSet or KubeRay",
        )
    return done.stdout.strip()


def _metadata(job: KubernetesJob, *, queued: bool = True) -> Manifest:
    settings = job.settings
    labels = {"app.kubernetes.io/name": "megarl", "app.kubernetes.io/instance": job.name}
    if queued and settings.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    namespace = {} if settings.namespace is None else {"namespace": settings.namespace}
    return {"name": job.name, **namespace, "labels": labels}


def _arguments(job: KubernetesJob) -> list[str]:
    """Return the command of a pod. Python's -P keeps a folder `kernels` or `tests` in the current folder from shadowing
    a package."""
    start = ["python", "-P", "-m", "megarl", job.command, f"{RECIPE_FOLDER}/{RECIPE}"]
    return [*start, "--launcher", job.launcher, "--run-dir", str(job.run_dir)]


def _job_set(job: KubernetesJob) -> Manifest:
    nodes = job.config.cluster.nnodes
    meet = [
        {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "MASTER_ADDR", "value": f"{job.name}-{_WORKERS}-0-0.{job.name}"},
        {"name": "MASTER_PORT", "value": str(_PORT)},
    ]
    environment = [*(meet if nodes > 1 else []), *_environment(job)]
    template = _template(job, {"command": _arguments(job), "env": environment})
    indexed = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "backoffLimit": 0}
    replicated = {"name": _WORKERS, "replicas": 1, "template": {"spec": {**indexed, "template": template}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job),
        "spec": {
            # ranks look up the first pod before it is ready
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": job.config.cluster.max_restarts},
            "replicatedJobs": [replicated],
        },
    }


def _ray_job(job: KubernetesJob) -> Manifest:
    """Return the RayJob. Its head is also a worker, so the run has as many pods as nodes."""
    import ray

    head, worker = (_template(job, {"env": _environment(job)}, name) for name in ("ray-head", "ray-worker"))
    others = job.config.cluster.nnodes - 1
    sizes = {"replicas": others, "minReplicas": others, "maxReplicas": others}
    cluster: Manifest = {
        "rayVersion": ray.__version__,
        "authOptions": {"mode": "token"},  # the dashboard is reachable from the cluster's network
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0"}, "template": head},
    }
    if others:
        group = {"groupName": _WORKERS, **sizes, "rayStartParams": {}, "template": worker}
        cluster["workerGroupSpecs"] = [group]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(job),
        "spec": {
            "entrypoint": shlex.join(_arguments(job)),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": job.config.cluster.max_restarts,
            "rayClusterSpec": cluster,
        },
    }


def _template(job: KubernetesJob, more: Manifest, name: str = "megarl") -> Manifest:
    """Return the template of a pod. `more` has fields of its container, which is called `name`."""
    settings = job.settings
    annotations = dict(settings.annotations)
    head: Manifest = {"metadata": {"annotations": annotations}} if annotations else {}
    mounts = mounts_of(settings)
    container: Manifest = {"name": name, "image": settings.image, **more}
    resources = _resources(job)
    if resources:
        container["resources"] = resources
    extra = dict(settings.container)
    added = extra.pop("volumeMounts", None) or []
    extra.pop("resources", None)  # the section's resource claims are already part of `resources` above
    container["volumeMounts"] = [*({"name": key, "mountPath": path} for key, path in mounts.items()), *added]
    container |= extra
    volumes = [
        {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "recipe", "configMap": {"name": job.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
    ]
    fields = dict(settings.pod)
    pod: Manifest = {"containers": [container], "volumes": [*volumes, *(fields.pop("volumes", None) or [])], **fields}
    if name == "megarl":
        pod["restartPolicy"] = "Never"  # KubeRay sets the restart policy of Ray's pods
        # By default Kubernetes sends SIGKILL 30 s after SIGTERM, too early for a run that saves first.
        pod.setdefault("terminationGracePeriodSeconds", math.ceil(job.config.cluster.grace_s) + _ENDS_S)
    if settings.service_account is not None:
        pod["serviceAccountName"] = settings.service_account
    if settings.image_pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": settings.image_pull_secret}]
    if settings.node_selector:
        pod["nodeSelector"] = dict(settings.node_selector)
    return {**head, "spec": pod}


def _resources(job: KubernetesJob) -> Manifest:
    settings, cluster = job.settings, job.config.cluster
    gpus = settings.gpus_per_node
    if gpus is None:
        gpus = gpus_of_a_node(job.config, job.command) if cluster.device_memory_gb is not None else 0
    requests, limits = dict(settings.resources), dict(settings.resources)
    if settings.cpus_per_node is not None:
        requests["cpu"] = settings.cpus_per_node
    if settings.memory is not None:
        requests["memory"] = limits["memory"] = settings.memory
    if gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(gpus)
    resources = {"requests": requests, "limits": limits, "claims": claims_of(settings)}
    return {key: value for key, value in resources.items() if value}


def _environment(job: KubernetesJob) -> list[Manifest]:
    settings = job.settings
    plain = [{"name": name, "value": value} for name, value in settings.environment.items()]
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": dict(zip(("name", "key"), place.split("/", 1), strict=True))}}
        for name, place in settings.secrets.items()
    ]
