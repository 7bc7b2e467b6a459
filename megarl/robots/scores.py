"""Scores of robots' episodes: 1 for success, or for failures how close they came to successes of the task (SRPO)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from megarl.algorithms.progress import ProgressReport, ProgressScorer, ProgressSettings
from megarl.config.components import settings_at
from megarl.data.batch import Batch
from megarl.robots.config import EmbeddingSettings, robot_of
from megarl.system.device import device
from megarl.system.errors import ConfigError
from megarl.system.tracing import phase

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from megarl.config.run import RunConfig
    from megarl.robots.models.episodes import EpisodeEmbedder
    from megarl.robots.simulators.protocol import Recording
    from megarl.system.metrics import Metrics
    from megarl.training.parallel import Layout

FILE = "episode_scores.safetensors"
_BINS = 10


class EpisodeScores:
    """Scores the episodes of training steps. Collective over the ranks of a team.

    Args:
        embedder: makes the embeddings by which episodes are compared; None: an episode's score is its success.
        coef: factor of the scores.
        compared: the recipe's mapping `robot.reward.embedding`.
    """

    def __init__(
        self,
        embedder: EpisodeEmbedder | None,
        scorer: ProgressScorer,
        coef: float,
        layout: Layout,
        compared: Mapping[str, Any],
    ) -> None:
        self._embedder, self._scorer, self._coef, self._layout = embedder, scorer, coef, layout
        self._compared = _with_defaults(compared)
        self._learned = -1  # the last step in which the embedder was trained: once per step, not in each of its rounds

    @classmethod
    def of(cls, config: RunConfig, layout: Layout) -> EpisodeScores:
        """Return the scorer that `robot.reward` configures."""
        reward, embedder, seed = robot_of(config).reward, None, config.trainer.seed
        settings = settings_at("robot.reward.srpo", reward.srpo, ProgressSettings)
        if reward.name == "progress":
            from megarl.robots.models.episodes import build_embedder

            wanted = settings_at("robot.reward.embedding", reward.embedding, EmbeddingSettings)
            cameras, group = robot_of(config).cameras, layout.dp_group
            embedder = build_embedder(wanted, cameras=cameras, device=device(), group=group, seed=seed)
        return cls(embedder, ProgressScorer(settings, seed), reward.coef, layout, reward.embedding)

    @property
    def encoder(self) -> tuple[str, str] | None:
        """Recipe key and value that name the published encoder; None: there is none."""
        path = json.loads(self._compared)["path"]
        return None if path is None else ("robot.reward.embedding.path", path)

    @property
    def recording(self) -> Recording | None:
        """The clips that simulators must record so that episodes can be scored by them; None: no clips."""
        return None if self._embedder is None else self._embedder.recording

    def score(self, samples: Batch, step: int, metrics: Metrics) -> Tensor:
        """Return the scores of this replica's B episodes, float32 [B], and record their metrics."""
        if self._embedder is None:
            return samples["success"].float() * self._coef
        if step != self._learned:
            with phase("learn"):
                learned = self._embedder.learn(samples, step)
            if learned is not None:
                metrics.merge(learned)
            self._learned = step
        with phase("embed"):
            embeddings = self._embedder.embed(samples)
        # Ranks of a replica may round differently on GPUs; the scores of a sample must be the same on all of them.
        embeddings = self._layout.mp_group.broadcast(embeddings.contiguous())
        rows = Batch(
            {"embedding": embeddings, "success": samples["success"], "progress": samples["progress"]},
            {"task": samples["task"], "env_error": samples["env_error"], "uid": samples["uid"]},
            size=len(samples),
        )
        parts = [Batch.from_bytes(data) for data in self._layout.dp_group.all_gather_bytes(rows.to_bytes())]
        every = Batch.concat(parts)
        report = self._scorer.score(every["embedding"], every["success"], every["task"], step=step)
        if self._layout.rank == 0:  # `report` has the episodes of all ranks, which must count once
            played = torch.tensor([not error for error in every["env_error"]], dtype=torch.bool)
            _record(metrics, report, every["progress"], played, every["uid"])
        first = sum(map(len, parts[: self._layout.dp_rank]))
        return report.scores[first : first + len(samples)].float() * self._coef

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def files(self) -> dict[str, bytes]:
        """Return the state of scorer and embedder for a checkpoint, as {file name: content}; empty on all ranks except
        the first, because all have the same state."""
        state: dict[str, Any] = {"scorer": self._scorer.state()}
        if self._embedder is not None:
            state["embedder"] = self._embedder.state()
        tensors: dict[str, Tensor] = {}
        plain: dict[str, Any] = {}
        _flatten(state, "", tensors, plain)
        metadata = {"plain": json.dumps(plain), "compared": self._compared}
        return {FILE: save(tensors, metadata)} if self._layout.rank == 0 and (tensors or plain) else {}

    def load(self, folder: Path) -> None:
        """Restore the state from a checkpoint's folder; without the file there is nothing to restore."""
        if not (folder / FILE).is_file():
            return
        with safe_open(folder / FILE, "pt") as file:
            values: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no mapping
            metadata = file.metadata()
        values |= json.loads(metadata["plain"])
        before = _with_defaults(json.loads(metadata["compared"]))
        if before != self._compared:
            raise ConfigError(
                "the checkpoint's encoder and reference episodes were made with a different embedding",
                where="robot.reward.embedding",
                found=self._compared,
                allowed=before,
                fix="set robot.reward.embedding to the checkpoint's value, or start with trainer.resume=never",
            )
        state: dict[str, Any] = {}
        for path, value in values.items():
            *outer, name = path.split("/")
            place = state
            for key in outer:
                place = place.setdefault(key, {})
            place[name] = value
        self._scorer.load_state(state.get("scorer", {}))
        if self._embedder is not None and "embedder" in state:
            self._embedder.load_state(state["embedder"])


def _with_defaults(compared: Mapping[str, Any]) -> str:
    """Return `robot.reward.embedding` as JSON with all defaults, so that equal settings compare as equal."""
    return json.dumps(EmbeddingSettings(**compared).model_dump(), sort_keys=True)


def _flatten(state: Mapping[str, Any], prefix: str, tensors: dict[str, Tensor], plain: dict[str, Any]) -> None:
    """Add the tensors of a nested state to `tensors`, and all other values to `plain`, by path (`outer/inner`)."""
    for name, value in state.items():
        if isinstance(value, Mapping):
            _flatten(value, f"{prefix}{name}/", tensors, plain)
        elif isinstance(value, torch.Tensor):
            tensors[prefix + name] = value.contiguous()
        else:
            plain[prefix + name] = value


def _record(m: Metrics, report: ProgressReport, progress: Tensor, played: Tensor, uid: Sequence[str]) -> None:
    """Record the metrics `srpo/...` of a global batch of B episodes.

    Args:
        progress: float32 [B], the simulator's measure of progress, 0 to 1.
        played: bool [B], False where the simulator failed.
        uid: the group of each episode.
    """
    failures = int((report.failed & played).sum())
    if failures:
        m.mean("srpo/shaped_share", float(report.shaped.sum()), failures)
    m.sum("srpo/invalid", float((report.invalid & played).sum()))
    if report.clusters:
        m.mean("srpo/clusters", float(sum(report.clusters.values())), len(report.clusters))
    shaped = report.distances[report.shaped]
    if len(shaped):
        m.mean("srpo/distance/mean", float(shaped.sum()), len(shaped))
        m.min("srpo/distance/min", float(shaped.min()))
        m.max("srpo/distance/max", float(shaped.max()))
        for number, episodes in enumerate(report.histogram(_BINS)[0]):
            m.sum(f"srpo/distance/bin_{number}", episodes)
        m.mean("srpo/failure_score/mean", float(report.scores[report.shaped].sum()), len(shaped))
    for name, groups in (("", None), ("/in_group", uid)):
        correlations = report.rank_correlations(progress, groups)
        if correlations:
            m.mean(f"srpo/rank_correlation{name}", float(sum(correlations.values())), len(correlations))
