"""Decoding with multi-head latent attention against its training form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.models.layers.mesh import Mesh
from megarl.models.layers.mla.decoding import LatentCache, LatentDecoder
from megarl.models.layers.mla.plain import MLA
from megarl.models.layers.passes import Caches, DecodeStep, Extension, Pass, Prompts, Room, RopeTables
from megarl.models.packing import pack_stream
from megarl.rollout.embedded.model import Recipe
from tests.dist import fresh_parallel, single_process
from tests.models.mla import YARN, latent_module

LENGTHS = [7, 12, 5]


class Decoder:
    """One layer's decode form, its cache, and what the training form computes for the same tokens."""

    def __init__(self, fixed: bool, **changes: Any) -> None:
        self.module, self.rotary = latent_module("deepseek_v3", changes)
        self.mixer: MLA = self.module.mixer
        self.decoder = LatentDecoder(self.module, self.mixer, 0, Mesh(), Recipe(torch.float32), None)
        room = Room(6, 40, 1, torch.float32, torch.device("cpu"), fixed)
        self.cache = LatentCache(self.mixer, 1, room)
        self.caches = Caches({MLA.kind: self.cache}, room)
        generator = torch.Generator().manual_seed(3)
        self.hidden = [torch.randn(n, self.module.config.hidden_size, generator=generator) for n in LENGTHS]

    @torch.inference_mode()
    def run(self, step: Pass, tokens: list[torch.Tensor], positions: list[int]) -> torch.Tensor:
        step.rope = RopeTables(*self.tables(torch.tensor(positions)))
        return self.decoder(torch.cat(tokens), step)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.rotary(torch.zeros(1), positions[None])
        half = cos.shape[-1] // 2
        return cos[0, :, :half], sin[0, :, :half]

    @torch.no_grad()
    def expected(self) -> list[torch.Tensor]:
        stream = pack_stream(LENGTHS)
        stream.params.cache["rope"] = self.tables(stream.position_ids[0])
        out = self.module(torch.cat(self.hidden)[:, None], packed_seq_params=stream.params)[0][:, 0]
        return list(out.split(LENGTHS))

    def prompts(self, lengths: list[int], rows: list[list[int]]) -> list[torch.Tensor]:
        tokens = [x[:n] for x, n in zip(self.hidden, lengths, strict=True)]
        positions = [at for n in lengths for at in range(n)]
        return list(self.run(Prompts(self.caches, lengths, rows), tokens, positions).split(lengths))

    def step(self, samples: list[int], positions: list[int]) -> torch.Tensor:
        tokens = [self.hidden[sample][at : at + 1] for sample, at in zip(samples, positions, strict=True)]
        length = max(positions) + 1 if self.cache.fixed else self.cache.length
        return self.run(DecodeStep(self.caches, torch.tensor(positions), length), tokens, positions)

    def extend(self, lengths: list[int], starts: list[int], rows: list[int]) -> list[torch.Tensor]:
        spans = list(zip(self.hidden, starts, lengths, strict=False))
        positions = [at for _, start, n in spans for at in range(start, start + n)]
        tokens = [x[start : start + n] for x, start, n in spans]
        return list(self.run(Extension(self.caches, lengths, starts, rows), tokens, positions).split(lengths))


@pytest.fixture(scope="module", autouse=True)
def _process():
    single_process()
    fresh_parallel()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("fixed", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "v_head_dim": 24, "rope_parameters": YARN}])
def test_prompts_steps_and_extensions_equal_training(changes, fixed):
    decoder = Decoder(fixed, **changes)
    expected = decoder.expected()
    decoder.caches.reserve(0, 12)
    for out, wanted in zip(decoder.prompts([4, 6, 3], [[0], [1, 3], [2]]), expected, strict=True):
        close(out, wanted[: len(out)])
    for ahead in range(2):  # rows 1 and 3 hold the same prompt
        out = decoder.step([0, 1, 2, 1], [4 + ahead, 6 + ahead, 3 + ahead, 6 + ahead])
        for row, sample, at in ((0, 0, 4), (1, 1, 6), (2, 2, 3), (3, 1, 6)):
            close(out[row], expected[sample][at + ahead])
    for out, wanted, start in zip(decoder.extend([1, 4], [6, 8], [0, 3]), expected, [6, 8], strict=False):
        close(out, wanted[start : start + len(out)])


def test_the_cache_keeps_rows_when_it_grows_and_when_rows_are_copied():
    decoder = Decoder(False)
    expected = decoder.expected()
    decoder.caches.reserve(0, 4)
    decoder.prompts([4, 6, 3], [[0], [1], [2]])
    decoder.cache.reserve(3, 33)
    decoder.cache.copy_rows(torch.tensor([1]), torch.tensor([0]))
    close(decoder.step([1, 1], [6, 6])[0], expected[1][6])
    assert decoder.cache.length == 40
    assert LatentCache.bytes_per_row(decoder.mixer, 3, 40, 1, torch.bfloat16) == (3 + 1) * 40 * (16 + 8) * 2


def test_an_empty_row_begins_at_its_first_token():
    decoder = Decoder(True)
    expected = decoder.expected()
    decoder.prompts([4, 6, 3], [[0], [1], [2]])
    decoder.cache.clear(torch.tensor([0]))
    close(decoder.step([2], [0])[0], expected[2][0])
