"""Rules that hold for every tracked file."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

# Where one developer's files live, or where one site's package mirror is, belongs in no file of the project.
MACHINE = re.compile(
    r"(?<![\w.~$}/-])/(?:work|root|home|Users)/[\w.]|(?:extra-)?index-url|find-links|trusted-host|file:///",
    re.IGNORECASE,
)
#: One of them is in every such line; to look for the pattern in all files takes seconds.
PARTS = ("/work/", "/root/", "/home/", "/users/", "index-url", "find-links", "trusted-host", "file:///")
#: Patterns, examples, and the names of pip's settings.
NAMING_NONE = (Path(__file__), Path(__file__).with_name("test_installer.py"), ROOT / "tools" / "installer.py")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def tracked(*patterns: str) -> list[Path]:
    """Tracked files; where there is no git (an unpacked archive), every file outside hidden folders."""
    done = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        names = [name for name in done.stdout.split("\0") if name]
        return [ROOT / name for name in names if (ROOT / name).is_file()]
    found = [path for pattern in patterns or ("*",) for path in ROOT.rglob(pattern)]
    return [path for path in found if path.is_file() and not path.relative_to(ROOT).parts[0].startswith(".")]


def test_no_file_names_one_machine() -> None:
    found = []
    for path in tracked():
        if path in NAMING_NONE or b"\0" in path.read_bytes():
            continue
        text = path.read_text(encoding="utf-8")
        lowered = text.lower()
        lines = text.splitlines() if any(part in lowered for part in PARTS) else []
        for number, line in enumerate(lines, 1):
            if MACHINE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize("document", tracked("*.md"), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    broken = []
    for target in LINK.findall(document.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if "://" in name or name.startswith("mailto:"):
            continue
        path = (document.parent / name).resolve() if name else document
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def anchors(document: Path) -> set[str]:
    """Names of the headings of a document, as they appear in links."""
    headings = re.findall(r"^#+ +(.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-") for heading in headings}


def test_files_are_of_a_size_to_be_read() -> None:
    long = {str(p.relative_to(ROOT)): n for p in tracked("*.py") if (n := len(p.read_text().splitlines())) > 800}
    assert long == {}


def test_make_alone_shows_every_target_with_what_it_does() -> None:
    text = (ROOT / "Makefile").read_text()
    first = next(line for line in text.splitlines() if re.match(r"[a-z]", line) and ":" in line and "=" not in line)
    assert first.startswith("help:")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    shown = set(re.findall(r"^([a-z0-9-]+):[^#\n]*## \S", text, re.MULTILINE))
    assert {*phony.split(), "install"} <= shown


def test_every_package_is_allowed_up_to_what_was_tested() -> None:
    """Packages whose insides are used have a bound above, and the pinned versions are inside of all bounds."""
    text = (ROOT / "setup.py").read_text().partition("install_requires=[")[2].partition("],")[0]
    allowed = {one.name: one.specifier for one in map(Requirement, re.findall(r'"(.*)",', text))}
    pinned = re.findall(r"^([\w.-]+)==([^;\n]*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = [(name.lower().replace("_", "-"), version) for name, version in pinned]
    assert [(name, version) for name, version in pinned if name in allowed and version not in allowed[name]] == []
    assert not allowed.keys() - dict(pinned).keys()
    inside = ("torch", "megatron-core", "transformers", "ray", "mlflow", "datasets", "tensordict", "pydantic", "numpy")
    assert [name for name in inside if "<" not in str(allowed[name])] == []
