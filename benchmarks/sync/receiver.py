"""A process that takes weight updates the way an SGLang server does, and holds the tensors in a dictionary.

    python -m megarl.benchmarks.sync.receiver PORT_FILE

It has no model: names, shapes and bytes are kept as they come. The bench measures transports against it, and
tests use it where a server that takes a minute to start would add nothing.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import importlib
import io
import json
import os
import pickle
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

from megarl.system.compat.sglang import ALL_LOADERS, LOADERS

_ADMITTED = {
    ("types", "SimpleNamespace"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "uint8"),
    ("torch", "bfloat16"),
    ("torch", "float16"),
    ("torch", "float32"),
    ("torch", "float8_e4m3fn"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name} is not admitted")
        value = super().find_class(module, name)
        return _rebuild_cuda if name == "rebuild_cuda_tensor" else value


def _rebuild_cuda(*arguments: Any) -> Tensor:
    """Rebuild a CUDA tensor whose device comes as a UUID."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    number = next(
        i for i in range(torch.cuda.device_count()) if str(torch.cuda.get_device_properties(i).uuid) == arguments[6]
    )
    given = (*arguments[:6], number, *arguments[7:])
    return rebuild_cuda_tensor(*given)


class _Model:
    """A receiver as a server's loader sees its model."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def parameters(self) -> Iterator[Tensor]:
        # a server's model has parameters before the first update; one empty tensor stands for them here
        yield torch.empty(0, device=self.receiver.device)
        yield from self.receiver.tensors.values()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.receiver.tensors.items()

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(())

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            self.receiver.keep(name, tensor)


class Refused(Exception):
    """The error that is answered with `success: false`."""


class Receiver:
    """The state of one server: tensors by name, version, session, process groups."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        self.tensors: dict[str, Tensor] = {}
        self.version = "default"
        self.open = self.paused = False
        self.groups: dict[str, tuple[dist.ProcessGroup, dist.TCPStore]] = {}
        self.log: list[str] = []
        self.model = _Model(self)

    def handle(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer one call. `log` keeps the paths."""
        self.log.append(path)
        action = getattr(self, "do_" + path.split("?")[0].strip("/"), None)
        if action is None:
            raise Refused(f"no such path {path}")
        return action(**body) or {"success": True, "message": ""}

    def do_pause_generation(self, mode: str) -> None:
        """Stop."""
        self.paused = True

    def do_continue_generation(self, torch_empty_cache: bool = True) -> None:
        """Go on."""
        self.paused = False

    def do_begin_weight_update(self, selector: str) -> None:
        """Open a session."""
        if self.open:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.open = True

    def do_end_weight_update(self) -> None:
        """Close the session."""
        self._need_session()
        self.open = False

    def do_update_weight_version(self, new_version: str, abort_all_requests: bool) -> None:
        """Take the version's name."""
        self.version = new_version

    def do_model_info(self) -> dict[str, Any]:
        """Return the version's name."""
        return {"weight_version": self.version}

    def do_server_info(self) -> dict[str, Any]:
        """Return the settings it was started with."""
        return {"custom_weight_loader": list(ALL_LOADERS)}

    def do_flush_cache(self) -> None:
        """Do nothing: there is no cache."""

    def do_update_weights_from_tensor(
        self, serialized_named_tensors: list[str], load_format: str, flush_cache: bool, selector: str
    ) -> None:
        """Take a bucket in shared memory."""
        self._need_session()
        bucket = _Unpickler(io.BytesIO(base64.b64decode(serialized_named_tensors[0]))).load()
        if load_format in ALL_LOADERS:
            _have_a_world()
            module, _, function = load_format.partition(".")
            getattr(loader_module(module), function)(self.model, bucket)
            return
        flat = bucket["flattened_tensor"]
        for item in bucket["metadata"]:
            self.keep(item.name, flat[item.start_idx : item.end_idx].view(item.dtype).view(item.shape))

    def do_init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join a sender's group."""
        _have_a_world()
        limit = datetime.timedelta(seconds=120)
        store = dist.TCPStore(master_address, master_port, world_size, False, limit)
        named: dict[str, Any] = {"group_name": group_name, "timeout": limit}  # newer torch has a type for names
        group, _ = _new_process_group_helper(
            world_size, rank_offset, [], Backend(backend), PrefixStore(group_name, store), **named
        )
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        self.groups[group_name] = group, store

    def do_update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str,
        flush_cache: bool,
        selector: str,
    ) -> None:
        """Take a bucket by broadcast."""
        self._need_session()
        kinds = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [torch.Size(shape).numel() * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        dist.broadcast(flat, src=0, group=self.groups[group_name][0])
        for name, kind, shape, part in zip(names, kinds, shapes, flat.split(sizes), strict=True):
            self.keep(name, part.view(kind).view(shape))

    def do_update_weights_from_disk(self, model_path: str, load_format: str, flush_cache: bool) -> None:
        """Read a folder of safetensors."""
        from safetensors import safe_open

        for file in sorted(Path(model_path).glob("*.safetensors")):
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    self.keep(name, handle.get_tensor(name))

    def do_dump(self, path: str) -> None:
        """Write everything to a file, for comparison."""
        from safetensors.torch import save_file

        save_file({name: tensor.cpu() for name, tensor in self.tensors.items()}, path)

    def do_state(self) -> dict[str, Any]:
        """Return the tensors held, and a checksum of them."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode())
            digest.update(self.tensors[name].cpu().flatten().view(torch.uint8).numpy().data)
        return {
            "version": self.version,
            "paused": self.paused,
            "open": self.open,
            "tensors": len(self.tensors),
            "sha256": digest.hexdigest(),
            "log": self.log,
        }

    def _need_session(self) -> None:
        if not self.open:
            raise Refused("must run between begin_weight_update() and end_weight_update()")

    def keep(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into the one of that name."""
        target = self.tensors.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
            target = self.tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        target.copy_(tensor)


def _have_a_world() -> None:
    """Make this process the only rank of a world, without which torch makes no other group."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@functools.cache
def loader_module(module: str) -> ModuleType:
    """Return a module of the loaders that servers have on their path, which are none of megarl's modules."""
    if str(LOADERS) not in sys.path:
        sys.path.insert(0, str(LOADERS))
    return importlib.import_module(module)


def serve(receiver: Receiver, port_file: Path) -> None:
    """Answer until the process is killed. `port_file` gets the port when it listens."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
            if os.environ.get("MEGARL_RECEIVER_KEY", "") != self.headers.get("Authorization", "")[len("Bearer ") :]:
                self.send_error(401)
                return
            try:
                with lock:
                    answer = receiver.handle(self.path, body)
            except Exception as error:
                answer = {"success": False, "message": f"{error}"}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    temporary = port_file.with_suffix(".tmp")
    temporary.write_text(str(server.server_address[1]))
    temporary.rename(port_file)
    server.serve_forever()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Receiver(), Path(sys.argv[1]))
