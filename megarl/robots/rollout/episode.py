"""An episode of a robot, and its fields in a batch.

An episode is a sample of several turns, one per policy call; D numbers to an action, K actions to a call:

    response_ids     K * D tokens of call 0 | K * D of call 1 | ...
    response_mask    the tokens of executed actions: the first finish_step * D
    turn_starts, turn_ends                    first token of each call, and the token after its last
    frames/CAMERA    uint8 [calls, H, W, 3]   the policy's pictures before each call
    states           float32 [calls, S]
    end_frames/CAMERA, end_state              pictures and state after the last action
    clip/CAMERA      uint8 [n, H, W, 3]       frames from the simulator, evenly spaced, if clips are recorded
    task, trial, success, finish_step, max_steps, progress
    call_progress    float32 [calls], progress after each call

A policy of the family pi0 has S * K * D tokens per call, for each of S denoising steps those of K actions, and

    chain            float32 [calls, S + 1, K, D], the points of each call's denoising chain
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.data.batch import Jagged
from megarl.data.versions import version_values
from megarl.robots.config import CHAIN, CLIP, END_FRAMES, FRAMES
from megarl.robots.rollout.policy import Chunk
from megarl.robots.simulators.protocol import Observation, TaskSpec
from megarl.system.machine import find_malloc_trim

#: Bytes of freed pictures after which malloc returns memory to the system.
_TRIM_BYTES = 256 << 20


@dataclass
class Episode:
    """The observations and actions of an episode. All lists have one entry per policy call."""

    spec: TaskSpec
    trial: int
    seen: list[Observation] = field(default_factory=list)  # observations before the policy calls
    chunks: list[Chunk] = field(default_factory=list)  # the policy's output in each call
    executed: list[int] = field(default_factory=list)  # number of executed environment steps of each chunk
    # completed part of the task after each chunk, 0 to 1; NaN: the simulator does not measure it
    progresses: list[float] = field(default_factory=list)
    # the observation after the last action, zeros if the simulator failed; None: the episode is in flight
    end: Observation | None = None
    success: bool = False
    # completed part of the task at the episode's end, 0 to 1; NaN: the simulator does not measure it, or failed
    progress: float = math.nan
    failure: str = ""  # why the episode cannot be scored; empty: it can
    failure_kind: str = ""  # kind of that failure in one word; empty: the episode can be scored
    # the recorded clip: frames uint8 [n, H, W, 3] by camera, with n = 0 if the simulator failed; empty: no clip is
    # recorded
    clip: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)  # tokens of the policy's prompt
    instruction: str = ""  # the episode's own instruction; empty: the task's

    @property
    def finish_step(self) -> int:
        """The number of executed environment steps."""
        return sum(self.executed)

    @property
    def finish_reason(self) -> str:
        """`abort` if the simulator failed, `length` at the limit of environment steps without success, else `stop`."""
        if self.failure:
            return "abort"
        return "length" if self.finish_step >= self.spec.max_steps and not self.success else "stop"

    def describe(self) -> str:
        """Return the episode's end as text, for the report."""
        if self.failure:
            return f"not played: {self.failure}"
        return f"{'success' if self.success else 'no success'} after {self.finish_step} environment steps"

    def fail(self, kind: str, why: str, blank: Chunk) -> None:
        """Mark the episode as failed by its simulator, so that it is neither trained on nor scored.

        If no policy call was executed, `blank` is recorded as the episode's only one.
        """
        self.failure, self.failure_kind, self.success, self.progress = why, kind, False, math.nan
        # drop a call that the simulator did not answer
        del self.seen[len(self.executed) :], self.chunks[len(self.executed) :]
        frames = {name: np.zeros((*size, 3), np.uint8) for name, size in self.spec.cameras.items()}
        self.end = Observation(dict(frames), np.zeros(self.spec.state_dim, np.float32))
        if not self.chunks:
            self.seen.append(Observation(frames, self.end.state))
            self.chunks.append(blank)
            self.executed.append(0)
            self.progresses.append(math.nan)

    def executed_tokens(self) -> NDArray[np.bool_]:
        """Return which of the episode's response tokens belong to executed actions, bool [tokens]; none of them if the
        simulator failed. A policy call, or each denoising step of a call, has K * D tokens.
        """
        made = [
            np.arange(len(chunk.token_ids)) % chunk.actions.size < steps * self.spec.action_dim
            for chunk, steps in zip(self.chunks, self.executed, strict=True)
        ]
        mask = np.concatenate(made)
        return mask & (not self.failure)


def episode_values(episodes: Sequence[Episode], version: int) -> dict[str, Any]:
    """Return the fields and columns of a batch, one entry per episode; `version` is the version of all their weights.

    Pictures are removed from the episodes one by one, so that they are not in memory twice.
    """
    cameras = {camera: size for episode in episodes for camera, size in episode.spec.cameras.items()}
    kinds = {
        (tuple(sorted(e.spec.cameras.items())), e.spec.state_dim, tuple((n, f.shape[1:]) for n, f in e.clip.items()))
        for e in episodes
    }
    if len(kinds) > 1:
        raise ValueError(
            f"the tasks of a run must have the same cameras, picture sizes and state sizes, got {sorted(kinds)}"
        )
    final = [e.end for e in episodes if e.end is not None]
    assert len(final) == len(episodes), "episodes that are over"
    return {
        **_token_values(episodes, version),
        **_picture_values(episodes, final, cameras),
        **_state_values(episodes, final),
        "task": [e.spec.name for e in episodes],
        "trial": torch.tensor([e.trial for e in episodes], dtype=torch.int64),
        "success": torch.tensor([e.success for e in episodes], dtype=torch.bool),
        "finish_step": torch.tensor([e.finish_step for e in episodes], dtype=torch.int64),
        "max_steps": torch.tensor([e.spec.max_steps for e in episodes], dtype=torch.int64),
        "progress": torch.tensor([e.progress for e in episodes], dtype=torch.float32),
        "call_progress": Jagged.from_list([e.progresses for e in episodes], dtype=torch.float32),
        "env_error": [e.failure for e in episodes],
    }


def _token_values(episodes: Sequence[Episode], version: int) -> dict[str, Jagged]:
    tokens = [[token for chunk in e.chunks for token in chunk.token_ids] for e in episodes]
    responses = Jagged.from_list(tokens, dtype=torch.int64)
    mask = torch.from_numpy(np.concatenate([np.zeros(0, np.bool_), *(e.executed_tokens() for e in episodes)]))
    logps = [value for e in episodes for chunk in e.chunks for value in chunk.logprobs]
    ends = [np.cumsum([len(chunk.token_ids) for chunk in e.chunks]).tolist() for e in episodes]
    chains = [chunk.chain for e in episodes for chunk in e.chunks if chunk.chain is not None]
    calls = [len(e.chunks) for e in episodes]
    return {
        **({CHAIN: Jagged.from_lengths(torch.from_numpy(np.stack(chains)), calls)} if chains else {}),
        "response_ids": responses,
        "response_mask": responses.like(mask),
        "rollout_logp": responses.like(torch.tensor(logps, dtype=torch.float32)),
        "turn_ends": Jagged.from_list(ends, dtype=torch.int64),
        "turn_starts": Jagged.from_list([[0, *some[:-1]] for some in ends], dtype=torch.int64),
        **version_values([[[version, len(ids)]] for ids in tokens]),
    }


def _picture_values(
    episodes: Sequence[Episode], final: Sequence[Observation], cameras: Mapping[str, tuple[int, int]]
) -> dict[str, torch.Tensor | Jagged]:
    values: dict[str, torch.Tensor | Jagged] = {}
    calls = [len(e.chunks) for e in episodes]
    for camera, size in cameras.items():
        stacked = _moved([seen for e in episodes for seen in e.seen], camera, size)
        values[FRAMES + camera] = Jagged.from_lengths(stacked, calls)
        values[END_FRAMES + camera] = _moved(final, camera, size)
    for camera in list(episodes[0].clip) if episodes else ():
        clips = [e.clip.pop(camera) for e in episodes]
        values[CLIP + camera] = Jagged.from_lengths(torch.from_numpy(np.concatenate(clips)), list(map(len, clips)))
    return values


def _state_values(episodes: Sequence[Episode], final: Sequence[Observation]) -> dict[str, torch.Tensor | Jagged]:
    before = [seen.state for e in episodes for seen in e.seen]
    width = episodes[0].spec.state_dim if episodes else 0
    states = torch.from_numpy(np.stack(before)) if before else torch.zeros(0, width)
    return {
        "states": Jagged.from_lengths(states, [len(e.chunks) for e in episodes]),
        "end_state": torch.from_numpy(np.stack([seen.state for seen in final])) if final else states,
    }


def _moved(seen: Sequence[Observation], camera: str, size: tuple[int, int]) -> torch.Tensor:
    """Move a camera's pictures out of `seen` into one tensor, uint8 [N, H, W, 3]."""
    pictures = np.empty((len(seen), *size, 3), np.uint8)
    trim = find_malloc_trim()
    every = max(1, _TRIM_BYTES // max(1, size[0] * size[1] * 3))
    for number, (place, observation) in enumerate(zip(pictures, seen, strict=True), 1):
        frames = dict(observation.frames)
        place[:] = frames.pop(camera)
        object.__setattr__(observation, "frames", frames)  # frees the picture that was copied
        if number % every == 0:
            trim(0)
    return torch.from_numpy(pictures)
