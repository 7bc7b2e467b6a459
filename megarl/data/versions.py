"""The weight version that sampled each token, stored as runs: a sample of one version is one run.

    tokens of a sample    t0 t1 t2 t3 t4 t5 t6
    their versions         3  3  3  3  4  4  4
    runs                  [3, 4], [4, 3]           [version, tokens]

A batch has the runs as two Jagged fields with the same offsets, so their size does not grow with the tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.data.batch import Batch, Jagged

#: [version, tokens] of each run, in the order of the tokens; plain JSON.
VersionRuns: TypeAlias = list[list[int]]
#: Jagged int64 fields with one entry per run: the run's version, and its number of tokens.
VERSION_FIELDS = ("weight_versions", "version_tokens")


def runs_of(versions: Iterable[int]) -> VersionRuns:
    """Return runs [version, tokens] for a list of one version per token.

    >>> runs_of([3, 3, 4])
    [[3, 2], [4, 1]]
    """
    return [[version, sum(1 for _ in same)] for version, same in itertools.groupby(versions)]


def append_runs(runs: VersionRuns, more: VersionRuns) -> None:
    """Append `more`, the runs of a sequence's next tokens, to `runs` in place, and merge runs of the same version.

    A run is [weight version, number of tokens].

    >>> runs = [[3, 2]]
    >>> append_runs(runs, [[3, 1], [4, 5]])
    >>> runs
    [[3, 3], [4, 5]]
    """
    for version, tokens in more:
        if runs and runs[-1][0] == version:
            runs[-1][1] += tokens
        else:
            runs.append([version, tokens])


def first_runs(runs: VersionRuns, tokens: int) -> VersionRuns:
    """Return the runs of the first `tokens` tokens.

    >>> first_runs([[3, 2], [4, 5]], 3)
    [[3, 2], [4, 1]]
    """
    first: VersionRuns = []
    for version, length in runs:
        if tokens > 0:
            first.append([version, min(length, tokens)])
        tokens -= length
    return first


def version_values(rows: Sequence[VersionRuns]) -> dict[str, Jagged]:
    """Return the VERSION_FIELDS of a batch from each sample's version runs, which cover all its response tokens."""
    import torch

    from megarl.data.batch import Jagged

    version_field, tokens_field = VERSION_FIELDS
    versions = Jagged.from_list([[version for version, _ in runs] for runs in rows], dtype=torch.int64)
    tokens = torch.tensor([tokens for runs in rows for _, tokens in runs], dtype=torch.int64)
    return {version_field: versions, tokens_field: versions.like(tokens)}


def token_versions(samples: Batch) -> Jagged:
    """Return the weight version of each response token: int64 Jagged with the offsets of `response_ids`.

    Tokens of the environment have the version of the turn before them.
    """
    import torch

    versions, tokens = (samples[name].values for name in VERSION_FIELDS)
    return samples["response_ids"].like(torch.repeat_interleave(versions, tokens))


def tokens_by_version(samples: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Count the tokens selected by `mask` in each version run.

    Args:
        mask: bool [N], over all N response tokens of the samples.

    Returns:
        For all R runs: the weight version and the selected tokens, int64 [R] each.
    """
    from megarl.data.batch import Jagged

    versions, tokens = (samples[name].values for name in VERSION_FIELDS)
    return versions, Jagged.from_lengths(mask, tokens).sum()
