"""Batch scripts of Slurm as text: a golden file, shellcheck, values that come through a shell unchanged, refusals."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megarl import cli
from megarl.config.launch import LaunchConfig, SlurmConfig, SlurmTeamConfig
from megarl.config.load import load_config
from megarl.config.run import ClusterConfig, RunConfig, TrainerConfig
from megarl.launchers import preflight, slurm, submit
from megarl.launchers.slurm import Submission, job_script, limit_minutes, node_script, plan, saved_in_time
from megarl.launchers.slurm_job.files import with_exclusion
from megarl.system.errors import ConfigError, UserError

GOLDEN = Path(__file__).parent / "golden"
FULL = SlurmConfig(
    partition="gpu",
    account="team-a",
    qos="long",
    time="1-00:00:00",
    constraint="h100&ib",
    gres="gpu:h100:4",
    cpus_per_node=96,
    options=["--exclusive", "--comment=a b"],
    modules=["cuda/13.0"],
    setup=["source /shared/venv/bin/activate"],
    environment={"HF_HOME": "/shared/hf cache"},
    interface="ib0",
    image="docker://registry.example/megarl:1",
    mounts=["/data:/data"],
)


def submission(
    section: SlurmConfig, folder: Path = Path("/shared/runs/a run"), nnodes: int = 2, spares: int = 0
) -> Submission:
    cluster = ClusterConfig(nproc=2 * nnodes, nnodes=nnodes)
    config = RunConfig(name="a run!", cluster=cluster, launch=LaunchConfig(slurm=section, spares=spares))
    return Submission(config, folder, "train", "torchrun", Path("/shared/my work"))


@pytest.mark.parametrize(("time", "save_by_s"), [("10", 540.0), ("1-00:00:00", 86340.0), ("2", None), (None, None)])
def test_a_run_is_saved_a_minute_before_the_limit_of_its_job(time: str | None, save_by_s: float | None) -> None:
    job = submission(SlurmConfig(time=time))
    assert saved_in_time(job).trainer.save_by_s == save_by_s
    own = job.config.model_copy(update={"trainer": TrainerConfig(save_by_s=7.0)})
    assert saved_in_time(dataclasses.replace(job, config=own)).trainer.save_by_s == 7.0


def shellcheck(text: str) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (Debian's package of that name)")
    # SC1091: files that are sourced are on the cluster.
    done = subprocess.run([program, "--exclude=SC1091", "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


FOR_32_GPUS = ("launch.slurm.partition=gpu", "launch.slurm.time=12:00:00")
#: The rollout on two nodes of other hardware than the two of the other teams.
APART = (
    *FOR_32_GPUS,
    "launch.launcher=ray",
    "cluster={nproc: 24, nnodes: 4}",
    "placement.teams={train: {roles: [actor, reference], devices: 16}, draw: {roles: [rollout], devices: 8}}",
    "launch.slurm.teams={draw: {nodes: 2, partition: small, constraint: a100}}",
)


@pytest.mark.parametrize("name", ["job.sh", "node.sh", "plan.json"])
@pytest.mark.parametrize(
    ("golden", "keys"), [("grpo_qwen3_30b_a3b_32gpu", FOR_32_GPUS), ("teams_apart", APART)], ids=["32 GPUs", "apart"]
)
def test_the_scripts_of_the_recipe_for_32_gpus(golden, keys, name, monkeypatch):
    monkeypatch.setattr(slurm.sys, "executable", "/shared/venv/bin/python")
    config = load_config("grpo_qwen3_30b_a3b_32gpu", list(keys))
    run_dir = Path("/shared/runs/grpo_qwen3_30b_a3b_32gpu/20260101-120000")
    job = Submission(config, run_dir, "train", config.launch.launcher, Path("/shared/work"))
    texts = {
        "job.sh": job_script,
        "node.sh": node_script,
        "plan.json": lambda job: json.dumps(plan(job), indent=1) + "\n",
    }
    text = texts[name](job)
    if name != "plan.json":
        shellcheck(text)
    assert text == (GOLDEN / f"{golden}.{name}").read_text()


@pytest.mark.parametrize("nnodes", [1, 2])
@pytest.mark.parametrize("container", [None, "pyxis", "apptainer"])
def test_shellcheck_finds_nothing(nnodes, container):
    section = FULL if container else FULL.model_copy(update={"image": None, "interface": None})
    section = section.model_copy(update={"container": container})
    for launcher in ("torchrun", "ray"):
        job = replace(submission(section, nnodes=nnodes), launcher=launcher)
        shellcheck(job_script(job))
        shellcheck(node_script(job))


def test_what_the_section_says_is_in_the_script():
    text = job_script(submission(FULL))
    for line in (
        "#SBATCH --job-name=a-run-", "#SBATCH --partition=gpu", "#SBATCH --account=team-a", "#SBATCH --qos=long",
        "#SBATCH --time=1-00:00:00", '#SBATCH --constraint="h100&ib"', "#SBATCH --gres=gpu:h100:4",
        "#SBATCH --cpus-per-task=96", "#SBATCH --exclusive", '#SBATCH --comment="a b"',
        '#SBATCH --chdir="/shared/my work"', '#SBATCH --output="/shared/runs/a run/launch"/job-%j.txt',
    ):  # fmt: skip
        assert line in text.splitlines()
    assert "--gpus-per-node" not in text
    assert "--no-kill" not in text
    assert "#SBATCH --mem=0" in job_script(submission(SlurmConfig(memory="0")))


def test_what_the_section_says_is_in_the_plan():
    found = plan(submission(FULL))
    mounts = "/shared/runs/a run:/shared/runs/a run,/shared/my work:/shared/my work,/data:/data"
    (group,) = found["groups"]
    assert group["srun"] == [f"--container-image={FULL.image}", f"--container-mounts={mounts}", "--cpus-per-task=96"]
    apptainer = plan(submission(FULL.model_copy(update={"container": "apptainer", "options": ["--exclude=n[1-2]"]})))
    assert apptainer["groups"][0]["start"][:5] == ["apptainer", "exec", "--nv", "--bind", mounts]
    assert apptainer["exclude"] == ["n[1-2]"]


@pytest.mark.parametrize("option", ["--exclude=n[1-2]", "--exclude n[1-2]", "-x n[1-2]", "-xn[1-2]"])
def test_nodes_to_leave_out_are_told_last_in_every_component(option):
    teams = {"draw": SlurmTeamConfig(nodes=1)}
    named = {"train": {"roles": ["actor"], "devices": 1}, "draw": {"roles": ["rollout"], "devices": 1}}
    config = RunConfig(
        name="x",
        cluster=ClusterConfig(nproc=2, nnodes=2),
        placement={"teams": named},
        launch=LaunchConfig(slurm=SlurmConfig(options=[option], teams=teams)),
    )
    job = Submission(config, Path("/shared/run"), "train", "ray", Path("/shared"))
    text = with_exclusion(job_script(job), [*plan(job)["exclude"], "n7"])
    shellcheck(text)
    header = text[: text.index("\n\n")]
    for component in header.split("#SBATCH hetjob\n"):
        assert component.splitlines()[-1] == '#SBATCH --exclude="n[1-2],n7"'  # sbatch takes the last one
    assert with_exclusion(job_script(job), []) == job_script(job)


def test_spares_are_nodes_of_a_job_that_outlives_one_of_them():
    text = job_script(submission(FULL, spares=2))
    assert "#SBATCH --nodes=4\n" in text
    assert "#SBATCH --no-kill\n" in text


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        ("2", 2),
        ("90:30", 90.5),
        ("12:00:00", 720),
        ("1-6", 1800),
        ("1-00:30", 1470),
        ("2-00:00:00", 2880),
        (None, None),
    ],
)
def test_the_warning_comes_before_the_end_of_jobs_that_are_long_enough(time, minutes):
    assert limit_minutes(time) == minutes
    text = job_script(submission(SlurmConfig(time=time, warn_s=150)))
    assert ("--signal=B:USR1@150" in text) == (minutes is None or minutes > 2.5)


def test_gpus_are_those_of_the_processes_where_the_recipe_is_for_gpus():
    def asked(section: SlurmConfig, **cluster: object) -> int:
        config = RunConfig(
            name="x", cluster=ClusterConfig(nproc=16, nnodes=2, **cluster), launch=LaunchConfig(slurm=section)
        )
        return slurm.gpus_per_node(config, slurm.components(config, "train")[0])

    assert asked(SlurmConfig()) == 0
    assert asked(SlurmConfig(), device_memory_gb=80) == 8
    assert asked(SlurmConfig(gpus_per_node=4), device_memory_gb=80) == 4


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@given(
    st.dictionaries(st.from_regex(r"X_[A-Z]{1,8}", fullmatch=True), TEXT, max_size=3),
    st.text(st.sampled_from("a '$`%&!#*;(){}|<>\t~é"), min_size=1, max_size=12),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_come_through_a_real_shell(tmp_path, environment, name):
    seen, folder = tmp_path / "seen.json", tmp_path / "f" / name.strip() / "run"
    folder.mkdir(parents=True, exist_ok=True)
    program = tmp_path / "it's python"
    program.write_text(
        f"#!{sys.executable} -IS\nimport json, os, sys\n"
        f"if 'slurm_job' in sys.argv: os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
        f"json.dump([sys.argv[1:], os.getcwd(), dict(os.environ)], open({str(seen)!r}, 'w'))\n"
    )
    program.chmod(0o755)
    section = SlurmConfig(environment=environment, python=str(program), setup=["true"])
    launch = LaunchConfig(slurm=section, preflight=False)
    job = Submission(
        RunConfig(name="x", cluster=ClusterConfig(nproc=2), launch=launch), folder, "train", "torchrun", folder
    )
    script = submit.write_scripts(job)
    submit.prepare(job)
    # srun starts what comes after its options; sbatch starts the script.
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "scontrol").write_text("#!/bin/bash\necho n1\n")
    (tmp_path / "scontrol").chmod(0o755)
    outside = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NODEID": "0", "LC_ALL": "C.UTF-8"}
    outside |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    subprocess.run(["bash", script], env=outside, check=True)
    arguments, where, found = json.loads(seen.read_text())
    recipe = folder / "launch" / "recipe.yaml"
    expected = ["-P", "-m", "megarl", "train", str(recipe), "--launcher", "torchrun", "--run-dir", str(folder)]
    assert arguments == expected
    assert where == str(folder)
    assert {key: found[key] for key in environment} == environment


@given(TEXT)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_of_the_recipe_come_through_its_file(tmp_path, text):
    config = RunConfig(name="x", data={"format_prompt": text}, env={"name": "single_turn", "on_error": text})
    job = Submission(config, tmp_path, "train", "torchrun", tmp_path)
    submit.write_scripts(job)
    assert load_config(tmp_path / "launch" / "recipe.yaml") == config


@pytest.mark.parametrize("path", ['/runs/a"b', "/runs/a\nb", "/runs/a\\b"])
def test_paths_that_cannot_stand_in_a_script_are_refused(path):
    with pytest.raises(ConfigError, match="cannot be written in a batch script"):
        job_script(submission(SlurmConfig(), Path(path)))


@pytest.mark.parametrize(
    "values",
    [
        "{partition: a b}",
        "{time: tomorrow}",
        "{environment: {a b: c}}",
        "{options: ['a\"b']}",
        "{gpus: 1}",
        '{gres: "gpu:8\\n"}',
    ],
)
def test_wrong_values_are_refused_with_their_key(values):
    with pytest.raises(ConfigError, match=r"launch\.slurm\."):
        load_config("grpo_quickstart", [f"launch.slurm={values}"])


# -- what Slurm says, by stand-ins of its commands: tests/launchers/test_slurm_real.py has the real ones --------------


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(submit.shutil, "which", lambda name: str(folder / name) if (folder / name).exists() else None)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("Invalid account or account/partition combination specified", "launch.slurm.account"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "launch.slurm.time"),
        ("Requested node configuration is not available", "cluster.nnodes"),
        ("Invalid qos specification", "launch.slurm.qos"),
    ],
)
def test_what_slurm_refuses_is_told_with_its_key(tmp_path, monkeypatch, said, key):
    refuse = f"echo 'sbatch: error: Batch job submission failed: {said}' >&2; exit 1"
    commands(tmp_path / "bin", monkeypatch, sinfo="echo 'gpu*'", sbatch=refuse)
    with pytest.raises(ConfigError) as error:
        submit.check_cluster(submission(SlurmConfig(partition="gpu")))
    assert said in str(error.value)
    assert str(error.value).startswith(key)


def test_a_slurm_that_knows_no_cluster_is_told_in_a_line(tmp_path, monkeypatch):
    said = "sinfo: error: DNS lookup failed\\nsinfo: error: DNS lookup failed\\nsinfo: fatal: no configuration\\n"
    commands(tmp_path / "bin", monkeypatch, sinfo=f"printf '{said}' >&2; exit 1")
    with pytest.raises(UserError, match=r"DNS lookup failed; sinfo: fatal: no configuration\n(?s:.*)slurm\.conf"):
        submit.check_cluster(submission(SlurmConfig()))


def test_what_is_doubtful_is_shown_beside_the_scripts(capsys):
    recipe, key = "grpo_qwen3_8b_8gpu", "launch.slurm.cpus_per_node"
    assert cli.main(["launch", recipe, "--slurm", "--dry-run", "rollout.sglang.memory_fraction=0.95"]) == 0
    shown = capsys.readouterr()
    assert f"megarl: warning: {key}" in shown.err
    assert "megarl: warning: rollout.sglang.memory_fraction: generation may need" in shown.err
    assert "warning" not in shown.out
    assert "host memory of a machine (8 ranks)" in shown.err
    assert "[  ok] estimator: grpo" in shown.err
    assert cli.main(["launch", recipe, "--slurm", "--dry-run", f"{key}=96"]) == 0
    assert key not in capsys.readouterr().err


def test_devices_that_are_too_small_are_refused_before_anything_is_submitted(capsys):
    assert cli.main(["launch", "grpo_qwen3_8b_8gpu", "--slurm", "--dry-run", "cluster.device_memory_gb=40"]) == 2
    assert "but a GPU of 40 GB (cluster.device_memory_gb)" in capsys.readouterr().err


def test_a_wrong_partition_and_a_missing_slurm_are_told(tmp_path, monkeypatch):
    commands(tmp_path / "bin", monkeypatch, sinfo="printf 'gpu*\\ncpu\\n'", sbatch="exit 3")
    with pytest.raises(ConfigError, match=r"launch\.slurm\.partition(?s:.*)cpu, gpu(?s:.*)did you mean gpu"):
        submit.check_cluster(submission(SlurmConfig(partition="gpus")))
    commands(tmp_path / "none", monkeypatch)
    with pytest.raises(UserError, match="not installed on this machine"):
        submit.check_cluster(submission(SlurmConfig()))


def test_a_slurm_without_pyxis_starts_no_images(tmp_path, monkeypatch):
    commands(tmp_path / "bin", monkeypatch, sinfo="echo gpu", srun="echo --help", sbatch="exit 0")
    with pytest.raises(ConfigError, match=r"launch\.slurm\.image(?s:.*)pyxis is missing"):
        submit.check_cluster(submission(SlurmConfig(image="registry.example#megarl:1")))
    commands(tmp_path / "bin", monkeypatch, srun="echo --container-image")
    submit.check_cluster(submission(SlurmConfig(image="registry.example#megarl:1")))


def test_a_run_folder_that_cannot_be_read_is_told_before_anything_is_submitted(tmp_path, monkeypatch, capsys):
    said = tmp_path / "submitted"
    commands(tmp_path / "bin", monkeypatch, sinfo="echo gpu", sbatch=f'[ "$1" = --test-only ] || touch {said}; echo 7')
    monkeypatch.setattr(preflight, "check_run_folder", lambda run_dir: preflight.NodeCheck(False, f"{run_dir}: denied"))
    assert cli.main(["launch", "grpo_quickstart", "--slurm", "--run-dir", str(tmp_path / "run")]) == 2
    assert "run: denied" in capsys.readouterr().err
    assert not said.exists()


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_submitted(tmp_path, monkeypatch, capsys):
    said = tmp_path / "submitted"
    commands(tmp_path / "bin", monkeypatch, sinfo="echo gpu", sbatch=f'[ "$1" = --test-only ] || touch {said}; echo 7')
    (tmp_path / "file").touch()
    arguments = ["launch", "grpo_quickstart", "--slurm", "--run-dir", str(tmp_path / "file" / "run")]
    assert cli.main(arguments) == 2
    assert "--run-dir" in capsys.readouterr().err
    assert not said.exists()


def test_a_run_is_submitted_followed_and_ended(tmp_path, monkeypatch, capsys):
    run_dir, log = tmp_path / "run", tmp_path / "asked"
    commands(
        tmp_path / "bin", monkeypatch, sinfo="echo gpu", sbatch='[ "$1" = --test-only ] || echo 7',
        scancel=f"echo $1 >> {log}",
        squeue=f"[ -e {log} ] && {{ echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }}; "
        "echo 'RUNNING|1:00|10:00|n[1-2]'",
    )  # fmt: skip
    arguments = ["launch", "grpo_quickstart", "--slurm", "launch.slurm.partition=gpu", "--run-dir", str(run_dir)]
    assert cli.main([*arguments, "--dry-run"]) == 0
    shown, told = capsys.readouterr()
    assert "Nothing was" not in shown
    assert told.endswith(" skip. Nothing was submitted.\n")
    assert "#SBATCH --partition=gpu" in shown
    assert '"restarts": 3' in shown  # of plan.json
    assert not run_dir.exists()
    assert cli.main(arguments) == 0
    assert "job: 7" in capsys.readouterr().out
    assert cli.main(arguments) == 2  # it runs
    assert "job 7, RUNNING" in capsys.readouterr().err
    (run_dir / "log.txt").write_text("".join(f"line {n}\n" for n in range(50)))
    assert cli.main(["logs", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "line 49"
    record = {"status": "running", "config": {"trainer": {"steps": 20}}}
    (run_dir / "run.json").write_text(json.dumps(record))
    (run_dir / "metrics.jsonl").write_text('{"step": 3, "stage": "train"}\n')
    assert cli.main(["status", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "RUNNING" in shown
    assert "running, step 3 of 20" in shown
    assert cli.main(["cancel", str(run_dir)]) == 0
    assert log.read_text() == "7\n"
    assert cli.main(["cancel", str(run_dir)]) == 0
    assert "no job" in capsys.readouterr().out
    assert cli.main(["status", str(tmp_path)]) == 2


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_folders_without_a_job_are_told_apart(command, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "log.txt").write_text("line\n")
    (tmp_path / "empty").mkdir()
    for name, *said in (
        ("none", "RUN_DIR: this folder does not exist", "name the folder that megarl launch printed"),
        ("file", "RUN_DIR: this is not a folder"),
        ("local", "RUN_DIR: no job was submitted for this folder", f"is in {tmp_path}/local/log.txt: tail -f"),
        ("empty", "RUN_DIR: no job was submitted", f"megarl launch RECIPE --slurm --run-dir {tmp_path}/empty"),
    ):
        assert cli.main([command, str(tmp_path / name)]) == 2
        shown = capsys.readouterr().err
        assert all(one in shown for one in said), shown
