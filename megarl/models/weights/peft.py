"""Low-rank adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Tensors are named `base_model.model.MODULE` for a module of the base model, with `lora_A.weight` [rank, in] and
`lora_B.weight` [out, rank]; the layer computes W x + lora_alpha / r * B A x.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.architectures.adapters import DOWN, UP
from megarl.artifacts.adapter_settings import CONFIG, PLAIN, TENSORS, check_scale, read_settings
from megarl.config.model import LoraConfig
from megarl.models.hf import num_experts
from megarl.models.policy import PolicyModel
from megarl.models.weights.adapters import adapter_tensors
from megarl.models.weights.export import iter_adapter_tensors
from megarl.models.weights.files import SafetensorsWriter, replace_folder
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError

_PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens", "pos_embed")  # modules with 2-dimensional weights that are not linear layers


def export_adapter(
    chunks: Sequence[PolicyModel], folder: Path, lora: LoraConfig, *, base: str | None, world: WorkerGroup
) -> None:
    """Write the adapters as a folder that `PeftModel.from_pretrained` loads. Collective over `world`.

    The folder appears under its name when it is complete; an existing folder is replaced.

    Args:
        base: folder or hub name of the base model; None: it has none. A relative path is written as an absolute one,
            because readers may run in another folder.
        world: all ranks that hold the model; its first one writes.
    """
    tensors = iter_adapter_tensors(chunks, lora, world)
    if world.rank != 0:
        for _ in tensors:
            pass
    else:
        if base is not None and (local := Path(base).expanduser()).is_dir():
            base = str(local.absolute())
        shapes = adapter_tensors(chunks[0].hf_config, lora)
        temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
        temporary.mkdir(parents=True)
        named = {_PREFIX + name: shape for name, shape in shapes.items()}
        writer = SafetensorsWriter(temporary / TENSORS, named, chunks[0].config.params_dtype)
        for name, tensor in tensors:
            assert tensor is not None, "the writing rank gets every tensor"
            writer.add(_PREFIX + name, tensor)
        writer.close()
        settings = peft_config(lora, shapes, base, mixture=num_experts(chunks[0].hf_config) is not None)
        text = json.dumps(settings, indent=2, sort_keys=True)
        (temporary / CONFIG).write_text(text + "\n", encoding="utf-8")
        replace_folder(temporary, folder)
    world.barrier()


def peft_config(lora: LoraConfig, names: Iterable[str], base: str | None, *, mixture: bool) -> dict[str, Any]:
    """Return the adapter_config.json of adapters whose tensors are `names`, for the model `base`.

    PEFT mistakes every module that is named like an expert's projection for the fused experts of transformers 5. So the
    dense layers of a mixture are listed as parameters, which PEFT adapts by the same formula, but without dropout.
    """
    stems = [name.removesuffix(DOWN) for name in names if name.endswith(DOWN)]
    dense = [stem for stem in stems if mixture and ".mlp." in stem and ".experts." not in stem]
    settings = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0 if dense else lora.dropout,
        "target_modules": _modules(stem + DOWN for stem in stems if stem not in dense),
        "target_parameters": [stem.removeprefix("model.") + ".weight" for stem in dense] or None,
    }
    return {**PLAIN, **settings, "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}


def _modules(names: Iterable[str]) -> list[str]:
    """Return the last name parts of the modules with adapters, by which PEFT selects modules."""
    return sorted({name.removesuffix(DOWN).rpartition(".")[2] for name in names if name.endswith(DOWN)})


class AdapterReader:
    """Reads the tensors of a PEFT adapter, by the names of `adapter_tensors`.

    Args:
        where: the recipe key that sets the folder, for errors.
    """

    def __init__(self, folder: str | Path, where: str) -> None:
        self.folder, self._where = Path(folder).expanduser(), where
        self.settings = read_settings(self.folder, where)
        try:
            self._file = safe_open(self.folder / TENSORS, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{TENSORS} cannot be read: {error}", where=where, found=str(self.folder), fix="copy it again"
            ) from error
        self.names = {name.removeprefix(_PREFIX): name for name in self._file.keys()}  # noqa: SIM118

    def check(self, lora: LoraConfig, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise an error if the adapter's settings or tensors differ from the recipe's."""
        check_scale(self.settings, lora, self._where)
        wrong = [f"no {name}" for name in shapes if name not in self.names]
        wrong += [f"{name} is not targeted here" for name in self.names if name not in shapes]
        wrong += [
            f"{name} has shape {stored}, expected {list(shape)}"
            for name, shape in shapes.items()
            if name in self.names and (stored := self._file.get_slice(self.names[name]).get_shape()) != list(shape)
        ]
        if wrong:
            raise ConfigError(
                f"this adapter does not fit model.lora.targets: {len(wrong)} of its tensors differ",
                where=self._where,
                found=f"{self.folder}: {', '.join(wrong[:3])}",
                allowed=f"adapters on {', '.join(_modules(shapes))} of every layer",
                fix="choose other model.lora.targets, or another adapter",
            )

    def read(self, name: str) -> torch.Tensor:
        """Return tensor `name` in the file's dtype."""
        return self._file.get_tensor(self.names[name])

    def base(self) -> str:
        """Return the folder or hub name of the adapter's base model."""
        name = self.settings.get("base_model_name_or_path")
        if not name:
            raise ConfigError(
                "this adapter does not name its base model",
                where=f"{self.folder / CONFIG}: base_model_name_or_path",
                found=name,
                allowed="a folder or hub name",
                fix="write the name of the base model into this file",
            )
        return str(name)

    def check_base(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise an error if the adapter has tensors that are not A or B of a linear layer of the model.

        Args:
            shapes: shapes of the model's weights, by name.
        """
        rank = self.settings["r"]
        expected: dict[str, list[int]] = {}
        for name, shape in shapes.items():
            stem = name.removesuffix(".weight")
            if stem != name and len(shape) == 2 and not stem.endswith(_EMBEDDINGS):
                expected |= {stem + DOWN: [rank, shape[1]], stem + UP: [shape[0], rank]}
        for name, stored in sorted(self.names.items()):
            pair = name.removesuffix(DOWN) + UP if name.endswith(DOWN) else name.removesuffix(UP) + DOWN
            wrong = ""
            if name not in expected:
                wrong = "neither A nor B of a linear layer of its base model"
            elif pair not in self.names:
                wrong = f"without its pair {pair}"
            elif (shape := self._file.get_slice(stored).get_shape()) != expected[name]:
                wrong = f"of shape {shape}, but its base model needs {expected[name]}"
            if wrong:
                raise ConfigError(
                    f"a tensor of this adapter is {wrong}",
                    where=self._where,
                    found=name,
                    allowed=f"{DOWN[1:]} [{rank}, in] and {UP[1:]} [out, {rank}] of linear layers of the model",
                    fix="check base_model_name_or_path, or merge this adapter with PEFT",
                )

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return weight `name` with its adapter merged, if it has one, in the weight's dtype."""
        stem = name.removesuffix(".weight")
        if stem + DOWN not in self.names:
            return weight
        down, up = self.read(stem + DOWN).float(), self.read(stem + UP).float()
        return torch.addmm(weight.float(), up, down, alpha=self.settings["lora_alpha"] / self.settings["r"]).to(
            weight.dtype
        )
