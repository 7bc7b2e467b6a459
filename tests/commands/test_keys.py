"""What a user finds without leaving the shell: keys, recipes in the help, completion."""

import shutil
import subprocess
import sys

import pytest

from megarl.cli import build_parser, main
from megarl.commands.completion import script
from megarl.commands.keys import all_entries, find_entries
from megarl.config.fields import iter_keys
from megarl.config.load import recipe_names, recipe_titles
from megarl.system.errors import UserError

ENTRIES = all_entries()


def paths(pattern):
    return [one.path for one in find_entries(pattern, ENTRIES)[0]]


def test_every_key_is_there():
    assert {key.path for key in iter_keys()} <= {one.path for one in ENTRIES}
    own = {one.path: one.readers for one in ENTRIES if one.readers}
    assert own["reward.kwargs.extract"] == ("numeric",)
    assert "tools" in own["env.max_calls"]


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
    assert "low_var_kl, low_var_kl+, mse, mse+, reverse_kl, file.py:fn" in " ".join(capsys.readouterr().out.split())


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
    assert "  grpo_quickstart               GRPO from nothing on a laptop\n" in text
    assert all(f"  {name} " in text and title for name, title in recipe_titles().items())


LINES = {
    "tr": {"train"},
    "train grpo_quicks": {"grpo_quickstart"},
    "train grpo_quickstart actor.optim.warm": {"actor.optim.warmup_steps=", "actor.optim.warmup_ratio="},
    "train --launcher ray grpo_quickstart critic.": None,
    "train grpo_quickstart actor.optim.schedule=co": {"constant", "cosine"},
    "train grpo_quickstart --launcher t": {"torchrun"},
    "train grpo_quickstart --dry": {"--dry-run"},
    "doctor g": {"gpu"},
    "completion z": {"zsh"},
    "keys actor.op": {"actor.optim."},
    "init mine.yaml --algorithm dp": {"dpo"},
}


def test_bash_completes(tmp_path):
    file = tmp_path / "completion.bash"
    file.write_text(script("bash", build_parser()))
    tries = "\n".join(
        f"COMP_LINE='megarl {line}'; COMP_POINT=${{#COMP_LINE}}; COMPREPLY=(); _megarl; echo \"${{COMPREPLY[*]}}\""
        for line in LINES
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", f"source {file}\n{tries}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    for (line, words), found in zip(LINES.items(), done.stdout.splitlines(), strict=True):
        if words is None:
            assert "critic.optim. critic.mini_batch_size=" in found
        else:
            assert set(found.split()) == words, line


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(tmp_path):
    file = tmp_path / "_megarl"
    file.write_text(script("zsh", build_parser()))
    given = (
        "compdef() { : }\nfuncstack=(x)\n"
        f"source {file}\n"
        'compadd() { while [ "$1" != -- ]; do shift; done; shift; print -l -- "$@" }\n'
        "words=(megarl train grpo_quickstart actor.optim.sch) CURRENT=4\n_megarl\n"
    )
    done = subprocess.run(["zsh", "-f", "-c", given], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["actor.optim.schedule="]


def test_completion_knows_every_recipe():
    text = script("zsh", build_parser())
    assert text.startswith("#compdef megarl\n")
    assert all(f" {name} " in text for name in recipe_names())
