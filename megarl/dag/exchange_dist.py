"""The exchange between processes: point-to-point over gloo, planned from metadata that every rank concerned has.

    1. every rank of either layout: all-gather of JSON {key, counts, sample ids, groups, lengths, held ids}
    2. every rank computes the same plan (`exchange_plan.assign`)
    3. every sender packs one slice per destination part (`Batch.to_bytes`); all-gather of JSON {sizes or error}
    4. payload: only between the ranks concerned; a rank that already holds a source part sends nothing to itself

With tensor or pipeline parallelism several ranks hold the same part: the ranks of a source part take turns as senders,
so that no rank sends everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.comm import WorkerGroup
from megarl.dag.exchange import DataLayout
from megarl.dag.exchange_local import LocalExchange
from megarl.dag.exchange_plan import Assignment, Balance, PartInfo, assign
from megarl.data.batch import Batch, Jagged
from megarl.errors import MegarlError
from megarl.rendezvous import ranks_text


class ExchangeError(MegarlError):
    """Ranks disagree about what is exchanged, or one could not send; the message names key and ranks."""


class DistExchange(LocalExchange):
    """See `megarl.dag.exchange.Exchange`.

    Args:
        world: all ranks that layouts number, with the deadline of every wait on another rank.
        together: column whose equal values stay on one part (advantages need whole prompt groups); None: none.
        balanced: even out tokens over the destination parts instead of keeping the source order.
        equal_counts: when balanced, give every part the same number of groups.
    """

    def __init__(
        self,
        world: WorkerGroup,
        *,
        together: str | None = "uid",
        balanced: bool = False,
        equal_counts: bool = False,
    ) -> None:
        self.together, self.balanced, self.equal_counts = together, balanced, equal_counts
        self._world = world
        self._groups: dict[tuple[int, ...], WorkerGroup | None] = {}

    def prepare(self, edges: Sequence[tuple[DataLayout, DataLayout]]) -> None:
        """Make the process group of every edge; collective over all processes of the job.

        Not done lazily by the ranks concerned: torch names such groups after how many each rank has made so far, so
        ranks that took part in different numbers of groups would wait for each other for ever.
        """
        for src, dst in edges:
            ranks = tuple(sorted(src.ranks | dst.ranks))
            if src != dst and ranks not in self._groups:
                self._groups[ranks] = self._world.subgroup(
                    ranks, f"the exchange of {ranks_text(ranks)}", backend="gloo"
                )

    def redistribute(
        self,
        batch: Batch | None,
        src: DataLayout,
        dst: DataLayout,
        *,
        key: str,
        held: Sequence[str] | None = None,
    ) -> Batch | None:
        """Move the samples; see `megarl.dag.exchange.Exchange.redistribute`. Moved samples arrive on the CPU.

        Raises:
            ExchangeError: ranks came with different keys or layouts, or a rank could not pack its samples.
        """
        rank = self._world.rank
        if src == dst:
            return batch
        ranks = tuple(sorted(src.ranks | dst.ranks))
        if rank not in ranks:
            raise ValueError(f"{key}: rank {rank} is in neither layout")
        if (rank in src.ranks) != (batch is not None):
            raise ValueError(f"{key}: a rank gives a batch if and only if it is in the source layout")
        group = self._groups.get(ranks)
        if group is None:
            raise ValueError(f"{key}: no group for ranks {ranks}; call prepare on every process first")
        batch = batch if batch is None else batch.to("cpu")
        heads = dict(zip(ranks, group.all_gather_json(self._head(batch, src, dst, key, held)), strict=True))
        self._check(heads, key)
        plan = assign(
            [PartInfo(**heads[part[0]]["info"]) for part in src.parts],
            len(dst.parts),
            held=[heads[part[0]]["held"] for part in dst.parts],
            balance=_balancer() if self.balanced else None,
            equal_counts=self.equal_counts,
        )
        sources = _sources(plan, [heads[part[0]]["info"]["count"] for part in src.parts])
        pieces = self._move(batch, src, dst, plan, sources, key, group, ranks)
        part = dst.part_of(rank)
        return None if part is None else _assemble(pieces, plan[part], sources[part])

    # -- metadata ------------------------------------------------------------------------------------------------

    def _head(
        self, batch: Batch | None, src: DataLayout, dst: DataLayout, key: str, held: Sequence[str] | None
    ) -> dict[str, Any]:
        info: dict[str, Any] | None = None
        if batch is not None:
            info = {"count": len(batch), "ids": self.ids(batch)}
            if self.together is not None and self.together in batch:
                info["groups"] = batch[self.together]
            if self.balanced:
                info["lengths"] = _tokens(batch)
        return {
            "key": key,
            "layout": [src.parts, dst.parts],
            "info": info,
            "held": None if held is None else list(held),
        }

    @staticmethod
    def _check(heads: dict[int, dict[str, Any]], key: str) -> None:
        for what in ("key", "layout"):
            seen: dict[str, list[int]] = {}
            for rank, head in heads.items():
                seen.setdefault(str(head[what]), []).append(rank)
            if len(seen) > 1:
                story = "; ".join(f"ranks {ranks} came with {value}" for value, ranks in seen.items())
                raise ExchangeError(f"exchange {key!r}: {what} differs: {story}")

    # -- payload -------------------------------------------------------------------------------------------------

    def _move(
        self,
        batch: Batch | None,
        src: DataLayout,
        dst: DataLayout,
        plan: Assignment,
        sources: list[list[int]],
        key: str,
        group: WorkerGroup,
        ranks: tuple[int, ...],
    ) -> dict[int, Batch]:
        """Slices for this rank by source part; sends what this rank owes to others on the way."""
        rank = self._world.rank
        mine = src.part_of(rank)
        tag = int.from_bytes(hashlib.sha256(key.encode()).digest()[:3], "big")
        owed = _transfers(src, dst, sources)
        packed: dict[int, torch.Tensor] = {}
        report: dict[str, Any] = {"sizes": {}}
        try:
            for (sender, receiver), (part, target) in owed.items():
                if sender == rank and receiver != rank:
                    if target not in packed:
                        assert batch is not None, "senders are in the source layout"
                        packed[target] = _pack(_slice(batch, plan[target], part))
                    report["sizes"][str(receiver)] = len(packed[target])
        except Exception as error:  # told to everybody, so that nobody waits for what will not come
            report["error"] = f"{type(error).__name__}: {error}"
        reports = dict(zip(ranks, group.all_gather_json(report), strict=True))
        failed = {r: report["error"] for r, report in reports.items() if "error" in report}
        if failed:
            raise ExchangeError(f"exchange {key!r}: could not pack samples: {failed}")
        work, arriving = [], {}
        for (sender, receiver), (part, target) in owed.items():
            if rank == receiver != sender:
                arriving[part] = torch.empty(reports[sender]["sizes"][str(rank)], dtype=torch.uint8)
                work.append(dist.irecv(arriving[part], sender, group=group.process_group, tag=tag))
            elif rank == sender != receiver:
                work.append(dist.isend(packed[target], receiver, group=group.process_group, tag=tag))
        for item in work:
            assert item is not None, "this rank is in the group"
            item.wait()
        pieces = {part: Batch.from_bytes(data.numpy().tobytes()) for part, data in arriving.items()}
        wanted = dst.part_of(rank)
        if wanted is not None and mine is not None and mine in sources[wanted]:
            assert batch is not None, "this rank is in the source layout"
            pieces[mine] = _slice(batch, plan[wanted], mine)
        return pieces


def _sources(plan: Assignment, counts: list[int]) -> list[list[int]]:
    """Source parts each destination part hears from. One without samples still needs to learn the fields."""
    template = next((part for part, count in enumerate(counts) if count), 0)
    return [sorted({part for part, _ in chosen}) or [template] for chosen in plan]


def _transfers(src: DataLayout, dst: DataLayout, sources: list[list[int]]) -> dict[tuple[int, int], tuple[int, int]]:
    """(source part, destination part) by (sender, receiver); sender == receiver where the data is there already."""
    owed: dict[tuple[int, int], tuple[int, int]] = {}
    for target, receivers in enumerate(dst.parts):
        for part in sources[target]:
            for place, receiver in enumerate(receivers):
                holders = src.parts[part]
                sender = receiver if receiver in holders else holders[place % len(holders)]
                owed[sender, receiver] = (part, target)
    return owed


def _slice(batch: Batch, chosen: list[tuple[int, int]], part: int) -> Batch:
    index = [i for source, i in chosen if source == part]
    return batch if index == list(range(len(batch))) else batch.select(index)


def _pack(batch: Batch) -> torch.Tensor:
    return torch.frombuffer(bytearray(batch.to_bytes()), dtype=torch.uint8)


def _assemble(pieces: dict[int, Batch], chosen: list[tuple[int, int]], parts: list[int]) -> Batch:
    """Slices joined and put in the planned order."""
    whole = Batch.concat([pieces[part] for part in parts]) if len(parts) > 1 else pieces[parts[0]]
    arrived = sorted(range(len(chosen)), key=lambda k: chosen[k][0])
    if arrived == list(range(len(chosen))):
        return whole
    order = [0] * len(chosen)
    for place, k in enumerate(arrived):
        order[k] = place
    return whole.select(order)


def _tokens(batch: Batch) -> list[int]:
    """Prompt and response tokens of every sample."""
    counts = torch.zeros(len(batch), dtype=torch.int64)
    for name in ("prompt_ids", "response_ids"):
        if name in batch and isinstance(batch[name], Jagged):
            counts += batch[name].lengths
    return counts.tolist()


def _balancer() -> Balance:
    from megarl.data.balance import balance

    return balance
