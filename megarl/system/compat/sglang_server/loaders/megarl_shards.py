"""The server's side of weight updates from shard to shard, where trainer ranks send weights directly to server ranks.
`describe` writes where this rank stores each tensor, `receive` takes part in an update.

This file runs in the servers' own interpreter, without megarl. A server's ranks and the trainer exchange tables through
a TCPStore of the trainer; the tables are those of megarl/sync/shards (boxes.py, program.py), as .npz files. A box is a
rectangular part of a tensor; a cell is a set of servers that share one process group with the trainer ranks that send
to them. A rank on the trainer's GPUs has a proxy: the trainer rank on its GPU, which receives for it. Keys of the store
begin with the name of the run (`prefix`):

    tensors              table of all tensors, from the trainer
    storage/S/R          how rank R of server S stores them, from this rank
    machine/S/R          name of the machine on which it runs, from this rank
    gpu/S/R              UUID of its GPU, from this rank; empty on a CPU
    program/P/S/R        the rank's part of the transfer program named P, from the trainer
    update               number of the trainer's current update, from the trainer
    V/page/S/R           memory that the rank shares with its proxy, from the proxy
    V/ready/S/R          set when the rank is ready for the rounds of update V
    V/beat/S/R           heartbeat: counts up twice a second while the rank runs the rounds
    V/dead/C             why cell C was given up, from the first rank that did so
    V/hashes/S/R         hash of each of the rank's parameters, if the trainer compares them
    V/done/S/R           name of the program, set when the rank has all weights
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import math
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from megarl_weight_map import CannotPatch, CopyTarget, derive, map_of
from torch import Tensor


def _shared(name: str, folder: str = "sync/shards") -> Any:
    """Load a file of megarl, which must import nothing of megarl, and return it as a module."""
    file = Path(__file__).resolve().parents[4] / folder / f"{name}.py"
    loader = SourceFileLoader(f"megarl_{name}", str(file))
    module = sys.modules[loader.name] = ModuleType(loader.name)
    loader.exec_module(module)
    return module


exchange, handover, hashes, machine = (_shared(name) for name in ("exchange", "handover", "hashes", "machine"))
memory = _shared("shared", "sync")

_DIMS = 3  # dimensions of every tensor in the tables
_COPY, _ZERO = 0, 1  # values of `BoxRule` in boxes.py
_BEAT_S = 0.5
_LOOK_S = 0.25  # seconds between two checks whether the update was given up or has ended
_LARGEST = 1 << 30  # largest allowed bytes of the tables in one .npz file


class CannotDescribe(Exception):
    """A parameter does not consist of boxes (rectangular parts) of tensors; the message names it."""


@dataclass
class _Described:
    """The model's parameters as this rank has described them to the trainer, in the same order."""

    names: list[str]
    parameters: list[Tensor]
    dtypes: list[str]  # dtype on the wire of each tensor that the trainer sends
    zeros: list[Tensor]  # padding: parts of parameters that are always zero

    def check(self, model: Any) -> None:
        """Raise RoundFailed if a parameter has moved since it was described."""
        now = dict(model.named_parameters())
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name not in now or now[name].data_ptr() != parameter.data_ptr():
                raise exchange.RoundFailed(
                    f"parameter {name} is no longer where it was in memory when the server described it to the trainer"
                )


_DESCRIBED: WeakKeyDictionary[Any, _Described] = WeakKeyDictionary()
_STORES: dict[tuple[str, int], dist.TCPStore] = {}  # address -> store of the last trainer
_GROUPS: dict[str, dist.ProcessGroup] = {}  # name -> process group of the last cell, and of this machine's ranks in it
_ROUNDS: dict[str, list[Any]] = {}  # key of this rank's part of the last program -> its rounds


def describe(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Write to the trainer's store which box (rectangular part) of which tensor lies where in this rank's parameters,
    and the names of its machine and GPU.

    Args:
        model: model of the server, as SGLang passes it to a loader.
        named_tensors: one entry, whose name is a JSON header: `store` (address and port), `prefix`, `server`, `rank`,
            `timeout_s`.

    Raises:
        CannotDescribe: a parameter does not consist of boxes.
    """
    header = json.loads(named_tensors[0][0])
    store = _store(header)
    tables = _unpack(store.get(f"{header['prefix']}/tensors"))
    described, arrays = storage_of(model, tables)
    _DESCRIBED[model] = described
    _ROUNDS.clear()  # rounds have views of parameters, which may have moved
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    store.set(f"{header['prefix']}/machine/{header['server']}/{header['rank']}", machine.machine_name())
    device = described.parameters[0].device
    store.set(f"{header['prefix']}/gpu/{header['server']}/{header['rank']}", handover.device_name(device))
    store.set(f"{header['prefix']}/storage/{header['server']}/{header['rank']}", out.getvalue())  # type: ignore[arg-type]  # str in torch's stub


def storage_of(model: Any, tables: dict[str, Any]) -> tuple[_Described, dict[str, Any]]:
    """Return the parameters of the model into which tensors are copied, and a description of where each tensor lies in
    them: the columns of a `RankStorage` (megarl/sync/shards/boxes.py), by name.

    Args:
        tables: columns of the trainer's `TensorTable`, and `tensors.sizes`: str [T], unpadded shapes such as "3,4,5".

    Raises:
        CannotDescribe: a parameter does not consist of boxes (rectangular parts) of tensors.
    """
    names, dtypes = tables["tensors.names"].tolist(), tables["tensors.dtypes"].tolist()
    shapes = [tuple(int(size) for size in text.split(",") if size) for text in tables["tensors.sizes"].tolist()]
    known = map_of(model, dict(zip(names, zip(shapes, dtypes, strict=True), strict=True)))
    parameters = {name: p for name, p in model.named_parameters() if p.numel()}
    spans = sorted((p.data_ptr(), name) for name, p in parameters.items())
    starts = np.array([start for start, _ in spans])
    boxes: dict[str, list[tuple[Any, ...]]] = {}
    for number, (name, shape) in enumerate(zip(names, shapes, strict=True)):
        try:
            places = known.places(name)
        except CannotPatch as error:
            raise CannotDescribe(f"tensor {name}: {error}") from error
        for place in places:
            owner = spans[max(int(np.searchsorted(starts, place.target.data_ptr(), "right")) - 1, 0)][1]
            lo, hi, strides = _box(place, shape, f"tensor {name} in parameter {owner}")
            offset = (place.target.data_ptr() - parameters[owner].data_ptr()) // parameters[owner].itemsize
            same = place.target.dtype == parameters[owner].dtype and parameters[owner].is_contiguous()
            if not (same and 0 <= offset < parameters[owner].numel()):
                raise CannotDescribe(
                    f"tensor {name}: the model's loading code copies it to memory that is not a contiguous parameter"
                )
            _refuse_quantised(owner, parameters[owner].dtype, name, dtypes[number])
            boxes.setdefault(owner, []).append((number, lo, hi, offset, strides, _COPY))
    for name, rows in boxes.items():
        rows += _padding(name, parameters[name], rows)
    listed = [name for name in parameters if name in boxes]
    rows = [(*row, number) for number, name in enumerate(listed) for row in boxes[name]]
    described = [parameters[name] for name in listed]
    arrays = {
        "parameters.names": np.array(listed, np.str_),
        "parameters.shapes": np.array([_padded(p.shape) for p in described], np.int64).reshape(-1, _DIMS),
        "parameters.dtypes": np.array([str(p.dtype).removeprefix("torch.") for p in described], np.str_),
        "boxes.tensor": np.array([row[0] for row in rows], np.int32),
        "boxes.lo": np.array([row[1] for row in rows], np.int64).reshape(-1, _DIMS),
        "boxes.hi": np.array([row[2] for row in rows], np.int64).reshape(-1, _DIMS),
        "boxes.parameter": np.array([row[6] for row in rows], np.int32),
        "boxes.offset": np.array([row[3] for row in rows], np.int64),
        "boxes.strides": np.array([row[4] for row in rows], np.int64).reshape(-1, _DIMS),
        "boxes.rule": np.array([row[5] for row in rows], np.int8),
    }
    zeros = [parameters[name].data.view(-1)[row[3] :] for name in listed for row in boxes[name] if row[5] == _ZERO]
    return _Described(listed, [p.data for p in described], dtypes, zeros), arrays


def _refuse_quantised(parameter: str, stored: torch.dtype, tensor: str, sent: str) -> None:
    """Raise CannotDescribe if a parameter is quantised, because its scales are not sent."""
    if (not stored.is_floating_point or stored.itemsize == 1) and str(stored) != f"torch.{sent}":
        raise CannotDescribe(
            f"parameter {parameter} is quantised ({stored}), but the trainer sends tensor {tensor} as {sent}, without "
            "scales; start the server without quantisation"
        )


def _padded(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape of three dimensions: sizes of 1 are appended, or the last dimensions merged into one."""
    if len(shape) <= _DIMS:
        return (*shape, *(1,) * (_DIMS - len(shape)))
    return (*shape[: _DIMS - 1], math.prod(shape[_DIMS - 1 :]))


def _box(place: CopyTarget, shape: Sequence[int], what: str) -> tuple[list[int], list[int], list[int]]:
    """Return the box of the tensor that is copied to a place in a parameter: first index and end in each dimension of
    the padded tensor, and the strides of these dimensions in the parameter.

    Raises:
        CannotDescribe: the copied part is not a box (a rectangular part) of the tensor.
    """
    sizes = _padded(shape)
    steps = [math.prod(sizes[dim + 1 :]) for dim in range(_DIMS)]
    left, lo = place.offset, []
    for step in steps:
        lo.append(left // step)
        left %= step
    hi, strides = [first + 1 for first in lo], [0] * _DIMS
    runs = _runs(place)
    while runs:
        size, step, stride = runs.pop()
        dim = next((d for d in reversed(range(_DIMS)) if sizes[d] > 1 and steps[d] == step and not strides[d]), None)
        if dim is None or (lo[dim] + size > sizes[dim] and (lo[dim] or size % sizes[dim])):
            raise CannotDescribe(
                f"{what}: the model's loading code copies a part that is not a box (an index range in each dimension)"
            )
        part = min(size, sizes[dim] - lo[dim])
        hi[dim], strides[dim] = lo[dim] + part, stride
        if part < size:  # the run is longer than this dimension: its rest is in the one before
            runs.append((size // part, step * part, stride * part))
    return lo, hi, strides


def _runs(place: CopyTarget) -> list[tuple[int, int, int]]:
    """Return (size, stride in the tensor, stride in the parameter) of each dimension of the copied part; dimensions
    that are contiguous in both are merged."""
    runs: list[tuple[int, int, int]] = []
    for size, step, stride in zip(place.target.shape, place.strides, place.target.stride(), strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * step and runs[-1][2] == size * stride:
            runs[-1] = (runs[-1][0] * size, step, stride)
        else:
            runs.append((size, step, stride))
    return runs


def _padding(name: str, parameter: Tensor, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the box of padding (zeros) at the end of a parameter that tensors do not fill, if there is any.

    Raises:
        CannotDescribe: a part of the parameter that belongs to no tensor is not zero, or not at its end.
    """
    filled = sum(math.prod(hi - lo for lo, hi in zip(row[1], row[2], strict=True)) for row in rows)
    if filled == parameter.numel():
        return []
    tail = parameter.data.view(-1)[filled:]
    last = max(
        row[3] + sum((hi - lo - 1) * step for lo, hi, step in zip(row[1], row[2], row[4], strict=True)) for row in rows
    )
    if filled > parameter.numel() or last >= filled or bool(tail.count_nonzero()):
        raise CannotDescribe(
            f"parameter {name}: a part of it belongs to no tensor and is not zero padding at its end, or tensors "
            "overlap in it"
        )
    return [(-1, [0] * _DIMS, [len(tail), 1, 1], filled, [1, 0, 0], _ZERO)]


def receive(model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Receive this rank's part of an update from the trainer's ranks; return when the parameters have the new weights.

    Args:
        model: model of the server, as SGLang passes it to a loader.
        named_tensors: one entry, whose name is a JSON header: the keys of `describe`'s header, and `version`,
            `program`, `cell` (number of this server's cell), `group` (its `ServerCell`), `backend`, `hashed`,
            `proxied`.

    Raises:
        RoundFailed: the trainer or another rank is gone. The parameters then have a mixture of old and new weights.
    """
    header = json.loads(named_tensors[0][0])
    store, server, rank = _store(header), header["server"], header["rank"]
    prefix, number = f"{header['prefix']}/{header['version']}", header["cell"]
    described = _DESCRIBED.get(model)
    if described is None:
        raise exchange.RoundFailed("the server has not described its parameters to the trainer since it started")
    described.check(model)
    dead = f"{prefix}/dead/{number}"
    look = _looking(store, dead, header)
    if (why := look(number)) is not None:  # this update was given up, or the trainer has already begun another
        raise exchange.RoundFailed(why)
    rounds, page = (_handed_over if header["proxied"] else _received)(store, described, header)
    store.set(f"{prefix}/ready/{server}/{rank}", header["program"])
    with _beating(header, f"{prefix}/beat/{server}/{rank}"):
        try:
            if page is None:
                failed = _run(store, rounds, header, look, described.parameters[0].device)
            else:
                failed = handover.copy_rounds(rounds, page, partial(look, number), header["timeout_s"])
        except Exception as error:
            failed = exchange.first_line(error)
        if failed is not None:
            store.compare_set(dead, "", f"rank {rank} of server {server}: {failed}")
            _leave_groups()
            raise exchange.RoundFailed(failed)
        # Padding has undefined values if the memory was released and allocated again since it was written.
        for padding in described.zeros:
            padding.zero_()
        derive(model)
        device = described.parameters[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if header["hashed"]:
            numbers = hashes.numbers_of([hashes.parameter_hash(parameter) for parameter in described.parameters])
            of_all = dict(zip(described.names, numbers, strict=True))
            store.set(f"{prefix}/hashes/{server}/{rank}", json.dumps(of_all))
        store.set(f"{prefix}/done/{server}/{rank}", header["program"])


def _received(store: dist.TCPStore, described: _Described, header: dict[str, Any]) -> tuple[list[Any], None]:
    """Return the rounds in which this rank receives its part of an update from the trainer's ranks."""
    key = _program_key(header)
    if key not in _ROUNDS:
        _ROUNDS.clear()  # frees the buffers of the last program's rounds
        _ROUNDS[key] = exchange.rounds_of_receiver(
            _unpack(store.get(key)), described.parameters, described.dtypes, (header["server"], header["rank"])
        )
    return _ROUNDS[key], None


def _handed_over(store: dist.TCPStore, described: _Described, header: dict[str, Any]) -> tuple[list[Any], Any]:
    """Return the rounds that this rank's proxy receives, whose buffers this process maps, and the counts of rounds that
    both share (`HandoverPage`)."""
    who = header["server"], header["rank"]
    handles = json.loads(store.get(f"{header['prefix']}/{header['version']}/page/{who[0]}/{who[1]}"))
    program = _program_key(header)
    key = f"{program}/{handles['plan']}"
    if key not in _ROUNDS:
        _ROUNDS.clear()  # unmaps the buffers of the last program's rounds
        buffers = [memory.open_handle(handle) for handle in handles["buffers"]]
        _ROUNDS[key] = exchange.rounds_of_receiver(
            _unpack(store.get(program)), described.parameters, described.dtypes, who, buffers
        )
    return _ROUNDS[key], handover.HandoverPage(memory.open_handle(handles["page"]))


def _program_key(header: dict[str, Any]) -> str:
    # the key has the server's number, which may differ from its number in the last update with this program
    return f"{header['prefix']}/program/{header['program']}/{header['server']}/{header['rank']}"


def _run(
    store: dist.TCPStore,
    rounds: list[Any],
    header: dict[str, Any],
    look: Callable[[int], str | None],
    device: torch.device,
) -> str | None:
    """Receive all rounds from the trainer's ranks; return why that failed, or None.

    Args:
        look: returns why this update was given up, or None; called with the number of the cell.
        device: the device of the parameters.
    """
    number, cell = header["cell"], exchange.ServerCell.of_json(header["group"])
    who, dead = f"rank {header['rank']} of server {header['server']}", f"{header['prefix']}/{header['version']}/dead"
    stripes = _join(store, cell, header, partial(look, number), rounds, device)
    runner = exchange.RoundRunner(
        rounds,
        sends=False,
        look=look,
        lost=lambda _, why: store.compare_set(f"{dead}/{number}", "", f"{who}: {why}"),
        deadline_s=header["timeout_s"],
        machine=stripes,
    )
    return runner.run({number: _GROUPS[cell.name]}, {number: cell}, {}).get(number)


def _join(
    store: dist.Store,
    cell: Any,
    header: dict[str, Any],
    look: Callable[[], str | None],
    rounds: list[Any],
    device: torch.device,
) -> Any:
    """Join the process group of a cell (trainer ranks and servers), and the group of ranks on this machine that
    exchange stripes (shares of what several of them need), unless this rank has joined them. Return the group of the
    machine; None: this rank exchanges no stripes.

    Args:
        look: returns why this update was given up, or None.
        rounds: all rounds of this rank.
        device: the device of its parameters.
    """
    server, rank, options = header["server"], header["rank"], (header["backend"], header["timeout_s"], look)
    with_nccl = header["backend"] == "nccl"
    if cell.name not in _GROUPS:
        _leave_groups()
        _GROUPS[cell.name] = exchange.join(store, cell.name, cell.size, cell.of_server(server, rank), *options)
        if with_nccl:
            links = exchange.links_of(rounds, header["cell"], cell, sends=False)
            exchange.connect(_GROUPS[cell.name], links, device, header["timeout_s"], look)
    gathering = cell.gathering(server, rank)
    if gathering is None:
        return None
    name, members = gathering
    if name not in _GROUPS:
        _GROUPS[name] = exchange.join(store, name, len(members), members.index((server, rank)), *options)
        if with_nccl:
            links = exchange.stripe_links(rounds, members)
            exchange.connect(_GROUPS[name], links, device, header["timeout_s"], look)
    return exchange.StripeGroup(_GROUPS[name], members)


def _store(header: dict[str, Any]) -> dist.TCPStore:
    """Return the connection to the trainer's store."""
    address = (header["store"][0], header["store"][1])
    if address not in _STORES:
        _STORES.clear()  # the connection to a trainer that is gone
        _STORES[address] = _connect(header)
    return _STORES[address]


def _connect(header: dict[str, Any]) -> dist.TCPStore:
    limit = datetime.timedelta(seconds=header["timeout_s"])
    host, port = header["store"]
    return dist.TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)


def _leave_groups() -> None:
    """Abort the process group of the last cell (servers, and the trainer ranks that send to them), whose other ranks
    may be gone."""
    while _GROUPS:
        exchange.abort(_GROUPS.popitem()[1])


def _looking(store: dist.TCPStore, dead: str, header: dict[str, Any]) -> Callable[[int], str | None]:
    """Return a function that returns why the trainer or another rank gave up this update, or None.

    Args:
        dead: key in the store, whose value is the reason. Later updates delete it.

    The function reads the store only a few times a second, because on a GPU it is called thousands of times a second.
    """
    following = 0.0

    def look(_: int) -> str | None:
        nonlocal following
        if time.monotonic() < following:
            return None
        following = time.monotonic() + _LOOK_S
        if int(store.get(f"{header['prefix']}/update")) > int(header["version"]):
            return f"the trainer has ended update {header['version']} without this rank"
        return store.get(dead).decode() if store.check([dead]) else None

    return look


@contextlib.contextmanager
def _beating(header: dict[str, Any], key: str) -> Iterator[None]:
    """In this block, count up `key` in the store twice a second: a heartbeat by which the trainer notices a stopped
    process."""
    store, stop = _connect(header), threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # if the trainer is gone, the rounds fail too
            store.add(key, 1)
            while not stop.wait(_BEAT_S):
                store.add(key, 1)

    thread = threading.Thread(target=beat, name="beat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(2 * _BEAT_S)  # takes longer only if the trainer's machine is gone


def _unpack(data: bytes) -> dict[str, Any]:
    """Return the arrays of a .npz file; nothing is unpickled."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        size = sum(info.file_size for info in file.infolist())
    if size > _LARGEST:
        raise ValueError(
            f"the tables of a weight update have {size} bytes; allowed: at most {_LARGEST}; set another sync.transport"
        )
    with np.load(io.BytesIO(data)) as loaded:
        return {name: loaded[name] for name in loaded.files}
