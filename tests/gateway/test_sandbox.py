"""Agents in a sandbox: what they may do there is refused or ended, the episode is marked, and the run goes on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.rollout import SamplingConfig
from megarl.data.templates import chat_renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.envs.registry import load_environment
from megarl.gateway.results import ResultError, parse_result
from megarl.gateway.sandbox import Limits, Sandbox
from megarl.recipes.code_agent import make_demonstrations, make_rows, run
from megarl.rollout.groups import EpisodeError
from megarl.system.errors import ConfigError
from megarl.system.leftovers import leftovers
from tests.campaigns import chosen
from tests.gateway.playing import Scripted, episodes_of
from tests.gateway.test_agent import AGENTS, TOKENIZER, scripted, trajectories
from tests.runtime import harness

BAD = Path(__file__).with_name("misbehaving.py")
LIMITS = {"memory_mb": 200, "processes": 24, "cpu_s": 1, "output_mb": 1, "disk_mb": 4, "max_calls": 1, "grace_s": 0.5}


def _unusable() -> str:
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    argv = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stderr


UNUSABLE = _unusable()
boxed = pytest.mark.skipif(bool(UNUSABLE), reason=UNUSABLE or "bubblewrap works here")


@pytest.fixture(scope="module")
def misbehaved(request, tmp_path_factory):
    """The episodes of agents that do harm, side by side, by what they did."""
    names = chosen(request, "how")
    secret = tmp_path_factory.mktemp("run") / "secret"
    secret.write_text("key")
    with (
        pytest.MonkeyPatch.context() as patch,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        patch.setenv("A_SECRET", "1")
        abstract.bind(f"\0megarl-test-{os.getpid()}")
        abstract.listen()
        row = {
            "secrets": [str(secret), str(Path(__file__).parents[2] / "README.md")],
            "port": server.getsockname()[1],
            "abstract": f"megarl-test-{os.getpid()}",
            "pid": os.getpid(),
            "disk_mb": LIMITS["disk_mb"],
        }
        rows = [{"prompt": "1", "how": how, **row} for how in names]
        env = {"sandbox": "bubblewrap", **LIMITS}
        episodes = trajectories(scripted("1"), "play", rows, file=BAD, on_error="mark", env=env)
    assert secret.read_text() == "key"
    return dict(zip(names, episodes, strict=True))


def _heavy(*case):
    return pytest.param(*case, marks=pytest.mark.campaign("agents"))


@boxed
@pytest.mark.parametrize(
    ("how", "limit"),
    [
        ("fork_bomb", "limits/processes"),
        ("memory_bomb", "limits/memory"),
        ("endless_loop", "limits/cpu"),
        ("endless_output", "limits/output"),
        ("sleeps", "refused_calls"),
    ],
)
def test_an_agent_that_uses_more_than_it_may_is_ended_and_its_episode_says_by_which_limit(misbehaved, how, limit):
    episode = misbehaved[how]
    assert {name: n for name, n in episode.info.items() if n and name != "calls"} == {limit: 1}
    assert (episode.ended_by, episode.turn_rewards) == ("done", [0.75 if how == "sleeps" else 0.0])
    assert episode.output.startswith("does ") or how == "endless_output"
    assert len(episode.output) <= 2000


@boxed
@pytest.mark.parametrize(
    "how",
    ["host_files", "network", "signals", "privileges", "disk", "large_allocation"],
)
def test_what_a_sandbox_refuses(misbehaved, how):
    assert (misbehaved[how].error, sum(misbehaved[how].turn_rewards)) == ("", 1.0)


@boxed
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("late_result", ""),
        ("long_result", "too long; allowed: 65536 bytes"),
        _heavy("link_as_result", "left no valid result"),
        _heavy("foreign_metric", "'calls', which megarl writes itself"),
    ],
)
def test_what_an_agent_leaves_cannot_be_changed_later_and_must_be_a_result(misbehaved, how, message):
    episode = misbehaved[how]
    assert message in episode.error
    assert (episode.ended_by, episode.turn_rewards) == (("error", [0.0]) if message else ("done", [0.5]))


@boxed
@pytest.mark.campaign("agents")
@pytest.mark.parametrize("how", ["fork_bomb", "memory_bomb", "endless_output"])
def test_eight_sandboxes_that_misbehave_at_once_are_ended_and_those_of_others_go_on(how):
    rows = [{"prompt": "1", "how": how if place % 2 else "late_result"} for place in range(16)]
    env = {"sandbox": "bubblewrap", **LIMITS, "cpu_s": None}
    episodes = trajectories(scripted("1"), "play", rows, file=BAD, on_error="mark", env=env)
    for place, episode in enumerate(episodes):
        assert episode.turn_rewards == [0.0 if place % 2 else 0.5]
        assert sum(n for name, n in episode.info.items() if name.startswith("limits/")) == place % 2


@boxed
@pytest.mark.campaign("agents")
def test_a_run_goes_on_whose_agents_do_harm_in_half_of_the_episodes(tmp_path):
    env = f"env={{name: agent, history: exact, sandbox: bubblewrap, function: '{BAD}:by_chance', on_error: mark"
    keys = ", ".join(f"{name}: {value}" for name, value in LIMITS.items())
    overrides = [
        f"{env}, {keys}}}",
        *harness.ASKING[1:],
        "validation.every=0",
        "data.val_files=[]",
        "sft.steps=0",
        "trainer.steps=6",
        "cluster.timeout_s=600",
    ]
    steps = harness.of_training(harness.run(harness.write_recipe(tmp_path), tmp_path / "run", *overrides))
    assert len(steps) == 6
    for name in ("errors", "limits/processes", "limits/memory", "limits/cpu", "limits/output", "refused_calls"):
        assert sum(numbers.get(f"env/{name}", 0) for numbers in steps.values()) > 0, name
    assert all(numbers["actor/grad_norm"] > 0 for numbers in steps.values())


#: Code that counts what it can get of the agent: its key, its task, its memory.
STEALING = (
    "import os;r=lambda p:os.access(p,os.R_OK);"
    "f=lambda x:('OPENAI_API_KEY' in os.environ)+r('/tmp/episode/task.json')+r(f'/proc/{os.getppid()}/environ')"
)


@boxed
def test_an_agent_runs_the_policy_s_code_and_shows_it_a_test_that_failed():
    config = load_config("grpo_code_quickstart")
    tokenizer, template = load_tokenizer(config.model), config.data.override_chat_template
    lines = ("def f(x):return x+9", STEALING, "def f(x):return x*4")
    engine = Scripted(tokenizer, tokenizer.eos_token_id, *lines)
    [episode] = episodes_of(
        *(engine, chat_renderer(tokenizer, template), tokenizer, [tokenizer.eos_token_id]),
        *(
            (Path("megarl.recipes.code_agent"), "play"),
            [{"prompt": "f(3)=12\n", "tests": [[3, 12], [5, 20], [70, 280]]}],
        ),
        SamplingConfig(max_new_tokens=200),
        prompt_tokens=16,
        tokens=400,
        turns=3,
        env={"sandbox": "bubblewrap"},
    )
    assert tokenizer.decode(episode.token_ids) == (
        f"{lines[0]}<eos>f(5)=20,not 14\n{lines[1]}<eos>f(5)=20,not 0\n{lines[2]}<eos>"
    )
    assert (episode.turn_rewards, episode.info["shown_passed"], episode.info["code_errors"]) == ([0.0, 0.0, 1.0], 1, 0)


def test_code_is_run_with_limits_and_its_errors_have_names():
    assert run("def f(x):return x*4", [1, 2]) == [4, 8]
    assert run("def f(x):return x+", [1]) == ["SyntaxError"]
    assert run("f=lambda x:b'1'*10**10", [1, 2]) == ["MemoryError"] * 2
    assert run("f=lambda x:True", [1]) == ["bool"]
    assert run("print('['*4000)", [1]) == ["Error"]


def test_code_that_prints_without_end_takes_no_memory_of_its_agent():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run("while 1:print('x'*10**6)", [1]) == ["Error"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (50 << 10)


def test_tasks_of_the_code_quickstart_are_held_out_and_their_demonstrations_are_right():
    train, held_out = (
        {json.dumps([*row["tests"][:2], row["answer"]]) for row in make_rows(split)} for split in ("train", "val")
    )
    assert len(held_out) == 512
    assert not train & held_out
    for row, talk in zip(make_rows()[:6], make_demonstrations()[:6], strict=True):
        first = talk["answer"][0]["content"]
        assert row["prompt"] == talk["prompt"]
        assert run(first, [row["tests"][0][0]]) == [row["tests"][0][1]]
        assert run(row["answer"], [x for x, _ in row["tests"]]) == [y for _, y in row["tests"]]


@boxed
def test_a_command_in_a_sandbox_plays_an_episode_and_sees_its_own_file_only(tmp_path, monkeypatch):
    (tmp_path / "key").write_text("secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "n").write_text("2")
    (tmp_path / "agent.py").write_text(
        "import json, os, sys\nfrom pathlib import Path\n"
        "sys.path.insert(0, 'agents')\nimport agents\n"
        "task = json.loads(Path(os.environ['MEGARL_TASK']).read_text())\n"
        "reward = agents.guess(task)['reward'] + (Path.cwd() == Path(os.environ['HOME']))\n"
        f"reward += 10 * int(Path({str(tmp_path / 'data' / 'n')!r}).read_text())\n"
        f"reward -= 1000 * Path({str(tmp_path / 'key')!r}).exists()\n"
        "Path(os.environ['MEGARL_RESULT']).write_text(str(reward))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(AGENTS.parent))
    env = {
        "sandbox": "bubblewrap",
        "command": ["python", "agent.py"],
        "function": None,
        "readable": ["data", str(AGENTS)],
    }
    [episode] = trajectories(scripted("3", "5"), "", [{"prompt": "1+1"}], env=env)
    assert TOKENIZER.decode(episode.token_ids) == "3<eos>+=5<eos>"
    assert sum(episode.turn_rewards) == TOKENIZER("5", add_special_tokens=False)["input_ids"][0] + 21
    assert episode.output.strip() == "said 3 5"


@boxed
@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts sandboxes as another user")
def test_a_link_in_a_folder_that_others_cannot_enter_is_readable_in_a_sandbox_of_root(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    (closed / "link").symlink_to("/usr/share")
    Sandbox("bubblewrap", Limits(), readable=[str(closed / "link")]).check(["python"], None)


@boxed
def test_a_sandbox_by_a_template_plays_an_episode():
    template = [
        *("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
        *("--ro-bind", "{shared}", "{shared}", "--setenv", "PYTHON_LIMIT", "{processes}", "{command}"),
    ]
    [episode] = trajectories(scripted("3", "5"), "guess", [{"prompt": "1+1"}], env={"sandbox": template})
    assert (episode.error, episode.info["asked"]) == ("", 2)


def test_an_agent_whose_sandbox_does_not_start_it_in_time_is_an_error_and_not_scored():
    env = {"sandbox": ["sh", "-c", "exec sleep 60", "{command}"], "timeout_s": 0.5, "grace_s": 0.1}
    with pytest.raises(
        EpisodeError, match=r"did not start the agent within env.timeout_s = 0.5 seconds: signal SIGKILL"
    ):
        trajectories(scripted("1"), "guess", [{"prompt": "1+1"}], env=env)


def _arguments(kind: str, monkeypatch, tmp_path, **how) -> list[str]:
    agent = tmp_path / "agent.py"
    agent.write_text("")
    monkeypatch.chdir(tmp_path)
    sandbox = Sandbox(kind, Limits(256, 3.0, 20, disk_mb=8), image="python:3.12", **how)
    try:
        launch = sandbox.launch(["python", "agent.py"], None, {"OPENAI_API_KEY": "k", "PATH": "/here"})
        return [part.replace(str(sandbox.shared), "SHARED").replace(str(tmp_path), "HERE") for part in launch.argv]
    finally:
        sandbox.close()


def test_the_command_of_docker(monkeypatch, tmp_path):
    argv = _arguments("docker", monkeypatch, tmp_path, readable=["data"])
    name, place = argv[argv.index("--name") + 1], argv.index("python:3.12")
    expected = f"""
        docker run --rm --interactive --name {name} --network none --read-only --cap-drop ALL
        --security-opt no-new-privileges --user 65534:65534 --memory 256m --memory-swap 256m --pids-limit 28
        --ulimit cpu=3 --ulimit nofile=1024 --ulimit core=0 --ulimit fsize=8388608
        --tmpfs /tmp:rw,exec,nosuid,nodev,mode=1777,size=8m --shm-size 8m
        --volume HERE/data:HERE/data:ro --volume HERE/agent.py:HERE/agent.py:ro --volume SHARED:SHARED:ro
        --env OPENAI_API_KEY --workdir /tmp python:3.12
    """
    assert sorted(argv[: place + 1]) == sorted(expected.split())
    assert argv[place + 1 : place + 5] == ["python3", "-I", "-S", "SHARED/inside.py"]
    assert argv[-2:] == ["python3", "HERE/agent.py"]


def test_docker_s_client_finds_the_daemon_of_the_trainer_and_the_container_does_not(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/user/1000/docker.sock")
    sandbox = Sandbox("docker", Limits(), image="python:3.12")
    try:
        launch = sandbox.launch(["python", "agent.py"], None, {"OPENAI_API_KEY": "k"})
    finally:
        sandbox.close()
    assert launch.environment["DOCKER_HOST"] == "unix:///run/user/1000/docker.sock"
    assert "DOCKER_HOST" not in launch.argv


def test_the_command_of_apptainer(monkeypatch, tmp_path):
    monkeypatch.setattr("megarl.gateway.sandbox.is_root", lambda: False)
    argv = _arguments("apptainer", monkeypatch, tmp_path)
    place = argv.index("python:3.12")
    assert " ".join(argv[:9]) == "apptainer exec --containall --no-home --net --network none --no-privs --bind"
    assert {"HERE/agent.py:HERE/agent.py:ro", "SHARED:SHARED:ro"} == set(argv[9:place:2][:2])
    assert argv[-2:] == ["python3", "HERE/agent.py"]


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"sandbox": "docker"}, "env.image goes with"),
        ({"image": "x"}, "env.image goes with"),
        ({"readable": ["data"]}, "env.readable is only for sandboxes"),
        ({"sandbox": ["firejail"]}, "one of its parts must be {command}"),
        (
            {"sandbox": ["firejail", "{folder}", "{command}"]},
            r"unknown placeholder {folder}; allowed: {command}, {shared}",
        ),
        ({"sandbox": "chroot"}, "env.sandbox"),
    ],
)
def test_settings_that_make_no_sandbox_are_refused(env, message):
    with pytest.raises(ConfigError) as caught:
        load_environment({"name": "agent", "command": ["python"], **env})
    assert message in str(caught.value)


def test_the_folder_of_a_replica_s_sandboxes_is_kept_while_no_program_runs():
    sandbox = Sandbox("bubblewrap", Limits())
    folder = sandbox.open().parent
    os.utime(folder, (1, 1))
    try:
        assert folder not in leftovers(folder.parent, folder)
    finally:
        sandbox.close()
    assert not folder.exists()


def test_a_sandbox_whose_program_is_missing_is_refused_and_never_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    kind, settings = load_environment({"name": "agent", "command": ["python"], "sandbox": "bubblewrap"})
    with pytest.raises(ConfigError, match=r"env.sandbox: .* does not exist[\s\S]*bwrap[\s\S]*apt-get install"):
        kind.check(settings)


def test_why_the_user_of_a_sandbox_cannot_be_changed_is_in_the_message(monkeypatch, tmp_path):
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\n")
    bwrap.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    def refuse(mounts, *, as_nobody):
        raise PermissionError(1, "Operation not permitted; root needs CAP_SYS_ADMIN to start a sandbox", "unshare")

    monkeypatch.setattr("megarl.gateway.sandbox.enter", refuse)
    with pytest.raises(ConfigError, match=r"does not start here[\s\S]*root needs CAP_SYS_ADMIN"):
        Sandbox("bubblewrap", Limits()).check(["python"], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"reward": 1, "info": {"limits/cpu": 1}}', "'limits/cpu', which megarl writes itself"),
        ('{"reward": 1, "info": {"a b": 1}}', "the name 'a b'"),
        ('{"reward": 1, "info": {"a": NaN}}', "finite"),
        ("[1]", "allowed: a number"),
        (f'{{"reward": 1, "info": {{{", ".join(f"{chr(34)}n{k}{chr(34)}: 1" for k in range(65))}}}}}', "65 numbers"),
    ],
)
def test_a_result_with_other_content_is_refused(text, message):
    with pytest.raises(ResultError) as caught:
        parse_result(text, scored=True)
    assert message in str(caught.value)
