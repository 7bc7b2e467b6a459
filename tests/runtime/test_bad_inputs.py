"""Whatever is wrong with the input: the command stops early, says what, where and how to fix it, and exits not 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forked
from tests.campaigns import chosen
from tests.forked import Ended
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]

# One step of GRPO in one process, nothing around it.
QUICK = [
    *["cluster.nproc=1", "sft.steps=0", "trainer.steps=1", "trainer.export_hf=false"],
    *["data.val_files=[]", "validation.before_train=false", "validation.every=0"],
]
FILES = {
    "good.jsonl": '{"prompt": "1+1=", "answer": "2"}\n' * 4,
    "broken.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+\n',
    "empty.jsonl": "",
    "misnamed.jsonl": '{"promt": "1+1=", "answer": "2"}\n',
    "unanswered.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2="}\n',
    "rewards.py": """
import math
def raises(samples):
    return [1 / len(s["response"][:0]) for s in samples]
def not_a_number(samples):
    return [math.nan if i == 2 else 0.0 for i, s in enumerate(samples)]
def constant(samples):
    return [1.0 for s in samples]
""",
    "no_import.py": "import a_package_that_is_nowhere\ndef score(samples):\n    return [0.0 for s in samples]\n",
    "syntax.py": "def score(samples:\n",
    "graphs.py": """
from megarl.dag.pipeline import Pipeline
from megarl.dag.stage import Role, stage
from megarl.runtime.stages import rollout
def same(worker, batch):
    return batch
def nothing(worker, batch):
    pass
@stage(reads=["advantages"], writes=[])
def learn(worker, batch):
    return batch
def cycle(config):
    return Pipeline("mine").add(same, "a", deps=["b"]).add(same, "b", deps=["a"]).build()
def missing_field(config):
    return Pipeline("mine").add(same, "a").add(learn, "b").build()
def unbuilt(config):
    return Pipeline("mine").add(same, "a")
def raises(config):
    raise KeyError("oops")
def forgetful(config):
    return Pipeline("mine", config=config).add(rollout.rollout).add(nothing, "lost").build()
draw = rollout.rollout
@stage(reads=["prompt_ids", "uid"], writes=rollout.SAMPLE_FIELDS, role=Role.ROLLOUT, resamples=True)
def poison(c, batch, *, rollout):
    generate = rollout.engine.generate
    def broken(*arguments):
        groups = generate(*arguments)
        groups[1][2].logprobs[0] = float("-inf")
        return groups
    rollout.engine.generate = broken
    return draw(c, batch, rollout=rollout)
def poisoned(config):
    return Pipeline("mine").add(poison, "rollout").build()
""",
    "losses.py": """
import resource
import torch
from megarl.algorithms.losses import ppo
def not_a_number(*args, **kwargs):
    loss, metrics = ppo(*args, **kwargs)
    return loss * float("nan"), metrics
def hungry(*args, **kwargs):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        torch.empty(1 << 28)
    finally:  # or no thread could start that ends the run, and the launcher would wait for it
        resource.setrlimit(resource.RLIMIT_AS, limits)
""",
    # Python imports this module when it starts: the packages named are then not to be found.
    "hide/sitecustomize.py": """
import os, sys
sys.modules.update(dict.fromkeys(filter(None, os.environ.get("HIDDEN_PACKAGES", "").split(",")), None))
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run: recipe, and all bad files."""
    here = tmp_path_factory.mktemp("here")
    harness.write_recipe(here)
    for name, text in FILES.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    (here / "gpt2").mkdir()
    (here / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    (here / "an_empty_folder").mkdir()
    (here / "other_run" / "checkpoints" / "step_3").mkdir(parents=True)
    (here / "other_run" / "checkpoints" / "step_3" / "meta.json").write_text("{}")
    return here


def train(folder: Path, *arguments: str) -> Ended:
    """`megarl train tiny.yaml ...`, to its end."""
    return forked.run(["train", "tiny.yaml", *arguments], folder)


# -- refused before anything starts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["actor.optim.learning_rate=1"],
            ["unknown key actor.optim.learning_rate", "fix:     here this is actor.optim.lr"],
        ),
        (["trainr.steps=1"], ["unknown key trainr", "did you mean trainer?"]),
        (["cluster.nproc=two"], ["cluster.nproc has a wrong type", "'two'", "integer > 0"]),
        (["data.train_files=god.jsonl"], ["data.train_files", "file or folder not found", "did you mean good.jsonl?"]),
        (["data.train_files=broken.jsonl"], ["broken.jsonl:2: broken JSON", '{"prompt": "1+', "repair or delete"]),
        (["data.train_files=empty.jsonl"], ["empty.jsonl: the source has no rows"]),
        (["data.train_files=an_empty_folder"], ["data.train_files", "has no data file", ".jsonl"]),
        (["data.train_files=misnamed.jsonl"], ["misnamed.jsonl:1: no column 'prompt'", "data.prompt_key to 'promt'"]),
        (["data.val_files=unanswered.jsonl"], ["unanswered.jsonl:2: no column 'answer'", "data.answer_key"]),
        (["data.val_files=unanswered.jsonl", "env.name=nowhere.py:Game"], ["env.name: this file does not exist"]),
        (["data.train_files=good.jsonl", "sft.response_key=solution"], ["good.jsonl:1: no column 'solution'", "sft."]),
        (
            ["reward.name=no_import.py:score"],
            ["reward.name: file 'no_import.py' does not import", "a_package_that_is_nowhere", "no_import.py:1"],
        ),
        (
            ["data.train_files=good.jsonl", "data.overlong=error", "data.max_prompt_tokens=3"],
            [
                "good.jsonl:1: the prompt is longer",
                "(4 such prompts",
                "data.max_prompt_tokens: 3",
                "raise the limit to 4",
            ],
        ),
        (["data.batch_size=5"], ["data.batch_size 5 is not divisible by 2", "4 or 6"]),
        (["algorithm.advantage.name=grppo"], ["unknown advantage estimator", "rloo", "did you mean grpo?"]),
        (["reward.name=nowhere.py:score"], ["reward.name: file not found: nowhere.py"]),
        (["reward.name=syntax.py:score"], ["syntax.py:1", "not valid Python"]),
        (["reward.name=rewards.py:raise"], ["defines no raise", "did you mean rewards.py:raises?"]),
        (["model.hf_config.model_type=gpt2"], ["model.hf_config: the model's architecture", "'gpt2'", "qwen3_moe"]),
        (
            ["model.hf_config=null", "model.path=gpt2"],
            ["gpt2/config.json: the model's architecture", "llama, minimax_m2, mistral"],
        ),
        (["cluster.nproc=4", "actor.parallel.tp=4"], ["actor.parallel.tp", "2 key/value heads", "allowed: 1, 2"]),
        (["trainer.resume=/nope"], ["trainer.resume: checkpoint folder not found", "auto, never"]),
        (["trainer.resume=an_empty_folder"], ["not a complete checkpoint", "RUN_DIR/checkpoints/step_N"]),
        (["trainer.resume=other_run"], ["not a complete checkpoint", "mean other_run/checkpoints/step_3?"]),
        (["algorithm.pipeline=graphs:cycle"], ["pipeline 'mine'", "cycle: a -> b -> a", "remove one"]),
        (["algorithm.pipeline=graphs:missing_field"], ["'b' reads 'advantages'", "no node writes it"]),
        (
            ["algorithm.pipeline=graphs:unbuilt"],
            ["did not return a task graph", "found:   'graphs:unbuilt", ".build()"],
        ),
        (["algorithm.pipeline=graphs:raises"], ["raised KeyError: 'oops'", "graphs.py:19"]),
        (["algorithm.loss.name=losses:nan"], ["algorithm.loss.name", "defines no nan"]),
        (["--run-dir", "good.jsonl"], ["--run-dir: this is a file, but a run needs a folder", "good.jsonl"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and "=" in value[0] else None,
)
def test_refused_before_any_process_starts(folder: Path, overrides: list[str], words: list[str]) -> None:
    ended = train(folder, *overrides)
    assert ended.code == 2, ended.output
    for word in words:
        assert word in ended.output
    assert "Traceback" not in ended.output
    assert "run folder:" not in ended.output
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        pytest.param("ray", ["--launcher", "ray"], marks=pytest.mark.campaign("install")),
        ("mlflow", ["tracking.mlflow=true"]),
        pytest.param("mpmath", ["reward.name=math"], marks=pytest.mark.campaign("install")),
        pytest.param("pyarrow", ["data.train_files=table.parquet"], marks=pytest.mark.campaign("install")),
    ],
)
def test_a_missing_package_is_named_with_what_to_do_without_it(
    folder: Path, package: str, arguments: list[str]
) -> None:
    (folder / "table.parquet").touch()
    done = subprocess.run(
        [sys.executable, "-m", "megarl", "train", "tiny.yaml", *arguments],
        cwd=folder,
        env={**os.environ, "HIDDEN_PACKAGES": package, "PYTHONPATH": str(folder / "hide")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "is not installed" in done.stderr
    assert f"pip install {package.replace('_', '-')}, or " in done.stderr
    assert not (folder / "runs").exists()


# -- found out while the run goes on ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Overrides, the exit code, and what the message says. `traceback`: Python's own is part of it."""

    overrides: tuple[str, ...]
    code: int
    words: tuple[str, ...]
    traceback: bool = False


CASES = {
    "a reward that raises": Case(
        ("reward.name=rewards.py:raises",),
        2,
        ("in phase step/reward at step 1", "ZeroDivisionError", "rewards.py:4: return [1 /", "prompt:", "on_error"),
    ),
    "a reward that is not a number": Case(
        ("reward.name=rewards.py:not_a_number",),
        2,
        ("in phase step/reward at step 1", "sample 2 of 16 failed: the function returned nan", "uid:", "on_error"),
    ),
    "no response column in rows of a function": Case(
        ("sft.steps=1", "sft.response_key=solution"),
        2,
        ("make_rows row 1: no column 'solution'", "columns here: prompt, answer", "sft.response_key"),
    ),
    "a loss that is not a number": Case(
        ("algorithm.loss.name=losses:not_a_number",),
        2,
        ("in phase step/actor_train", "losses.py:5: the policy loss not_a_number returns", "samples train-0-", "nan"),
    ),
    "out of memory in a rank": Case(
        ("algorithm.loss.name=losses:hungry",),
        1,
        ("rank 0 failed in phase step/actor_train", "can't allocate memory", "use less memory: smaller actor.engine"),
        traceback=True,
    ),
    "dynamic sampling where all samples score the same": Case(
        (
            "algorithm.pipeline=dapo",
            "algorithm.dynamic_sampling={enabled: true, max_rounds: 3}",
            "reward.name=rewards.py:constant",
        ),
        1,
        (
            "in phase step/dynamic_sampling at step 1",
            "after 3 rounds of generation 0 of 4 groups have scores that differ",
            "groups generated in this step by the scores of their samples: {'all 1': 12, 'between': 0}",
            "algorithm.dynamic_sampling.max_rounds",
        ),
    ),
    "a log-prob that is not finite": Case(
        ("algorithm.pipeline=graphs:poisoned",),
        1,
        (
            "in phase step/rollout at step 1",
            "sample train-0-",
            "#2: the generation engine's log-prob of response token 0 (id ",
            "is -inf",
            "1 of ",
            "weight version 0",
        ),
    ),
    "a node that returns None": Case(
        ("algorithm.pipeline=graphs:forgetful",),
        1,
        ("in phase step/lost at step 1", "node 'lost' (graphs:nothing) returned None", "return batch"),
    ),
}


@pytest.fixture(scope="module")
def ended(request: pytest.FixtureRequest, folder: Path) -> Iterator[dict[str, Future[Ended]]]:
    """The selected cases, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(train, folder, *QUICK, *CASES[name].overrides, "--run-dir", str(folder / f"run {name}"))
            for name in chosen(request, "case")
        }


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_fails_says_where_and_why(folder: Path, ended: dict[str, Future[Ended]], case: str) -> None:
    expected, found = CASES[case], ended[case].result()
    message = found.output[found.output.rindex("megarl: rank 0") :]
    assert found.code == expected.code, found.output
    for word in expected.words:
        assert word in message
    assert ("Traceback" in found.output) is expected.traceback
    run_dir = folder / f"run {case}"
    log = (run_dir / "log.txt").read_text()
    assert expected.words[0] in log
    assert ("Traceback" in log) is (expected.code == 1)  # of our own errors only the log keeps it
    assert not list(run_dir.glob("checkpoints/*"))


# -- a run folder in use, and a run that the user stops --------------------------------------------------------------


def test_ctrl_c_saves_ends_every_worker_and_tells_how_to_go_on(folder: Path) -> None:
    run_dir, metrics = folder / "interrupted", folder / "interrupted" / "metrics.jsonl"
    arguments = [*QUICK, "trainer.steps=100000", "trainer.save_every=0"]
    process = harness.start(folder / "tiny.yaml", run_dir, *arguments)
    harness.wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) > 2, process)
    assert not list(run_dir.glob("checkpoints/step_*"))

    second = train(folder, *arguments, "--run-dir", str(run_dir))
    assert second.code == 2
    assert "--run-dir: another run is using this run folder" in second.output
    assert str(run_dir) in second.output
    assert "wait until it ends, or stop it" in second.output
    assert process.poll() is None

    process.send_signal(signal.SIGINT)
    output = harness.finish(process, timeout=120)  # the run itself would go on for hours
    assert process.returncode == 130
    assert harness.workers(run_dir) == {}
    assert "finishing and saving the current step first" in output
    assert "megarl: stopped by SIGINT" in output
    assert len(list(run_dir.glob("checkpoints/step_*/meta.json"))) == 1
    assert "Traceback" not in output
    assert "to continue: megarl train" in output
    assert f"--run-dir {run_dir}" in output
    assert "from the checkpoint of step" in output
