"""Train two steps with the newest versions that setup.py allows, where uv has them on this machine.

`python tools/newest.py` downloads nothing: it uses uv's cache and the folders of wheels that pip is configured with,
and says so where they do not suffice. `make campaign-install` downloads, and runs more.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from installer import uv_environment

ROOT = Path(__file__).resolve().parents[1]
#: A short run with everything that a local run has: two ranks, a supervised phase, generation, update, export.
RUN = ("train", "grpo_quickstart", "sft.steps=1", "trainer.steps=1", "data.max_val_samples=16")
_LIMIT_S = 300
_SHOWN = ("torch", "transformers", "ray", "datasets", "mlflow")


def main() -> int:
    """Return 0 where the run went through or could not be tried, else 1."""
    environment = uv_environment()
    if environment is None:
        print("newest versions: not tried, there is no uv here")
        return 0
    uv = [sys.executable, "-m", "uv"]
    with tempfile.TemporaryDirectory(prefix="megarl-newest-") as folder:
        python = Path(folder) / "env/bin/python"
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, python.parents[1]], check=True)
        offline = [*uv, "pip", "install", "--quiet", "--offline", "--python", str(python), "-e", str(ROOT)]
        if subprocess.run(offline, env=environment, capture_output=True, check=False).returncode:
            print("newest versions: not tried, uv does not have them here (make campaign-install downloads them)")
            return 0
        code = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
        versions = subprocess.run([python, "-c", code, *_SHOWN], capture_output=True, text=True, check=True).stdout
        done = subprocess.run(
            [python.with_name("megarl"), *RUN, "--run-dir", f"{folder}/run"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_S,
        )
        if done.returncode:
            print(done.stdout, done.stderr, sep="\n")
        print(
            f"newest versions: {'the run failed' if done.returncode else 'a run of two steps'} with {versions}", end=""
        )
        return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
