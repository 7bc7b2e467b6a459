"""Seeds of samples: stable over processes, layouts, batch orders and Python versions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Seeds:
    """Derives the seeds of everything random in a run from the run's seed and from names, not from rank numbers.

    `uid` names a prompt in one epoch. The seeds of samples do not depend on the training step, so that a sample is the
    same whether it is generated earlier or later than its step. All seeds are in [0, 2**63).

    >>> Seeds(0).sample("a", 0) == Seeds(0).sample("a", 0) != Seeds(0).sample("a", 1)
    True
    """

    run: int

    def sample(self, uid: str, sample: int, turn: int = 0) -> int:
        """Return the seed of segment `turn` of sample number `sample` of prompt `uid`: a turn, or its rest after an
        interruption, counted over the whole sample."""
        return self._seed("sample", uid, sample, turn)

    def env(self, uid: str) -> int:
        """Return the seed of the environments of prompt `uid`, whose samples all start from the same state."""
        return self._seed("env", uid)

    def expert(self, uid: str) -> int:
        """Return the seed with which the expert responses of prompt `uid` are drawn."""
        return self._seed("expert", uid)

    def teacher(self, uid: str) -> int:
        """Return the seed with which a teacher is chosen for all samples of prompt `uid`."""
        return self._seed("teacher", uid)

    def tokens(self, update: int, sample_id: str) -> int:
        """Return the seed of a loss's random numbers for the tokens of a sample in optimizer step `update`."""
        return self._seed("tokens", update, sample_id)

    def order(self, role: str, step: int, epoch: int) -> int:
        """Return the seed of the order in which a role trains on the prompts of a step."""
        return self._seed("order", role, step, epoch)

    def replay(self, step: int) -> int:
        """Return the seed with which a step draws the groups that it trains on again."""
        return self._seed("replay", step)

    def resampling(self, step: int) -> int:
        """Return the seed with which the batch of a step is resampled from its samples."""
        return self._seed("resampling", step)

    def _seed(self, kind: str, *parts: str | int) -> int:
        # No number or uid contains the separator, so different parts give different texts.
        text = "\x1f".join(map(str, (kind, self.run, *parts)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
