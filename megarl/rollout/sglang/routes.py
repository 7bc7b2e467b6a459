"""Routes of samples that servers generate (`megarl.data.routes`).

A server returns them with the last token of a request: for every token of the prompt and the response but the last, the
experts of every layer, int32 [tokens, layers, chosen] in base64. Layers without experts have zeros. Tokens whose keys
and values were in the prefix cache have the experts of when these were computed.
"""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from megarl.config.sglang import SGLangConfig
from megarl.data.routes import RouteForm

SWITCH = "--enable-return-routed-experts"
REQUEST = {"return_routed_experts": True}
_SAME_MODEL = "let the server load the same model as the trainer (model.path)"


def returning_routes(config: SGLangConfig) -> SGLangConfig:
    """Return the settings of servers that also return routes."""
    return config.model_copy(update={"extra_args": [*config.extra_args, SWITCH]})


def read_routes(meta: dict[str, Any], form: RouteForm, tokens: int) -> Tensor | None:
    """Return the routes in the `meta_info` of an answer about a sequence of `tokens` tokens; None: it has none.

    Raises:
        ValueError: the routes are of another model or of another sequence.
    """
    text = meta.get("routed_experts")
    if text is None:
        return None
    numbers = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int32)
    shape = tokens - 1, len(form.sparse), form.chosen
    if len(numbers) != shape[0] * shape[1] * shape[2]:
        raise ValueError(
            f"the server's answer has {len(numbers)} numbers as routes; expected shape: {list(shape)}; {_SAME_MODEL}"
        )
    layers = numbers.view(shape)[:, torch.tensor(form.sparse)]
    # The chosen experts of a token differ. If two are equal, they are the zeros of a token without recorded routes.
    if form.chosen > 1 and bool((missing := layers[..., 0] == layers[..., 1]).any()):
        token, layer = missing.nonzero()[0].tolist()
        raise ValueError(
            f"the server's answer has experts {layers[token, layer].tolist()} as route of token {token} in expert "
            f"layer {layer}; expected: {form.chosen} different experts. The server has not recorded this token: run "
            "servers with an SGLang that `make sglang-env` installs"
        )
    routes = layers.flatten(1)
    if len(routes) and not 0 <= int(routes.min()) <= int(routes.max()) < form.experts:
        raise ValueError(
            f"the server's answer has routes to experts {int(routes.min())} to {int(routes.max())}, but the model has "
            f"{form.experts} experts; {_SAME_MODEL}"
        )
    return routes.to(form.dtype)
