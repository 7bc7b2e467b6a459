"""Random ragged cases with holes, masked rows and one-token rows, in padded and packed form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor


@dataclass
class Case:
    """`padding` fills what no sequence owns; the mask also has holes inside sequences."""

    lengths: list[int]
    mask: Tensor
    rewards: Tensor
    values: Tensor
    logp: Tensor
    old_logp: Tensor
    ref_logp: Tensor
    advantages: Tensor
    uid: list[str]
    greedy: Tensor
    parts: Tensor

    def lists(self, name: str) -> list[list]:
        return getattr(self, name).tolist()

    @property
    def owned(self) -> Tensor:
        return torch.arange(self.mask.shape[1]) < torch.tensor(self.lengths)[:, None]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def pack(self, x: Tensor) -> Tensor:
        return x[self.owned]

    def select(self, order: list[int]) -> Case:
        picked = {
            name: getattr(self, name)[order]
            for name in ("mask", "rewards", "values", "logp", "old_logp", "ref_logp", "advantages", "greedy", "parts")
        }
        return Case(lengths=[self.lengths[i] for i in order], uid=[self.uid[i] for i in order], **picked)


def make_case(
    seed: int, groups: int = 3, size: int = 4, width: int = 9, holes: bool = True, uneven: bool = False
) -> Case:
    """`groups` of `size` samples each in any order, or `uneven` ones of at least two."""
    g = torch.Generator().manual_seed(seed)
    rows = groups * size
    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    lengths[0], lengths[1] = 1, width
    mask = torch.arange(width) < lengths[:, None]
    if holes:
        mask &= torch.rand(rows, width, generator=g) < 0.7
        mask[rows - 1] = False
    mask[0, 0] = True

    def noise(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(rows, width, generator=g, dtype=torch.float64)

    logp = -noise().abs()
    order = torch.randperm(rows, generator=g)
    if uneven:
        order = order.where(order < 2 * groups, torch.randint(0, groups, (rows,), generator=g))
    return Case(
        lengths=lengths.tolist(),
        mask=mask,
        rewards=noise(),
        values=noise(),
        logp=logp,
        old_logp=-(logp + noise(0.3)).abs(),
        ref_logp=logp + noise(0.3),
        advantages=noise(),
        uid=[f"g{int(i) % groups}" for i in order],
        greedy=torch.randn(rows, generator=g, dtype=torch.float64),
        parts=torch.randint(0, 3, (rows, 2), generator=g).double(),
    )


cases = st.builds(
    make_case,
    *(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 5), st.integers(1, 12), st.booleans(), st.booleans()),
)


def poisoned(x: Tensor, mask: Tensor, value: float = float("nan")) -> Tensor:
    return torch.where(mask, x, value)


def close(actual: Tensor, expected: list | Tensor, tol: float = 1e-9) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64).to(actual)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)
