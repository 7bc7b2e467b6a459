"""The wheel: `benchmarks`, `kernels`, `launchers` and `recipes` arrive inside `megarl` and hide nobody's package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_FOLDERS = ("benchmarks", "kernels", "launchers", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, without network and without leaving anything in the repository."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("megarl", *TOP_FOLDERS):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check", "."]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((source / "dist").glob("*.whl"))


def test_everything_is_inside_megarl(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"megarl"}

    expected = [f"megarl/{path.relative_to(ROOT / 'megarl')}" for path in (ROOT / "megarl").rglob("*.py")]
    for folder in TOP_FOLDERS:
        expected += [f"megarl/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")]
    expected += [f"megarl/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")]
    expected += [f"megarl/{path.relative_to(ROOT)}" for path in (ROOT / "benchmarks").rglob("*.yaml")]
    expected += [f"megarl/tracking/{path.name}" for path in (ROOT / "megarl/tracking").glob("report.*")]
    assert set(expected) <= set(names)


def test_the_gpu_extra_installs_from_the_package_index(wheel: Path) -> None:
    """flash-attn and transformer-engine-torch have no wheels there, and no build without torch in place."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    extra = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and 'extra == "gpu"' in line]
    assert extra
    assert not [line for line in extra if "flash" in line or "transformer" in line]


def test_it_imports_beside_another_package_named_kernels(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text("OWNER = 'somebody else'\n")
    code = (
        "import kernels, megarl, megarl.kernels, megarl.recipes, megarl.launchers.common, megarl.cli\n"
        "from megarl.config.load import recipe_names\n"
        "assert kernels.OWNER == 'somebody else'\n"
        "print(megarl.__file__, megarl.kernels.__file__, megarl.recipes.__file__, *recipe_names(), sep='\\n')\n"
    )
    # -S: without this environment's editable megarl; the dependencies are appended after the wheel
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.append({dependencies!r})\n{code}"],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *files, names = done.stdout.strip().split("\n", 3)
    assert all(Path(file).is_relative_to(site) for file in files)
    assert names.split("\n") == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
