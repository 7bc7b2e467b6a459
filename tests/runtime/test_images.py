"""Runs whose prompts have images, by PPO after a supervised phase: killed, stopped by a bad image, and gone on to the
numbers of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.architectures.vision_language import FAMILIES
from megarl.recipes.shapes import make_rows
from tests import forked
from tests.models.vlm_tiny import config_of
from tests.runtime import harness

pytestmark = [pytest.mark.procs, pytest.mark.timeout(600)]

REWARD = '''
import time
from pathlib import Path

HERE = Path(__file__).parent


def first_letter(samples, images):
    """A score that differs between samples, and that has seen the pictures; after step 1 it waits to be killed."""
    while (HERE / "hold").exists() and (HERE / "run/checkpoints/step_1/meta.json").exists():
        time.sleep(0.05)
    return [
        {"overall": (sum(map(ord, s["response"])) % 7 + float(own[0].getpixel((3, 3))[0] > 128 if own else 0)) / 8}
        for s, own in zip(samples, images, strict=True)
    ]
'''
#: The recipe's model with as few layers as both kinds of the encoder's blocks need.
SHALLOW = (
    "model.hf_config.text_config.num_hidden_layers=1",
    "model.hf_config.vision_config={depth: 2, fullatt_block_indexes: [1]}",
)
#: Numbers of rows: one batch each of three steps.
BATCH, STEPS = 4, 3
CUT = 5


def write_rows(folder: Path) -> None:
    """Files of pictures, rows that name them, one with a video of them, and one that has none."""
    rows = make_rows(count=BATCH * STEPS)
    for number, row in enumerate(rows):
        (folder / f"{number}.png").write_bytes(row["images"][0])
        row["images"] = [f"{number}.png"]
    rows[0] |= {"images": None, "prompt": "n?"}
    rows[2] |= {"images": None, "videos": [["2.png", "3.png", "4.png"]], "prompt": "<video>n?"}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "cold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:CUT]))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    (folder / "score.py").write_text(REWARD)


def settings(folder: Path) -> list[str]:
    return [
        f"data.train_files=[{folder}/rows.jsonl]",
        f"data.val_files=[{folder}/held_out.jsonl]",
        f"data.image_dir={folder}",
        "data.loader_kwargs={}",
        "data={video_key: videos, video_min_pixels: 1024, video_max_pixels: 1024}",
        "model.hf_config.video_token_id=21",
        *SHALLOW,
        f"data.batch_size={BATCH}",
        f"reward={{name: {folder}/score.py:first_letter, timeout_s: 180}}",
        "rollout.sampling={n: 4, temperature: 1.0, max_new_tokens: 3}",
        "actor.engine={micro_batch_tokens: 64}",
        "actor.optim.lr=1e-3",
        "validation.every=2",
        "algorithm={pipeline: ppo, advantage: {name: gae}}",
        "critic.engine={micro_batch_tokens: 64}",
        f"sft={{steps: 2, eval_every: 2, stop_at_accuracy: null, train_files: [{folder}/cold.jsonl]}}",
        f"trainer={{steps: {STEPS}, save_every: 1}}",
        "cluster={nproc: 1, threads: 1, timeout_s: 200}",
        "tracking={mlflow: false, report: false}",
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    write_rows(folder)
    harness.run(Path("grpo_shapes_quickstart"), folder / "run", *settings(folder))
    return folder / "run"


@pytest.fixture(scope="module")
def whole(run: Path) -> dict[int, dict[str, float]]:
    return harness.metrics(run)


def test_policy_and_critic_learn_after_the_supervised_phase(whole):
    for step in range(1, STEPS + 1):
        assert min(whole[step]["critic/grad_norm"], whole[step]["actor/grad_norm"]) > 0


@pytest.mark.parametrize("export", [False, True], ids=["run folder", "export"])
def test_eval_counts_as_the_run_did_and_shows_what_the_model_saw(run, whole, export, tmp_path):
    given = [run]
    if export:  # as any other model
        given = [run / "config.yaml", f"model.path={run}/hf", "model.hf_config=null", "model.tokenizer=null"]
    ended = forked.run(["eval", *given, "tracking.report=true", "--run-dir", tmp_path / "eval"], tmp_path)
    assert ended.code == 0, ended.output[-3000:]
    numbers = json.loads((tmp_path / "eval/metrics.jsonl").read_text())
    for name in ("acc", "prompts", "samples", "counting/acc", "counting/prompts", "left/acc", "left/prompts"):
        assert numbers[f"val/{name}"] == whole[STEPS][f"val/{name}"], name
    rows = [json.loads(line) for line in (tmp_path / "eval/samples.jsonl").read_text().splitlines()]
    shown = [name for row in rows for name in row.get("images", ())]
    assert (len(rows), len(shown)) == (2, 1), "one of the two prompts has an image"
    assert (tmp_path / "eval" / shown[0]).is_file()
    assert "data:image/png;base64," in (tmp_path / "eval/report.html").read_text()


@pytest.mark.campaign("kills")  # as a run that a damaged image stops, below
def test_a_killed_run_goes_on_to_the_same_numbers(whole, tmp_path):
    assert killed(tmp_path) == whole


def killed(folder: Path, *overrides: str) -> dict[int, dict[str, float]]:
    """The numbers of a run that is killed after its first step, and goes on."""
    write_rows(folder)
    (folder / "hold").touch()
    process = harness.start(Path("grpo_shapes_quickstart"), folder / "run", *settings(folder), *overrides)
    harness.wait_for(lambda: (folder / "run/checkpoints/step_1/meta.json").is_file(), process)
    harness.kill(harness.workers(folder / "run")[0])
    assert "SIGKILL" in harness.finish(process)
    (folder / "hold").unlink()
    return harness.train("grpo_shapes_quickstart", folder / "run", *settings(folder), *overrides)


def model_of(kind: str) -> list[str]:
    """Settings of a tiny model of this family."""
    raw = config_of(kind, vocab_size=36)
    raw |= {"vision_start_token_id": 4, "image_token_id": 5, "vision_end_token_id": 6, "video_token_id": 21}
    raw["vision_config"] |= {"patch_size": 8} | ({"window_size": 32} if kind == "qwen2_5_vl" else {})
    # null first: a mapping is merged into the recipe's
    replays = f"rollout.replay_routes={str('num_experts' in raw['text_config']).lower()}"
    words = "model.tokenizer=chars:[#]nl?rgb01234.+-=<> secod56789", "data.max_prompt_tokens=64"  # also times of frames
    return ["model.hf_config=null", f"model.hf_config={json.dumps(raw)}", replays, *words]


@pytest.mark.campaign("families")
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_a_killed_run_of_each_family_goes_on_to_the_same_numbers(kind, tmp_path):
    for folder in ("whole", "killed"):
        (tmp_path / folder).mkdir()
    write_rows(tmp_path / "whole")
    model = model_of(kind)
    given = "grpo_shapes_quickstart", tmp_path / "whole" / "run", *settings(tmp_path / "whole"), *model
    whole = harness.train(*given)
    assert max(whole) == STEPS
    assert killed(tmp_path / "killed", *model) == whole


@pytest.mark.campaign("families")
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_context_parallel_ranks_reach_the_numbers_of_one_process(kind, tmp_path):
    """Rewards are of the same tokens; the others to what rounding leaves."""
    numbers = []
    for nproc in (1, 2):
        folder = tmp_path / str(nproc)
        folder.mkdir()
        write_rows(folder)
        layout = [f"cluster.nproc={nproc}", f"actor.parallel.cp={nproc}"]
        numbers.append(
            harness.train("grpo_shapes_quickstart", folder / "run", *settings(folder), *model_of(kind), *layout)
        )
    names = "critic/score/max", "critic/returns/mean", "critic/grad_norm", "actor/grad_norm"
    for step in range(1, STEPS + 1):
        one, two = ([each[step][name] for name in names] for each in numbers)
        assert two == pytest.approx(one, rel=1e-3, abs=1e-6), step


def test_a_run_whose_image_was_damaged_names_it_and_goes_on_when_it_is_whole_again(whole, tmp_path):
    """Threads read ahead here, and not in `whole`: they change no number, and step 1 ends before the damage counts."""
    write_rows(tmp_path)
    given = [*settings(tmp_path), "data.loader_workers=2"]
    bad = tmp_path / f"{CUT}.png"
    good = bad.read_bytes()
    bad.write_bytes(good[:-30])  # its first bytes, which a start reads, are those of an image
    process = harness.start(Path("grpo_shapes_quickstart"), tmp_path / "run", *given)
    output = harness.finish(process)
    assert process.returncode == 2, output[-3000:]
    assert f"rows.jsonl:{CUT + 1}: column 'images': {bad}" in output
    assert (tmp_path / "run/checkpoints/step_1/meta.json").is_file(), "nothing is lost"
    bad.write_bytes(good)
    assert harness.train("grpo_shapes_quickstart", tmp_path / "run", *given) == whole
