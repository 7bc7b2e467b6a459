"""Settings of batch jobs: what fails only on the nodes, and what a site's file says."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megarl import cli
from megarl.config.base import raise_problems
from megarl.config.launch import SlurmConfig
from megarl.config.load import load_config
from megarl.launchers import slurm, slurm_settings
from megarl.launchers.site import naming_site, with_site
from megarl.launchers.slurm import Submission, job_script, node_script, plan
from megarl.system.errors import ConfigError, UnavailableError
from tests.launchers.test_slurm import submission

TEAMS = "placement.teams={a: {roles: [actor, rollout], devices: 2}, b: {roles: [reference], devices: 2}}"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["launch.slurm.teams={c: {nodes: 1}}"], r"launch\.slurm\.teams\.c(?s:.*)allowed: a, b"),
        (["launch.slurm.teams={b: {nodes: 3}}"], r"launch\.slurm\.teams\.b\.nodes(?s:.*)devices = 2"),
        (["launch.slurm.teams={b: {nodes: 2}}"], r"2 workers on 0 of cluster\.nnodes = 2"),
        (["launch.slurm.teams={b: {nodes: 1}}", "launch.spares=1"], r"launch\.spares"),
        (["launch.slurm.mounts=[/a:/b]"], r"launch\.slurm\.mounts(?s:.*)set launch\.slurm\.image"),
        (["launch.slurm={image: x, mounts: [/a]}"], r"launch\.slurm\.mounts: the mount of a container is invalid"),
        (["launch.slurm.image=./none.sqsh"], r"launch\.slurm\.image: this image file does not exist"),
        (["launch.slurm.image=oras://a/b:1"], r"launch\.slurm\.image: pyxis does not accept this image name"),
        (
            ["launch.slurm={image: 'a#b:1', container: apptainer}"],
            r"launch\.slurm\.image: apptainer does not accept this image name",
        ),
        (["launch.slurm.environment={HF_TOKEN: abc}"], r"launch\.slurm\.environment\.HF_TOKEN(?s:.*)export HF_TOKEN"),
        (["launch.slurm.environment={MASTER_ADDR: me}"], r"launch\.slurm\.environment\.MASTER_ADDR"),
        (["launch.slurm={chain: 1, time: '4'}"], r"launch\.slurm\.warn_s(?s:.*)warn_s=80"),
        (["launch.slurm.options=[--array=1-3]"], r"launch\.slurm\.options: it makes several jobs(?s:.*)'--array=1-3'"),
        (["launch.slurm.options=[--exclusive, -a1-3]"], r"launch\.slurm\.options: it makes several jobs"),
        (["launch.slurm.options=['--wrap=hostname']"], r"launch\.slurm\.options: the job runs megarl's script"),
        (["launch.slurm.options=[--test-only]"], r"launch\.slurm\.options: nothing would be submitted"),
        (["launch.slurm.options=[--wait]"], r"launch\.slurm\.options: sbatch would return only after"),
        (["launch.slurm.options=[-W]"], r"launch\.slurm\.options: sbatch would return only after"),
        (["launch.slurm.options=['--export=NONE']"], r"launch\.slurm\.options: nodes would not get(?s:.*)ALL, or ALL,"),
        (["launch.slurm.options=['--export NIL']"], r"launch\.slurm\.options: nodes would not get"),
        (["launch.slurm.options=['--export=HOME,A=ALL']"], r"launch\.slurm\.options: nodes would not get"),
        (
            ["launch.slurm={gres: disk, options: ['--gres=shm:1']}"],
            r"launch\.slurm\.options: launch\.slurm\.gres is also set",
        ),
    ],
)
def test_settings_that_would_fail_on_the_nodes_are_refused(keys, said, tmp_path):
    config = load_config("grpo_quickstart", [TEAMS, "cluster={nproc: 4, nnodes: 2}", *keys])
    with pytest.raises(ConfigError, match=said):
        slurm_settings.check_settings(Submission(config, tmp_path / "run", "train", "ray", tmp_path))


def test_teams_with_nodes_of_their_own_take_ray(tmp_path):
    config = load_config(
        "grpo_quickstart", [TEAMS, "cluster={nproc: 4, nnodes: 2}", "launch.slurm.teams={b: {nodes: 1}}"]
    )
    with pytest.raises(ConfigError, match="which needs Ray"):
        slurm_settings.check_settings(Submission(config, tmp_path / "run", "train", "torchrun", tmp_path))


@pytest.mark.parametrize(
    ("keys", "gpus", "said"),
    [
        ([], 8, ""),
        (["rollout.sglang.colocated=false"], 16, ""),  # eight servers on GPUs of their own
        (["launch.slurm.gpus_per_node=4"], 0, "launch.slurm.gpus_per_node: the run needs 8 GPUs per node"),
        (["launch.slurm.gres=gpu:h100:4"], 0, "launch.slurm.gres: the run needs 8 GPUs per node"),
        (["launch.slurm.gres=disk"], 8, ""),
        (["launch.slurm={gpus_per_node: 0, options: [--exclusive]}"], 0, ""),  # nodes are given whole
        (["launch.slurm={gpus_per_node: 0, options: ['--gres=gpu:8']}"], 0, ""),
        (["launch.slurm.gres=gpu:h100:8,disk:1"], 8, ""),
    ],
)
def test_a_node_has_the_gpus_of_its_workers_and_servers(keys, gpus, said, tmp_path):
    config = load_config("grpo_qwen3_8b_8gpu", keys)
    job = Submission(config, tmp_path / "run", "train", "local", tmp_path)
    if said:
        with pytest.raises(ConfigError, match=re.escape(said)):
            slurm_settings.check_settings(job)
        return
    slurm_settings.check_settings(job)
    assert plan(job)["groups"][0]["gpus"] == gpus


@pytest.mark.parametrize(
    "options", ["[--export=ALL]", "['--export=all,A=1']", "[--wait-all-nodes=1, --parsable]", "[-G 4]"]
)
def test_options_that_the_job_goes_together_with_are_taken(options, tmp_path):
    config = load_config("grpo_quickstart", [f"launch.slurm.options={options}"])
    slurm_settings.check_settings(Submission(config, tmp_path / "run", "train", "local", tmp_path))


@pytest.mark.parametrize("option", ["--gres=gpu:8", "--gres disk,gpu:h100:8", "--gpus=8", "-G8", "--gpus-per-task=8"])
@pytest.mark.parametrize(
    ("keys", "twice"), [("", True), ("gpus_per_node: 8,", True), ("gpus_per_node: 0,", False)], ids=["", "8", "0"]
)
def test_gpus_are_asked_for_once(option, keys, twice, tmp_path):
    config = load_config("grpo_qwen3_8b_8gpu", [f"launch.slurm={{{keys} options: ['{option}']}}"])
    job = Submission(config, tmp_path / "run", "train", "local", tmp_path)
    if not twice:
        slurm_settings.check_settings(job)
        return
    with pytest.raises(ConfigError, match=r"launch\.slurm\.options: GPUs are requested twice") as refused:
        slurm_settings.check_settings(job)
    assert refused.value.found == option


def test_options_of_gpus_that_ask_for_none_are_taken(tmp_path):
    options = "[--gpu-bind=none, '--gres=disk:1', --gpu-freq=high]"
    config = load_config("grpo_qwen3_8b_8gpu", [f"launch.slurm.options={options}"])
    slurm_settings.check_settings(Submission(config, tmp_path / "run", "train", "local", tmp_path))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            "chain: 2, time: '6'",
            "launch.slurm.warn_s=300: of launch.slurm.time, 360 s, a job of the chain has only 0 to 60 s",
        ),
        ("chain: 2, time: '10'", "has only 240 to 300 s"),
        ("chain: 2, time: '11'", ""),
        ("chain: 2, time: '10', warn_s: 200", ""),
        ("chain: 0, time: '6'", ""),  # the run goes on after its checkpoint
        ("chain: 2", ""),
    ],
)
def test_a_chain_whose_jobs_are_warned_at_once_is_doubtful(keys, said, tmp_path):
    config = load_config("grpo_quickstart", [f"launch.slurm={{cpus_per_node: 2, gpus_per_node: 0, {keys}}}"])
    job = Submission(config, tmp_path, "train", "local", tmp_path)
    slurm_settings.check_settings(job)
    found = slurm_settings.doubtful(job)
    assert len(found) == bool(said)
    assert all(said in one for one in found)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("time: 3", "launch.slurm.warn_s=300 is not below launch.slurm.time, 180 s: Slurm sends no signal"),
        ("time: 5", "launch.slurm.warn_s=100 or a longer launch.slurm.time"),
        ("time: 6", ""),
        ("time: 3, warn_s: 60", ""),
        ("time: UNLIMITED", ""),
    ],
)
def test_a_job_that_ends_without_a_checkpoint_is_doubtful(keys, said, tmp_path):
    config = load_config("grpo_quickstart", [f"launch.slurm={{cpus_per_node: 2, gpus_per_node: 0, {keys}}}"])
    job = Submission(config, tmp_path, "train", "local", tmp_path)
    found = slurm_settings.doubtful(job)
    assert len(found) == bool(said)
    assert all(said in one for one in found)
    assert ("--signal" in job_script(job)) != bool(said)
    assert slurm_settings.doubtful(replace(job, command="eval")) == []  # it writes none


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"environment": {"HF_HOME": "/hub/hf", "XDG_CACHE_HOME": "/hub/cache"}}, ["HF_HOME", "XDG_CACHE_HOME"]),
        ({"environment": {"HF_HOME": "/hub/hf", "XDG_CACHE_HOME": "/hubs"}, "mounts": ["/a:/hub"]}, ["XDG_CACHE_HOME"]),
        ({"environment": {"HF_HOME": "/hub"}, "mounts": ["/hub:/other"]}, ["HF_HOME"]),  # its place outside
        ({"environment": {"HF_HOME": "/hub/"}, "mounts": ["/srv:/hub:ro"]}, []),
        ({"environment": {"A": "/shared/my work/a", "B": "/shared/runs/a run/b"}}, []),  # mounted by themselves
        ({"environment": {"XDG_CACHE_HOME": "/opt/cache", "LD_LIBRARY_PATH": "/a:/b", "N": "1"}}, []),
        ({"environment": {"HF_HOME": "/hub/hf"}, "image": None}, []),
        ({"environment": {"HF_HOME": f"{Path.home()}/hf"}, "container": "apptainer"}, []),
    ],
)
def test_variables_with_a_folder_that_a_container_does_not_have_are_doubtful(keys, names):
    section = SlurmConfig(**{"image": "docker://a/b:1", "cpus_per_node": 2, "gpus_per_node": 0, **keys})
    found = slurm_settings.doubtful(submission(section))
    assert [re.match(r"launch\.slurm\.environment\.(\w+)=", one)[1] for one in found] == names
    assert all("is not in any folder of launch.slurm.mounts" in one for one in found)


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu", 1),
        ("gpu:4", 4),
        ("gpu:h100", 1),
        ("gpu:h100:4(S:0-1)", 4),
        ("disk:1,gpu:a:2,gpu:b:3", 5),
        ("disk", None),
    ],
)
def test_gpus_of_a_gres(gres, gpus):
    assert slurm.gres_gpus(gres) == gpus


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512 * 2**20), ("8G", 8 * 2**30), ("2TB", 2 * 2**40), ("0", None), (None, None)]
)
def test_memory_of_a_node(text, size):
    assert slurm_settings.memory_bytes(text) == size


def test_a_team_with_gpus_of_its_own_is_tested_for_these():
    teams = "{a: {roles: [actor, rollout], devices: 8}, b: {roles: [reference], devices: 4}}"
    keys = [f"placement.teams={teams}", "cluster={nproc: 12, nnodes: 2}", "rollout.sglang.servers=8"]
    keys.append("launch.slurm={gres: 'gpu:8', teams: {b: {nodes: 1, gpus_per_node: 4}}}")
    config = load_config("grpo_qwen3_8b_8gpu", [*keys, "launch.launcher=ray"])
    job = Submission(config, Path("/shared/run"), "train", "ray", Path("/shared"))
    slurm_settings.check_settings(job)
    assert [group["gpus"] for group in plan(job)["groups"]] == [8, 4]


def test_apptainer_gets_the_gpus_of_a_gres():
    section = SlurmConfig(gres="gpu:8", gpus_per_node=0, image="docker://a/b:1", container="apptainer")
    (group,) = plan(submission(section))["groups"]
    assert group["gpus"] == 8
    assert "--nv" in group["start"]


@pytest.mark.parametrize(
    ("image", "container", "good"),
    [
        ("a/b:1", None, True),
        ("registry.example#a/b:1", None, True),
        ("docker://registry.example#a/b:1", "pyxis", True),
        ("registry.example/a/b:1", None, False),
        ("docker://registry.example:5000/a/b:1", None, False),
        ("docker://registry.example/a/b:1", "apptainer", True),
        ("registry.example/a/b:1", "apptainer", False),
        ("registry.example#a/b:1", "apptainer", False),
    ],
)
def test_images_are_named_as_their_runtime_has_it(image, container, good, tmp_path):
    job = submission(SlurmConfig(image=image, container=container))
    if good:
        slurm_settings.check_settings(job)
    else:
        with pytest.raises(ConfigError, match=r"launch\.slurm\.image: \w+ does not accept this image name"):
            slurm_settings.check_settings(job)


def test_apptainer_gets_the_gpus_of_nodes_that_are_given_whole():
    keys = ["launch.slurm={gpus_per_node: 0, options: [--exclusive], image: 'docker://a/b:1', container: apptainer}"]
    config = load_config("grpo_qwen3_8b_8gpu", keys)
    (group,) = plan(Submission(config, Path("/shared/run"), "train", "local", Path("/shared")))["groups"]
    assert "--nv" in group["start"]


@pytest.mark.parametrize(
    ("recipe", "keys", "said"),
    [
        ("grpo_qwen3_8b_8gpu", ["cluster.nnodes=2"], "4 of them, for 4 workers: 4 stay idle: set cluster.nproc=16, "),
        ("grpo_qwen3_8b_8gpu", ["cluster.nnodes=2", "cluster.nproc=16"], ""),
        ("grpo_quickstart", [], "a CPU run of 2 workers leaves them idle: set launch.slurm.gpus_per_node=0"),
    ],
)
def test_gpus_of_a_site_that_nothing_of_the_run_is_on_are_doubtful(recipe, keys, said):
    config = load_config(recipe, ["launch.slurm={gpus_per_node: 8, cpus_per_node: 96}", *keys])
    found = slurm_settings.doubtful(Submission(config, Path("/shared/run"), "train", "torchrun", Path("/shared")))
    assert [said in one for one in found] == ([True] if said else [])


@pytest.mark.parametrize(("given", "told"), [({}, True), ({"time": "1:00:00"}, False)])
def test_a_time_limit_that_nobody_sets_is_doubtful(given, told):
    assert (slurm_settings.unset_limit(submission(SlurmConfig(**given))) is not None) == told


@pytest.mark.parametrize("gres", ["disk", None])
def test_a_node_without_gpus_is_doubtful(gres, tmp_path):
    keys = [f"launch.slurm.gres={gres}"] if gres else ["launch.slurm.gpus_per_node=0"]
    config = load_config("grpo_qwen3_8b_8gpu", keys)
    found = slurm_settings.doubtful(Submission(config, tmp_path, "train", "local", tmp_path))
    assert any("launch.slurm requests no GPU, but the run needs 8 per node" in one for one in found)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("{}", "launch.slurm: nodes request no GPU: set cluster.device_memory_gb (such as 80), or launch.slurm.gpus"),
        ("{gres: 'disk:1'}", "set launch.slurm.gres=gpu:8,disk:1; for a run on CPUs"),
        ("{gpus_per_node: 8}", ""),
        ("{gpus_per_node: 0}", ""),  # a run on CPUs that says so
        ("{gres: 'gpu:h100:8'}", ""),
        ("{options: [--exclusive]}", ""),
        ("{options: ['--gres=gpu:8']}", ""),
        ("{options: [-G8]}", ""),
    ],
)
def test_a_recipe_that_names_no_gpu_gets_none_with_a_warning(keys, said, tmp_path):
    overrides = ["cluster.device_memory_gb=null", f"launch.slurm={keys}", "launch.slurm.cpus_per_node=96"]
    config = load_config("grpo_qwen3_8b_8gpu", overrides)
    found = slurm_settings.doubtful(Submission(config, tmp_path, "train", "local", tmp_path))
    assert len(found) == bool(said)
    assert all(said in one for one in found)


@pytest.mark.parametrize(
    ("recipe", "keys", "said"),
    [
        ("grpo_async_qwen3_8b_32gpu", [], ""),
        (
            "grpo_async_qwen3_8b_32gpu",
            ["launch.slurm.teams={draw: {nodes: 2}}"],
            "launch.slurm: 12 GPUs of each of 2 nodes are requested, for 24 workers, but machines "
            "usually have 8: cluster.nnodes=5, or fewer nodes of launch.slurm.teams, or launch.slurm.gpus_per_node=",
        ),
        ("grpo_async_qwen3_8b_32gpu", ["launch.slurm.teams={draw: {nodes: 2, gpus_per_node: 4}}"], "12 GPUs of each"),
        ("grpo_async_qwen3_8b_32gpu", ["launch.slurm={gpus_per_node: 12, teams: {draw: {nodes: 2}}}"], ""),
        ("grpo_async_qwen3_8b_32gpu", ["launch.slurm={gres: 'gpu:12', teams: {draw: {nodes: 2}}}"], ""),
        ("grpo_qwen3_30b_a3b_32gpu", ["cluster.nproc=40"], ""),  # the checks of the recipe say it
    ],
)  # fmt: skip
def test_more_gpus_of_a_teams_node_than_machines_have_are_doubtful(recipe, keys, said, tmp_path):
    config = load_config(recipe, ["launch.slurm.cpus_per_node=96", *keys])
    job = Submission(config, tmp_path, "train", "ray", Path("/shared"))
    found = [one for one in slurm_settings.doubtful(job) if "machines usually have" in one]
    assert len(found) == bool(said)
    assert all(said in one for one in found)


def test_a_team_whose_nodes_are_crowded_is_told_how_many_it_takes(tmp_path):
    teams = "{train: {roles: [actor, reference], devices: 12}, draw: {roles: [rollout], devices: 20}}"
    keys = [f"placement.teams={teams}", "launch.slurm.teams={draw: {nodes: 2}}"]
    config = load_config("grpo_async_qwen3_8b_32gpu", keys)
    job = Submission(config, tmp_path, "train", "ray", Path("/shared"))
    (found,) = [one for one in slurm_settings.doubtful(job) if "machines usually have" in one]
    assert found.startswith("launch.slurm.teams.draw: 10 GPUs of each of 2 nodes")
    assert "launch.slurm.teams.draw.nodes=4 with cluster.nnodes=6, or" in found


def test_nodes_of_a_team_are_asked_for_no_gpu_by_themselves(tmp_path):
    keys = [
        "cluster={nproc: 4, nnodes: 2}",
        "launch.slurm={gpus_per_node: 2, teams: {b: {nodes: 1, gpus_per_node: 0}}}",
    ]
    config = load_config("grpo_quickstart", [TEAMS, *keys, "launch.slurm.cpus_per_node=4"])
    job = Submission(config, tmp_path, "train", "ray", Path("/shared"))
    assert not any("GPU" in one for one in slurm_settings.doubtful(job))  # both kinds of nodes are said
    keys[1] = "launch.slurm={teams: {b: {nodes: 1, gpus_per_node: 2}}}"
    config = load_config("grpo_quickstart", [TEAMS, *keys, "launch.slurm.cpus_per_node=4"])
    job = Submission(config, tmp_path, "train", "ray", Path("/shared"))
    assert [one[:14] for one in slurm_settings.doubtful(job) if "GPU" in one] == ["launch.slurm: "]


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "SGLANG_CLIP_MAX_NEW_TOKENS",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "SLURM_CPU_BIND",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN",
    ],
)
def test_variables_that_are_no_credentials_are_taken(name, tmp_path):
    config = load_config("grpo_quickstart", [f"launch.slurm.environment={{{name}: 'a'}}"])
    slurm_settings.check_settings(Submission(config, tmp_path, "train", "local", tmp_path))


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "aws_secret_access_key"])
def test_variables_that_are_credentials_are_refused(name, tmp_path):
    config = load_config("grpo_quickstart", [f"launch.slurm.environment={{{name}: 'a'}}"])
    with pytest.raises(ConfigError, match=f"export {name} in the submitting shell"):
        slurm_settings.check_settings(Submission(config, tmp_path, "train", "local", tmp_path))


@pytest.mark.parametrize("time", ["0", "UNLIMITED", "-1"])
def test_no_time_limit_is_one(time, tmp_path):
    config = load_config("grpo_quickstart", [f"launch.slurm={{time: '{time}', chain: 2}}"])
    slurm_settings.check_settings(Submission(config, tmp_path, "train", "local", tmp_path))


def test_modules_are_loaded_outside_of_an_image():
    """An image has no modules, and what starts it may be one."""
    section = SlurmConfig(modules=["apptainer/1.3"], setup=["ulimit -l unlimited"])
    for image, places in ((None, (False, True)), ("docker://a/b:1", (True, False))):
        job = submission(section.model_copy(update={"image": image, "container": "apptainer" if image else None}))
        loaded = tuple("module load apptainer/1.3" in text.splitlines() for text in (job_script(job), node_script(job)))
        assert loaded == places
        assert "ulimit -l unlimited" in node_script(job).splitlines()


def test_a_shell_without_modules_takes_them_from_the_profile(tmp_path):
    """As shells of batch jobs are, which read no profile; a profile may use variables that nobody has set."""
    (tmp_path / "profile").write_text('true $NOBODY_HAS_SET_THIS; module() { echo "$@"; }\n')
    text = node_script(submission(SlurmConfig(modules=["cuda/12"])))
    lines = text.splitlines()[: text.splitlines().index("set -u") + 1]
    lines = [line.replace("/etc/profile", f"{tmp_path}/profile") for line in lines if not line.startswith("cd ")]
    done = subprocess.run(["bash"], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert done.stdout == "load cuda/12\n"


# -- the site's file ----------------------------------------------------------------------------------------------


def test_the_site_fills_what_the_recipe_leaves_open(tmp_path, monkeypatch):
    file = tmp_path / "clusters.yaml"
    monkeypatch.setenv("MEGARL_CLUSTERS", str(file))
    config = load_config("grpo_quickstart", ["launch.slurm={partition: mine, environment: {A: '1'}}"])
    with pytest.raises(ConfigError, match="MEGARL_CLUSTERS: the site file does not exist"):
        with_site(config)
    monkeypatch.delenv("MEGARL_CLUSTERS")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert with_site(config) is config
    monkeypatch.setenv("MEGARL_CLUSTERS", str(file))
    file.write_text("alps: {partition: theirs, account: a1, environment: {A: '2', B: '3'}}\n")
    slurm_ = with_site(config).launch.slurm
    assert (slurm_.partition, slurm_.account, slurm_.environment) == ("mine", "a1", {"A": "1", "B": "3"})
    file.write_text("alps: {account: a1}\nother: {account: b1}\n")
    assert with_site(config) is config  # its own section may be all that it means
    config = load_config("grpo_quickstart")
    with pytest.raises(ConfigError, match=r"launch\.cluster: the site file has several clusters(?s:.*)alps, other"):
        with_site(config)
    named = load_config("grpo_quickstart", ["launch.cluster=other"])
    assert with_site(named).launch.slurm.account == "b1"
    with pytest.raises(ConfigError, match=r"launch\.cluster: the site file does not have(?s:.*)alps, other"):
        with_site(load_config("grpo_quickstart", ["launch.cluster=third"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alps: {acount: a1}", r"clusters\.yaml: alps\.acount(?s:.*)did you mean account"),
        ("partition: gpu", r"clusters\.yaml: partition: a cluster must be a mapping"),
        ("[alps]", "invalid file of clusters"),
        ("alps: {options: [exclusive]}", "begin with -, such as --exclusive"),
        ("alps: {options: [--nodes=3]}", r"cluster\.nnodes and launch\.spares"),
        ("alps: {options: [-N4]}", r"cluster\.nnodes and launch\.spares"),
        ("alps: {memory: 1.5T}", "a whole number with K, M, G or T"),
        ("alps: {teams: {a: {nodes: x}}}", r"clusters\.yaml: alps\.teams\.a\.nodes(?s:.*)found:   'x'"),
        ("alps: {environment: {A: [1]}}", "mapping of names to text"),
        ("alps: {environment: {A: true}}", "the value of A needs quotes"),
    ],
)
def test_a_wrong_file_of_clusters_is_told_with_its_key(text, said, tmp_path, monkeypatch):
    file = tmp_path / "clusters.yaml"
    file.write_text(f"{text}\n")
    monkeypatch.setenv("MEGARL_CLUSTERS", str(file))
    with pytest.raises(ConfigError, match=said):
        with_site(load_config("grpo_quickstart"))


def test_numbers_of_a_site_need_no_quotes(tmp_path, monkeypatch):
    file = tmp_path / "clusters.yaml"
    file.write_text("alps: {memory: 0, time: 30, environment: {A: 1}}\nbern: {time: 12:00:00, memory: 200G}\n")
    monkeypatch.setenv("MEGARL_CLUSTERS", str(file))
    found = [with_site(load_config("grpo_quickstart", [f"launch.cluster={name}"])) for name in ("alps", "bern")]
    assert [(one.launch.slurm.memory, one.launch.slurm.time) for one in found] == [("0", "30"), ("200G", "12:00:00")]
    assert found[0].launch.slurm.environment == {"A": "1"}
    file.write_text("# nothing yet\n")
    assert with_site(load_config("grpo_quickstart")).launch.slurm == SlurmConfig()


@pytest.mark.parametrize(
    ("overrides", "place"),
    [
        ([], "launch.slurm.mounts (of alps in {file}): this setting needs a container image, and there is none"),
        (
            ["launch.slurm.mounts=[/c:/d]"],
            "launch.slurm.mounts: this setting needs a container image, and there is none",
        ),
        (["launch.slurm.environment={WORLD_SIZE: 2}"], "launch.slurm.environment.WORLD_SIZE: the job sets this"),
        (["launch.cluster=bern"], "launch.slurm.environment.MASTER_ADDR (of bern in {file}): the job sets this"),
        (
            ["launch.cluster=bern", "launch.slurm.environment={MASTER_ADDR: me}"],
            "launch.slurm.environment.MASTER_ADDR: ",
        ),
    ],
)
def test_a_value_of_the_site_is_told_with_its_file(overrides, place, tmp_path, monkeypatch, capsys):
    file = tmp_path / "clusters.yaml"
    file.write_text("alps: {mounts: ['/a:/b'], environment: {A: 1}}\nbern: {environment: {MASTER_ADDR: them}}\n")
    monkeypatch.setenv("MEGARL_CLUSTERS", str(file))
    overrides = ["launch.cluster=alps", *overrides]
    assert cli.main(["launch", "grpo_quickstart", "--slurm", "--dry-run", *overrides]) == 2
    shown = capsys.readouterr()
    assert f"megarl: {place.format(file=file)}" in shown.err
    assert shown.out == ""


def test_errors_keep_their_kind_when_the_site_is_named(tmp_path, monkeypatch):
    file = tmp_path / "clusters.yaml"
    file.write_text("alps: {partition: gpu, qos: long}\n")
    monkeypatch.setenv("MEGARL_CLUSTERS", str(file))
    config = load_config("grpo_quickstart", ["launch.slurm.qos=short"])
    problems = [UnavailableError(key, where=f"launch.slurm.{key}") for key in ("partition", "qos", "partition_x")]
    said = rf"^launch\.slurm\.partition \(of alps in {re.escape(str(file))}\): "
    with pytest.raises(UnavailableError, match=said), naming_site(config, with_site(config)):
        raise_problems(problems[:1])
    with pytest.raises(ConfigError) as several, naming_site(config, with_site(config)):
        raise_problems(problems)
    assert str(several.value).count(f"(of alps in {file})") == 1
