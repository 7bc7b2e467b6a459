"""The action expert of a flow-matching policy: transformers' parts of pi0 on the keys of this project's language model.

    keys, values of the prefix in layer i  -----------------------------+
    block of a flow time: [state] [K noisy actions] --> layer i: each token attends to the prefix and to its own block,
                                                        the state not to the actions
                                              --> velocities of the K actions

Several flow times of a policy call are blocks of one sequence that do not see each other, so the prefix is not copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megarl.architectures.action_expert import ExpertShape


@dataclass(frozen=True)
class PrefixKeys:
    """The language model's keys and values that an action expert attends to, for the prefixes (pictures and
    instruction) of B policy calls, with up to L columns (positions) each."""

    # keys (after RoPE) and values of each layer, [B, groups, L, head] each
    layers: list[tuple[Tensor, Tensor]]
    lengths: Tensor  # int64 [B], number of columns of each prefix; later columns are padding

    @classmethod
    def of_stream(cls, layers: dict[int, tuple[Tensor, Tensor]], lengths: Tensor) -> PrefixKeys:
        """Take the prefixes out of a packed stream, at whose beginning they stand end to end.

        Args:
            layers: number of a layer -> keys and values [t, groups, head] of the stream.
            lengths: int64 [B], number of columns of each prefix.
        """
        longest = int(lengths.max())
        place = torch.arange(longest, device=lengths.device)
        columns = (lengths.cumsum(0) - lengths)[:, None] + torch.minimum(place, lengths[:, None] - 1)
        pairs = (layers[number] for number in sorted(layers))
        of_calls = [(keys[columns].transpose(1, 2), values[columns].transpose(1, 2)) for keys, values in pairs]
        return cls(of_calls, lengths)


class ActionExpert(nn.Module):
    """The action expert of pi0: a transformer that predicts velocities of noisy actions.

    Args:
        shape: its sizes.
        dtype: dtype of its parameters; the frequencies of RoPE and of the flow time's sinusoids stay float32.
    """

    def __init__(self, shape: ExpertShape, dtype: torch.dtype) -> None:
        super().__init__()
        from transformers import AutoModel, PI0Config
        from transformers.models.pi0.modeling_pi0 import PI0ActionTimeEmbedding

        layers = {
            "model_type": "gemma",
            "hidden_size": shape.width,
            "intermediate_size": shape.mlp,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.groups,
            "head_dim": shape.head,
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        }
        config = PI0Config(
            dit_config=layers,
            max_action_dim=shape.action,
            max_state_dim=shape.state,
            min_period=shape.min_period,
            max_period=shape.max_period,
        )
        config.dit_config.vocab_size, config.dit_config.pad_token_id = 1, None  # the expert has no token embeddings
        self.dit = AutoModel.from_config(config.dit_config)
        self.dit.embed_tokens = None
        self.embed_action_time = PI0ActionTimeEmbedding(config)
        self.action_out_proj = nn.Linear(shape.width, shape.action)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        self.dtype = dtype

    def forward(self, prefix: PrefixKeys, states: Tensor, noisy: Tensor, times: Tensor) -> Tensor:
        """Return the velocities [B, n, K, D] of noisy actions.

        Args:
            prefix: keys and values of the B policy calls.
            states: [B, state], the robot's state in each call.
            noisy: [B, n, K, D], for each call n chunks of noisy actions, computed independently of each other.
            times: [B, n], the flow time of each chunk.
        """
        from transformers import DynamicCache

        count, blocks, chunk = noisy.shape[:3]
        repeated = states.to(self.dtype).repeat_interleave(blocks, 0)
        tokens = self.embed_action_time(repeated, noisy.to(self.dtype).flatten(0, 1), times.flatten())
        cache = DynamicCache()
        for number, (keys, values) in enumerate(prefix.layers):
            cache.update(keys, values, number)
        hidden = self.dit(
            inputs_embeds=tokens.view(count, blocks * (1 + chunk), -1),
            attention_mask=self._mask(prefix, blocks, chunk),
            position_ids=(prefix.lengths[:, None] + torch.arange(1 + chunk, device=times.device)).repeat(1, blocks),
            past_key_values=cache,
        ).last_hidden_state
        return self.action_out_proj(hidden.view(count, blocks, 1 + chunk, -1)[:, :, 1:])

    @staticmethod
    def _mask(prefix: PrefixKeys, blocks: int, chunk: int) -> Tensor:
        """Return which keys each of the expert's tokens attends to, bool [B, 1, q, k]: keys of the prefix, then keys of
        the token's own block, the state and one chunk of actions. The state does not attend to the actions."""
        longest, where = prefix.layers[0][0].shape[2], prefix.lengths.device
        place = torch.arange(blocks * (1 + chunk), device=where)
        block, is_action = place // (1 + chunk), place % (1 + chunk) > 0
        same_block = (block[:, None] == block) & (is_action[:, None] | ~is_action)
        given = torch.arange(longest, device=where) < prefix.lengths[:, None]
        parts = given[:, None].expand(-1, len(place), -1), same_block.expand(len(given), -1, -1)
        return torch.cat(parts, 2)[:, None]
