"""Manifests: held against the published schemas, and against what torchrun and Ray need. No cluster is asked.

Custom resources are held against the definitions of JobSet and KubeRay in crds/, without descriptions, or newer ones
in the folder MEGARL_CRDS (jobsets.yaml, rayjobs.yaml).
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl import cli
from megarl.config.load import load_config
from megarl.launchers import kubernetes
from megarl.recipes.components import COMPONENTS
from megarl.system.errors import ConfigError, UserError
from tests.forked import run

STAMP = "20260102-030405"
NEEDED = ("launch.kubernetes.image=registry.example/megarl:1", "launch.kubernetes.claim=runs")
TEAMS = "placement.teams={train: {roles: [actor], devices: 1}, draw: {roles: [rollout], devices: 1}}"
FULL = (
    *("launch.kubernetes.namespace=rl", "launch.kubernetes.queue=gpus", "launch.kubernetes.service_account=trainer"),
    *("launch.kubernetes.cpus_per_node=64", "launch.kubernetes.memory=512Gi", "launch.kubernetes.shared_memory=64Gi"),
    *("launch.kubernetes.image_pull_secret=pull", "launch.kubernetes.node_selector={gpu: h100}"),
    "launch.kubernetes.environment={NCCL_DEBUG: WARN}",
    "launch.kubernetes.secrets={HF_TOKEN: hub/token, WANDB_API_KEY: wandb/key}",
)
FABRIC = (
    "launch.kubernetes.resources={rdma/hca: 1}",
    "launch.kubernetes.annotations={example.org/network: ib}",
    "launch.kubernetes.pod={tolerations: [{key: gpu, operator: Exists}], hostNetwork: true, "
    "volumes: [{name: hub, hostPath: {path: /hub}}]}",
    "launch.kubernetes.container={securityContext: {capabilities: {add: [IPC_LOCK]}}, "
    "volumeMounts: [{name: hub, mountPath: /hub}]}",
)
CASES = {
    "one node": ("grpo_quickstart", ()),
    "four nodes": ("grpo_qwen3_30b_a3b_32gpu", FULL),
    "teams": ("grpo_quickstart", (TEAMS, "cluster.nproc=2", *FULL)),
    "fabric": ("grpo_qwen3_30b_a3b_32gpu", (*FABRIC, "cluster.max_restarts=3")),
    "claims": (
        "grpo_qwen3_8b_8gpu",
        (
            "launch.kubernetes={gpus_per_node: 0, memory: 512Gi, container: {resources: {claims: [{name: gpus}]}}, "
            "pod: {resourceClaims: [{name: gpus, resourceClaimTemplateName: eight-gpus}]}}",
        ),
    ),
    "ray on nodes": ("grpo_qwen3_30b_a3b_32gpu", ("launch.kubernetes.kind=rayjob",)),
}


def made(name: str) -> list[dict[str, Any]]:
    recipe, overrides = CASES[name]
    return objects(recipe, *NEEDED, *overrides)


def objects(recipe: str, *overrides: str, launcher: str | None = None, run_dir: str | None = None):
    config = load_config(recipe, list(overrides), components=COMPONENTS)
    return kubernetes.manifests(kubernetes.make_job(config, "train", launcher, run_dir, STAMP))


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod templates of a job."""
    if manifest["kind"] == "JobSet":
        return [one["template"]["spec"]["template"] for one in manifest["spec"]["replicatedJobs"]]
    cluster = manifest["spec"]["rayClusterSpec"]
    return [one["template"] for one in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", []))]


def container(manifest: dict[str, Any], which: int = 0) -> dict[str, Any]:
    return pods(manifest)[which]["spec"]["containers"][0]


@pytest.mark.parametrize("case", CASES)
def test_objects_are_what_kubernetes_publishes(case):
    validate = pytest.importorskip("kubernetes_validate")
    recipe, job = made(case)
    version = validate.latest_version()
    validate.validate(recipe, version, strict=True)
    for pod in pods(job):
        named = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **pod}
        validate.validate(named, version, strict=True)
    if job["kind"] == "JobSet":
        for one in job["spec"]["replicatedJobs"]:
            inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **one["template"]}
            validate.validate(inner, version, strict=True)


def strict(schema: Any) -> Any:
    """An OpenAPI schema of a definition as JSON schema that takes no unknown key."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items() if not key.startswith("x-kubernetes")}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        found["additionalProperties"] = False
    return found


def definition(kind: str) -> tuple[str, dict[str, Any]]:
    """(group/version, schema) of a custom resource."""
    name, version = {"JobSet": ("jobsets", "v1alpha2"), "RayJob": ("rayjobs", "v1")}[kind]
    if folder := os.environ.get("MEGARL_CRDS"):
        spec = yaml.safe_load((Path(folder) / f"{name}.yaml").read_text())["spec"]
        schema = next(one for one in spec["versions"] if one["name"] == version)["schema"]["openAPIV3Schema"]
        return f"{spec['group']}/{version}", schema
    kept = json.loads(gzip.decompress((Path(__file__).parent / "crds" / f"{name}.json.gz").read_bytes()))
    return f"{kept['group']}/{kept['version']}", kept["schema"]


@functools.cache  # looking through the definition of a RayJob takes seconds
def validator(kind: str) -> tuple[str, Any]:
    """(group/version, what tells whether an object is one) of a custom resource."""
    jsonschema = pytest.importorskip("jsonschema")
    version, schema = definition(kind)
    schema["properties"]["metadata"] = {}
    whole = strict(schema)
    checker = jsonschema.validators.validator_for(whole)
    if "MEGARL_CRDS" in os.environ:  # those beside this file are valid, and checking them takes seconds
        checker.check_schema(whole)
    return version, checker(whole)


@pytest.mark.parametrize("case", CASES)
def test_custom_resources_are_what_their_definitions_take(case):
    jsonschema = pytest.importorskip("jsonschema")
    _, job = made(case)
    version, definition_of = validator(job["kind"])
    assert job["apiVersion"] == version
    definition_of.validate(job)
    job["spec"]["replicas"] = 3
    with pytest.raises(jsonschema.ValidationError, match="replicas"):
        definition_of.validate(job)


def test_ranks_of_a_jobset_meet_at_its_first_pod():
    _, job = made("four nodes")
    name = job["metadata"]["name"]
    inner = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (inner["parallelism"], inner["completions"], inner["completionMode"]) == (4, 4, "Indexed")
    environment = {one["name"]: one for one in container(job)["env"]}
    assert environment["MASTER_ADDR"]["value"] == f"{name}-workers-0-0.{name}"
    index = environment["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert container(job)["resources"]["limits"] == {"memory": "512Gi", "nvidia.com/gpu": "8"}
    assert inner["template"]["spec"]["terminationGracePeriodSeconds"] == 30  # cluster.grace_s, and 10
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert len(f"{name}-workers-0-3") <= 63


@pytest.mark.parametrize("kind", ["jobset", "rayjob"])
def test_fields_of_a_cluster_join_those_that_are_written(kind):
    _, job = objects("grpo_qwen3_30b_a3b_32gpu", *NEEDED, *FABRIC, f"launch.kubernetes.kind={kind}")
    for template in pods(job):
        assert template["metadata"]["annotations"] == {"example.org/network": "ib"}
        pod = template["spec"]
        (found,) = pod["containers"]
        assert pod["hostNetwork"] is True
        assert [one["name"] for one in pod["volumes"]] == ["runs", "recipe", "shared-memory", "hub"]
        assert [one["name"] for one in found["volumeMounts"]] == ["runs", "recipe", "shared-memory", "hub"]
        assert found["resources"]["limits"] == {"rdma/hca": "1", "nvidia.com/gpu": "8"}
        assert found["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def test_other_gpus_and_small_pods_can_be_asked_for():
    keys = ["launch.kubernetes={gpus_per_node: 0, resources: {amd.com/gpu: 8}, memory: 8Gi, pod: {volumes: null}}"]
    _, job = objects("grpo_qwen3_8b_8gpu", *keys, *NEEDED)
    limits = container(job)["resources"]["limits"]
    assert limits == {"amd.com/gpu": "8", "memory": "8Gi"}


def test_claims_of_the_container_join_its_resources():
    _, job = made("claims")
    assert container(job)["resources"] == {
        "requests": {"memory": "512Gi"},
        "limits": {"memory": "512Gi"},
        "claims": [{"name": "gpus"}],
    }


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("pod: {volumes: [{name: runs}]}", r"pod\.volumes: a pod may have each name only once(?s:.*)found:   'runs'"),
        (
            "pod: {volumes: [{name: a}, {name: a}]}",
            r"pod\.volumes: a pod may have each name only once(?s:.*)found:   'a'",
        ),
        (
            "container: {volumeMounts: [{name: a, mountPath: /data/runs/}]}",
            r"container\.volumeMounts: a pod may have each mountPath only once(?s:.*)any except /data/runs, /etc",
        ),
        (
            "container: {volumeMounts: [{name: a, mountPath: /a}, {name: b, mountPath: /a}]}",
            r"container\.volumeMounts: a pod may have each mountPath only once(?s:.*)found:   '/a'",
        ),
        (
            "mount: /dev/shm",
            r"kubernetes\.mount: a pod may have each mountPath only once(?s:.*)any except /etc/megarl, /dev/shm",
        ),
        ("pod: {hostname: me}", r"pod\.hostname: pods find each other by the names that the JobSet gives them"),
        ("pod: {subdomain: us}", r"pod\.subdomain: pods find each other"),
        (
            "container: {resources: {limits: {cpu: 4}}}",
            r"container\.resources\.limits(?s:.*)launch\.kubernetes\.resources",
        ),
        ("container: {resources: 8}", r"container\.resources: invalid resources"),
        (
            "container: {resources: {claims: gpus}}",
            r"container\.resources\.claims: this key must be a list of mappings",
        ),
        (
            "container: {resources: {claims: [{name: gpu}]}}, pod: {resourceClaims: [{name: gpus}]}",
            r"container\.resources\.claims: .* claim that the pod does not define(?s:.*)resourceClaims: gpus",
        ),
    ],
)
def test_fields_that_no_pod_can_have_are_refused_with_their_place(keys, said):
    with pytest.raises(ConfigError, match=said):
        objects("grpo_quickstart", *NEEDED, f"launch.kubernetes={{{keys}}}")


def test_volumes_may_be_mounted_twice_and_pods_of_ray_may_have_a_name():
    keys = "pod: {hostname: me, volumes: [{name: hub, hostPath: {path: /hub}}]}, "
    keys += "container: {volumeMounts: [{name: hub, mountPath: /a}, {name: hub, mountPath: /b, subPath: b}]}"
    _, job = objects("grpo_quickstart", *NEEDED, f"launch.kubernetes={{kind: rayjob, {keys}}}")
    assert pods(job)[0]["spec"]["hostname"] == "me"
    assert [one["mountPath"] for one in container(job)["volumeMounts"]][3:] == ["/a", "/b"]


def test_what_is_doubtful_of_pods_is_said():
    keys = {
        "gpus_per_node: 0, pod: {resourceClaims: [{name: a}]}": "pods request no GPU, but the run needs 8 per pod",
        "gpus_per_node: 0, container: {resources: {claims: [{name: a}]}}": "",
        "gpus_per_node: 0": "pods request no GPU, but the run needs 8 per pod",
        "cpus_per_node: 4": "less than one CPU per worker, of which a pod has 8",
        "memory: 8Gi": "below shared_memory=16Gi",
        "gpus_per_node: 0, resources: {amd.com/gpu: 8}": "",
        "cpus_per_node: 96, memory: 512Gi": "",
    }
    for key, said in keys.items():
        config = load_config("grpo_qwen3_8b_8gpu", [f"launch.kubernetes={{{key}}}"])
        found = kubernetes.doubtful(config)
        assert len(found) == bool(said)
        assert all(said in one for one in found)


def test_pods_of_a_recipe_that_names_no_gpu_get_none_with_a_warning():
    keys = {
        "{}": "pods request no GPU: set cluster.device_memory_gb (such as 80) or launch.kubernetes.gpus_per_node=8",
        "{gpus_per_node: 8}": "",
        "{gpus_per_node: 0}": "",  # a run on CPUs that says so
        "{resources: {amd.com/gpu: 8}}": "",
        "{container: {resources: {claims: [{name: a}]}}}": "",
    }
    for key, said in keys.items():
        overrides = ["cluster.device_memory_gb=null", f"launch.kubernetes={key}"]
        found = kubernetes.doubtful(load_config("grpo_qwen3_8b_8gpu", overrides))
        assert len(found) == bool(said)
        assert all(said in one for one in found)


@pytest.mark.parametrize(
    ("recipe", "size", "said"),
    [
        (
            "grpo_async_qwen3_8b_32gpu",
            "1Gi",
            "shared_memory=1Gi is less than the 1.3Gi that samples between teams may need",
        ),
        ("grpo_async_qwen3_8b_32gpu", "2Gi", ""),
        ("grpo_qwen3_30b_a3b_32gpu", "1Gi", ""),  # one team hands nothing over
    ],
)
def test_shared_memory_that_does_not_hold_the_samples_is_doubtful(recipe, size, said, capsys):
    keys = [*NEEDED, f"launch.kubernetes.shared_memory={size}"]
    assert cli.main(["launch", recipe, "--kubernetes", "--dry-run", *keys]) == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if "samples between teams" in line]
    assert len(shown) == bool(said)
    assert all(said in line and "launch.kubernetes.shared_memory=2Gi or more" in line for line in shown)


def test_relative_paths_of_files_that_are_here_are_doubtful_in_pods(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    keys = ["data.train_files=[rows.jsonl]", f"data.val_files=[{tmp_path}/rows.jsonl]"]
    (found,) = kubernetes.doubtful(load_config("grpo_qwen3_8b_8gpu", keys))
    assert "data.train_files[0]: rows.jsonl; copy the files" in found
    assert "/data/runs/..." in found
    assert "val_files" not in found
    keys.append("launch.kubernetes.container={workingDir: /data/runs/work}")
    assert kubernetes.doubtful(load_config("grpo_qwen3_8b_8gpu", keys)) == []


def test_pods_of_a_jobset_are_started_again_by_it_and_not_by_their_launchers():
    """Launchers on several machines refuse to: each would start by itself."""
    recipe, job = made("fabric")
    assert job["spec"]["failurePolicy"] == {"maxRestarts": 3}
    assert "max_restarts: 0" in recipe["data"]["recipe.yaml"]


@pytest.mark.parametrize(
    ("text", "number"),
    [("512", 512), ("500m", 0.5), ("1e3", 1000), ("16Gi", 16 * 2**30), ("2k", 2000), ("1.5M", 1.5e6)],
)
def test_quantities(text, number):
    assert kubernetes.quantity(text) == number


def test_a_ray_cluster_has_a_pod_for_every_node():
    _, job = made("ray on nodes")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["workerGroupSpecs"][0]["replicas"] == 3
    assert shlex.split(job["spec"]["entrypoint"])[:6] == [
        "python",
        "-P",
        "-m",
        "megarl",
        "train",
        "/etc/megarl/recipe.yaml",
    ]
    assert "--launcher ray" in job["spec"]["entrypoint"]
    _, single = made("teams")
    assert single["kind"] == "RayJob"
    assert "workerGroupSpecs" not in single["spec"]["rayClusterSpec"]


@pytest.mark.parametrize("case", ["ray on nodes", "teams"])
def test_ray_asks_for_a_token_where_its_dashboard_listens_in_the_clusters_network(case):
    cluster = made(case)[1]["spec"]["rayClusterSpec"]
    assert cluster["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "0.0.0.0"
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("case", ["four nodes", "teams"])
def test_secrets_are_references(case):
    recipe, job = made(case)
    for which in range(len(pods(job))):
        environment = {one["name"]: one for one in container(job, which)["env"]}
        assert environment["HF_TOKEN"] == {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
        }
    assert "hub/token" in recipe["data"]["recipe.yaml"]


@pytest.mark.parametrize(
    "override",
    [
        "launch.kubernetes.environment={HF_TOKEN: hf_abcdef}",
        "launch.kubernetes.environment={MY_PASSWORD: x}",
        "launch.kubernetes.secrets={HF_TOKEN: hf_abcdef}",
    ],
)
def test_values_of_secrets_are_refused(override):
    with pytest.raises(ConfigError, match="SECRET/KEY") as refused:
        objects("grpo_quickstart", *NEEDED, override)
    assert "hf_abcdef" not in str(refused.value)


def test_the_recipe_in_the_objects_is_the_one_that_is_run(tmp_path):
    recipe, job = made("four nodes")
    (tmp_path / "recipe.yaml").write_text(recipe["data"]["recipe.yaml"])
    again = load_config(str(tmp_path / "recipe.yaml"), [], components=COMPONENTS)
    assert again == load_config(CASES["four nodes"][0], [*NEEDED, *FULL], components=COMPONENTS)
    assert list(yaml.safe_load_all(kubernetes.as_yaml([recipe, job]))) == [recipe, job]
    mounts = {one["mountPath"] for one in container(job)["volumeMounts"]}
    assert mounts == {"/data/runs", "/etc/megarl", "/dev/shm"}
    assert container(job)["command"][-1] == f"/data/runs/grpo_qwen3_30b_a3b_32gpu/{STAMP}"


@pytest.mark.parametrize(
    ("overrides", "more", "said"),
    [
        ((), {}, r"launch\.kubernetes\.image(?s:.*)launch\.kubernetes\.claim"),
        (NEEDED[:1], {}, r"launch\.kubernetes\.claim(?s:.*)a PersistentVolumeClaim, ReadWriteMany"),
        ((*NEEDED, "launch.kubernetes.memory=512"), {}, "with a unit, such as 512Gi"),
        ((*NEEDED, "launch.spares=1"), {}, "launch.spares"),
        ((*NEEDED, "launch.kubernetes.resources={cpu: 4}"), {}, "launch.kubernetes.cpus_per_node"),
        ((*NEEDED, "launch.kubernetes.environment={NODE_RANK: 0}"), {}, "the job itself sets"),
        ((*NEEDED, "launch.kubernetes={environment: {A: 1}, secrets: {A: b/c}}"), {}, "is also set from a secret"),
        (("launch.kubernetes.image=docker://a/b:1", NEEDED[1]), {}, "does not accept this image name"),
        ((*NEEDED, "launch.kubernetes.pod={volumes: [x]}"), {}, "a list of mappings"),
        ((*NEEDED, "launch.kubernetes.pod={nodeSelector: {}}"), {}, "launch.kubernetes.node_selector"),
        ((*NEEDED, "launch.kubernetes.container={env: []}"), {}, "launch.kubernetes.environment"),
        ((*NEEDED, "cluster.device_memory_gb=80", "launch.kubernetes.gpus_per_node=1"), {}, "needs 2 GPUs per pod"),
        (NEEDED, {"run_dir": "/srv/run"}, "below launch.kubernetes.mount=/data/runs"),
        (NEEDED, {"run_dir": "/data/runs/../../etc"}, "below launch.kubernetes.mount=/data/runs"),
        ((*NEEDED, TEAMS, "cluster.nproc=2", "launch.kubernetes.kind=jobset"), {}, "rayjob"),
        ((*NEEDED, "launch.kubernetes.kind=jobset"), {"launcher": "ray"}, "torchrun"),
    ],
)
def test_what_cannot_be_is_refused(overrides, more, said):
    with pytest.raises(ConfigError, match=said):
        objects("grpo_quickstart", *overrides, **more)


@pytest.mark.parametrize("name", ["grpo_qwen3_30b_a3b_32gpu_with_a_long_name", "30B!", "Ünï", "-"])
def test_names_are_what_kubernetes_takes(name):
    found = kubernetes.object_name(name, STAMP)
    assert len(found) <= 40
    assert found.endswith(STAMP)
    assert all(sign.isascii() and (sign.isalnum() or sign == "-") for sign in found)
    assert found[0].isalpha()


def test_kubectl_is_handed_the_objects(tmp_path, monkeypatch):
    config = load_config("grpo_quickstart", list(NEEDED), components=COMPONENTS)
    job = kubernetes.make_job(config, "train", None, None, STAMP)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="kubectl is not installed on this machine"):
        kubernetes.create(job)
    program = tmp_path / "kubectl"
    program.write_text(f'#!/bin/sh\n/bin/cat > "{tmp_path}/got"\necho "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert kubernetes.create(job) == "create --validate=true -f -"
    assert list(yaml.safe_load_all((tmp_path / "got").read_text())) == kubernetes.manifests(job)
    program.write_text("#!/bin/sh\necho 'no JobSet here' >&2\nexit 1\n")
    with pytest.raises(UserError, match="no JobSet here"):
        kubernetes.create(job)


@pytest.mark.procs
def test_the_command_prints_them(tmp_path):
    keys = [*NEEDED, "launch.kubernetes.gpus_per_node=0"]
    done = run(["launch", "grpo_quickstart", "--kubernetes", "--dry-run", *keys], tmp_path)
    assert done.code == 0, done.output
    printed, _, told = done.output.partition("== Memory per rank")
    assert "[  ok] estimator: grpo" in told  # on stderr
    assert told.endswith(" skip. Nothing was submitted.\n")
    found = [one for one in yaml.safe_load_all(printed) if one]
    assert [one["kind"] for one in found] == ["ConfigMap", "JobSet"]
