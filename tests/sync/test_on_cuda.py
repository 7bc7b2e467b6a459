"""Weights on a pretended GPU: from the trainer's parameters into buckets, and from buckets into a server's."""

from __future__ import annotations

import pytest
import torch

from tests.dist import run_distributed, run_pretending

MODELS = ("qwen3", "qwen3_moe")


def buckets(device: str) -> dict:
    """Sums of the tensors that one trainer sends from `device`, by model and device of the buckets."""
    from megarl.models.weights.export import layout_of_all
    from megarl.models.weights.fill import coordinate
    from megarl.sync.plan import SLAB_BYTES, TrainerRank, holdings, make_plan
    from megarl.sync.source import Pieces, Source
    from tests.dist import fresh_parallel, world
    from tests.rollout.cases import build

    fresh_parallel()
    found: dict = {}
    for kind in MODELS:
        chunks = build(kind)
        ranks = layout_of_all(coordinate(chunks), world())
        for fp8 in (False, True):
            plan = make_plan(
                holdings(chunks[0].weight_table, ranks),
                [TrainerRank()],
                ["127.0.0.1"],
                bucket_bytes=SLAB_BYTES + 20_000,
                fp8=fp8,
            )
            for where in {"cpu", device}:
                source = Source(Pieces(chunks), plan, world(), torch.bfloat16, torch.device(where))
                sums = {}
                for number, bucket in enumerate(source.buckets):
                    out = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=where)
                    source.fill(number, [0], out)
                    for entry in bucket.entries:
                        sums[entry.name] = int(out[entry.offset : entry.offset + entry.nbytes].long().sum())
                found[f"{kind} {where.partition(':')[0]} {fp8}"] = sums
    return found


def pretended_buckets() -> dict:
    from tests.pretend_cuda import Pretend

    with Pretend():
        return buckets("cuda:0")


@pytest.mark.procs
def test_buckets_hold_the_same_bytes_wherever_parameters_and_buckets_are():
    (plain,), (found,) = run_distributed(buckets, 1, 120, "cpu"), run_pretending(pretended_buckets, 1, 120)
    for kind in MODELS:
        for fp8 in (False, True):
            for where in ("cpu", "cuda"):
                assert found[f"{kind} {where} {fp8}"] == plain[f"{kind} cpu {fp8}"]


def patched() -> list[bool]:
    """Whether a server's model on the device is, after loading and after patching, what loading makes of it.

    Buckets lie elsewhere, here on the host: what the model is given has to be on its own device.
    """
    from tests.pretend_cuda import Pretend
    from tests.sync.test_loader import Model, bucket_of, load_loader, patch_of, tensors

    class Near(Model):
        def load_weights(self, found):
            found = list(found)
            given = [tensor for _, tensor in found if not hasattr(tensor, "places")]  # the others are empty probes
            near.extend(tensor.device == next(self.parameters()).device for tensor in given)
            super().load_weights(found)

    near: list[bool] = []
    loader, same = load_loader(), []
    old, new = tensors(0), tensors(1)
    change = patch_of(old, new)
    with Pretend():
        for rank in (0, 1):
            model, expected = Near(rank).to("cuda"), Model(rank)
            for name, tensor in old.items():
                loader.load(model, bucket_of(name, tensor, "1", last=True))
            assert all(near)
            loader.patch(model, change)
            expected.load_weights(new.items())
            for name, parameter in expected.named_parameters():
                there = model.get_parameter(name)
                same.append(there.is_cuda and torch.equal(there.cpu(), parameter))
    return same


@pytest.mark.procs
def test_the_servers_loader_patches_parameters_on_the_device():
    (same,) = run_pretending(patched, 1, 120)
    assert same == [True] * 18
