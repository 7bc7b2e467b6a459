"""A checkpoint in the form of OpenVLA-OFT's published ones, with random weights, and what classes of transformers
compute from its files, one block at a time."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn

from megarl.architectures.vision import KNOWN_TOWERS
from megarl.models.weight_table import WeightTable
from megarl.models.weights.files import FolderWriter
from megarl.robots.models.vla.config import policy_config

#: config.json of openvla-7b and of its OFT fine-tunings, without names of code and of sources.
CONFIG: dict[str, Any] = {
    "model_type": "openvla",
    "architectures": ["OpenVLAForActionPrediction"],
    "arch_specifier": "no-align+fused-gelu-mlp",
    "vision_backbone_id": "dinosiglip-vit-so-224px",
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "timm_override_act_layers": [None, None],
    "use_fused_vision_backbone": True,
    "image_sizes": [224, 224],
    "image_resize_strategy": "resize-naive",
    "llm_backbone_id": "llama2-7b-pure",
    "llm_max_length": 2048,
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "pad_token_id": 32000,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "pad_token_id": 32000,
        "vocab_size": 32064,
    },
}
#: Parameters of openvla-7b, with those that are never run.
PARAMETERS = 7_541_237_184
PREPROCESSOR = {
    "image_processor_type": "PrismaticImageProcessor",
    "processor_class": "PrismaticProcessor",
    "use_fused_vision_backbone": True,
    "image_resize_strategy": "resize-naive",
    "input_sizes": [[3, 224, 224], [3, 224, 224]],
    "interpolations": ["bicubic", "bicubic"],
    "means": [[0.484375, 0.455078125, 0.40625], [0.5, 0.5, 0.5]],
    "stds": [[0.228515625, 0.2236328125, 0.224609375], [0.5, 0.5, 0.5]],
}
_NUMBERS = {"mean": 0.0, "std": 0.4, "max": 1.0, "min": -1.0, "q01": -0.9, "q99": 0.9}
STATISTICS = {
    "libero_goal_no_noops": {
        "action": {name: [value] * 7 for name, value in _NUMBERS.items()} | {"mask": [True] * 6 + [False]},
        "num_transitions": 52042,
        "num_trajectories": 428,
    }
}


def published_config(layers: int) -> dict[str, Any]:
    """Return the published config.json with this number of layers of the language model."""
    return CONFIG | {"text_config": {**CONFIG["text_config"], "num_hidden_layers": layers}, "norm_stats": STATISTICS}


def published_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the files, with the parts of the towers that are never run."""
    shapes = WeightTable.of(policy_config(config, "config")).shapes()
    for name, tower in zip(("featurizer", "fused_featurizer"), KNOWN_TOWERS.values(), strict=True):
        prefix = f"vision_backbone.{name}."
        last = {key: shape for key, shape in shapes.items() if key.startswith(f"{prefix}blocks.0.")}
        shapes |= {key.replace("blocks.0.", f"blocks.{tower.blocks}."): shape for key, shape in last.items()}
        shapes |= {f"{prefix}norm.{part}": (tower.width,) for part in ("weight", "bias")}
    width, mlp = 1152, 4304
    pooling = {"q": (width, width), "kv": (2 * width, width), "proj": (width, width)}
    pooling |= {"norm": (width,), "mlp.fc1": (mlp, width), "mlp.fc2": (width, mlp)}
    prefix = "vision_backbone.fused_featurizer.attn_pool."
    shapes[f"{prefix}latent"] = (1, 1, width)
    for name, shape in pooling.items():
        shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
    return shapes


def write_published(folder: Path, layers: int) -> int:
    """Write the checkpoint in bfloat16, in files of 7 GB at most, a tensor at a time; return its number of parameters.

    A matrix has a variance of 1 / inputs, so that the numbers have the same size in every layer.
    """
    config = published_config(layers)
    shapes = published_shapes(config)
    generator = torch.Generator().manual_seed(0)
    with FolderWriter(folder, shapes, torch.bfloat16, 7_000_000_000) as writer:
        for name, shape in shapes.items():
            drawn = torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
            if len(shape) == 1 and ("norm" in name or name.endswith("scale_factor")) and not name.endswith("bias"):
                drawn = 1 + drawn / 10
            else:
                drawn *= 0.1 if len(shape) == 1 else math.prod(shape[1:]) ** -0.5
            writer.add(name, drawn)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "dataset_statistics.json").write_text(json.dumps(STATISTICS))
    return sum(math.prod(shape) for shape in shapes.values())


_MLP = {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}


class Files:
    """Tensors of the folder's files by name, in float32, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = [safe_open(file, "pt") for file in sorted(folder.glob("*.safetensors"))]
        self._of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._of[name].get_tensor(name).float()

    def fill(self, module: nn.Module, prefix: str) -> nn.Module:
        """Put tensors into a module that was built without memory; all of its own names are read after `prefix`."""
        state = {name: self[prefix + name] for name in module.state_dict()}
        module.load_state_dict(state, assign=True)
        return module.eval()

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Apply the linear map `name` with its bias."""
        return F.linear(x, self[f"{name}.weight"], self[f"{name}.bias"])


@dataclass(frozen=True)
class _BlockNames:
    """How a class of transformers names the tensors of a block of timm's towers."""

    attention: str  # the module with the projections of queries, keys and values, which the files have as one tensor
    modules: dict[str, str]  # the files' name of a module with weight and bias -> its name in the class
    scales: dict[str, str] = field(default_factory=dict)  # the same for tensors


def _through_blocks(
    files: Files, prefix: str, tower: str, block: nn.Module, names: _BlockNames, hidden: Tensor, **inputs: Any
) -> Tensor:
    """Features after the blocks of a tower whose tensors begin with `prefix`, which `block` is filled with in turn."""
    for number in range(KNOWN_TOWERS[tower].blocks):
        own = f"{prefix}blocks.{number}."
        state = {theirs: files[own + ours] for ours, theirs in names.scales.items()}
        for kind in ("weight", "bias"):
            thirds = files[f"{own}attn.qkv.{kind}"].chunk(3)
            state |= {f"{names.attention}.{n}_proj.{kind}": third for n, third in zip("qkv", thirds, strict=True)}
            state |= {f"{theirs}.{kind}": files[f"{own}{ours}.{kind}"] for ours, theirs in names.modules.items()}
        block.load_state_dict(state, assign=True)
        hidden = _first(block.eval()(hidden, **inputs))
    return hidden


def dino_features(files: Files, pixels: Tensor) -> Tensor:
    """Features [n, 256, 1024] of the block before the last one, by transformers' DINOv2 with registers."""
    from transformers import Dinov2WithRegistersConfig
    from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as classes

    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "image_size": 224, "patch_size": 14}
    config = Dinov2WithRegistersConfig(**sizes, num_register_tokens=4, attn_implementation="eager")
    prefix = "vision_backbone.featurizer."
    with torch.device("meta"):
        embeddings = classes.Dinov2WithRegistersEmbeddings(config)
        block = classes.Dinov2WithRegistersLayer(config)
    places = files[f"{prefix}pos_embed"]
    embeddings.load_state_dict(
        {
            "cls_token": files[f"{prefix}cls_token"],
            "mask_token": torch.zeros(1, 1024),
            "register_tokens": files[f"{prefix}reg_token"],
            "position_embeddings": torch.cat([torch.zeros(1, 1, 1024), places], 1),  # only patches have a place
            "patch_embeddings.projection.weight": files[f"{prefix}patch_embed.proj.weight"],
            "patch_embeddings.projection.bias": files[f"{prefix}patch_embed.proj.bias"],
        },
        strict=False,
        assign=True,
    )
    modules = {"norm1": "norm1", "attn.proj": "attention.o_proj", "norm2": "norm2"} | _MLP
    names = _BlockNames("attention", modules, {f"ls{n}.scale_factor": f"layer_scale{n}.lambda1" for n in (1, 2)})
    tower = "vit_large_patch14_reg4_dinov2.lvd142m"
    hidden = _through_blocks(files, prefix, tower, block, names, embeddings.eval()(pixels))
    return hidden[:, -256:]


def siglip_features(files: Files, pixels: Tensor) -> Tensor:
    """Features [n, 256, 1152] of the block before the last one, by transformers' SigLIP."""
    from transformers import SiglipVisionConfig
    from transformers.models.siglip import modeling_siglip as classes

    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
    sizes |= {"image_size": 224, "patch_size": 14}
    config = SiglipVisionConfig(**sizes, hidden_act="gelu", attn_implementation="eager")
    prefix = "vision_backbone.fused_featurizer."
    with torch.device("meta"):
        block = classes.SiglipEncoderLayer(config)
    embeddings = classes.SiglipVisionEmbeddings(config)
    embeddings.load_state_dict(
        {
            "patch_embedding.weight": files[f"{prefix}patch_embed.proj.weight"],
            "patch_embedding.bias": files[f"{prefix}patch_embed.proj.bias"],
            "position_embedding.weight": files[f"{prefix}pos_embed"][0],
        },
        strict=False,
    )
    modules = {"norm1": "layer_norm1", "attn.proj": "self_attn.out_proj", "norm2": "layer_norm2"} | _MLP
    names = _BlockNames("self_attn", modules)
    hidden = embeddings.eval()(pixels)
    return _through_blocks(files, prefix, "vit_so400m_patch14_siglip_224", block, names, hidden, attention_mask=None)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@torch.no_grad()
def reference_logits(
    folder: Path, prompt: list[int], pixels: Tensor, slots: int, columns: tuple[int, int], *, causal: bool = False
) -> Tensor:
    """Logits [slots, columns] of a policy call with zero embeddings in its slots, float32, from the folder's files.

    `pixels` [cameras, 6, 224, 224]; `causal`: each column sees only the earlier ones, which these policies do not do.
    """
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as classes

    files = Files(folder)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    config = LlamaConfig(**text, attn_implementation="eager")
    features = torch.cat([dino_features(files, pixels[:, :3]), siglip_features(files, pixels[:, 3:])], 2)
    for layer in ("fc1", "fc2"):
        features = F.gelu(files.linear(f"projector.{layer}", features))
    features = files.linear("projector.fc3", features).flatten(0, 1)
    table = files["language_model.model.embed_tokens.weight"]
    ids = torch.tensor(prompt)
    rows = [table[ids[:1]], features, table[ids[1:]], torch.zeros(slots, config.hidden_size), table[2:3]]
    hidden = torch.cat(rows)[None]
    del table
    length = hidden.shape[1]
    places = torch.arange(length)[None]
    rotary = classes.LlamaRotaryEmbedding(config)(hidden, places)
    mask = torch.zeros(1, 1, length, length)
    if causal:
        mask = mask.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    with torch.device("meta"):
        layer_module = classes.LlamaDecoderLayer(config, 0)
    for number in range(config.num_hidden_layers):
        layer = files.fill(layer_module, f"language_model.model.layers.{number}.")
        hidden = _first(
            layer(hidden, attention_mask=mask, position_ids=places, position_embeddings=rotary, use_cache=False)
        )
    with torch.device("meta"):
        norm = classes.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    hidden = files.fill(norm, "language_model.model.norm.")(hidden)
    first = length - slots - 2  # the stop token is last, and a slot is predicted one column earlier
    return F.linear(hidden[0, first : first + slots], files["language_model.lm_head.weight"][slice(*columns)])
