"""Tools as typed Python functions: the JSON schema comes from the signature and the docstring."""

from __future__ import annotations

import base64
import inspect
import io
import json
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from megarl.rewards.signatures import IMAGES
from megarl.system.errors import ConfigError

_SECTION = re.compile(r"^(\w[\w ]*):\s*$")
_ENTRY = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True)
class Tool:
    """A function, the model of its arguments, and its schema in the form of chat templates.

    `uses_images`: the function has a parameter `images`, which gets the episode's images and is not in the schema.
    """

    function: Callable[..., Any]
    arguments: type[BaseModel]
    schema: dict[str, Any]
    uses_images: bool = False

    @property
    def name(self) -> str:
        """The name by which a policy calls the tool."""
        return str(self.schema["function"]["name"])

    def call(self, arguments: dict[str, Any], images: Sequence[Any] = ()) -> Any:
        """Return the function's result: text, or parts of text and images if it contains images.

        Args:
            arguments: plain JSON.
            images: images of the episode as PIL images, for a function that uses them.

        Raises:
            ValueError: the arguments are invalid; the message is meant for the policy.
            DataError: an image that vision encoders cannot use; the message is meant for the policy.
        """
        try:
            given = self.arguments.model_validate(arguments)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors(include_url=False)
            )
            raise ValueError(f"the arguments of {self.name} do not fit: {faults}") from None
        named = {name: getattr(given, name) for name in self.arguments.model_fields}
        result = self.function(**named, **({IMAGES: list(images)} if self.uses_images else {}))
        if isinstance(result, str):
            return result
        return parts_of(result) or _plain(result)


def tool_of(function: Callable[..., Any]) -> Tool:
    """Return the tool that wraps `function`.

    >>> def double(x: int) -> int:
    ...     '''Twice a number.
    ...
    ...     Args:
    ...         x: the number.
    ...     '''
    ...     return 2 * x
    >>> tool_of(double).schema["function"]["parameters"]["properties"]
    {'x': {'description': 'the number.', 'type': 'integer'}}

    Raises:
        ConfigError: the docstring does not begin with a description, or an argument has no type, a type that JSON
            lacks, or a name that a JSON object cannot provide.
    """
    name = getattr(function, "__name__", repr(function))
    summary, described = _docstring(function)
    if not summary:
        raise ConfigError(
            f"the tool {name!r} has no docstring that begins with a description, so the model cannot see what it does",
            where="env.tools",
            fix="write a docstring that describes first the tool, and then its arguments",
        )
    hints = typing.get_type_hints(function)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == IMAGES:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"the tool {name!r} has the parameter {parameter}, which a JSON object cannot provide",
                where="env.tools",
                fix="give every parameter a name that a call can use: no *args, **kwargs or positional-only parameters",
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"the argument {parameter.name!r} of the tool {name!r} has no type",
                where="env.tools",
                fix=f"annotate it, for example {parameter.name}: str",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name],
            Field(default, description=described.get(parameter.name)),
        )
    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        parameters = arguments.model_json_schema()
    except (PydanticUserError, TypeError, NameError) as error:
        raise ConfigError(
            f"the arguments of the tool {name!r} have no JSON schema: {str(error).partition(chr(10))[0]}",
            where="env.tools",
            fix="annotate the arguments with JSON types: str, int, float, bool, list, dict, or a pydantic model; begin "
            "their names with a letter",
        ) from error
    uses_images = IMAGES in inspect.signature(function).parameters
    return Tool(function, arguments, as_schema(name, summary, parameters), uses_images)


def parts_of(result: Any) -> list[dict[str, Any]] | None:
    """Return a result that is or contains PIL images as parts, with the images as data URLs; None without images. Raise
    DataError for an image that vision encoders cannot use.
    """
    items = result if isinstance(result, list | tuple) else [result]
    if not any(_is_image(item) for item in items):
        return None
    from megarl.data.images import open_image  # imported only here, because most processes of tools never use images

    return [
        {"type": "image", "image": data_url(open_image(item, None, f"result {number}"))}
        if _is_image(item)
        else {"type": "text", "text": item if isinstance(item, str) else _plain(item)}
        for number, item in enumerate(items)
    ]


def _is_image(value: Any) -> bool:
    from PIL.Image import Image

    return isinstance(value, Image)


def data_url(image: Any) -> str:
    """Return a PIL image as the data URL of a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def as_schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the schema in the form that chat templates take."""
    shown = {key: value for key, value in _untitled(parameters).items() if key != "additionalProperties"}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": shown}}


def _untitled(schema: Any) -> Any:
    """Return the schema without the titles that pydantic derives from names."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _untitled(inner) for name, inner in value.items()}
        elif key != "title":
            plain[key] = _untitled(value)
    return plain


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return a docstring's text before its sections, and its description of each argument (Google's form)."""
    before: list[str] = []
    described: dict[str, str] = {}
    section, last = None, None
    for line in inspect.cleandoc(function.__doc__ or "").splitlines():
        if heading := _SECTION.match(line):
            section, last = heading[1], None
        elif section is None:
            before.append(line)
        elif section in ("Args", "Arguments", "Parameters"):
            if entry := _ENTRY.match(line.strip()):
                last = entry[1]
                described[last] = entry[2]
            elif last is not None:
                described[last] = f"{described[last]} {line.strip()}".strip()
    return " ".join(" ".join(before).split()), described


def _plain(result: Any) -> str:
    """Return a result as text for a model: JSON if possible."""
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
