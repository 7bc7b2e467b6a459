"""The tools of an environment in the prompts: by the chat template, in the system message, or not at all."""

from __future__ import annotations

import json

import pytest

from megarl.config.data import DataConfig
from megarl.config.model import ModelConfig
from megarl.config.run import RunConfig
from megarl.data.render import chat_of
from megarl.data.rows import Row
from megarl.data.tokenizer import character_tokenizer
from megarl.envs.registry import check_environment, check_tool_template
from megarl.envs.tools import Tools, ToolSettings
from megarl.system.errors import ConfigError

TOOL = "megarl.recipes.calculator:multiply"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
WRITING = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + PLAIN
USERS_ONLY = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + PLAIN
READING = "{% set given = tools %}" + PLAIN  # and does not write it
QUESTION = {"role": "user", "content": "47*85="}


def prompt(template: str | None, messages: list[dict[str, str]] | None = None, **settings: str) -> str:
    tools = Tools.announcement(ToolSettings(tools=[TOOL], **settings))
    chat = chat_of(DataConfig(override_chat_template=template), character_tokenizer("ab"), tools)
    assert chat is not None
    return chat(messages or [QUESTION], Row({}, "here", 1))


def test_tools_stand_where_the_template_writes_them() -> None:
    assert '"name": "multiply"' in prompt(WRITING)
    assert prompt(PLAIN, announce="none") == "[user]47*85="


@pytest.mark.parametrize("template", [PLAIN, READING])
def test_a_template_that_does_not_write_them_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"does not write(?s:.)*multiply(?s:.)*env.announce=system"):
        prompt(template)


def test_without_a_template_nothing_could_present_them() -> None:
    with pytest.raises(ConfigError, match=r"no chat template(?s:.)*data.override_chat_template"):
        prompt(None)


@pytest.mark.parametrize(("parser", "form"), [("qwen", "<tool_call>"), ("llama3", '"parameters": {')])
def test_the_system_message_presents_them_with_the_form_of_a_call(parser: str, form: str) -> None:
    text = prompt(PLAIN, announce="system", parser=parser)
    schema = json.loads(text.split("<tools>\n")[1].split("\n</tools>")[0])
    assert text.startswith("[system]You may call")
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    assert form in text.partition("</tools>")[2]
    assert text.endswith("[user]47*85=")


def test_a_system_message_of_the_row_comes_before_them() -> None:
    text = prompt(PLAIN, [{"role": "system", "content": "Be brief."}, QUESTION], announce="system")
    assert text.startswith("[system]Be brief.\n\nYou may call")
    assert text.count("[system]") == 1


@pytest.mark.parametrize("template", [USERS_ONLY, NO_SYSTEM])
def test_a_template_without_system_messages_is_refused(template: str) -> None:
    with pytest.raises(ConfigError, match=r"writes no system message"):
        prompt(template, announce="system")


@pytest.mark.parametrize("where", ["override", "tokenizer_config.json", "chat_template.jinja"])
def test_the_dry_run_reads_the_template(tmp_path, where: str) -> None:
    def check(template: str) -> None:
        text = json.dumps({"chat_template": template}) if where.endswith("json") else template
        (tmp_path / where).write_text(text)
        data = DataConfig(override_chat_template=template if where == "override" else None)
        check_tool_template(RunConfig(name="run", model=ModelConfig(path=str(tmp_path)), data=data))

    check(WRITING)
    with pytest.raises(ConfigError, match=r"does not write(?s:.)*env.announce=system"):
        check(PLAIN)


@pytest.mark.usefixtures("forked")
def test_the_dry_run_asks_the_environment_whether_it_needs_the_template() -> None:
    env = {"name": "tools", "tools": [TOOL]}
    with pytest.raises(ConfigError, match="does not write"):
        check_environment(RunConfig(name="run", env=env, data=DataConfig(override_chat_template=PLAIN)), limit_s=60)
    assert not Tools.needs_tool_template(ToolSettings(tools=[TOOL], announce="system"))
