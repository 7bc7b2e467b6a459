"""Sizes of a VLA policy's vision part: vision towers, and the projector of their features into the language model.

    pictures -> tower(s): features of each patch -> joined -> projector -> embeddings of the language model
    state    -> state projector -------------------------------------------> one more of these

A flow-matching policy also has an action expert (`megarl.architectures.action_expert`).

Names of tensors are those of published checkpoints of OpenVLA and OpenVLA-OFT, whose towers are timm's. Nothing here
imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.architectures.action_expert import ExpertShape
from megarl.system.errors import ConfigError

#: Prefix of the tensors of a policy's language model in checkpoints.
LANGUAGE_MODEL = "language_model."
#: Prefix of the tensors that embed the proprioceptive state.
STATE_PROJECTOR = "proprio_projector."
_KEYS = ("width", "blocks", "heads", "mlp", "patch", "image", "class_token", "registers", "layer_scale")


@dataclass(frozen=True)
class TowerShape:
    """The used part of a vision transformer: the features of patches after `blocks` blocks, without a last norm.

    Attributes:
        patch, image: side of a patch and of a picture, in pixels.
    """

    width: int  # width of the features
    blocks: int  # number of blocks that are computed; policies take the features before a published tower's last block
    heads: int
    mlp: int  # width between the two linear maps of a block
    patch: int
    image: int
    class_token: bool = False  # whether a token represents the whole picture
    registers: int = 0  # number of register tokens, which stand for no part of the picture
    layer_scale: bool = False  # whether a vector scales each branch of a block

    @property
    def patches(self) -> int:
        """Number of patches of a picture."""
        return (self.image // self.patch) ** 2

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by name."""
        width, shapes = self.width, dict[str, tuple[int, ...]]()
        if self.class_token:
            shapes["cls_token"] = (1, 1, width)
        if self.registers:
            shapes["reg_token"] = (1, self.registers, width)
        shapes["pos_embed"] = (1, self.patches, width)
        shapes |= {"patch_embed.proj.weight": (width, 3, self.patch, self.patch), "patch_embed.proj.bias": (width,)}
        for block in range(self.blocks):
            branches = {"norm1": (), "attn.qkv": (3 * width, width), "attn.proj": (width, width)}
            branches |= {"norm2": (), "mlp.fc1": (self.mlp, width), "mlp.fc2": (width, self.mlp)}
            for name, shape in branches.items():
                shapes[f"blocks.{block}.{name}.weight"] = shape or (width,)
                shapes[f"blocks.{block}.{name}.bias"] = (shape or (width,))[:1]
            if self.layer_scale:
                shapes |= {f"blocks.{block}.{name}.scale_factor": (width,) for name in ("ls1", "ls2")}
        return shapes


#: Towers of published checkpoints, by timm's names, for pictures of 224 pixels.
KNOWN_TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerShape(1024, 23, 16, 4096, 14, 224, True, 4, True),
    "vit_so400m_patch14_siglip_224": TowerShape(1152, 26, 16, 4304, 14, 224),
}
_TOWER_NAMES = ("featurizer", "fused_featurizer")
_AFTER_BLOCKS = ("norm.", "fc_norm.", "attn_pool.", "head.")


@dataclass(frozen=True)
class VisionShape:
    """The sizes of a robot policy's parts other than its language model: vision towers, projectors, action expert."""

    # one or two towers with the same number of patches; each gets all pictures in its own normalisation
    towers: tuple[TowerShape, ...]
    hidden: int  # width of the language model
    state: int = 0  # length of the robot's state vector, which becomes one more embedding; 0: the policy reads no state
    expert: ExpertShape | None = None  # the action expert of a flow-matching policy; None: actions are tokens

    @property
    def patches(self) -> int:
        """Number of embeddings of a picture."""
        return self.towers[0].patches

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """By parameter name: the name and shape of its tensor in a checkpoint."""
        shapes = {
            f"towers.{number}.{name}": (f"vision_backbone.{_TOWER_NAMES[number]}.{name}", shape)
            for number, tower in enumerate(self.towers)
            for name, shape in tower.tensors.items()
        }
        features, hidden = sum(tower.width for tower in self.towers), self.hidden
        maps = {"fc1": (hidden, features), "fc2": (hidden, hidden)}
        if len(self.towers) > 1:
            maps = {"fc1": (4 * features, features), "fc2": (hidden, 4 * features), "fc3": (hidden, hidden)}
        parts = {"projector": maps}
        if self.state:
            parts["proprio_projector"] = {"fc1": (hidden, self.state), "fc2": (hidden, hidden)}
        for part, layers in parts.items():
            for layer, shape in layers.items():
                shapes[f"{part}.{layer}.weight"] = (f"{part}.{layer}.weight", shape)
                shapes[f"{part}.{layer}.bias"] = (f"{part}.{layer}.bias", shape[:1])
        expert = {} if self.expert is None else self.expert.tensors
        return shapes | {f"expert.{name}": tensor for name, tensor in expert.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], hidden: int, where: str) -> VisionShape:
        """Return the vision part that `config`, a policy's config.json, describes.

        Towers are `timm_model_ids` of a published checkpoint, or `vision_towers`: a list of their sizes.
        """
        spelt, names = config.get("vision_towers"), config.get("timm_model_ids")
        if spelt is not None:
            towers = tuple(_tower(tower, f"{where}.vision_towers[{n}]") for n, tower in enumerate(spelt))
        else:
            unknown = [name for name in names or [None] if name not in KNOWN_TOWERS]
            if unknown:
                raise ConfigError(
                    "the vision towers of this policy are not known",
                    where=f"{where}.timm_model_ids",
                    found=names,
                    allowed=list(KNOWN_TOWERS),
                    fix="use known towers, or list the sizes of these towers in vision_towers",
                )
            towers = tuple(KNOWN_TOWERS[name] for name in names or [])
        if not 1 <= len(towers) <= len(_TOWER_NAMES) or len({(tower.patches, tower.image) for tower in towers}) > 1:
            sizes = [(tower.image, tower.patches) for tower in towers]
            allowed = "one or two towers that take pictures of one size and make equally many patches of them"
            raise ConfigError("the vision towers do not fit together", where=where, found=sizes, allowed=allowed)
        return cls(towers, hidden, state_size(config, where), ExpertShape.from_config(config, where))

    def is_unused_in_tower(self, name: str) -> bool:
        """Return whether tensor `name` of a published checkpoint belongs to a part of its towers that is not executed.

        These are the last block and everything after it (features are those of the block before, without a norm), and
        SigLIP's pooling.
        """
        for number, tower in enumerate(self.towers):
            before = f"vision_backbone.{_TOWER_NAMES[number]}."
            if name.startswith(before):
                return name.removeprefix(before).startswith((f"blocks.{tower.blocks}.", *_AFTER_BLOCKS))
        return False


def state_size(config: Mapping[str, Any], where: str) -> int:
    """Return how many numbers of the robot's state are an input of the policy; 0: none.

    `state_dim` gives the size, or `proprio_dim` if `use_proprio` is true, as SimpleVLA-RL writes it.
    """
    state, used, size = config.get("state_dim"), config.get("use_proprio"), config.get("proprio_dim")
    for key, value in (("state_dim", state), ("proprio_dim", size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ConfigError(
                "the size of the proprioceptive state is invalid",
                where=f"{where}.{key}",
                found=value,
                allowed="0 or a larger integer",
            )
    if used not in (None, True, False):
        raise ConfigError(
            "use_proprio must be true or false", where=f"{where}.use_proprio", found=used, allowed="true or false"
        )
    if used and not size and not state:
        raise ConfigError(
            "use_proprio is true, but the size of the proprioceptive state is missing or 0",
            where=f"{where}.proprio_dim",
            found=size,
            allowed="the number of values in the state, such as 8 for LIBERO and 14 for two arms",
            fix="set proprio_dim",
        )
    if state is None:
        return int(size or 0) if used else 0
    if used is not None and int(state) != (int(size or state) if used else 0):
        raise ConfigError(
            "two keys give different sizes of the proprioceptive state",
            where=where,
            found={"state_dim": state, "use_proprio": used, "proprio_dim": size},
            allowed="one of state_dim, and use_proprio with proprio_dim",
            fix="remove one of them",
        )
    return int(state)


def _tower(sizes: Mapping[str, Any], where: str) -> TowerShape:
    wrong = sorted(sizes.keys() - set(_KEYS))
    missing = sorted(set(_KEYS[:6]) - sizes.keys())
    if wrong or missing:
        raise ConfigError(
            f"unknown sizes of a vision tower: {', '.join(wrong)}"
            if wrong
            else f"sizes of a vision tower are missing: {', '.join(missing)}",
            where=where,
            found=list(sizes),
            allowed=list(_KEYS),
        )
    tower = TowerShape(**sizes)
    if tower.width % tower.heads or tower.image % tower.patch:
        raise ConfigError(
            "the sizes of a vision tower do not fit together",
            where=where,
            found=dict(sizes),
            allowed="heads divides width, and patch divides image",
        )
    return tower
