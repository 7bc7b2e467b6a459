"""Many servers in virtual time below the real client: `python -m megarl.benchmarks.virtual_servers`.

The client (`Dispatch`, its slots and its router) runs as it is, in an event loop whose clock jumps to the next event.
Only the HTTP call is replaced, by a server that decodes all of its samples at the same speed. So 100,000 samples on 256
servers take seconds, and show what the client costs and how evenly it uses the servers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from megarl.config.rollout import SamplingConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.client import Dispatch
from megarl.rollout.sglang.samples import ServedSample
from megarl.sync.protocol import version_tag

_TAG = version_tag(1, "virtual")
_MEAN_TOKENS, _SPREAD = 2000.0, 1.0  # lognormal lengths
_TOKEN_S = 0.02


class _Jumping(selectors.SelectSelector):
    """A selector that does not wait, but moves the clock to where the wait would have ended."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which sleeping takes no time."""

    def __init__(self) -> None:
        self._clock = _Jumping()
        super().__init__(self._clock)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._clock.now


class VirtualDispatch(Dispatch):
    """The client with servers that answer after the time that the sample's tokens take."""

    def start(self, lengths: dict[int, int]) -> None:
        """Set the tokens of each sample, by its seed."""
        self._lengths, self.tokens = lengths, Counter[str]()

    async def _post(self, server: ServerApi, payload: dict[str, Any]) -> dict[str, Any]:
        length = self._lengths[payload["sampling_params"]["sampling_seed"]]
        await asyncio.sleep(length * _TOKEN_S)
        self.tokens[server.name] += length
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 1, None]], "weight_version": _TAG}
        return {"output_ids": [1], "meta_info": meta}


@dataclass(frozen=True)
class Outcome:
    """What a simulated generation took.

    Attributes:
        cpu_s: CPU-seconds of the client.
        virtual_s: seconds until the last sample was finished, in virtual time.
        fullest: tokens of the server with the most over the mean of all servers.
        floor_s: virtual seconds if all servers had been busy to the end, or of the longest sample.
    """

    cpu_s: float
    virtual_s: float
    fullest: float
    floor_s: float


def generate(servers: int, samples: int, group: int, capacity: int, seed: int = 0) -> Outcome:
    """Generate `samples` samples, `group` of each prompt, on servers with `capacity` samples at a time."""
    random_ = random.Random(seed)
    lengths = {
        i: max(1, int(_MEAN_TOKENS * random_.lognormvariate(-(_SPREAD**2) / 2, _SPREAD))) for i in range(samples)
    }
    apis = {i: ServerApi(f"http://127.0.0.1:{i + 1}", "", f"server {i}") for i in range(servers)}
    config, failures = SGLangConfig(max_concurrency=capacity), deque[Any]()
    finished: list[ServedSample] = []
    loop = VirtualLoop()
    try:
        dispatch = VirtualDispatch(config, apis, SamplingConfig(max_new_tokens=1), [], _TAG, finished.append, failures)
        dispatch.start(lengths)
        prompts = range(-(-samples // group))
        groups = [
            [ServedSample(p, [p % 1000], i) for i in range(p * group, min(samples, (p + 1) * group))] for p in prompts
        ]

        async def play(each: list[ServedSample]) -> None:
            await dispatch.finish(each)
            dispatch.forget(each[0].prompt)

        async def play_all() -> None:
            await asyncio.gather(*map(play, groups))

        start = time.process_time()
        loop.run_until_complete(play_all())
        spent = time.process_time() - start
        virtual_s = loop.time()
    finally:
        loop.close()
    if len(finished) != samples or failures:
        raise RuntimeError(f"{len(finished)} of {samples} samples finished, {len(failures)} servers failed")
    mean = sum(lengths.values()) / servers
    floor_s = max(mean * _TOKEN_S / capacity, max(lengths.values()) * _TOKEN_S)
    return Outcome(spent, virtual_s, max(dispatch.tokens.values()) / mean, floor_s)


def main(argv: list[str] | None = None) -> int:
    """Print the outcome; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.virtual_servers", description=__doc__)
    parser.add_argument("--servers", type=int, default=256)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--group", type=int, default=16, help="samples of each prompt")
    parser.add_argument("--capacity", type=int, default=128, help="samples in flight per server")
    options = parser.parse_args(argv)
    outcome = generate(options.servers, options.samples, options.group, options.capacity)
    print(
        f"{options.samples:,} samples on {options.servers} servers of {options.capacity} slots: {outcome.cpu_s:.1f} "
        f"CPU-s, {1e6 * outcome.cpu_s / options.samples:.0f} us per sample; {outcome.virtual_s:.0f} s in virtual time "
        f"(floor {outcome.floor_s:.0f}); fullest server over mean {outcome.fullest:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
