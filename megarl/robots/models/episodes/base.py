"""The base of embedders, which turn episodes into vectors."""

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
    """An embedder, which makes one embedding of each episode; as it stands here it learns and records nothing."""

    @abstractmethod
    def embed(self, episodes: Batch) -> Tensor:
        """Return the embeddings float32 [B, E] on the CPU, in the order of the batch.

        Args:
            episodes: fields as `megarl.robots.rollout.episode` writes them. An episode with an `env_error` gets zeros,
                which no other one has.
        """

    @property
    def recording(self) -> Recording | None:
        """The part of an episode that simulators must record in addition to the policy's observations; None:
        nothing."""
        return None

    def learn(self, episodes: Batch, step: int) -> Metrics | None:
        """Learn of a training step's episodes, those of this replica; collective over the data-parallel ranks.

        Returns:
            This rank's metrics; None where nothing is learned.
        """
        return None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: nested dicts of tensors and plain numbers; empty where nothing is
        learned."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most have nothing to load)
        """Go on from what `state` gave."""


def build_embedder(
    settings: EmbeddingSettings, *, cameras: Sequence[str], device: torch.device, group: WorkerGroup, seed: int
) -> EpisodeEmbedder:
    """Return the embedder that `settings` names.

    Args:
        settings: the mapping `robot.reward.embedding`.
        cameras: that episodes have pictures of, in the policy's order.
        group: data-parallel ranks, which learn together.
    """
    settings.check("robot.reward.embedding")
    if settings.name == "own":
        from megarl.robots.models.episodes.own import OwnEmbedder

        return OwnEmbedder(
            cameras,
            points=settings.points,
            width=settings.width,
            updates=settings.updates,
            lr=settings.lr,
            device=device,
            group=group,
            seed=seed,
        )
    if settings.name == "vjepa2":
        from megarl.robots.models.episodes.vjepa2 import VideoEmbedder

        assert settings.path is not None, "checked above"
        return VideoEmbedder(settings.path, cameras, device, settings.batch_size, by_steps=settings.by_steps)
    from megarl.robots.models.episodes.states import StateEmbedder

    return StateEmbedder(settings.points, settings.end_weight)
