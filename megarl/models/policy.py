"""A GPTModel that takes a packed stream and returns hidden states; callers apply the head for log-probs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megarl.architectures.tensors import part_of
from megarl.models.config import PolicyConfig
from megarl.models.draft_head import DraftHead, embed
from megarl.models.hf import value_bias
from megarl.models.layer_forms import table_name
from megarl.models.layers.attention.plain import LOCAL_ROPE, ROPE, Attention
from megarl.models.layers.experts.plain import BUFFER
from megarl.models.packing import PackedSequences
from megarl.models.rope import Rope
from megarl.models.soft_cap import capped
from megarl.models.weight_table import WeightTable

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from transformers import PretrainedConfig


class ValueHead(MegatronModule):
    """The linear map from hidden state to one value: weight [1, hidden] and, for some checkpoints, a bias [1].

    Both are the same on all tensor-parallel ranks."""

    def __init__(self, config: PolicyConfig, where: torch.device, *, bias: bool) -> None:
        super().__init__(config=config)
        for name, shape in (("weight", (1, config.hidden_size)), ("bias", (1,) if bias else None)):
            value = torch.nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=where)) if shape else None
            self.register_parameter(name, value)
            if value is not None:
                value.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PolicyModel(GPTModel):
    """One pipeline chunk of a policy (or, with a value head, of a critic).

    `model(input_ids [1, t], position_ids [1 or 3, t], None, packed_seq_params=...)` returns hidden states [t, 1,
    hidden]: after the final norm on the last chunk, otherwise for the next chunk. Under sequence parallelism they are
    this tensor-parallel rank's t / tp tokens.
    """

    draft: DraftHead  # only in the last chunk of a model that trains its draft head

    def __init__(
        self,
        hf: PretrainedConfig,
        config: PolicyConfig,
        spec: TransformerBlockSubmodules,
        *,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
        value_head: bool,
    ) -> None:
        super().__init__(
            config,
            spec,
            vocab_size=padded_vocab(hf.vocab_size, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings,
            position_embedding_type="none",  # attention applies RoPE from explicit positions
            share_embeddings_and_output_weights=hf.tie_word_embeddings and not value_head,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        self.hf_config = hf
        tables = {mixer.rope for mixer in config.mixers if isinstance(mixer, Attention)}
        # whether `rope_parameters` has one section for each kind of layer
        sections = "full_attention" in (hf.rope_parameters or {})
        self.local_rope = Rope(hf, layers="sliding_attention") if LOCAL_ROPE in tables else None
        # A model without full-attention layers has complete RoPE settings only for its sliding-window layers.
        self.rope = (
            self.local_rope
            if ROPE not in tables and self.local_rope
            else Rope(hf, layers="full_attention" if sections else None)
        )
        self.embedding_factor = config.wiring.embedding
        if config.wiring.embedding_rounded:
            self.embedding_factor = float(torch.tensor(self.embedding_factor, dtype=config.params_dtype))
        self.has_value_head = value_head
        self.weight_table = WeightTable.of(hf, value_head=value_head, draft=config.draft)
        # whether forward passes give routers the mask of padding tokens, which they must not count
        self.marks_padding = False
        # the first stage's rows of the embedding, if a draft head of another stage needs them for the current step
        self.lent_embedding: Tensor | None = None
        if value_head and post_process:
            vocabulary_head = getattr(self, "output_layer")  # noqa: B009 (Megatron does not declare its type)
            self.output_layer = ValueHead(config, vocabulary_head.weight.device, bias=value_bias(hf))

    def _preprocess(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        decoder_input: Tensor | None = None,
        inference_context: object = None,
        packed_seq_params: PackedSequences | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Embed the tokens on the first chunk, and put the RoPE tables for `packed_seq_params` into its cache, from
        which attention reads them.
        """
        if not isinstance(packed_seq_params, PackedSequences):
            raise ValueError(
                "the model takes packed input only: pass packed_seq_params from models.packing.pack_stream"
            )
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
            if self.embedding_factor != 1:
                decoder_input = decoder_input * self.embedding_factor
        if self.config.lora is not None and decoder_input is not None and torch.is_grad_enabled():
            # Recomputed layers get gradients in the backward pass only if their input requires one.
            decoder_input.requires_grad_(True)
        cache = packed_seq_params.cache
        if self.config.layers == "te":
            cache["angles"] = self.rope.angles(packed_seq_params.max_seqlen_q, position_ids.device)
        else:
            tables = self.rope.cos_sin if len(position_ids) == 1 else self.rope.cos_sin_of_three
            cache[ROPE] = tables(position_ids.squeeze(0), self.config.params_dtype)
            if self.local_rope is not None:
                cache[LOCAL_ROPE] = self.local_rope.cos_sin(position_ids.squeeze(0), self.config.params_dtype)
        if self.pre_process:
            assert decoder_input is not None, "the first chunk embeds its tokens"
            first = self.pg_collection.tp.rank() * len(decoder_input) if self.config.sequence_parallel else 0
            decoder_input = self._insert(decoder_input, packed_seq_params, first)
        if self.marks_padding:
            padding_mask = self._padding_mask(packed_seq_params, position_ids.device)
        return decoder_input, None, None, None, None, padding_mask

    def _padding_mask(self, packed: PackedSequences, where: torch.device) -> Tensor:
        """Return which tokens of this rank's share are padding, bool [1, t]."""
        share = packed.padding.to(where)
        if self.config.sequence_parallel:
            share = share.tensor_split(self.pg_collection.tp.size())[self.pg_collection.tp.rank()]
        return share[None]

    def draft_states(self, following: Tensor, hidden: Tensor, packed: PackedSequences) -> Tensor:
        """Return the draft head's hidden states [t, 1, h] for a stream that has passed the model; embeddings are
        constants.

        Args:
            following: int64 [1, t], the token after each token of the stream.
            hidden: [t, 1, h], the model's hidden states, which are constants.
        """
        rows = self.lent_embedding
        if rows is None:
            rows = self.embedding.word_embeddings.weight if self.pre_process else self.output_layer.weight
        with torch.no_grad():
            embedded = embed(following, rows, self.config, self.pg_collection.tp.rank())
        mask = self._padding_mask(packed, hidden.device) if self.marks_padding else None
        return self.draft(embedded, hidden, packed, mask)

    def _insert(self, hidden: Tensor, packed: PackedSequences, first: int) -> Tensor:
        """Return the embeddings [t, 1, hidden] of the stream's columns from `first` on, with image features inserted by
        the subclasses that read images.
        """
        return hidden

    def _postprocess(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        """Return the decoder's hidden states, where GPTModel would compute logits. Those of a policy are divided by the
        model's divisor of its logits."""
        divisor = self.config.wiring.logits
        if divisor == 1 or not self.post_process or self.has_value_head:
            return hidden_states
        return hidden_states / divisor

    def freeze(self, parts: Collection[str]) -> None:
        """Freeze the parameters of `parts` (`ModelPart`), except a value head."""
        for name, parameter in self.named_parameters():
            head = self.has_value_head and name.startswith("output_layer.")
            if part_of(name) in parts and not head:
                parameter.requires_grad_(False)

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters, and the buffers that belong to the model, by their names in the weight table, whatever
        the layer form."""
        buffers = {name: buffer for name, buffer in self.named_buffers() if name.endswith(BUFFER)}
        return {table_name(name): tensor for name, tensor in (dict(self.named_parameters()) | buffers).items()}

    @property
    def lm_head_weight(self) -> Tensor:
        """Weight [rows, hidden] of this rank's vocabulary rows, `vocab_range`, without padding rows.

        Only on the last pipeline chunk. With tied embeddings it is the embedding (or its copy, if the first chunk is
        elsewhere).
        """
        if not self.post_process or self.has_value_head:
            raise ValueError("only the last pipeline chunk of a policy has a language-model head")
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        start, end = self.vocab_range
        return weight if end - start == weight.shape[0] else weight[: end - start]

    @property
    def logit_cap(self) -> float | None:
        """The cap c of logits x, which become c * tanh(x / c); None: logits are not capped."""
        return self.config.wiring.logit_cap

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, rows] of hidden states [n, hidden] for this rank's vocabulary rows, `vocab_range`.

        Only on the last pipeline chunk. Heads compute logits for some tokens at a time instead.
        """
        return capped(F.linear(hidden, self.lm_head_weight), self.logit_cap)

    @property
    def vocab_range(self) -> tuple[int, int]:
        """First, and one past the last, token id whose logits this tensor-parallel rank computes."""
        rows = self.vocab_size // self.config.tensor_model_parallel_size
        start = min(self.pg_collection.tp.rank() * rows, self.hf_config.vocab_size)
        return start, min(start + rows, self.hf_config.vocab_size)

    @property
    def value_weight(self) -> Tensor:
        """Weight [1, hidden] of a critic's value head, on the last pipeline chunk."""
        if not self.post_process or not self.has_value_head:
            raise ValueError("only the last pipeline chunk of a critic has a value head")
        return self.output_layer.weight

    def values(self, hidden: Tensor) -> Tensor:
        """Return values [..., 1] of hidden states [..., hidden] in float32, on the last pipeline chunk of a critic."""
        values = hidden.float() @ self.value_weight.float().t()
        bias = self.output_layer.bias
        return values if bias is None else values + bias.float()


def padded_vocab(vocab_size: int, tp: int) -> int:
    """Return the vocabulary size rounded up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tp) * tp
