"""Reference results for engines: the same model by transformers and torch.optim in float64 on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megarl.certificate.models import OPTIM, SEED, token_loss, value_loss
from megarl.data.batch import Batch


class Reference:
    """A model of transformers in float64, trained with plain AdamW.

    Args:
        folder: folder of the model.
        critic: whether its head returns one value per token.
    """

    def __init__(self, folder: Path, *, critic: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        # grouped matrix products do not support float64
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **eager)
        self._value: Tensor | None = None
        parameters = list(self._model.parameters())
        if critic:
            size = self._model.config.hidden_size
            drawn = torch.randn((1, size), generator=torch.Generator().manual_seed(SEED)) * 0.1
            self._value = torch.nn.Parameter(drawn.double())
            parameters = [*self._model.model.parameters(), self._value]
        self._parameters = parameters
        self._optimizer = torch.optim.AdamW(
            parameters, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, weight_decay=OPTIM.weight_decay
        )

    def outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Return log-probs and entropies of all response tokens, or values."""
        rows_by_name: dict[str, list[Tensor]] = {}
        for prompt, response in zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True):
            hidden = self._model.model(torch.cat([prompt, response])[None]).last_hidden_state[0, len(prompt) - 1 : -1]
            if self._value is not None:
                rows_by_name.setdefault("value", []).append((hidden @ self._value.t())[:, 0])
                continue
            rows = torch.log_softmax(self._model.lm_head(hidden), -1)
            rows_by_name.setdefault("log-prob", []).append(rows.gather(1, response[:, None])[:, 0])
            rows_by_name.setdefault("entropy", []).append(-(rows.exp() * rows).sum(-1))
        return {name: torch.cat(parts) for name, parts in rows_by_name.items()}

    def step(self, batch: Batch) -> dict[str, float]:
        """Make one optimizer step; return loss and gradient norm before clipping."""
        self._optimizer.zero_grad()
        numbers = self.outputs(batch)
        weights = batch["loss_weights"].values.double()
        loss = value_loss(weights, *numbers.values()) if len(numbers) == 1 else token_loss(weights, *numbers.values())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, OPTIM.clip_grad)
        self._optimizer.step()
        return {"loss": float(loss.detach()), "gradient norm": float(norm)}
