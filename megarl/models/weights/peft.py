"""Low-rank adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

Tensors are named `base_model.model.MODULE` for a module of the base model, with `lora_A.weight` [rank, in] and
`lora_B.weight` [out, rank]; the layer computes W x + lora_alpha / r * B A x.

Experts that the base model has in one tensor [experts, in, out] (gpt-oss) have one A [experts * rank, in], which
concatenates those of the experts, and one B [out, rank * experts], in which the expert changes fastest. PEFT wraps a
layer's experts in one adapter for each of their two tensors. The first one, `gate_up_proj`, has the inner one, which is
named `base_layer`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.architectures.adapters import DOWN, UP
from megarl.architectures.decoders import module_name
from megarl.artifacts.adapter_settings import CONFIG, PLAIN, TENSORS, check_scale, read_settings
from megarl.config.model import LoraConfig
from megarl.models.hf import encoder_of, num_experts
from megarl.models.policy import PolicyModel
from megarl.models.weights.adapters import adapter_tensors
from megarl.models.weights.export import iter_adapter_tensors
from megarl.models.weights.files import SafetensorsWriter, replace_folder
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError

NAME, DIGESTS = "megarl_adapter", "megarl_sha256"
"""Keys of the settings with the adapter's name and the SHA-256 of each tensor in the file, which the server's hook
(serve.py) compares."""
_PREFIX = "base_model.model."
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_up_proj|down_proj)\.(lora_[AB])\.weight")
_STACKS = {"gate_up_proj": ".base_layer", "down_proj": ""}
_EMBEDDINGS = ("embed_tokens", "pos_embed")  # modules whose weights are matrices, but not of linear layers


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
    if base is not None and (local := Path(base).expanduser()).is_dir():
        base = str(local.absolute())
    write_adapter(chunks, folder, lora, base=base, world=world)
    world.barrier()


def write_adapter(
    chunks: Sequence[PolicyModel],
    folder: Path,
    lora: LoraConfig,
    *,
    base: str | None,
    world: WorkerGroup,
    adapter: str | None = None,
    digests: bool = False,
) -> None:
    """Write the adapters as `export_adapter` does, and return on the other ranks before the folder is complete.

    Args:
        base: what the file names as the base model.
        adapter: the adapter's name, which the settings get as `NAME`; None: they get none. PEFT ignores settings that
            it does not know, with a warning.
        digests: whether the settings have the SHA-256 of every stored tensor's bytes (`DIGESTS`).

    Raises:
        OSError: the first rank cannot write; the other ranks have sent it all tensors.
    """
    tensors = iter_adapter_tensors(chunks, lora, world)
    try:
        if world.rank == 0:
            _write(chunks[0], tensors, folder, lora, base, adapter=adapter, digests=digests)
    finally:
        for _ in tensors:  # the ranks that hold the adapters send all of them
            pass


def _write(
    model: PolicyModel,
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    folder: Path,
    lora: LoraConfig,
    base: str | None,
    *,
    adapter: str | None,
    digests: bool,
) -> None:
    hf = model.hf_config
    shapes = adapter_tensors(hf, lora)
    stored = _stored(shapes)
    form: Callable[[str], str] = str if encoder_of(hf) is None else module_name
    temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)  # a killed process with this number may have left it
    temporary.mkdir(parents=True)
    named = {_PREFIX + form(name): shape for name, shape in stored.items()}
    writer = SafetensorsWriter(temporary / TENSORS, named, model.config.params_dtype)
    sums: dict[str, str] = {}
    for name, tensor in _in_stacks(tensors, shapes):
        writer.add(_PREFIX + form(name), tensor)
        if digests:
            plain = tensor.contiguous().flatten().view(torch.uint8).numpy()
            sums[_PREFIX + form(name)] = hashlib.sha256(plain.data).hexdigest()
    writer.close()
    modules = [form(name) for name in stored]
    # PEFT converts the names of experts only in models without a vision encoder.
    sees = encoder_of(hf) is not None
    settings = peft_config(lora, modules, base, mixture=num_experts(hf) is not None and not sees)
    settings["target_modules"] = _targets(settings["target_modules"], modules, whole=sees)
    settings |= ({NAME: adapter} if adapter is not None else {}) | ({DIGESTS: sums} if digests else {})
    text = json.dumps(settings, indent=2, sort_keys=True)
    (temporary / CONFIG).write_text(text + "\n", encoding="utf-8")
    replace_folder(temporary, folder)


def _stack_of(name: str) -> tuple[str, int]:
    """Return the name of the stack of experts in which PEFT stores an expert's adapter, and the expert's number. For
    other tensors return their own name and 0.

    >>> _stack_of("mlp.experts.3.gate_up_proj.lora_A.weight")
    ('mlp.experts.base_layer.lora_A.weight', 3)
    """
    match = _EXPERT.fullmatch(name)
    return (name, 0) if match is None else (f"{match[1]}{_STACKS[match[3]]}.{match[4]}.weight", int(match[2]))


def _homes(names: Iterable[str]) -> dict[str, str]:
    """Map the name of each adapter tensor of a model to the name of the tensor in the file that contains it."""
    names = list(names)
    # PEFT stacks experts only if gate and up are one projection; otherwise each expert has tensors of its own.
    if not any(".experts.0.gate_up_proj." in name for name in names):
        return dict(zip(names, names, strict=True))
    return {name: _stack_of(name)[0] for name in names}


def _stored(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the stored tensors that hold the adapters `shapes`."""
    stored: dict[str, tuple[int, ...]] = {}
    for name, home in _homes(shapes).items():
        shape, (rows, columns) = shapes[name], stored.get(home, (0, 0))
        if home == name:
            stored[home] = shape
        else:
            stored[home] = (shape[0], columns + shape[1]) if home.endswith(UP) else (rows + shape[0], shape[1])
    return stored


def _in_stacks(
    tensors: Iterable[tuple[str, torch.Tensor | None]], shapes: dict[str, tuple[int, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield adapters' tensors as PEFT stores them: a layer's experts, which follow one another, as one stack.

    Args:
        shapes: shape of every tensor in `tensors`.
    """
    homes, stored, parts = _homes(shapes), _stored(shapes), list[torch.Tensor]()
    for name, tensor in tensors:
        assert tensor is not None, "the writing rank gets every tensor"
        home = homes[name]
        if home == name:
            yield name, tensor
            continue
        parts.append(tensor)
        if sum(part.numel() for part in parts) == math.prod(stored[home]):
            yield home, torch.stack(parts, 2).flatten(1) if home.endswith(UP) else torch.cat(parts)
            parts = []


def peft_config(lora: LoraConfig, names: Iterable[str], base: str | None, *, mixture: bool) -> dict[str, Any]:
    """Return the adapter_config.json of adapters whose tensors are `names`, for the model `base`.

    PEFT mistakes every module that is named like an expert's projection for the fused experts of transformers 5. So the
    dense layers of a mixture are listed as parameters, which PEFT adapts by the same formula, but without dropout.
    """
    stems = [name.removesuffix(DOWN) for name in names if name.endswith(DOWN)]
    stacks = {
        block + suffix: f"{block}.{projection}"
        for projection, suffix in _STACKS.items()
        for block in (stem.removesuffix(suffix) for stem in stems if stem.endswith(f".experts{suffix}"))
    }
    dense = [s for s in stems if mixture and ".mlp." in s and ".experts." not in s and s not in stacks]
    parameters = [f"{stem}.weight" for stem in dense] + [stacks[stem] for stem in stems if stem in stacks]
    settings = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0 if dense else lora.dropout,
        "target_modules": _modules(stem + DOWN for stem in stems if stem not in dense and stem not in stacks),
        "target_parameters": [name.removeprefix("model.") for name in parameters] or None,
    }
    return {**PLAIN, **settings, "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}


def _stack(weight: str) -> str | None:
    """Return how the names of a weight's adapter begin if the weight holds all experts; None for other weights."""
    block, _, projection = weight.rpartition(".")
    return block + _STACKS[projection] if block.endswith(".experts") and projection in _STACKS else None


def _modules(names: Iterable[str]) -> list[str]:
    """Return the last name parts of the modules with adapters, by which PEFT selects modules."""
    return sorted({name.removesuffix(DOWN).rpartition(".")[2] for name in names if name.endswith(DOWN)})


def _targets(modules: Sequence[str], names: Iterable[str], *, whole: bool) -> str | Sequence[str]:
    """Return PEFT's `target_modules`: last names of modules, or the expression that matches their whole names.

    A vision-language model's encoder has modules with the same last names as those of the decoder.

    Args:
        modules: last names of the modules that PEFT selects by name.
        names: names of the adapters' tensors.
        whole: whether the model has an encoder.
    """
    if not whole:
        return modules
    stems = (name.removesuffix(DOWN) for name in names if name.endswith(DOWN))
    chosen = (stem for stem in stems if stem.rpartition(".")[2] in modules)
    return "|".join(sorted({re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(stem)) for stem in chosen}))


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
        self._ups: tuple[str, torch.Tensor] | None = None  # the last stack of B that was read

    @property
    def of_images(self) -> bool:
        """Whether the adapter is one of a vision-language model, by the names of its tensors."""
        return any(name.startswith(("model.language_model.", "model.visual.", "visual.")) for name in self.names)

    def name_as(self, form: Callable[[str], str]) -> None:
        """Use the names `form(name)` for the tensors from now on: those of the base model's checkpoint, which may have
        older names than its modules."""
        self.names = {form(name): stored for name, stored in self.names.items()}

    def check(self, lora: LoraConfig, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise an error if the adapter's settings or tensors differ from the recipe's."""
        check_scale(self.settings, lora, self._where)
        shapes = _stored(shapes)
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
        if name in self.names:
            return self._file.get_tensor(self.names[name])
        stack, expert = _stack_of(name)
        whole, rank = self._file.get_slice(self.names[stack]), self.settings["r"]
        if stack.endswith(DOWN):
            return whole[expert * rank : (expert + 1) * rank]
        if self._ups is None or self._ups[0] != stack:  # a layer's experts are read one after the other
            self._ups = stack, whole[:].unflatten(1, (rank, -1)).permute(2, 0, 1).contiguous()
        return self._ups[1][expert]

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
            if (stack := _stack(name)) is not None and len(shape) == 3:
                experts, inputs, outputs = shape
                expected |= {stack + DOWN: [rank * experts, inputs], stack + UP: [outputs, rank * experts]}
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
        stem = _stack(name) or name.removesuffix(".weight")
        if stem + DOWN not in self.names:
            return weight
        down, up = (self._file.get_tensor(self.names[stem + part]).float() for part in (DOWN, UP))
        scale = self.settings["lora_alpha"] / self.settings["r"]
        if weight.dim() == 2:
            return torch.addmm(weight.float(), up, down, alpha=scale).to(weight.dtype)
        merged = weight.clone()
        a, b = down.unflatten(0, (len(weight), -1)), up.unflatten(1, (-1, len(weight)))
        for expert, each in enumerate(merged):  # to save memory, only one expert's weights at a time are in float32
            each.copy_(torch.addmm(each.float(), a[expert].T, b[:, :, expert].T, alpha=scale))
        return merged
