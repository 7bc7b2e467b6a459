"""Checks of components that a recipe chooses by name or by a reference to a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megarl.algorithms.registry import Chosen, Registry, Spec
from megarl.algorithms.user_code import name_of, place_of
from megarl.checks.checklist import Checklist
from megarl.checks.references import check_reference
from megarl.config.base import ComponentSection, ConfigErrors
from megarl.config.other_names import method_fix
from megarl.system.errors import ConfigError, UserError
from megarl.system.imports import is_file_reference, is_module_reference

S = TypeVar("S", bound=Spec)


def check_function_name(text: str, key: str, known: Sequence[str], noun: str, checks: Checklist) -> bool:
    """Return whether this is a registered name, or a `pkg.mod:fn` or `file.py:fn` that can be found."""
    if text in known:
        checks.ok(text)
        return True
    if is_module_reference(text) or is_file_reference(text):
        return check_function(text, key, checks)
    checks.fail(
        key,
        f"unknown {noun}",
        found=text,
        allowed=[*known, "file.py:fn", "pkg.mod:fn"],
        fix=method_fix(text, known) or f"set {key} to one of these",
    )
    return False


def check_component(
    section: ComponentSection, registry: Registry[S], checks: Checklist, path: str | None = None
) -> Chosen[S] | None:
    """Check that the component named in a section exists and that its keys are known and consistent. A user's own
    component is imported in this process. `path` is the section's path if it differs from the registry's.
    """
    path = path or registry.key.rpartition(".")[0]
    key = f"{path}.{section.named_by}"
    if not check_function_name(section.component, key, registry.names(), registry.kind, checks):
        return None
    try:
        chosen = registry.choose(section, path)
    except ConfigErrors as errors:
        problems: list[UserError] = [*errors.problems]
    except UserError as error:
        problems = [error]
    else:
        problems = [*chosen.settings.problems(path)]
    for problem in problems:
        checks.from_error(problem)
    return None if problems else chosen


def check_signature(
    function: Callable[..., Any],
    key: str,
    positional: Sequence[str],
    keywords: Sequence[str],
    checks: Checklist,
    *,
    more: bool = False,
) -> bool:
    """Return whether a user's function accepts the arguments that megarl passes, and requires no others.

    `more`: it may require further keyword arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # some functions not written in Python have no signature
    parameters = signature.parameters.values()
    try:
        bound = signature.bind_partial(*positional, **dict.fromkeys(keywords)).arguments
        lacks = [p for p in parameters if p.default is p.empty and p.name not in bound and p.kind not in _ANY]
        fits = all(more and p.kind is not p.POSITIONAL_ONLY for p in lacks)
    except TypeError:
        fits = False
    if not fits:
        called, place = name_of(function), place_of(function)
        checks.fail(
            key,
            f"{called}{f' ({place})' if place else ''} does not accept the arguments with which it is called",
            found=f"{called}{signature}",
            allowed=f"{called}({', '.join([*positional, '*', *keywords])})",
            fix="change its parameters; a field of the samples is passed if `reads` names it",
        )
    return fits


#: Parameters that need no argument.
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_function(reference: str, key: str, checks: Checklist) -> bool:
    """Return whether a reference leads to a function, without importing it."""
    try:
        check_reference(reference, key)
    except ConfigError as error:
        checks.from_error(error)
        return False
    checks.ok(f"{key}: {reference}")
    return True
