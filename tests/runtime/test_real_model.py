"""A real chat model, where `make smollm2` has put one: a step of its recipe through its own chat template."""

import math
import re
from pathlib import Path

import pytest

from megarl.artifacts.jsonl import read_jsonl
from megarl.recipes.word_problems import POLITE, make_pairs, make_rows, polite
from tests import forked
from tests.rollout.servers import need_interpreter
from tests.runtime import harness

pytestmark = pytest.mark.procs

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path("~/.cache/megarl/smollm2-135m-instruct").expanduser()  # as in the recipe
OPERATION = {"sums": int.__add__, "differences": int.__sub__, "products": int.__mul__}


def test_word_problems_are_right_distinct_and_held_out():
    train, held_out = make_rows(rows=500), make_rows("val", rows=500)
    assert (len(train), len(held_out)) == (500, 256)
    questions = [row["messages"][-1]["content"] for row in train + held_out]
    assert len(set(questions)) == len(questions)
    for row, question in zip(train + held_out, questions, strict=True):
        a, b = map(int, re.findall(r"\d+", question))
        assert int(row["answer"]) == OPERATION[row["data_source"]](a, b) <= 60
        assert max(a, b) <= 60


def test_pairs_differ_in_politeness_only():
    for row in make_pairs("val", rows=50, held_out=50):
        (chosen,), (rejected,) = row["chosen"], row["rejected"]
        assert chosen["content"] == f"{rejected['content']} {POLITE}"
        assert f" {row['answer']} " in rejected["content"]
        assert polite([{"response": chosen["content"]}, {"response": rejected["content"]}]) == [1.0, 0.0]


def test_more_problems_than_there_are_is_an_error():
    with pytest.raises(ValueError, match="cannot make 5256 distinct problems"):
        make_rows(most=8, rows=5000)


@pytest.mark.campaign("smollm2")
@pytest.mark.skipif(not MODEL.is_dir(), reason="no model: make smollm2")
def test_smollm2_takes_a_step_in_its_own_chat_template(tmp_path):
    # Right answers are too rare in so few samples for a gradient; any two texts differ in this.
    reward = tmp_path / "letters.py"
    reward.write_text("def letters(samples):\n    return [sum(map(ord, s['response'])) / 1e3 for s in samples]\n")
    few = ["data.batch_size=2", "rollout.sampling.n=2", "trainer.steps=1", "data.max_val_samples=2", "cluster.nproc=1"]
    few += ["data.loader_kwargs={rows: 64, held_out: 8}"]
    few += ["tracking.mlflow=false", "tracking.report=false", "trainer.save_every=0", "actor.optim.warmup_steps=0"]
    few += ["model.dtype=fp32"]
    few += [f"reward=!replace {{name: '{reward}:letters'}}", "rollout.sampling.max_new_tokens=8"]
    numbers = harness.train(ROOT / "recipes" / "grpo_smollm2_words.yaml", tmp_path / "run", *few)
    assert numbers[1]["actor/grad_norm"] > 0
    assert abs(numbers[1]["rollout_corr/kl"]) < 1e-5  # the engine that generates has the trainer's log-probs
    sample = read_jsonl(tmp_path / "run" / "samples.jsonl", needs={})[0]
    assert sample["prompt"].startswith("<|im_start|>system\nAnswer with one calculation.<|im_end|>\n<|im_start|>user\n")
    assert sample["prompt"].endswith("<|im_start|>assistant\n")
    check_export(tmp_path / "run" / "hf")


@pytest.mark.campaign("smollm2")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not MODEL.is_dir(), reason="no model: make smollm2")
def test_smollm2_learns_polite_answers_and_gives_them_on_a_server_too(tmp_path):
    need_interpreter()
    recipe, run = ROOT / "recipes" / "dpo_smollm2_polite.yaml", tmp_path / "run"
    quiet = ("tracking.mlflow=false", "tracking.report=false")

    def command(name: str, source: Path, folder: Path, *more: str) -> list[dict]:
        ended = forked.run([name, source, *quiet, *more, "--run-dir", folder], tmp_path, timeout=900)
        assert ended.code == 0, ended.output
        return read_jsonl(folder / "metrics.jsonl", needs={})

    [before] = command("eval", recipe, tmp_path / "before")
    steps = command("train", recipe, run)
    assert steps[1]["preference/loss"] == pytest.approx(math.log(2))  # the policy is the reference
    assert steps[-1]["val/rewards/accuracies"] == 1
    [after] = command("eval", run, tmp_path / "after")
    command("eval", run, tmp_path / "server", "rollout.engine=sglang")
    assert (before["val/acc"], after["val/acc"]) == (0, 1)  # greedy answers that end politely
    answers = [read_jsonl(tmp_path / name / "samples.jsonl", needs={}) for name in ("after", "server")]
    assert [row["response"] for row in answers[0]] == [row["response"] for row in answers[1]]


def check_export(folder: Path) -> None:
    """Look at the model that the run leaves: transformers loads it, and a step changed it a little."""
    import torch
    from transformers import AutoModelForCausalLM

    ours, before = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (folder, MODEL))
    moved = [float((a - b).detach().abs().max()) for a, b in zip(ours.parameters(), before.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-4
