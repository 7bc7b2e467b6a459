"""Many servers in virtual time below the real client: `python -m megarl.benchmarks.virtual_servers`.

The client (`Dispatch`, its slots and its router) runs as it is, in an event loop whose clock jumps to the next event.
Only the HTTP call is replaced, by a server that decodes all of its samples at the same speed. So 100,000 samples on 256
servers take seconds, and show what the client costs and how evenly it uses the servers. `--clients 128` divides samples
and servers evenly among 128 clients, as a run does among its replicas, and shows what is lost because no client uses
another one's servers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
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
        mean_tokens: tokens of a server, the mean of all servers.
        fullest: tokens of the server with the most over this mean.
        longest_s: seconds of the longest sample, in virtual time.
        floor_s: virtual seconds if all servers had been busy to the end, or of the longest sample.
    """

    cpu_s: float
    virtual_s: float
    mean_tokens: float
    fullest: float
    longest_s: float
    floor_s: float


def _lengths(samples: int) -> list[int]:
    random_ = random.Random(0)
    return [max(1, int(_MEAN_TOKENS * random_.lognormvariate(-(_SPREAD**2) / 2, _SPREAD))) for _ in range(samples)]


def generate(servers: int, samples: int, group: int, capacity: int) -> Outcome:
    """Generate `samples` samples, `group` of each prompt, on servers with `capacity` samples at a time."""
    return _generate(servers, _lengths(samples), group, capacity)


def _generate(servers: int, tokens: Sequence[int], group: int, capacity: int) -> Outcome:
    """Generate a sample of each length in `tokens`."""
    samples, lengths = len(tokens), dict(enumerate(tokens))
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
    longest_s = max(lengths.values()) * _TOKEN_S
    floor_s = max(mean * _TOKEN_S / capacity, longest_s)
    return Outcome(spent, virtual_s, mean, max(dispatch.tokens.values()) / mean, longest_s, floor_s)


def generate_in_shares(servers: int, samples: int, group: int, capacity: int, clients: int) -> Outcome:
    """Generate the samples of `generate` by several clients, each with an equal share of the samples and servers of its
    own. The CPU-seconds are the sum over all clients; the floor is that of all servers together."""
    lengths = _lengths(samples)
    shares = [_generate(servers // clients, lengths[part::clients], group, capacity) for part in range(clients)]
    mean = sum(share.mean_tokens for share in shares) / clients
    longest = max(share.longest_s for share in shares)
    return Outcome(
        sum(share.cpu_s for share in shares),
        max(share.virtual_s for share in shares),
        mean,
        max(share.fullest * share.mean_tokens for share in shares) / mean,
        longest,
        max(mean * _TOKEN_S / capacity, longest),
    )


def main(argv: list[str] | None = None) -> int:
    """Print the outcome; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megarl.benchmarks.virtual_servers", description=__doc__)
    parser.add_argument("--servers", type=int, default=256)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--group", type=int, default=16, help="samples of each prompt")
    parser.add_argument("--capacity", type=int, default=128, help="samples in flight per server")
    parser.add_argument("--clients", type=int, default=1, help="clients that share samples and servers evenly")
    options = parser.parse_args(argv)
    if options.servers % options.clients:
        parser.error(f"--clients {options.clients} does not divide --servers {options.servers}")
    sizes = (options.servers, options.samples, options.group, options.capacity)
    outcome = generate(*sizes) if options.clients == 1 else generate_in_shares(*sizes, options.clients)
    print(
        f"{options.samples:,} samples of {options.clients} clients on {options.servers} servers of {options.capacity} "
        f"slots: {outcome.cpu_s:.1f} "
        f"CPU-s, {1e6 * outcome.cpu_s / options.samples:.0f} us per sample; {outcome.virtual_s:.0f} s in virtual time "
        f"(floor {outcome.floor_s:.0f}); fullest server over mean {outcome.fullest:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
