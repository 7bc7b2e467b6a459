"""One SGLang server as a child process: start, health, stop. Its log is `RUN/servers/server_K.log`.

A server on several machines has a node process on each of them. Node 0 answers requests; the logs of the other nodes
are `server_K_node1.log`, ...
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.api import ServerApi
from megarl.system.compat.sglang import (
    ALL_LOADERS,
    cpu_arguments,
    find_python,
    server_command,
    server_environment,
    sglang_version,
    shared_memory,
)
from megarl.system.errors import ConfigError, ServerError
from megarl.system.numa import on_all_cores
from megarl.system.processes import ending, free_port

_CPU_TOKENS = 65536  # tokens of the KV cache on a CPU, where SGLang would allocate a share of the whole memory
_GRACE_S = 10.0  # seconds after SIGTERM in which a server on a GPU releases memory that it shares with other processes
_PORT_TRIES = 3
POLL_S = 0.5
HEALTH_S = 25.0  # seconds for a health check: /health answers within 20 s, whether the server is healthy or not
_CLASHES = ("address already in use", "is already in use", "eaddrinuse")


@dataclass(frozen=True)
class ServerSpec:
    """The start settings of one process of a server.

    Attributes:
        model: Hugging Face folder; with `random_weights` only its config is read.
        dtype: dtype of weights and computation: float32, bfloat16 or float16.
        host: address to listen on.
        api_key: required in every request; not shown in `repr`.
        cuda: whether the server runs on GPUs.
        gpus: names of the GPUs that the server sees, as in CUDA_VISIBLE_DEVICES; None: the GPUs of this process.
        random_weights: whether to start with random weights, because the first weight update sends all weights.
        node: index of the process among the server's machines.
        peers: addresses of the server's machines.
    """

    number: int
    config: SGLangConfig
    model: Path
    dtype: str
    host: str
    api_key: str = field(repr=False)
    log_dir: Path
    cuda: bool
    gpus: tuple[str, ...] | None = None
    random_weights: bool = False
    node: int = 0
    peers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The server's name in messages."""
        return f"server {self.number}"

    @property
    def part(self) -> str:
        """The name of this process in messages; on several machines it includes node and address."""
        nnodes = self.config.nnodes
        return "the process" if nnodes == 1 else f"the process of node {self.node} of {nnodes}, on {self.host},"

    @property
    def own_gpus(self) -> tuple[str, ...]:
        """The GPUs of the server's ranks on this machine; it may see more GPUs, whose memory it maps."""
        return (self.gpus or ())[: self.config.ranks_per_node]

    @property
    def log(self) -> Path:
        """The log file; a restart appends to it."""
        return self.log_dir / f"server_{self.number}{f'_node{self.node}' if self.node else ''}.log"

    def arguments(self, port: int, meeting: str = "") -> list[str]:
        """Return the arguments of `sglang.launch_server`.

        Args:
            meeting: address at which the node processes of a server meet; empty: the server has one process.
        """
        c = self.config
        values = {
            "--model-path": self.model,
            "--dtype": self.dtype,
            "--host": self.host,
            "--port": port,
            "--tp-size": c.tp_size,
            "--ep-size": c.ep_size,
            "--attn-dp-size": None if c.attention_dp == 1 else c.attention_dp,
            "--nnodes": c.nnodes if meeting else None,
            "--node-rank": self.node if meeting else None,
            "--dist-init-addr": meeting or None,
            "--mem-fraction-static": c.memory_fraction or (None if self.cuda else 0.1),
            "--max-total-tokens": c.max_total_tokens or (None if self.cuda else _CPU_TOKENS),
            "--kv-cache-dtype": None if c.kv_cache_dtype == "auto" else c.kv_cache_dtype,
            "--context-length": c.context_length,
            "--attention-backend": c.attention_backend or (None if self.cuda else "torch_native"),
            "--load-format": "dummy" if self.random_weights else None,
            # SGLang 0.5.23 refuses to start with CUDA graphs of the prefill if graphs are to release their memory
            "--cuda-graph-backend-prefill": "disabled" if self.cuda and c.releases_graphs else None,
        }
        if (draft := c.speculative) is not None:
            values |= {
                "--speculative-algorithm": draft.algorithm,
                "--speculative-draft-model-path": draft.draft_path,
                # read the draft model's weights even if the main model starts with random ones (`dummy`)
                "--speculative-draft-load-format": None if draft.draft_path is None else "auto",
                "--speculative-num-steps": draft.steps,
                "--speculative-eagle-topk": draft.topk,
                "--speculative-num-draft-tokens": draft.draft_tokens,
            }
        listed = [str(part) for pair in values.items() if pair[1] is not None for part in pair]
        switches = {
            "--skip-tokenizer-init": True,  # the server receives and returns token ids, no text
            "--enable-deterministic-inference": c.deterministic,
            "--enable-memory-saver": c.colocated and self.cuda,
            # no update restores the draft model after its memory was freed
            "--enable-draft-weights-cpu-backup": c.colocated and self.cuda and self._has_draft_model,
        }
        chosen = [switch for switch, wanted in switches.items() if wanted]
        # A fused shared expert would be one more expert, and checksums and recorded routes expect the model's experts.
        chosen += ["--disable-shared-experts-fusion", "--custom-weight-loader", *ALL_LOADERS]
        return [*listed, *chosen, *([] if self.cuda else cpu_arguments()), *c.extra_args]

    @property
    def _has_draft_model(self) -> bool:
        return self.config.speculative is not None and self.config.speculative.draft_path is not None


class ServerProcess:
    """The process that runs a ServerSpec. Start it from the main thread, so that the kernel ends it with this process.

    Attributes:
        api: the server's address; the port changes with every start.
        instance: name of the server's shared memory; changes with every start.
        clashed: whether the process ended because its port was taken; the next start chooses another port.
    """

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.api = ServerApi("", spec.api_key, spec.name)
        self._process: subprocess.Popen[bytes] | None = None
        self.instance = ""
        self._temporary: Path | None = None
        self._log_start, self._clashes, self.clashed = 0, 0, False
        self._python = find_python(spec.config.python, cuda=spec.cuda)
        sglang_version(self._python)

    def meeting(self) -> str:
        """Return an address of this machine at which the node processes of the server can meet.

        Raises:
            ConfigError: this machine does not have the address `rollout.sglang.host`.
        """
        return f"{self.spec.host}:{self._free_port()}"

    def _free_port(self) -> int:
        try:
            return free_port(self.spec.host)
        except OSError as error:
            raise ConfigError(
                f"servers cannot listen on this address: {error}",
                where="rollout.sglang.host",
                found=self.spec.host,
                allowed="the address of an interface of this machine, or null",
                fix="set rollout.sglang.host=null",
            ) from error

    def start(self, meeting: str = "") -> None:
        """Start the process and return at once, before the server answers.

        Args:
            meeting: address at which the node processes of a server meet; empty: the server has one process.

        Raises:
            ConfigError: this machine does not have the address `rollout.sglang.host`.
        """
        spec, self.clashed = self.spec, False
        port = self._free_port()
        self.api = ServerApi(f"http://{spec.host}:{port}", spec.api_key, spec.name)
        self.instance = f"megarl_{secrets.token_hex(8)}"
        if not spec.cuda:  # on a GPU the system's temporary folder is used, where compilers cache results
            self._temporary = Path(tempfile.mkdtemp(prefix="megarl-"))  # paths of sockets must be short
        environment = server_environment(
            os.environ,
            python=self._python,
            api_key=spec.api_key,
            instance=self.instance,
            cuda=spec.cuda,
            tp_size=spec.config.tp_size,
            gpus=spec.gpus,
            colocated=spec.config.colocated,
            temporary=self._temporary,
        )
        if spec.cuda and spec.config.releases_graphs:
            environment.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
        if spec.config.attention_dp > 1 and spec.peers:
            # The server's processes listen on TCP without a password, and unpickle what they receive, so they must
            # accept connections from the server's own machines only.
            environment |= {"SGLANG_ZMQ_ALLOWED_PEERS": ",".join(spec.peers), "SGLANG_ZMQ_SOURCE_IP": spec.host}
        spec.log_dir.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            self._log_start = log.seek(0, os.SEEK_END)
            self._process = _start_process(
                server_command(self._python, spec.arguments(port, meeting)), environment, log
            )

    @property
    def pid(self) -> int | None:
        """The process id, which is also the id of its process group; None: the process is not running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def is_started(self) -> bool:
        """Whether the process was started and `stop` was not called since; it may have ended by itself."""
        return self._process is not None

    @property
    def ended_by_itself(self) -> bool:
        """Whether the process exited without a signal or a port clash, so that a restart would exit too."""
        code = None if self._process is None else self._process.poll()
        return code is not None and code >= 0 and not self.clashed

    def check(self) -> None:
        """Check that the process runs; start it again on another port if its port was taken meanwhile.

        Raises:
            ServerError: the process ended; the message quotes the log.
        """
        code = None if self._process is None else self._process.poll()
        if self._process is not None and code is None:
            return
        text = self._log_text()
        if any(clash in text.lower() for clash in _CLASHES) and self._clashes < _PORT_TRIES:
            self._clashes += 1
            if self.spec.config.nnodes == 1:
                self.stop(0)
                self.start()
                return
            self.clashed = True  # all node processes must restart, because they meet at another address
        state = "was stopped" if code is None else f"ended ({ending(code)})"
        reason = f"{self.spec.part} {state}; see {self.spec.log}"
        tail = "\n".join(f"  | {line}" for line in text.strip().splitlines()[-5:])
        raise ServerError(self.spec.name, self.api.url, "start", f"{reason}\n{tail}" if tail else reason)

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """End the server and all its processes, and remove their shared memory and temporary files.

        Args:
            grace_s: seconds between SIGTERM and SIGKILL; 0: SIGKILL at once, for a server that may hang.
        """
        if self._process is None:
            return
        # SGLang checks for a SIGTERM only every five seconds, and without a GPU it has nothing to release.
        if grace_s > 0 and self.spec.cuda and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        for file in shared_memory(self.instance):
            file.unlink(missing_ok=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _log_text(self) -> str:
        """Return the server's log since its last start."""
        with contextlib.suppress(OSError), self.spec.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode("utf-8", "replace")
        return ""


def health(api: ServerApi, end: float) -> str | None:
    """Send one health check, and return why the server does not answer it; None: the server answers.

    The check waits `HEALTH_S` seconds, or until `time.monotonic()` is `end` if that is earlier.
    """
    try:
        left = max(end - time.monotonic(), POLL_S)
        api.call("/health", deadline_s=min(HEALTH_S, left), phase="health", method="GET")
    except ServerError as error:
        return error.reason
    return None


def _start_process(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start `command` as a child of this process that writes to `log`, in its own process group, and return it."""
    settings: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
    with on_all_cores():  # the server's GPUs may be on another NUMA node than this process's GPU
        return subprocess.Popen(command, env=environment, start_new_session=True, **settings)
