"""Tensors of a checkpoint that no parameter is made of: without them the model differs from the published one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megarl.architectures.tensors import HEAD
from megarl.architectures.vision import STATE_PROJECTOR, VisionShape
from megarl.errors import ConfigError, count

_SHOWN = 5
#: RoPE's frequencies, which older versions of transformers saved; config.json implies them.
_COMPUTED = ".rotary_emb.inv_freq"
_SCALES = "_scale_inv"


def refuse_unread(names: Iterable[str], read: Collection[str], sight: VisionShape | None, where: str) -> None:
    """Refuse a checkpoint with tensors that no parameter uses.

    A vocabulary head may exist twice (tied), and a critic built on a policy may omit it: another check covers it.

    Args:
        names: of all tensors of the checkpoint.
        read: those that the model uses.
        sight: vision part of a robot policy, whose towers have unused parts.
        where: the folder.

    Raises:
        ConfigError: there are unused tensors; the message names the first ones.
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
