"""The package of another commit, so that a benchmark can measure it and the present one in turn."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megarl.system.errors import UserError

#: The checkout that this package is installed from; a wheel has none.
ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("megarl", "benchmarks", "kernels", "launchers", "recipes")


@contextlib.contextmanager
def package_of(commit: str | None) -> Iterator[Path]:
    """Yield a folder with the complete package `megarl` of a commit, or of the working tree.

    Raises:
        UserError: this is not a checkout, or the commit does not exist in it.
    """
    with tempfile.TemporaryDirectory(prefix="package") as name:
        folder, tree = Path(name), ROOT
        try:
            if commit is not None:
                _git("worktree", "add", "--detach", str(folder / "worktree"), _known(commit))
                tree = folder / "worktree"
            for source in SOURCES:
                target = folder / "view" / ("" if source == "megarl" else "megarl") / source
                shutil.copytree(tree / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            yield folder / "view"
        finally:
            if tree != ROOT:
                _git("worktree", "remove", "--force", str(tree))


def _known(commit: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").strip()
    except (OSError, subprocess.CalledProcessError):
        raise UserError(
            "unknown commit",
            where="--base",
            found=commit,
            allowed="a commit, branch or tag of the checkout that megarl is installed from",
            fix="git fetch it first, or leave --base out to compare with the history",
        ) from None


def commit_now() -> tuple[str, bool]:
    """Return the present commit, and whether files differ from it; ("unknown", True) without a checkout."""
    try:
        return _git("rev-parse", "--short=12", "HEAD").strip(), bool(_git("status", "--porcelain").strip())
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout
