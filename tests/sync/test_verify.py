"""Checksums of a server's parameters, and the disk transport's folders."""

import hashlib
from unittest import mock

import pytest
import torch

from megarl.models.weight_table import WeightTable
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.layout import ServerLayout
from megarl.sync.checksum import DeviceChecksum, HostChecksum
from megarl.sync.transports.disk import remove_old
from megarl.sync.verify import compare, expected_checksums
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError
from tests.dist import run_distributed, run_pretending
from tests.models.test_layouts import load_folder
from tests.models.tiny import build_tiny, save_tiny
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
    t = {name: torch.randn(shape, generator=g) for name, shape in WeightTable.of(hf).shapes().items()}
    layout = ServerLayout.of(hf, tp, ep)
    found = expected_checksums(t.items(), [layout], torch.float32, WorkerGroup.alone())[layout]
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


def shares(folder: str, cases: list[tuple[str, dict]]) -> list:
    """For each case what this rank gathers, how many bytes it hashes, and the checksums that all find together."""
    from megarl.models.weights.export import iter_on_all_ranks, stage_group
    from megarl.sync import checksum
    from tests.dist import fresh_parallel, world

    found = []
    for name, layout in cases:
        fresh_parallel(**layout)
        chunks = build_tiny(f"{folder}/{name}", **layout)
        at, hashed = ServerLayout.of(chunks[0].hf_config, tp=2), []
        update = checksum.HostChecksum.update

        def counting(made, part, hashed=hashed, update=update):
            hashed.append(part.nbytes)
            update(made, part)

        with stage_group(chunks, world()) as stage, mock.patch.object(checksum.HostChecksum, "update", counting):
            tensors = {n: t.clone() for n, t in iter_on_all_ranks(chunks, stage, torch.device("cpu"))}
            sums = expected_checksums(tensors.items(), [at], torch.bfloat16, world(), stage=stage)[at]
        found.append({"tensors": tensors, "hashed": sum(hashed), "sums": sums})
    return found


@pytest.mark.procs
def test_every_rank_gathers_the_weights_of_its_stage_and_hashes_its_share(tmp_path):
    cases = [
        ("qwen3", {"tp": 2}),
        ("qwen3", {"pp": 2}),
        ("qwen3_moe", {"ep": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1}),
    ]
    for name in ("qwen3", "qwen3_moe"):
        save_tiny(tmp_path / name, name, num_hidden_layers=2)
    for (name, layout), *ranks in zip(cases, *run_distributed(shares, 2, 120, str(tmp_path), cases), strict=True):
        held = load_folder(tmp_path / name)
        at = ServerLayout.of(config(name, num_hidden_layers=2), tp=2)
        in_order = {n: held[n] for rank in ranks for n in rank["tensors"]}
        alone = expected_checksums(in_order.items(), [at], torch.bfloat16, WorkerGroup.alone())[at]
        assert in_order.keys() == held.keys()
        for rank in ranks:
            assert (len(rank["tensors"]) < len(held)) == ("pp" in layout)
            assert all(torch.equal(held[n], tensor) for n, tensor in rank["tensors"].items()), (name, layout)
            assert rank["sums"] == alone
        assert 0.25 < ranks[0]["hashed"] / sum(rank["hashed"] for rank in ranks) < 0.75


def hash_on_device() -> dict:
    """Checksums on a pretended GPU, and how often the host waited for it."""
    from tests.pretend_cuda import SEEN, Pretend

    hf = config("qwen3_moe", num_hidden_layers=1)
    layout = ServerLayout.of(hf, 2, 2, on_gpu=True)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in WeightTable.of(hf).shapes().items()}
    on_host = expected_checksums(tensors.items(), [layout], torch.bfloat16, WorkerGroup.alone())[layout]
    with Pretend():
        there = {name: tensor.to("cuda") for name, tensor in tensors.items()}
        SEEN.clear()
        on_device = expected_checksums(there.items(), [layout], torch.bfloat16, WorkerGroup.alone())[layout]
        waits = sum(SEEN.waits.values())
    return {"same": on_host == on_device, "parameters": sum(map(len, on_device)), "waits": waits}


@pytest.mark.procs
def test_weights_on_a_device_are_hashed_there():
    (found,) = run_pretending(hash_on_device, 1, 120)
    assert found["same"]
    assert found["waits"] == found["parameters"]  # for the digits of the checksum


def test_differences_are_named():
    server = server_receiver(ServerApi("http://127.0.0.1:1", None, "server 3"))
    assert compare(server, [{"a": "1", "b": "2"}], [{"a": "1", "b": "2", "other": "9"}]) == 2
    with pytest.raises(ServerError, match=r"server 3.*1 of 2 parameters differ.*b \(rank 0: 3, expected 2\)"):
        compare(server, [{"a": "1", "b": "2"}], [{"a": "1", "b": "3"}])
    with pytest.raises(ServerError, match=r"a .rank 0: missing"):
        compare(server, [{"a": "1"}], [{}])


def test_old_versions_and_interrupted_writes_go(tmp_path):
    # version 9 is of the run before it was resumed from step 4
    for name in ("v00000003", "v00000004", "v00000005", "v00000009", ".v00000005.partial", ".v00000004.old-7", "other"):
        (tmp_path / name).mkdir()
    remove_old(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "v00000004", "v00000005"]
