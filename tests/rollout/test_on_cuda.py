"""Embedded generation on a pretended GPU: no step waits, shapes are few, graphs change nothing, memory comes back."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from tests.data.templates import tokenizer_of
from tests.dist import run_distributed, run_pretending
from tests.rollout.cases import STOP, build, engine, logprobs, make_requests, sampled, tokens

SETTINGS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8},
    "filtered": {"top_k": 20, "top_p": 0.9, "min_new_tokens": 3},
    "greedy": {"temperature": 0.0},
    "to the limit": {"ignore_eos": True},
    # More tokens than steps between two looks at what has ended: rows are closed up while others go on.
    "many ends": {"stop_token_ids": tuple(range(30, 70)), "max_new_tokens": 10},
    # Of one token and of two: rows run on until such a look.
    "stop strings": {"stop": [*"!#+7Jl", "A)", "%&"], "max_new_tokens": 12},
}
CASES = [("qwen3", name) for name in SETTINGS] + [("mistral", "sampled"), ("qwen3_moe", "sampled")]
ONE_LAYER, TWO_LAYERS = {"num_hidden_layers": 1}, {"num_hidden_layers": 2}


def generate(chunks, settings: dict, dtype: str = "model", **config: Any) -> list:
    limits = {"max_running": 7, **config}
    sampling = sampled(**{"max_new_tokens": 6, **settings})
    tokenizer = tokenizer_of("bytes") if sampling.stop else None
    return engine(chunks, tokenizer, dtype=dtype, **limits).generate(make_requests(4), sampling, STOP)


def plain() -> list:
    """Tokens of every case as a CPU draws them."""
    from tests.dist import fresh_parallel

    fresh_parallel()
    models = {kind: build(kind, hf=TWO_LAYERS) for kind in dict(CASES)}
    return [tokens(generate(models[kind], SETTINGS[name])) for kind, name in CASES]


class Watch:
    """Waits inside decode steps, and shapes and strides that masked attention meets."""

    def __init__(self) -> None:
        self.waits: dict[str, int] = {}
        self.shapes: set[Any] = set()
        self.logits: set[str] = set()

    def __enter__(self) -> Watch:
        from megarl.models.layers.attention import decoding as attention
        from megarl.rollout.embedded import sampler, session
        from tests.pretend_cuda import SEEN

        step, sdpa = session.Session._step, attention.F.scaled_dot_product_attention

        def watched_step(*args: Any) -> None:
            before = SEEN.by_place()
            step(*args)
            self.waits |= {place: n for place, n in SEEN.by_place().items() if n > before.get(place, 0)}

        def watched_sdpa(q, k, v, attn_mask=None, **kwargs: Any):
            self.shapes.add(tuple((t.shape, t.stride()) for t in (q, k, v, attn_mask) if t is not None))
            return sdpa(q, k, v, attn_mask=attn_mask, **kwargs)

        draw = sampler.Sampler.__call__

        def watched_draw(sampler_, logits, *args: Any):
            self.logits.add(str(logits.dtype))
            return draw(sampler_, logits, *args)

        self._patches = [
            mock.patch.object(sampler.Sampler, "__call__", watched_draw),
            mock.patch.object(session.Session, "_step", watched_step),
            mock.patch.object(attention.F, "scaled_dot_product_attention", watched_sdpa),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def on_device() -> list[dict]:
    from tests.dist import fresh_parallel
    from tests.pretend_cuda import Pretend

    found = []
    with Pretend():
        fresh_parallel()
        models = {
            kind: (build(kind, hf=TWO_LAYERS), build(kind, hf=ONE_LAYER, dtype=torch.bfloat16)) for kind in dict(CASES)
        }
        for kind, name in CASES:
            exact, half = models[kind]
            with Watch() as watch:
                captured, *halves = (
                    generate(chunks, SETTINGS[name], cuda_graphs=graphs)
                    for chunks, graphs in ((exact, True), (half, False), (half, True))
                )
            found.append({"tokens": tokens(captured), "halves": list(map(logprobs, halves))})
            found[-1] |= {"waits": watch.waits, "logits": sorted(watch.logits)}
    return found


@pytest.fixture(scope="module")
def pretended() -> list[dict]:
    return run_pretending(on_device, 1, 300)[0]


@pytest.fixture(scope="module")
def expected() -> list:
    return run_distributed(plain, 1, 240)[0]


@pytest.mark.procs
@pytest.mark.parametrize("case", range(len(CASES)), ids=map(" ".join, CASES))
def test_tokens_are_those_of_a_cpu_and_no_step_waits(pretended, expected, case):
    found = pretended[case]
    assert found["waits"] == {}
    assert found["logits"] == ["torch.float32"]  # of bf16 weights, too
    assert found["tokens"] == expected[case]
    assert torch.equal(*found["halves"])  # bf16: a captured step does what a plain one does


def shapes() -> dict:
    """Shapes of a generation, and those that another of the same size adds."""
    from tests.dist import fresh_parallel
    from tests.pretend_cuda import Pretend

    found: dict = {}
    with Pretend():
        fresh_parallel()
        for graphs in (False, True):
            chunks = build("qwen3", hf=TWO_LAYERS, dtype=torch.bfloat16)
            with Watch() as watch:
                counts = []
                for seed, longest in ((0, 14), (1, 11), (2, 20)):
                    requests = make_requests(count=4, n=3, seed=seed, longest=longest)
                    limits = {"max_running": 8, "cuda_graphs": graphs}
                    engine(chunks, **limits).generate(requests, sampled(max_new_tokens=8, ignore_eos=True), STOP)
                    counts.append(len(watch.shapes))
            found[str(graphs)] = counts
    return found


@pytest.mark.procs
def test_a_second_generation_meets_no_new_shape_or_stride():
    (found,) = run_pretending(shapes, 1, 120)
    for case, counts in found.items():
        assert counts[0] == counts[1] == counts[2] <= 4, case  # 8 and 4 rows


def lifetimes() -> list[bool]:
    """Which sessions and caches are alive after their generation, without Python's search for cycles."""
    from megarl.rollout.embedded import engine as module
    from tests.dist import fresh_parallel
    from tests.pretend_cuda import Pretend

    made: list[weakref.ref] = []

    class Tracked(module.Session):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.extend([weakref.ref(self), weakref.ref(self._caches)])

    with Pretend(), mock.patch.object(module, "Session", Tracked):
        fresh_parallel()
        chunks = build("qwen3", hf=TWO_LAYERS, dtype=torch.bfloat16)
        gc.collect()
        gc.disable()
        for graphs in (False, True):
            generate(chunks, {}, cuda_graphs=graphs)
    return [ref() is not None for ref in made]


@pytest.mark.procs
def test_the_cache_is_given_back_when_generation_ends():
    (alive,) = run_pretending(lifetimes, 1, 120)
    assert alive == [False] * 4


def streams() -> dict[str, int]:
    """Streams made in two generations, those that captures ran on, and captures."""
    from tests import pretend_cuda, pretend_torch_cuda
    from tests.dist import fresh_parallel

    made: list[Any] = []
    used: list[Any] = []

    class Stream(pretend_torch_cuda.Stream):
        def __init__(self, *given: object) -> None:
            made.append(self)

    class Capture(pretend_cuda.Capture):
        def __init__(self, graph: Any, pool: object = None, stream: object = None) -> None:
            super().__init__(graph, pool, stream)
            used.append(stream)

    with pretend_cuda.Pretend(), mock.patch.multiple(torch.cuda, Stream=Stream, graph=Capture):
        fresh_parallel()
        chunks = build("qwen3", hf=TWO_LAYERS, dtype=torch.bfloat16)
        for _ in range(2):
            generate(chunks, {}, cuda_graphs=True)
    return {"made": len(made), "used": len(set(map(id, used))), "captures": len(used), "same": used[0] is made[0]}


@pytest.mark.procs
def test_all_captures_and_their_warm_ups_share_a_stream():
    (found,) = run_pretending(streams, 1, 120)
    assert found.pop("captures") >= 2
    assert found == {"made": 1, "used": 1, "same": True}


def tensor_parallel(pretend: bool) -> dict:
    import contextlib

    from tests.dist import fresh_parallel

    if pretend:
        from tests.pretend_cuda import Pretend
    found = {}
    with Pretend() if pretend else contextlib.nullcontext():
        for kind, name in (("qwen3", "filtered"), ("qwen3_moe", "sampled")):
            fresh_parallel(tp=2)
            found[kind] = tokens(generate(build(kind, hf=TWO_LAYERS, tp=2), SETTINGS[name]))
    return found


@pytest.mark.procs
def test_two_tensor_parallel_ranks_draw_what_they_draw_on_a_cpu():
    expected = run_distributed(tensor_parallel, 2, 240, False)
    assert run_pretending(tensor_parallel, 2, 240, True) == expected
