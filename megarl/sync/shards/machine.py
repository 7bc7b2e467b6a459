"""The name by which ranks of trainer and servers find out whether they run on one machine and can share memory.

Servers' processes, which lack megarl, load this file too, so it imports nothing of megarl.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHARED_MEMORY = Path("/dev/shm")


def machine_name() -> str:
    """Return a name that no other machine of the run has, even if their host names are equal, as in cloned images: the
    host name, and a hash of the id that Linux draws at each boot and of the device number of /dev/shm. Where a sandbox
    hides the id, machines of one host name may have one name.

    Containers on one machine have the same name only if they have one host name and one /dev/shm.
    """
    host, seen = socket.gethostname(), []
    # the id exists only on Linux, where a sandbox may hide it; /dev/shm may be missing too
    with contextlib.suppress(OSError):
        seen.append(_BOOT_ID.read_text().strip())
    with contextlib.suppress(OSError):
        seen.append(str(os.stat(_SHARED_MEMORY).st_dev))
    return f"{host}-{hashlib.sha256(' '.join(seen).encode()).hexdigest()[:12]}"
