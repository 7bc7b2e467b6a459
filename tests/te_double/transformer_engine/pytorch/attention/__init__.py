"""Attention of packed sequences to themselves, also over context-parallel ranks in zig-zag order."""

import torch
import torch.distributed as dist

from transformer_engine.pytorch.distributed import Exchange, gathered, scattered_sum
from transformer_engine.pytorch.module import TransformerEngineBaseModule


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
        window_size=None,
        bottom_right_diagonal=None,
        softcap=0.0,
        sequence_parallel=False,
        tp_size=1,
        get_rng_state_tracker=None,
        tp_group=None,
        layer_number=None,
        attention_type="self",
        cp_group=None,
        cp_global_ranks=None,
        cp_stream=None,
        cp_comm_type="p2p",
        softmax_scale=None,
        softmax_type="vanilla",
        return_max_logit=False,
        name=None,
    ):
        super().__init__()
        assert attention_type == "self"
        assert softmax_type == "vanilla"
        assert not attention_dropout
        assert not softcap
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.kv_channels = kv_channels
        self.num_gqa_groups_per_partition = (num_gqa_groups or num_attention_heads) // self.tp_size
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def set_context_parallel_group(
        self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p", load_balancing_strategy=None
    ):
        self.cp_group, self.cp_comm_type = cp_group, cp_comm_type

    def forward(
        self,
        query_layer=None,
        key_layer=None,
        value_layer=None,
        attention_mask=None,
        qkv_format=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        max_seqlen_q=None,
        max_seqlen_kv=None,
        attn_mask_type=None,
        window_size=None,
        bottom_right_diagonal=None,
        softcap=None,
        checkpoint_core_attention=False,
        core_attention_bias_type="no_bias",
        core_attention_bias=None,
        alibi_slopes=None,
        fast_zero_fill=True,
        inference_params=None,
        pad_between_seqs=None,
        fp8_output=False,
        bf16_backward=False,
        num_splits=1,
        score_mod=None,
        score_mod_bprop=None,
        score_mod_tensors=None,
        score_mod_bprop_tensors=None,
        qkv_layer=None,
        kv_layer=None,
        qkv_interleave_dim=-3,
        thd_attention_policies=None,
        thd_attention_policy_dispatch="auto",
    ):
        format_, mask_type = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        self._refuse(query_layer, key_layer, value_layer, format_, mask_type)
        assert cu_seqlens_q.dtype == cu_seqlens_kv.dtype == torch.int32
        lengths = cu_seqlens_q.diff().tolist()
        assert max(lengths) <= min(max_seqlen_q, max_seqlen_kv)
        if self.cp_group is not None and self.cp_group.size() > 1:
            assert cu_seqlens_q_padded is not None
            assert cu_seqlens_kv_padded is not None
        left = (window_size or self.window_size or (-1, -1))[0]
        return self._attend(query_layer, key_layer, value_layer, lengths, "causal" in mask_type, left)

    def _refuse(self, q, k, v, qkv_format, mask_type):
        assert qkv_format == "thd", "the double computes packed sequences only"
        assert all(x.dim() == 3 for x in (q, k, v)), (
            "Queries, keys and values must be 3D tensors when qkv_format = thd!"
        )
        assert "padding" in mask_type, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
        assert q.dtype == k.dtype == v.dtype
        assert q.shape[-1] == self.kv_channels
        assert k.shape[-2] == self.num_gqa_groups_per_partition

    def _attend(self, q, k, v, lengths, causal, left):
        cp = 1 if self.cp_group is None else self.cp_group.size()
        places = torch.cat([torch.arange(length) for length in lengths]).to(q.device)
        which = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(q.device)
        mine = torch.arange(len(places), device=q.device)
        if cp > 1:
            assert left < 0 or self.cp_comm_type in ("a2a", "all_gather"), "no sliding window with p2p"
            order = [_zigzag(lengths, cp, rank) for rank in range(cp)]
            mine, held = order[dist.get_rank(self.cp_group)].to(q.device), torch.cat(order).to(q.device)
            k, v = (Exchange.apply(x, self.cp_group, gathered, scattered_sum)[held.argsort()] for x in (k, v))
        seen = which[mine, None] == which
        if causal:
            seen &= places <= places[mine, None]
        if left >= 0:
            seen &= places >= places[mine, None] - left
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        weights = scores.masked_fill(~seen, -torch.inf).float().softmax(-1).to(v.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)


def _zigzag(lengths, cp, rank):
    """Places of a rank's tokens among all tokens of the packed sequences: two chunks of each."""
    parts, start = [], 0
    for length in lengths:
        assert length % (2 * cp) == 0, "sequence lengths must be divisible by 2 * cp"
        chunk = length // (2 * cp)
        parts += [start + part * chunk + torch.arange(chunk) for part in (rank, 2 * cp - 1 - rank)]
        start += length
    return torch.cat(parts)
