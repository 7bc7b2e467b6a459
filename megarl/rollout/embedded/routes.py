"""Records which experts the tokens of a session choose (`megarl.data.routes`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.data.routes import RouteForm
from megarl.models.layers.mesh import Axis
from megarl.models.layers.passes import Room
from megarl.rollout.embedded.token_rows import TokenRows


class RouteRecord(TokenRows):
    """The expert routes of the tokens in each cache row.

    Args:
        form: form of the routes of the whole model.
        layers: indices of this process's layers with experts among all layers with experts.
        stages: the pipeline stages, which hold the other layers.
    """

    def __init__(self, form: RouteForm, layers: Sequence[int], stages: Axis, room: Room) -> None:
        rows = form.empty(room.slots * room.max_length).to(room.device)[:, : len(layers) * form.chosen]
        super().__init__(rows.reshape(room.slots, room.max_length, -1).contiguous(), form.none)
        self._form, self._stages = form, stages
        most = stages.all_max(len(layers), room.device)
        places = torch.full((most,), -1, device=room.device)
        places[: len(layers)] = torch.tensor(layers, dtype=torch.int64)
        self._places = stages.gather(places)

    def fill(self, lengths: Sequence[int], rows: Sequence[Sequence[int]], routes: Sequence[Tensor]) -> None:
        """Store the routes of prompts in the cache rows of all their samples.

        Args:
            lengths: tokens of each prompt.
            rows: cache rows of each prompt.
            routes: int64 [t, k] per layer, the experts of the packed prompts' tokens.
        """
        prompts = torch.cat(list(routes), 1).to(self._form.dtype).split(list(lengths))
        for prompt, own_rows in zip(prompts, rows, strict=True):
            self._rows[list(own_rows), : len(prompt)] = prompt

    def read(self, rows: Sequence[int], tokens: Sequence[int]) -> list[Tensor]:
        """Return the whole model's routes of the first `tokens` tokens of `rows`, on the host; collective over the
        pipeline stages."""
        chosen, longest = self._form.chosen, max(tokens)
        local = self._rows[list(rows), :longest]
        wide = self._places.shape[1] * chosen
        padded = torch.nn.functional.pad(local, (0, wide - local.shape[2]))
        whole = self._form.empty(len(rows) * longest).view(len(rows), longest, self._form.layers, chosen)
        for places, part in zip(self._places.cpu(), self._stages.gather(padded).cpu(), strict=True):
            layers = part.view(len(rows), longest, -1, chosen)
            whole[:, :, places[places >= 0]] = layers[:, :, places >= 0]
        return [routes[:count].flatten(1).clone() for routes, count in zip(whole, tokens, strict=True)]
