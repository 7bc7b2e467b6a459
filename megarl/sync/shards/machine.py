"""The name by which ranks of trainer and servers find out whether they run on one machine.

Servers' processes, which lack megarl, load this file too, so it imports nothing of megarl.
"""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_name() -> str:
    """Return a name that no other machine of the run has, even if their host names are equal, as in cloned images: the
    host name and a hash of the id that Linux draws at each boot."""
    host = socket.gethostname()
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # the id exists only on Linux, where a sandbox may hide it
        return host
    return f"{host}-{hashlib.sha256(boot.encode()).hexdigest()[:12]}"
