"""What a user finds without leaving the shell: keys, recipes in the help, completion."""

import io
import re
import subprocess
import sys
from functools import partial

import argcomplete
import pytest
from argcomplete import CompletionFinder, autocomplete

from megarl.cli import build_parser, main
from megarl.commands.completion import complete
from megarl.commands.keys import all_entries, find_entries
from megarl.config.fields import iter_keys
from megarl.config.load import recipe_titles
from megarl.system.errors import UserError

ENTRIES = all_entries()


def paths(pattern):
    return [one.path for one in find_entries(pattern, ENTRIES)[0]]


def test_several_words_are_searched_together(capsys):
    assert main(["keys", "learning", "rate"]) == 0
    assert "actor.optim.lr = " in capsys.readouterr().out
    assert paths("clip gradient norm") == paths("gradient norm clip") != []


def test_every_key_is_there():
    assert {key.path for key in iter_keys()} <= {one.path for one in ENTRIES}
    readers = {(one.path, name) for one in ENTRIES for name in one.readers}
    assert {name for path, name in readers if path == "reward.kwargs.extract"} == {"numeric"}
    assert {"tools", "agent"} <= {name for path, name in readers if path == "env.max_calls"}


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("actor.optim.lr", ["actor.optim.lr"]),
        ("sampling.n", ["rollout.sampling.n", "validation.sampling.n"]),
        ("learning_rate", ["actor.optim.lr"]),
        ("Megarl.Nothing", None),
        ("placement.teams", ["placement.teams", "placement.teams.NAME.roles", "placement.teams.NAME.devices"]),
        ("reward.parts.accuracy.weight", ["reward.parts.NAME.weight"]),
        ("node's clock", ["launch.preflight_clock_s"]),
        ("peft", ["model.lora", "model.lora.rank"]),
    ],
)
def test_a_pattern_is_a_key_a_part_of_one_another_projects_name_or_a_word(pattern, found):
    if found is None:
        with pytest.raises(UserError, match="no key has this"):
            find_entries(pattern, ENTRIES)
    else:
        assert paths(pattern)[: len(found)] == found


def test_a_section_is_itself_and_what_is_below_it():
    found = paths("actor.optim")
    assert found[:2] == ["actor.optim", "actor.optim.lr"]
    assert all(path.startswith("actor.optim") for path in found)


def test_what_is_shown_of_a_key(capsys):
    assert main(["keys", "actor.optim.schedule"]) == 0
    assert capsys.readouterr().out == (
        "actor.optim.schedule = constant  (constant, linear, cosine)\n    shape of the schedule after warm-up\n"
    )
    assert main(["keys", "algorithm.kl.estimator"]) == 0
    assert "low_var_kl, low_var_kl+, mse, mse+, reverse_kl, unbiased_k3, file.py:fn" in " ".join(
        capsys.readouterr().out.split()
    )


def test_finding_keys_loads_nothing_heavy():
    code = (
        "import sys; from megarl.cli import main; main(['keys', 'actor.optim']); main(['completion', 'bash']);"
        "print([m for m in ('torch', 'numpy', 'ray', 'transformers', 'megatron', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_lists_the_recipes_with_their_first_words(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert re.search(r"\n  grpo_quickstart +GRPO from nothing on a laptop\n", text)
    assert all(f"  {name} " in text and title for name, title in recipe_titles().items())


LINES = {
    "tr": {"train"},
    "train grpo_quicks": {"grpo_quickstart"},
    "train grpo_quickstart actor.optim.warm": {"actor.optim.warmup_steps=", "actor.optim.warmup_ratio="},
    "train --launcher ray grpo_quickstart critic.opt": None,
    "train grpo_quickstart actor.optim.schedule=co": {"constant", "cosine"},
    "train grpo_quickstart --launcher t": {"torchrun"},
    "train grpo_quickstart --dry": {"--dry-run"},
    "doctor g": {"gpu"},
    "completion z": {"zsh"},
    "init mine.yaml --algorithm dp": {"dpo"},
}


@pytest.mark.parametrize(("line", "words"), LINES.items())
def test_words_are_completed(line, words, monkeypatch):
    typed = f"megarl {line}"
    shell = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": typed, "COMP_POINT": str(len(typed))}
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_ARGCOMPLETE_COMP_WORDBREAKS", " =")
    monkeypatch.setattr(CompletionFinder, "_init_debug_stream", lambda self: None)  # it takes pytest's descriptor 9
    out = io.StringIO()
    monkeypatch.setattr(argcomplete, "autocomplete", partial(autocomplete, exit_method=sys.exit, output_stream=out))
    with pytest.raises(SystemExit):
        complete(build_parser())
    candidates = {word.strip() for word in out.getvalue().split("\n")}
    if words is None:
        assert {"critic.optim.", "critic.optim.lr="} <= candidates
    else:
        assert candidates == words


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_calls_megarl(shell, capsys):
    assert main(["completion", shell]) == 0
    assert "megarl" in capsys.readouterr().out
