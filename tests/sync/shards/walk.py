"""Models spread over trainer ranks and servers in NumPy arrays, and programs of updates run on them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.models.weight_table import Coordinate, WeightTable
from megarl.rollout.sglang.layout import ServerLayout
from megarl.rollout.sglang.storage import predicted_storage
from megarl.sync.shards.boxes import BoxTable, GpuPlace, RankStorage, ServerStorage, TensorTable
from megarl.sync.shards.plan import UpdatePlan
from megarl.sync.shards.program import TransferProgram
from megarl.sync.shards.sources import tensors_of, trainer_storages
from tests.sync.layouts import config

DTYPE = "float32"


@dataclass
class Job:
    """A model's tensors, trainer ranks that hold them, and servers."""

    hf: object
    shapes: dict[str, tuple[int, ...]]
    tensors: TensorTable
    trainer: list[RankStorage]
    layout: ServerLayout
    servers: list[ServerStorage]

    def values(self, name: str) -> torch.Tensor:
        """The tensor of this name: float32, a different number for each element."""
        shape = self.shapes[name]
        start = zlib.crc32(name.encode()) % 1000003
        return (torch.arange(int(np.prod(shape)), dtype=torch.float32) + start).reshape(shape)


def job(model: str, ranks: Sequence[Coordinate], tp: int, servers: int = 1, ep: int = 1, **options) -> Job:
    """`options`: `changes` to the model's config, `attention_dp`, and `gpus` per machine of servers."""
    hf = config(model, **options.get("changes", {}))
    table = WeightTable.of(hf)
    tensors = tensors_of(table, DTYPE)
    shapes = table.shapes()
    layout = ServerLayout.of(hf, tp, ep, attention_dp=options.get("attention_dp", 1))
    storages = tuple(predicted_storage(layout, rank, tensors, shapes) for rank in range(tp))
    gpus = options.get("gpus", 8)
    places = [GpuPlace(f"server{gpu // gpus}", gpu % gpus) for gpu in range(servers * tp)]
    made = [ServerStorage(storages, tuple(places[i * tp : (i + 1) * tp])) for i in range(servers)]
    return Job(hf, shapes, tensors, trainer_storages(table, ranks, tensors, DTYPE), layout, made)


def trainer_places(count: int, gpus: int = 8) -> list[GpuPlace]:
    return [GpuPlace(f"trainer{rank // gpus}", rank % gpus) for rank in range(count)]


def view(memory: np.ndarray, offset: int, strides: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """The elements of a box in a parameter, [size]."""
    assert offset + sum((n - 1) * step for n, step in zip(size, strides, strict=True)) < memory.size
    return np.lib.stride_tricks.as_strided(memory[offset:], size, [step * memory.itemsize for step in strides])


def stored(storage: RankStorage, tensors: TensorTable, values) -> list[np.ndarray]:
    """The parameters of a rank, filled with its boxes of the tensors that `values(name)` returns; -1 elsewhere."""
    parameters = [np.full(int(shape.prod()), -1, np.float32) for shape in storage.parameters.shapes]
    boxes: BoxTable = storage.boxes
    for row in range(len(boxes)):
        tensor = values(str(tensors.names[boxes.tensor[row]])).numpy()
        tensor = tensor.reshape(tensors.shapes[boxes.tensor[row]])
        lo, hi = boxes.lo[row], boxes.hi[row]
        part = tensor[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))]
        view(parameters[boxes.parameter[row]], boxes.offset[row], boxes.strides[row], hi - lo)[...] = part
    return parameters


def run(plan: UpdatePlan, held: list[list[np.ndarray]]) -> dict[tuple[int, int], list[np.ndarray]]:
    """Run every rank's own program with messages in between; the parameters of each (server, rank) after it.

    `held`: the parameters of each trainer rank. An element that is written twice becomes NaN.
    """
    wires = {}
    for rank, memory in enumerate(held):
        wires |= pack_all(TransferProgram.decode(plan.program(sender=rank).encode()), rank, memory)
    received = {}
    programs = {}
    for number in plan.receivers:
        who = number.server, number.rank
        programs[who] = plan.program(receiver=who)
        received[who] = receive_all(programs[who], who, wires)
    return {who: unpack_all(plan, program, who, received) for who, program in programs.items()}


def key_of(program: TransferProgram, row: int) -> tuple[int, int, int]:
    rounds = program.rounds
    return int(rounds.phase[row]), int(rounds.number[row]), int(rounds.cell[row])


def pack_all(program: TransferProgram, rank: int, memory: list[np.ndarray]) -> dict:
    """The bytes of each message of a sender, by (round, sender, receiver, place of the message in its pair)."""
    sent: dict = {}
    messages, links = program.messages, program.links
    for row in range(len(messages)):
        buffer = np.zeros(messages.nbytes[row], np.uint8)
        for link in np.flatnonzero(links.message == row):
            size = links.hi[link] - links.lo[link]
            part = view(memory[links.parameter[link]], links.offset[link], links.strides[link], size)
            assert part.nbytes == links.nbytes[link]
            start = links.start[link]
            buffer[start : start + part.nbytes] = np.frombuffer(part.tobytes(), np.uint8)
        key = (*key_of(program, messages.round[row]), rank, int(messages.server[row]), int(messages.receiver[row]))
        sent.setdefault(key, []).append(buffer)
    return sent


def receive_all(program: TransferProgram, who: tuple[int, int], wires: dict) -> dict:
    """The receive buffer of each round, and direct messages by row."""
    messages = program.messages
    taken: dict = {}
    buffers: dict = {}
    for row in range(len(messages)):
        if (messages.server[row], messages.receiver[row]) != who:
            continue
        round_ = key_of(program, messages.round[row])
        key = (*round_, int(messages.sender[row]), *who)
        place = taken[key] = taken.get(key, -1) + 1
        data = wires[key][place]
        assert len(data) == messages.nbytes[row]
        at = messages.receive_at[row]
        buffers[(*round_, row) if at < 0 else (*round_, int(at))] = data
    return buffers


def unpack_all(plan: UpdatePlan, program: TransferProgram, who: tuple[int, int], received: dict) -> list[np.ndarray]:
    """The parameters of a server's rank after it has unpacked everything that it or a rank of its group received."""
    storage = plan.servers[who[0]].ranks[who[1]]
    parameters = [np.full(int(shape.prod()), -1, np.float32) for shape in storage.parameters.shapes]
    boxes = storage.boxes
    for row in np.flatnonzero(boxes.tensor < 0):
        size = boxes.hi[row] - boxes.lo[row]
        view(parameters[boxes.parameter[row]], boxes.offset[row], boxes.strides[row], size)[...] = 0
    messages, links, targets = program.messages, program.links, program.targets
    for row in range(len(targets)):
        link = targets.link[row]
        message = links.message[link]
        round_ = key_of(program, messages.round[message])
        at = int(messages.receive_at[message])
        source = received[int(messages.server[message]), int(messages.receiver[message])]
        data = source[(*round_, int(message)) if at < 0 else (*round_, at)]
        size = links.hi[link] - links.lo[link]
        part = np.frombuffer(data[links.start[link] :][: links.nbytes[link]].tobytes(), np.float32).reshape(size)
        place = view(parameters[targets.parameter[row]], targets.offset[row], targets.strides[row], size)
        place[...] = np.where(place == -1, part, np.nan)
    return parameters
