"""`megarl completion`: a bash or zsh script that completes commands, options, recipes, keys and their values.

The script contains all these words, so completing starts no Python. Run the command again after an upgrade.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping

from megarl import __version__
from megarl.commands.keys import all_entries
from megarl.config.load import recipe_names

SHELLS = ("bash", "zsh")

#: Functions used by both shells. They print candidates, one per line; `:files` and `:recipes` stand for file names.
_COMMON = r"""
_megarl_options() {  # COMMAND: its options
  case $1 in
@OPTIONS@
  esac
}

_megarl_choices() {  # COMMAND OPTION: the values of the option; fails where it takes none
  case "$1 $2" in
@CHOICES@
    *) return 1 ;;
  esac
}

_megarl_values() {  # KEY: its values
  case $1 in
@VALUES@
  esac
}

_megarl_keys() {  # PREFIX: the keys that begin with it, up to their next dot
  local key rest found last=
  for key in $(printf '%s\n' @KEYS@); do
    case $key in "$1"*) ;; *) continue ;; esac
    rest=${key#"$1"}
    case $rest in *.*) found=$1${rest%%.*}. ;; *) found=$key= ;; esac
    if [ "$found" != "$last" ]; then echo "$found"; fi
    last=$found
  done
}

_megarl_words() {  # CURRENT WORD...: candidates for CURRENT after `megarl WORD...`
  local current=$1 command= before= word named=0 skip=
  shift
  for word in "$@"; do
    before=$word
    if [ -z "$command" ]; then command=$word; continue; fi
    if [ -n "$skip" ]; then skip=; before=; continue; fi
    case $word in
      -*) if _megarl_choices "$command" "$word" > /dev/null; then skip=1; fi ;;
      *) named=$((named + 1)) ;;
    esac
  done
  if [ -z "$command" ]; then printf '%s\n' @COMMANDS@; return; fi
  if [ -n "$skip" ]; then _megarl_choices "$command" "$before"; return; fi
  case $current in
    -*) _megarl_options "$command"; return ;;
    *=*) _megarl_values "${current%%=*}" | while read -r word; do echo "${current%%=*}=$word"; done; return ;;
  esac
  case $command in
    @RECIPE_COMMANDS@)
      if [ $named = 0 ]; then printf '%s\n' @RECIPES@ :recipes; else _megarl_keys "$current"; fi ;;
    keys) _megarl_keys "$current" | tr -d '=' ;;
@WORDS@
    *) echo :files ;;
  esac
}
"""

_BASH = r"""
_megarl() {
  local line=${COMP_LINE:0:COMP_POINT} words current known=()
  read -ra words <<< "$line"
  case $line in *[[:space:]]) current= ;; *) current=${words[-1]}; unset 'words[-1]' ;; esac
  local IFS=$'\n' word
  for word in $(_megarl_words "$current" "${words[@]:1}"); do
    case $word in
      :files) known+=($(compgen -f -- "$current")) ;;
      :recipes) known+=($(compgen -f -X '!*.y*ml' -- "$current") $(compgen -d -- "$current")) ;;
      "$current"*) known+=("$word") ;;
    esac
  done
  case "${known[*]}" in *=|*.) compopt -o nospace 2> /dev/null ;; esac
  case $COMP_WORDBREAKS in *=*) case $current in *=*) known=("${known[@]#"${current%%=*}="}") ;; esac ;; esac
  COMPREPLY=("${known[@]}")
}
complete -o filenames -F _megarl megarl
"""

_ZSH = r"""
_megarl() {
  local word current=${words[CURRENT]} IFS=$'\n'
  local -a known open
  for word in $(_megarl_words "$current" "${(@)words[2,CURRENT-1]}"); do
    case $word in
      :files) _files ;;
      :recipes) _files -g '*.y*ml' ;;
      *[.=]) open+=("$word") ;;
      *) known+=("$word") ;;
    esac
  done
  if (( $#known )); then compadd -- "${known[@]}"; fi
  if (( $#open )); then compadd -S '' -- "${open[@]}"; fi
}
if [ "$funcstack[1]" = _megarl ]; then _megarl "$@"; else compdef _megarl megarl; fi
"""
_TAILS = {"bash": _BASH, "zsh": _ZSH}


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the completion script of a shell for the commands of `parser`."""
    commands = _choices_of(parser)
    inside = {name: _choices_of(one) for name, one in commands.items()}
    options: dict[str, list[str]] = {}
    choices: dict[str, list[str]] = {}
    for name, one in commands.items():
        mine = [action for action in one._actions if action.option_strings]
        options[name] = [text for action in mine for text in action.option_strings if text.startswith("--")]
        choices |= {f"'{name} {text}'": _values_of(a) for a in mine if a.nargs != 0 for text in a.option_strings}
    every = [one for one in all_entries() if "NAME" not in one.path]
    above = {one.path.rpartition(".")[0] for one in every}
    keys = [one for one in every if one.path not in above]
    recipes = [name for name, one in commands.items() if any(a.metavar == "RECIPE" for a in one._actions)]
    parts = {
        "OPTIONS": _cases(options),
        "CHOICES": _cases(choices),
        "VALUES": _cases({one.path: one.choices for one in keys if one.choices}),
        "KEYS": " ".join(dict.fromkeys(one.path for one in keys)),
        "COMMANDS": " ".join(commands),
        "RECIPE_COMMANDS": "|".join(recipes),
        "RECIPES": " ".join(recipe_names()),
        "WORDS": _cases({name: [*found] for name, found in inside.items() if found} | {"completion": SHELLS}),
    }
    text = _COMMON + _TAILS[shell]
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    head = "#compdef megarl\n" if shell == "zsh" else ""
    return f"{head}# Completion of megarl {__version__} for {shell}, written by `megarl completion {shell}`.\n{text}"


def _choices_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the subcommands of a parser by their names."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return actions[0].choices if actions else {}


def _values_of(action: argparse.Action) -> list[str]:
    return [str(one) for one in action.choices] if action.choices else [":files"]


def _cases(words: Mapping[str, Iterable[str]]) -> str:
    """Return the branches of a shell `case`, each of which prints its words, one per line."""
    return "\n".join(
        f"    {pattern}) printf '%s\\n' {' '.join(map(shlex.quote, branches))} ;;"
        for pattern, branches in words.items()
    )
