"""A server in a process of its own, whose scheduler is a process below it: it answers by the rule of answers.py.

    python -S -m tests.rollout.process_server FOLDER ARGUMENTS OF sglang.launch_server

Like SGLang's, its HTTP side lives on when the scheduler is stopped, and says on `/health` that it is well. The
scheduler (`cat`) has to give back a line for every sample, and for `/health_generate`.

FOLDER:  `scheduler_PORT`   process id of the scheduler, when it listens
         `asked_PORT`       a line for every sample: its seed
         `open`             once it is there, samples whose seed is odd are drawn, too

Nothing of SGLang, or of megarl's engine, is tested with it but what the run does with servers that hang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.rollout.answers import answer

_FOLDER = Path(sys.argv[1])
_PORT = int(sys.argv[sys.argv.index("--port") + 1])
_scheduler = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
_turn = threading.Lock()


def schedule() -> None:
    """Wait for the scheduler."""
    assert _scheduler.stdin is not None
    assert _scheduler.stdout is not None
    with _turn:
        _scheduler.stdin.write(b"token\n")
        _scheduler.stdin.flush()
        _scheduler.stdout.readline()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/health_generate":
            schedule()
        self._send({})

    def do_POST(self) -> None:
        assert self.headers["Authorization"] == f"Bearer {os.environ['MEGARL_SERVER_KEY']}"
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seed = payload["sampling_params"]["sampling_seed"]
        with (_FOLDER / f"asked_{_PORT}").open("a") as asked:
            asked.write(f"{seed}\n")
        while seed % 2 and not (_FOLDER / "open").exists():
            time.sleep(0.02)
        schedule()
        self._send(answer(payload, "ok"))

    def _send(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None: ...


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", _PORT), Handler)
    (_FOLDER / f"scheduler_{_PORT}").write_text(f"{_scheduler.pid}")
    server.serve_forever()
