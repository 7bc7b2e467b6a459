"""What a server holds against what the trainer has: checksums of all tensors, and log-probs of a greedy probe.

The server gives a checksum for each of its own parameters, in which it has fused and split the tensors it was sent.
The trainer computes the same from tensors gathered one at a time by `iter_hf_tensors`, which shares nothing with the
plan or the buckets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.comm import all_gather_json, group_size
from megarl.errors import ServerError
from megarl.models.hf import expert_ffn, head_dim, num_experts
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet
from megarl.sync.checksum import Checksum, make_checksum

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Checksums = list[dict[str, str]]  # per tensor-parallel rank of a server: parameter -> checksum

_PROBE_TOKENS = 8  # of the prompt, and of its continuation
_VOCAB_MULTIPLE = 64  # the server pads the rows of embedding and head to it, with zeros
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
_FUSED["up_proj"] = "gate_up_proj"


@dataclass(frozen=True)
class _Sizes:
    """Sizes that decide how a server splits the model."""

    head: int
    query_heads: int
    kv_heads: int
    experts: int
    expert_ffn: int
    ffn: int
    hidden: int

    @classmethod
    def of(cls, hf: PretrainedConfig) -> _Sizes:
        return cls(
            head_dim(hf),
            hf.num_attention_heads,
            hf.num_key_value_heads,
            num_experts(hf) or 0,
            expert_ffn(hf),
            hf.intermediate_size,
            hf.hidden_size,
        )


def expected_checksums(
    tensors: Iterable[tuple[str, Tensor | None]],
    hf: PretrainedConfig,
    layouts: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    *,
    on_gpu: bool,
) -> dict[tuple[int, int], Checksums]:
    """What servers must report that hold `tensors`, by their layout (tp, ep). Runs through `tensors` once.

    Args:
        tensors: Hugging Face tensors in export order; None on ranks that only take part in the gathering.
        dtype: of the server's parameters.
        on_gpu: the servers compute on GPUs, which have another checksum.
    """
    sizes = _Sizes.of(hf)
    found: dict[tuple[int, int], list[dict[str, Checksum]]] = {at: [{} for _ in range(at[0])] for at in set(layouts)}
    for name, tensor in tensors:
        if tensor is None:
            continue
        cast = tensor.to(dtype)
        for (tp, ep), ranks in found.items():
            for rank, sums in enumerate(ranks):
                for param, part, total in _parts(name, cast, sizes, tp, ep, rank):
                    if param not in sums:
                        sums[param] = make_checksum(total * dtype.itemsize, on_gpu=on_gpu)
                    sums[param].update(part)
    return {at: [{p: s.hexdigest() for p, s in sums.items()} for sums in ranks] for at, ranks in found.items()}


def _parts(name: str, tensor: Tensor, sizes: _Sizes, tp: int, ep: int, rank: int) -> Iterator[tuple[str, Tensor, int]]:
    """(server parameter, the part of `tensor` that follows in it, elements of the whole parameter) on one rank."""
    if found := _EXPERT.fullmatch(name):
        yield from _expert_parts(found, tensor, sizes, tp, ep, rank)
        return
    module = name.rsplit(".", 2)[-2]
    param = name.replace(module, _FUSED.get(module, module))
    if module in ("k_proj", "v_proj") and sizes.kv_heads < tp:  # each group is on several ranks
        part = tensor.chunk(sizes.kv_heads)[rank * sizes.kv_heads // tp]
    elif module in _FUSED:
        part = tensor.chunk(tp)[rank]
    elif module in ("o_proj", "down_proj"):
        part = tensor.chunk(tp, 1)[rank]
    elif module in ("embed_tokens", "lm_head"):
        rows = -(-tensor.shape[0] // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // tp
        part = tensor[rank * rows : (rank + 1) * rows]
        if len(part) < rows:
            part = torch.cat([part, part.new_zeros(rows - len(part), part.shape[1])])
    else:
        part = tensor
    total = part.numel()
    if param != name:
        kv = max(sizes.kv_heads // tp, 1)
        rows = (sizes.query_heads // tp + 2 * kv) * sizes.head if "qkv" in param else 2 * part.shape[0]
        total = rows * math.prod(part.shape[1:])
    yield param, part, total


def _expert_parts(
    found: re.Match[str], tensor: Tensor, sizes: _Sizes, tp: int, ep: int, rank: int
) -> Iterator[tuple[str, Tensor, int]]:
    ways = tp // ep
    local = sizes.experts // ep
    if int(found[2]) // local != rank // ways:
        return
    size = local * sizes.hidden * sizes.expert_ffn // ways
    if found[3] in ("down_proj", "w2"):
        yield f"{found[1]}.w2_weight", tensor.chunk(ways, 1)[rank % ways], size
    else:
        yield f"{found[1]}.w13_weight", tensor.chunk(ways)[rank % ways], 2 * size


def reported_checksums(api: ServerApi, deadline_s: float) -> Checksums:
    """What the server says about its own parameters, by tensor-parallel rank.

    Raises:
        ServerError: no answer, or one without checksums.
    """
    answer = api.call("/weights_checker", {"action": "checksum"}, deadline_s=deadline_s, phase="verification")
    try:
        # One list per data-parallel engine; those are not used, so there is one.
        flat = [info for part in answer["ranks"] for info in (part if isinstance(part, list) else [part])]
        flat.sort(key=lambda info: info["parallelism_info"][0]["tp_rank"])
        return [info["checksums"] for info in flat]
    except (KeyError, IndexError, TypeError) as error:
        raise _error(api, f"no checksums in its answer: {type(error).__name__}: {error}") from error


def compare(api: ServerApi, expected: Checksums, reported: Checksums) -> int:
    """Number of parameters that were compared.

    Raises:
        ServerError: a parameter differs or is missing; the message names the first ones.
    """
    if len(expected) != len(reported):
        raise _error(api, f"it has {len(reported)} ranks, {len(expected)} were expected")
    wrong = [
        f"{param} (rank {rank}: {theirs.get(param, 'missing')}, expected {value})"
        for rank, (ours, theirs) in enumerate(zip(expected, reported, strict=True))
        for param, value in ours.items()
        if theirs.get(param) != value
    ]
    if wrong:
        count = sum(len(part) for part in expected)
        raise _error(api, f"{len(wrong)} of {count} parameters differ from the trainer's: {', '.join(wrong[:3])}")
    return sum(len(part) for part in expected)


def _error(api: ServerApi, reason: str) -> ServerError:
    return ServerError(api.name, api.url, "verification", reason)


@dataclass(frozen=True)
class Probe:
    """A greedy continuation and the server's log-probs of its tokens, at temperature 1."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    version: str


def greedy_probe(api: ServerApi, prompt_ids: list[int], tokens: int, deadline_s: float) -> Probe:
    """Let the server continue `prompt_ids` greedily by `tokens` tokens."""
    payload = {
        "input_ids": prompt_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    meta = api.call("/generate", payload, deadline_s=deadline_s, phase="probe")["meta_info"]
    pairs = meta["output_token_logprobs"]
    return Probe(prompt_ids, [int(p[1]) for p in pairs], [float(p[0]) for p in pairs], str(meta["weight_version"]))


def probe_servers(fleet: Fleet, numbers: Sequence[int], vocabulary: int, deadline_s: float, tag: str) -> list[Probe]:
    """A greedy probe of each of these servers, the same on every rank.

    One that does not answer, or not with the weights that are called `tag`, is marked failed.

    Collective: the servers are shared out over the ranks. The prompt is the same for all.
    """
    ranks, rank = group_size(), dist.get_rank() if group_size() > 1 else 0
    prompt = [(7919 * i + 11) % vocabulary for i in range(_PROBE_TOKENS)]
    probes, failed = [], []
    for number in numbers[rank::ranks]:
        try:
            probe = greedy_probe(fleet.servers[number].api, prompt, _PROBE_TOKENS, deadline_s)
            if probe.version == tag:
                probes.append(asdict(probe))
            else:
                failed.append([number, f"probe: drawn with the weights {probe.version!r}; this run has sent {tag!r}"])
        except ServerError as error:
            failed.append([number, error.reason])
    everyone = all_gather_json([probes, failed])
    for number, why in (pair for _, part in everyone for pair in part):
        fleet.mark_failed(fleet.servers[number], why)
    return [Probe(**fields) for part, _ in everyone for fields in part]


def probe_gap(probes: Sequence[Probe], trainer: Sequence[Sequence[float]]) -> float:
    """Largest difference of log-probs of the probes' tokens between servers and trainer."""
    pairs = ((p.logprobs, ours) for p, ours in zip(probes, trainer, strict=True))
    return max(abs(a - b) for theirs, ours in pairs for a, b in zip(theirs, ours, strict=True))
