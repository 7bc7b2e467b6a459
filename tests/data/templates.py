"""Chat templates of model families in a short form that writes the same text, with small tokenizers of their kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LLAMA2 = """{%- set first = messages[0] %}
{%- set system = '<<SYS>>\\n' + first.content + '\\n<</SYS>>\\n\\n' if first.role == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
  {%- if m.role == 'user' %}{{ bos_token + '[INST] ' + (system if loop.first else '') + m.content.strip() }} [/INST]
  {%- else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

_MISTRAL = """{{ bos_token }}{% for m in messages %}
  {%- if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
  {%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""

_LLAMA3 = """{{ bos_token }}{% for m in messages %}
  {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_CHATML = """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_QWEN25 = """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
  {%- else %}
    {{- '<|im_start|>' + m.role }}{% if m.content or not m.tool_calls %}{{ '\\n' + m.content }}{% endif %}
    {%- for call in m.tool_calls or [] %}
      {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}{{ '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_QWEN3 = """{%- set first = messages[0] %}
{%- if first.role == 'system' %}{{ '<|im_start|>system\\n' + first.content + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(query=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
  {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
  {%- elif m.role == 'assistant' %}
    {%- set said, thought = m.content, m.reasoning_content or '' %}
    {%- if '</think>' in said and not thought %}
      {%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
      {%- set said = said.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.query and (loop.last or thought) %}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') }}
    {%- else %}{{ said }}{% endif %}
    {%- for call in m.tool_calls or [] %}
      {%- if not loop.first or said %}{{ '\\n' }}{% endif %}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
      {{- '}\\n</tool_call>' }}
    {%- endfor %}{{ '<|im_end|>\\n' }}
  {%- elif m.role == 'tool' %}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

_ZEPHYR = """{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}
  {%- if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{%- endfor %}"""

_GEMMA = """{{ bos_token }}{% for m in messages %}
  {%- set role = 'model' if m.role == 'assistant' else m.role %}
  {{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

_R1 = """{{ bos_token }}{% for m in messages %}
  {%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
  {%- else %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""

_THINKING = _QWEN3.partition("{%- if add_generation_prompt %}")[0] + (
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template and the kind of tokenizer it comes with.

    Attributes:
        end: token that ends a turn.
        kind: `bytes` for a byte-level tokenizer, else `prepend_scheme` of one with a mark for blanks.
        special: further special tokens, which the template writes.
        system, tools, thinks: messages that the template takes.
    """

    template: str
    end: str
    kind: str
    special: tuple[str, ...] = ()
    system: bool = True
    tools: bool = False
    thinks: bool = False
    settings: dict[str, bool] = field(default_factory=dict)


_IM = ("<|im_start|>",)
FAMILIES = {
    "llama2": Family(_LLAMA2, "</s>", "first"),
    "llama2-legacy": Family(_LLAMA2, "</s>", "always"),
    "mistral": Family(_MISTRAL, "</s>", "first", system=False),
    "llama3": Family(_LLAMA3, "<|eot_id|>", "bytes", ("<|start_header_id|>", "<|end_header_id|>")),
    "qwen2.5": Family(_QWEN25, "<|im_end|>", "bytes", _IM, tools=True),
    "qwen3": Family(_QWEN3, "<|im_end|>", "bytes", _IM, tools=True, thinks=True),
    "qwen3-off": Family(
        _QWEN3, "<|im_end|>", "bytes", _IM, tools=True, thinks=True, settings={"enable_thinking": False}
    ),
    "smollm2": Family(_CHATML, "<|im_end|>", "bytes", _IM),
    "zephyr": Family(_ZEPHYR, "</s>", "first"),
    "tinyllama": Family(_ZEPHYR, "</s>", "always"),
    "gemma": Family(_GEMMA, "<end_of_turn>", "never", ("<start_of_turn>",), system=False),
    "deepseek-r1": Family(_R1, "</s>", "bytes", ("<|User|>", "<|Assistant|>"), system=False),
    "qwen3-thinking": Family(_THINKING, "<|im_end|>", "bytes", _IM, tools=True, thinks=True),
}

_WORDS = "the answer is yes no hello you are kind add to a number [INST] [/INST] user assistant system model tool " * 40
_QWEN_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def tokenizer_of(kind: str, special: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """Return a small tokenizer that can write any text, with `<s>` and `</s>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *special]
    backend = Tokenizer(models.BPE(byte_fallback=kind != "bytes", unk_token="<unk>"))
    if kind == "bytes":
        split = pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind)
        backend.decoder = decoders.Metaspace(prepend_scheme=kind)
        alphabet = [*map(chr, range(32, 127)), "\n", "\t", "é", "学", "▁"]
    texts = [_WORDS, *("\n" * n for n in (2, 3, 2, 3))]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
