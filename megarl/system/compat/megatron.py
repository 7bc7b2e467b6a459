"""Megatron-Core without CUDA, Transformer Engine or Apex: the only place that changes its source.

megatron-core (tested: 0.16.1 and 0.19.2) assumes a GPU and, in places, Transformer Engine. `install()` puts an import
hook in front of `megatron.core.*` that rewrites those few spots while the modules are loaded. Nothing else in the
process changes: `torch.cuda` itself stays as it is. Every change is an entry of `REWRITES` or `PATCHES` with its
reason, and tests/system/compat notices when an entry no longer matches the installed version or is no longer needed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_STAND_IN = "_megarl_cuda"


@dataclass(frozen=True)
class Rewrite:
    """A text replacement in the source of modules (glob patterns).

    With `cpu_only` it applies only without CUDA. Megatron needs it from version `since` on and before version
    `fixed_in`; outside of them the pattern matches nothing.
    """

    name: str
    modules: tuple[str, ...]
    pattern: str
    replacement: str
    reason: str
    cpu_only: bool = True
    since: str = "0"
    fixed_in: str | None = None

    def applies(self, module: str) -> bool:
        """Return whether the rewrite is meant for the module with this dotted name."""
        return any(fnmatch.fnmatchcase(module, glob) for glob in self.modules)

    def sub(self, source: str) -> tuple[str, int]:
        """Return the source after this rewrite, and the number of places that it changed."""
        return re.subn(self.pattern, self.replacement, source, flags=re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """A change of a loaded module, where replacing source text is not enough. `needed` returns whether the module's
    original source requires it."""

    name: str
    module: str
    apply: Callable[[types.ModuleType], None]
    needed: Callable[[str], bool]
    reason: str
    cpu_only: bool = True


_ANY = ("megatron.core.*",)
_NOT_IMPORT = r"^(?!\s*(?:import|from)\b)"

REWRITES: tuple[Rewrite, ...] = (
    Rewrite(
        "tensor-type-names",
        ("megatron.core.optimizer.*",),
        r"""(["'])torch\.cuda\.(\w*Tensor)""",
        r"\1torch.\2",
        "parameters are told apart by param.type() == 'torch.cuda.FloatTensor'",
    ),
    Rewrite(
        "cuda-namespace",
        _ANY,
        rf"""{_NOT_IMPORT}((?:(?!["']torch\.cuda).)*?)\btorch\.cuda\.""",
        rf"\1{_STAND_IN}.",
        "device, stream, event, nvtx and rng calls go to a stand-in that answers for the CPU",
    ),
    Rewrite(
        "device-keyword",
        _ANY,
        r"""(\bdevice\s*=\s*)(["'])cuda\2""",
        r"\1'cpu'",
        "tensors are created with device='cuda'",
    ),
    Rewrite(
        "device-argument",
        _ANY,
        r"""\b(init_data|to|device)\((["'])cuda\2""",
        r"\1('cpu'",
        "tensors are moved to 'cuda' by position",
    ),
    Rewrite(
        "cuda-method",
        _ANY,
        rf"\.cuda\((?:{_STAND_IN}\.current_device\(\)|non_blocking=True)?\)",
        ".cpu()",
        "tensors are moved with .cuda()",
    ),
    Rewrite(
        "pinned-memory",
        ("megatron.core.models.common.embeddings.rope_utils",),
        r"pin_memory\s*=\s*True",
        "pin_memory=False",
        "pinned memory needs a CUDA driver",
    ),
    Rewrite(
        "compiled-allocators",
        ("megatron.core.nccl_allocator", "megatron.core.inference.unified_memory"),
        r"^from torch\.utils(?: import cpp_extension|\.cpp_extension import CUDA_HOME, load_inline)$",
        "cpp_extension = CUDA_HOME = load_inline = None",
        "allocators of GPU memory, which are compiled when used: importing setuptools takes 0.2 s of CPU time",
    ),
    Rewrite(
        "sharded-tensors",
        ("megatron.core.utils", "megatron.core.distributed.*", "megatron.core.transformer.fsdp_dtensor_checkpoint"),
        r"^( +)from torch\.distributed(?:\._tensor|\.tensor\.placement_types|\.fsdp| import DeviceMesh).*$"
        r"|^( +)from megatron\.core\.distributed\.fsdp\.src\.megatron_fsdp import (?:\([^)]*\)|.*)$",
        r"\1\2raise ImportError",
        "no code here uses DTensors, and importing torch.distributed.tensor takes a second of CPU time",
    ),
    Rewrite(
        "sharded-checkpoints",
        ("megatron.core.transformer.fsdp_dtensor_checkpoint",),
        r"^from torch\.distributed\.checkpoint import default_planner$",
        "default_planner = None",
        "checkpoints of DTensors, as above",
    ),
    Rewrite(
        "gradient-norm",
        ("megatron.core.utils",),
        r"torch\.norm\(torch\.tensor\(l2\)\)\n(\s+)l2_cuda = torch\.tensor\(\[float\(l2_reduced\)\], [^)]*\)",
        r"torch.norm(torch.stack([norm for norms in l2 for norm in norms]))\n\1l2_cuda = l2_reduced.reshape(1).float()",
        "without Apex and TE the host reads the norm of each parameter's gradient, with one wait per parameter",
        cpu_only=False,
    ),
    Rewrite(
        "gradient-sum",
        ("megatron.core.distributed.distributed_data_parallel",),
        r"param\.main_grad\.add_\(param\.grad\.data\)",
        "[total.add_(part) for total, part in "
        "zip(param.main_grad.view(-1).split(1 << 18), param.grad.data.reshape(-1).split(1 << 18))]",
        "torch converts a bf16 gradient to float32 as a whole first; blocks stay in the cache: a third of the CPU time",
    ),
    Rewrite(
        "added-gradient",
        ("megatron.core.tensor_parallel.layers",),
        r"grad_weight = grad_output\.t\(\)\.matmul\(total_input\)",
        "grad_weight = (weight.add_gradient(weight.main_grad, grad_output, total_input) "
        "if hasattr(weight, 'add_gradient') else grad_output.t().matmul(total_input))",
        "Megatron's switch for adding gradients within the product needs Apex; CPUs with AMX have kernels/amx.py",
    ),
    Rewrite(
        "adam-step-copy",
        ("megatron.core.optimizer.distrib_optimizer",),
        r"(for key in dst_tensors:\n)(\s+)(dst_tensors\[key\]\.copy_)",
        r"\1\2if key != 'step':\n\2    \3",
        "torch's Adam keeps 'step' with each parameter, a checkpoint keeps it once: KeyError without Apex and TE",
        cpu_only=False,
        fixed_in="0.19",
    ),
    Rewrite(
        "adam-step-shared",
        ("megatron.core.optimizer.distrib_optimizer",),
        r"""(for s in state_dict_state\.values\(\):\n\s+#[^\n]*\n\s+s\["step"\] = step)$""",
        r"\1.clone()",
        "after a load all parameters share one step tensor, which torch's Adam then advances once per parameter",
        cpu_only=False,
    ),
    Rewrite(
        "norm-recomputation",
        ("megatron.core.tensor_parallel.random",),
        r"self\.fp8 = fp8 is not None",
        "self.fp8 = HAVE_TE and fp8 is not None",
        "without Transformer Engine the recomputation of norms reads the state of its FP8: NameError",
        cpu_only=False,
    ),
    Rewrite(
        "deep-ep",
        ("megatron.core.transformer.moe.fused_a2a",),
        r"^(try:\n\s+)from deep_ep import \w+$",
        r"\1raise ImportError",
        "experts.deepep imports it where it is used; the import may end with an AssertionError (no CUDA, another NCCL)",
        cpu_only=False,
    ),
    Rewrite(
        "paged-stash",
        ("megatron.core.transformer.moe.paged_stash",),
        r"^from megatron\.core\.transformer\.moe\.ops\.paged_stash import \([^)]*\)$",
        "GLOBAL_BLOCK_SIZE = paged_stash_copy_kernel = paged_stash_pop_kernel = None",
        "kernels of an option that is not used here: they import Triton, which torch for CPUs does not have",
        cpu_only=False,
        since="0.19",
    ),
    Rewrite(
        "trackers",
        ("megatron.core.timers", "megatron.core.inference.*"),
        r"^(try:\n\s+)(?:import wandb|from torch\.utils\.tensorboard import SummaryWriter)\b[^\n]*",
        r"\1raise ImportError",
        "wandb and tensorboard are not used here, and importing them takes a quarter of a process's start-up CPU time",
        cpu_only=False,
    ),
)


class _Stream:
    """A stand-in for a CUDA stream on a CPU, where all work already runs in order."""

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> _Event:
        return _Event()


_THE_STREAM = _Stream()


def _stream(*args: object, **kwargs: object) -> _Stream:
    return _THE_STREAM  # always the same object, so that `current_stream() != side_stream` is False


class _Event:
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


def _nothing(*args: object, **kwargs: object) -> None:
    return None


@contextlib.contextmanager
def _no_context(*args: object, **kwargs: object) -> Iterator[None]:
    yield


def _get_rng_state(*args: object, **kwargs: object) -> torch.Tensor:
    import torch

    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *args: object, **kwargs: object) -> None:
    import torch

    torch.set_rng_state(state)


class _CudaOnCpu:
    """A stand-in for `torch.cuda` in a rewritten Megatron module; other names come from the real `torch.cuda`."""

    Stream = current_stream = default_stream = staticmethod(_stream)
    Event = _Event
    stream = staticmethod(_no_context)
    synchronize = empty_cache = staticmethod(_nothing)
    get_rng_state = staticmethod(_get_rng_state)
    set_rng_state = staticmethod(_set_rng_state)
    random = types.SimpleNamespace(get_rng_state=_get_rng_state, set_rng_state=_set_rng_state)
    nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context)

    @staticmethod
    def current_device() -> torch.device:
        import torch

        return torch.device("cpu")

    @staticmethod
    def manual_seed(seed: int) -> None:
        import torch

        torch.default_generator.manual_seed(seed)

    def __getattr__(self, name: str) -> object:
        import torch

        return getattr(torch.cuda, name)


def _rng_on_cpu(module: types.ModuleType) -> None:
    setattr(module, "_get_cuda_rng_state", _get_rng_state)  # noqa: B010
    setattr(module, "_set_cuda_rng_state", _set_rng_state)  # noqa: B010


def _uneven_splits(module: types.ModuleType) -> None:
    """Gather and reduce-scatter parts of different lengths without padding, one rank after the other."""
    import torch

    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_parts(
        part: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or len(set(output_split_sizes)) == 1 or group.size() == 1:
            return gather(part, group, output_split_sizes, use_global_buffer)
        whole = part.new_empty(sum(output_split_sizes), *part.shape[1:])
        for rank, place in enumerate(whole.split(output_split_sizes)):
            if rank == group.rank():
                place.copy_(part)
            if len(place):
                torch.distributed.broadcast(place, group=group, group_src=rank)
        return whole

    def reduce_scatter_parts(
        whole: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, input_split_sizes, use_global_buffer)
        for rank, part in enumerate(whole.split(input_split_sizes)):
            reduced = part.clone()
            if len(part):
                torch.distributed.reduce(reduced, group=group, group_dst=rank)
            if rank == group.rank():
                part_here = reduced
        return part_here

    module._gather_along_first_dim = gather_parts  # type: ignore[attr-defined]
    module._reduce_scatter_along_first_dim = reduce_scatter_parts  # type: ignore[attr-defined]


def _lean_collectives(module: types.ModuleType) -> None:
    from megarl.system.compat import gloo

    module.dist_reduce_scatter_func = gloo.reduce_scatter  # type: ignore[attr-defined]
    module.dist_all_gather_func = gloo.all_gather  # type: ignore[attr-defined]


PATCHES: tuple[Patch, ...] = (
    Patch(
        "rng-state",
        "megatron.core.tensor_parallel.random",
        _rng_on_cpu,
        lambda source: "_lazy_call(cb)" in source,
        "the state is read and set through CUDA generators that a text change cannot reach",
    ),
    Patch(
        "router-gemm",
        "megatron.core.transformer.moe.moe_utils",
        lambda module: module.__dict__.setdefault("te_general_gemm", None),
        lambda source: "if te_general_gemm is not None" in source and not re.search(r"te_general_gemm\s*=", source),
        "the router tests a name that is only imported with Transformer Engine: NameError in every MoE forward",
        cpu_only=False,
    ),
    Patch(
        "uneven-splits",
        "megatron.core.tensor_parallel.mappings",
        _uneven_splits,
        lambda source: "all_gather(output_tensor_list, input_" in source,
        "ranks that share an expert bring different numbers of tokens, and gloo gathers equal parts only",
    ),
    Patch(
        "lean-collectives",
        "megatron.core.distributed.param_and_grad_buffer",
        _lean_collectives,
        lambda source: all(f"dist_{name}_func =" in source for name in ("reduce_scatter", "all_gather")),
        "torch's collectives of gradients and parameters over gloo take four times the CPU time",
    ),
    Patch(
        "jit-fuser",
        "megatron.core.jit",
        lambda module: module.disable_jit_fuser(),
        lambda source: "jit_fuser = torch.compile" in source,
        "torch.compile of small pointwise functions costs minutes of start-up and gains nothing on a CPU",
    ),
)

# (message, module) of hidden warnings. Some are about missing optional packages, for which fallbacks are intended. The
# others are about deprecated or unusual calls inside Megatron and torch.
_QUIET = (
    (r"Transformer Engine and Apex are not installed\.", r"megatron\.core\b"),
    (r"Apex is not installed\. Falling back to Torch Norm", r"megatron\.core\b"),
    (r"The following imports from `dynamic_context\.py` will be removed", r"megatron\.core\b"),
    (r"`torch\.distributed\.\w+_tensor` is deprecated", r"torch\.distributed\b"),
    (r"`load_state_dict` is deprecated", r"megatron\.core\.dist_checkpointing\b"),
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor", r"megatron\.core\.optimizer\b"),
)
_QUIET_ON_CPU = ((r"When using async grad allreduce it is recommended to set .* CUDA_DEVICE", r"megatron\.core\b"),)


def rewrites_for(module: str, *, cuda: bool) -> list[Rewrite]:
    """Return the changes of source text that Megatron's module `module` needs on a machine with or without CUDA."""
    return [r for r in REWRITES if r.applies(module) and not (cuda and r.cpu_only)]


def rewrite(module: str, source: str, *, cuda: bool) -> str:
    """Return the source of `module` after all text replacements (`Rewrite`) that apply to it, in order."""
    for entry in rewrites_for(module, cuda=cuda):
        changed, count = entry.sub(source)
        while count and changed != source:  # an entry consumes one match per line, so repeat until none is left
            source = changed
            changed, count = entry.sub(source)
    return source


@functools.cache
def _compiled_tag(*, cuda: bool) -> str:
    """Return a suffix for cached bytecode files that changes with `REWRITES`, so that no outdated bytecode is used."""
    return f".megarl-{hashlib.sha256(repr((REWRITES, cuda)).encode()).hexdigest()[:8]}.pyc"


def _has_cuda() -> bool:
    import torch  # not at the top, so that importing megarl.models stays fast

    return torch.cuda.is_available()


def _own_bytecode(path: str) -> str:
    return path.removesuffix(".pyc") + _compiled_tag(cuda=_has_cuda()) if path.endswith(".pyc") else path


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from rewritten source, and caches the bytecode in a file beside that of the original source."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> types.CodeType:  # type: ignore[override]
        source = importlib.util.decode_source(data)
        changed = rewrite(self.name, source, cuda=_has_cuda())
        return super().source_to_code(changed.encode(), path, _optimize=_optimize)

    def get_data(self, path: str) -> bytes:
        return super().get_data(_own_bytecode(path))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(_own_bytecode(path), data, _mode=_mode)

    def exec_module(self, module: types.ModuleType) -> None:
        cuda = _has_cuda()
        if not cuda:
            module.__dict__[_STAND_IN] = _CudaOnCpu()
        super().exec_module(module)
        for patch in PATCHES:
            if patch.module == module.__name__ and not (cuda and patch.cpu_only):
                patch.apply(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core."):
            return None
        _quiet_on_cpu()
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(name, spec.loader.path)
        return spec


@functools.cache
def _quiet_on_cpu() -> None:
    for message, module in () if _has_cuda() else _QUIET_ON_CPU:
        warnings.filterwarnings("ignore", message=message, module=module)


def install() -> None:
    """Install the import hook; call this before the first `import megatron.core`. A second call does nothing.
    Raise RuntimeError if megatron.core was imported before, so parts of it are already loaded unchanged.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megarl.system.compat.megatron.install() must be called before megatron.core is imported")
    for message, module in _QUIET:
        warnings.filterwarnings("ignore", message=message, module=module)
    sys.meta_path.insert(0, _Finder())
