"""Deltas: exact, small, and refused by a relay that holds another base."""

import contextlib
import socket
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.benchmarks.sync.receiver import Receiver
from megarl.kernels import delta as kernels
from megarl.models.weight_table import WeightTable
from megarl.sync.delta import Delta, apply_delta, make_delta
from megarl.sync.messages import FailedError, MessageClient, Refused, proof, read_message, send_message
from megarl.sync.plan import make_plan
from megarl.sync.protocol import version_tag
from megarl.sync.relay import Relay, serve
from megarl.sync.transports.delta import DeltaTransport
from megarl.system.compat.sglang import PATCH_LOADER
from megarl.system.errors import ServerError
from tests.sync.layouts import HERE, config, ranks_of, trainer
from tests.sync.receivers import server_receiver

KEY, RUN = "a key", "a run"


ITEMSIZES = (1, 2, 4)


@given(st.data(), st.sampled_from(ITEMSIZES), st.integers(1, 700))
def test_a_delta_brings_the_base_to_the_new_bytes(data, itemsize, n):
    base = torch.randint(0, 256, (n * itemsize,), dtype=torch.uint8)
    new = base.clone()
    for at in data.draw(st.lists(st.integers(0, len(new) - 1), max_size=20)):
        new[at] += 1
    changed = (base.view(n, itemsize) != new.view(n, itemsize)).any(1).nonzero().view(-1).tolist()
    for find, write in ((kernels.diff, kernels.patch), (kernels.diff_reference, kernels.patch_reference)):
        now, then = base.clone(), base.clone()
        distances, values = find(now, new, itemsize, 2 * n)
        assert torch.equal(now, new)
        assert set(changed) <= set(kernels.positions(distances).tolist())
        assert len(distances) <= len(changed) + n // kernels.FAR
        write(then, distances, values, itemsize)
        assert torch.equal(then, new)
        assert find(base.clone(), new, itemsize, len(distances)) is not None
        assert not len(distances) or find(base.clone(), new, itemsize, len(distances) - 1) is None


@pytest.mark.parametrize("find", [kernels.diff, kernels.diff_reference])
def test_far_changes_are_reached_in_steps(find):
    base = torch.zeros(2 * 1000, dtype=torch.uint8)
    new = base.clone()
    new.view(torch.int16)[[254, 509, 765, 999]] = 7
    distances, values = find(base, new, 2, 100)
    assert distances.tolist() == [255, 255, 255, 1, 234]
    assert values.view(torch.int16).tolist() == [7, 7, 0, 7, 7]


@pytest.mark.parametrize("write", [kernels.patch, kernels.patch_reference])
@pytest.mark.parametrize("distances", [[3, 3], [1, 0]])
def test_nothing_is_written_outside(write, distances):
    with pytest.raises(ValueError, match="outside"):
        write(torch.zeros(10, dtype=torch.uint8), torch.tensor(distances, dtype=torch.uint8), torch.ones(4).byte(), 2)


def test_a_bucket_of_several_dtypes():
    sizes, itemsizes = (301, 64, 8, 5), (1, 2, 4, 1)
    base = [torch.zeros(size * width, dtype=torch.uint8) for size, width in zip(sizes, itemsizes, strict=True)]
    new = [part.clone() for part in base]
    for part in (0, 2, 3):
        new[part][-1] = 1
    copy = [part.clone() for part in base]
    delta = make_delta(base, new, itemsizes, 1000)
    assert all(map(torch.equal, base, new))
    assert delta.touched == [0, 2, 3]
    apply_delta(copy, itemsizes, Delta.from_bytes([bytearray(part) for part in delta.to_bytes()]))
    assert all(map(torch.equal, copy, new))
    assert make_delta([torch.zeros_like(part) for part in new], new, itemsizes, delta.nbytes - 1) is None


class InProcessApi:
    """The receiver without a process."""

    url, name = "", "receiver"

    def __init__(self, loaders: list[str]) -> None:
        self.receiver, self.loaders, self.formats = Receiver(), loaders, []
        self.receiver.open = True

    def call(self, path, payload=None, **_):
        if path == "/server_info":
            return {"custom_weight_loader": self.loaders}
        if payload and "load_format" in payload:
            self.formats.append(payload["load_format"])
            if payload["load_format"] == PATCH_LOADER and PATCH_LOADER not in self.loaders:
                raise ServerError(self.name, self.url, "bucket", "refused: CannotPatch", status=200)
        return self.receiver.handle(path, payload or {})


@pytest.fixture
def relay(tmp_path):
    relay, port_file = Relay(), tmp_path / "port"
    threading.Thread(target=serve, args=(relay, ("127.0.0.1", 0), KEY, port_file), daemon=True).start()
    end = time.monotonic() + 60
    while not port_file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return relay, ("127.0.0.1", int(port_file.read_text()))


def test_a_relay_talks_to_nobody_without_the_key(relay):
    with pytest.raises(OSError):
        MessageClient(relay[1], "another key", 5.0)
    MessageClient(relay[1], KEY, 60.0).close()


def test_a_trainer_talks_to_no_relay_that_does_not_know_the_key():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=pretend, args=(listener,), daemon=True).start()
        with pytest.raises(ConnectionError, match="not this run's relay"):
            MessageClient(listener.getsockname(), KEY, 60.0)


def pretend(listener: socket.socket) -> None:
    """Somebody on the relay's port who sends the trainer's own proof back."""
    sock, _ = listener.accept()
    sock.sendall(bytes(32))
    sock.sendall(sock.recv(64, socket.MSG_WAITALL)[:32])


def test_the_deadline_is_that_of_the_whole_answer():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        client = MessageClient(listener.getsockname(), KEY, 60.0)
        with pytest.raises(TimeoutError):
            client.call({"op": "handles"}, deadline_s=0.5)


def greeted(listener: socket.socket) -> socket.socket:
    """A trainer's connection to a relay that has proved its key."""
    sock, _ = listener.accept()
    sock.sendall(bytes(32))
    sock.sendall(proof(KEY, b"relay", sock.recv(64, socket.MSG_WAITALL)[32:]))
    return sock


def drip(listener: socket.socket) -> None:
    """A relay whose answer comes byte by byte, each well before the deadline."""
    sock = greeted(listener)
    read_message(sock)
    with contextlib.suppress(OSError):
        for byte in (2).to_bytes(4, "little") + b"{}" + b" " * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.2)


def test_another_base_is_not_brought_forward(relay):
    client = MessageClient(relay[1], KEY, 60.0)
    at = {"sender": "0", "bucket": 0}
    full = {"op": "full", "version": 3, "entries": [["a", [4], "float32", 0, 16, "a"]]}
    client.call(at | full, memoryview(bytearray(16)))
    delta = make_delta([torch.zeros(16, dtype=torch.uint8)], [torch.ones(16, dtype=torch.uint8)], [4], 100)
    for base, taken in ((2, False), (3, True)):
        assert client.call(at | {"op": "delta", "base": base, "version": 4}, *delta.to_bytes()) == {"taken": taken}
    with pytest.raises(Refused, match="version 4 of bucket 0, not version 3"):
        client.call(at | {"op": "handles", "version": 3, "ranks": 1})
    with pytest.raises(Refused, match="holds the delta of bucket 0, version 4, but bucket 0, version 3 is requested"):
        client.call(at | {"op": "patch", "version": 3, "ranks": 1})
    client.close()


def test_a_relay_that_fails_says_why_and_is_given_everything_again(relay, monkeypatch):
    at = {"sender": "0", "bucket": 0}
    full = {"op": "full", "version": 3, "entries": [["a", [4], "float32", 0, 16, "a"]]}
    delta = make_delta([torch.zeros(16, dtype=torch.uint8)], [torch.ones(16, dtype=torch.uint8)], [4], 100)
    change = at | {"op": "delta", "base": 3, "version": 4}
    client = MessageClient(relay[1], KEY, 60.0)
    client.call(at | full, memoryview(bytearray(16)))
    with monkeypatch.context() as patch:
        patch.setattr("megarl.sync.relay.apply_delta", half_applied)
        with pytest.raises(FailedError, match="the other side failed: OSError: no space left in shared memory"):
            client.call(change, *delta.to_bytes())
    with pytest.raises(OSError):
        client.call(change, *delta.to_bytes())  # nobody knows what this relay has now
    again = MessageClient(relay[1], KEY, 60.0)
    assert again.call(change, *delta.to_bytes()) == {"taken": False}
    again.call(at | full, memoryview(bytearray(16)))
    assert again.call(change, *delta.to_bytes()) == {"taken": True}
    again.close()


def half_applied(parts: list[torch.Tensor], *_: object) -> None:
    parts[0][:8] += 1
    raise OSError("no space left in shared memory")


def test_a_late_answer_is_not_taken_for_the_next_one():
    given_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = threading.Thread(target=late, args=(listener, given_up), daemon=True)
        relay.start()
        client = MessageClient(listener.getsockname(), KEY, 60.0)
        with pytest.raises(TimeoutError):
            client.call({"op": "handles"}, deadline_s=0.5)
        given_up.set()
        relay.join()  # the answer is there now
        with pytest.raises(OSError):
            client.call({"op": "handles"})


def late(listener: socket.socket, given_up: threading.Event) -> None:
    """A relay whose answer comes when nobody waits for it."""
    sock = greeted(listener)
    read_message(sock)
    given_up.wait()
    with contextlib.suppress(OSError):  # the trainer may have closed the connection
        send_message(sock, {"handles": ["of the first call"]})


class Sender:
    """One sender with one bucket, to one server through the relay."""

    def __init__(self, address, loaders=(PATCH_LOADER,)) -> None:
        from megarl.sync.plan import holdings

        ranks = trainer()
        plan = make_plan(holdings(WeightTable.of(config("qwen3")), ranks), ranks_of(ranks), [HERE])
        (self.bucket,) = plan.routes[0].senders[0]
        self.transport = DeltaTransport(plan, {"127.0.0.1": address}, KEY, "0", RUN, 60.0)
        self.flat = torch.randint(0, 200, (self.bucket.nbytes,), dtype=torch.uint8)
        self.api = InProcessApi(list(loaders))
        self.server = server_receiver(self.api)

    def change(self, entry: int) -> str:
        """Another byte in this entry; its name."""
        self.flat[self.bucket.entries[entry].offset + 5] += 1
        return self.bucket.entries[entry].name

    def send(self, version: int, held: int | None) -> tuple[int, list[str]]:
        """Bytes to the relay, and in which forms the server was handed anything. It holds everything afterwards."""
        self.server.server.version, self.api.formats = held, []
        self.transport.start(version, [self.server])
        self.transport.put(0, self.bucket, self.flat.split([entry.nbytes for entry in self.bucket.entries]))
        self.transport.deliver(self.server, 0, self.bucket, self.flat)
        self.api.receiver.version = own(version)
        for entry in self.bucket.entries:
            got = self.api.receiver.tensors[entry.name].view(torch.uint8).flatten()
            assert torch.equal(got, self.flat[entry.offset : entry.offset + entry.nbytes])
        return self.transport.sent_bytes, self.api.formats


WHOLE = "flattened_bucket"


def own(version: int) -> str:
    """What a server calls a version of this run."""
    return version_tag(version, RUN)


def test_only_what_changed_travels_and_is_written(relay):
    sender = Sender(relay[1])
    assert sender.send(1, None) == (sender.bucket.nbytes, [WHOLE])
    sender.change(3)
    untouched = {name: tensor.clone().fill_(7) for name, tensor in sender.api.receiver.tensors.items()}
    sent, formats = sender.send(2, 1)
    assert sent < 8 * len(sender.bucket.entries) + 200
    assert formats == [PATCH_LOADER]
    assert sender.send(3, 2)[1] == []  # nothing changed
    sender.api.receiver.tensors = untouched
    name = sender.change(5)
    with pytest.raises(AssertionError):
        sender.send(4, 3)
    whole = [other for other, tensor in untouched.items() if (tensor != 7).any()]
    assert whole == [name]


@pytest.mark.parametrize("says_so", [True, False])
def test_a_server_that_cannot_be_patched_gets_the_tensors_that_changed(relay, says_so):
    sender = Sender(relay[1], loaders=())
    sender.send(1, None)
    name = sender.change(3)
    if not says_so:
        sender.server._loaders[""] = {PATCH_LOADER}
    before = dict(sender.api.receiver.tensors)  # kept alive: a new tensor may take the place of one that is gone
    sender.api.receiver.tensors = {n: t for n, t in before.items() if n != name}
    sent, formats = sender.send(2, 1)
    assert sent < 8 * len(sender.bucket.entries) + 200
    assert formats == ([] if says_so else [PATCH_LOADER]) + [WHOLE]
    assert {n for n, t in sender.api.receiver.tensors.items() if t is not before[n]} == {name}


def test_a_server_without_the_base_gets_everything_without_the_network(relay):
    sender = Sender(relay[1])
    sender.send(1, None)
    for version, held, said in ((2, None, own(1)), (3, 2, "somebody else's"), (4, 2, own(2))):
        sender.change(3)
        sender.api.receiver.version, sender.api.receiver.tensors = said, {}
        sent, formats = sender.send(version, held)
        assert sent < 8 * len(sender.bucket.entries) + 200
        assert formats == [WHOLE]


def test_a_relay_that_lost_its_base_is_sent_everything(relay):
    sender = Sender(relay[1])
    sender.send(1, None)
    relay[0]._senders.clear()
    sender.change(0)
    assert sender.send(2, 1) == (sender.bucket.nbytes, [WHOLE])


def test_large_changes_go_whole(relay):
    sender = Sender(relay[1])
    sender.send(1, None)
    sender.flat += 1
    assert sender.send(2, 1) == (sender.bucket.nbytes, [WHOLE])
    sender.change(0)
    assert sender.send(3, 2)[1] == [PATCH_LOADER]  # the copy to compare with went along
