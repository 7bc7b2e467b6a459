"""The text that presents tools in a system message, for models whose chat template writes none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_HOW_TO_CALL = {
    "qwen": "To call a function, write a JSON object with its name and arguments inside <tool_call></tool_call>:\n"
    '<tool_call>\n{"name": "function name", "arguments": {"argument name": "value"}}\n</tool_call>',
    "llama3": "To call a function, answer with a JSON object with its name and parameters, and nothing else:\n"
    '{"name": "function name", "parameters": {"argument name": "value"}}',
}
_HOW_TO_CALL["qwen25"] = _HOW_TO_CALL["qwen"]


def system_text(parser: str, schemas: Sequence[dict[str, Any]]) -> str:
    """Return the description of the tools, and of a call in the form that `parser` reads."""
    listed = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return f"You may call these functions, given as JSON schemas:\n<tools>\n{listed}\n</tools>\n{_HOW_TO_CALL[parser]}"
