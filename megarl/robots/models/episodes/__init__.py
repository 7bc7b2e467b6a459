"""Embeddings of robots' episodes: one vector per episode, by which scores compare failures with successes."""

from __future__ import annotations

from megarl.robots.config import EmbeddingSettings
from megarl.robots.models.episodes.base import EpisodeEmbedder, build_embedder

__all__ = ["EmbeddingSettings", "EpisodeEmbedder", "build_embedder"]
