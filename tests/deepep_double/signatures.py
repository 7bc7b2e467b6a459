"""The arguments of DeepEP's `Buffer` in two versions, which its double must have.

`python -m tests.deepep_double.signatures REPOSITORY` writes signatures.json from a clone of
github.com/deepseek-ai/DeepEP. Nothing of it is imported. `Config`, of which only the size hints are used, is C++.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

from tests.te_double.signatures import arguments_of

TABLE = Path(__file__).with_name("signatures.json")
VERSIONS = {"1.2.1": "v1.2.1:deep_ep/buffer.py", "2.1.0": "dd758ca:deep_ep/buffers/legacy.py"}
FUNCTIONS = ("__init__", "get_dispatch_config", "get_combine_config", "get_dispatch_layout", "dispatch", "combine")


def read_signatures(source: str) -> dict[str, list[str]]:
    """Arguments of each of `FUNCTIONS` of the class Buffer, as `arguments_of` writes them."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    defined = {node.name: node for node in classes["Buffer"].body if isinstance(node, ast.FunctionDef)}
    return {name: arguments_of(defined[name]) for name in FUNCTIONS}


if __name__ == "__main__":
    show = ["git", "-C", sys.argv[1], "show"]
    texts = {version: subprocess.check_output([*show, at], text=True) for version, at in VERSIONS.items()}
    found = {version: read_signatures(text) for version, text in texts.items()}
    TABLE.write_text(json.dumps(found, indent=1) + "\n")
