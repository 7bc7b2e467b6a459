"""Embeddings of robots' episodes: one vector per episode, by which scores compare failures with successes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megarl.data.batch import Batch
    from megarl.robots.config import EmbeddingSettings
    from megarl.robots.simulators.protocol import Recording
    from megarl.system.comm import WorkerGroup
    from megarl.system.metrics import Metrics


class EpisodeEmbedder(ABC):
    """Makes one embedding for each episode. The base class trains nothing and needs no recorded frames."""

    @abstractmethod
    def embed(self, episodes: Batch) -> Tensor:
        """Return the embeddings float32 [B, E] on the CPU, in the order of the batch.

        Args:
            episodes: fields as `megarl.robots.rollout.episode` writes them. An episode with an `env_error` gets zeros;
                no other episode has zeros only.
        """

    @property
    def recording(self) -> Recording | None:
        """The clips that simulators must record in addition to the policy's observations; None: no clips."""
        return None

    def learn(self, episodes: Batch, step: int) -> Metrics | None:
        """Train the embedder on this replica's episodes of a training step; collective over data-parallel ranks.

        Returns:
            This rank's metrics; None where nothing is learned.
        """
        return None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: nested dicts of tensors and numbers; empty without trained parameters."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most have nothing to load)
        """Restore the state that `state` returned."""


def build_embedder(
    settings: EmbeddingSettings, *, cameras: Sequence[str], device: torch.device, group: WorkerGroup, seed: int
) -> EpisodeEmbedder:
    """Return the embedder that `settings` names.

    Args:
        settings: the mapping `robot.reward.embedding`.
        cameras: cameras that episodes have pictures of, in the policy's order.
        group: data-parallel ranks, which train the embedder together.
    """
    settings.check("robot.reward.embedding")
    if settings.name == "own":
        from megarl.robots.models.episodes.own import OwnEmbedder

        return OwnEmbedder(settings, cameras, device, group, seed)
    if settings.name == "vjepa2":
        from megarl.robots.models.episodes.vjepa2 import VideoEmbedder

        assert settings.path is not None, "checked above"
        return VideoEmbedder(settings.path, cameras, device, settings.batch_size, by_steps=settings.by_steps)
    from megarl.robots.models.episodes.states import StateEmbedder

    return StateEmbedder(settings.points, settings.end_weight)
