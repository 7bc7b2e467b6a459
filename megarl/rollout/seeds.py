"""Seeds of samples: stable over processes, layouts, batch orders and Python versions."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, step: int, uid: str | int, i: int) -> int:
    """Seed in [0, 2**63) of sample `i` of prompt `uid` at training step `step`.

    >>> sample_seed(0, 1, "a", 0) == sample_seed(0, 1, "a", 0) != sample_seed(0, 1, "a", 1)
    True
    """
    # Fields are joined by a byte that int() and our uids never hold, so different tuples give different texts.
    text = "\x1f".join((str(run_seed), str(step), str(uid), str(i)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
