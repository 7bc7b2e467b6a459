"""Episodes whose environment is a program that calls the policy."""

from __future__ import annotations

import asyncio
import json
import os
import re
import selectors
import subprocess
import sys
import time
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from megarl.config.policies import AgentPolicyConfig
from megarl.config.rollout import SamplingConfig
from megarl.data.lanes import rows_of
from megarl.data.policies import parts_of
from megarl.data.templates import chat_renderer
from megarl.data.tokenizer import character_tokenizer
from megarl.data.trajectory import Trajectory
from megarl.envs.host import Reply
from megarl.envs.protocol import EpisodeFailure
from megarl.gateway.agent import Agent, AgentSettings
from megarl.gateway.runner import Runner, _Program
from megarl.gateway.server import Gateway
from megarl.rollout.answers import Answer, Branch, end_without_turn
from megarl.rollout.groups import EpisodeError
from megarl.system.errors import ConfigError
from tests.envs.playing import EOS
from tests.gateway.playing import Scripted, episodes_of

TOKENIZER = character_tokenizer("0123456789+-=xy")
AGENTS = Path(__file__).with_name("agents.py")
#: What a user says, then what the assistant said with an end token.
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '=' }}{% endfor %}"
SAMPLING = SamplingConfig(max_new_tokens=6)


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def scripted(*lines):
    return Scripted(TOKENIZER, EOS, *lines)


def trajectories(engine, name, rows, file=AGENTS, **how):
    template = chat_renderer(TOKENIZER, TEMPLATE)
    return episodes_of(engine, template, TOKENIZER, [EOS], (file, name), rows, SAMPLING, **how)


def test_a_program_s_calls_are_the_turns_of_an_episode():
    engine = scripted("3", "5")
    [episode] = trajectories(engine, "guess", [{"prompt": "1+1"}])
    five = ids("5")[0]
    assert TOKENIZER.decode(episode.prompt_ids) == "1+1="
    assert TOKENIZER.decode(episode.token_ids) == "3<eos>+=5<eos>"
    assert episode.sampled == [True, True, False, False, True, True]
    assert episode.turn_rewards == [0.0, five]
    assert (episode.ended_by, episode.info["calls"], episode.info["asked"]) == ("done", 2, 2)
    assert [request.prompt_ids for request in engine.asked] == [
        episode.prompt_ids,
        [*episode.prompt_ids, *episode.token_ids[:4]],
    ]


def test_branches_sub_agents_and_a_line_that_goes_on_are_sequences_of_one_episode():
    [episode] = trajectories(scripted("1", "2", "3", "4", "5"), "branches", [{"prompt": "0"}], env={"history": "exact"})
    lanes = [TOKENIZER.decode([*lane.prompt_ids, *lane.token_ids]) for lane in episode.all_lanes]
    assert lanes == ["0=1<eos>+=2<eos>==5<eos>", "-=4<eos>", "0=1<eos>+=3<eos>"]
    assert [lane.turn_numbers for lane in episode.all_lanes] == [[0, 1, 4], [3], [0, 2]]
    assert {name: n for name, n in episode.info.items() if "branches" in name} == {
        "branches/sibling": 1,
        "branches/root": 1,
    }


def test_the_attempts_of_a_request_are_generated_together_with_the_seeds_of_later_calls():
    engine = scripted("1", "2")
    [episode] = trajectories(engine, "attempts", [{"prompt": "0"}])
    # the last one in the episode's slot, the first one in the only other slot, in which the second one follows
    assert [sorted(request.seeds) for request in engine.asked] == [[0], [1, 3], [2]]
    lanes = [TOKENIZER.decode([*lane.prompt_ids, *lane.token_ids]) for lane in episode.all_lanes]
    assert lanes == ["0=1<eos>+=2<eos>"] * 3
    assert [lane.turn_numbers for lane in episode.all_lanes] == [[0, 3], [0, 2], [0, 1]]
    assert (episode.info["calls"], episode.info["branches/sibling"], episode.segments) == (4, 2, 4)


def test_reward_functions_see_the_sequence_of_the_last_main_call_and_not_that_of_a_title():
    [episode] = trajectories(scripted("1", "2", "3"), "titles", [{"prompt": "0"}])
    assert (episode.turn_numbers, episode.answer) == ([2], 1)
    assert [row.turn_numbers for row in rows_of(episode)] == [[0, 1], [2]]


POLICIES = {
    "proposer": AgentPolicyConfig(),
    "solver": AgentPolicyConfig(sampling={"max_new_tokens": 2, "stop": ["9"]}),
    "judge": AgentPolicyConfig(train=False),
}


def debates(result, *lines, policies=POLICIES):
    rows = [{"prompt": "0", "result": result}]
    [episode] = trajectories(scripted(*lines), "debate", rows, policies=policies)
    return episode


def test_a_call_s_model_names_the_policy_whose_sequence_it_goes_on_with():
    episode = debates({"rewards": {"proposer": 0.25, "solver": [1, 0]}}, "3", "19", "29", "444", "5")
    lanes = {lane.policy: [] for lane in episode.all_lanes}
    for lane in sorted(episode.all_lanes, key=lambda lane: lane.turn_numbers[0]):
        lanes[lane.policy].append(TOKENIZER.decode([*lane.prompt_ids, *lane.token_ids]))
    # the solver's turns end after two tokens or with a 9, which clients are not sent
    assert lanes == {"proposer": ["0=3<eos>"], "solver": ["3=19<eos>+=44", "3=29"], "judge": ["3=5<eos>"]}
    parts = {part.name: part for part in parts_of(episode, "a#0", list(POLICIES))}
    assert [(name, part.policy, len(part.rows)) for name, part in parts.items()] == [
        ("a#0@proposer", "proposer", 1),
        ("a#0@solver:0", "solver", 1),
        ("a#0@solver:1", "solver", 1),
        ("a#0@judge", "judge", 1),
    ]
    assert [part.rows[0].turn_rewards for part in parts.values()] == [[0.25], [0.0, 1.0], [0.0], [0.0]]
    trained = {name: [sum(row.sampled) for row in part.rows] for name, part in parts.items()}
    assert trained == {"a#0@proposer": [2], "a#0@solver:0": [4], "a#0@solver:1": [2], "a#0@judge": [0]}


def test_a_number_is_the_reward_of_all_sequences_of_a_policy():
    episode = debates({"rewards": {"proposer": 1, "solver": 0.5}}, "3", "1", "2", "4", "5")
    solver = next(part for part in parts_of(episode, "a#0", list(POLICIES)) if part.policy == "solver")
    assert [(row.turn_numbers, row.turn_rewards) for row in solver.rows] == [([1, 3], [0.0, 0.5]), ([2], [0.0])]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (1.0, 'allowed: an object {"rewards"'),
        ({"rewards": {"proposer": 1}}, "lacks the policy 'solver', which"),
        ({"rewards": {"proposer": 1, "solver": [1]}}, "has 1 numbers for the policy 'solver'; allowed: one number, or"),
        ({"rewards": {"proposer": 1, "solver": 1, "author": 1}}, "names 'author', which is no policy of the run"),
    ],
)
def test_rewards_that_are_missing_or_of_no_policy_fail_the_episode(result, words):
    with pytest.raises(EpisodeError, match=re.escape(words)):
        debates(result, "3", "1", "2", "4", "5")


def test_a_policy_whose_attempts_are_compared_with_each_other_needs_a_reward_of_each():
    policies = {**POLICIES, "solver": AgentPolicyConfig(compare="episode")}
    with pytest.raises(EpisodeError, match=re.escape("one number for the policy 'solver', whose conversations")):
        debates({"rewards": {"proposer": 1, "solver": 1}}, "3", "1", "2", "4", "5", policies=policies)


def test_an_agent_that_calls_nothing_is_scored_and_not_trained_on():
    [episode] = trajectories(scripted("1"), "silent", [{"prompt": "0"}])
    assert (episode.token_ids, episode.sampled, episode.turn_rewards) == ([EOS], [False], [0.25])
    assert (episode.info["asked"], episode.info["calls"]) == (0, 0)


@pytest.mark.parametrize(("rewards", "reward"), [({"proposer": 0.25, "solver": 1}, 0.25), ({"proposer": []}, 0.0)])
def test_the_first_policy_is_scored_for_an_agent_that_calls_none(rewards, reward):
    episode = Trajectory([5])
    end_without_turn(episode, Answer(Reply(None, done=True), None, branch=Branch(rewards=rewards)), EOS, 0)
    [part] = parts_of(episode, "a#0", list(POLICIES))
    assert (part.policy, part.rows[0].sampled, part.rows[0].turn_rewards) == ("proposer", [False], [reward])


CREDITS = """
def by_tokens(segments):
    assert [segment.agent for segment in segments] == ["", "-", ""]
    assert segments[0].messages[0]["content"] == "0"
    return [0.0 if segment.agent else segment.tokens / 4 for segment in segments]

def too_few(segments):
    return [1.0]
"""


@pytest.mark.parametrize(
    ("credit", "shares", "untrained"),
    [
        ("by_agent", {0: 0.5, 1: 0.5, 2: 1.0, 3: 0.5}, 0),
        ("credits.py:by_tokens", {0: 1.0, 1: 1.0, 3: 0.5, 2: 0.0}, 1),
    ],
)
def test_segments_of_an_episode_have_shares_of_its_credit(tmp_path, monkeypatch, credit, shares, untrained):
    (tmp_path / "credits.py").write_text(CREDITS)
    monkeypatch.chdir(tmp_path)
    [episode] = trajectories(scripted("1", "2", "3", "4"), "helped", [{"prompt": "0"}], env={"credit": credit})
    found = {
        number: share
        for lane in episode.all_lanes
        for number, share in zip(lane.turn_numbers, lane.turn_shares, strict=True)
    }
    assert found == shares
    assert episode.info["untrained_calls"] == untrained
    trained = {
        number
        for row in rows_of(episode)
        for number, end in zip(row.turn_numbers, row.turn_ends, strict=True)
        if row.sampled[end - 1]
    }
    assert trained == {number for number, share in shares.items() if share}


def test_a_function_that_gives_no_share_for_a_segment_and_one_that_is_missing_are_refused(tmp_path, monkeypatch):
    (tmp_path / "credits.py").write_text(CREDITS)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EpisodeError, match=r"env.credit returned \[1.0\][\s\S]*each of 3 segments"):
        trajectories(scripted("1"), "helped", [{"prompt": "0"}], env={"credit": "credits.py:too_few"})
    with pytest.raises(ConfigError, match=r"env.credit"):
        Agent.check(AgentSettings(command=["python"], credit="credits.py:none"))
    with pytest.raises(ValueError, match=r"by_agent"):
        AgentSettings(command=["python"], credit="all")


def test_a_stop_string_of_a_request_ends_the_turn_with_its_token_and_is_not_in_the_text():
    [episode] = trajectories(scripted("12345"), "stops", [{"prompt": "0"}])
    assert TOKENIZER.decode(episode.token_ids) == "123"
    assert (episode.turn_rewards, episode.finish_reason) == ([2.0], "stop")


def test_a_limit_refuses_further_calls_and_scores_what_there_is():
    [episode] = trajectories(scripted("1"), "talks_on", [{"prompt": "0"}], turns=3)
    assert (episode.turns, episode.turn_rewards) == (3, [0.0] * 3)
    assert episode.info["refused_calls"] == 1
    [episode] = trajectories(scripted("1"), "talks_on", [{"prompt": "0"}], tokens=10)
    assert (episode.turns, episode.turn_rewards, episode.info["overflows"]) == (3, [0.0] * 3, 1)


def test_a_defect_of_the_agent_names_its_output():
    with pytest.raises(
        EpisodeError, match=r"train-0-0#0 failed at reset[\s\S]*exit code 1[\s\S]*a defect of the agent"
    ):
        trajectories(scripted("1"), "crashes", [{"prompt": "0"}])
    with pytest.raises(EpisodeError, match=r"exit code 1[\s\S]*a reason to give up"):
        trajectories(scripted("1"), "gives_up", [{"prompt": "0"}])


def test_an_agent_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    file = tmp_path / "pids"
    [episode] = trajectories(
        scripted("1"), "hangs", [{"prompt": "0", "pids": str(file)}], env={"timeout_s": 3, "grace_s": 1}
    )
    assert (episode.turn_rewards, episode.info["timeouts"]) == ([0.0], 1)
    until = time.monotonic() + 20
    alive = [pid for pid in file.read_text().split() if Path("/proc", pid).exists()]
    while alive and time.monotonic() < until:
        time.sleep(0.05)
        alive = [pid for pid in alive if Path("/proc", pid).exists()]
    assert alive == []


def test_an_agent_that_asks_on_at_its_deadline_is_refused_and_has_time_to_leave_its_result():
    [episode] = trajectories(scripted("1"), "asks_on", [{"prompt": "0"}], env={"timeout_s": 1, "max_calls": 1000})
    assert (sum(map(sum, (lane.turn_rewards for lane in episode.all_lanes))), episode.info["timeouts"]) == (0.5, 1)


@pytest.mark.parametrize("calls", [0, 1])
def test_the_result_of_an_agent_counts_whose_group_was_over_its_time_while_a_tool_ran(calls):
    [episode] = trajectories(scripted("1"), "uses_a_slow_tool", [{"prompt": "0", "calls": calls}], seconds=1.0)
    assert (episode.turns, episode.ended_by, episode.turn_rewards) == (1 + calls, "done", [*[0.0] * calls, 0.25])
    [row] = rows_of(episode)
    assert (TOKENIZER.decode(row.token_ids), row.sampled, row.turn_rewards) == (
        ("1<eos>", [True, True], [0.25]) if calls else ("<eos>", [False], [0.25])
    )


def test_an_episode_that_is_discarded_while_it_waits_starts_no_program_and_keeps_no_place():
    async def discarded() -> bool:
        free = asyncio.Semaphore(0)
        shared = SimpleNamespace(
            form=None, window=None, images=True, free=free, gateway=SimpleNamespace(end=lambda key: None)
        )
        agent = Agent(AgentSettings(command=["python"]), shared)
        begun = asyncio.ensure_future(agent.reset({}, 0))
        await asyncio.sleep(0)
        agent.discard()
        free.release()
        with pytest.raises(EpisodeFailure, match="the run has ended it"):
            await begun
        return free.locked()

    assert asyncio.run(discarded()) is False


def test_agents_start_again_after_the_process_that_starts_them_was_killed():
    rows = [{"prompt": "0"}, {"prompt": "1"}]
    lost, played = trajectories(scripted("1"), "kills", rows, on_error="mark", env={"max_running": 1})
    assert "signal SIGKILL" in lost.error
    assert (played.error, played.turn_rewards) == ("", [1.0])


def test_the_end_of_a_program_is_reported_although_something_still_writes_to_its_output(monkeypatch, tmp_path):
    monkeypatch.setattr("selectors.DefaultSelector", selectors.SelectSelector)  # which takes /dev/zero
    (orders, _), (news, told), (wake, _) = os.pipe(), os.pipe(), os.pipe()
    runner = Runner(orders, told, wake, None)
    order = {"start": 3, "folder": str(tmp_path), "limits": {"output_mb": None}, "launch": {"after": []}}
    program = _Program(order, 1, os.open("/dev/zero", os.O_RDONLY))
    runner._poll.register(program.output, selectors.EVENT_READ, program)
    runner._finish(program, 0)
    assert json.loads(os.read(news, 100)) == {"ended": 3, "code": 0}


def test_a_program_may_end_after_the_trainer(tmp_path):
    (orders, _), (news, told), (wake, _) = os.pipe(), os.pipe(), os.pipe()
    order = {"start": 3, "folder": str(tmp_path), "limits": {"output_mb": None}, "launch": {"after": []}}
    program = _Program(order, 1, os.open(os.devnull, os.O_RDONLY))
    os.close(news)
    Runner(orders, told, wake, None)._finish(program, 0)
    assert (tmp_path / "output.txt").exists()


def test_more_episodes_than_may_run_at_once_are_all_played():
    rows = [{"prompt": str(n)} for n in range(5)]
    episodes = trajectories(scripted("1"), "guess", rows, env={"max_running": 2})
    assert [TOKENIZER.decode(episode.prompt_ids) for episode in episodes] == [f"{n}=" for n in range(5)]
    assert all(episode.turns == 2 for episode in episodes)


def test_a_module_may_print_and_start_processes_and_does_not_see_the_trainer_s_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    file = tmp_path / "loud.py"
    file.write_text(
        "import os, subprocess\nprint('{\"ended\": 0, \"code\": 1}')\nprint('hello', flush=True)\n"
        "child = subprocess.Popen(['true'])\nseen = 'A_SECRET' in os.environ\n"
        "def play(task):\n    return 0.5 - seen\n"
    )
    episodes = trajectories(scripted("1"), "play", [{"prompt": "0"}, {"prompt": "1"}], file=file)
    assert [episode.turn_rewards for episode in episodes] == [[0.5], [0.5]]


def test_a_module_whose_import_takes_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("megarl.gateway.programs._READY_S", 3.0)
    file = tmp_path / "slow.py"
    file.write_text(
        "import sys, time\nif 'megarl.gateway.runner' in sys.orig_argv:\n    time.sleep(60)\n"
        "def play(task):\n    pass\n"
    )
    with pytest.raises(EpisodeError, match=r"not ready[\s\S]*env.function[\s\S]*3 seconds"):
        trajectories(scripted("1"), "play", [{"prompt": "0"}], file=file)


def test_a_function_may_have_an_interpreter_of_its_own_without_megarl_and_its_packages(tmp_path):
    venv.create(tmp_path / "env", with_pip=False)
    python = str(tmp_path / "env" / "bin" / "python")
    code = subprocess.run([python, "-c", "import megarl"], cwd=tmp_path, capture_output=True, check=False).returncode
    assert code == 1
    [episode] = trajectories(scripted("3", "5"), "guess", [{"prompt": "1+1"}], env={"python": python})
    assert TOKENIZER.decode(episode.token_ids) == "3<eos>+=5<eos>"
    with pytest.raises(ConfigError, match=r"env.python: this interpreter does not exist"):
        Agent.check(AgentSettings(function="a.py:f", python=str(tmp_path / "python")))
    with pytest.raises(ValidationError, match=r"env.python is for agents without a sandbox"):
        AgentSettings(function="a.py:f", python=python, sandbox="bubblewrap")


def test_programs_call_the_endpoint_at_the_address_of_the_recipe(tmp_path):
    file = tmp_path / "where.py"
    file.write_text(
        f"import os, sys\nsys.path.append({str(AGENTS.parent)!r})\nimport agents\n"
        "def play(task):\n"
        "    agents.say([{'role': 'user', 'content': '1'}])\n"
        "    return float(os.environ['OPENAI_BASE_URL'].startswith('http://127.0.0.2:'))\n"
    )
    [episode] = trajectories(scripted("1"), "play", [{"prompt": "1"}], file=file, env={"host": "127.0.0.2"})
    assert (episode.error, episode.turn_rewards) == ("", [1.0])
    with pytest.raises(ConfigError, match=r"env.host: the machine that generates does not have this address"):
        Gateway(host="192.0.2.1")  # an address for documentation, which no machine has


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"host": "0.0.0.0"}, r"env.host is '0.0.0.0', which no program can call"),
        ({"host": "::1"}, r"env.host is '::1', which no program can call; allowed: an IPv4 address"),
        ({"host": "127.0.0.2", "sandbox": "bubblewrap"}, r"agents in a sandbox reach the endpoint only by a relay"),
    ],
)
def test_an_address_that_programs_cannot_call_is_refused(keys, words):
    with pytest.raises(ValidationError, match=words):
        AgentSettings(function="a.py:f", **keys)


@pytest.mark.parametrize(("reply", "reward"), [("3", 1.0), ("4", 0.0)])
def test_the_harness_of_the_page_scores_the_files_that_its_program_leaves(tmp_path, monkeypatch, reply, reward):
    page = Path(__file__).parents[2] / "docs" / "agents.md"
    [harness] = re.findall(r'```python\n("""harness.py.*?)```', page.read_text(), re.DOTALL)
    (tmp_path / "harness.py").write_text(harness)
    program = tmp_path / "my-agent"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.append({str(AGENTS.parent)!r})\nimport agents\n"
        "said = agents.say([{'role': 'user', 'content': sys.argv[1]}])['message']['content']\n"
        "open('solution.py', 'w').write('value = ' + said)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    row = {"prompt": "1+2", "tests": "from solution import value\nassert value == 3\n"}
    [episode] = trajectories(scripted(reply), "play", [row], file=tmp_path / "harness.py")
    assert (episode.error, episode.turn_rewards) == ("", [reward])
