"""One call of `generate` on one process: the loop that prefills, decodes, samples and retires samples.

State is in device tensors indexed by cache row, results in tensors indexed by sample, so that a decode step is a fixed
sequence of device operations without a host read; on a GPU the host reads the finished flags every 8 steps.
With experts the host may still wait in every step, see `MoE.waits`.

A prompt is prefilled up to, not including, its last token. That token enters the first decode step of each of its
samples, so only decode steps compute logits, and a sample can copy any row that holds the same prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megarl.config.rollout import SamplingConfig
from megarl.data.kept_tokens import KeptTokens
from megarl.data.routes import RouteForm
from megarl.models.layers.kinds import allocate, bytes_per_row
from megarl.models.layers.passes import DecodeStep, Prompts, Room
from megarl.models.vlm.model import next_position, positions_of
from megarl.rollout.embedded.graphs import DecodeGraphs, cache_length, length_bucket, row_bucket, slots_below
from megarl.rollout.embedded.kept import KeptRecord
from megarl.rollout.embedded.memory import free_bytes
from megarl.rollout.embedded.model import DecoderStage
from megarl.rollout.embedded.routes import RouteRecord
from megarl.rollout.embedded.sampler import Sampler
from megarl.rollout.embedded.scheduler import Prefill, Scheduler
from megarl.rollout.embedded.texts import RunningTexts, Sampled
from megarl.rollout.engine import Completion, Request
from megarl.rollout.stop_strings import StopStrings
from megarl.system.errors import MegarlError
from megarl.system.tracing import beat

if TYPE_CHECKING:
    from megarl.data.image_set import ImageSet
    from megarl.models.vlm.model import Images

_CHECK_EVERY_GPU = 8


@dataclass(frozen=True)
class SessionLimits:
    """The limits of one generation session.

    Attributes:
        max_running: maximum number of samples decoded together.
        max_prefill_tokens: maximum number of prompt tokens in a prefill pass.
        graphs: whether to capture decode steps as CUDA graphs.
        sessions: number of sessions that share this process's memory.
        routes: form of the routes to record (`rollout.replay_routes`); None: none are recorded.
        kept_tokens: whether to record the kept tokens of each sampled token (`rollout.replay_kept_tokens`).
    """

    max_running: int
    max_prefill_tokens: int
    graphs: bool
    sessions: int
    routes: RouteForm | None = None
    kept_tokens: bool = False


class _State:
    """The state of each cache row, [slots]: the number of its sample, the next input token and its position, the count
    of sampled tokens, and whether the sample is finished."""

    def __init__(self, slots: int, idle: int, device: torch.device) -> None:
        self.numbers = torch.zeros(4, slots, dtype=torch.int64, device=device)
        self.numbers[0] = idle
        self.sample, self.token, self.position, self.count = self.numbers
        self.done = torch.zeros(slots, dtype=torch.bool, device=device)


class Session:
    """Generates all samples of `requests`; every process of a replica runs a session with the same arguments."""

    def __init__(
        self,
        stage: DecoderStage,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        limits: SessionLimits,
        advance: Callable[[int], None],
        strings: StopStrings | None = None,
    ) -> None:
        self._advance, self._requests = advance, requests
        self._texts = None if strings is None else RunningTexts(strings)
        seeds = [seed for request in requests for seed in request.seeds]
        prompt = max((len(r.prompt_ids) for r in requests), default=1)
        slots = self._allocate(stage, sampling, stop_ids, limits, seeds, prompt - 1 + sampling.max_new_tokens)
        self._scheduler = Scheduler(requests, slots, limits.max_prefill_tokens, copies=not stage.keeps_state)
        self._pending: deque[Prefill] = deque()
        self._room = _room(requests, sampling.max_new_tokens, stage.device)
        samples = (request for request in requests for _ in request.seeds)
        for number, request in enumerate(samples):
            self._place_images(number, len(request.prompt_ids), request.images)
            self._begin_text(number, request.prompt_ids, request.begun)

    def _allocate(
        self,
        stage: DecoderStage,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        limits: SessionLimits,
        seeds: list[int],
        longest: int,
    ) -> int:
        """Allocate cache, state and results for samples with `seeds` and up to `longest` cached positions; return the
        number of cache rows."""
        self._stage, self._mesh, self._sampling = stage, stage.mesh, sampling
        device = stage.device
        fixed = device.type == "cuda"
        self._check_every = _CHECK_EVERY_GPU if fixed else 1
        self._width = sampling.max_new_tokens + self._check_every
        longest += self._check_every
        wanted = min(limits.max_running, len(seeds))
        if fixed:
            longest, wanted = cache_length(longest), row_bucket(wanted, limits.max_running) if wanted else 0
        most = sampling.top_k if limits.kept_tokens else 0
        slots = self._slots(wanted, longest, limits.sessions, KeptRecord.bytes_per_row(self._width, most))
        room = Room(slots, longest, self._mesh.tp.size, stage.dtype, device, fixed)
        self._caches = allocate(stage.mixers, room)
        self._routes, self._routes_of = None, dict[int, Tensor]()
        if limits.routes is not None:
            self._routes = RouteRecord(limits.routes, stage.expert_layers, self._mesh.pp, room)
            self._caches.add("routes", self._routes)
        self._kept, self._kept_of = None, dict[int, KeptTokens]()
        if limits.kept_tokens:
            self._kept = KeptRecord(slots, self._width, most, self._mesh, device)
            self._caches.add("kept", self._kept)
        # One extra sample, to which the padded rows of a captured graph write.
        self._state = _State(slots, idle=len(seeds), device=device)
        self._idle = torch.tensor([[len(seeds)], [0], [0], [0]], device=device)
        self._seeds = torch.tensor([*seeds, 0], dtype=torch.int64, device=device)
        # How far images shift the position of each sample's next token. Zeros for text, and not None: a CUDA graph of
        # the decode step that was captured without shifts would be replayed for samples with images.
        self._shifts = None if stage.encoder is None else torch.zeros_like(self._seeds)
        self._tokens = torch.zeros(len(seeds) + 1, self._width, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(len(seeds) + 1, self._width, dtype=torch.float32, device=device)
        self._stops = torch.tensor(sorted(set(stop_ids)), dtype=torch.int64, device=device)
        self._sampler = Sampler(
            sampling,
            list(stop_ids),
            vocab_start=self._mesh.tp.rank * stage.shard,
            vocab_size=stage.vocab_size,
            shard=stage.shard,
            tp=self._mesh.tp,
            device=device,
        )
        self._reach = 0  # the largest position that the next decode step writes
        graphs = fixed and limits.graphs and stage.can_be_captured
        self._graphs = DecodeGraphs(self._state.numbers, self._state.done) if graphs else None
        return slots

    def _place_images(self, sample: int, tokens: int, images: ImageSet | None) -> None:
        """Store how far a sample's rotary positions are shifted after `tokens` tokens with `images`."""
        if self._shifts is not None:
            self._shifts[sample] = 0 if images is None else next_position(tokens, images.places) - tokens

    def _begin_text(self, sample: int, tokens: list[int], begun: int) -> None:
        """Begin the text of a sample's turn, which includes the last `begun` of `tokens`, for stop strings."""
        if self._texts is not None:
            self._texts.begin(sample, tokens[len(tokens) - begun :])

    def _read_texts(self, rows: int) -> None:
        """Mark every running row whose text contains a stop string as done."""
        if self._texts is not None:
            sample, _, _, count = self._state.numbers[:, :rows]
            self._state.done[self._texts.ended(sample, count, self._tokens)] = True

    def _slots(self, wanted: int, length: int, sessions: int, extra: int) -> int:
        """Return the number of cache rows, with `extra` bytes each, that fit into memory, equal on all ranks of the
        replica."""
        if wanted == 0:
            return 0
        row = bytes_per_row(self._stage.mixers, length, self._mesh.tp.size, self._stage.dtype) + extra
        device = self._stage.device
        fit = min(wanted, int(free_bytes(device, sessions) // row))
        fit = -self._mesh.pp.all_max(self._mesh.tp.all_max(-fit, device), device)
        if fit < 1:
            raise MegarlError(
                f"the key/value cache of one sequence of {length} tokens does not fit into memory: it needs "
                f"{row / 1e9:.2f} GB; lower data.max_prompt_tokens, or max_new_tokens in rollout.sampling and in "
                "validation.sampling, or raise tp or pp in rollout.parallel, or else in actor.parallel"
            )
        return slots_below(fit) if fit < wanted and device.type == "cuda" else fit

    def completions(self, version: int) -> list[Completion]:
        """Call `run`; return its samples, of weights `version`, with the experts that routers chose and the tokens that
        sampling kept if these are recorded."""
        prompts = [len(request.prompt_ids) for request in self._requests for _ in request.seeds]
        return [
            self.completion(number, sample, prompt, version)
            for number, (sample, prompt) in enumerate(zip(self.run(), prompts, strict=True))
        ]

    def completion(self, number: int, sample: Sampled, prompt: int, version: int) -> Completion:
        """Return a finished sample, with routes and kept tokens if recorded; `prompt`: number of tokens before it."""
        tokens, logprobs, reason = sample
        routes = None if self._routes is None else self._routes_of[number][: prompt + len(tokens) - 1]
        record = self._kept_of.pop(number).first(len(tokens)) if number in self._kept_of else None
        return Completion(tokens, logprobs, reason, [[version, len(tokens)]], routes=routes, kept_tokens=record)

    @torch.inference_mode()
    def run(self) -> list[Sampled]:
        """Return the tokens, log-probs and finish reason of every sample, in the order of requests and seeds."""
        steps = 0
        while True:
            beat()
            if not self._pending:
                self._admit()
            batch = self._pending.popleft() if self._pending else None
            rows = len(self._scheduler.running)
            work = sum(len(self._requests[r].prompt_ids) - 1 for r in batch.requests) if batch else self._padded(rows)
            lockstep = self._mesh.expert.all_max(work, self._stage.device) if self._stage.is_moe else work
            if lockstep == 0:
                room = torch.tensor(self._sampling.max_new_tokens) if self._room is None else self._room[:-1].cpu()
                logprobs = self._mesh.from_last_stage(self._logprobs)[:-1]
                return self._cut(range(len(self._tokens) - 1), self._tokens[:-1], logprobs, room)
            if batch:  # prefill all tokens of each prompt but the last
                prompts = [self._requests[r] for r in batch.requests]
                self._read([(prompt.prompt_ids[:-1], prompt.images) for prompt in prompts], batch.rows, lockstep)
            elif rows == 0:  # a pass without tokens, so that other ranks can use this rank's experts
                nothing = torch.zeros(0, dtype=torch.int64, device=self._stage.device)
                step = DecodeStep(self._caches, nothing, 0)
                self._stage.forward(nothing, nothing, step, want_logits=False, lockstep=lockstep)
            else:
                self._decode(rows, lockstep)
                steps += 1
                if steps % self._check_every == 0:
                    self._retire(rows)

    def _admit(self) -> None:
        """Move waiting samples into free rows of the decoding batch."""
        first = len(self._scheduler.running)
        admission = self._scheduler.admit()
        if admission is None:
            return
        samples, device = admission.samples, self._stage.device
        state = [
            [s.id for s in samples],
            [self._requests[s.request].prompt_ids[-1] for s in samples],
            [s.prompt_tokens - 1 for s in samples],
            [0] * len(samples),
        ]
        rows = slice(first, first + len(samples))
        self._state.numbers[:, rows] = torch.tensor(state, device=device)
        self._state.done[rows] = False
        self._reach = max(self._reach, *state[2])
        self._caches.reserve(first, self._reach + 1)
        if blank := [first + i for i, s in enumerate(samples) if s.prompt_tokens == 1]:
            self._caches.clear(torch.tensor(blank, device=device))
        if admission.copies:
            sources, targets = torch.tensor(admission.copies, device=device).unbind(1)
            self._caches.copy_rows(sources, targets)
        self._pending.extend(admission.prefills)

    def _read(
        self, prompts: Sequence[tuple[list[int], ImageSet | None]], rows: Sequence[Sequence[int]], lockstep: int
    ) -> None:
        """Prefill distinct prompts in one pass, and write the keys and values of a prompt into the cache rows of all
        its samples."""
        lengths = [len(tokens) for tokens, _ in prompts]
        device = self._stage.device
        tokens = torch.tensor([token for prompt, _ in prompts for token in prompt])
        images, positions = None, torch.cat([torch.arange(n) for n in lengths])
        if any(sets is not None for _, sets in prompts):
            images, positions = seen([(range(len(tokens)), sets) for tokens, sets in prompts], self._stage)
        step = Prompts(self._caches, lengths, rows, routes=self._new_routes())
        self._stage.forward(
            tokens.to(device),
            positions.to(device),
            step,
            want_logits=False,
            lockstep=lockstep,
            images=images,
        )
        if self._routes is not None and step.routes:
            self._routes.fill(lengths, rows, step.routes)

    def _new_routes(self) -> list[Tensor] | None:
        return None if self._routes is None else []

    def _padded(self, rows: int) -> int:
        """Return the number of rows that a decode step of `rows` samples computes, padding included."""
        return row_bucket(rows, self._caches.slots) if rows and self._caches.fixed else rows

    def _decode(self, rows: int, lockstep: int) -> None:
        self._caches.reserve(*self._extent(rows))
        length, padded = self._caches.length, self._padded(rows)
        if self._caches.fixed:
            # torch's attention reads all rows up to one length; kernels read each row up to its own length
            if self._stage.kernels is None:
                length = length_bucket(self._reach + 1, length)
            self._state.numbers[:, rows:padded] = self._idle
        if self._graphs is not None:
            self._graphs.run(self._step, padded, length)
        else:
            self._step(padded, length, lockstep)
        self._reach += 1

    def _extent(self, rows: int) -> tuple[int, int]:
        """Return the numbers of rows and positions that the cache needs for a decode step of `rows` samples."""
        return rows, self._reach + 1

    def _step(self, rows: int, length: int, lockstep: int) -> None:
        """Decode one token in each of the first `rows` rows.

        CUDA graphs capture this method, so the host must not wait for the device.
        """
        sample, token, position, count = self._state.numbers[:, :rows]
        done = self._state.done[:rows]
        # A token that is read changes the row's state, so rows that have ended, and padding, read no token.
        live = ~done & (sample < len(self._tokens) - 1) if self._stage.keeps_state else None
        turned = position if self._shifts is None else position + self._shifts[sample]
        step = DecodeStep(self._caches, position, length, live, routes=self._new_routes())
        logits = self._stage.forward(token, turned, step, want_logits=True, lockstep=lockstep)
        if self._routes is not None and step.routes:
            self._routes.append(position, torch.cat(step.routes, 1))
        if logits is not None:
            if self._kept is None:
                sampled, logprobs = self._sampler(logits, self._seeds[sample], count)
            else:
                sampled, logprobs, record = self._sampler.sample_kept(logits, self._seeds[sample], count)
                self._kept.append(count, record)
            self._logprobs[sample, count] = logprobs
        else:
            sampled = torch.empty_like(token)
        sampled = self._mesh.from_last_stage(sampled)
        self._tokens[sample, count] = sampled
        token.copy_(sampled)
        position += 1 if live is None else live
        count += 1 if live is None else live
        done |= count >= (self._sampling.max_new_tokens if self._room is None else self._room[sample])
        if len(self._stops):
            done |= (sampled[:, None] == self._stops).any(1)  # torch.isin may sort, and wait for the device

    def _retire(self, rows: int) -> None:
        """Free the cache rows of finished samples, and move samples that still run into them, so that the running
        samples have the first rows."""
        self._read_texts(rows)
        finished = [row for row, done in enumerate(self._state.done[:rows].tolist()) if done]
        if not finished:
            return
        self._advance(len(finished))
        if self._routes is not None:
            sample, _, position, _ = self._state.numbers[:, finished].tolist()
            self._routes_of |= zip(sample, self._routes.read(finished, position), strict=True)
        self.read_kept(finished)
        self._move(self._scheduler.finish(finished), len(self._scheduler.running))

    def read_kept(self, rows: list[int]) -> None:
        """If the run records which tokens the sampling filters kept (`rollout.replay_kept_tokens`), read this record
        for the finished cache `rows`."""
        if self._kept is not None:
            sample, _, _, count = self._state.numbers[:, rows].tolist()
            self._kept_of |= zip(sample, self._kept.read(rows, count), strict=True)

    def _move(self, moves: Sequence[tuple[int, int]], running: int | None = None) -> None:
        """Copy (source, target) rows, all at once; `running`: number of rows that still run, if some have finished."""
        state = self._state
        if moves:
            sources, targets = torch.tensor(moves, device=self._stage.device).unbind(1)
            self._caches.copy_rows(sources, targets)
            state.numbers[:, targets] = state.numbers[:, sources]
            state.done[targets] = state.done[sources]
        if running is not None:
            self._reach = int(state.position[:running].max()) if running else 0

    def _cut(self, samples: Sequence[int], tokens: Tensor, logprobs: Tensor, room: Tensor) -> list[Sampled]:
        """Return finished samples, cut at the first end token or stop string, or at their `room`.

        Rows decode on until the next check, so they have more tokens.

        Args:
            samples: sample number of each row.
            tokens, logprobs: [n, tokens].
            room: maximum number of tokens of each row, int64 [n] or a scalar, on the CPU.
        """
        most = self._sampling.max_new_tokens
        tokens, logprobs = tokens[:, :most].cpu(), logprobs[:, :most].cpu()
        stop = torch.isin(tokens, self._stops.cpu()) & (torch.arange(most) < room[..., None])
        ended = stop.any(1)
        lengths = torch.where(ended, stop.int().argmax(1) + 1, room).tolist()
        sampled: list[Sampled] = [
            (tokens[i, :n].tolist(), logprobs[i, :n].tolist(), "stop" if ended[i] else "length")
            for i, n in enumerate(lengths)
        ]
        if self._texts is None:
            return sampled
        return [self._texts.cut(number, sample) for number, sample in zip(samples, sampled, strict=True)]


def seen(parts: Sequence[tuple[range, ImageSet | None]], stage: DecoderStage) -> tuple[Images | None, Tensor]:
    """Return the images in packed parts of sequences, and the rotary positions [3, n] of their n tokens.

    Args:
        parts: the range of each part in its sequence, and all images of the sequence.
        stage: must have a vision encoder.
    """
    from megarl.models.vlm.model import gather_images

    encoder = stage.encoder
    assert encoder is not None, "the model has a vision encoder"
    positions = [
        positions_of(part.stop, [place for place in (() if images is None else images.places) if place[0] < part.stop])[
            :, part.start :
        ]
        for part, images in parts
    ]
    sets = [None if images is None else images.between(part.start, part.stop) for part, images in parts]
    gathered = gather_images([len(part) for part, _ in parts], sets, encoder)
    return None if gathered is None else gathered.to(stage.device), torch.from_numpy(np.concatenate(positions, 1))


def _room(requests: Sequence[Request], most: int, device: torch.device) -> Tensor | None:
    """Return the token limit of each sample, and last that of unused rows, int64 [samples + 1]; None if every limit is
    `most`."""
    if all(request.room is None or request.room >= most for request in requests):
        return None
    room = [min(most, request.room or most) for request in requests for _ in request.seeds]
    return torch.tensor([*room, most], dtype=torch.int64, device=device)
