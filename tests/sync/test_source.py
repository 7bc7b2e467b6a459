"""Buckets filled by real processes hold the tensors of the checkpoint, bit for bit after the cast."""

from pathlib import Path

import pytest
import torch

from tests.dist import fresh_parallel, run_distributed, world
from tests.models.test_layouts import load_folder
from tests.models.tiny import build_tiny, save_tiny

#: Layouts by model: one is sent under all, of the others what they have of their own, biases and a tied head, is split.
TWO = {
    "llama": [{"tp": 2}, {"pp": 2}, {"pp": 2, "vpp": 2}, {}, {"cp": 2}],
    "qwen2": [{"tp": 2}],
    "qwen3": [{"tp": 2}, {"pp": 2}],
    "qwen3_moe": [{"ep": 2}, {"tp": 2}, {"tp": 2, "ep": 2, "etp": 1}],
}
FOUR = {
    "llama": [{"tp": 2}],
    "qwen3": [{"tp": 2, "pp": 2}],
    "qwen3_moe": [{"pp": 2, "ep": 2}, {"tp": 2, "ep": 2, "etp": 2}],
}
LAYERS = {"llama": 4}  # stages of two parts


def collect(folder: str, layout: dict, **settings) -> list[dict[str, torch.Tensor]]:
    """For each server: the tensors that this rank would send to it."""
    from megarl.models.weights.export import layout_of_all
    from megarl.models.weights.fill import coordinate
    from megarl.sync.plan import SLAB_BYTES, TrainerRank, holdings, make_plan
    from megarl.sync.source import Pieces, Source

    fresh_parallel(**layout)
    chunks = build_tiny(folder, **layout)
    ranks = layout_of_all(coordinate(chunks), world())
    settings = {"dtype": "bfloat16", "bucket_bytes": SLAB_BYTES + 20_000, **settings}
    places = [TrainerRank(at.pp_rank) for at in ranks]
    plan = make_plan(holdings(chunks[0].weight_table, ranks), places, ["127.0.0.1"] * 2, **settings)
    source = Source(Pieces(chunks), plan, world(), getattr(torch, settings["dtype"]))
    routes = list(range(len(plan.routes)))
    found: dict[str, torch.Tensor] = {}
    buckets = source.buckets
    for number in range(max(len(sent) for route in routes for sent in plan.routes[route].senders.values())):
        bucket = buckets[number] if number < len(buckets) else None
        out = None if bucket is None else torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
        source.fill(number, routes, out)
        for entry in bucket.entries if bucket else ():
            flat = out[entry.offset : entry.offset + entry.nbytes]
            found[entry.name] = flat.view(getattr(torch, entry.dtype)).view(entry.shape).clone()
    assert source.peak_staged <= SLAB_BYTES
    mine = source.route
    return [found if mine is not None and s in plan.routes[mine].receivers else {} for s in range(2)]


def collect_all(cases: list) -> list:
    return [collect(*case[:2], **(case[2] if len(case) > 2 else {})) for case in cases]


def assert_equal(folder: str, ranks: list, dtype: torch.dtype, case: str) -> None:
    expected = load_folder(Path(folder))
    for server in range(2):
        parts = [rank[server] for rank in ranks]
        assert sum(len(part) for part in parts) == len(expected), case
        whole = {name: tensor for part in parts for name, tensor in part.items()}
        assert whole.keys() == expected.keys(), case
        for name, tensor in expected.items():
            assert torch.equal(whole[name], tensor.to(dtype)), (case, name)


@pytest.fixture
def folders(tmp_path):
    for name in TWO:
        save_tiny(tmp_path / name, name, tie_word_embeddings=name == "qwen3", num_hidden_layers=LAYERS.get(name, 2))
    return tmp_path


@pytest.mark.procs
@pytest.mark.parametrize(("processes", "layouts"), [(2, TWO), (4, FOUR)])
def test_every_layout_sends_the_checkpoint(folders, processes, layouts):
    cases = [(str(folders / name), layout) for name, several in layouts.items() for layout in several]
    cases += [(str(folders / "qwen3"), layouts["qwen3"][0], {"senders_per_stage": 1, "dtype": "float32"})]
    ranks = run_distributed(collect_all, processes, 240, cases)
    for number, case in enumerate(cases):
        dtype = torch.float32 if len(case) > 2 else torch.bfloat16
        assert_equal(case[0], [rank[number] for rank in ranks], dtype, str(case))


@pytest.mark.procs
def test_fp8_on_send_is_that_of_the_whole_tensor(folders):
    from megarl.sync.source import quantize_blocks

    cases = [(str(folders / "llama"), {"tp": 2}, {"fp8": True})]
    ranks = run_distributed(collect_all, 2, 120, cases)
    whole = {name: tensor for rank in ranks for name, tensor in rank[0][0].items()}
    for name, tensor in load_folder(folders / "llama").items():
        if f"{name}_scale_inv" in whole:
            values, scale = quantize_blocks(tensor.to(torch.bfloat16))
            assert torch.equal(whole[name].view(torch.uint8), values.view(torch.uint8)), name
            assert torch.equal(whole[f"{name}_scale_inv"], scale), name
        else:
            assert torch.equal(whole[name], tensor.to(torch.bfloat16)), name
    assert sum(name.endswith("_scale_inv") for name in whole) == LAYERS["llama"] * 7


def give(device: str) -> list[str]:
    """Devices that rank 0 of two tensor-parallel ranks sends its pieces from, when buckets are on `device`."""
    from types import SimpleNamespace
    from unittest.mock import patch

    import torch.distributed as dist

    from megarl.models.weight_table import WeightTable
    from megarl.sync.plan import holdings, make_plan
    from megarl.sync.source import Source
    from tests.sync.layouts import HERE, config, ranks_of, trainer

    ranks = trainer(tp=2)
    plan = make_plan(holdings(WeightTable.of(config("llama")), ranks), ranks_of(ranks), [HERE], senders_per_stage=1)
    shapes = WeightTable.of(config("llama")).shapes()
    held = {
        (name, region): torch.zeros(shapes[name])[tuple(slice(*span) for span in region)]
        for name, regions in plan.routes[0].givers.items()
        for region, giver in regions
        if giver == 1
    }
    second = SimpleNamespace(rank=1, ranks=(0, 1), process_group=None)
    source, sent = Source(held, plan, second, torch.bfloat16, torch.device(device)), []

    class Done(dist.Work):
        def wait(self, timeout=None) -> bool:
            return True

    def batch(operations):
        sent.extend(tensor.device.type for _, tensor, *_ in operations)
        return [Done()]

    with patch.object(dist, "P2POp", lambda *parts: parts), patch.object(dist, "batch_isend_irecv", batch):
        source.fill(0, [0], None)
    return sent


@pytest.mark.parametrize("device", ["cpu", "meta"])  # meta stands for any device that the parameters are not on
def test_pieces_travel_from_the_device_of_the_buckets(device):
    assert set(give(device)) == {device}
