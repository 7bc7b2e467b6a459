"""Prepares a process to start a sandbox: it binds folders and becomes another user (Linux).

A sandbox of root is started by a user without rights, because the user in the sandbox has the rights of the user who
started it: root could read root's files and write kernel settings in /proc.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

#: The user and group without rights.
NOBODY = 65534
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def is_root() -> bool:
    """Return whether this process has root's rights."""
    return sys.platform == "linux" and os.geteuid() == 0


def enter(mounts: Sequence[Sequence[str]], *, as_nobody: bool) -> None:
    """Bind files and folders in a mount namespace of this process's own, and become `NOBODY`.

    Args:
        mounts: (source, target); the new user may be unable to reach the source.

    Raises:
        OSError: this process lacks the rights to mount or to change its user.
    """
    if mounts:
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.unshare(_CLONE_NEWNS), "unshare")
        _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")
        for source, target in mounts:
            _check(libc.mount(os.fsencode(source), os.fsencode(target), None, _MS_BIND | _MS_REC, None), source)
    if as_nobody:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{os.strerror(number)}; root needs CAP_SYS_ADMIN to start a sandbox", what)
