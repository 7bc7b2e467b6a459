"""Environments by name, the recipe keys that each accepts, and a check before a run, in another process."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from megarl.config.fields import wrong_value
from megarl.config.rollout import ON_ERROR, env_section
from megarl.data.templates import no_template_for_tools, read_template, reads_tools, unwritten_tools
from megarl.envs.protocol import Environment
from megarl.rewards.preflight import KEYS_LIMIT_S, ask
from megarl.system.errors import ConfigError, close_matches, describe, relative_path_fix
from megarl.system.imports import import_file, import_module, of_user

if TYPE_CHECKING:
    from megarl.config.run import RunConfig

#: Names of the built-in environments -> their classes.
ENVIRONMENTS = {
    "single_turn": "megarl.envs.protocol:SingleTurn",
    "tools": "megarl.envs.tools:Tools",
    "agent": "megarl.gateway.agent:Agent",
    "gymnasium": "megarl.envs.gymnasium:Gymnasium",
    "openenv": "megarl.envs.openenv:OpenEnv",
    "verifiers": "megarl.gateway.verifiers:Verifiers",
}
_FORMS = ("file.py:Class", "pkg.mod:Class")
_IMPORT_S = 5.0


def load_environment(env: Mapping[str, Any]) -> tuple[type[Environment], Any]:
    """Return the class that the section `env` names, and its settings. Raise ConfigError if the name is unknown, the
    class cannot be imported or is not an environment, or a key or value is invalid.
    """
    name, on_error, keys = env_section(env)
    if on_error not in ON_ERROR:
        raise ConfigError("env.on_error has an unknown value", where="env.on_error", found=on_error, allowed=ON_ERROR)
    kind = environment_class(name)
    return kind, _settings(name, kind, keys)


def environment_class(name: Any) -> type[Environment]:
    """Return the class that `env.name` names; a user's own class is imported. Raise ConfigError if the name is unknown,
    or the class cannot be imported or is not an environment.
    """
    path = ENVIRONMENTS.get(name, name) if isinstance(name, str) else ""
    if ":" not in path:
        near = close_matches(str(name), ENVIRONMENTS)
        raise ConfigError(
            "this environment does not exist",
            where="env.name",
            found=name,
            allowed=[*ENVIRONMENTS, *_FORMS],
            fix=f"did you mean {near[0]!r}?" if near else "set env.name to one of these",
        )
    module_name, _, class_name = path.rpartition(":")
    module = import_source(module_name, "env.name")
    kind = getattr(module, class_name, None)
    if not (inspect.isclass(kind) and issubclass(kind, Environment)):
        if inspect.isclass(kind):
            raise ConfigError(
                f"{class_name} in {module_name} is not an environment",
                where="env.name",
                found=name,
                fix=f"derive it from the base class: class {class_name}(megarl.envs.Environment)",
            )
        environments = [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, Environment) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            f"{module_name} does not define an environment {class_name!r}",
            where="env.name",
            found=name,
            allowed=environments or "a class derived from megarl.envs.Environment",
        )
    if kind.step is Environment.step:
        raise ConfigError(
            f"the environment {class_name} in {module_name} has no method step",
            where="env.name",
            found=name,
            fix="define step(self, action): it answers a turn of the policy",
        )
    for method, arguments in (("reset", ("row", "seed")), ("step", ("action",))):
        _check_parameters(kind, method, arguments, name)
    return kind


def _check_parameters(kind: type[Environment], method: str, arguments: tuple[str, ...], name: str) -> None:
    """Refuse a method that cannot be called with these positional arguments."""
    function = inspect.getattr_static(kind, method)
    if not inspect.isfunction(function):
        return  # only plain methods are checked, not class methods, static methods and other callables
    signature = inspect.signature(function)
    try:
        signature.bind(None, *arguments)
    except TypeError:
        raise ConfigError(
            f"{kind.__name__}.{method} does not accept the arguments with which it is called",
            where="env.name",
            found=f"{name}: {method}{signature}",
            allowed=f"{method}(self, {', '.join(arguments)})",
            fix="change its parameters",
        ) from None


def check_plays_policies(kind: type[Environment], policies: Collection[str]) -> None:
    """Raise ConfigError if the recipe has several policies that the environment does not play, or lacks them."""
    if policies and not kind.plays_policies:
        raise ConfigError(
            f"the environment {kind.__qualname__} does not ask several policies",
            where="env.name",
            found=f"policies {', '.join(policies)}",
            allowed="agent, or a class derived from megarl.envs.SeveralPolicies",
            fix="set env.name to an environment of this kind, or set policies='!replace {}'",
        )
    if not policies and kind.needs_policies:
        raise ConfigError(
            f"the environment {kind.__qualname__} asks several policies, but the recipe has none",
            where="policies",
            found="{}",
            allowed="the policies that the environment asks",
            fix="add them, such as policies.NAME.train=true",
        )


def check_longest(longest_s: float | None, answer_s: float) -> None:
    """Raise ConfigError if an environment's deadline exceeds the run's.

    Args:
        longest_s: seconds within which the environment always replies; None: it has no deadline of its own.
        answer_s: seconds that a run waits for a reply, half of `cluster.timeout_s`.
    """
    if longest_s is not None and longest_s > answer_s:
        raise ConfigError(
            f"a turn of the environment may take {longest_s:g} s, but the run waits only {answer_s:g} s for it",
            where="cluster.timeout_s",
            found=2 * answer_s,
            allowed=f"at least {2 * longest_s:g}",
            fix="raise it, or lower the deadlines in the section env",
        )


def import_source(source: str, key: str) -> Any:
    """Import and return the module `pkg.mod`, or that of a file `path/to/file.py`. Raise ConfigError at `key`, with the
    line, if the file is missing or its import fails.
    """
    try:
        if not source.endswith(".py"):
            return of_user(import_module(source))
        if not Path(source).is_file():
            raise ConfigError("this file does not exist", where=key, found=source, fix=relative_path_fix())
        return of_user(import_file(Path(source)))
    except ConfigError:
        raise
    except Exception as error:  # any exception of the user's module
        fix = f"correct {key}, or the file that it names"
        if isinstance(error, ModuleNotFoundError) and error.name:
            fix = f"correct the name {error.name}, or install its package"
        raise ConfigError(f"importing {source} failed: {describe(error)}", where=key, fix=fix) from error


def _settings(name: str, kind: type[Environment], own: dict[str, Any]) -> Any:
    known = kind.Settings.model_fields
    for key in own:
        if key not in known:
            near = close_matches(key, known)
            raise ConfigError(
                f"environment {name!r} has no setting {key!r}",
                where=f"env.{key}",
                found=own[key],
                allowed=["name", "on_error", *known],
                fix=f"did you mean {near[0]!r}?"
                if near
                else f"remove it; env='!replace {{name: {name}}}' removes those of another environment",
            )
    try:
        return kind.Settings.model_validate(own)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]) if len(first["loc"]) == 1 else ""
        if key in own and first["type"] not in ("value_error", "assertion_error"):
            raise wrong_value(first, f"env.{key}", known[key], own[key], where=f"env.{key}") from error
        problem = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        where = ".".join(["env", *map(str, first["loc"])])
        raise ConfigError(problem, where=where, found=first.get("input")) from error


def check_environment(config: RunConfig, limit_s: float = _IMPORT_S) -> ConfigError | None:
    """Import the class that `env.name` refers to and validate its keys; a slow import is left to the workers.

    Returns:
        A warning if the environment scores its episodes and the recipe also sets a reward.

    Raises:
        ConfigError: the error that a worker would raise.
    """
    if config.has_turns:
        reply = ask(_load, {"env": dict(config.env), "policies": list(config.policies)}, limit_s, where="env.name")
        scores, longest_s, needs_tool_template = reply if isinstance(reply, list) else (None, None, False)
        check_longest(longest_s, config.cluster.timeout_s / 2)
        if needs_tool_template:
            check_tool_template(config)
        default = type(config.reward)().model_dump()
        given = {key: value for key, value in config.reward.model_dump().items() if value != default[key]}
        if scores and given:
            return ConfigError(
                f"the environment {config.env['name']} scores its episodes itself, so this setting of the recipe has "
                "no effect",
                where="reward",
                found=given,
                fix="remove it (on the command line: reward='!replace {}'), or set scores = False in the class for the "
                "reward function to score",
            )
    elif set(config.env) - {"name"}:
        load_environment(config.env)
    return None


def check_tool_template(config: RunConfig) -> None:
    """Raise an error for a chat template that cannot write tools, if the template can be read on this machine."""
    from megarl.data.light_tokenizer import brings_chat_template, chat_template_of  # imports numpy, so not at the top
    from megarl.data.render import uses_chat

    has_template = brings_chat_template(config.model)
    if has_template is None and config.data.override_chat_template is None:
        return
    if not uses_chat(config.data, bool(has_template)):
        raise no_template_for_tools()
    override = config.data.override_chat_template
    text = (
        chat_template_of(config.model) if override is None else read_template(override, "data.override_chat_template")
    )
    if text is not None and not reads_tools(text):
        raise unwritten_tools()


def _load(env: dict[str, Any], policies: Collection[str] = ()) -> tuple[bool, float | None, bool]:
    """Load the environment and the components that its settings name; return the environment's `scores`, `longest_s`
    and `needs_tool_template`.
    """
    kind, settings = load_environment(env)
    check_plays_policies(kind, policies)
    kind.check(settings)
    return kind.gives_scores(settings), settings.longest_s, kind.needs_tool_template(settings)


def find_own_keys(name: str, limit_s: float = KEYS_LIMIT_S) -> list[str] | None:
    """Return the keys that an environment accepts in the section `env`; None if its import takes too long. Raise
    ConfigError if the environment cannot be found.
    """
    if name in ENVIRONMENTS or ":" not in name:
        return _keys(name)
    return cast("list[str] | None", ask(_keys, {"name": name}, limit_s, where="env.name"))


def _keys(name: str) -> list[str]:
    return list(environment_class(name).Settings.model_fields)
