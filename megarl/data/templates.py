"""Jinja prompt templates, run in a sandbox because recipes travel between people."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.data.rows import Row
from megarl.errors import ConfigError, DataError, encoding_fix

_FILE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")


def read_template(value: str, key: str) -> str:
    """Template text given inline or as the name of a file (less one final line break).

    Raises:
        ConfigError: `value` looks like a file name and there is no such file.
    """
    inline = "{{" in value or "{%" in value or "\n" in value
    path = Path(value).expanduser()
    if not inline and path.is_file():
        return _read_text(path, key).removesuffix("\n")
    if not inline:
        raise ConfigError(
            "no such template file" if value.endswith(_FILE_SUFFIXES) else "neither a template nor a file",
            where=key,
            found=value,
            allowed="Jinja text such as '{{ content | trim }}', or a file that holds it",
        )
    return value


def _read_text(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fix = encoding_fix(error.object, str(path))
        raise ConfigError("the template is not UTF-8 text", where=key, found=str(path), fix=fix) from error
    except OSError as error:
        what = f"the template cannot be read: {error.strerror or error}"
        raise ConfigError(what, where=key, found=str(path), fix="check the file's permissions") from error


def check_chat_template(text: str, where: str) -> None:
    """Refuse a chat template that does not parse, as transformers parses it.

    Raises:
        ConfigError: names `where` and the line.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # What transformers adds for training on the assistant's text only marks a block.
    plain = re.sub(r"{%(-?)\s*(end)?generation\s*(-?)%}", r"{#\1 \3#}", text)
    try:
        ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except jinja2.TemplateSyntaxError as error:
        line = text.splitlines()[error.lineno - 1 : error.lineno]
        raise ConfigError(
            f"broken chat template: {error.message}",
            where=f"{where}, line {error.lineno}",
            found=line[0].strip()[:200] if line else None,
            fix="correct the template; data.override_chat_template names another one",
        ) from error


def prompt_formatter(template: str | None) -> Callable[[str, Row], str]:
    """Function (content, row) -> prompt text. The template sees `content`, each column by name, and `row`.

    >>> prompt_formatter("{{ content | trim }} ({{ unit }})")(" how far? ", Row({"unit": "km"}, "doc", 1))
    'how far? (km)'

    Raises:
        ConfigError: the template does not parse.
        DataError: on a row that lacks a column the template uses, or that makes it fail; the row is named.
    """
    if template is None:
        return lambda content, row: content
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    key = "data.format_prompt"
    text = read_template(template, key)
    environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    try:
        compiled = environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"broken template: {error.message}", where=f"{key}, line {error.lineno}", found=text
        ) from error

    def render(content: str, row: Row) -> str:
        try:
            return compiled.render({**row, "content": content, "row": dict(row)})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise DataError(
                f"{key} fails on this row: {error}",
                where=row.where,
                allowed=f"content, row, and the columns {', '.join(row)}",
                fix=f"correct {key} or the row",
            ) from error

    return render


def no_chat_template() -> ConfigError:
    """The error for a chat template that is asked for and that no one has."""
    return ConfigError(
        "the tokenizer has no chat template",
        where="data.chat_template",
        found=True,
        fix="set data.override_chat_template, or data.chat_template: false for plain text prompts",
    )


def chat_renderer(
    tokenizer: Any, override: str | None, tools: Sequence[dict[str, Any]] = ()
) -> Callable[[list[dict[str, Any]], Row], str]:
    """Function (messages, row) -> text that ends where the assistant begins to answer.

    Args:
        tools: JSON schemas of tools that the template announces to the model.

    Raises:
        ConfigError: the tokenizer has no chat template and none is given.
        DataError: the template refuses a row's messages; the row is named.
    """
    key = "data.override_chat_template"
    template = read_template(override, key) if override is not None else None
    if template is None and not tokenizer.chat_template:
        raise no_chat_template()
    import jinja2

    def render(messages: list[dict[str, Any]], row: Row) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                chat_template=template,  # None: the tokenizer's, of which there may be one for tools
                tokenize=False,
                add_generation_prompt=True,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"the chat template fails on this row: {error}",
                where=row.where,
                found=[message["role"] for message in messages],
                fix=f"correct the messages or {key}",
            ) from error

    return render
