"""Install packages into an interpreter: `python tools/installer.py PYTHON ARGUMENTS...`, with arguments of pip.

uv installs them if the interpreter that runs this file has it: in seconds, where pip takes a minute or more. pip
installs them without uv, and after uv has failed. Neither compiles what it installs, which takes as long again: an
import compiles what is needed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

#: pip's settings of package sources -> uv's: uv reads no setting of pip.
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
#: Settings of package sources without a variable of uv: if one is set, pip installs.
NO_INDEX = "no-index"
FALSE = ("", "0", "f", "false", "n", "no", "off")


def read_settings(listed: str) -> dict[str, str]:
    """Read the output of `pip config list`: each setting's value for an installation."""
    values: dict[str, str] = {}
    lines = [line.partition("=") for line in listed.splitlines()]
    for section in ("global", "install", ":env:"):  # a later section takes precedence
        for name, _, value in lines:
            if name.startswith(f"{section}."):
                values[name.removeprefix(f"{section}.")] = ast.literal_eval(value)
    return values


def uv_variables(settings: dict[str, str]) -> dict[str, str]:
    """Translate settings of pip into environment variables of uv."""
    separators = dict.fromkeys(SETTINGS, " ") | {"find-links": ","}
    return {SETTINGS[name]: separators[name].join(settings[name].split()) for name in SETTINGS if name in settings}


def uv_environment() -> dict[str, str] | None:
    """Return the environment in which uv takes packages from where pip takes them; None: it cannot, or is not here."""
    if find_spec("uv") is None:
        return None
    command = [sys.executable, "-m", "pip", "config", "list"]
    settings = read_settings(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    if settings.get(NO_INDEX, "").lower() not in FALSE:
        return None
    # pip takes the newest version in all its indexes; uv does so with this strategy.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **uv_variables(settings), **os.environ}


def make_environment(folder: Path) -> None:
    """Make a virtual environment of the running interpreter's Python, with a pip of its own."""
    environment = uv_environment()
    if environment is not None:
        command = [sys.executable, "-m", "uv", "venv", "--quiet", "--seed", "--python", sys.executable, str(folder)]
        if subprocess.run(command, check=False, env=environment).returncode == 0:
            return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)


def install(python: Path, *arguments: str) -> None:
    """Install into `python`; raise CalledProcessError where neither uv nor pip can."""
    environment = uv_environment()
    if environment is not None:
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python), *arguments]
        if subprocess.run(command, check=False, env=environment).returncode == 0:
            return
        print("uv could not install this, see above; pip tries it", file=sys.stderr)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-compile", *arguments], check=True)


if __name__ == "__main__":
    try:
        install(Path(sys.argv[1]), *sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
