"""Model sizes for the checks, from plain JSON: no torch, no transformers, no network."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from megarl.architectures import ARCHITECTURES, standard_config
from megarl.architectures.check import check_keys
from megarl.architectures.decoders import DECODERS, decoder_config, reads_vision
from megarl.architectures.draft import draft_place
from megarl.architectures.tensors import UNTIED_HEAD, Elements, ModelPart, elements, part_of
from megarl.architectures.values import (
    dense_width,
    head_width,
    key_value_heads,
    max_positions,
    mixers,
    mixture,
    needs_gpu_in_sglang,
    only_in_training,
    sparse_layers,
    wiring,
    wrong_in_sglang,
)
from megarl.architectures.vision import VisionShape
from megarl.architectures.vision_language import VisionEncoder
from megarl.artifacts.checkpoint_files import quantized_block
from megarl.artifacts.model_files import no_model
from megarl.artifacts.pipes import refuse_pipes
from megarl.artifacts.vla_folder import VLA_TYPE, complete_config
from megarl.config.model import ModelConfig
from megarl.models.layers.attention.plain import Attention
from megarl.models.layers.experts.plain import Mixture
from megarl.models.layers.mixer import Mixer
from megarl.models.layers.rules import WeightRule, existing
from megarl.models.layers.wiring import LLAMA, Wiring
from megarl.system.errors import ConfigError, close_matches, relative_path_fix

#: Where `make smollm2` writes its model.
SMALL_MODEL = "~/.cache/megarl/smollm2-135m-instruct"


@dataclass(frozen=True)
class ModelFacts:
    """The sizes of a decoder. `ffn` is the width of a dense layer or, if `experts` is not 0, of one expert.

    `dense_ffn` is the width of a mixture's dense layers (0: none).
    """

    source: str
    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    tied: bool
    dense_ffn: int = 0
    experts: int = 0
    experts_per_token: int = 0
    dense_layers: int = 0
    """Number of layers without experts in a mixture of experts."""
    sparse: tuple[bool, ...] = ()
    """Whether each layer has experts, in a mixture of experts; empty: all layers have."""
    only_in_training: tuple[tuple[str, object], ...] = ()
    """Keys and values that transformers applies in training only, and that this trainer does not apply."""
    labels: int | None = None
    """Number of outputs per token of a classifier; None for a language model."""
    vision: VisionShape | None = None
    """The vision part of a robot policy; None for other models."""
    encoder: VisionEncoder | None = None
    """The vision encoder of a vision-language model; None for other models."""
    frozen: tuple[ModelPart, ...] = ()
    """Parts that are not trained, see `ModelConfig.freeze`."""
    mixture: Mixture | None = None
    """The experts of the layers that have some."""
    wiring: Wiring = LLAMA
    """The differences from Llama outside mixers and experts."""
    given_mixers: tuple[Mixer, ...] = ()
    """The mixer of each layer; empty: softmax attention without windows in all layers."""
    draft_layers: int = 0
    """Number of layers of the draft head by config.json (`megarl.architectures.draft`)."""
    wrong_in_sglang: str | None = None
    """Why SGLang computes another model from the same files; see `megarl.architectures.values.wrong_in_sglang`."""
    needs_gpu_in_sglang: bool = False
    """Whether SGLang computes the model on GPUs only."""
    trains_draft: bool = False
    """Whether the model has its draft head, to train it; only then `parameters` counts the head."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached: it covers every layer's mixer, and a search of plans needs it about 20,000 times.
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    def __getstate__(self) -> dict[str, object]:
        # Without the cached hash: strings have different hashes in other processes.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def is_moe(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self.experts > 0

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, numbered from 0, has experts."""
        return self.is_moe and (not self.sparse or self.sparse[layer])

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixer of each layer."""
        known, sizes = ARCHITECTURES[self.model_type].attention, (self.heads, self.kv_heads, self.head_dim)
        alike = Attention(None, *sizes, known.qk_norm is True, known.qkv_bias is True, wide_norm=known.wide_norm)
        return self.given_mixers or (alike,) * self.layers

    @cached_property
    def mixer_counts(self) -> dict[Mixer, int]:
        """The different mixers, and how many layers have each."""
        return dict(Counter(self.mixers))

    @cached_property
    def dimensions(self) -> dict[str, int]:
        """Sizes by the names that the tables of tensors use."""
        sizes = {
            "one": 1,
            "hidden": self.hidden,
            "joint": 2 * self.hidden,
            "vocab": self.vocab,
            "ffn": self.dense_ffn if self.is_moe else self.ffn,
            "experts": self.experts,
            "expert_ffn": self.ffn,
            "expert_gate_up": 2 * self.ffn if self.is_moe else 0,
            "shared_ffn": self.mixture.shared_width if self.mixture else 0,
            "gate_up": 2 * (self.dense_ffn if self.is_moe else self.ffn),
            "mlp_bias": int(self.wiring.mlp_bias),
        }
        for mixer in self.mixer_counts:
            sizes |= mixer.dimensions()
        return sizes

    @cached_property
    def rules(self) -> tuple[WeightRule, ...]:
        """The rules of the model's weights, without the head."""
        return existing(ARCHITECTURES[self.model_type].tensors, self.dimensions)

    @cached_property
    def elements(self) -> dict[str, Elements]:
        """Number of parameters of each component: per layer, per expert, or in total for the embedding and the head."""
        return elements((*self.rules, UNTIED_HEAD), self.dimensions)

    @cached_property
    def copies(self) -> dict[str, int]:
        """How often the model has each component: for example `norms` once per layer, `experts` once per expert of each
        layer, and `head` once, or never if it is tied.
        """
        sparse = self.layers - self.dense_layers if self.is_moe else 0
        every = {"norms": self.layers, "mlp": self.layers - sparse}
        every |= Counter(mixer.kind for mixer in self.mixers)
        ends = {"embedding": 1, "final_norm": 1, "head": 0 if self.tied else 1}
        return {"router": sparse, "shared": sparse, "experts": sparse * self.experts, **every, **ends}

    @cached_property
    def parameters_of(self) -> dict[str, int]:
        """Parameters of each component in the whole model; a tied head has none."""
        counts = {name: self.copies[name] * each.all for name, each in self.elements.items()}
        return counts | ({"draft": self.draft_parameters} if self.trains_draft else {})

    @cached_property
    def draft_layer(self) -> ModelFacts:
        """A model with the layer of the draft head as its only layer; it has experts if layers of this model have."""
        mixer = self.mixers[draft_place(self.mixers)]
        alone = replace(self, layers=1, dense_layers=0, sparse=(), given_mixers=(mixer,), trains_draft=False)
        return replace(alone, vision=None, encoder=None)

    @property
    def draft_projection(self) -> int:
        """Number of elements of the matrix before a draft head's layer."""
        return 2 * self.hidden**2

    @property
    def outer_draft_parameters(self) -> int:
        """Number of parameters of a draft head outside its layer: a projection and three norms."""
        return self.draft_projection + 3 * self.hidden

    @property
    def draft_parameters(self) -> int:
        """Number of parameters of a draft head of one layer."""
        layer, ends = self.draft_layer, ("embedding", "final_norm", "head")
        of_layer = sum(count for name, count in layer.parameters_of.items() if name not in ends)
        return of_layer + self.outer_draft_parameters

    @cached_property
    def multiplied_of(self) -> dict[str, int]:
        """Number of weight elements that multiply one token in matrix products, by component. Of the experts only those
        chosen for a token count; the embedding counts 0."""
        times = {**self.copies, "embedding": 0, "head": 1}
        if self.is_moe:
            times["experts"] = times["experts"] // self.experts * self.experts_per_token
        return {name: times[name] * each.matrices for name, each in self.elements.items()}

    @property
    def expert_parameters(self) -> float:
        """Parameters of one layer's experts, averaged over all layers; 0 for a dense model."""
        return self.parameters_of.get("experts", 0) / self.layers

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, including its vision part."""
        return sum(self.parameters_of.values()) + self.visual_parameters

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token uses: all but those of the experts that no router chooses for it."""
        idle = self.experts - self.experts_per_token
        return self.parameters - (self.parameters_of["experts"] // self.experts * idle if self.is_moe else 0)

    @property
    def visual_parameters(self) -> int:
        """Number of parameters of the vision part, which is on the first pipeline stage."""
        return sum(self.visual_parts.values())

    @cached_property
    def visual_parts(self) -> dict[ModelPart, int]:
        """Number of parameters of each part of the vision part."""
        counts: dict[ModelPart, int] = {}
        for before, shape in (("vision.", self.vision), ("visual.", self.encoder)):
            for name, (_, size) in () if shape is None else shape.tensors.items():
                part = part_of(before + name)
                counts[part] = counts.get(part, 0) + math.prod(size)
        return counts

    @property
    def trained_parameters(self) -> int:
        """Number of trained parameters."""
        parts = {"language_model": sum(self.parameters_of.values()), **self.visual_parts}
        return sum(count for part, count in parts.items() if part not in self.frozen)

    @property
    def computing_parameters(self) -> int:
        """Number of matrix elements by which each token is multiplied: no embedding, active experts only."""
        return sum(self.multiplied_of.values())


def facts_from_config(raw: dict[str, Any], source: str, *, vision: bool | None = None) -> ModelFacts:
    """Return the sizes and properties of the model that a Hugging Face config describes.

    For a robot policy or a vision-language model these are those of its language model, with its vision part.

    Args:
        source: names the config in errors.
        vision: whether to read the vision encoder (`model.vision`); None: the model type decides.
    """
    raw = standard_config(raw)
    if raw.get("model_type") == VLA_TYPE:
        text = {"model_type": "llama", **(raw.get("text_config") or {})}
        facts = facts_from_config(text, f"{source}: text_config")
        return replace(facts, vision=VisionShape.from_config(raw, facts.hidden, source))
    if raw.get("model_type") in DECODERS:
        facts = facts_from_config(decoder_config(raw), f"{source}: text_config")
        if not reads_vision(raw["model_type"], vision):
            return facts
        return replace(facts, encoder=VisionEncoder.from_config(raw, facts.hidden, source))
    values = check_keys(raw, source)
    quantized_block(raw, source)
    experts, sparse, draft = mixture(values), sparse_layers(values), ARCHITECTURES[values["model_type"]].draft
    return ModelFacts(
        source=source,
        model_type=values["model_type"],
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        heads=values["num_attention_heads"],
        kv_heads=key_value_heads(values),
        head_dim=head_width(values),
        ffn=experts.width if experts else dense_width(values),
        vocab=values["vocab_size"],
        max_positions=max_positions(values),
        tied=values["tie_word_embeddings"],
        dense_ffn=dense_width(values) if experts else 0,
        experts=experts.router.experts if experts else 0,
        experts_per_token=experts.router.chosen if experts else 0,
        dense_layers=sparse.count(False) if experts else 0,
        sparse=tuple(sparse) if experts else (),
        only_in_training=tuple(only_in_training(values).items()),
        labels=_labels(raw),
        mixture=experts,
        wiring=wiring(values),
        given_mixers=mixers(values),
        draft_layers=draft.layers_in(raw) if draft else 0,
        wrong_in_sglang=wrong_in_sglang(values),
        needs_gpu_in_sglang=needs_gpu_in_sglang(values),
    )


def _labels(raw: dict[str, Any]) -> int | None:
    """Return the number of outputs of the classifier in a config; transformers omits the default, 2."""
    if not any("Classification" in str(name) for name in raw.get("architectures") or ()):
        return None
    return len(raw["id2label"]) if raw.get("id2label") else int(raw.get("num_labels") or 2)


def known_facts(model: ModelConfig, fix: str) -> ModelFacts:
    """Return `model_facts`, or raise an error if they are unknown."""
    facts = model_facts(model)
    if facts is None:
        raise ConfigError(
            "the model's sizes are unknown: its config is not on this machine",
            where="model.path",
            found=model.path,
            allowed="a folder, a model of the local hub cache, or a well-known name",
            fix=fix,
        )
    return facts


def model_facts(model: ModelConfig) -> ModelFacts | None:
    """Return the sizes and properties of the model `model.path` or `model.hf_config`.

    `path` is a folder, a name in the hub cache, or a well-known hub name. Return None if it is a hub name without a
    local description. Raise ConfigError if the model is missing or unsupported.
    """
    config = raw_config(model)
    if config is None:
        return None
    return replace(facts_from_config(*config, vision=model.vision), frozen=tuple(model.freeze))


def raw_config(model: ModelConfig) -> tuple[dict[str, Any], str] | None:
    """Return a model's config and where it comes from. Like `model_facts`, return None if `path` is a hub name without
    local description, and raise ConfigError if the model is missing."""
    if model.path is None:
        if model.hf_config is None:
            raise ConfigError(
                "the recipe names no model",
                where="model",
                allowed="model.path, or model.hf_config for a fresh random model",
                fix="set model.path to a Hugging Face folder or hub name",
            )
        return model.hf_config, "model.hf_config"
    folder = local_folder(model.path)
    if folder is not None:
        refuse_pipes(folder)
        raw = _read_json(folder / "config.json")
        known = complete_config(raw, folder) if raw.get("model_type") == VLA_TYPE else raw
        return known, str(folder / "config.json")
    if not is_hub_name(model.path):
        folder = Path(model.path).expanduser()
        raise ConfigError(
            "the model is a file, not a folder" if folder.exists() else "the model folder does not exist",
            where="model.path",
            found=model.path,
            allowed="a folder with config.json and safetensors files, or a hub name such as Qwen/Qwen3-8B",
            fix=near_folder(folder),
        )
    known = json.loads((Path(__file__).parent / "known_models.json").read_text(encoding="utf-8"))
    return (known[model.path], f"{model.path} (known model)") if model.path in known else None


def local_folder(path: str) -> Path | None:
    """Return the folder of `model.path`, or its snapshot in the hub cache; None if neither is on this machine."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    return hub_cache_folder(path) if is_hub_name(path) else None


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form `organisation/name` and is not a path such as `./x/y` or `/x`."""
    parts = name.split("/")
    return len(parts) == 2 and all(part and not part.startswith((".", "~")) for part in parts)


class HubPaths(NamedTuple):
    """Paths of the hub's packages: their home, the cache of repositories, and the user's token file."""

    home: Path
    hub: Path
    token: Path


def hub_paths() -> HubPaths:
    """Return the hub's paths from the variables that huggingface_hub.constants reads, without importing it."""

    def place(name: str, default: str) -> str:
        return os.path.expandvars(os.path.expanduser(os.environ.get(name, default)))

    caches = os.environ.get("XDG_CACHE_HOME", os.path.join(os.path.expanduser("~"), ".cache"))
    home = place("HF_HOME", os.path.join(caches, "huggingface"))
    older = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return HubPaths(Path(home), Path(place("HF_HUB_CACHE", older)), Path(place("HF_TOKEN_PATH", f"{home}/token")))


def hub_cache_folder(name: str) -> Path | None:
    """Return a hub model's snapshot folder in the local cache; None if its config is not there."""
    snapshot = hub_snapshot(name)
    return snapshot if snapshot is not None and (snapshot / "config.json").is_file() else None


def hub_snapshot(name: str) -> Path | None:
    """Return the folder of a hub model's newest snapshot (`refs/main`) in the local cache; None if it is not there."""
    cache = hub_paths().hub / ("models--" + name.replace("/", "--"))
    reference = cache / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = cache / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


_AGAIN = "correct the file, or copy or download the model again"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise no_model(file.parent, "model.path") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("cannot read the model's config", where=str(file), found=str(error), fix=_AGAIN) from error
    if not isinstance(raw, dict):
        raise ConfigError("the model's config is not a mapping", where=str(file), found=raw, fix=_AGAIN)
    return raw


def near_folder(folder: Path) -> str:
    """Return advice for a missing folder: how to make it, or a folder next to it with a similar name, if any."""
    if folder == Path(SMALL_MODEL).expanduser():
        return "run `make smollm2` in the folder of megarl's repository, which downloads this model"
    siblings = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    close = close_matches(folder.name, siblings)
    if close:
        return f"did you mean {folder.parent / close[0]}?"
    return "check the path" if folder.is_absolute() else relative_path_fix()
