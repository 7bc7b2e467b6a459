"""Embeddings of robots' episodes, which scores of failures compare: one row of numbers for each episode."""

from __future__ import annotations

from megarl.robots.config import EmbeddingSettings
from megarl.robots.models.episodes.base import EpisodeEmbedder, build_embedder

__all__ = ["EmbeddingSettings", "EpisodeEmbedder", "build_embedder"]
