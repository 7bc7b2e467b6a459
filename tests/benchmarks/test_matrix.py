"""`megarl bench --matrix`: combinations, what is left out, rounds in turn, and the numbers beside published ones."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megarl.artifacts.jsonl import read_jsonl
from megarl.benchmarks import case, history, matrix, published
from megarl.benchmarks.throughput import MATRICES, add_arguments, add_compare_arguments
from megarl.system.errors import ConfigError, UserError, WorkerError
from tests.benchmarks.test_bench import CASES, MINI, bench
from tests.benchmarks.test_history import result

SMALL = """
rounds: 3
steps: 2
axes:
  model: {mini: {case: %s, threads: 1}}
  layout:
    one: {nproc: 1}
    tensor parallel: {nproc: 2, actor.parallel.tp: 2}
    three: {nproc: 3}
  dtype: {fp32: {dtype: fp32}}
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "mini.yaml").write_text(MINI.format(parent=CASES / "S.yaml"))
    file = tmp_path / "small.yaml"
    file.write_text(SMALL % (tmp_path / "mini.yaml"))
    return file


def arguments(folder: Path, *more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    add_compare_arguments(parser)
    return parser.parse_args(["--history", str(folder / "history.jsonl"), *more])


class Measured:
    """Rounds whose seconds follow from the processes; what fails is named by a part of its arguments."""

    def __init__(self, fails: str = "nothing", times: float = 1.0, after: int = 0) -> None:
        self.fails, self.times, self.after, self.asked = fails, times, after, list[str]()

    def __call__(self, package: Path | None, shape: Any) -> dict[str, Any]:
        asked = " ".join(shape)
        self.asked.append(asked)
        if self.fails in asked and len(self.asked) > self.after:
            raise WorkerError("megarl bench ended with exit code 1:\nrank 0 is out of memory\n")
        nproc = int(re.search(r"--nproc (\d)", asked)[1])
        seconds = self.times * 2.0 / nproc * (1 + 0.004 * (len(self.asked) % 5))
        return result(seconds, nproc) | {"overrides": [one for one in shape if "=" in one]}


def test_every_combination_is_a_run_and_what_checks_refuse_is_left_out_with_the_reason(small):
    one, tensor, three = matrix.read_matrix(str(small)).cells(["trainer.seed=3"], starts=True)
    assert one.name == "mini, one, fp32"
    assert one.refused is None
    assert tensor.shape[2:] == [
        "--dtype",
        "fp32",
        "--nproc",
        "2",
        "--threads",
        "1",
        "actor.parallel.tp=2",
        "trainer.seed=3",
    ]
    assert three.refused is not None
    assert "4 is not divisible by 3" in three.refused


def test_rounds_are_in_turn_and_lines_are_like_those_of_single_cases(small, tmp_path, capsys):
    measured = Measured()
    assert history.compare(arguments(tmp_path, "--matrix", str(small)), measured) == 0
    first, second = measured.asked[:2]
    assert measured.asked == [first, second] * 3
    assert "--steps 2" in first
    lines = read_jsonl(tmp_path / "history.jsonl")
    assert [line["cell"]["layout"] for line in lines] == ["one", "tensor parallel"]
    assert {line["matrix"] for line in lines} == {"small"}
    said = capsys.readouterr().out
    assert "left out: mini, three, fp32" in said
    assert "matrix small" in said
    assert history.compare(arguments(tmp_path, "--matrix", str(small), "--compare"), Measured(times=1.2)) == 1
    assert "SLOWER" in capsys.readouterr().out


def test_a_combination_that_fails_is_told_and_the_others_go_on(small, tmp_path, capsys):
    measured = Measured(fails="tp=2")
    assert history.compare(arguments(tmp_path, "--matrix", str(small)), measured) == 1
    assert len(measured.asked) == 4  # three of the first, one of the other
    (line,) = read_jsonl(tmp_path / "history.jsonl")
    assert line["cell"]["layout"] == "one"
    assert "failed: mini, tensor parallel, fp32\nmegarl bench ended with" in capsys.readouterr().out
    assert "mini, tensor parallel, fp32: failed: rank 0 is out of memory" in (tmp_path / "history.html").read_text()


def test_one_that_fails_in_its_last_round_keeps_the_rounds_before(small, tmp_path):
    compared = arguments(tmp_path, "--matrix", str(small), "--compare")
    assert history.compare(compared, Measured(fails="tp=2", after=4)) == 1
    lines = read_jsonl(tmp_path / "history.jsonl")
    assert [len(line["rounds"]) for line in lines] == [3, 2]
    assert "out of memory" in lines[1]["failed"]
    assert history.alike(lines[1], lines) == []  # nothing is held against it


def test_rounds_that_are_over_outlive_a_session_that_is_stopped(small, tmp_path):
    class Stopped(Measured):
        def __call__(self, package: Path | None, shape: Any) -> dict[str, Any]:
            if len(self.asked) == 3:
                raise KeyboardInterrupt
            return super().__call__(package, shape)

    with pytest.raises(KeyboardInterrupt):
        history.compare(arguments(tmp_path, "--matrix", str(small)), Stopped())
    kept = read_jsonl(tmp_path / "history.rounds.jsonl")
    assert [(one["cell"]["layout"], one["round"]) for one in kept] == [
        ("one", 1),
        ("tensor parallel", 1),
        ("one", 2),
    ]
    assert kept[0]["result"]["summary"]["wall_s"] > 0


def test_the_page_shows_the_matrix_and_needs_no_network(small, tmp_path):
    history.compare(arguments(tmp_path, "--matrix", str(small)), Measured())
    text = (tmp_path / "history.html").read_text()
    first = text.split("</table>")[0]
    assert first.count("<tr>") == 3  # the head and two combinations
    widths = [int(width) for width in re.findall(r"width:(\d+)px", first)]
    assert widths == [40, 160]  # 100 and 400 tokens per second
    assert "three, fp32: left out: data.batch_size" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    for picture in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(picture)


def test_nothing_that_can_run_is_the_users_to_fix(tmp_path):
    with pytest.raises(UserError, match="no combination can run here"):
        history.compare(arguments(tmp_path, "--matrix", "h100x8"), Measured())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("axes: {model: {S: {case: S}}}\nround: 3", "unknown key of a matrix"),
        ("rounds: 3", "the matrix has no axes"),
        ("axes: {model: {S: [case]}}", "not a mapping of keys"),
        ("axes: {layout: {one: {nproc: 1}}}", "no axis sets a case"),
        ("axes: {model: {S: {case: S}}}\nrounds: few", "invalid rounds"),
        ("axes: {model: {S: {case: S}}}\nlimit_s: 0", "invalid limit_s"),
        ("axes: {model: {S: {case: S}, M: {}}}", "axes.model.M: these settings have no case"),
        ("axes: {model: {S: {case: 5}}}", "axes.model.S.case: invalid case"),
        ("axes: {model: {S: {case: S, nproc: 0}}}", "axes.model.S.nproc: invalid nproc"),
        ("axes: {model: {S: {case: S, nproc: two}}}", "axes.model.S.nproc: invalid nproc"),
        ("axes: {model: {1: {case: S}}}", "the name of these settings is not text"),
        ("axes: {model: {S: {case: S, nproc: 1}}, layout: {two: {nproc: 2}}}", "axis model sets nproc as well"),
        (
            "axes: {model: {S: {case: S, actor.parallel.tp: 1}}, layout: {two: {actor.parallel: {tp: 2}}}}",
            "axis model sets actor.parallel.tp as well",
        ),
    ],
)
def test_a_file_that_is_no_matrix_is_told(tmp_path, text, said):
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        matrix.read_matrix(str(tmp_path / "m.yaml"))


def test_names_are_told(tmp_path):
    with pytest.raises(UserError, match="did you mean h100x32"):
        matrix.read_matrix("h100x322")
    with pytest.raises(UserError, match="the matrix already sets this"):
        history.compare(arguments(tmp_path, "--matrix", "cpu", "--nproc", "4"), Measured())
    (cell, *_) = matrix.read_matrix("cpu").cells(["trainer.seeds=4"], starts=True)
    assert "unknown key trainer.seeds" in cell.refused


GPU_CASES = [name for name in case.case_names() if "_h100x" in name]


@pytest.mark.parametrize("name", ["h100x1", "h100x8", "h100x16", "h100x32"])
def test_combinations_for_gpus_pass_their_checks_without_gpus(name):
    cells = matrix.read_matrix(name).cells(starts=False)
    assert [cell.refused for cell in cells] == [None] * len(cells)


def test_every_case_for_gpus_is_in_a_matrix():
    files = [file.read_text() for file in MATRICES.glob("h100*.yaml")]
    assert len(GPU_CASES) == 6
    assert all(any(f"case: {name}}}" in text for text in files) for name in GPU_CASES)


@pytest.mark.parametrize("figure", published.figures(), ids=lambda figure: f"{figure.system} {figure.case}")
def test_a_published_figure_stands_beside_a_case_with_its_settings(figure):
    from megarl.benchmarks.measure import gpus_of, settle

    config, _ = settle(figure.case)
    sampling, data = config.rollout.sampling, config.data
    assert gpus_of(config) == figure.gpus
    assert figure.model in config.model.path
    assert (data.batch_size, sampling.n, config.actor.mini_batch_size) == (64, 32, 16)
    assert sampling.max_new_tokens + 128 == 4096
    assert config.async_.max_staleness == (0 if figure.policy == "on" else 1)
    # A step's tokens over its seconds and GPUs, from the page's own rounded columns: prompts are not in mean_tokens.
    samples = 64 * 32
    least = samples * figure.mean_tokens / figure.step_s / figure.gpus
    assert least < figure.tokens_per_s_per_gpu < 1.2 * least


@pytest.mark.parametrize(
    ("case", "servers", "gpus"),
    [
        ("llama31_8b_h100x16", "servers=16", 16),  # on the trainer's
        ("llama31_8b_h100x16_ahead", "urls=[%s]", 16),  # on those of the team that generates
        ("llama31_8b_h100x16_ahead", "urls=[%s,http://more:1]", 17),
        ("S", "urls=[%s]", 9),
    ],
)
def test_servers_use_the_gpus_of_the_team_that_generates(case, servers, gpus):
    from megarl.benchmarks.measure import gpus_of, settle

    urls = ",".join(f"http://host:{port}" for port in range(1, 9))
    given = ["rollout.engine=sglang", f"rollout.sglang.{servers % urls if '%s' in servers else servers}"]
    config, _ = settle(case, overrides=given, nproc=1 if case == "S" else None)
    assert gpus_of(config) == gpus


def line(**changed: Any) -> dict[str, Any]:
    made = {"case": "llama31_8b_h100x16", "dtype": "bf16", "overrides": [], "gpus": 16, "commit": "abc"}
    return made | {"machine": {"gpus": ["NVIDIA H100 80GB HBM3"] * 8}, "tokens_per_s": 16_000.0} | changed


def ours(*lines: dict[str, Any]) -> str:
    return published.rows(lines, ["llama31_8b_h100x16"])[0][5]


def test_ours_stands_beside_theirs_where_work_and_gpus_are_the_same():
    row = published.rows([line()], ["llama31_8b_h100x16"])[0]
    assert row[3:] == ("16 x H100", "1,562", "1,000 (abc)", "0.64")
    for how in ("actor.parallel.tp=2", 'actor.parallel={"tp":2}', "rollout.sglang.urls=[]", "sync.bucket_mb=512"):
        assert ours(line(overrides=[how])) == "1,000 (abc)"
    assert ours(line(commit="old"), line(), line(tokens_per_s=32_000.0)) == "2,000 (abc)"


@pytest.mark.parametrize(
    "changed",
    [
        {"gpus": 8},
        {"machine": {"gpus": ["NVIDIA A100"]}},
        {"machine": {"gpus": []}},
        {"dtype": "fp32"},
        {"overrides": ["rollout.sampling.max_new_tokens=64"]},
        {"overrides": ['rollout.sglang.extra_args=["--quantization","fp8"]']},
        {"overrides": ['rollout.sglang={"extra_args":[]}']},
        {"overrides": ["rollout.engine_of_another_kind=1"]},
        {"overrides": ["sync.fp8=true"]},
        {"case": "bench_S"},
    ],
)
def test_other_work_or_other_gpus_have_no_number(changed):
    assert ours(line(**changed)) == "not measured"
    assert ours() == "not measured"


@pytest.mark.procs
def test_the_command_measures_a_real_round_of_what_can_run(small, tmp_path):
    text = small.read_text().replace("    tensor parallel: {nproc: 2, actor.parallel.tp: 2}\n", "")
    small.write_text(text.replace("rounds: 3", "rounds: 1"))
    done = bench(tmp_path, "--matrix", str(small), "--history", "history.jsonl")
    assert done.code == 0, done.output
    (made,) = read_jsonl(tmp_path / "history.jsonl")
    assert len(made["rounds"]) == 1
    assert all(one["cpu_s"] > 0 and "actor_train" in one["phases"] for one in made["rounds"])
    assert json.dumps(made["versions"]).count("torch")
    assert made["cell"] == {"model": "mini", "layout": "one", "dtype": "fp32"}
    assert (tmp_path / "history.html").is_file()


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()


def test_the_matrix_of_the_docs_is_one(tmp_path):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "m.yaml").write_text(text)
    made = matrix.read_matrix(str(tmp_path / "m.yaml"))
    refused = [cell.name for cell in made.cells(starts=False) if cell.refused]
    assert {name for name in refused if "embedded" in name} == {
        f"{model}, tensor parallel, embedded, {dtype}, two teams" for model in "SM" for dtype in ("fp32", "bf16")
    }


def test_the_table_of_the_docs_has_the_published_figures():
    for one in published.figures():
        theirs = f"{one.tokens_per_s_per_gpu:,.0f}"
        row = [f"{one.system}, {one.published}", one.model, one.policy, f"{one.gpus} {one.gpu}", f"{one.mean_tokens:,}"]
        assert f"| {' | '.join([*row, f'{one.step_s:g}', theirs, 'not measured'])} |" in PAGE
