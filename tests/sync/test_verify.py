"""Checksums of a server's parameters, and the disk transport's folders."""

import hashlib

import pytest
import torch

from megarl.errors import ServerError
from megarl.models.weights.plan import hf_tensors
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.checksum import DeviceChecksum
from megarl.rollout.sglang.layout import ServerLayout
from megarl.sync.receiver import HostChecksum
from megarl.sync.transports.disk import remove_old
from megarl.sync.verify import compare, expected_checksums
from tests.sync.layouts import config
from tests.sync.receivers import server_receiver


def digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def gpu_hash(words: list[int], nbytes: int) -> str:
    """SGLang's hash word by word, in plain integers."""
    mask = 0xFFFFFFFF

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & mask
        x ^= x >> 13
        x = x * 0xC2B2AE35 & mask
        return x ^ x >> 16

    seed, total = 0x243F6A88, 0
    for start in range(0, len(words), 8192):
        halves = []
        for s, factor, turn in ((seed, 0x27D4EB2D, 15), ((seed * 0x9E3779B1 ^ 0xDEADBEEF) & mask, 0x165667B1, 13)):
            h = 0
            for i, word in enumerate(words[start : start + 8192], start):
                place = (i * factor + s & mask) ^ ((i << turn | i >> (32 - turn)) & mask)
                h += mix(word ^ place)
            halves.append(mix((h & mask) ^ nbytes & mask))
        total += halves[0] << 32 | halves[1]
    x = total & (1 << 64) - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return f"{x ^ x >> 31:016x}"


@pytest.mark.parametrize("count", [1, 8191, 8192, 20_000])
def test_checksums_by_parts_are_those_of_the_whole(count):
    whole = torch.randn(count, generator=torch.Generator().manual_seed(2))
    words = [w & 0xFFFFFFFF for w in whole.view(torch.int32).tolist()]
    for made, expected in ((HostChecksum(), digest(whole)), (DeviceChecksum(4 * count), gpu_hash(words, 4 * count))):
        for part in whole.split(3000):
            made.update(part)
        assert made.hexdigest() == expected


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_a_server_fuses_and_splits(tp, ep):
    hf = config("qwen3_moe", num_hidden_layers=1)
    g = torch.Generator().manual_seed(3)
    t = {name: torch.randn(shape, generator=g) for name, shape in hf_tensors(hf).items()}
    layout = ServerLayout.of(hf, tp, ep)
    found = expected_checksums(t.items(), [layout], torch.float32)[layout]
    at, experts = "model.layers.0.self_attn.", "model.layers.0.mlp.experts."
    for rank in range(tp):
        q = t[f"{at}q_proj.weight"].chunk(tp)[rank]
        k, v = (t[f"{at}{n}_proj.weight"].chunk(min(tp, 2))[rank * 2 // max(tp, 2)] for n in "kv")
        assert found[rank][f"{at}qkv_proj.weight"] == digest(torch.cat([q, k, v]))
        assert found[rank][f"{at}o_proj.weight"] == digest(t[f"{at}o_proj.weight"].chunk(tp, 1)[rank])
        head = torch.cat([t["lm_head.weight"], torch.zeros(192 - 131, 64)]).chunk(tp)[rank]
        assert found[rank]["lm_head.weight"] == digest(head)
        ways, mine = tp // ep, range(4 // ep * (rank // (tp // ep)), 4 // ep * (rank // (tp // ep) + 1))
        w2 = torch.stack([t[f"{experts}{e}.down_proj.weight"].chunk(ways, 1)[rank % ways] for e in mine])
        assert found[rank][f"{experts}w2_weight"] == digest(w2)
        halves = (("gate_proj", "up_proj") for _ in mine)
        w13 = [
            torch.cat([t[f"{experts}{e}.{n}.weight"].chunk(ways)[rank % ways] for n in pair])
            for e, pair in zip(mine, halves, strict=True)
        ]
        assert found[rank][f"{experts}w13_weight"] == digest(torch.stack(w13))


def test_differences_are_named():
    server = server_receiver(ServerApi("http://127.0.0.1:1", None, "server 3"))
    assert compare(server, [{"a": "1", "b": "2"}], [{"a": "1", "b": "2", "other": "9"}]) == 2
    with pytest.raises(ServerError, match=r"server 3.*1 of 2 parameters differ.*b \(rank 0: 3, expected 2\)"):
        compare(server, [{"a": "1", "b": "2"}], [{"a": "1", "b": "3"}])
    with pytest.raises(ServerError, match=r"a .rank 0: missing"):
        compare(server, [{"a": "1"}], [{}])


def test_old_versions_and_interrupted_writes_go(tmp_path):
    for name in ("v00000003", "v00000004", "v00000005", ".v00000005.partial", "other"):
        (tmp_path / name).mkdir()
    remove_old(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "v00000004", "v00000005"]
