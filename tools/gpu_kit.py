"""Pack what a bare CUDA machine without a network lacks: `python tools/gpu_kit.py [--folder .whl] [--python 3.12]`.

The machine has Python, torch 2.11 or newer for CUDA with triton, transformers 5 and nvcc. What megarl needs in addition
goes into a folder of this checkout, which git then ignores: nine wheels, under 10 MB, of the versions in
constraints.txt. Copy the checkout with that folder to the machine and run there what this program prints.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    *("megatron-core", "tensordict", "pydantic", "pydantic_core", "annotated-types", "typing-inspection"),
    *("pyvers", "simpy", "xxhash"),
)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")
MOST_BYTES = 10_000_000
MOST_CHARACTERS = 2000
COMMAND = """\
export PYTHONPATH=$PWD/.site PYTHONUNBUFFERED=1; OUT=${{OUT:-$PWD/certificate}}; mkdir -p $OUT
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target $PWD/.site {folder}/*.whl &&
python3 -m pip install -q --no-index --no-deps --no-build-isolation -e . || exit 2
megarl doctor
timeout 590 megarl doctor gpu --out /tmp/certificate {sections}; code=$?
cp /tmp/certificate/certificate.* $OUT/
tar czf $OUT/logs.tgz -C /tmp/certificate --exclude='*.safetensors' --exclude=checkpoints .
exit $code
"""


def pins(python: str) -> list[str]:
    """Return `package==version` of every package, as constraints.txt has it for this version of Python."""
    lines = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    wanted = (requirement for requirement in map(Requirement, lines) if requirement.name in PACKAGES)
    chosen = (r for r in wanted if r.marker is None or r.marker.evaluate({"python_version": python}))
    return [f"{requirement.name}{requirement.specifier}" for requirement in chosen]


def download(folder: Path, python: str) -> None:
    """Download the wheels into an empty folder.

    Raises:
        subprocess.CalledProcessError: pip could not get one of them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    digits = python.replace(".", "")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for abi in (f"cp{digits}", "abi3", "none"):
        command += ["--abi", abi]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *pins(python)], check=True)


def command_there(folder: str, sections: str = "") -> str:
    """Return what to run on the machine, in the root of the copied checkout; results come into $OUT."""
    return COMMAND.format(folder=folder, sections=sections)


def ignore(folder: Path) -> None:
    """Make git ignore the folder, in this clone only."""
    done = subprocess.run(
        ["git", "rev-parse", "--git-path", "info/exclude"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    file, line = ROOT / done.stdout.strip(), f"/{folder.relative_to(ROOT)}/"
    file.parent.mkdir(parents=True, exist_ok=True)
    known = file.read_text().splitlines() if file.is_file() else []
    if line not in known:
        file.write_text("\n".join([*known, line]) + "\n")


def main() -> None:
    """Pack the wheels, and print their size and the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".whl", help="in this checkout (default: .whl)")
    parser.add_argument("--python", default="3.12", help="version on the machine (default: 3.12)")
    parser.add_argument("--sections", default="", help="arguments of `megarl doctor gpu`, as '--only kernels,training'")
    arguments = parser.parse_args()
    folder = ROOT / arguments.folder
    download(folder, arguments.python)
    ignore(folder)
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    if nbytes > MOST_BYTES:
        sys.exit(f"the wheels take {nbytes / 1e6:.1f} MB, more than {MOST_BYTES / 1e6:g}")
    print(f"{len(list(folder.iterdir()))} wheels, {nbytes / 1e6:.1f} MB, in {folder}; on the machine:\n")
    print(command_there(arguments.folder, arguments.sections))


if __name__ == "__main__":
    main()
