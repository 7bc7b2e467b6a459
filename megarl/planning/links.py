"""Seconds of collectives: a ring over the slowest link of a group."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.hardware import Hardware


@dataclass(frozen=True)
class Links:
    """The hardware's links and the assumed shares of their rates that transfers reach.

    A group of n ranks with a distance of `stride` between neighbours lies inside a domain of fast links if n x stride
    fits into it.
    """

    hardware: Hardware
    given: PlanAssumptions

    def inside(self, size: int, stride: int = 1) -> bool:
        """Return whether fast links join all ranks of a group of `size` ranks that are `stride` ranks apart."""
        return size * stride <= self.hardware.joined

    def rate(self, *, inside: bool) -> float:
        """Return the bytes that a device sends per second over fast links (`inside`) or the network."""
        hardware, given = self.hardware, self.given
        if inside:
            return hardware.node_gb_s * 1e9 * given.node_share
        return hardware.net_gbit / 8 * 1e9 * given.link_share

    def hop(self, *, inside: bool) -> float:
        """Return the seconds until a message over fast links (`inside`) or the network begins to arrive."""
        return (self.given.node_hop_us if inside else self.given.hop_us) / 1e6 / self.hardware.pace

    def ring(self, sent: float, size: int, stride: int = 1, *, steps: float = 1.0, sums: bool = False) -> float:
        """Return the seconds of `steps` ring collectives, in which a rank sends `sent` bytes in total.

        Formula L1 of docs/planning.md. Each collective passes its data on `size` - 1 times to the next rank, which is
        `stride` ranks away. An all-reduce counts as two collectives with `sums`; a gather or a scatter counts as one
        without.
        """
        if size == 1:
            return 0.0
        inside, share = self.inside(size, stride), 1.0 if sums else self.given.scatter_share
        return sent / (self.rate(inside=inside) * share) + steps * (size - 1) * self.hop(inside=inside)

    def exchange(self, sent: float, size: int, stride: int = 1, *, steps: float = 1.0) -> float:
        """Return the seconds of all-to-alls in which a rank sends `sent` bytes to the others together.

        Formula L2 of docs/planning.md. Messages to ranks of the same domain use its links at the same time as other
        messages use the network.
        """
        if size == 1:
            return 0.0
        near = min(size, max(1, self.hardware.joined // stride))
        within = sent * (near - 1) / (size - 1)
        inside, outside = self.rate(inside=True), self.rate(inside=False)
        hop = self.hop(inside=near == size)
        return max(within / inside, (sent - within) / outside) + steps * hop
