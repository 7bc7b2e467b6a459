"""Host memory for copies from and to a device: page-locked, of exactly the needed size, and reused.

torch's own page-locked memory comes in powers of two: 9 GB of optimizer state would take 16. Locking takes seconds, so
a block is kept for the next use of the same kind.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.system.device import has_cuda
from megarl.system.errors import UserError

_ALIGNED = 512  # every copy begins at a multiple of this many bytes


class HostArena:
    """A block of pinned host memory that is reused for copies from a GPU; without a GPU, ordinary memory each time."""

    def __init__(self, instead: str = "") -> None:
        """Create an arena without memory; `instead` is a setting with which this memory is not needed, for errors."""
        self._instead = instead
        self._block = torch.empty(0, dtype=torch.uint8)
        self._unlock: weakref.finalize | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes of the block that is kept for reuse."""
        return self._block.nbytes

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return uint8 tensors of `sizes` bytes each. Tensors of the previous call must no longer be used."""
        ends = list(itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes))
        total = ends[-1] if ends else 0
        block = self._locked(total) if has_cuda() else torch.empty(total, dtype=torch.uint8)
        return [block[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]

    def close(self) -> None:
        """Unlock and free the memory that is kept for reuse."""
        if self._unlock is not None:
            self._unlock()
        self._block = torch.empty(0, dtype=torch.uint8)

    def _locked(self, nbytes: int) -> Tensor:
        if self._block.nbytes < nbytes:
            self.close()
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):  # the kernel may lack huge pages, which lock faster
                pages.madvise(mmap.MADV_HUGEPAGE)
            block = torch.frombuffer(pages, dtype=torch.uint8)
            runtime = torch.cuda.cudart()
            code = int(runtime.cudaHostRegister(block.data_ptr(), nbytes, 0))
            if code != 0:
                instead = f", or set {self._instead}" if self._instead else ""
                raise UserError(
                    f"cannot lock {nbytes / 1e9:,.1f} GB of host memory for copies from the GPU (CUDA error {code})",
                    allowed="at most the free memory of the machine or container",
                    fix=f"raise the memory of the machine or container{instead}",
                )
            self._block, self._unlock = block, weakref.finalize(self, runtime.cudaHostUnregister, block.data_ptr())
            self._unlock.atexit = False
        return self._block
