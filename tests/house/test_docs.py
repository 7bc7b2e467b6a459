"""Code and commands in the documentation are those of this version."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megarl.benchmarks.matrix import read_matrix
from megarl.cli import build_parser
from megarl.config.fields import find_key, iter_keys
from megarl.config.load import load_config, recipe_names
from megarl.launchers.site import with_site
from megarl.planning.hardware import read_hardware
from megarl.recipes.components import COMPONENTS
from megarl.system.errors import ConfigError
from tests.campaigns import CAMPAIGNS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Commands without the arguments that they need, as prose names them; and an error's text.
NAMED = [
    f"megarl{name}" for name in ("", " --help", " sft", " eval", " train", " generate", " launch", " status", " cancel")
] + [
    *("megarl convert", "megarl report", "megarl plan", "megarl simulate", "megarl init", "megarl doctor parity"),
    *("megarl launch --kubernetes", "megarl train --dry-run", "megarl train --launcher ray"),
    "megarl needs Python 3.11 or newer",
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def code_with(text: str, page: str) -> str:
    """The one block of Python on a page that holds `text`."""
    (source,) = (block for block in blocks(ROOT / "docs" / page, "python") if text in block)
    return source


WORDS = "".join(page.read_text(encoding="utf-8") for page in PAGES)


def quoted(page: Path) -> list[str]:
    """Return the quotes in a page's prose that are of this version."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(one.split()) for one, earlier in re.findall(r"`([^`]+)`( of commit)?", text) if not earlier]


def lines_of(page: Path) -> list[str]:
    """Lines of a page's blocks of commands, and what its prose quotes, without comments, prompts and variables."""
    text, found = page.read_text(encoding="utf-8"), quoted(page)
    for language, block in FENCE.findall(text):
        if language in ("", "bash"):
            joined = re.sub(r"\\\n *", "", block)
            values = {name: value.strip('"') for name, value in re.findall(r'^([A-Z]+)=(".*"|\S+)', joined, re.M)}
            found += re.sub(r"\$([A-Z]+)", lambda name, values=values: values.get(name[1], ""), joined).splitlines()
    return [re.sub(r"^(\$ |[A-Z_]+=\S+ +|\.venv/bin/)+", "", line.partition(" #")[0].strip()) for line in found]


def commands(page: Path) -> list[list[str]]:
    """What a page says after `megarl`, without what may be left out, and without commands that it only names."""
    lines = [re.sub(r" \[(--|key)[^]]*\]|\\?\|.*", "", line) for line in lines_of(page)]
    found = [shlex.split(line)[1:] for line in lines if line.startswith("megarl ") and line not in NAMED]
    return [command for command in found if command]


def recipes_for(named: str) -> list[str]:
    """The recipe of a command; where the page leaves it to the reader, recipes of several kinds."""
    if named in recipe_names() or named.startswith("benchmarks/"):
        return [named]
    return ["grpo_quickstart", "grpo_async_quickstart", "srpo_reach_quickstart", "dpo_quickstart"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood_and_their_keys_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parser = build_parser()
    for command in commands(page):
        try:
            arguments, rest = parser.parse_known_args(command)
        except SystemExit:
            raise AssertionError(command) from None
        assert not [text for text in rest if text.startswith("-")], command
        overrides = [text for text in [*getattr(arguments, "overrides", []), *rest] if "=" in text]
        overrides = [re.sub("=(S|STEPS)$", "=1", text) for text in overrides]
        problems = []
        for recipe in recipes_for(getattr(arguments, "recipe", None) or "RECIPE"):
            try:
                load_config(recipe, overrides, components=COMPONENTS)
            except ConfigError as problem:
                problems.append(problem)
            else:
                break
        else:
            raise AssertionError(command, problems)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_scripts_and_targets_of_make_exist(page: Path) -> None:
    rules = re.findall(r"^([^\s:=#]+(?: [^\s:=#]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rules = [name for rule in rules for name in rule.split()]
    for line in lines_of(page):
        program, *rest = line.split() or [""]
        arguments = [text for text in rest if "=" not in text and not text.startswith("-") and text != "..."]
        if program == "make":
            for target in arguments:
                target = target.replace(".venv/.installed", "$(STAMP)")
                rule = re.sub(r"^campaign-(torch|megatron)-.*", r"campaign-\1-%", target)
                known = [*(f"campaign-{name}" for name in (*CAMPAIGNS, "NAME")), *rules]
                assert rule in known, line
        elif program == "python" and rest[:1] == ["-m"] and re.match(r"(megarl|tests).*\w$", rest[1]):
            assert importlib.util.find_spec(rest[1]), line
        elif program == "python" and rest and rest[0].startswith("tools/"):
            assert (ROOT / rest[0]).is_file(), line


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "other_trainers"], ids=lambda page: page.name)
def test_keys_that_the_prose_names_exist(page: Path) -> None:
    """Words like `actor.optim.lr`, with or without a value, whose first part is a section of recipes."""
    sections = {key.path for key in iter_keys() if key.section is not None and "." not in key.path}
    for line in quoted(page):
        if not (found := re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)(=.*)?", line)):
            continue
        first, *more = found[1].split(".")
        if found[1] in ("reference.next", "start.next"):  # files of a run folder
            continue
        if found[1] == "reward_model.ground_truth":  # a column of other trainers' data
            continue
        if first in sections and more[-1] not in ("py", "yaml", "md", "json", "jsonl", "csv", "html"):
            assert find_key((first, *more)), line


def small_reward_model(folder: Path) -> None:
    """A model that scores text, as `megarl train reward_model_quickstart` exports one."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from megarl.data.tokenizer import character_tokenizer

    tokenizer = character_tokenizer("0123456789+-*/=.")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        num_labels=1,
        pad_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


#: Small uses of what pages define and no other test takes from them, by name.
USES: dict[str, Callable[[Any], object]] = {
    "trl": lambda f: f(["1+1="], [[{"role": "assistant", "content": " 2"}]], answer=["2"]) == [1.0],
    "compute_score": lambda f: asyncio.run(f("sums", " 2", "2")) == 1.0,
    "graded": lambda f: f(["2", "2"], ["2", "2"], [{"style": "rule"}, {}]) == [1.0, 0.0],
    "half": lambda f: f(0, [Image.new("RGB", (8, 4))])[0].size == (4, 4),
    "multiply": lambda f: f(3, 4) == 12,
    "accuracy": lambda pairs: pairs == [(1, 0.5)],
}


def example() -> types.ModuleType:
    """The worked example of docs/architecture.md, as the module it says it is."""
    (source,) = (text for text in blocks(ROOT / "docs/architecture.md", "python") if "def surprise" in text)
    module = types.ModuleType("my_pipeline")
    exec(compile(source, "my_pipeline.py", "exec"), module.__dict__)
    return module


def test_example_pipeline_builds_the_graph_that_the_page_shows() -> None:
    from megarl.config.run import RunConfig
    from megarl.dag.draw import as_text

    graph = example().build_graph(RunConfig(name="example"))

    shown = (ROOT / "docs/architecture.md").read_text()
    assert f"{as_text(graph).partition(chr(10) * 2)[0]}\n" in shown


def test_example_stage_takes_the_price_off_every_token() -> None:
    from megarl.data.batch import Batch, Jagged
    from megarl.system.metrics import Metrics

    worker = types.SimpleNamespace(metrics=Metrics())
    samples = Batch({"token_rewards": Jagged.from_list([[0.0, 1.0], [0.5]])})

    priced = example().token_price(worker, samples, price=0.25)

    assert priced["token_rewards"].values.tolist() == [-0.25, 0.75, 0.25]
    assert worker.metrics.result() == {"price/per_sample": 0.375}


def test_recipe_of_the_readme_is_valid(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "README.md", "yaml")
    path = tmp_path / "my_run.yaml"
    path.write_text(text)

    assert load_config(path).name == "my_run"


def test_the_site_has_every_page() -> None:
    named = re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(["index.md", *(page.name for page in PAGES[1:])])


def test_the_reward_of_the_readme_scores_its_row() -> None:
    (row,), (source,) = blocks(ROOT / "README.md", "json"), blocks(ROOT / "README.md", "python")
    names: dict[str, Any] = {}
    exec(source, names)
    samples = [{"response": said, **json.loads(row)} for said in ("132", " 132\n", "133")]
    assert names["score"](samples) == [1.0, 1.0, 0.0]


def places(source: str) -> list[str]:
    """The files that a page's code stands in: those that pages name as `FILE.py:NAME`, or that its first line names."""
    names = re.findall(r"^(?:async )?(?:def|class) (\w+)", source, re.MULTILINE)
    said = [file for file, name in re.findall(r"(\w+\.py):(\w+)", WORDS) if name in names]
    return sorted({*said, *re.findall(r"^# (\w+\.py)\n", source)} or {"of_the_page.py"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has made before: the code of all pages in its files, data, a run, a recipe of the least keys."""
    folder = tmp_path_factory.mktemp("pages")
    for page in PAGES:
        for source in blocks(page, "python"):
            for name in places(source):
                with (folder / name).open("a") as file:
                    file.write(source)
    (folder / "base.yaml").write_text(
        "name: page\nmodel: {path: some/model}\ndata: {train_files: [a], val_files: [b]}\n"
    )
    run = folder / "runs/my_run/20261122-142359"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "val/acc": 0.5}\n{"step": 2}\n')
    for page in PAGES:
        for text in blocks(page, "yaml"):
            if named := re.match(r"# (\w+\.yaml)\n", text):
                (folder / named[1]).write_text(text)
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "tutorials"], ids=lambda page: page.name)
def test_python_of_a_page_runs(page: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    for number, source in enumerate(blocks(page, "python")):
        names: dict[str, Any] = {"__name__": f"{page.stem}_{number}"}
        if "RUN_DIR/hf" in source:
            small_reward_model(tmp_path / "RUN_DIR/hf")
        exec(compile(source, page.name, "exec"), names)
        for name in sorted(set(USES) & set(names)):
            assert USES[name](names[name]), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_of_a_page_is_a_recipe_or_what_else_it_is_for(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for number, text in enumerate(blocks(page, "yaml")):
        file = folder / f"{page.stem}_{number}.yaml"
        file.write_text(text if re.search("^extends:", text, re.M) else f"extends: base.yaml\n{text}")
        if "\naxes:" in text:
            file.write_text(text)
            read_matrix(str(file))
        elif "\nbf16_tflops:" in text:
            file.write_text(text)
            read_hardware(str(file))
        elif re.match("alps:", text):
            file.write_text(text)
            monkeypatch.setenv("MEGARL_CLUSTERS", str(file))
            with_site(load_config("base.yaml"))
        else:
            load_config(file, components=COMPONENTS)


def test_the_site_cuts_off_no_line_of_code() -> None:
    assert "extra_css: [site.css]" in (ROOT / "mkdocs.yml").read_text()
    assert "pre > code { white-space: pre-wrap;" in (ROOT / "docs" / "site.css").read_text()
