"""The table of docs/models.md, from the architectures and the known models; see `megarl.commands.describe`."""

from __future__ import annotations

import json
from pathlib import Path

from megarl import artifacts
from megarl.architectures import ALIASES, ARCHITECTURES, descriptions
from megarl.architectures.decoders import DECODERS


def model_table() -> str:
    """Return the markdown table of all model types."""
    known = json.loads((Path(artifacts.__file__).parent / "known_models.json").read_text(encoding="utf-8"))
    names: dict[str, list[str]] = {}
    for name, config in known.items():
        names.setdefault(config["model_type"], []).append(f"`{name}`")
    texts = descriptions()
    rows = {kind: (text, kind) for kind, text in texts.items()}
    rows |= {kind: (f"the layers and tensors of `{same}`", same) for kind, same in ALIASES.items()}
    rows |= {kind: (f"a [vision encoder](images.md) before `{same}`", same) for kind, same in DECODERS.items()}
    lines = []
    for kind, (text, same) in sorted(rows.items()):
        served = ARCHITECTURES[same].served
        servers = "no" if isinstance(served.wrong, str) else "some configs" if served.partial else "yes"
        lines.append(f"| `{kind}` | {text} | {', '.join(names.get(kind, []))} | {servers} |")
    head = ["| `model_type` | what it is | names without a download | SGLang |", "|---|---|---|---|"]
    return "\n".join([*head, *lines]) + "\n"
