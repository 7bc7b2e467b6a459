"""Registry of rewards by name or by import path, and scorers: a reward with its settings, ready to call.

    class GSM8KSettings(Settings):
        method: Literal["strict", "flexible"] = Field("strict", description="...")

    @REWARDS.register("gsm8k", settings=GSM8KSettings)
    def gsm8k(sample, *, method="strict"): ...

The settings are keys of `reward.kwargs`, passed to the function as keyword arguments. Only Python checks the keyword
arguments of a function without the decorator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.algorithms.registry import Registry, Settings, Spec
from megarl.config.base import raise_problems
from megarl.config.components import settle
from megarl.rewards import signatures
from megarl.system.errors import ConfigError

Mode = Literal["batch", "sequential"]
KWARGS = "reward.kwargs"


@dataclass(frozen=True)
class RewardSpec(Spec):
    """The declaration of a reward.

    Attributes:
        package: distribution that the reward requires and megarl does not install; None: it requires none.
        prepare: called with the settings, once in the scoring process, before the first sample.
        names: returns the keys that every sample must have for these settings; None: only the keys that all samples
            have.
        limit: name of the setting with the CPU seconds per sample, enforced by an alarm. An alarm needs the main thread
            of a process, so such a reward gets its own process. Only built-in rewards may set it, because the process
            that starts others does not load a user's file.
        reference: reads a reference answer from its text, or raises a ValueError with the reason; None: the reward
            reads no answer. `meeting_any` adds lists.
        batch: a built-in reward that takes the list of samples, and may return a `ScoringFailure` for a sample.
        process: a built-in reward that runs in its own process, as a user's function does.
        whole: the reward reads the response from its first to its last character, so that an end token would make every
            response wrong (`reward.skip_special_tokens`).
    """

    package: str | None = None
    prepare: Callable[[Any], object] | None = None
    names: Callable[[Any], Collection[str]] | None = None
    limit: str | None = None
    reference: Callable[[str], object] | None = None
    batch: bool = False
    process: bool = False
    whole: bool = False


#: fn(sample, **settings), or for a user's function with `reward.mode: batch` fn(samples, **settings)
REWARDS = Registry("reward", "reward.name", RewardSpec)


@dataclass(frozen=True)
class Scorer:
    """A reward function with its settings, ready to call.

    Attributes:
        name: name in the configuration, for errors.
        function: `(samples: list[dict], **kwargs) -> list` in batch mode, `(sample: dict, **kwargs)` in sequential
            mode; a result is a number or a dict with `overall`.
        file: source file, to find the user's line in a traceback.
        kwargs: all settings of a function that declares them, else the given ones.
        uses_images: the function uses the images of samples.
    """

    name: str
    function: Callable[..., Any]
    mode: Mode
    file: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    uses_images: bool = False


def mode_of(name: str, mode: Mode) -> Mode:
    """Return the mode in which the reward `name` is called; a reward of megarl itself has its own mode, others
    have the given `mode`."""
    if name not in REWARDS.names():
        return mode
    return "batch" if REWARDS.spec(name).batch else "sequential"


def reward_settings(name: str, kwargs: dict[str, Any], spec: RewardSpec) -> Settings:
    """Return `reward.kwargs` as the settings of the reward that declares `spec`. Raise ConfigError if a key is unknown,
    or a value is invalid."""
    settings, problems = settle(KWARGS, name, kwargs, spec.settings, lambda key: {}, name_key=REWARDS.key)
    raise_problems(problems)
    assert settings is not None
    raise_problems(settings.problems(KWARGS))
    return settings


def time_limit_s(name: str, kwargs: dict[str, Any]) -> float | None:
    """Return the CPU seconds per sample of a built-in reward that needs its own process; None for others. Raise
    ConfigError if `kwargs` are invalid."""
    spec = REWARDS.spec(name) if name in REWARDS.names() else RewardSpec()
    return None if spec.limit is None else float(getattr(reward_settings(name, kwargs, spec), spec.limit))


def load_scorer(name: str, mode: Mode, kwargs: dict[str, Any], *, images: bool = True) -> Scorer:
    """Find the function (a built-in reward, `path/to/file.py:function` or `package.module:function`), and give it its
    settings. Raise UserError if it cannot be loaded or called with them, or requires images that the run lacks."""
    function = REWARDS.get(name)
    spec = REWARDS.declared(function)
    source = getattr(inspect.getmodule(function), "__file__", None)
    if spec is None:
        signature = _signature(function)
        try:
            signatures.bind(signature, kwargs)
        except TypeError as error:
            raise kwargs_error(name, kwargs, signature, f"{name}{signature}", error) from error
    else:
        settings = reward_settings(name, kwargs, spec)
        kwargs = {key: getattr(settings, key) for key in spec.settings.model_fields}
        if spec.prepare is not None:
            spec.prepare(settings)
    asks = False
    if name not in REWARDS.names():
        signature = _signature(function)
        asks = signatures.uses_images(signature, kwargs)
        if not images:
            refuse_images(name, signature, kwargs)
        function = signatures.adapt(function, signature, mode)
    return Scorer(name, function, mode_of(name, mode), source or "", kwargs, asks)


def refuse_images(name: str, signature: inspect.Signature, kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for a function that requires images, in a run whose recipe names none."""
    if signatures.requires_images(signature, kwargs):
        raise ConfigError(
            f"{name} requires images, but the recipe names no column of images",
            where="data.image_key",
            found="null",
            fix="name the column, or give the parameter `images` a default",
        )


def own_keys(name: str) -> list[str] | None:
    """Return the keys that a reward accepts in `reward.kwargs`; None when it accepts any. A user's function is
    imported. Raise UserError if the reward cannot be found."""
    function = REWARDS.get(name)
    spec = REWARDS.declared(function)
    if spec is not None:
        return list(spec.settings.model_fields)
    signature = _signature(function)
    return None if _takes_any(signature) else [p.name for p in signatures.settings_of(signature)]


def kwargs_error(
    name: str, kwargs: dict[str, object], signature: inspect.Signature, text: str, error: TypeError
) -> ConfigError:
    """Return the error for a reward that cannot be called with its keyword arguments. `signature` need not contain the
    default values; `text` is the function and its parameters as the user writes them, `error` Python's reason."""
    named = signatures.settings_of(signature)
    form = signatures.form_of(signature)
    is_own = form is signatures.OWN
    missing = [p.name for p in named if is_own and p.default is p.empty and p.name not in kwargs]
    known = {p.name for p in named}
    unknown = [] if _takes_any(signature) else [key for key in kwargs if key not in known]
    fixes = []
    if missing:
        fixes.append(f"set {' and '.join(f'{KWARGS}.{key}' for key in missing)}")
    if unknown:
        fixes.append(
            f"remove {', '.join(unknown)}; on the command line, reward='!replace {{name: {name}}}' drops the arguments "
            "of the recipe"
        )
    return ConfigError(
        f"{name} {'does not take' if unknown or not missing else 'needs more than'} these arguments: {error}",
        where=KWARGS,
        found=kwargs,
        allowed=f"{text}, whose first argument is the sample or the list of samples"
        if is_own
        else f"{text}, called as {form.owner} does: with columns of the data by name",
        fix=", and ".join(fixes)
        or "write its parameters so that one may be given by position and the others by name, or as TRL's and verl's: "
        f"{signatures.OTHER_FORMS}",
    )


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # a built-in without a signature checks its arguments when it is called
        return inspect.Signature([inspect.Parameter(name, kind) for name, kind in _ANYTHING])


_ANYTHING = (("samples", inspect.Parameter.VAR_POSITIONAL), ("kwargs", inspect.Parameter.VAR_KEYWORD))
