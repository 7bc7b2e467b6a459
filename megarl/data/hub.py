"""Checks, within seconds, whether a source is in the local cache of the Hugging Face hub or the hub can be reached.

The hub's own packages try for a minute in every worker and then advise to check the name.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from megarl.artifacts.facts import hub_paths, is_hub_name
from megarl.data.sources import HUB, SUFFIXES, TEXT
from megarl.system.errors import ConfigError
from megarl.system.imports import is_module_reference

ASK_S = 4.0  # seconds for all requests together; a hub that can be reached replies in a fraction of a second
_TRUE = ("1", "ON", "YES", "TRUE")
_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
Answer = Literal["there", "not there", "unknown"]


@dataclass(frozen=True)
class HubSource:
    """A source on the hub. `key` is the recipe key that names it; `kind` is `models` or `datasets`."""

    key: str
    kind: str
    name: str

    @property
    def cached(self) -> bool:
        """True when the local cache holds the source, in any version."""
        paths = hub_paths()
        folders = [paths.hub / f"{self.kind}--{self.name.replace('/', '--')}" / "snapshots"]
        if self.kind == "datasets":
            prepared = Path(os.environ.get("HF_DATASETS_CACHE") or paths.home / "datasets")
            folders.append(prepared / self.name.replace("/", "___").lower())
            folders.append(prepared / self.name.replace("/", "___"))
        return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


def offline() -> str | None:
    """Return the environment variable that forbids requests to the hub; None if no variable does."""
    return next((name for name in _SWITCHES if os.environ.get(name, "").upper() in _TRUE), None)


@contextlib.contextmanager
def without_network() -> Iterator[None]:
    """Inside the block, forbid requests to the hub. Packages such as transformers obey only if they are first imported
    inside the block.
    """
    before = os.environ.get(_SWITCHES[0])
    os.environ[_SWITCHES[0]] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SWITCHES[0]]
        else:
            os.environ[_SWITCHES[0]] = before


def hub_dataset(source: str) -> str | None:
    """Return the hub repository that a data source names; None if the source is not on the hub."""
    path = Path(source).expanduser()
    if source.startswith(TEXT) or path.exists() or Path(source.rpartition("@")[0] or "?").expanduser().is_dir():
        return None
    if is_module_reference(source) or path.suffix.lower() in SUFFIXES:
        return None
    match = HUB.fullmatch(source)
    return None if match is None else match["name"]


#: Part of transformers' message about a checkpoint whose files name classes in code of their own.
_OWN_CODE = "custom code"


def own_code_advice(error: Exception) -> str | None:
    """Return the advice for a checkpoint that transformers reads only with the checkpoint's code; None: no code is
    needed."""
    if _OWN_CODE not in str(error):
        return None
    return "read the Python files that ship with it; if you trust them, set model.trust_remote_code: true"


def advice(kind: str, name: str, otherwise: str) -> str:
    """Return the advice for a source that could not be loaded; takes at most `ASK_S`.

    Args:
        kind: `models` or `datasets`.
        name: the source as in the recipe.
        otherwise: advice for a source that is not a hub name, or that the hub or its local cache has.
    """
    hub_name = hub_dataset(name) if kind == "datasets" else name if is_hub_name(name) else None
    if hub_name is None or Path(name).exists():
        return otherwise
    source = HubSource("", kind, hub_name)
    if offline() is not None:
        return otherwise if source.cached else str(problem_of(source, None).fix)
    answers, why = ask([source])
    return str(problem_of(source, why).fix) if why is not None or answers[source] == "not there" else otherwise


def problem_of(source: HubSource, why: str | None) -> ConfigError:
    """Return the error for a source that is not in the cache.

    Args:
        why: why the hub could not be reached; None: it was reached, or requests to it are forbidden.
    """
    switch, noun = offline(), {"models": "model", "datasets": "data set"}[source.kind]
    download = f"download it where there is a network (hf download {source.name}), and name its folder"
    if switch is not None:
        problem = f"{switch} is set, and the {noun} is not in the local cache"
        fix = f"unset {switch}, or {download}"
    elif why is not None:
        problem = f"the {noun} is not in the local cache, and the hub at {_endpoint()} cannot be reached ({why})"
        fix = f"check the network, HTTPS_PROXY and HF_ENDPOINT, or {download}"
    else:
        problem = f"the hub at {_endpoint()} has no such public repository of {source.kind}"
        fix = "check the name; for a private one log in (hf auth login) or set HF_TOKEN"
    return ConfigError(problem, where=source.key, found=source.name, allowed="a local folder, or a hub name", fix=fix)


def ask(sources: list[HubSource]) -> tuple[dict[HubSource, Answer], str | None]:
    """Return the hub's answer for each source, and why the hub could not be reached (None if it was)."""
    answers: dict[HubSource, Answer] = dict.fromkeys(sources, "unknown")
    reasons: dict[HubSource, str] = {}
    reached: list[HubSource] = []

    def request(source: HubSource) -> None:
        url = f"{_endpoint()}/api/{source.kind}/{quote(source.name)}"
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "megarl"})
            with urllib.request.urlopen(request, timeout=ASK_S):
                answers[source] = "there"
        except urllib.error.HTTPError as error:
            # This request has no token, so the hub hides private sources from it. If the user has a token, the answer
            # stays `unknown`: the hub's own packages will use the token.
            names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
            has_token = any(os.environ.get(name) for name in names) or hub_paths().token.is_file()
            if error.code in (401, 403, 404) and not has_token:
                answers[source] = "not there"
        except (OSError, ValueError) as error:
            reasons[source] = str(getattr(error, "reason", None) or error)
            return
        reached.append(source)

    # Daemon threads, since a silent name server blocks them for longer than any timeout.
    threads = [threading.Thread(target=request, args=(source,), daemon=True) for source in sources]
    for thread in threads:
        thread.start()
    end = time.monotonic() + ASK_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if reached:
        return answers, None
    return answers, next(iter(reasons.values()), f"no answer within {ASK_S:g} s")


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
