"""`megarl plan` as a user types it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megarl import cli
from megarl.commands.plan_report import write_recipe
from megarl.config.load import load_config
from megarl.recipes.components import COMPONENTS
from megarl.rollout.sglang import checks as server_checks
from megarl.rollout.sglang import server_places
from tests.planning.planned import H100
from tests.planning.test_search import AHEAD, LARGEST, search

DOCS = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
BIG = "grpo_qwen3_8b_8gpu"
TWO_TEAMS = "placement.teams={train: {roles: [actor, reference], devices: 8}, draw: {roles: [rollout], devices: 8}}"


def run(capsys, *arguments):
    """(exit code, what was printed, what was complained about)."""
    code = cli.main(["plan", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_tables_name_phases_memory_and_hardware(capsys):
    code, shown, _ = run(capsys, BIG)
    assert code == 0
    for words in ("actor_train", "matrix products", "MFU", "fullest device", "file descriptors", "NVIDIA H100"):
        assert words in shown
    assert "does not fit" not in shown


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ([], "256 prompt and 256 response"),
        (["rollout.sampling.ignore_eos=true"], "256 prompt and 1,024 response"),
        (["--assume", "mean_tokens=600", "--assume", "prompt_tokens=90.5"], "90.5 prompt and 600 response"),
    ],
)
def test_the_lengths_that_a_plan_goes_by_stand_under_its_title(arguments, tokens, capsys):
    _, shown, _ = run(capsys, BIG, *arguments)
    said = f"assumes {tokens} tokens on average (--assume prompt_tokens=, mean_tokens=)"
    assert said in " ".join(shown.partition("rollout")[0].split())


def test_what_does_not_fit_is_said(capsys):
    code, shown, _ = run(capsys, BIG, "actor.engine.micro_batch_tokens=262144", "actor.engine.offload=false")
    assert code == 2
    assert "does not fit: the actor's update needs" in shown
    assert "actor.engine.micro_batch_tokens" in shown


def test_hints_say_what_bounds_generation_without_need_and_what_a_plan_leaves_out(capsys):
    _, shown, _ = run(capsys, AHEAD, "rollout.sglang.max_concurrency=100")
    shown = " ".join(shown.split())
    assert "hint: rollout.sglang.max_concurrency=100 limits generation: a server has 768 samples" in shown
    assert "hint: the step time is that of the busiest team; megarl simulate" in shown
    for recipe in (BIG, LARGEST):
        assert "hint" not in run(capsys, recipe)[1]


def test_a_recipe_that_is_as_fast_as_the_best_hears_so(capsys):
    """A slower one does not: the search that is read in 80 columns, below."""
    _, shown, _ = run(capsys, AHEAD, "--search", "--hardware", "h100x8x4", "--top", "1")
    assert "no plan is faster by 1%" in " ".join(shown.split())


@pytest.mark.parametrize("colocated", ["true", "false"])
def test_servers_that_have_no_room_for_a_sample_are_said(colocated, capsys):
    """0.15 x 80 GB are less than the weights."""
    keys = [BIG, f"rollout.sglang.colocated={colocated}", "rollout.sglang.memory_fraction=0.15"]
    _, shown, _ = run(capsys, *keys)
    assert "does not fit: an engine has room for 0 tokens" in " ".join(shown.split())
    _, shown, _ = run(capsys, *keys, "--json")
    assert "rollout.sglang.memory_fraction" in json.loads(shown)["does_not_fit"][0]
    _, shown, _ = run(capsys, BIG, "--json")
    assert json.loads(shown)["does_not_fit"] == []


def numbers_of(value):
    """Every mapping that holds a number which the formulas found."""
    if isinstance(value, dict):
        if value.keys() & {"value", "seconds", "bytes"} and "keys" not in value:
            yield value
        for inner in value.values():
            yield from numbers_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_of(inner)


@pytest.mark.parametrize("recipe", [BIG, "grpo_qwen3_30b_a3b_32gpu", "ppo_quickstart"])
def test_every_number_in_json_has_a_formula_that_is_derived(recipe, capsys):
    code, shown, _ = run(capsys, recipe, "--json", "--hardware", "h100")
    assert code == 0
    found = list(numbers_of(json.loads(shown)))
    assert len(found) > 20
    derived = set(re.findall(r"^\| ([A-Z]\d+) \|", DOCS.read_text(), re.MULTILINE))
    assert {one["formula"] for one in found} <= derived


def test_adapters_on_chosen_layers_have_a_plan(capsys):
    code, shown, _ = run(capsys, "grpo_quickstart", "model.lora={rank: 8, targets: [attention]}")
    assert (code, "optimizer" in shown) == (0, True)


def test_a_run_that_generates_nothing_has_no_plan(capsys):
    code, _, complaint = run(capsys, "dpo_quickstart")
    assert code == 2
    assert "do not cover runs that generate nothing" in complaint


def test_an_assumption_changes_the_plan_and_is_said(capsys):
    _, before, _ = run(capsys, BIG, "--json")
    _, after, _ = run(capsys, BIG, "--json", "--assume", "gemm_share=0.3")
    assert json.loads(after)["assumptions"]["gemm_share"] == 0.3
    step = [
        next(one["value"] for one in json.loads(text)["numbers"] if one["name"] == "step") for text in (before, after)
    ]
    assert step[0] < step[1]


def test_assumptions_are_listed_and_documented(capsys):
    _, shown, _ = run(capsys, BIG, "--assumptions")
    names = [line.split()[0] for line in shown.splitlines()[1:]]
    assert "gemm_share" in names
    assert re.search(r"^prompt_tokens +0 +0  0: half of data.max_prompt_tokens$", shown, re.MULTILINE)
    assert re.search(r"^mean_tokens +0 +0  0: a quarter of the longest response, or", shown, re.MULTILINE)
    text = DOCS.read_text()
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([BIG, "--hardware", "h200x8x2"], "cluster.nproc=16 cluster.nnodes=2"),
        ([AHEAD, "--hardware", "h100x8x3"], "change placement.teams, cluster.nproc and cluster.nnodes together"),
        ([BIG, "--hardware", "h300"], "unknown kind of hardware"),
        ([BIG, "--hardware", "cpux2x3"], "only this machine can be measured"),
        ([BIG, "--assume", "speed=3"], "no assumption has this name"),
        ([BIG, "--search", "--top", "0"], "--top"),
        ([BIG, "--top", "3"], "add --search"),
        ([BIG, "--hardware", "h100x8"], "write h100x8x1"),
        ([BIG, "actor.parallel.tp=3"], "actor.parallel.tp: tp 3 does not divide"),
        ([BIG, "actor.mini_batch_size=6"], "actor.mini_batch_size"),
        ([BIG, "rollout.sampling.max_new_tokens=65536"], "exceed the model's 40960 positions"),
        ([BIG, "rollout.sglang.tp_size=2"], "set rollout.sglang.servers=4"),
        (
            [BIG, TWO_TEAMS, "cluster={nproc: 16, nnodes: 2}", "rollout.sglang={colocated: false, servers: 16}"],
            "set placement.teams.draw.devices=16 cluster.nproc=24 cluster.nnodes=3, or rollout.sglang.servers=8",
        ),
        ([BIG, "--assume", "mean_tokens=5000"], "up to 1024"),
        ([BIG, "--hardware", "h100x8x1", "rollout.sglang.colocated=false"], "8 for workers and the others for servers"),
        ([BIG, "rollout.sampling.max_new_tokens=65536", "--search"], "exceed the model's 40960 positions"),
        ([BIG, "--hardware", "h100x8x4x2"], "did you mean h100x8x4"),
        ([BIG, "--write", "/tmp/never.yaml"], "--search"),
        (["srpo_metaworld"], "simulators"),
        (["no_such_recipe"], "no_such_recipe"),
        ([BIG, "model.path=nobody/nothing"], "sizes are unknown: its config"),
        ([BIG, "--hardware", "a100x1x1", "--search"], "fits into memory"),
    ],
)
def test_mistakes_are_the_users_to_fix(arguments, part, capsys):
    code, _, complaint = run(capsys, *arguments)
    assert code == 2
    assert part in complaint


def test_the_memory_that_a_recipe_names_is_that_of_the_plan(capsys):
    code, shown, _ = run(capsys, BIG, "cluster.device_memory_gb=40")
    assert code == 2
    assert "of 40 GB" in " ".join(shown.split())


def test_what_nearly_fills_a_device_is_said(capsys):
    code, shown, _ = run(capsys, BIG, "rollout.sglang.memory_fraction=0.95")
    assert code == 0
    assert "tight: generation holds more than 90% of a device" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["actor.parallel.tp=3"], "it cannot run: tp 3 does not divide"),
        (["rollout.sglang.servers=100"], "it cannot run: 100 servers of 1 rank cannot share the GPUs of 8 workers"),
        (["placement.teams={train: {roles: [actor], devices: 3}}"], "it cannot run: no team has the role reference"),
        (["cluster.nproc=16"], "for 16 devices on 1 machine"),
        (["rollout.sglang.memory_fraction=0.2"], "does not fit"),
    ],
)
def test_a_search_says_what_the_recipe_itself_takes(keys, said, tmp_path, capsys):
    """Whatever it is: the search takes its place."""
    file = tmp_path / "best.yaml"
    where = ["--search", "--top", "1", "--hardware", "h100x8x1", "--write", str(file)]
    code, shown, _ = run(capsys, BIG, *keys, *where)
    assert code == 0
    (line,) = [line for line in shown.splitlines() if line.startswith("the recipe without changes: ")]
    assert said in line
    assert file.is_file()


def test_a_search_shows_the_recipes_own_seconds_beside_its_best(capsys):
    _, shown, _ = run(capsys, BIG, "--json")
    step = next(one["value"] for one in json.loads(shown)["numbers"] if one["name"] == "step")
    _, shown, _ = run(capsys, BIG, "--search", "--top", "1")
    assert f"the recipe without changes: {step:.3g} s a step" in shown
    assert shown.endswith("fits\n")


def test_a_plan_does_not_ask_what_this_machine_has(monkeypatch, capsys):
    """Four GPUs here say nothing of the sixteen that are meant."""
    for module in (server_checks, server_places):
        monkeypatch.setattr(module, "nvidia_devices", lambda: 4)
    keys = ["rollout.sglang.colocated=false", "rollout.sglang.memory_fraction=null"]
    assert run(capsys, BIG, *keys, "--hardware", "h100x16x1")[0] == 0
    assert cli.main(["launch", BIG, *keys, "--slurm", "--dry-run"]) == 0
    assert cli.main(["train", BIG, *keys, "--dry-run"]) == 2


@pytest.mark.parametrize(
    "keys",
    [
        ["model.dtype=fp32"],  # most of it is rough
        ["rollout.sglang.memory_fraction=null", "actor.engine.offload=false"],  # SGLang's choice
        ["rollout.sglang.extra_args=[--quantization,fp8]", "rollout.sglang.memory_fraction=0.2"],
    ],
)
def test_what_is_not_certain_is_no_refusal(keys, capsys):
    code, shown, _ = run(capsys, BIG, *keys)
    assert code == 0
    assert "may not fit" in shown
    assert cli.main(["train", BIG, *keys, "--dry-run"]) == 0


def test_a_recipe_for_h200s_is_planned_for_them(capsys):
    _, shown, _ = run(capsys, BIG, "cluster.device_memory_gb=141")
    assert "on h200x8x1" in shown
    _, shown, _ = run(capsys, BIG, "cluster.device_memory_gb=96")
    assert "on h100-96gbx8x1" in shown


@pytest.mark.parametrize("keys", [["memory_fraction=0.2"], ["memory_fraction=0.3", "actor.engine.offload=false"]])
def test_servers_without_room_are_refused_by_dry_run_and_plan(keys, capsys):
    keys = [BIG, f"rollout.sglang.{keys[0]}", *keys[1:]]
    assert run(capsys, *keys)[0] == 2
    assert cli.main(["train", *keys, "--dry-run"]) == 2
    complaint = capsys.readouterr().err
    assert "rollout.sglang.memory_fraction: a server has room for 0 tokens" in complaint
    least = float(re.search(r"allowed: (0\.\d+) or more", complaint)[1])
    keys[1] = f"rollout.sglang.memory_fraction={least}"
    assert cli.main(["train", *keys, "--dry-run"]) == 0


def test_a_dry_run_and_a_plan_say_the_same_of_memory(capsys):
    """With the servers' cache, which is most of it here."""
    keys = [BIG, "rollout.sglang.memory_fraction=0.95"]
    _, shown, _ = run(capsys, *keys, "--json")
    fullest = next(one["value"] for one in json.loads(shown)["numbers"] if one["name"] == "fullest device")
    cli.main(["train", *keys, "--dry-run"])
    shown = capsys.readouterr().out
    assert f"generation may need {fullest:.1f} GB" in shown
    assert "[warn] memory: rollout.sglang.memory_fraction" in shown
    assert float(re.search(r"peak \(generation\) +([0-9.]+)", shown)[1]) == pytest.approx(fullest, abs=0.06)


@pytest.mark.parametrize("recipe", ["grpo_quickstart", BIG])
def test_the_memory_of_a_plan_adds_up_and_is_that_of_the_dry_run(recipe, capsys, monkeypatch):
    """On a CPU with a cache that takes more than all else, and on GPUs."""
    monkeypatch.setattr("megarl.planning.hardware.measure_cores", lambda: (2e11, 9e10, 1e10))
    keys = [recipe] if recipe == BIG else [recipe, "rollout.sampling.n=4096"]
    _, shown, _ = run(capsys, *keys, "--json")
    plan = json.loads(shown)
    for one in plan["memory"]:
        assert sum(term["bytes"] for term in one["terms"]) == pytest.approx(one["bytes"])
    fullest = next(one["value"] for one in plan["numbers"] if one["name"] == "fullest device")
    assert fullest == pytest.approx(max(one["bytes"] for one in plan["memory"]) / 1e9)
    cli.main(["train", *keys, "--dry-run"])
    peaks = re.findall(r"peak \(.*\) +([0-9.]+)", capsys.readouterr().out)
    assert max(map(float, peaks)) == pytest.approx(fullest, abs=0.001)


def written(tmp_path, capsys, *arguments):
    """The recipe that a search wrote, as text, and its path."""
    file = tmp_path / "best.yaml"
    code, _, complaint = run(capsys, *arguments, "--search", "--write", str(file))
    assert (code, complaint) == (0, "")
    return file, file.read_text()


def test_the_best_is_written_as_a_recipe_that_a_dry_run_accepts(tmp_path, capsys):
    file, text = written(tmp_path, capsys, BIG, "--hardware", "h100x8x2")
    assert f"extends: {BIG}\n" in text
    assert "nproc: 16" in text
    assert "algorithm" not in text
    accepts(capsys, file)


def accepts(capsys, file):
    """Assert that a dry run has nothing to say against a recipe."""
    assert cli.main(["train", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "0 fail" in shown
    assert re.findall(r"\[warn\] (?!servers: rollout.sglang.python)", shown) == []


def test_overrides_are_part_of_what_is_written(tmp_path, capsys):
    file, _ = written(tmp_path, capsys, BIG, "--hardware", "h100x8x2", "data.batch_size=256")
    assert load_config(file, components=COMPONENTS).data.batch_size == 256


def test_a_recipe_of_ones_own_is_named_from_where_the_file_is(tmp_path, capsys):
    (tmp_path / "recipes").mkdir()
    own = tmp_path / "recipes" / "mine.yaml"
    own.write_text("extends: grpo_qwen3_8b_8gpu\ndata: {batch_size: 64}\nactor: {mini_batch_size: 64}\n")
    (tmp_path / "found").mkdir()
    file, text = written(tmp_path / "found", capsys, str(own))
    assert "extends: ../recipes/mine.yaml\n" in text
    assert load_config(file, components=COMPONENTS).data.batch_size == 64


def test_teams_that_are_gone_are_replaced(tmp_path, capsys):
    """The recipe's teams take turns in one team where that is faster."""
    own = tmp_path / "mine.yaml"
    teams = "{learn: {roles: [actor, rollout], devices: 4}, judge: {roles: [reference], devices: 4}}"
    own.write_text(
        "extends: grpo_qwen3_8b_8gpu\nrollout: {engine: embedded}\nlaunch: {launcher: ray}\n"
        f"placement: {{teams: {teams}}}\n"
    )
    file, text = written(tmp_path, capsys, str(own))
    config = load_config(file, components=COMPONENTS)
    assert (not config.placement.teams) == ("!replace" in text)
    assert cli.main(["train", str(file), "--dry-run"]) == 0


def test_teams_that_are_left_are_written_whole(tmp_path):
    """A mapping that replaces another inherits nothing of it."""
    own, after = tmp_path / "mine.yaml", tmp_path / "after.yaml"
    draw = "draw: {roles: [rollout], devices: 1}"
    teams = "{train: {roles: [actor], devices: 2}, frozen: {roles: [reference], devices: 1}, " + draw + "}"
    own.write_text(f"extends: grpo_async_quickstart\ncluster: {{nproc: 4}}\nplacement: {{teams: !replace {teams}}}\n")
    teams = "{train: {roles: [actor, reference], devices: 2}, draw: {roles: [rollout], devices: 2}}"
    after.write_text(f"extends: mine.yaml\nplacement: {{teams: !replace {teams}}}\n")
    best = search("grpo_async_quickstart", "model.dtype=bf16", hardware=replace(H100, per_node=4)).run(1).best[0]
    config = load_config(after, components=COMPONENTS)

    write_recipe(tmp_path / "best.yaml", str(own), replace(best, config=config))

    assert load_config(tmp_path / "best.yaml", components=COMPONENTS).placement == config.placement
    assert {one.name for one in tmp_path.iterdir()} == {"mine.yaml", "after.yaml", "best.yaml"}


def test_an_existing_file_is_not_written_over(tmp_path, capsys):
    file = tmp_path / "best.yaml"
    file.write_text("mine\n")
    code, _, complaint = run(capsys, BIG, "--search", "--write", str(file))
    assert (code, file.read_text()) == (2, "mine\n")
    assert "file already exists" in complaint


def test_a_search_is_read_in_80_columns_and_its_best_is_a_recipe(capsys, monkeypatch, tmp_path):
    """Layouts slower than the best are not held against memory, so that what does not fit are at least so many."""
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "best.yaml"
    _, shown, _ = run(capsys, LARGEST, "--search", "--top", "3", "--hardware", "h100x8x4", "--write", str(file))
    assert re.search(r"at least \d+ do not fit", " ".join(shown.split()))
    assert re.search(r"│ 32 together, 8 servers tp4, shared +│", shown)
    assert "no plan is faster" not in " ".join(shown.split())
    assert len(shown.splitlines()) < 24
    assert f"extends: {LARGEST}\n" in file.read_text()
    assert "sp:" not in file.read_text()  # mixtures split their sequences whatever it says
    accepts(capsys, file)


def test_a_search_as_json(capsys):
    code, shown, _ = run(capsys, BIG, "--search", "--top", "3", "--json")
    found = json.loads(shown)
    assert code == 0
    assert len(found["best"]) == 3
    assert found["best"][0]["layout"]["tp"] >= 1
