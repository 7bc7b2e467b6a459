"""The base of the modules of mixers other than softmax attention: their linear layers, and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megarl.models.layers.mixer import Mixer

if TYPE_CHECKING:
    from megarl.models.config import PolicyConfig

M = TypeVar("M", bound=Mixer)


class PackedMixer(MegatronModule, Generic[M]):
    """A mixer over a packed stream, in place of Megatron's self-attention.

    A subclass sets `kind`, builds its layers in `build`, and has `forward(hidden, ..., packed_seq_params)`.
    """

    kind: type[M]

    def __init__(
        self,
        config: PolicyConfig,
        submodules: object = None,
        *,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        mixer = config.mixers[layer_number - 1]
        assert isinstance(mixer, self.kind)
        self.mixer, self.groups = mixer, pg_collection
        modules = config.recompute_modules or ()
        self._recompute = config.recompute_granularity == "selective" and "core_attn" in modules
        self.build(mixer, config)

    def build(self, mixer: M, config: PolicyConfig) -> None:
        """Create the parameters, in the order in which they are initialised."""
        raise NotImplementedError

    def columns(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        """Return a linear layer without bias whose outputs tensor parallelism splits."""
        return ColumnParallelLinear(inputs, outputs, **self._common())

    def rows(self, inputs: int, outputs: int) -> RowParallelLinear:
        """Return a linear layer without bias whose inputs are split over tensor-parallel ranks already."""
        return RowParallelLinear(inputs, outputs, input_is_parallel=True, **self._common())

    def recomputed(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `function(*inputs)`, which the backward pass computes again if `recompute` has attention."""
        if self._recompute and self.training:
            return tensor_parallel.checkpoint(function, False, *inputs)
        return function(*inputs)

    def _common(self) -> dict[str, Any]:
        config = self.config
        return {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": self.groups.tp,
        }
