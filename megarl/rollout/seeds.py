"""Seeds of samples: stable over processes, layouts, batch orders and Python versions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Seeds:
    """Seeds of all that is random in a run: they follow from its seed and from names, not from ranks or places.

    `uid` names a prompt and the epoch it is met in. The training step does not enter the seeds of samples: a sample is
    the same whenever it is sampled, earlier or later than its step. All seeds are in [0, 2**63).

    >>> Seeds(0).sample("a", 0) == Seeds(0).sample("a", 0) != Seeds(0).sample("a", 1)
    True
    """

    run: int

    def sample(self, uid: str, sample: int, turn: int = 0) -> int:
        """Seed of one turn of sample number `sample` of prompt `uid`."""
        return self._seed("sample", uid, sample, turn)

    def env(self, uid: str) -> int:
        """Seed of the environment of prompt `uid`; its samples share it, and start from one state."""
        return self._seed("env", uid)

    def teacher(self, uid: str) -> int:
        """Seed of which teacher prompt `uid` has; its samples share it."""
        return self._seed("teacher", uid)

    def tokens(self, update: int, sample_id: str) -> int:
        """Seed of what a loss draws for the tokens of a sample in optimizer step `update`."""
        return self._seed("tokens", update, sample_id)

    def order(self, role: str, step: int, epoch: int) -> int:
        """Seed of the order in which a role trains on the prompts of a step."""
        return self._seed("order", role, step, epoch)

    def resampling(self, step: int) -> int:
        """Seed of the draws that make the batch of a step out of its samples."""
        return self._seed("resampling", step)

    def _seed(self, kind: str, *parts: str | int) -> int:
        # Joined by a byte that neither numbers nor our uids hold, so different parts give different texts.
        text = "\x1f".join(map(str, (kind, self.run, *parts)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
