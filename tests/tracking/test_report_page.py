"""The report in a headless Chromium: nothing is clipped, no error is logged, and its controls work."""

import json

import pytest

from megarl.artifacts.jsonl import JsonlWriter
from megarl.tracking.report import write_report
from tests.tracking.browser import BROWSER, open_page

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium-headless-shell")

# Texts that reach out of the drawing or the card that they are in, or of the window.
CLIPPED = """[...document.querySelectorAll("svg.plot text, .card h3, .card .now, .card .key, .tile *, .constants span")]
  .filter((node) => {
    if (!node.textContent.trim() || !node.getClientRects().length) return false;
    const box = node.getBoundingClientRect();
    const around = node.closest("svg.plot, .card, .tile, section").getBoundingClientRect();
    return box.left < around.left - 1 || box.right > around.right + 1 || box.top < around.top - 1 ||
      box.bottom > around.bottom + 1 || node.scrollWidth > node.clientWidth + 1 && node.clientWidth > 0;
  }).map((node) => node.textContent)"""


@pytest.fixture(scope="module")
def page():
    with open_page() as opened:
        yield opened


def make_run(folder, name="run", steps=40):
    """A run with a slow first step, constants, several scales and a supervised start."""
    folder.mkdir(exist_ok=True)
    writer = JsonlWriter(folder / "metrics.jsonl", durable=False)
    for step in (20, 40, 60):
        writer.write({"step": step, "stage": "sft", "val/acc": step / 100, "sft/loss": 1 / step})
    for step in range(1, steps + 1):
        metrics = {
            "critic/score/mean": step / steps,
            "val/acc": 0.6 + step / 200,
            "actor/lr": 1e-3 if step < 9 else 1.25e-4,
        }
        metrics |= {"timing_s/rollout": 90.0 if step == 1 else 1.0, "timing_s/a_phase_with_a_long_name_of_its_own": 2.0}
        metrics |= {"perf/throughput": 1234567.8 + step, "actor/entropy": 1.0, "perf/mfu": 0.31 + step / 1e4}
        metrics |= {"reward/a_part": step, "reward/another": -step, "timing_s/step": 93.0 if step == 1 else 3.0}
        metrics |= {"a/metric/whose/name_is_so_long_that_a_narrow_window_has_no_room_for_it": step}
        metrics |= {"actor/kl_loss": 10.0 ** (step % 4 - 3)}
        writer.write({"step": step, "stage": "train", **metrics})
    samples = JsonlWriter(folder / "samples.jsonl", durable=False)
    for step in (20, 40):
        samples.write(
            {"step": step, "stage": "train", "prompt": "p " * 200, "response": "r", "answer": "a", "score": 1.0}
        )
    groups = JsonlWriter(folder / "training_samples.jsonl", durable=False)
    for score in (1.0, 0.0):
        row = {
            "group": "a",
            "prompt": "p",
            "score": score,
            "advantage": 3 * score - 1.5,
            "tokens": 2,
            "pieces": ["x", "y"],
        }
        row |= {"advantages": [row["advantage"], None], "ages": [3, None]}
        groups.write({"step": 1, "stage": "train", **row})
    (folder / "run.json").write_text(json.dumps({"name": name, "status": "finished"}))
    (folder / "config.yaml").write_text("name: run")
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="80"><text x="9" y="40">rollout</text></svg>'
    (folder / "graph.svg").write_text(drawing)
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    return f"file://{write_report(make_run(tmp_path_factory.mktemp('run')))}"


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])
def test_no_text_is_clipped_and_no_error_is_logged(page, address, width, dark):
    page.show(address, width, dark=dark)
    page.value("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    page.frames()
    assert page.value(CLIPPED) == []
    assert page.value("document.documentElement.scrollWidth") == width
    assert page.errors == []


def card(title):
    """JavaScript for the card of a chart."""
    return f"[...document.querySelectorAll('.card')].find((card) => card.textContent.startsWith('{title}'))"


def test_charts_show_the_steps_that_are_dragged_over(page, address):
    page.show(address, 1400)
    box = f"{card('Score')}.querySelector('svg.plot').getBoundingClientRect()"
    left, top, width = page.value(f"(({{ left, top, width }}) => [left, top, width])({box})")
    page.drag((left + width * 0.5, top + 90), (left + width * 0.75, top + 90))
    first, last = page.value("state.zoom.train")
    assert 15 < first < 22 < 27 < last < 33
    rows = page.value("csvOf(DATA.groups[0].charts[0])").split()
    assert rows[0] == "stage,step,mean"
    assert [row.split(",")[1] for row in rows[1:]] == [str(step) for step in range(1, 41) if first <= step <= last]
    page.value("document.getElementById('reset').click()")
    assert page.value("state.zoom") == {}
    rows = page.value("csvOf(DATA.groups[0].charts[1])").split()
    assert rows[1:5] == ["sft,20,0.2", "sft,40,0.4", "sft,60,0.6", "train,1,0.605"]
    assert page.errors == []


def test_one_slow_step_does_not_flatten_an_axis_and_is_marked(page, address):
    page.show(address, 1400)
    marks = f"[...{card('Seconds per phase')}.querySelectorAll('.outlier title')].map((mark) => mark.textContent)"
    assert page.value(marks) == ["92 s at step 1"]


def test_an_axis_becomes_logarithmic(page, address):
    page.show(address, 1400)
    page.value(f"{card('KL to the reference')}.querySelector('button').click()")
    texts = f"[...{card('KL to the reference')}.querySelectorAll('svg.plot text')].map((text) => text.textContent)"
    assert {"0.001", "0.01", "0.1", "1", "nats per token, logarithmic"} <= set(page.value(texts))


@pytest.mark.parametrize("width", [1400, 420])
def test_navigation_is_one_row_that_reaches_every_section(page, address, width):
    page.show(address, width)
    links = "[...document.querySelectorAll('nav a')]"
    sections = page.value("[...document.querySelectorAll('section')].map((section) => section.id)")
    assert page.value(f"{links}.map((link) => link.hash.slice(1))") == sections
    assert page.value(f"new Set({links}.map((link) => link.offsetTop)).size") == 1
    page.value("document.documentElement.style.scrollBehavior = 'auto'")
    page.value(f"{links}.find((link) => link.hash === '#samples').click()")
    page.frames()
    assert 0 <= page.value("document.getElementById('samples').getBoundingClientRect().top") < 900


def test_a_narrow_window_shows_the_score_of_a_sample_and_the_graph_at_its_size(page, address):
    page.show(address, 420)
    box = page.value("(({ left, right }) => [left, right])(document.querySelector('.score').getBoundingClientRect())")
    assert 0 < box[0] < box[1] < 420
    page.until("document.querySelector('.graph img').complete")
    assert page.value("document.querySelector('.graph img').clientWidth") == 900


def test_tokens_have_the_colours_of_what_is_chosen(page, address):
    page.show(address, 1400)
    tokens = "[...document.querySelectorAll('.tokens span')].map((token) => getComputedStyle(token).backgroundColor)"
    by_advantage = page.value(tokens)
    assert len(set(by_advantage)) == 3  # of a positive, a negative, and none
    assert page.value("[...document.querySelectorAll('.group .score')].map((score) => score.textContent)") == ["1", "0"]
    page.value("[...document.querySelectorAll('#groups button')].find((one) => one.textContent === 'age').click()")
    assert len(set(page.value(tokens))) == 2
    assert page.value("document.querySelector('.tokens span').title") == "advantage 1.5, age 3"
    assert page.errors == []


def test_legends_show_the_dashes_of_their_lines(page, tmp_path):
    runs = [make_run(tmp_path / name, name) for name in ("a", "b")]
    page.show(f"file://{write_report(runs[0], runs[1:])}", 1400)
    lines = f"[...{card('Reward parts')}.querySelectorAll('.legend line')]"
    assert page.value(f"{lines}.map((line) => line.getAttribute('stroke-dasharray'))") == ["none", "5 3", "none", "5 3"]
    assert page.value(CLIPPED) == []
    assert page.errors == []
