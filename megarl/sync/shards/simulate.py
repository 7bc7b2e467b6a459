"""Simulates how long a planned update takes: each round waits for its ranks, and messages share bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.sync.shards.plan import UpdatePlan


@dataclass(frozen=True)
class LinkRates:
    """Bandwidths of ranks, and the cost of a round.

    Attributes:
        network: bytes per second that a rank sends, and at the same time receives, over the network.
        machine: bytes per second between ranks of one machine.
        memory: bytes per second between ranks on one GPU.
        round_s: seconds between the end of a round of a rank and the start of its round after the next.
    """

    network: float
    machine: float
    memory: float = 1e12
    round_s: float = 0.0


def simulated_seconds(plan: UpdatePlan, rates: LinkRates) -> float:
    """Return the seconds until the last rank has received everything.

    Each rank runs its rounds one after the other, and starts a round when the last but one has ended. A message begins
    when both ranks have reached its round. All messages of a rank in a round share the rank's bandwidth, so a message
    takes as long as the busier of its two ranks needs for all of that rank's messages. Server ranks on a machine
    exchange stripes (shares of what several of them need) while the next round runs; only the exchange after the last
    round adds to the time.
    """
    sender, receiver = plan.messages.sender, plan.receiver_numbers
    senders, receivers = int(sender.max()) + 1, len(plan.receivers)
    # for each rank the ends of its last round, and of the one before that
    at, until = np.zeros((2, senders)), np.zeros((2, receivers))
    nbytes = plan.messages.nbytes.astype(float)
    rate = np.array([rates.memory, rates.machine, rates.network])[plan.distances()]
    starts = np.searchsorted(plan.messages.round, np.arange(len(plan.rounds) + 1))
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        row = slice(first, last)
        froms, tos = sender[row], receiver[row]
        busy = nbytes[row] / rate[row]
        out, into = np.bincount(froms, busy, senders), np.bincount(tos, busy, receivers)
        ready = [np.maximum(last, before + rates.round_s) for last, before in (at, until)]
        end = np.maximum(ready[0][froms], ready[1][tos]) + np.maximum(out[froms], into[tos])
        for ends, ranks in ((at, froms), (until, tos)):
            here = np.unique(ranks)
            ends[1, here] = ends[0, here]
            np.maximum.at(ends[0], ranks, end)
    return float(until[0].max()) + _last_gather(plan, rates)


def _last_gather(plan: UpdatePlan, rates: LinkRates) -> float:
    """Return an upper bound of the seconds in which server ranks exchange stripes after the last round: those of the
    longest exchange of any round."""
    if not len(plan.fans):
        return 0.0
    key = plan.fans.round.astype(np.int64) << 32 | plan.fans.group
    _, group, count = np.unique(key, return_inverse=True, return_counts=True)
    return float((plan.fans.stripe * (count[group] - 1)).max()) / rates.machine
