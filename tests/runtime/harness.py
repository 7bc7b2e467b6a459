"""Whole runs of the command line on a tiny model, and the numbers they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from megarl.runtime.health import read_beat
from megarl.system.processes import has_nvidia_device, write_atomically
from megarl.system.rendezvous import write_token
from tests.dist import run_distributed
from tests.forked import Command, fork_relays, fork_scorers, fork_simulators

RECIPE = """
name: tiny
model:
  hf_config: {model_type: qwen3, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2,
    head_dim: 8, intermediate_size: 64, vocab_size: 20, max_position_embeddings: 64, tie_word_embeddings: true,
    pad_token_id: 0, bos_token_id: 1, eos_token_id: 2}
  tokenizer: "chars:0123456789+-*/=."
  dtype: fp32
data:
  train_files: ["megarl.recipes.arithmetic:make_rows"]
  val_files: ["megarl.recipes.arithmetic:make_rows"]
  loader_kwargs: {ops: ["+"], low: 1, high: 9, held_out: 16}
  max_prompt_tokens: 8
  batch_size: 4
# A dense score, so that advantages are not all zero while the model knows nothing.
reward: {name: "REWARD_FILE:closeness", timeout_s: 180}
algorithm: {kl: {use: loss, coef: 0.01}}
rollout: {sampling: {n: 4, max_new_tokens: 6}}
validation: {sampling: {max_new_tokens: 6}, every: 2}
sft: {steps: 3, batch_size: 8, optim: {lr: 1.0e-2}}
actor: {optim: {lr: 1.0e-3}, engine: {micro_batch_tokens: 64}}
trainer: {steps: 4, save_every: 1}
cluster: {nproc: 2, threads: 1, timeout_s: 200}
tracking: {mlflow: false, report: false}
"""
REWARD = '''
import time
from pathlib import Path

def is_held():
    try:
        return Path(Path(__file__).with_name("hold").read_text()).exists()
    except FileNotFoundError:
        return False
def closeness(samples):
    """Share of characters that are digits, and a bonus for the right answer; it waits as `held_at` says."""
    while is_held():
        time.sleep(0.01)
    return [
        {"overall": sum(c.isdigit() for c in s["response"]) / 6 + float(s["response"] == s["answer"])} for s in samples
    ]
def first_is_digit(samples):
    """A score of 0 or 1 that many groups agree on."""
    return [{"overall": float(s["response"][:1].isdigit())} for s in samples]
'''
#: Samples of a truncated distribution, on which training is exact.
KEPT = ("rollout.replay_kept_tokens=true", "rollout.sampling.top_k=12", "rollout.sampling.top_p=0.95")
PPO = (
    "algorithm.pipeline=ppo",
    "algorithm.advantage={name: gae, lam: 0.9}",
    "algorithm.kl={use: reward, coef: 0.05, adaptive: true, horizon: 100}",
    "critic={optim: {lr: 1.0e-3}, mini_batch_size: 2, value_clip: 0.05, warmup_steps: 1}",
    "sft.steps=0",
)
DAPO = (
    "algorithm.pipeline=dapo",
    "algorithm.dynamic_sampling.enabled=true",
    "algorithm.overlong.buffer_tokens=2",
    "algorithm.loss.clip_high=0.28",
    "algorithm.kl.use=none",
    "reward.name=reward.py:first_is_digit",
    "rollout.sampling.n=2",
    "actor.mini_batch_size=2",
    "validation.every=1",
    "sft.steps=0",
)

#: Episodes of the environment in tests/envs/guess.py; digits end a turn, so that a model that knows nothing ends some.
GUESSING = (
    f"env.name={Path(__file__).parents[1] / 'envs' / 'guess.py'}:Guess",
    "rollout.sampling={n: 4, max_new_tokens: 4, stop_token_ids: [4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}",
    "rollout.limits.tokens=20",
)

_AGENTS = Path(__file__).parents[1] / "gateway" / "agents.py"
#: Episodes of a program that calls the policy three times. Templates are checked with the letters x and y.
ASKING = (
    f"env={{name: agent, history: exact, timeout_s: 60, function: '{_AGENTS}:asks_thrice'}}",
    "model.tokenizer=chars:0123456789+-=.xy",
    "data.override_chat_template={% for m in messages %}{{ m.content }}"
    """{{ "<eos>" if m.role == "assistant" else "=" }}{% endfor %}""",
    *GUESSING[1:],
)


def write_recipe(folder: Path, hf_config: dict[str, Any] | None = None, layers: int = 1) -> Path:
    """The tiny recipe and its reward file; `hf_config` replaces the model's, but for its vocabulary.

    Args:
        layers: more than one where layers are split into stages.
    """
    (folder / "reward.py").write_text(REWARD)
    path, text = folder / "tiny.yaml", RECIPE.replace("REWARD_FILE", str(folder / "reward.py"))
    text = text.replace("num_hidden_layers: 1", f"num_hidden_layers: {layers}")
    if hf_config is not None:
        recipe = yaml.safe_load(text)
        recipe["model"]["hf_config"] = {**hf_config, "vocab_size": recipe["model"]["hf_config"]["vocab_size"]}
        text = yaml.safe_dump(recipe)
    path.write_text(text)
    return path


def start(recipe: Path, run_dir: Path, *overrides: str, launcher: str = "local", **environment: str) -> Command:
    """The command, running, forked with its imports done."""
    arguments = ["train", recipe, *overrides, "--launcher", launcher, "--run-dir", run_dir]
    return Command(arguments, recipe.parent, **environment)


@contextlib.contextmanager
def held_at(recipe: Path, place: Path) -> Iterator[None]:
    """Within the block no run of this recipe scores samples while there is a file or folder `place`.

    So it is not over before a test that comes late has looked at it, and has killed one of its processes.
    """
    hold = recipe.parent / "hold"
    write_atomically(hold, str(place))
    try:
        yield
    finally:
        hold.unlink()


def finish(process: Command | subprocess.Popen[str], timeout: float = 400) -> str:
    """Wait for the end; the output. A command that outlives its deadline is killed and fails the test."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still running after {timeout} s:\n{process.communicate()[0][-3000:]}") from None


def run(
    recipe: Path, run_dir: Path, *overrides: str, launcher: str = "local", program: bool = False
) -> dict[int, dict[str, float]]:
    """A run that must succeed; its metrics.

    Args:
        program: start the program itself, as users do; otherwise as by `start`.
    """
    begin = _program if program else start
    process = begin(recipe, run_dir, *overrides, launcher=launcher)
    output = finish(process)
    assert process.returncode == 0, output[-4000:]
    return metrics(run_dir)


def _program(recipe: Path, run_dir: Path, *overrides: str, launcher: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megarl", "train", recipe, *overrides, "--launcher", launcher, "--run-dir", run_dir],
        cwd=recipe.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def train(
    recipe: Path, run_dir: Path, *overrides: str, work: Callable[..., None] | None = None
) -> dict[int, dict[str, float]]:
    """As `run`, without command and launcher: the ranks are children of the test. Several teams need no Ray.

    Args:
        work: what each rank does with the arguments of `work_of_rank`, in place of it.
    """
    from megarl.config.load import load_config
    from tests.disaggregated.buffer.served import served

    config = load_config(recipe, overrides)
    apart = config.placement.teams or config.placement.auto
    if apart:  # as a launcher does
        run_dir.mkdir(parents=True, exist_ok=True)
        write_token(run_dir)
    with served(config) if apart else contextlib.nullcontext([]) as teams:
        arguments = (str(recipe), str(run_dir), list(overrides), teams)
        run_distributed(work or work_of_rank, config.cluster.nproc, 400, *arguments)
    return metrics(run_dir)


def work_of_rank(recipe: str, run_dir: str, overrides: list[str], teams: list[dict[str, str]]) -> None:
    """The run, as one of its ranks; `teams`: environments of the workers of several teams."""
    from megarl.config.load import load_config
    from megarl.recipes import entry
    from tests.disaggregated.buffer.served import enter

    if teams:
        import torch.distributed as dist

        number = dist.get_rank()
        dist.destroy_process_group()  # that of all ranks: a team is a world of its own
        enter(teams[number])
    os.chdir(Path(recipe).parent)
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    if not has_nvidia_device():
        fork_scorers()
        fork_relays()
        fork_simulators()
    entry.train(load_config(Path(recipe), overrides), Path(run_dir))


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Numbers of the RL stage by step, without those that measure time or memory."""
    whole, _, _ = (run_dir / "metrics.jsonl").read_text().rpartition("\n")  # the last line may be half written
    lines = [json.loads(line) for line in whole.splitlines()]
    return {
        line["step"]: {
            name: value
            for name, value in line.items()
            if not name.startswith(("timing_s/", "perf/")) and name not in ("time", "stage")
        }
        for line in lines
        if line["stage"] == "train"
    }


def of_training(steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Without what only several teams have."""
    return {
        step: {name: value for name, value in numbers.items() if not name.startswith(("team/", "store/", "sync/"))}
        for step, numbers in steps.items()
    }


def wait_for(condition: Callable[[], Any], process: Command, timeout: float = 400, every_s: float = 0.002) -> Any:
    """Poll quickly, or every `every_s`, until the condition is true while the command runs."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        if process.poll() is not None:
            raise AssertionError(f"the command ended first:\n{process.communicate()[0][-3000:]}")
        time.sleep(every_s)
    process.kill()
    raise AssertionError("the condition never became true")


def workers(run_dir: Path) -> dict[int, int]:
    """Process ids of the run's ranks that have not ended, by their heartbeats."""
    found = {}
    for file in run_dir.glob("heartbeats/rank_*"):
        rank = int(file.name.removeprefix("rank_"))
        beat = read_beat(run_dir, rank)
        with contextlib.suppress(psutil.NoSuchProcess):
            if beat is not None and psutil.Process(beat.pid).status() != psutil.STATUS_ZOMBIE:
                found[rank] = beat.pid
    return found


def buffer_of_run() -> int | None:
    """Process id of the buffer of the run with several teams that this process has started: an actor of its Ray."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            if child.cmdline()[0].startswith("ray::BufferActor"):
                return child.pid
    return None


def kill(pid: int) -> None:
    """kill -9."""
    os.kill(pid, signal.SIGKILL)
