"""The attention kernels against a loop in float64."""

import importlib
import sys
import types
from collections.abc import Sequence

import pytest
import torch

from megarl.models.layers.attention import capped
from megarl.models.layers.attention import cpu as attention_cpu
from megarl.models.layers.attention import training as attention
from megarl.models.layers.attention.cpu import causal_attention, runs
from megarl.models.layers.attention.scores import Scores
from megarl.models.layers.attention.training import bucket_attention, group_by_length
from megarl.models.packing import cp_split, pack_stream
from tests.models import varlen

CASES = {
    "mixed": [5, 5, 1, 130, 64, 64, 64, 17],
    "one": [1],
    "equal": [33, 33, 33],
    "long": [300, 200],
    "near": [20, 18, 3, 19],
}


def tensors(total: int, heads: int, groups: int, dtype: torch.dtype, values: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, 16), (groups, 16), (groups, values)
    made = [torch.randn(total, *shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in made]


def oracle(
    q,
    k,
    v,
    lengths: list[int],
    scale: float,
    window: int | None = None,
    open_from: Sequence[int] = (),
    sinks=None,
    cap: float | None = None,
) -> torch.Tensor:
    """Per sequence, head and query: softmax over the keys it sees, and over the sink of the head."""
    per, out, start = q.shape[1] // k.shape[1], [], 0
    for number, length in enumerate(lengths):
        span = slice(start, start + length)
        keys, values = (x[span].double().repeat_interleave(per, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[span].double(), keys) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        place = torch.arange(length)
        hidden = place[None, :] > place[:, None]
        if window is not None:
            hidden |= place[None, :] <= place[:, None] - window
        if open_from:
            hidden &= place[:, None] < open_from[number]
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, length, 1)), -1)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], values))
        start += length
    return torch.cat(out)


def check(
    fn,
    lengths: list[int],
    heads: int,
    groups: int,
    dtype: torch.dtype,
    window: int | None,
    atol: float,
    open_from: Sequence[int] = (),
    values: int = 16,
    *,
    sinks: bool = False,
    cap: float | None = None,
) -> None:
    inputs = tensors(sum(lengths), heads, groups, dtype, values)
    if sinks:
        inputs.append(torch.linspace(-1, 3, heads, dtype=dtype).requires_grad_())
    expected = oracle(*inputs[:3], lengths, 0.25, window, open_from, *inputs[3:], cap=cap)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    found = fn(*inputs)
    torch.testing.assert_close(found.double(), expected, atol=atol, rtol=0)
    for ours, theirs in zip(torch.autograd.grad(found, inputs, upstream.to(dtype)), wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=4 * atol, rtol=4 * atol)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
@pytest.mark.parametrize("compiled", [True, False])
def test_cpu_attention_equals_the_loop(lengths, heads, groups, dtype, atol, compiled, monkeypatch):
    monkeypatch.setattr(attention_cpu, "COMPILED", 1 << 30 if compiled else 0)  # whatever the length
    check(lambda q, k, v: causal_attention(q, k, v, tuple(lengths), 0.25), lengths, heads, groups, dtype, None, atol)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (7, 0.5), (64, None), (None, 0.5)])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_buckets_equal_the_loop(lengths, window, cap, monkeypatch):
    monkeypatch.setattr(capped, "_ON_CPU", 5000)  # several blocks of queries
    packed = pack_stream(lengths).params
    buckets = lambda q, k, v: bucket_attention(q, k, v, packed, Scores(0.25, cap=cap), window)  # noqa: E731
    check(buckets, lengths, 4, 2, torch.float64, window, 1e-12, cap=cap)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_a_kernel_and_the_chunks_of_context_parallel_ranks_equal_the_loop(lengths, cp, window, monkeypatch):
    """Each rank has two chunks of every sequence, and the keys of all ranks one after the other."""
    monkeypatch.setattr(attention, "varlen_kernel", lambda q: varlen.kernel)
    padded = list(pack_stream(lengths, cp_size=cp).params.lengths)
    held = [torch.arange(sum(padded)) if cp == 1 else cp_split(padded, cp, rank) for rank in range(cp)]

    def all_ranks(q, k, v):
        keys, values = (torch.cat([x[mine] for mine in held]) for x in (k, v))
        whole = torch.empty_like(q)
        for rank, mine in enumerate(held):
            packed = pack_stream(lengths, cp_size=cp, cp_rank=rank).params
            whole = whole.index_copy(0, mine, attention.attend(q[mine], keys, values, packed, Scores(0.25), window))
        return whole

    check(all_ranks, padded, 4, 2, torch.float64, window, 1e-12)


SINKS = {
    "compiled": (torch.float32, 1e-5, None, 1),
    "compiled, bf16": (torch.bfloat16, 0.03, None, 1),
    "products": (torch.float64, 1e-12, None, 1),
    "buckets": (torch.float64, 1e-12, 7, 1),
    "buckets of ranks": (torch.float64, 1e-12, None, 2),
    "kernel": (torch.float64, 1e-12, 7, 1),
    "kernel of ranks": (torch.float64, 1e-12, None, 2),
}


@pytest.mark.parametrize("path", SINKS)
def test_sinks_are_further_scores_without_values_in_every_path(path, monkeypatch):
    dtype, atol, window, cp = SINKS[path]
    if "kernel" in path:
        monkeypatch.setattr(attention, "varlen_kernel", lambda q: varlen.kernel)
        monkeypatch.setattr(attention, "TorchVarlen", varlen.Kernel)
    lengths = CASES["near"] if "compiled" in path else CASES["mixed"]
    padded = list(pack_stream(lengths, cp_size=cp).params.lengths)
    held = [torch.arange(sum(padded)) if cp == 1 else cp_split(padded, cp, rank) for rank in range(cp)]

    def all_ranks(q, k, v, sinks):
        keys, values = (torch.cat([x[mine] for mine in held]) for x in (k, v))
        whole = torch.empty_like(q)
        for rank, mine in enumerate(held):
            packed = pack_stream(lengths, cp_size=cp, cp_rank=rank).params
            whole = whole.index_copy(
                0, mine, attention.attend(q[mine], keys, values, packed, Scores(0.25, sinks), window)
            )
        return whole

    check(all_ranks, padded, 4, 2, dtype, window, atol, sinks=True)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("values", [8, 24])
@pytest.mark.parametrize(
    ("lengths", "window", "open_from"), [([5, 5, 130], None, ()), ([9, 4], 3, ()), ([9], None, [4])]
)
def test_values_may_have_another_width_than_keys(lengths, window, open_from, values, kernel, monkeypatch):
    """The kernels do not see this: they get heads of one width."""

    def narrow(q, k, v, *rest):
        assert q.shape[2] == k.shape[2] == v.shape[2]
        return varlen.kernel(q, k, v, *rest)

    if kernel:
        monkeypatch.setattr(attention, "varlen_kernel", lambda q: narrow)
    packed = pack_stream(lengths, open_from=open_from).params

    def fn(q, k, v):
        return attention.attend(q, k, v, packed, Scores(0.25), window)

    check(fn, lengths, 4, 2, torch.float64, window, 1e-12, open_from, values)


def test_context_parallel_ranks_do_the_same_work_and_half_of_the_pairs():
    """The keys before a chunk, and the causal half of the chunk itself: a rank's two calls have as many on each."""
    pairs = []
    for rank in range(4):
        calls = attention.plan_varlen(pack_stream([800], cp_size=4, cp_rank=rank).params, torch.device("cpu")).calls
        pairs.append(
            sum(c.longest_q * (c.longest_k - c.longest_q) + c.longest_q * (c.longest_q + 1) // 2 for c in calls)
        )
    assert pairs == [800 * 801 // 2 // 4] * 4


#: From its beginning, its middle, its last token, and nowhere.
OPEN = {
    "all": lambda length, number: 0,
    "end": lambda length, number: length // 2,
    "some": lambda length, number: (0, length - 1, length, length // 3)[number % 4],
}


@pytest.mark.parametrize("open_from", OPEN.values(), ids=OPEN)
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_tokens_that_see_both_ways_equal_the_loop(lengths, open_from):
    places = [open_from(length, number) for number, length in enumerate(lengths)]
    packed = pack_stream(lengths, open_from=places).params
    both_ways = lambda q, k, v: attention.attend(q, k, v, packed, Scores(0.25), None)  # noqa: E731
    check(both_ways, lengths, 4, 2, torch.float64, None, 1e-12, places)


def test_sequences_of_one_length_that_see_all_need_no_mask():
    packed = pack_stream([8, 8], open_from=[0, 0]).params
    assert [bucket.mask(None) for bucket in attention.plan_buckets(packed, torch.device("cpu")).buckets] == [None]


def test_windows_and_tokens_that_see_both_ways_are_refused():
    packed = pack_stream([8], open_from=[2]).params
    with pytest.raises(ValueError, match="a sliding window \\(4 tokens\\)"):
        attention.attend(*tensors(8, 2, 2, torch.float32), packed, Scores(0.25), 4)


def test_groups_hold_every_sequence_once_and_similar_lengths():
    lengths = [3, 90, 100, 4, 97, 5, 5]
    groups = group_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(min(lengths[i] for i in g) >= 0.75 * max(lengths[i] for i in g) for g in groups)


def test_runs_cover_the_stream_in_order():
    lengths = [8, 8, 8, 3, 8, 500, 500]
    found = list(runs(lengths, heads=4))
    assert [n for _, count, n in found for _ in range(count)] == lengths
    ends = [start + count * n for start, count, n in found]
    assert [start for start, _, _ in found] == [0, *ends[:-1]]


@pytest.mark.parametrize("window", [None, 7])
def test_flash_attention_gets_the_cap(window, monkeypatch):
    def flash(q, k, v, *lengths, softmax_scale, causal, window_size, softcap):
        reach = None if window_size[0] < 0 else window_size[0] + 1
        return varlen.kernel(q, k, v, attention.VarlenCall(*lengths, causal=causal), softmax_scale, reach, softcap)

    monkeypatch.setattr(attention, "varlen_kernel", lambda q: varlen.kernel)  # cannot cap, as torch's
    monkeypatch.setattr(attention, "_flash_attention", lambda: flash)
    packed = pack_stream([9, 4, 20]).params
    own = lambda q, k, v: attention.attend(q, k, v, packed, Scores(0.25, cap=0.5), window)  # noqa: E731
    check(own, [9, 4, 20], 4, 2, torch.float64, window, 1e-12, cap=0.5)
    monkeypatch.setattr(
        attention, "_flash_attention", lambda: lambda q, k, v: q
    )  # an old version, without the argument
    check(own, [9, 4, 20], 4, 2, torch.float64, window, 1e-12, cap=0.5)


@pytest.mark.parametrize(
    ("text", "usable"), [("", False), ("raise ImportError", False), ("flash_attn_varlen_func = max", True)]
)
def test_flash_attention_is_what_imports(text, usable, tmp_path, monkeypatch):
    """flash-attn-4 has the same import name without the function; a build for another torch fails to load."""
    (tmp_path / "flash_attn.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert (attention._flash_attention.__wrapped__() is not None) == usable
    sys.modules.pop("flash_attn", None)


@pytest.mark.parametrize(
    ("modules", "major", "expected"),
    [
        ((), 9, None),
        (("FA3",), 9, "FA3"),
        (("FA3", "FA4"), 9, "FA3"),
        (("FA4",), 9, "FA4"),
        (("FA3", "FA4"), 10, "FA4"),
        (("FA3", "FA4"), 8, None),
    ],
)
def test_the_newest_flash_attention_that_fits_and_can_be_imported_is_activated(modules, major, expected, monkeypatch):
    active = []

    def activate(name: str) -> None:
        if name not in modules:
            raise ModuleNotFoundError(name)
        active.append(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    assert attention._newest_flash.__wrapped__() == expected
    assert active == ([expected] if expected else [])


def test_torch_gets_as_many_results_of_flash_attention_4_as_it_unpacks(monkeypatch):
    """flash-attn-4 4.0.0b36 returns five and three or four results."""
    interface = types.SimpleNamespace(_flash_attn_fwd=lambda q, **_: (q, 1, 2, 3, 4), _flash_attn_bwd=lambda *dq: dq)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.SimpleNamespace(interface=interface))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.nn.attention._fa4, "_fa4_register_kernels", lambda: None)
    assert attention._newest_flash.__wrapped__() == "FA4"
    kernels = importlib.import_module(torch.nn.attention._fa4._FA4_MODULE_PATH)
    assert kernels._flash_attn_fwd(0, causal=True) == (0, 1)
    assert kernels._flash_attn_bwd(1, 2, 3, 4) == (1, 2, 3)
    monkeypatch.delitem(sys.modules, kernels.__name__)
    monkeypatch.setattr(torch.nn.attention._fa4, "_FA4_MODULE_PATH", None)
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)
    torch.nn.attention._fa4._fa4_import_module.cache_clear()


def test_torch_has_the_names_of_the_newest_flash_attentions():
    assert {name for names in attention._NEWEST.values() for name in names} <= set(
        torch.nn.attention.list_flash_attention_impls()
    )
    with pytest.raises(ImportError):  # the way of a machine without the package, through torch's own code
        torch.nn.attention.activate_flash_attention_impl("FA3")
