"""Jinja templates for prompts, and chat templates. They run in a sandbox, because recipes may come from strangers."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.data.announcement import NO_TOOLS, Announcement
from megarl.data.messages import ASSISTANT, SYSTEM_ROLES, Message, extra_keys
from megarl.data.rows import Row, without_nulls
from megarl.data.turns import after_turn
from megarl.system.errors import ConfigError, DataError, encoding_fix

_OVERRIDE = "data.override_chat_template"
#: Variables that every chat template gets without the recipe's help.
_OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})
#: A tag that only transformers reads, around the assistant's text.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
#: Directives of strftime.
_STRFTIME = (*("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y"), *"aAbBcdDeFGhHIjmMpRSTuUVwWxXyYzZ")
_FILE_SUFFIXES = (".jinja", ".jinja2", ".j2", ".txt")
#: Example inputs, to find out which of them a chat template writes.
_EXAMPLE = Row({}, "an example", 0)
_QUESTION = [{"role": "user", "content": "x"}]
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}},
    },
}


def read_template(value: str, key: str) -> str:
    """Return a template's text; `value` is the text itself or the name of a file, whose last line break is dropped.

    Args:
        key: the recipe key of `value`, for the error.
    """
    inline = "{{" in value or "{%" in value or "\n" in value
    path = Path(value).expanduser()
    if not inline and path.is_file():
        return _read_text(path, key).removesuffix("\n")
    if not inline:
        raise ConfigError(
            "the template file does not exist"
            if value.endswith(_FILE_SUFFIXES)
            else "the value is neither Jinja text nor the name of a file",
            where=key,
            found=value,
            allowed="Jinja text such as '{{ content | trim }}', or a file with it",
        )
    return value


def _read_text(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fix = encoding_fix(error.object, str(path))
        raise ConfigError("the template is not UTF-8 text", where=key, found=str(path), fix=fix) from error
    except OSError as error:
        problem = f"the template cannot be read: {error.strerror or error}"
        raise ConfigError(problem, where=key, found=str(path), fix="check the file's permissions") from error


def check_chat_template(text: str, where: str) -> None:
    """Raise an error for a chat template that transformers cannot parse."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # Jinja has no `generation` tag: transformers adds it to mark the assistant's text.
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
    """Return a function (content, row) -> prompt text. The template reads `content`, each column by name, and `row`.

    >>> prompt_formatter("{{ content | trim }} ({{ unit }})")(" how far? ", Row({"unit": "km"}, "doc", 1))
    'how far? (km)'
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
            f"broken template: {error.message}",
            where=f"{key}, line {error.lineno}",
            found=text,
            fix="correct the Jinja syntax in this line",
        ) from error

    def render(content: str, row: Row) -> str:
        try:
            return compiled.render({**row, "content": content, "row": dict(row)})
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise DataError(
                f"{key} fails on this row: {error}",
                where=row.where,
                allowed=f"the variables content and row, and the columns {', '.join(row)}",
                fix=f"correct {key} or the row",
            ) from error

    return render


def no_chat_template() -> ConfigError:
    """Return the error for a recipe that needs a chat template when the tokenizer has none."""
    return ConfigError(
        "the tokenizer has no chat template",
        where="data.chat_template",
        found=True,
        fix="set data.override_chat_template, or data.chat_template: false for plain text prompts",
    )


def no_template_for_tools() -> ConfigError:
    """Return the error for an environment with tools when prompts are plain text."""
    return ConfigError(
        "the environment has tools, but no chat template is used that could list them",
        where="data.chat_template",
        found="no chat template is used",
        fix=f"set {_OVERRIDE}, or choose a model with a chat template; or, for the environment `tools`, set "
        "env.announce=none where the model knows them",
    )


class ChatTemplate:
    """A chat template with its inputs other than messages; calling it with messages returns a prompt's text.

    Args:
        template: Jinja text, or several texts by name: `default`, and `tool_use` for prompts with tools.
        tools: the environment's tools, which every prompt lists.
        more: further variables of the template, `data.chat_template_kwargs`.
        date: the date that the template reads, `data.date`; None: today.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | Mapping[str, str],
        tools: Announcement,
        more: Mapping[str, Any],
        date: str | None = None,
    ) -> None:
        self._tokenizer, self._tools, self._more = tokenizer, tools, dict(more)
        # roles whose content the template is known to write; `Turns` checks the role of the assistant
        self._roles = {ASSISTANT}
        self._templates = {"default": template} if isinstance(template, str) else dict(template)
        if "default" not in self._templates:
            raise no_chat_template()
        check_template_kwargs("".join(self._templates.values()), more)
        reads = _names_read("".join(self._templates.values()))
        if reads is None or "strftime_now" in reads:
            day = datetime.datetime.fromisoformat(date or datetime.date.today().isoformat())
            self._templates = {name: _on_day(text, day) for name, text in self._templates.items()}
        self._check_tools()

    def _check_tools(self) -> None:
        """Raise an error if the template leaves the environment's tools out of the prompt."""
        if self._tools.schemas and not self.writes_tools:
            raise unwritten_tools([str(tool.get("function", tool).get("name")) for tool in self._tools.schemas])
        if self._tools.system:
            try:
                written = self._tools.system.strip() in self.write(_QUESTION, _EXAMPLE)
            except DataError:  # some templates raise an error for the role `system`
                written = False
            if not written:
                raise ConfigError(
                    "the chat template writes no system message, so the model would never see the tools",
                    where="env.announce",
                    found="system",
                    fix=f"set {_OVERRIDE} to a template that writes system messages",
                )

    @cached_property
    def writes_tools(self) -> bool:
        """Whether the text that the template renders depends on its variable `tools`."""
        try:
            return self._rendered(_QUESTION, [_TOOL], _EXAMPLE) != self._rendered(_QUESTION, [], _EXAMPLE)
        except DataError:  # the template does not accept the example
            return any(map(reads_tools, self._templates.values()))

    def __call__(self, messages: list[Message], row: Row) -> str:
        """Return the text of a prompt's messages, up to where the assistant's answer begins."""
        self._refuse_special(messages, row)
        return self.observed(messages, row)

    def observed(self, messages: list[Message], row: Row) -> str:
        """Return the text of an environment's messages like `__call__`, but allow tokens that begin or end turns.

        A tool may quote such tokens, or a web page may contain them; that must not end the run.
        """
        text = self.write(messages, row)
        self._refuse_dropped(messages, range(len(messages)), row, text)
        return text

    @cached_property
    def _delimiters(self) -> list[str]:
        """Special tokens that begin or end a text or a turn, the longest first.

        A prompt may contain other special tokens: its subject, such as `<filename>`, or a format it requests,
        `[THINK]`.
        """
        added = self._tokenizer.added_tokens_decoder.values()
        special = {*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        try:
            turn = after_turn(lambda messages: self.write(messages, _EXAMPLE)) or ""
        except DataError:  # the template takes a single question only
            turn = ""
        ends = (self._tokenizer.bos_token, self._tokenizer.eos_token)
        # Some tokenizers have special tokens for white space, such as a line break, which messages may contain.
        tokens = (token for token in special if token.strip() and (token in turn or token in ends))
        return sorted(tokens, key=len, reverse=True)

    def _refuse_special(self, messages: list[Message], row: Row) -> None:
        """Raise an error if a message, other than the assistant's, contains a token that begins or ends turns."""
        for place, message in enumerate(messages, 1):
            delimiter = next((token for token in self._delimiters if token in _content(message)), None)
            if delimiter is not None and message["role"] != ASSISTANT:
                raise DataError(
                    f"message {place}, the {message['role']}'s, contains {delimiter!r}, a token that begins "
                    "or ends turns",
                    where=row.where,
                    found=_content(message)[:200],
                    fix="if the text is the whole prompt already, with its turns, set data.chat_template: false; else "
                    "remove the token or the row",
                )

    def conversation(self, messages: list[Message], first: int, row: Row) -> str:
        """Return the text of a whole conversation; messages from index `first` on are the response."""
        self._refuse_special(messages, row)
        text = self.write(messages, row, prompt=False)
        for place in range(first, len(messages)):
            message = messages[place]
            if message["role"] not in self._roles or extra_keys(message):
                # templates may write a message's reasoning only if no message follows, so render up to this message
                ended = messages[: place + 1]
                so_far = text if len(ended) == len(messages) else self.write(ended, row, prompt=False)
                self._refuse_dropped(ended, [place], row, so_far, prompt=False)
        return text

    def write(self, messages: list[Message], row: Row, *, prompt: bool = True) -> str:
        """Return the template's text of the messages; with `prompt`, the text ends where the answer begins."""
        if self._tools.system:
            messages = _with_system(messages, self._tools.system)
        return self._rendered(messages, self._announced(row), row, prompt=prompt)

    def _rendered(self, messages: list[Message], tools: list[dict[str, Any]], row: Row, *, prompt: bool = True) -> str:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self._templates.get("tool_use" if tools else "default", self._templates["default"]),
                tokenize=False,
                add_generation_prompt=prompt,
                **self._more,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise DataError(
                f"the chat template fails on this row: {error}",
                where=row.where,
                found=[message["role"] for message in messages],
                fix=f"correct the messages or {_OVERRIDE}",
            ) from error

    def _announced(self, row: Row) -> list[dict[str, Any]]:
        """Return the tools in the row's column `tools`, or the environment's if it has none."""
        tools = row_tools(row)
        if not tools:
            return self._tools.schemas
        if self._tools != NO_TOOLS or not self.writes_tools:
            raise DataError(
                "column 'tools' lists tools, but the environment has its own tools"
                if self._tools != NO_TOOLS
                else "column 'tools' lists tools, but the chat template does not write them",
                where=row.where,
                fix="remove the column, or use an environment without tools"
                if self._tools != NO_TOOLS
                else f"remove the column, or set {_OVERRIDE} to a template that writes them",
            )
        return tools

    def _refuse_dropped(
        self, messages: list[Message], places: Iterable[int], row: Row, text: str, *, prompt: bool = True
    ) -> None:
        """Raise an error if the template leaves out a key of the messages at `places`.

        The content is checked if a message has keys other than role and content, and else once for each role.
        """
        for place in places:
            message, keys = messages[place], extra_keys(messages[place])
            # Check the content of each role's first message: a template may leave out the messages of a role.
            once = message["role"] not in self._roles
            self._roles.add(message["role"])
            for key in [*keys, *(["content"] if (keys or once) and _content(message).strip() else [])]:
                without = {name: value for name, value in message.items() if name != key}
                others = [*messages[:place], {"content": "", **without}, *messages[place + 1 :]]
                try:
                    written = self.write(others, row, prompt=prompt)
                except DataError:
                    continue  # the template fails without this key, so it reads the key
                if written == text:
                    raise DataError(
                        f"the chat template leaves out {key!r} of message {place + 1}, the {message.get('role')}'s",
                        where=row.where,
                        found=message[key],
                        allowed="message keys that the template writes",
                        fix=f"remove the key or message from the row, or set {_OVERRIDE} to a template that writes it",
                    )


def check_template_kwargs(template: str, more: Mapping[str, Any]) -> None:
    """Raise an error for variables in `more` (`data.chat_template_kwargs`) that a chat template does not read."""
    reads = _names_read(template)
    for name in more:
        if reads is not None and (name not in reads or name in _OWN_NAMES):
            raise ConfigError(
                "the chat template does not read this variable, so it has no effect"
                if name not in _OWN_NAMES
                else "the run sets this variable of the chat template itself",
                where=f"data.chat_template_kwargs.{name}",
                found=more[name],
                allowed=sorted(n for n in reads - _OWN_NAMES if not n.endswith("_token")) or "nothing",
                fix="remove it, or correct the name",
            )


def unwritten_tools(names: Sequence[str] = ()) -> ConfigError:
    """Return the error for an environment's tools that the chat template does not write; `names`: the tools' names."""
    return ConfigError(
        "the chat template does not write the environment's tools, so the model would never see them",
        where="env",
        found=", ".join(names) or None,
        fix=f"set {_OVERRIDE} to a template that writes `tools`; or, for the environment `tools`, set "
        "env.announce=system to write them into the system message, or env.announce=none where the model knows them",
    )


def _on_day(template: str, day: datetime.datetime) -> str:
    """Return the chat template with a macro that replaces transformers' `strftime_now` and formats the date `day`."""
    values = [("%%", "\ue000"), *((f"%{sign}", day.strftime(f"%{sign}")) for sign in _STRFTIME), ("\ue000", "%")]
    filters = "".join(f" | replace({json.dumps(sign)}, {json.dumps(value)})" for sign, value in values)
    macro = f"{{%- macro strftime_now(format) -%}}{{{{ format{filters} }}}}{{%- endmacro %}}"
    return f"{macro}\n{template}"  # Jinja drops a line break right after a block


def _with_system(messages: list[Message], text: str) -> list[Message]:
    """Return the messages with `text` appended to the system message, or as a new system message."""
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        return [{**messages[0], "content": f"{_content(messages[0])}\n\n{text}".strip()}, *messages[1:]]
    return [{"role": SYSTEM_ROLES[0], "content": text}, *messages]


def _content(message: Message) -> str:
    return str(message.get("content") or "")


def row_tools(row: Row) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools in the row's column `tools`; empty if there are none."""
    value = row.get("tools")
    if isinstance(value, str) and value:
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            "column 'tools' is not a list of tools",
            where=row.where,
            found=repr(row["tools"])[:200],
            allowed="a list of JSON schemas, or its JSON text",
            fix="correct the column, or rename it",
        )
    return [without_nulls(tool) for tool in value]


def _names_read(template: str) -> set[str] | None:
    """Return the variables that a chat template reads and does not set; None if plain Jinja cannot parse it."""
    import jinja2
    from jinja2 import meta

    # not sandboxed, as the template is parsed and not rendered
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except jinja2.TemplateError:
        return None


def reads_tools(template: str) -> bool:
    """Return whether a chat template reads the variable `tools`; True if plain Jinja cannot parse the template."""
    names = _names_read(template)
    return names is None or "tools" in names


def chat_renderer(
    tokenizer: Any,
    override: str | None,
    tools: Announcement = NO_TOOLS,
    more: Mapping[str, Any] | None = None,
    date: str | None = None,
) -> ChatTemplate:
    """Return the chat template to use: `override` (text or file name), or else the tokenizer's.

    Args:
        tools: the environment's tools, which every prompt lists.
        more: further variables of the template, `data.chat_template_kwargs`.
        date: the date that the template reads, `data.date`; None: today.
    """
    template = read_template(override, _OVERRIDE) if override is not None else tokenizer.chat_template
    if not template:
        raise no_chat_template()
    return ChatTemplate(tokenizer, template, tools, more or {}, date)
