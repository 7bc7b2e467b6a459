"""Tensors of a checkpoint that no parameter is made of: a model without them is another one than was published."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megarl.architectures.tensors import HEAD
from megarl.architectures.vision import STATE_PROJECTOR, VisionShape
from megarl.errors import ConfigError, count

_SHOWN = 5
#: RoPE's frequencies, which older versions of transformers saved; config.json says them.
_COMPUTED = ".rotary_emb.inv_freq"
_SCALES = "_scale_inv"


def refuse_unread(names: Iterable[str], read: Collection[str], sight: VisionShape | None, where: str) -> None:
    """Refuse a checkpoint with tensors that nothing reads.

    A vocabulary head may be there twice (tied), or a critic built on a policy leave it out: it is another check's.

    Args:
        names: of all tensors of the checkpoint.
        read: of those that the model is made of.
        sight: of a robot policy, whose towers have parts that are never run.
        where: the folder.

    Raises:
        ConfigError: there are some; the first of them are named.
    """
    unread = [
        name
        for name in sorted(set(names) - set(read))
        if not name.endswith((_COMPUTED, HEAD))
        and name.removesuffix(_SCALES) not in read
        and not (sight is not None and sight.passed_over(name))
    ]
    if not unread:
        return
    fix = "check that config.json belongs to these files, and that the model is of a supported kind"
    if any(name.startswith(STATE_PROJECTOR) for name in unread):
        fix = "set use_proprio to true in config.json, and proprio_dim to the numbers of the robot's state"
    raise ConfigError(
        f"the checkpoint has {count(len(unread), 'tensor')} that nothing reads: without them it is another model",
        where=where,
        found=", ".join(unread[:_SHOWN]) + (", ..." if len(unread) > _SHOWN else ""),
        allowed="tensors of the model that config.json describes",
        fix=fix,
    )
