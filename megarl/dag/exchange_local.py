"""The exchange of a graph whose nodes all run in one process: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.dag.exchange import DataLayout
from megarl.data.batch import Batch


class LocalExchange:
    """Batches stay where they are; see `megarl.dag.exchange.Exchange`."""

    def prepare(self, edges: Sequence[tuple[DataLayout, DataLayout]]) -> None:
        """Nothing to do."""

    def redistribute(
        self,
        batch: Batch | None,
        src: DataLayout,
        dst: DataLayout,
        *,
        key: str,
        held: Sequence[str] | None = None,
    ) -> Batch | None:
        """The batch itself; the layouts must be the same."""
        if src != dst:
            raise ValueError(f"{key}: layouts differ ({src} and {dst}), which needs a DistExchange")
        return batch

    def ids(self, batch: Batch) -> list[str] | None:
        """The `sample_id` column, or None."""
        return batch["sample_id"] if "sample_id" in batch else None  # noqa: SIM401 (a Batch has no get)
