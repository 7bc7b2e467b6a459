"""An engine's parameters and optimizer state as Megatron sharded tensors, and their way to and from disk.

Every tensor of a checkpoint is stored under the name of its parameter and its place in the whole model, so a run can
go on under another layout. That holds for optimizer state too because only its tensors are stored, one set per
parameter, and nothing of how this rank's optimizers are composed (Megatron's own form differs between one optimizer
and a chain of two, and cannot be read by the other).

What is unpickled on load: the `.metadata` index, checked first against a short list of plain classes, and
nothing else; tensors are read with `weights_only`.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp

from megarl.errors import UserError
from megarl.training.optimizer import parts

from megatron.core import dist_checkpointing  # isort: skip  (megarl.training.optimizer installs the compat hook)
from megatron.core.dist_checkpointing.dict_utils import nested_values  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory  # isort: skip
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor  # isort: skip
from megatron.core.dist_checkpointing.strategies import torch as torch_dist  # isort: skip
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy  # isort: skip
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # isort: skip
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # isort: skip

if TYPE_CHECKING:
    from megarl.training.engine import MegatronEngine

MOMENTS = ("exp_avg", "exp_avg_sq")
_MASTER = "param"
Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory


class CheckpointError(UserError):
    """A checkpoint is incomplete, damaged, of another model, cannot be written, or holds what none of ours holds."""


# -- engine to sharded tensors -----------------------------------------------------------------------------------------


def save_engines(engines: dict[str, MegatronEngine], folder: Path) -> None:
    """Write all engines into the existing empty `folder`; offloaded ones come back for it. Collective."""
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(engine.onloaded())
        state = {name: _engine_state(name, engine, loading=False) for name, engine in engines.items()}
        dist_checkpointing.save(state, str(folder), sharded_strategy=_Save("torch_dist", 1))


def load_engines(engines: dict[str, MegatronEngine], folder: Path, steps: dict[str, int]) -> None:
    """Read all engines from `folder`, whatever layout wrote it, and set their optimizer steps. Collective.

    Raises:
        CheckpointError: the index holds something other than tensors.
    """
    check_index(folder)
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            stack.enter_context(engine.onloaded())
        state = {name: _engine_state(name, engine, loading=True) for name, engine in engines.items()}
        loaded = dist_checkpointing.load(
            state,
            str(folder),
            sharded_strategy=torch_dist.TorchDistLoadShardedStrategy(),
            validate_access_integrity=False,  # a data-parallel rank asks for the optimizer state it owns and no more
        )
        for name, engine in engines.items():
            for number, chunk in enumerate(engine.chunks):
                _copy_into(chunk, loaded[name]["model"][number])
            engine.step = steps[name]
            for number, part in enumerate(_optimizers(engine)):
                _set_optimizer_state(part, engine, loaded[name]["optimizer"][number])


def _engine_state(name: str, engine: MegatronEngine, loading: bool) -> dict[str, Any]:
    """Nested dict of sharded tensors whose keys begin with the engine's name."""
    # One key per layer, not one tensor over all layers: layers may differ (dense and expert ones).
    model = {
        number: _tensors_only(chunk.sharded_state_dict(metadata={"non_homogeneous_layers": True}))
        for number, chunk in enumerate(engine.chunks)
    }
    add_prefix_for_sharding(model, f"{name}.")
    by_parameter = {id(sharded.data): sharded for sharded in nested_values(model)}
    optimizers = {
        number: _optimizer_state(part, by_parameter, engine, loading) for number, part in enumerate(_optimizers(engine))
    }
    return {"model": model, "optimizer": optimizers}


def _tensors_only(state: dict[str, Any]) -> dict[str, Sharded]:
    """Without Megatron's extra-state objects, which are empty here and would have to be pickled."""
    kept = {key: value for key, value in state.items() if not isinstance(value, ShardedObject)}
    for key, value in kept.items():
        if key.endswith(("word_embeddings.weight", "output_layer.weight")) and isinstance(value, ShardedTensor):
            # The vocabulary is padded to a multiple of tp, so its global size depends on the layout.
            value.allow_shape_mismatch = True
    return kept


def _optimizers(engine: MegatronEngine) -> list[Any]:
    return parts(engine.optimizer) if engine.optimizer is not None else []


def _optimizer_state(
    part: Any, by_parameter: dict[int, Sharded], engine: MegatronEngine, loading: bool
) -> dict[str, dict[str, Sharded]]:
    """Moments (and, in bf16, master weights) of every parameter of one optimizer, under stable names."""
    _create_state(part)
    keys = _wanted(engine)
    if not isinstance(part, DistributedOptimizer):
        found = [(parameter, {key: tensors[key] for key in keys}) for parameter, tensors in _whole_tensors(part)]
    elif loading:
        found = [
            (parameter, {key: torch.empty(parameter.shape, dtype=torch.float32) for key in keys})
            for parameter, _, _ in _owned_pieces(part)
        ]
    else:
        found = list(_gathered_tensors(part, keys))
    return {
        str(number): {
            key: make_sharded_optimizer_tensor(by_parameter[id(parameter)], tensor, f"optimizer.{key}")
            for key, tensor in tensors.items()
        }
        for number, (parameter, tensors) in enumerate(found)
    }


def _wanted(engine: MegatronEngine) -> tuple[str, ...]:
    """Master weights of a float32 model are its parameters and not stored twice."""
    return MOMENTS if engine.dtype == torch.float32 else (*MOMENTS, _MASTER)


def _whole_tensors(part: Any) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
    """Each model parameter of an optimizer that is not distributed, with its state."""
    if hasattr(part, "float16_groups"):
        pairs = [
            pair
            for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
            for pair in zip(models, mains, strict=True)
        ]
        pairs += [(parameter, parameter) for group in part.fp32_from_fp32_groups for parameter in group]
    else:
        pairs = [(parameter, parameter) for group in part.param_groups for parameter in group["params"]]
    for parameter, main in pairs:
        yield parameter, {_MASTER: main.data, **_moments(part, main)}


def _owned_pieces(part: DistributedOptimizer) -> Iterable[tuple[Tensor, slice, dict[str, Tensor]]]:
    """Each model parameter that this data-parallel rank owns a piece of: the piece of the flat parameter, its state."""
    for parameter, (group, place) in part.model_param_group_index_map.items():
        main = part.optimizer.param_groups[group]["params"][place]
        piece = part._get_model_param_range_map(parameter)["param"]
        yield parameter, slice(piece.start, piece.end), {_MASTER: main.data, **_moments(part, main)}


def _moments(part: Any, main: Tensor) -> dict[str, Tensor]:
    return {moment: part.optimizer.state[main][moment] for moment in MOMENTS}


def _gathered_tensors(part: DistributedOptimizer, keys: Sequence[str]) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
    """Each model parameter with its whole state, on the first data-parallel rank; nothing on the others.

    Megatron's own gather loses the end of buffers whose parameters do not fill their alignment.
    """
    group = part.data_parallel_group_gloo
    first = group.rank() == 0
    state = {id(parameter): tensors for parameter, _, tensors in _owned_pieces(part)}
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        for bucket, owned in zip(buffer.buckets, next(iter(ranges.values())), strict=True):
            whole: dict[str, Tensor] = {}
            for key in keys:
                share = torch.zeros(bucket.grad_data.numel() // group.size())
                for parameter, places in owned["param_map"].items():
                    place = places["gbuf_local"]
                    share[place.start : place.end] = state[id(parameter)][key].flatten()
                shares = [torch.empty_like(share) for _ in range(group.size())] if first else None
                dist.gather(share, shares, group=group, group_dst=0)
                if shares is not None:
                    whole[key] = torch.cat(shares)
            for parameter in bucket.params_list if first else ():
                start, end, _ = buffer.param_index_map[parameter]
                place = slice(start - bucket.offset, end - bucket.offset)
                yield parameter, {key: tensor[place].view(parameter.shape) for key, tensor in whole.items()}


def _create_state(part: Any) -> None:
    """What the first optimizer step would create, so that there is something to read and to load into."""
    if not isinstance(part.optimizer, torch.optim.AdamW):
        part.init_state_fn(part.optimizer, part.config)
        return
    for group in part.param_groups:
        for parameter in group["params"]:
            if not part.optimizer.state[parameter]:
                part.optimizer.state[parameter].update(
                    step=torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{moment: torch.zeros_like(parameter.data) for moment in MOMENTS},
                )


def _copy_into(chunk: torch.nn.Module, loaded: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for key, value in chunk.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                value.copy_(loaded[key])


def _set_optimizer_state(part: Any, engine: MegatronEngine, loaded: dict[str, dict[str, Tensor]]) -> None:
    if isinstance(part, DistributedOptimizer):
        for number, (_, piece, tensors) in enumerate(_owned_pieces(part)):
            for key, tensor in loaded[str(number)].items():
                tensors[key].copy_(tensor.flatten()[piece])
    else:
        for number, (_, tensors) in enumerate(_whole_tensors(part)):
            for key, tensor in loaded[str(number)].items():
                tensors[key].copy_(tensor)
    for group in part.param_groups:
        if not isinstance(part.optimizer, torch.optim.AdamW):
            group["step"] = engine.step  # fused Adam of Apex and Transformer Engine counts per group
            continue
        for parameter in group["params"]:
            part.optimizer.state[parameter]["step"].fill_(engine.step)


# -- disk --------------------------------------------------------------------------------------------------------------


class _Save(SaveShardedStrategy):
    """The `torch_dist` format, written by this process: Megatron's own writer forks, with threads running."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        dcp.save(
            torch_dist.mcore_to_pyt_state_dict(flat),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, single_file_per_rank=True, sync_files=True),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects would have to be pickled."""
        return False


_PLAIN = {
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its module since Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
_DTYPES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN or (module == "torch" and name in _DTYPES):
            return super().find_class(module, name)
        raise CheckpointError(f"the index of the checkpoint names {module}.{name}, which is not a part of any index")


def check_index(folder: Path) -> None:
    """Read the pickled index with a short list of allowed classes, before anything reads it without.

    Raises:
        CheckpointError: it names another class, or lists objects besides tensors.
    """
    try:
        index = _PlainUnpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    except (OSError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{folder}: the index of the checkpoint cannot be read: {error}") from error
    others = [
        key for key, value in index.state_dict_metadata.items() if type(value).__name__ != "TensorStorageMetadata"
    ]
    if others:
        raise CheckpointError(f"{folder}: holds objects besides tensors: {', '.join(others[:4])}")
