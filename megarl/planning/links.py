"""Seconds that collectives take: a ring over the slowest link of a group."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.hardware import Hardware


@dataclass(frozen=True)
class Links:
    """The links of some hardware, as far as they are assumed to be reached.

    A group of n ranks whose numbers are `stride` apart is inside a domain of fast links where n x stride fits into it.
    """

    hardware: Hardware
    given: PlanAssumptions

    def inside(self, size: int, stride: int = 1) -> bool:
        """Tell whether all ranks of a group are joined by fast links."""
        return size * stride <= self.hardware.joined

    def rate(self, *, inside: bool) -> float:
        """Return the bytes per second of a device."""
        hardware, given = self.hardware, self.given
        if inside:
            return hardware.node_gb_s * 1e9 * given.node_share
        return hardware.net_gbit / 8 * 1e9 * given.link_share

    def hop(self, *, inside: bool) -> float:
        """Return seconds until a message begins to arrive."""
        return (self.given.node_hop_us if inside else self.given.hop_us) / 1e6 / self.hardware.pace

    def ring(self, sent: float, size: int, stride: int = 1, *, steps: float = 1.0, sums: bool = False) -> float:
        """Return seconds of collectives in which a rank sends `sent` bytes in all. [L1]

        Args:
            sent: bytes of a rank, over all of these collectives.
            size: ranks of the group; 1: nothing is sent.
            stride: distance between them.
            steps: collectives, each of which passes size - 1 steps of a ring.
            sums: these are sums over the ranks, not gathers or scatters.
        """
        if size == 1:
            return 0.0
        inside, share = self.inside(size, stride), 1.0 if sums else self.given.scatter_share
        return sent / (self.rate(inside=inside) * share) + steps * (size - 1) * self.hop(inside=inside)

    def exchange(self, sent: float, size: int, stride: int = 1, *, steps: float = 1.0) -> float:
        """Return seconds of all-to-alls in which a rank sends `sent` bytes to the others together. [L2]

        Messages to ranks of the same domain go over its links, at the same time as the rest.
        """
        if size == 1:
            return 0.0
        near = min(size, max(1, self.hardware.joined // stride))
        within = sent * (near - 1) / (size - 1)
        inside, outside = self.rate(inside=True), self.rate(inside=False)
        hop = self.hop(inside=near == size)
        return max(within / inside, (sent - within) / outside) + steps * hop
