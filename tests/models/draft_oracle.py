"""Draft heads of tiny models: their files, and their loss by SGLang's formula with transformers' layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.data.batch import Batch
from tests.models.tiny import tiny_hf

AFTER = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
APART = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
PLACE = 3
"""The layer of the tiny models whose kind the head has."""


class DraftOracle(torch.nn.Module):
    """A tiny model and its draft head, in float64; the head's tensors have the names of published files."""

    def __init__(self, model_type: str, **changes: Any) -> None:
        super().__init__()
        self.after, self.policy = model_type in AFTER, tiny_hf(model_type, **changes)
        self.policy.config._experts_implementation = "eager"  # the others have no float64
        g = torch.Generator().manual_seed(7)
        head = copy.deepcopy(self.policy)
        with torch.no_grad():
            for tensor in head.parameters():
                tensor.add_(torch.randn(tensor.shape, generator=g) * 0.1)
        inner = head.model
        self.enorm, self.hnorm = copy.deepcopy(inner.norm), copy.deepcopy(inner.norm)
        with torch.no_grad():
            self.hnorm.weight.mul_(1.3)
        width = self.policy.config.hidden_size
        self.joint = torch.nn.Parameter(torch.randn(width, 2 * width, generator=g) * 0.1)
        self.head = head

    def outer(self) -> dict[str, Tensor]:
        names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
        prefix = f"model.layers.{PLACE + 1}." if self.after else "mtp."
        if not self.after:
            names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        tensors = (self.joint, self.enorm.weight, self.hnorm.weight, self.head.model.norm.weight)
        return {f"{prefix}{name}.weight": tensor for name, tensor in zip(names, tensors, strict=True)}

    def save(self, folder: Path, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Save model and head as published files have them, with the head in `dtype`; return the head's tensors."""
        self.policy.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        head = self.tensors(folder / "head", dtype)
        save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})
        file = folder / "config.json"
        key = "num_nextn_predict_layers" if self.after else "mtp_num_hidden_layers"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: 1}))
        return head

    def tensors(self, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return the head's tensors; transformers writes those of its layer to `folder`."""
        self.head.save_pretrained(folder)
        new, old = f"model.layers.{PLACE + 1}." if self.after else "mtp.layers.0.", f"model.layers.{PLACE}."
        stored = load_file(folder / "model.safetensors")
        found = {new + name.removeprefix(old): tensor for name, tensor in stored.items() if name.startswith(old)}
        return {name: tensor.to(dtype).contiguous() for name, tensor in (found | self.outer()).items()}

    def losses(self, batch: Batch) -> Tensor:
        """Return -log p of all tokens that have a draft, sample by sample, with the mean's weight in float64."""
        inner = copy.copy(self.head.model)
        inner._modules = dict(inner._modules)
        config = copy.deepcopy(inner.config)
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = [config.layer_types[PLACE]]
        inner.config, inner.layers = config, torch.nn.ModuleList([inner.layers[PLACE]])
        masks = batch["response_mask"].unbind() if "response_mask" in batch else None
        found = []
        for number, (prompt, response) in enumerate(
            zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True)
        ):
            tokens = torch.cat([prompt, response])
            if len(tokens) < 3:
                continue
            with torch.no_grad():
                hidden = self.policy.model(tokens[None], use_cache=False).last_hidden_state[:, :-1]
                embedded = self.policy.model.embed_tokens(tokens[None, 1:])
            both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1) @ self.joint.t()
            states = inner(inputs_embeds=both, use_cache=False).last_hidden_state[0, :-1]
            logp = torch.log_softmax(states @ self.policy.lm_head.weight.detach().t(), -1)
            chosen = logp.gather(1, tokens[2:, None])[:, 0]
            first = max(len(prompt) - 2, 0)
            kept = torch.ones(len(response), dtype=torch.bool) if masks is None else masks[number].bool()
            found.append(-chosen[first:][kept[max(2 - len(prompt), 0) :]])
        return torch.cat(found)
