"""The command-line parser: argparse, with errors that suggest what was meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from megarl.system.errors import UserError, close_matches

_CHOICE = re.compile(r"(?s)argument (?P<what>.+?): invalid choice: (?P<found>.+) \(choose from (?P<allowed>.+)\)")
_NEEDED = re.compile(r"one of the arguments (?P<names>.+) is required")


class Parser(argparse.ArgumentParser):
    """An argparse parser with this project's errors for missing recipes and misspelt choices.

    The help of a command with a recipe lists the shipped recipes.
    """

    def format_help(self) -> str:
        """Return the help text, with the shipped recipes where the command takes one."""
        text = super().format_help()
        if not any(action.metavar == "RECIPE" for action in self._actions):
            return text
        from megarl.config.load import recipe_titles

        titles = recipe_titles()
        width = max(map(len, titles), default=0)
        return "\n".join([text, "shipped recipes:", *(f"  {name:<{width}}  {titles[name]}" for name in titles), ""])

    def error(self, message: str) -> NoReturn:
        """Print what is wrong with the arguments, and exit with code 2."""
        choice = _CHOICE.fullmatch(message)
        if choice is not None:
            self._refuse(self._misspelt(**choice.groupdict()))
        if (needed := _NEEDED.fullmatch(message)) is not None:
            self._refuse(self._one_of(needed["names"].split()))
        if message.endswith("required: RECIPE") or "required: RECIPE," in message:
            self._refuse(self._no_recipe())
        super().error(message)

    def nearest_option(self, command: str, text: str) -> str | None:
        """Return the option of a command whose name is nearest to `text`; None: no name is near."""
        commands = next(action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        options = [name for name in commands.choices[command]._option_string_actions if name.startswith("--")]
        return next(iter(close_matches(text.partition("=")[0], options)), None)

    def _refuse(self, problem: UserError) -> NoReturn:
        self.exit(problem.exit_code, f"megarl: {problem}\n")

    def _misspelt(self, what: str, found: str, allowed: str) -> UserError:
        word, names = found.strip("'"), [name.strip("'") for name in allowed.split(", ")]
        near = close_matches(word, names, cutoff=0.6)
        kind = f"unknown {what.lower()}" if what.isupper() else f"{what} has an unknown value"
        fix = f"did you mean {near[0]}?" if near else f"{self.prog} --help explains each"
        return UserError(kind, where=self.prog, found=word, allowed=names, fix=fix)

    def _one_of(self, names: Sequence[str]) -> UserError:
        helps = {action.option_strings[0]: action.help for action in self._actions if action.option_strings}
        return UserError(
            "one of these options is required",
            where=self.prog,
            allowed=[f"{name} ({helps.get(name)})" for name in names],
            fix=f"for example: {self.prog} RECIPE {names[0]} --dry-run",
        )

    def _no_recipe(self) -> UserError:
        from megarl.config.load import allowed_recipes

        return UserError(
            "the recipe is missing",
            where=self.prog,
            allowed=allowed_recipes(takes_runs=self.prog.endswith((" eval", " generate"))),
            fix=f"for example: {self.prog} grpo_quickstart",
        )
