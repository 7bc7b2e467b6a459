"""Embeds episodes with a small encoder that is trained during the run on its own episodes.

    pictures of all cameras, 32 x 32 --> convolutions --.
                                                        +--> linear layers --> unit vector [D] of a point in time
    the robot's state ----------------------------------'

    learn: the vectors of neighbouring points in time become similar, those of other points of the episode dissimilar
           (InfoNCE over time, arXiv 1704.06888)
    embed: concatenates the vectors at 1/n, 2/n, ..., 1 of the episode

Negatives come from the same episode. So the encoder ignores what is constant in an episode (the start state, the task),
and the sum of the loss does not depend on how episodes are distributed over ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megarl.data.batch import Batch
from megarl.data.jagged import Jagged
from megarl.robots.config import END_FRAMES, FRAMES, EmbeddingSettings
from megarl.robots.models.episodes import EpisodeEmbedder
from megarl.robots.models.episodes.states import valid_episodes
from megarl.system.comm import WorkerGroup
from megarl.system.metrics import Metrics

#: Height and width to which pictures are scaled; in one update of the encoder: points in time per episode, and episodes
#: over all ranks.
SIDE, POINTS, EPISODES = 32, 8, 32
_TEMPERATURE = 0.1
#: Pictures that go through the encoder at a time.
_AT_A_TIME = 256


class PointEncoder(nn.Module):
    """Maps the pictures and the state at one point in time to a unit vector."""

    def __init__(self, cameras: int, state_dim: int, width: int) -> None:
        super().__init__()
        channels = (3 * cameras, 16, 32, 32)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1) for before, after in itertools.pairwise(channels)
        )
        self.hidden = nn.Linear(channels[-1] * (SIDE // 8) ** 2 + state_dim, 64)
        self.out = nn.Linear(64, width)

    def forward(self, pictures: Tensor, states: Tensor) -> Tensor:
        """Map pictures float32 [N, 3 * cameras, SIDE, SIDE] and states [N, S] to [N, width]."""
        for convolution in self.convolutions:
            pictures = F.relu(convolution(pictures))
        hidden = F.relu(self.hidden(torch.cat([pictures.flatten(1), states], 1)))
        return F.normalize(self.out(hidden), dim=1)


class OwnEmbedder(EpisodeEmbedder):
    """Embeds episodes with a `PointEncoder` that it trains during the run.

    It is deterministic on CPUs: random numbers depend only on seed, step and update.

    Args:
        settings: the mapping `robot.reward.embedding`.
        cameras: cameras that episodes have pictures of.
        group: data-parallel ranks.
    """

    def __init__(
        self, settings: EmbeddingSettings, cameras: Sequence[str], device: torch.device, group: WorkerGroup, seed: int
    ) -> None:
        self._settings, self._cameras = settings, tuple(cameras)
        self._device, self._group, self._seed = device, group, seed
        self._state_dim = 0
        self._encoder: PointEncoder | None = None  # made with the first episodes, which determine the size of states
        self._optimizer: torch.optim.Adam | None = None

    # -- embeddings --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, episodes: Batch) -> Tensor:
        """Return embeddings float32 [B, points * width], zeros for episodes with an error."""
        valid, lengths = valid_episodes(episodes), episodes["states"].lengths.cpu()
        points = self._settings.points
        embeddings = torch.zeros(len(valid), points * self._settings.width)
        rows = valid.nonzero().squeeze(1)
        if not len(rows):
            return embeddings
        encoder, _ = self._prepare(episodes["states"].values.shape[1])
        shares = torch.arange(1, points + 1, dtype=torch.float64) / points
        places = (lengths[rows, None] * shares).round().long()
        episode = rows[:, None].expand_as(places).flatten()
        parts = zip(episode.split(_AT_A_TIME), places.flatten().split(_AT_A_TIME), strict=True)
        vectors = [encoder(*self._inputs(episodes, *part)).cpu() for part in parts]
        embeddings[rows] = torch.cat(vectors).view(len(rows), -1)
        return embeddings

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, episodes: Batch, step: int) -> Metrics | None:
        """Update the encoder a few times, each time on random episodes of the global batch; see `EpisodeEmbedder`.

        Returns:
            `srpo/encoder/loss`, and `srpo/encoder/accuracy`: share of neighbours that are more alike than all
            negatives. None: no episode of any rank has three points.
        """
        lengths = episodes["states"].lengths.cpu()
        # Learning needs three points of an episode: at least two calls, and the end state.
        usable = (valid_episodes(episodes) & (lengths >= 2)).nonzero().squeeze(1)
        ranks = self._group.all_gather_json([len(usable), episodes["states"].values.shape[1]])
        total, first = sum(count for count, _ in ranks), sum(count for count, _ in ranks[: self._group.rank])
        if not total:
            return None
        encoder, optimizer = self._prepare(max(dim for _, dim in ranks))
        metrics = Metrics()
        for update in range(self._settings.updates):
            chosen = _sample(total, EPISODES, self._seed, step, update)
            local = [place for place in chosen if first <= place < first + len(usable)]
            rows = usable[[place - first for place in local]]
            points = [
                _sample(int(lengths[row]) + 1, POINTS, self._seed, step, update, place)
                for row, place in zip(rows, local, strict=True)
            ]
            optimizer.zero_grad(set_to_none=False)
            loss, hits, count = self._loss(encoder, episodes, rows, points)
            if count:
                loss.backward()
            _average_gradients(encoder, count, self._group)
            optimizer.step()
            metrics.mean("srpo/encoder/loss", float(loss.detach()), count)
            metrics.mean("srpo/encoder/accuracy", hits, count)
        return metrics

    def _loss(
        self, encoder: PointEncoder, episodes: Batch, rows: Tensor, points: list[list[int]]
    ) -> tuple[Tensor, int, int]:
        """Return the summed contrastive loss of pairs of neighbouring points, how many rank first, and of how many.

        Args:
            rows: the episodes.
            points: for each episode the places of its points in time.
        """
        if not points:
            return torch.zeros(()), 0, 0
        counts = torch.tensor([len(places) for places in points])
        flat = torch.tensor([place for places in points for place in places])
        vectors = encoder(*self._inputs(episodes, rows.repeat_interleave(counts), flat))
        exists = (torch.arange(POINTS) < counts[:, None]).to(vectors.device)
        padded = vectors.new_zeros(len(points), POINTS, vectors.shape[1])
        padded[exists] = vectors
        return neighbours_loss(padded, exists)

    def _inputs(self, episodes: Batch, episode: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Return pictures and states at N points in time, each given by an episode [N] and a place [N]: place k is
        before policy call k, and the last place is the end of the episode.
        """
        pictures = []
        for camera in self._cameras:
            seen = _seen(episodes[FRAMES + camera], episodes[END_FRAMES + camera], episode, place).to(self._device)
            levels = seen.permute(0, 3, 1, 2).float() / 255 - 0.5
            pictures.append(F.adaptive_avg_pool2d(levels, SIDE))
        states = _seen(episodes["states"], episodes["end_state"], episode, place).to(self._device)
        return torch.cat(pictures, 1), states.float()

    # -- encoder and checkpoints -------------------------------------------------------------------------------------

    def _prepare(self, state_dim: int) -> tuple[PointEncoder, torch.optim.Adam]:
        """Return the encoder of points in time of an episode, and its optimizer; the first call creates both."""
        if self._encoder is None or self._optimizer is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed)
                encoder = PointEncoder(len(self._cameras), state_dim, self._settings.width)
            self._state_dim, self._encoder = state_dim, encoder.to(self._device)
            self._optimizer = torch.optim.Adam(self._encoder.parameters(), lr=self._settings.lr)
        return self._encoder, self._optimizer

    def state(self) -> dict[str, Any]:
        """Return copies of the encoder's and optimizer's state; empty before the first episodes."""
        if self._encoder is None or self._optimizer is None:
            return {}
        moments = self._optimizer.state_dict()["state"]
        return {
            "state_dim": self._state_dim,
            "encoder": {name: value.cpu().clone() for name, value in self._encoder.state_dict().items()},
            "optimizer": {
                str(number): {name: value.cpu().clone() for name, value in values.items()}
                for number, values in moments.items()
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        if not state:
            return
        encoder, optimizer = self._prepare(state["state_dim"])
        encoder.load_state_dict(state["encoder"])
        moments = {int(number): dict(values) for number, values in state.get("optimizer", {}).items()}
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})


def neighbours_loss(vectors: Tensor, exists: Tensor) -> tuple[Tensor, int, int]:
    """Return the InfoNCE loss over time: a pair of neighbouring points against all other points of the episode.

    Args:
        vectors: unit vectors [n, P, D] of points in the order of time.
        exists: bool [n, P], True for points that exist; they come first.

    Returns:
        The loss, summed over the pairs (point, neighbour) that have a negative; how many of these pairs are more alike
        than all their negatives; and the number of these pairs.
    """
    alike = vectors @ vectors.transpose(1, 2) / _TEMPERATURE
    number = torch.arange(exists.shape[1], device=exists.device)
    apart = (number[:, None] - number).abs()
    both = exists[:, :, None] & exists[:, None, :]
    negative = both & (apart > 1)
    others = alike.masked_fill(~negative, -1e4)  # not -inf, whose gradient would be NaN
    pairs = both & (apart == 1) & negative.any(2, keepdim=True)
    loss = F.softplus(others.logsumexp(2, keepdim=True) - alike)[pairs].sum()
    hits = (alike > others.amax(2, keepdim=True))[pairs].sum()
    return loss, int(hits), int(pairs.sum())


def _sample(count: int, most: int, *seeds: int) -> list[int]:
    """Return up to `most` different random numbers from 0 to `count` - 1, sorted, drawn with the seeds `seeds`."""
    return np.sort(np.random.Generator(np.random.PCG64(seeds)).permutation(count)[:most]).tolist()


def _average_gradients(encoder: nn.Module, count: int, group: WorkerGroup) -> None:
    """Replace gradients of this rank's summed loss over `count` pairs by those of the mean over all ranks' pairs."""
    parameters = list(encoder.parameters())
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in parameters]
    summed = torch.cat([*(grad.flatten() for grad in grads), grads[0].new_tensor([count])])
    group.all_reduce(summed)
    summed /= summed[-1].clone().clamp(min=1)
    parts = summed[:-1].split([param.numel() for param in parameters])
    for param, part in zip(parameters, parts, strict=True):
        param.grad = part.view_as(param).clone()


def _seen(calls: Jagged, ends: Tensor, episode: Tensor, place: Tensor) -> Tensor:
    """Return [N, ...], for entry i the observation before policy call `place[i]` of episode `episode[i]`.

    A number after the last call stands for the episode's final observation, which is in `ends`.
    """
    after = place >= calls.lengths[episode]
    observations = ends.new_empty(len(place), *ends.shape[1:])
    observations[after] = ends[episode[after]]
    observations[~after] = calls.values[(calls.offsets[episode] + place)[~after]]
    return observations
