"""Seeds of samples: stable over processes, layouts, batch orders and Python versions."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, uid: str, sample: int, turn: int = 0) -> int:
    """Seed in [0, 2**63) of one turn of sample `sample` of prompt `uid`.

    `uid` names the prompt and the epoch it is met in. The training step does not enter: a sample is the same whenever
    it is sampled, earlier or later than its step.

    >>> sample_seed(0, "a", 0) == sample_seed(0, "a", 0) != sample_seed(0, "a", 1)
    True
    """
    return _seed("sample", run_seed, uid, sample, turn)


def env_seed(run_seed: int, uid: str) -> int:
    """Seed in [0, 2**63) of the environment of prompt `uid`; its samples share it, and start from one state."""
    return _seed("env", run_seed, uid)


def teacher_seed(run_seed: int, uid: str) -> int:
    """Seed in [0, 2**63) of which teacher prompt `uid` has; its samples share it."""
    return _seed("teacher", run_seed, uid)


def token_seed(run_seed: int, update: int, sample_id: str) -> int:
    """Seed in [0, 2**63) of what a loss draws for the tokens of a sample in optimizer step `update`."""
    return _seed("tokens", run_seed, update, sample_id)


def order_seed(run_seed: int, role: str, step: int, epoch: int) -> int:
    """Seed in [0, 2**63) of the order in which a role trains on the prompts of a step."""
    return _seed("order", run_seed, role, step, epoch)


def resampling_seed(run_seed: int, step: int) -> int:
    """Seed in [0, 2**63) of the draws that make the batch of a step out of its samples."""
    return _seed("resampling", run_seed, step)


def _seed(*parts: str | int) -> int:
    # Joined by a byte that neither numbers nor our uids hold, so different parts give different texts.
    text = "\x1f".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
