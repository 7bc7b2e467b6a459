"""Which parts of a team get which groups of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from megarl.disaggregated.buffer.core import GroupInfo

Share: TypeAlias = Literal["dealt", "tokens"]


def shared(groups: Iterable[GroupInfo], parts: int, share: Share, cuts: Sequence[int] = ()) -> list[list[GroupInfo]]:
    """Groups of each of `parts` parts, by rising ordinal; `cuts`: where mini-batches begin that are shared by tokens.

    >>> from megarl.disaggregated.buffer.core import GroupInfo
    >>> groups = [GroupInfo(uid, k, (uid,), tokens) for k, (uid, tokens) in enumerate(zip("abcd", [9, 1, 9, 1]))]
    >>> [[g.uid for g in part] for share in ("dealt", "tokens") for part in shared(groups, 2, share)]
    [['a', 'c'], ['b', 'd'], ['a', 'b'], ['c', 'd']]
    """
    ordered = sorted(groups, key=lambda group: group.ordinal)
    if share == "dealt":
        dealt: list[list[GroupInfo]] = [[] for _ in range(parts)]
        for group in ordered:
            dealt[group.ordinal % parts].append(group)
        return dealt
    from megarl.data.balance import share_groups

    sets = share_groups([group.tokens for group in ordered], parts, cuts)
    return [[ordered[place] for place in places] for places in sets]
