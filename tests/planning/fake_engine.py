"""The real training engine at real size without its memory: parameters, gradients and activations that are only shapes.

    main(CASES, MEASURED)      # files: the cases as JSON, and the bytes of each as a line of JSON

One process stands for one rank of a world of any size. torch's `fake` backend answers every collective at once, and
under FakeTensorMode a tensor has a shape, a dtype and a storage of so many bytes, but no numbers. `Storages` adds up
the storages that are alive: what the allocator of a GPU would have handed out, without its rounding and what it keeps
between blocks. The code that runs is that of a run: Megatron's model, buffers, schedule and optimizer, our attention,
norms and head.

Where numbers decide about shapes, or the device about the code, it is told what to do, and nothing else is changed:

* `is_cuda` of fake tensors is True to Python code, so that the form of the code for GPUs is what runs: no kernels of
  ours for the CPU, those for the GPU as what they allocate, and attention by torch's variable-length kernel. (Fake
  tensors that say so to C++ as well need a CUDA build of torch: autograd asks for the device.)
* A mixture's router sends every expert equally many tokens.
* A pipeline stage is told the shapes of what it receives.
* Metrics, gradient norm and the check of non-finite numbers are left out; the optimizer steps once.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_COALESCED = {
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default,
    torch.ops.c10d.allgather_into_tensor_coalesced_.default,
    torch.ops.c10d.allreduce_coalesced_.default,
}


@dataclass(frozen=True)
class FakeCase:
    """One rank of a world.

    Attributes:
        model: a Hugging Face config.
        parallel, engine: sections of a recipe, as plain data.
        lengths: tokens of the samples of this rank's replica; as many micro-batches as the budget makes of them.
        prompt: of them, the tokens of a prompt.
    """

    name: str
    model: dict[str, Any]
    world: int
    lengths: list[int]
    prompt: int
    rank: int = 0
    dtype: str = "bf16"
    parallel: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    value_head: bool = False
    mtp: bool = False


class Storages(TorchDispatchMode):
    """The bytes of all storages of fake tensors that are alive, and the most there have been.

    Operations on real tensors only (lengths, indices) are done for real, so that code can read them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def reset_peak(self) -> None:
        """Begin a new phase."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if tensors and not any(isinstance(t, FakeTensor) for t in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func in _COALESCED:  # torch has no shapes for them; they return nothing but something to wait for
            return FakeWork().boxed()
        out = func(*args, **kwargs)
        for made in tree_leaves(out):
            if isinstance(made, FakeTensor):
                self.add(made)
        return out

    def add(self, made: Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = made.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@contextlib.contextmanager
def fake_world(case: FakeCase) -> Iterator[Any]:
    """Make the `Layout` of one rank, with groups whose collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.config.model import ParallelConfig
    from megarl.system.comm import WorkerGroup
    from megarl.training.parallel import init_parallel

    new_group, all_gather_object = dist.new_group, dist.all_gather_object

    def same_of_all(object_list: Any, obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    dist.init_process_group("fake", store=FakeStore(), rank=case.rank, world_size=case.world)
    # Megatron wants some groups over gloo, for checkpoints.
    dist.new_group = functools.wraps(new_group)(
        lambda *args, **kwargs: new_group(*args, **kwargs | {"backend": "fake"})
    )
    dist.all_gather_object = same_of_all
    try:
        layout = init_parallel(
            ParallelConfig(**{"dispatch": "alltoall", **case.parallel}),
            WorkerGroup("the world", dist.group.WORLD, 60.0),
        )
        yield layout
        layout.close()
    finally:
        dist.new_group, dist.all_gather_object = new_group, all_gather_object
        dist.destroy_process_group()


@contextlib.contextmanager
def seams(hidden_shape: list[int]) -> Iterator[None]:
    """Tell the code what this module's text says."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megarl.kernels import gpu
    from megarl.models.layers.attention import training as attention
    from megarl.models.layers.experts import training as experts
    from megarl.models.layers.experts.training import TokenDispatcher
    from megarl.models.policy import PolicyModel
    from megarl.system.comm import WorkerGroup
    from megarl.training import logprob

    exchange = TokenDispatcher._exchange_counts

    def balanced(self: Any, counts: Tensor) -> None:
        rows = self._shape[:-1].numel() * self.config.moe_router_topk
        with unset_fake_temporarily():  # the host reads these numbers
            exchange(self, (torch.arange(len(counts)) < rows % len(counts)).long() + rows // len(counts))
            numbers = self._sizes.tolist()
        self._sizes = SimpleNamespace(tolist=lambda: numbers)

    def shapes(self: Any, next_: Any, prev: Any, recv_prev: bool, recv_next: bool) -> tuple[list[int], list[int]]:
        return hidden_shape, hidden_shape

    changes = [
        (experts, "is_one_kernel", lambda weight, dtype: False),  # torch would ask for the GPU's kind
        (TokenDispatcher, "_exchange_counts", balanced),
        (P2PCommunicator, "_communicate_shapes", shapes),
        (attention, "varlen_kernel", lambda q: attention._torch_varlen if q.dtype == torch.bfloat16 else None),
        (logprob, "_kernels", lambda logits: _LogitsKernels if logits.dtype == torch.float32 else None),
        (gpu, "layer_kernels", lambda *tensors: _LayersKernels),
        (gpu, "expert_kernels", lambda rows: _ExpertsKernels),
        (WorkerGroup, "broadcast", lambda self, tensor, src=0: tensor),  # torch would ask for the GPU's kind
        (PolicyModel, "to", lambda self, device: self),  # it is there; torch cannot swap fake parameters
        (FakeTensor, "is_cuda", property(lambda self: True)),
        (FakeTensor, "is_cpu", property(lambda self: False)),
    ]
    missing = object()
    before = [(owner, name, vars(owner).get(name, missing)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class _LogitsKernels:
    """The memory of kernels/logits_gpu.py."""

    @staticmethod
    def statistics(logits: Tensor, *given: Any, **place: Any) -> None: ...

    @staticmethod
    def gradients(logits: Tensor, *given: Any, **place: Any) -> Tensor:
        return torch.empty_like(logits, dtype=given[-1])


class _LayersKernels:
    """The memory of kernels/layers_gpu.py, without the sums of a norm's programs."""

    @staticmethod
    def swiglu(x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x.new_empty(len(x), x.shape[1] // 2)

    @staticmethod
    def swiglu_backward(x: Tensor, grad: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def scaled_swiglu_backward(x: Tensor, grad: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(scale)

    @staticmethod
    def rope(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
        return x.new_empty(x.shape)

    @staticmethod
    def fits(width: int) -> bool:
        return True

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def rms_norm_backward(x: Tensor, grad: Tensor, weight: Tensor, eps: float, *, of_weight: bool) -> Any:
        return torch.empty_like(x), torch.empty_like(weight)


class _ExpertsKernels:
    """The memory of kernels/experts_gpu.py."""

    @staticmethod
    def sum_rows(rows: Tensor, places: Tensor) -> Tensor:
        return rows.new_empty(len(places), rows.shape[1])


def measure(case: FakeCase) -> dict[str, Any]:
    """Return the bytes of one rank.

    Returns:
        parameters, gradients, optimizer. In addition to these three: `saved`, alive after each forward pass of the
        model or of a chunk of it; `left`, after the passes of all micro-batches; `update`, the most in these passes.
    """
    from megarl.config.model import ModelConfig
    from megarl.config.training import EngineConfig, MtpConfig, OptimConfig
    from megarl.models.config import load_hf_config
    from megarl.system.device import DTYPES
    from megarl.training.engine import MegatronEngine

    hf = load_hf_config(ModelConfig(hf_config=case.model))
    engine_config = EngineConfig(**case.engine)
    with fake_world(case) as layout:
        batch = _batch(case)
        micros, length = _micro_batches(case, batch, layout, engine_config)
        shape = [micros[0].input_ids.shape[1] // (layout.tp_size if _sequence_parallel(case) else 1), 1, hf.hidden_size]
        mode, storages = FakeTensorMode(allow_non_fake_inputs=True), Storages()
        with seams(shape), mode, storages:
            engine = MegatronEngine(
                hf,
                layout.parallel,
                engine_config,
                OptimConfig(),
                dtype=DTYPES[case.dtype],
                layout=layout,
                total_steps=1,
                weights=lambda chunks: None,
                value_head=case.value_head,
                mtp=MtpConfig() if case.mtp else None,
            )
            engine.model_config.variable_seq_lengths = length is None
            return _run(engine, storages, micros, length or 1, case)


def _run(engine: Any, storages: Storages, micros: list[Any], length: int, case: FakeCase) -> dict[str, Any]:
    from megarl.training.draft_loss import DraftLogProbs
    from megarl.training.heads import Values

    parameters = [p for chunk in engine.chunks for p in chunk.parameters()]
    gradients = [b.grad_data for chunk in engine.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    params, grads = _bytes(parameters), _bytes(gradients)
    built = storages.live
    after: list[int] = []
    head = Values() if case.value_head else engine._log_probs(1.0)

    def last(micro: Any, chunk: Any) -> Any:
        after.append(storages.live)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            value = -sum(output.sum() for output in engine._outputs(head, hidden, chunk, micro))
            if case.mtp:
                draft = DraftLogProbs(engine.config.logits_chunk_tokens, engine.layout.tp_group)
                value = value - engine._outputs(draft, hidden, chunk, micro.draft)[0].sum()
            return value, value.new_zeros((), dtype=torch.int), value.detach()

        return loss

    storages.reset_peak()
    before = storages.live
    if case.mtp:
        engine._lend_embedding()
    engine._schedule(micros, length, last)
    engine.chunks[-1].lent_embedding = None
    update = storages.peak - before
    kept = storages.live - before  # buffers of Megatron, and what the last micro-batch left
    engine.optimizer.prepare_grads()
    engine.optimizer.step_with_ready_grads()
    moments = storages.live - before - kept
    return {
        "name": case.name,
        "parameters": params,
        "gradients": grads,
        "optimizer": built - params - grads + moments,
        "saved": [live - before for live in after],
        "left": kept,
        "update": update,
    }


def _bytes(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _batch(case: FakeCase) -> Any:
    from megarl.data.batch import Batch, Jagged

    prompts = [[0] * min(case.prompt, length - 1) for length in case.lengths]
    responses = [[0] * (length - len(prompt)) for length, prompt in zip(case.lengths, prompts, strict=True)]
    made = {"prompt_ids": prompts, "response_ids": responses}
    return Batch({name: Jagged.from_list(rows, dtype=torch.int64) for name, rows in made.items()})


def _micro_batches(case: FakeCase, batch: Any, layout: Any, engine: Any) -> tuple[list[Any], int | None]:
    from megarl.models.layers.attention.training import plan_buckets
    from megarl.training import microbatch
    from megarl.training.sequence_layout import TextLayout

    cpu = torch.device("cpu")
    groups = microbatch.plan(batch, engine.micro_batch_tokens, layout, cpu)
    micros, length = microbatch.build_all(batch, groups, layout, cpu, TextLayout(drafts=case.mtp))
    for micro in micros:
        if layout.cp_size > 1 or case.dtype != "bf16":
            micro.packed.cache["plan"] = plan_buckets(micro.packed, cpu)
    return micros, length


def _sequence_parallel(case: FakeCase) -> bool:
    return bool(case.parallel.get("tp", 1) > 1 and (case.parallel.get("sp") or case.model.get("num_experts")))


def main(cases: str, measured: str) -> None:
    """Measure the cases of a JSON file, each to a line of another file."""
    with open(measured, "w") as file:
        for given in json.loads(Path(cases).read_text()):
            file.write(json.dumps(measure(FakeCase(**given))) + "\n")
