"""Deltas: exact, small, and refused by a relay that holds another base."""

import socket
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.benchmarks.sync.receiver import Receiver
from megarl.sync.delta import Delta, apply_delta, make_delta, positions
from megarl.sync.plan import Place, ServerLayout, make_plan
from megarl.sync.relay import Relay, RelayClient, RelayRefused, read_message, send_message, serve
from megarl.sync.transports.base import Target
from megarl.sync.transports.delta import DeltaTransport, _entries_at
from tests.sync.layouts import config, trainer

KEY = "a key"


@given(st.binary(min_size=1, max_size=200), st.lists(st.tuples(st.integers(0, 199), st.integers(0, 255)), max_size=20))
def test_a_delta_brings_the_base_to_the_new_bytes(base, changes):
    old = torch.frombuffer(bytearray(base), dtype=torch.uint8)
    new = old.clone()
    for at, value in changes:
        new[at % len(new)] = value
    delta, at = make_delta(old, new)
    read = Delta.from_bytes([bytearray(part) for part in delta.to_bytes()])
    assert torch.equal(positions(read), at)
    apply_delta(old, read)
    assert torch.equal(old, new)


def test_distances_are_as_narrow_as_they_can_be():
    base = torch.zeros(8 * 100_000, dtype=torch.uint8)
    for at, kind in ((200, torch.uint8), (60_000, torch.uint16), (99_999, torch.int32)):
        new = base.clone()
        new[8 * at] = 1
        delta, found = make_delta(base, new)
        assert delta.distances.dtype == kind
        assert found.tolist() == [at]


def test_words_that_lie_in_two_tensors_touch_both():
    from megarl.sync.plan import Bucket, Entry

    entries = tuple(Entry(name, (3,), "bfloat16", 6 * i, 6, name) for i, name in enumerate("abc"))
    bucket = Bucket(entries, 18)
    assert _entries_at(bucket, torch.tensor([0]), tail=False) == {0, 1}
    assert _entries_at(bucket, torch.tensor([1]), tail=False) == {1, 2}
    assert _entries_at(bucket, torch.tensor([], dtype=torch.int64), tail=True) == {2}


class InProcessApi:
    """The receiver without a process."""

    url, name = "", "receiver"

    def __init__(self) -> None:
        self.receiver = Receiver()
        self.receiver.open = True

    def call(self, path, payload=None, **_):
        return self.receiver.handle(path, payload or {})


@pytest.fixture
def relay(tmp_path):
    relay, port_file = Relay(), tmp_path / "port"
    threading.Thread(target=serve, args=(relay, ("127.0.0.1", 0), KEY, port_file), daemon=True).start()
    end = time.monotonic() + 10
    while not port_file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return relay, ("127.0.0.1", int(port_file.read_text()))


def test_a_relay_talks_to_nobody_without_the_key(relay):
    with pytest.raises(OSError):
        RelayClient(relay[1], "another key", 5.0)
    RelayClient(relay[1], KEY, 5.0).close()


def test_another_base_is_refused(relay):
    client = RelayClient(relay[1], KEY, 5.0)
    entries = [["a", [4], "float32", 0, 16, "a"]]
    full = {"op": "full", "bucket": "0/0", "version": 3, "entries": entries}
    client.call(full, memoryview(bytearray(16)))
    delta, _ = make_delta(torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8))
    with pytest.raises(RelayRefused, match="base 3 instead of 2"):
        client.call({"op": "delta", "bucket": "0/0", "base": 2, "version": 4}, *delta.to_bytes())
    client.call({"op": "delta", "bucket": "0/0", "base": 3, "version": 4}, *delta.to_bytes())
    client.close()


def test_a_late_answer_is_not_taken_for_the_next_one():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=late, args=(listener,), daemon=True).start()
        client = RelayClient(listener.getsockname(), KEY, 0.5)
        with pytest.raises(TimeoutError):
            client.call({"op": "handles"})
        time.sleep(1.0)  # the answer is there now
        with pytest.raises(OSError):
            client.call({"op": "handles"})


def late(listener: socket.socket) -> None:
    """A relay whose second answer comes after one second."""
    sock, _ = listener.accept()
    sock.sendall(bytes(32))
    sock.recv(32, socket.MSG_WAITALL)
    for delay in (0.0, 1.0):
        read_message(sock)
        time.sleep(delay)
        send_message(sock, {"payloads": ["of the first call"]})


class Sender:
    """One sender with one bucket, to one server through the relay."""

    def __init__(self, address) -> None:
        from megarl.sync.plan import holdings

        plan = make_plan(holdings(config("qwen3"), trainer()), [Place()], [ServerLayout()])
        (self.bucket,) = plan.routes[0].senders[0]
        self.transport = DeltaTransport(plan, {"127.0.0.1": address}, KEY, "0", 5.0)
        self.flat = torch.randint(0, 200, (self.bucket.nbytes,), dtype=torch.uint8)
        self.api = InProcessApi()

    def send(self, version: int, held: int | None) -> tuple[int, list[str]]:
        """Bytes to the relay, and the tensors that the server was handed."""
        self.transport.start(version, [])
        self.transport.put(0, self.bucket, self.flat)
        self.api.receiver.tensors = {}
        self.transport.deliver(Target(0, self.api, held), 0, self.bucket, self.flat)
        for entry in self.bucket.entries:
            if entry.name in self.api.receiver.tensors:
                got = self.api.receiver.tensors[entry.name].view(torch.uint8).flatten()
                assert torch.equal(got, self.flat[entry.offset : entry.offset + entry.nbytes])
        return self.transport.sent_bytes, list(self.api.receiver.tensors)


def test_only_what_changed_travels(relay):
    sender = Sender(relay[1])
    everything = sender.send(1, None)
    assert everything == (sender.bucket.nbytes, [entry.name for entry in sender.bucket.entries])
    sender.flat[sender.bucket.entries[3].offset + 5] += 1
    sent, handed = sender.send(2, 1)
    assert sent < 30
    assert handed == [sender.bucket.entries[3].name]
    assert sender.send(3, 2)[1] == []  # nothing changed


def test_a_server_without_the_base_gets_everything_without_the_network(relay):
    sender = Sender(relay[1])
    sender.send(1, None)
    sent, handed = sender.send(2, None)
    assert sent < 30
    assert handed == [entry.name for entry in sender.bucket.entries]


def test_a_relay_that_lost_its_base_is_sent_everything(relay):
    sender = Sender(relay[1])
    sender.send(1, None)
    relay[0]._bases.clear()
    sender.flat[7] += 1
    assert sender.send(2, 1)[0] == sender.bucket.nbytes
