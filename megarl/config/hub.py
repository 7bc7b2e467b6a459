"""Is what a recipe takes from the Hugging Face hub in the local cache, and else can the hub be reached? In seconds.

The hub's own packages try for a minute, in every worker, and end in the advice to check the name.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.error
import urllib.request
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from megarl.config.base import raise_problems
from megarl.config.checks import ConfigWarning
from megarl.config.checks_files import hub_dataset
from megarl.config.facts import hub_paths, is_hub_name
from megarl.config.run import RunConfig
from megarl.errors import ConfigError

ASK_S = 4.0  # for all questions together; a hub that is there answers in a fraction of a second
_TRUE = ("1", "ON", "YES", "TRUE")
_SWITCHES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
Answer = Literal["there", "not there", "unknown"]


@dataclass(frozen=True)
class Source:
    """Something of the hub. `key` is the recipe key that names it; `kind` is `models` or `datasets`."""

    key: str
    kind: str
    name: str

    @property
    def cached(self) -> bool:
        """Whether the local cache holds it, in any version."""
        paths = hub_paths()
        folders = [paths.hub / f"{self.kind}--{self.name.replace('/', '--')}" / "snapshots"]
        if self.kind == "datasets":
            prepared = Path(os.environ.get("HF_DATASETS_CACHE") or paths.home / "datasets")
            folders.append(prepared / self.name.replace("/", "___").lower())
            folders.append(prepared / self.name.replace("/", "___"))
        return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


def sources(config: RunConfig, job: str) -> list[Source]:
    """What `job` (train, sft, eval, generate) may take from the hub."""
    models = {"model.path": config.model.path, "model.tokenizer": config.model.tokenizer}
    data = {"data.val_files": config.data.val_files}
    if job in ("train", "sft"):
        data |= {"data.train_files": config.data.train_files, "sft.train_files": config.sft.train_files or []}
    if job == "train":
        models |= {"reference.path": config.reference.path, "teacher.path": config.teacher.path}
        models["critic.path"] = config.critic.path
    found = [
        Source(key, "models", name)
        for key, name in models.items()
        if name and is_hub_name(name) and not name.startswith("chars:") and not Path(name).exists()
    ]
    return found + [
        Source(key, "datasets", name)
        for key, files in data.items()
        for name in dict.fromkeys(filter(None, map(hub_dataset, files)))
    ]


def check_hub(config: RunConfig, job: str, *, ask: bool) -> None:
    """Refuse what is neither in the cache nor can be had from the hub. Takes `ASK_S` at most.

    When the hub cannot be reached and everything is in the cache, a warning says so, and HF_HUB_OFFLINE is set for the
    workers: each would wait for it otherwise.

    Args:
        ask: also call the hub; else only what this machine knows is looked at.

    Raises:
        ConfigError: lists all that is missing.
    """
    found = sources(config, job)
    missing = [source for source in found if not source.cached]
    if not found or offline() is not None:
        raise_problems([_problem(source, None) for source in missing])
        return
    if not ask:
        return
    answers, why = _ask(found)
    problems = [_problem(source, why) for source in missing if why is not None or answers[source] == "not there"]
    raise_problems(problems)
    if why is not None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        names = ", ".join(dict.fromkeys(source.name for source in found))
        warnings.warn(f"the hub cannot be reached ({why}): {names} come from the cache", ConfigWarning, stacklevel=2)


def offline() -> str | None:
    """The variable that forbids to ask the hub; None: it may be asked."""
    return next((name for name in _SWITCHES if os.environ.get(name, "").upper() in _TRUE), None)


def advice(kind: str, name: str, otherwise: str) -> str:
    """What to do about a source that could not be loaded, by what stands in its way now; takes `ASK_S` at most.

    Args:
        kind: `models` or `datasets`.
        name: the source as the recipe names it.
        otherwise: advice when it is no hub name, or the hub is there and has it.
    """
    hub_name = hub_dataset(name) if kind == "datasets" else name if is_hub_name(name) else None
    if hub_name is None or Path(name).exists():
        return otherwise
    source = Source("", kind, hub_name)
    if offline() is not None:
        return otherwise if source.cached else str(_problem(source, None).fix)
    answers, why = _ask([source])
    return str(_problem(source, why).fix) if why is not None or answers[source] == "not there" else otherwise


def _problem(source: Source, why: str | None) -> ConfigError:
    """What is wrong with a source that is not in the cache: `why` the hub was not reached; None: it was, or may not."""
    switch = offline()
    download = f"download it where there is a network (hf download {source.name}), and name its folder"
    if switch is not None:
        what = f"{switch} is set, and this is not in the local cache"
        fix = f"unset {switch}, or {download}"
    elif why is not None:
        what = f"this is not in the local cache, and the hub at {_endpoint()} cannot be reached ({why})"
        fix = f"check the network, HTTPS_PROXY and HF_ENDPOINT, or {download}"
    else:
        what = f"the hub at {_endpoint()} has no such public repository of {source.kind}"
        fix = "check the name; for a private one log in (hf auth login) or set HF_TOKEN"
    return ConfigError(what, where=source.key, found=source.name, allowed="a local folder, or a hub name", fix=fix)


def _ask(asked: list[Source]) -> tuple[dict[Source, Answer], str | None]:
    """The hub's answer on every source, and why it could not be reached; None: it could."""
    answers: dict[Source, Answer] = dict.fromkeys(asked, "unknown")
    reasons: dict[Source, str] = {}
    reached: list[Source] = []

    def one(source: Source) -> None:
        url = f"{_endpoint()}/api/{source.kind}/{quote(source.name)}"
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "megarl"})
            with urllib.request.urlopen(request, timeout=ASK_S):
                answers[source] = "there"
        except urllib.error.HTTPError as error:
            # Without a token the hub hides what is private; the token itself is left to the hub's own packages.
            if error.code in (401, 403, 404) and not _has_token():
                answers[source] = "not there"
        except (OSError, ValueError) as error:
            reasons[source] = str(getattr(error, "reason", None) or error)
            return
        reached.append(source)

    # Threads that nobody has to wait for: a name server that is silent holds them for longer than any timeout.
    threads = [threading.Thread(target=one, args=(source,), daemon=True) for source in asked]
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


def _has_token() -> bool:
    names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
    return any(os.environ.get(name) for name in names) or hub_paths().token.is_file()
