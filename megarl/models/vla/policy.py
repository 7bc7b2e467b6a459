"""The chunk of a robot policy: a language model whose first pipeline stage also sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megarl.architectures.vision import VisionShape
from megarl.models.config import PolicyConfig
from megarl.models.packing import PackedSequences
from megarl.models.policy import PolicyModel
from megarl.models.vla.vision import Vision

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from transformers import PretrainedConfig


class VlaModel(PolicyModel):
    """A `PolicyModel` whose streams bring what they see: `packed_seq_params.seen`, a `megarl.models.vla.vision.Seen`.

    Args:
        shape: of towers and projectors.
        arguments, settings: see `PolicyModel`.
    """

    def __init__(
        self,
        hf: PretrainedConfig,
        config: PolicyConfig,
        spec: TransformerBlockSubmodules,
        shape: VisionShape,
        **settings: Any,
    ) -> None:
        super().__init__(hf, config, spec, **settings)
        if self.pre_process:
            self.vision = Vision(shape, config.params_dtype, sequence_parallel=config.sequence_parallel)

    def _preprocess(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        """As that of `PolicyModel`, with what is seen in its columns."""
        hidden, *rest = super()._preprocess(*arguments, **named)
        packed = named.get("packed_seq_params")
        if not self.pre_process or not isinstance(packed, PackedSequences) or packed.seen is None:
            return hidden, *rest
        first = self.pg_collection.tp.rank() * len(hidden) if self.config.sequence_parallel else 0
        return self.vision.insert(hidden, packed.seen, slice(first, first + len(hidden))), *rest
