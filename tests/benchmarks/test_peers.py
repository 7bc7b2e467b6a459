"""Commands of verl and slime: they do the work of our case, and their logs are read as they write them."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.benchmarks.case import case_file
from megarl.benchmarks.peers import slime, verl, work
from megarl.benchmarks.peers.work import Peer, main, work_of
from megarl.config.load import load_config
from megarl.system.errors import UserError

CASE = "llama31_8b_h100x16"
GIVEN = Namespace(python="python3", slime_root=Path("/a checkout"), checkpoint=Path("/dist"))


def verl_settings(case: str = CASE) -> dict[str, str]:
    made = verl.command(work_of(case, "verl", None, Path("rows.parquet"), verl.no_such), GIVEN)
    assert made[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    return dict(one.split("=", 1) for one in made[4:])


def slime_arguments(case: str = CASE) -> dict[str, str]:
    shell, _, script = slime.command(work_of(case, "slime", None, Path("rows.jsonl"), slime.no_such), GIVEN)
    assert shell == "bash"
    words = shlex.split(script)
    assert words[:2] == ["source", "/a checkout/scripts/models/llama3.1-8B-Instruct.sh"]
    assert words[3:7] == ["exec", "python3", "/a checkout/train.py", "${MODEL_ARGS[@]}"]
    named = words[7:]
    return {word: after for word, after in zip(named, [*named[1:], ""], strict=True) if word.startswith("--")}


def test_verl_does_the_work_of_the_case():
    made = verl_settings()
    expected = {
        "data.train_batch_size": "64",
        "data.max_prompt_length": "512",
        "data.max_response_length": "3968",
        "actor_rollout_ref.model.path": "meta-llama/Llama-3.1-8B-Instruct",
        "actor_rollout_ref.rollout.n": "32",
        "actor_rollout_ref.rollout.temperature": "1.0",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "16",
        "actor_rollout_ref.actor.optim.lr": "5e-07",
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "actor_rollout_ref.actor.kl_loss_coef": "0.01",
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "2",
        "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity": "full",
        "trainer.nnodes": "2",
        "trainer.n_gpus_per_node": "8",
        "trainer.total_training_steps": "6",
    }
    assert expected.items() <= made.items()


def test_slime_does_the_work_of_the_case():
    made = slime_arguments()
    expected = {
        "--rollout-batch-size": "64",
        "--n-samples-per-prompt": "32",
        "--global-batch-size": "512",
        "--rollout-max-prompt-len": "512",
        "--rollout-max-response-len": "3968",
        "--hf-checkpoint": "meta-llama/Llama-3.1-8B-Instruct",
        "--ref-load": "/dist",
        "--lr": "5e-07",
        "--kl-loss-coef": "0.01",
        "--pipeline-model-parallel-size": "2",
        "--recompute-granularity": "full",
        "--actor-num-nodes": "2",
        "--actor-num-gpus-per-node": "8",
        "--num-rollout": "6",
    }
    assert expected.items() <= made.items()
    assert {"--colocate", "--calculate-per-token-loss", "--apply-chat-template"} <= set(made)


@pytest.mark.parametrize("case", ["llama31_8b_h100x8", "qwen3_30b_a3b_h100x32"])
def test_every_case_of_one_team_has_a_command(case):
    settings = verl_settings(case)
    work = work_of(case, "slime", None, Path("rows.jsonl"), slime.no_such)
    assert int(settings["trainer.nnodes"]) * int(settings["trainer.n_gpus_per_node"]) == work.config.cluster.nproc
    assert slime.command(work, GIVEN)


def test_a_case_without_a_chat_template_is_only_for_slime():
    work = work_of("qwen25_1p5b_h100x1", "slime", None, Path("rows.jsonl"), slime.no_such)
    assert "--apply-chat-template" not in shlex.split(slime.command(work, GIVEN)[2])
    with pytest.raises(UserError, match=r"data\.chat_template: no command of verl"):
        verl_settings("qwen25_1p5b_h100x1")


def changed(folder: Path, text: str) -> str:
    """The case with other settings."""
    file = folder / "changed.yaml"
    file.write_text(f"extends: {case_file(CASE)}\nname: changed\n{text}\n")
    return str(file)


def test_settings_of_the_algorithm_are_passed_on(tmp_path):
    own = "advantage: {norm_by_std: false}, loss: {clip_low: 0.1, dual_clip: 5.0}"
    case = changed(tmp_path, f"algorithm: {{{own}, kl: {{use: loss, estimator: mse}}}}")
    made, actor = verl_settings(case), "actor_rollout_ref.actor"
    assert made["algorithm.norm_adv_by_std_in_grpo"] == "false"
    assert [made[f"{actor}.{key}"] for key in ("kl_loss_type", "clip_ratio_low", "clip_ratio_c")] == [
        "mse",
        "0.1",
        "5.0",
    ]
    given = slime_arguments(case)
    assert "--disable-grpo-std-normalization" in given
    assert (given["--kl-loss-type"], given["--eps-clip"], given["--eps-clip-c"]) == ("k2", "0.1", "5.0")


@pytest.mark.parametrize(
    ("text", "key", "peers"),
    [
        ("algorithm: {loss: {name: gspo}}", "algorithm.loss.name", ["verl", "slime"]),
        ("algorithm: {kl: {estimator: abs}}", "algorithm.kl.estimator", ["slime"]),
        ("algorithm: {kl: {estimator: low_var_kl+}}", "algorithm.kl.estimator", ["verl", "slime"]),
        ("algorithm: {loss: {dual_clip: null}}", "algorithm.loss.dual_clip", ["verl"]),
        ("actor: {ppo_epochs: 2}", "actor.ppo_epochs", ["slime"]),
        ("rollout: {sampling: {ignore_eos: true}}", "rollout.sampling.ignore_eos", ["slime"]),
    ],
)
def test_what_a_peer_has_no_argument_for_is_refused(tmp_path, text, key, peers):
    case = changed(tmp_path, text)
    for name, made in (("verl", verl_settings), ("slime", slime_arguments)):
        if name in peers:
            with pytest.raises(UserError, match=f"{key}: no command of {name}"):
                made(case)
        else:
            assert made(case)


@pytest.mark.parametrize(
    ("case", "said"),
    [("S", "model.path: no command of verl"), ("llama31_8b_h100x16_ahead", "placement.teams: no command of verl")],
)
def test_what_has_no_command_is_told(case, said):
    with pytest.raises(UserError, match=said):
        work_of(case, "verl", None, Path("rows.parquet"))


def test_rows_are_those_of_the_case(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    lines = [json.dumps({"problem": f"{n} + 1?", "expected_answer": n + 1}) for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    work = work_of(CASE, "verl", 1, tmp_path / "verl.parquet")
    data = work.config.data.model_copy(update={"train_files": [str(tmp_path / "rows.jsonl")]})
    work = replace(work, config=work.config.model_copy(update={"data": data}))
    verl.write(work)
    rows = pq.read_table(work.rows).to_pylist()
    assert len(rows) == 2 * 64
    assert rows[3]["prompt"][0]["content"].startswith("3 + 1?\nSolve it")
    assert rows[3]["reward_model"] == {"ground_truth": "4", "style": "rule"}
    slime.write(replace(work, rows=tmp_path / "slime.jsonl"))
    again = [json.loads(line) for line in (tmp_path / "slime.jsonl").read_text().splitlines()]
    assert [(row["prompt"], row["label"]) for row in again] == [
        (row["prompt"], row["reward_model"]["ground_truth"]) for row in rows
    ]


def test_tokens_per_second_are_read_from_their_logs():
    log = "(TaskRunner pid=7) step:1 - actor/lr:5e-07 - perf/throughput:1234.5 - perf/mfu/actor:0.3\nstep:2 - a:1"
    assert verl.per_gpu(log, 16) == [1234.5]
    perf = {"perf/actor_train_tok_per_s": 64_000.0, "perf/actor_train_time": 20.0, "perf/step_time": 80.0}
    log = f"INFO perf 0: {perf}\nINFO perf 1: {{'perf/step_time': 80.0, 'perf/x': nan}}\n"
    assert slime.per_gpu(log, 16) == [1000.0]


def test_print_needs_no_package_and_a_run_says_that_it_is_missing(tmp_path, capsys):
    assert main(verl.PEER, "", ["--case", CASE, "--print", "--data", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("python -m verl")  # nobody has named an interpreter, and ours does not have it
    assert "trainer.total_training_steps=6" in shown.out
    assert f"{tmp_path}/verl.parquet, which --write" in shown.err
    assert main(verl.PEER, "", ["--case", CASE]) == 2
    assert "--python: this interpreter cannot import verl" in capsys.readouterr().err


def stand_in(program: str, argv: list[str]) -> int:
    """A run of a peer that is this program; a package that is there stands for its own."""

    def write(work: work.Work) -> None:
        work.rows.write_text("")

    def command(work: work.Work, arguments: Namespace) -> list[str]:
        return [sys.executable, "-c", program]

    return main(Peer("json", ".jsonl", command, write, slime.per_gpu), "", ["--case", CASE, *argv])


def test_a_log_on_standard_error_is_read(tmp_path, capsys):
    perf = {"perf/actor_train_tok_per_s": 64_000.0, "perf/actor_train_time": 20.0, "perf/step_time": 80.0}
    program = f"import logging; logging.basicConfig(level=20); [logging.info('perf %d: %s', n, {perf}) for n in (0, 1)]"
    argv = ["--data", str(tmp_path), "--json", str(tmp_path / "out.json")]
    assert stand_in(program, argv) == 0
    assert json.loads((tmp_path / "out.json").read_text())["tokens_per_s_per_gpu"] == [1000.0]  # the first warms up
    assert stand_in("print('nothing of a step')", argv) == 1
    assert "no step in the output of json:\nnothing of a step" in capsys.readouterr().err


def test_rows_can_be_written_by_themselves(tmp_path, capsys):
    assert stand_in("raise SystemExit", ["--data", str(tmp_path), "--write"]) == 0
    assert (tmp_path / "json.jsonl").is_file()
    assert f"wrote {tmp_path}/json.jsonl" in capsys.readouterr().out


def test_an_import_that_hangs_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(work, "_IMPORT_S", 0.001)
    assert stand_in("", ["--data", str(tmp_path)]) == 2
    assert "not within 0.001 s" in capsys.readouterr().err


def test_a_case_may_be_a_shipped_recipe():
    assert load_config(case_file("grpo_qwen3_8b_8gpu")).name == "grpo_qwen3_8b_8gpu"
    with pytest.raises(UserError, match="unknown case"):
        case_file("grpo_qwen3_9b")
