import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest

from megarl.artifacts.jsonl import JsonlWriter
from megarl.system.errors import DataError
from megarl.tracking.report import report_data, write_report
from megarl.tracking.report_runs import MAX_POINTS, load_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def make_run(folder, *, name="run", steps=5, stage="train", samples=()):
    writer = JsonlWriter(folder / "metrics.jsonl", durable=False)
    for step in range(1, steps + 1):
        metrics = {
            "critic/score/mean": step / steps,
            "timing_s/rollout": 1.0,
            "timing_s/update": 2.0,
            "odd/x": 1.0 + step,
        }
        metrics |= {"timing_s/step": 3.5, "actor/kl_loss": None if step == 2 else 0.1, "sft/loss": 1 / step}
        writer.write({"step": step, "stage": stage, "time": 0.0, **metrics})
    table = JsonlWriter(folder / "samples.jsonl", durable=False)
    for sample in samples:
        table.write({"stage": stage, **sample})
    (folder / "run.json").write_text(json.dumps({"name": name, "status": "finished", "config": {"note": name}}))
    return folder


def page_data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_is_self_contained(tmp_path):
    make_run(tmp_path)
    (tmp_path / "graph.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    page = write_report(tmp_path).read_text()
    assert not re.search(r'(src|href)\s*=\s*"?(https?:)?//', page)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert set(re.findall(r"https?://[^\"'\s]+", page)) == {"http://www.w3.org/2000/svg"}
    assert page_data(page)["graph"].startswith("data:image/svg+xml;base64,")


def test_text_of_users_cannot_become_markup(tmp_path):
    make_run(tmp_path, name=EVIL, samples=[{"step": 1, "prompt": EVIL, "response": EVIL, EVIL: EVIL, "score": 1.0}])
    page = write_report(tmp_path).read_text()
    assert EVIL not in page
    assert "<img" not in page.split("<body>")[1].split('id="data">')[1].split("</script>")[0]
    data = page_data(page)
    assert data["samples"][0]["response"] == EVIL
    assert data["runs"][0]["name"] == EVIL
    assert ".innerHTML" not in page


def test_placeholders_in_user_text_stay_text(tmp_path):
    make_run(tmp_path, samples=[{"step": 1, "prompt": "__CSS__ __DATA__", "score": 0.0}])
    assert page_data(write_report(tmp_path).read_text())["samples"][0]["prompt"] == "__CSS__ __DATA__"


def test_every_metric_is_drawn_once(tmp_path):
    data = report_data([load_run(make_run(tmp_path))])
    titles = {group["title"]: [chart["title"] for chart in group["charts"]] for group in data["groups"]}
    assert titles == {
        "Learning": ["Score"],
        "Policy": ["KL to the reference"],
        "Speed": ["Seconds per phase"],
        "Everything else": ["odd/x", "sft/loss"],
    }
    (stack,) = data["groups"][2]["charts"]
    assert [(part["label"], part["y"][0]) for part in stack["lines"]] == [("update", 2.0), ("rollout", 1.0)]
    kl = data["groups"][1]["charts"][0]["lines"][0]
    assert kl["y"] == [0.1, None, 0.1, 0.1, 0.1]


def log_steps(folder, **series):
    """Metrics of steps 1, 2, ... of a run, by their names with `__` for `/`."""
    writer = JsonlWriter(make_run(folder, steps=0) / "metrics.jsonl", durable=False)
    for step, values in enumerate(zip(*series.values(), strict=True), 1):
        metrics = {name.replace("__", "/"): value for name, value in zip(series, values, strict=True)}
        writer.write({"step": step, "stage": "train", "time": 0.0, **metrics})
    return report_data([load_run(folder)])


def test_times_within_phases_are_not_stacked_on_them(tmp_path):
    data = log_steps(tmp_path, timing_s__rollout=[3.0, 4.0], timing_s__residency=[1.0, 2.0])
    groups = {group["title"]: group["charts"] for group in data["groups"]}
    (stack,) = groups["Speed"]
    assert [part["label"] for part in stack["lines"]] == ["rollout"]
    assert [chart["title"] for chart in groups["Everything else"]] == ["timing_s/residency"]


def test_series_of_one_value_are_listed_and_not_drawn(tmp_path):
    data = log_steps(
        tmp_path, actor__lr=[1e-3] * 4, actor__entropy=[1, 2, 1, 2], my__noise=[1, 1 + 1e-7, 1, 1], val__acc=[0.5] * 4
    )
    found = {group["title"]: ([c["title"] for c in group["charts"]], group["constants"]) for group in data["groups"]}
    assert found == {
        "Learning": (["Validation accuracy"], []),  # the result is always drawn
        "Policy": (["Entropy"], [["Learning rate", "0.001"]]),
        "Everything else": ([], [["my/noise", "1"]]),
    }


def test_tiles_show_the_best_step_and_means(tmp_path):
    scores = [0.0] * 10 + [0.9] + [0.5] * 9
    accuracy = [0.2, 0.8, 0.6] + [None] * 17
    data = log_steps(
        tmp_path,
        critic__score__mean=scores,
        val__acc=accuracy,
        timing_s__step=[100.0] + [2.0] * 19,
        perf__mfu=[0.3] * 20,
    )
    tiles = {tile["label"]: tile["runs"][0] for tile in data["tiles"]}
    assert tiles["Best validation accuracy"] == {"value": 0.8, "note": "at step 2; first 0.2, last 0.6"}
    assert tiles["Score"] == {"value": pytest.approx(0.54), "note": "mean of the last 10; best 0.9 at step 11"}
    assert tiles["Step"] == {"value": 2.0, "note": "mean of 19 steps; 2 to 2"}
    assert tiles["MFU"]["value"] == pytest.approx(30)


def test_what_the_supervised_start_measured_is_before_the_first_step(tmp_path):
    writer = JsonlWriter(make_run(tmp_path) / "metrics.jsonl", durable=False)
    for stage, step in (("sft", 10), ("sft", 20), ("train", 5)):
        writer.write({"step": step, "stage": stage, "time": 0.0, "val/acc": step / 100})
    data = report_data([load_run(tmp_path)])
    (accuracy,) = [c for c in data["groups"][0]["charts"] if c["title"] == "Validation accuracy"]
    assert accuracy["lines"][0]["start"] == {"x": [10, 20], "y": [0.1, 0.2]}


def test_how_busy_the_teams_were_is_one_chart(tmp_path):
    writer = JsonlWriter(make_run(tmp_path) / "metrics.jsonl", durable=False)
    parts = {"reward/digits": 0.5, "reward/errors": 0.0, "team/train/busy": 0.9, "team/value/busy": 0.4}
    writer.write({"step": 6, "stage": "train", "time": 0.0, **parts})
    data = report_data([load_run(tmp_path)])
    charts = {chart["title"]: chart for group in data["groups"] for chart in group["charts"]}
    assert [(line["label"], line["y"]) for line in charts["Busy teams"]["lines"]] == [
        ("train", [0.9]),
        ("value", [0.4]),
    ]
    assert "Reward parts" not in charts, "a single part would only repeat the score"


TEAMS = {
    "team/draw/busy": 0.8,
    "team/draw/busy_s": 8.0,
    "team/draw/wait_s": 2.0,
    "team/draw/wait_for/train_s": 2.0,
    "team/draw/wait/weights_s": 2.0,
    "team/draw/tokens_per_s": 100.0,
    "team/train/busy": 0.3,
    "team/train/busy_s": 3.0,
    "team/train/wait_s": 7.0,
    "team/train/wait_for/draw_s": 7.0,
    "team/train/wait/samples_s": 7.0,
    "team/train/tokens_per_s": 100.0,
    "perf/bottleneck/draw": 1.0,
    "perf/bottleneck/train": 0.0,
    "store/queue/rollout/train": 4,
}


def test_who_waited_for_whom_is_a_picture_of_several_teams(tmp_path):
    writer = JsonlWriter(make_run(tmp_path) / "metrics.jsonl", durable=False)
    writer.write({"step": 0, "stage": "train", "time": 0.0, **dict.fromkeys(TEAMS, 1000.0)})  # only validates
    for step in (6, 7):
        more = {"team/train/busy_s": 3.0 + step} if step == 7 else {}
        writer.write({"step": step, "stage": "train", "time": 0.0, **TEAMS, **more})
    data = page_data(write_report(tmp_path).read_text())
    speed = {
        chart["title"]: chart for group in data["groups"] if group["title"] == "Speed" for chart in group["charts"]
    }
    assert speed["Who waited for whom"]["teams"] == [
        {"name": "draw", "work": 8.0, "waits": [["train", 2.0]]},
        {"name": "train", "work": 6.5, "waits": [["draw", 7.0]]},
    ]
    assert speed["Who waited for whom"]["bounds"] == "draw, in 100% of the steps"
    assert ["bounded by", "draw, in 100% of the steps"] in data["facts"]
    assert [line["label"] for line in speed["What teams waited for"]["lines"]] == ["draw: weights", "train: samples"]
    assert [line["label"] for line in speed["Queues of the buffer"]["lines"]] == ["rollout, for train"]
    assert [line["label"] for line in speed["Tokens of a team"]["lines"]] == ["draw", "train"]
    (rest,) = [group for group in data["groups"] if group["title"] == "Everything else"]
    assert [chart["title"] for chart in rest["charts"]] == ["odd/x", "sft/loss"]


def test_one_team_has_no_picture_of_waits(tmp_path):
    data = report_data([load_run(make_run(tmp_path))])
    assert "waits" not in {chart["kind"] for group in data["groups"] for chart in group["charts"]}
    assert "bounded by" not in dict(data["facts"])


def test_stages_have_charts_of_their_own(tmp_path):
    data = report_data([load_run(make_run(tmp_path, stage="sft"))])
    assert [(group["title"], group["short"]) for group in data["groups"]] == [
        ("Supervised start", "SFT"),
        ("Speed (supervised start)", "SFT speed"),
        ("Everything else (supervised start)", "SFT other"),
    ]


def test_long_runs_are_thinned(tmp_path):
    data = report_data([load_run(make_run(tmp_path, steps=MAX_POINTS * 2 + 1))])
    line = data["groups"][0]["charts"][0]["lines"][0]
    assert len(line["x"]) <= MAX_POINTS
    assert line["x"][-1] == MAX_POINTS * 2 + 1


def test_many_samples_are_limited_and_said_to_be(tmp_path):
    rows = [{"step": step, "prompt": "p" * 10_000, "score": 1.0} for step in range(100)]
    data = report_data([load_run(make_run(tmp_path, samples=rows))])
    assert data["samples"][0]["step"] == 0
    assert data["samples"][-1]["step"] == 99
    assert "12 of 100" in data["samplesNote"]
    assert len(data["samples"][0]["prompt"]) < 5000


def test_groups_of_training_samples_are_in_the_page(tmp_path):
    make_run(tmp_path)
    table = JsonlWriter(tmp_path / "training_samples.jsonl", durable=False)
    for step in range(1, 21):
        table.write(
            {"step": step, "stage": "train", "group": "a", "prompt": EVIL, "pieces": ["<b>"], "advantages": [1.0]}
        )
    (training,) = page_data(write_report(tmp_path).read_text())["training"]
    assert [row["step"] for row in training["rows"]] == [1, 4, 6, 9, 12, 15, 17, 20]
    assert (training["rows"][0]["pieces"], training["rows"][0]["advantages"]) == (["<b>"], [1.0])


def test_a_comparison_has_the_samples_of_all_runs_and_says_what_differs(tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        make_run(folder, name=name, samples=[{"step": 1, "prompt": name, "score": 1.0}])
        config = {"actor": {"optim": {"lr": 1e-3 if name == "a" else 2e-3}}, "seed": 1} | (
            {"only": []} if name == "b" else {}
        )
        (folder / "run.json").write_text(json.dumps({"name": name, "config": config}))
    data = page_data(write_report(tmp_path / "a", [tmp_path / "b"]).read_text())
    assert [(row["run"], row["prompt"]) for row in data["samples"]] == [("a", "a"), ("b", "b")]
    assert "run" not in data["sampleColumns"]
    assert data["differences"] == [["actor.optim.lr", ["0.001", "0.002"]], ["only", ["–", "[]"]]]


def test_runs_side_by_side(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_run(tmp_path / name, name=name, steps=4 if name == "a" else 6)
    path = write_report(tmp_path / "a", [tmp_path / "b"])
    assert path.name == "compare.html"
    score = page_data(path.read_text())["groups"][0]["charts"][0]
    assert [(line["label"], len(line["x"])) for line in score["lines"]] == [("a", 4), ("b", 6)]
    assert score["range"] == [1, 6]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [tmp_path / "x" / "1", tmp_path / "y" / "1", tmp_path / "y" / "2"]
    for number, folder in enumerate(runs):
        folder.mkdir(parents=True)
        make_run(folder, name="same" if number < 2 else "other", steps=number + 1)
    data = page_data(write_report(runs[0], runs[1:]).read_text())
    assert [run["name"] for run in data["runs"]] == ["same (x/1)", "same (y/1)", "other"]
    assert [line["label"] for line in data["groups"][0]["charts"][0]["lines"]] == ["same (x/1)", "same (y/1)", "other"]
    (step,) = [tile for tile in data["tiles"] if tile["label"] == "Step"]
    assert [entry["value"] for entry in step["runs"]] == [3.5] * 3
    assert len({run["name"] for run in page_data(write_report(runs[0], [runs[0]]).read_text())["runs"]}) == 2


@pytest.mark.skipif(shutil.which("node") is None, reason="needs a JavaScript engine")
@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0, 0.25, 0.5], ["0", "0.25", "0.50"]),
        ([1000.2, 1000.4, 1000.6], ["1000.2", "1000.4", "1000.6"]),
        ([0.0001002, 0.0001004], ["1.002e-4", "1.004e-4"]),
        ([12300, 12350, 12400], ["12.30k", "12.35k", "12.40k"]),
        ([-2, 0, 2], ["-2", "0", "2"]),
    ],
)
def test_marks_of_an_axis_differ(values, texts):
    script = (files("megarl.tracking") / "report_charts.js").read_text()
    function = re.search(r"^function tickTexts.*?^}", script, re.S | re.M)[0]
    done = subprocess.run(
        ["node", "-e", f"{function}\nconsole.log(JSON.stringify(tickTexts({values})))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout) == texts


def evaluate(names, expression):
    """The value of an expression of functions of the page's script."""
    script = (files("megarl.tracking") / "report_charts.js").read_text()
    functions = [re.search(rf"^function {name}\(.*?^}}", script, re.S | re.M)[0] for name in names]
    program = "\n".join([*functions, f"console.log(JSON.stringify({expression}))"])
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs a JavaScript engine")
def test_runs_of_which_fewer_points_are_kept_are_smoothed_alike():
    every, fourth = [*range(401)], [*range(0, 401, 4)]
    whole, thin = (
        evaluate(["ema"], f"ema({steps}, {[step / 400 for step in steps]}, 0.6, 8)") for steps in (every, fourth)
    )
    assert max(abs(whole[step] - one) for step, one in zip(fourth[5:], thin[5:], strict=True)) < 0.01
    assert evaluate(["ema"], "ema([1, 2, 3], [1, null, 3], 0.5, 1)") == [1, None, pytest.approx(2.6)]
    debiased = [1, pytest.approx(5 / 3), pytest.approx(17 / 7)]
    assert evaluate(["ema"], "ema([1, 2, 3], [1, 2, 3], 0.5, 1)") == debiased


@pytest.mark.skipif(shutil.which("node") is None, reason="needs a JavaScript engine")
def test_the_last_mark_of_an_axis_ends_inside_of_the_drawing():
    right = evaluate(["inside"], '["5", "10000"].map((text) => inside(290, text, 300) + 3.4 * text.length)')
    assert right == [pytest.approx(293.4), pytest.approx(299)]
    assert evaluate(["inside"], 'inside(150, "10000", 300)') == 150


def test_validation_is_never_smoothed(tmp_path):
    writer = JsonlWriter(tmp_path / "metrics.jsonl", durable=False)
    for step in range(60):
        writer.write({"step": step, "stage": "sft", "val/acc": step / 60, "sft/loss": 1 / (1 + step)})
    charts = {
        c["title"]: c["exact"] for g in page_data(write_report(tmp_path).read_text())["groups"] for c in g["charts"]
    }
    assert charts["Validation accuracy"]
    assert not charts["Loss"]


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        write_report(tmp_path)


def test_a_run_that_has_logged_nothing_yet(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert page_data(write_report(tmp_path).read_text())["groups"] == []
