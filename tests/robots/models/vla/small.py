"""Small random robot policies in the layout of published checkpoints, and what their authors' code computes, written
down again in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.models.weight_table import WeightTable
from megarl.robots.models.vla.calls import CallLayout
from megarl.robots.models.vla.config import policy_config

DINO = {"width": 24, "blocks": 2, "heads": 2, "mlp": 40, "patch": 4, "image": 8}
DINO |= {"class_token": True, "registers": 3, "layer_scale": True}
SIGLIP = {"width": 16, "blocks": 3, "heads": 4, "mlp": 36, "patch": 4, "image": 8}
CONFIG: dict[str, Any] = {
    "model_type": "openvla",
    "vision_towers": [DINO, SIGLIP],
    "state_dim": 5,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 330,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
    },
}
#: Of three calls: tokens of the prompt; D = 2, K = 3; two cameras.
PROMPTS = (4, 7, 4)
CAMERAS, DIM, CHUNK = 2, 2, 3


def layout(prompt: int, *, parallel: bool = True) -> CallLayout:
    return CallLayout(prompt, 4, DIM, CHUNK, CAMERAS, state=True, parallel=parallel)


def save_small(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Write a checkpoint, and give its tensors."""
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in WeightTable.of(policy_config(config, "small")).shapes().items():
        drawn = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.2)
        tensors[name] = drawn + 1 if "norm" in name and name.endswith("weight") else drawn
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def observed(count: int) -> tuple[Tensor, Tensor]:
    """Pixels [count, CAMERAS, 6, 8, 8] and states [count, 5]."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, CAMERAS, 6, 8, 8, generator=generator), torch.randn(count, 5, generator=generator)


def prompt(number: int) -> Tensor:
    return torch.arange(PROMPTS[number]) * 7 % 60 + number


# -- the oracle -------------------------------------------------------------------------------------------------------


class Oracle:
    """Hidden states of one call, from the tensors of a checkpoint."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.t = {name: value.double() for name, value in tensors.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.t[f"{name}.weight"].T + self.t.get(f"{name}.bias", 0.0)

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * self.t[f"{name}.weight"] + self.t[f"{name}.bias"]

    def tower(self, name: str, sizes: dict[str, Any], picture: Tensor) -> Tensor:
        """Features [patches, width]: timm's blocks but the last, whose norm is not applied."""
        side, patch, width = sizes["image"] // sizes["patch"], sizes["patch"], sizes["width"]
        rows = []
        for y in range(side):
            for x in range(side):
                box = picture[:, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
                weight = self.t[f"{name}.patch_embed.proj.weight"]
                rows.append((weight * box).sum((1, 2, 3)) + self.t[f"{name}.patch_embed.proj.bias"])
        hidden = torch.stack(rows) + self.t[f"{name}.pos_embed"][0]
        first = [self.t[f"{name}.{one}"][0] for one in ("cls_token", "reg_token") if f"{name}.{one}" in self.t]
        hidden = torch.cat([*first, hidden])
        head = width // sizes["heads"]
        for number in range(sizes["blocks"]):
            block = f"{name}.blocks.{number}"
            qkv = self.linear(f"{block}.attn.qkv", self.layer_norm(f"{block}.norm1", hidden))
            q, k, v = qkv.view(len(hidden), 3, sizes["heads"], head).permute(1, 2, 0, 3)
            context = (q @ k.transpose(1, 2) / head**0.5).softmax(-1) @ v
            branch = self.linear(f"{block}.attn.proj", context.transpose(0, 1).flatten(1))
            hidden = hidden + branch * self.t.get(f"{block}.ls1.scale_factor", 1.0)
            wide = self.gelu(self.linear(f"{block}.mlp.fc1", self.layer_norm(f"{block}.norm2", hidden)))
            branch = self.linear(f"{block}.mlp.fc2", wide)
            hidden = hidden + branch * self.t.get(f"{block}.ls2.scale_factor", 1.0)
        return hidden[-side * side :]

    @staticmethod
    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    def embeddings(self, text_ids: Tensor, pixels: Tensor, state: Tensor, slots: int, stop: int | None) -> Tensor:
        """Embeddings of a call's columns; `text_ids`: its prompt."""
        table = self.t["language_model.model.embed_tokens.weight"]
        visual = []
        for picture in pixels.double():
            towers = [("featurizer", DINO, picture[:3]), ("fused_featurizer", SIGLIP, picture[3:])]
            features = torch.cat([self.tower(f"vision_backbone.{n}", s, p) for n, s, p in towers], 1)
            for layer in ("fc1", "fc2"):
                features = self.gelu(self.linear(f"projector.{layer}", features))
            visual.append(self.linear("projector.fc3", features))
        wide = self.gelu(self.linear("proprio_projector.fc1", state.double()))
        state_row = self.linear("proprio_projector.fc2", wide)[None]
        text = table[text_ids]
        rows = [text[:1], *visual, state_row, text[1:], torch.zeros(slots, table.shape[1], dtype=torch.float64)]
        return torch.cat([*rows, *([] if stop is None else [table[stop][None]])])

    def hidden(self, x: Tensor, seen: Tensor) -> Tensor:
        """After the last norm. `seen`: bool [t, t], which columns each column attends to."""
        sizes = CONFIG["text_config"]
        heads = sizes["num_attention_heads"]
        head, length = sizes["hidden_size"] // heads, len(x)
        angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, head, 2).double() / head)
        cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)

        def turned(one: Tensor) -> Tensor:
            return one * cos + torch.cat([-one[..., head // 2 :], one[..., : head // 2]], -1) * sin

        for number in range(sizes["num_hidden_layers"]):
            layer = f"language_model.model.layers.{number}"
            normed = self.rms(f"{layer}.input_layernorm", x)
            q, k, v = (
                self.linear(f"{layer}.self_attn.{name}_proj", normed).view(length, heads, head).transpose(0, 1)
                for name in "qkv"
            )
            scores = (turned(q) @ turned(k).transpose(1, 2) / head**0.5).masked_fill(~seen, -torch.inf)
            context = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
            x = x + self.linear(f"{layer}.self_attn.o_proj", context)
            normed = self.rms(f"{layer}.post_attention_layernorm", x)
            gate, up = (self.linear(f"{layer}.mlp.{name}_proj", normed) for name in ("gate", "up"))
            x = x + self.linear(f"{layer}.mlp.down_proj", gate * gate.sigmoid() * up)
        return self.rms("language_model.model.norm", x)

    def rms(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.t[f"{name}.weight"]
