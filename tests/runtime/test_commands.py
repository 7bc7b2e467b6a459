"""`megarl sft`, `eval`, `generate` and `convert`, each from the command line to the files it leaves."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megarl.recipes.arithmetic import make_rows
from tests import forked
from tests.models.tiny import tiny_drafting
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]

#: The draft head, and one of its tensors.
DRAFT_LAYER = "model.layers.1."
DRAFT = f"{DRAFT_LAYER}eh_proj.weight"


def megarl(folder: Path, *arguments: object) -> str:
    """Run a command that must succeed; its output."""
    ended = forked.run(arguments, folder)
    assert ended.code == 0, ended.output[-4000:]
    return ended.output


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the recipe of a model that trains its draft head."""
    here = tmp_path_factory.mktemp("commands")
    recipe = harness.write_recipe(here, tiny_drafting())
    content = yaml.safe_load(recipe.read_text())
    content["actor"]["mtp"] = {"loss_weight": 0.5}
    recipe.write_text(yaml.safe_dump(content))
    return here


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Path:
    """The run folder of `megarl sft` on two ranks."""
    settings = ["sft.epochs=0.7", "sft.eval_every=3", "trainer.save_every=3", "sft.optim.lr=3e-2"]
    settings += ["tracking.report=true", "trainer.best_metric=sft/loss"]  # larger is better: that of step 3
    megarl(folder, "sft", "tiny.yaml", *settings, "--run-dir", folder / "sft")
    return folder / "sft"


def model_of(run_dir: Path) -> list[str]:
    """Overrides that start from the exported model of a run, in one process."""
    return [f"model.path={run_dir / 'hf'}", "model.hf_config=null", "cluster.nproc=1"]


def test_sft_learns_evaluates_saves_and_exports(tuned: Path) -> None:
    rows = lines(tuned / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["stage"] for row in rows} == {"sft"}
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"]
    assert rows[-1]["actor/mtp_loss"] < rows[0]["actor/mtp_loss"]
    assert [row["step"] for row in rows if "val/acc" in row] == [3, 6]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    log = (tuned / "log.txt").read_text()
    assert "6 steps of 8 = 0.738 epochs of 65 examples" in log
    assert "epochs of 65 prompts" not in log, "megarl sft has no steps of RL"
    assert {path.name for path in tuned.glob("checkpoints/step_*")} >= {"step_6"}

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tuned / "hf")
    model = AutoModelForCausalLM.from_pretrained(tuned / "hf")
    losses = [response_loss(model, tokenizer, f"{a}+{b}=", str(a + b)) for a in (1, 4, 8) for b in (2, 5, 9)]
    assert sum(losses) / len(losses) < math.log(len(tokenizer))  # better than a model that knows nothing
    held_out = make_rows("val", ops=["+"], low=1, high=9, held_out=16)
    sizes = [len(str(row["answer"])) + 1 for row in held_out]
    means = [response_loss(model, tokenizer, row["prompt"], str(row["answer"])) for row in held_out]
    expected = sum(mean * size for mean, size in zip(means, sizes, strict=True)) / sum(sizes)
    assert rows[-1]["val/loss"] == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def response_loss(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """Mean -logp of the tokens that are trained on: the answer and the end of the sequence."""
    given = tokenizer(prompt).input_ids
    wanted = [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
    logp = model(torch.tensor([given + wanted])).logits[0].log_softmax(-1)
    return -sum(float(logp[len(given) - 1 + i, token]) for i, token in enumerate(wanted)) / len(wanted)


def test_sft_goes_on_from_its_checkpoint(tuned: Path, folder: Path) -> None:
    settings = ["sft.steps=8", "sft.optim.lr=3e-2", "trainer.export_hf=false", "data.val_files=[]"]
    again = shutil.copytree(tuned, folder / "again")  # the other tests want the run as it is
    goal = ["sft.stop_at_accuracy=0", "sft.eval_every=3"]  # met at step 6 already, whatever it learnt
    megarl(folder, "sft", "tiny.yaml", *settings[:3], *goal, "--run-dir", again)
    assert [row["step"] for row in lines(again / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    megarl(folder, "sft", "tiny.yaml", *settings, "--run-dir", again)
    assert [row["step"] for row in lines(again / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_the_command_that_a_run_ends_with_works_anywhere(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    log = (tuned / "log.txt").read_text()
    assert f"model:  {tuned / 'hf'} (last, step 6)" in log
    assert f"better: {tuned / 'hf_best'} (best by sft/loss, step 3)" in log
    assert "hf: last, step 6; hf_best: best, step 3" in (tuned / "report.html").read_text()
    (command,) = [line.partition("to try it: ")[2] for line in log.splitlines() if "to try it: " in line]
    assert shlex.split(command)[:2] == ["megarl", "generate"]
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    output = megarl(elsewhere, *shlex.split(command)[1:-1], "2+2=")
    assert "> 2+2=" in output
    assert f"run folder: {tuned}/" in output
    assert not list(elsewhere.iterdir())
    assert f"model: {tuned / 'hf_best'} (best, step 3)" in output


def test_eval_scores_the_held_out_prompts(tuned: Path, folder: Path) -> None:
    megarl(folder, "eval", tuned, "--weights=last", "cluster.nproc=1", "--run-dir", folder / "eval")
    numbers = lines(folder / "eval" / "metrics.jsonl")[-1]
    trained = next(row for row in lines(tuned / "metrics.jsonl") if row["step"] == 6)
    assert numbers["val/acc"] == pytest.approx(trained["val/acc"])  # a mean over other shares of the prompts
    assert numbers["stage"] == "eval"
    resume = f"trainer.resume={tuned / 'checkpoints' / 'step_6'}"
    megarl(folder, "eval", "tiny.yaml", resume, "cluster.nproc=1", "--run-dir", folder / "resumed")
    again = lines(folder / "resumed" / "metrics.jsonl")[-1]
    assert (again["step"], again["val/acc"]) == (6, pytest.approx(trained["val/acc"]))
    assert not (folder / "eval" / "checkpoints").exists()


def test_generate_writes_responses_to_files_and_to_prompts_given_as_text(tuned: Path, folder: Path) -> None:
    sampling = ["validation.sampling.n=2", "validation.sampling.temperature=1", "data.val_batch_size=5"]
    megarl(folder, "generate", "tiny.yaml", *model_of(tuned), *sampling, "cluster.nproc=2", "--run-dir", folder / "all")
    rows = lines(folder / "all" / "responses.jsonl")
    assert len(rows) == 16 * 2
    assert len({row["sample_id"] for row in rows}) == 32
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}

    output = megarl(folder, "generate", "tiny.yaml", *model_of(tuned), "--prompt", "1+2=", "--prompt", "7+7=")
    assert "> 1+2=\n" in output
    assert output.index("> 1+2=") < output.index("> 7+7=")
    file = Path(output.split("responses: ")[1].splitlines()[0])
    assert [row["prompt_text"] for row in lines(file)] == ["1+2=", "7+7="]
    assert file.parent.name.endswith("-generate")
    assert "\ntiny: generate finished\n" in output


def test_end_tokens_of_the_generation_config_end_a_response(tuned: Path, folder: Path) -> None:
    model = shutil.copytree(tuned / "hf", folder / "ends_at_digits")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *range(4, 14)]}))
    settings = [f"model.path={model}", "model.hf_config=null", "cluster.nproc=1", "model.tokenizer=null"]
    settings += ["validation.sampling.n=8", "validation.sampling.temperature=5"]
    output = megarl(folder, "generate", "tiny.yaml", *settings, "--run-dir", folder / "digits")
    assert (
        "a response ends at <eos> (2: the tokenizer, generation_config.json) or 0 (4: generation_config.json)" in output
    )
    rows = lines(folder / "digits" / "responses.jsonl")
    with_digits = [row for row in rows if any(map(str.isdigit, row["response_text"]))]
    assert with_digits
    for row in with_digits:  # which are at an end with the first one
        assert (row["finish_reason"], sum(map(str.isdigit, row["response_text"]))) == ("stop", 1)
        assert row["response_text"][-1].isdigit()


def test_convert_writes_the_model_of_a_checkpoint(tuned: Path, folder: Path) -> None:
    """Of the best step, whose exported form was written from that checkpoint, too."""
    checkpoint = tuned / "checkpoints" / "step_3"
    megarl(folder, "convert", checkpoint, folder / "converted")
    exported, converted = (
        {name: tensor for file in place.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for place in (tuned / "hf_best", folder / "converted")
    )
    last = load_file(next((tuned / "hf").glob("*.safetensors")))
    for name in ("lm_head.weight", DRAFT):
        assert not torch.equal(last[name], exported[name]), name
    assert exported.keys() == converted.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)

    megarl(folder, "convert", folder / "converted", folder / "half", "--dtype", "bf16")
    halves = {name: t for file in (folder / "half").glob("*.safetensors") for name, t in load_file(file).items()}
    for name, tensor in converted.items():
        kept = DRAFT_LAYER in name or name.endswith("correction_bias")  # these keep their dtype
        assert torch.equal(tensor if kept else tensor.bfloat16(), halves[name]), name
    assert DRAFT in halves
    assert (folder / "half" / "tokenizer.json").is_file()


def test_a_response_is_shown_after_the_text_that_was_given(capsys):
    from megarl.runtime.inference import _show

    chat = {"prompt_text": "<|im_start|>user\n1+2=<|im_end|>\n", "response_text": "3", "finish_reason": "stop"}
    _show([chat], ["text:1+2=", "rows.jsonl"])
    _show([{"prompt_text": "1+3=", "response_text": "4", "finish_reason": "length"}], ["text: 1+3="])
    assert capsys.readouterr().out == "\n> 1+2=\n3\n\n> 1+3=\n4 ... (cut at the length limit)\n"
