"""Checks of the text around prompts: the chat template, and the tokens that end a response."""

from __future__ import annotations

from megarl.artifacts.facts import local_folder
from megarl.artifacts.generation_config import FILE, end_token_ids
from megarl.checks.checklist import Checklist
from megarl.config.run import RunConfig
from megarl.data.light_tokenizer import brings_chat_template
from megarl.data.render import uses_chat
from megarl.data.templates import check_chat_template as parse_chat_template
from megarl.data.templates import read_template
from megarl.errors import ConfigError


def check_chat_template(config: RunConfig, checks: Checklist) -> None:
    """Check that prompts go through a chat template, which changes the model's input."""
    data, brings = config.data, brings_chat_template(config.model)
    if data.override_chat_template is not None:
        key = "data.override_chat_template"
        try:
            parse_chat_template(read_template(data.override_chat_template, key), key)
        except ConfigError as error:
            checks.from_error("chat template", error)
        else:
            checks.ok("chat template", key)
    elif brings is None:
        checks.skip("chat template", "known when the tokenizer is here")
    elif uses_chat(data, brings):
        checks.ok("chat template", "the tokenizer's, around every prompt")
    elif brings and config.model.named_base:
        checks.ok("chat template", "none: model.path names a base model; data.chat_template=true uses the tokenizer's")
    elif brings:
        checks.ok("chat template", "none; the tokenizer's is not used")


def check_end_tokens(config: RunConfig, checks: Checklist) -> None:
    """Check that the model's end tokens can be read; without a tokenizer of transformers they are only numbers."""
    folder = None if config.model.path is None else local_folder(config.model.path)
    if folder is None or not (folder / FILE).is_file():
        return
    try:
        ids = end_token_ids(folder)
    except ConfigError as error:
        checks.from_error("end tokens", error)
        return
    names = ", ".join(map(str, ids)) or "none"
    checks.ok("end tokens", f"{names} of {FILE}, the tokenizer's, and that of the chat template")
