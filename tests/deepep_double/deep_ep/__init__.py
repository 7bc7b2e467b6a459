"""A double of DeepEP on CPUs, over the group's collectives: the arguments of the real `Buffer`, and what it refuses.

Unlike the real one it adds up rows of any dtype, so that results can be compared in float32, and returns no events.
"""

import torch
import torch.distributed as dist

_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)


class Config:
    def __init__(self, num_ranks):
        assert num_ranks in _RANKS, f"Unsupported number of EP ranks: {num_ranks}"

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 10 * min(num_ranks, 8) * 256 * hidden_bytes

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0 if num_ranks <= 8 else 10 * num_ranks // 8 * 128 * hidden_bytes


class Buffer:
    made = 0

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
        enable_shrink=False,
        comm=None,
    ):
        self.group, self.group_size, self.rank = group, group.size(), group.rank()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        dist.barrier(group)
        Buffer.made += 1

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config(num_ranks)

    @staticmethod
    def get_combine_config(num_ranks):
        return Config(num_ranks)

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        assert topk_idx.dtype == torch.int64
        assert topk_idx.dim() == 2
        assert topk_idx.is_contiguous()
        assert num_experts % self.group_size == 0
        owners = topk_idx // (num_experts // self.group_size)
        is_sent = torch.stack([(owners == rank).any(1) for rank in range(self.group_size)], 1)
        to_expert = torch.stack([(topk_idx == expert).any(1).sum() for expert in range(num_experts)])
        return is_sent.sum(0).int(), None, to_expert.int(), is_sent, None

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert x.dim() == 2
        assert x.is_contiguous()
        assert x.shape[1] * x.element_size() % 16 == 0
        assert 2 * x.shape[1] * min(self.group_size, 8) <= self.num_nvl_bytes
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            rows = self._exchange([x[sent] for sent in handle[0].T])
            assert [len(part) for part in rows] == handle[1]
            return torch.cat(rows), None, None, None, None, None
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        assert topk_weights.shape == topk_idx.shape
        assert num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
        rows, experts, weights = (
            self._exchange([part[sent] for sent in is_token_in_rank.T]) for part in (x, topk_idx, topk_weights)
        )
        here = len(num_tokens_per_expert) // self.group_size
        local = torch.cat(experts) - self.rank * here
        mine = (local >= 0) & (local < here)
        local = local.masked_fill(~mine, -1)
        counts = [(local == expert).any(1).sum().item() for expert in range(here)]
        handle = (is_token_in_rank, [len(part) for part in rows])
        return torch.cat(rows), local, torch.cat(weights).masked_fill(~mine, 0), counts, handle, None

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert x.is_contiguous()
        assert len(x) == sum(handle[1])
        total = self._home(x, handle)
        if topk_weights is None:
            return total, None, None
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        return total, self._home(topk_weights, handle), None

    def _home(self, rows, handle):
        total = torch.zeros(len(handle[0]), rows.shape[1])
        for sent, part in zip(handle[0].T, self._exchange(rows.split(handle[1])), strict=True):
            total[sent] += part
        return total.to(rows.dtype)

    def _exchange(self, parts):
        everyone = [None] * self.group_size
        dist.all_gather_object(everyone, [part.detach() for part in parts], self.group)
        return [sent[self.rank] for sent in everyone]
