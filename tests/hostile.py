"""What code that a model wrote may do in its process: writes messages of all kinds into every descriptor that it finds.

Of the standard library only, so that interpreters without megarl's packages can load it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import struct
import time


class _Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


def framed(text: bytes, body: bytes = b"") -> bytes:
    """A message as our processes frame theirs."""
    return struct.pack("<II", len(text), len(body)) + text + body


def messages(marker: str) -> dict[str, bytes]:
    """Bytes by kind; a pickle of them that is loaded makes the file `marker`."""
    bomb = pickle.dumps(("scored", 0, _Bomb(marker)))
    return {
        "pickle": bomb,
        "pickle of multiprocessing": struct.pack("!i", len(bomb)) + bomb,
        "pickle as a header": framed(bomb),
        "pickle as a body": framed(b"{}", bomb),
        "oversized": struct.pack("<II", 0xFFFFFFF0, 0) + b"{" * 100,
        "deep": framed(b'{"kind":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
        "nested": framed(json.dumps({"kind": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}).encode()),
        "truncated": framed(b'{"kind": "scored", "index": 0, "result": {"overall": 1}}')[:-9],
        "garbage": bytes(range(256)) * 8,
        "text": b"1.0\n",
        "list": framed(b"[1]"),
        "nan": framed(b'{"kind": "scored", "index": 0, "result": {"overall": NaN}}'),
        "digits": framed(b'{"kind": "scored", "index": 0, "result": {"overall": 1' + b"0" * 4000 + b"}}"),
        "infinite": framed(b'{"kind": "scored", "index": 0, "result": {"overall": 1e999}}'),
        "long text": framed(
            b'{"kind": "scored", "index": 0, "result": {"overall": 1, "extracted": "' + b"x" * 5000 + b'"}}'
        ),
        "itself": framed(b'{"kind": "scored", "index": 0, "result": {"overall": 1}}'),
        "itself and the next": b"".join(
            framed(b'{"kind": "scored", "index": %d, "result": {"overall": 1}}' % index) for index in range(2)
        ),
        "another sample": framed(b'{"kind": "scored", "index": 7, "result": {"overall": 1}}'),
        "other types": framed(b'{"kind": ["scored"], "index": {}, "call": 5, "error": {}, "arrays": {}}'),
        "ready again": framed(b'{"kind": "ready"}'),
        "refused late": framed(b'{"kind": "refused", "text": "stop the run"}'),
        "idle too early": framed(b'{"kind": "idle"}'),
        "no array": framed(b'{"call": "step", "arrays": {"state": ["|O8", [1000000000000]]}}'),
    }


def attack(marker: str, kind: str) -> None:
    """Write this kind of message into every descriptor of this process. After one that is cut it stops."""
    data = messages(marker)[kind]
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.set_blocking(int(name), True)
            os.write(int(name), data)
    if kind == "truncated":
        os.kill(os.getpid(), signal.SIGSTOP)  # nothing more comes, and nothing closes
        time.sleep(60)
