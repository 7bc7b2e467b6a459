"""DeepEP's dispatcher, on the double of its Buffer, against all-to-alls: layers, training, and what is refused."""

import json
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.config.model import ParallelConfig
from megarl.models.hf import facts_of
from megarl.models.layers.experts import deepep
from megarl.system.errors import ConfigError
from tests.deepep_double import signatures
from tests.dist import fresh_parallel, run_distributed
from tests.rollout.cases import build
from tests.training import cases, test_layouts

FOLDER = Path(signatures.__file__).parent
STORED = json.loads(signatures.TABLE.read_text())


@pytest.fixture
def double(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])  # ranks get the path of this process


def test_the_double_has_the_arguments_of_the_newest_version():
    assert signatures.read_signatures((FOLDER / "deep_ep" / "__init__.py").read_text()) == STORED["2.1.0"]


def test_both_versions_take_the_same_calls():
    old, new = (dict(STORED[version]) for version in signatures.VERSIONS)
    made = [each.pop("__init__") for each in (old, new)]
    assert old == new
    assert made[0][:4] == made[1][:4] == ["self", "group", "num_nvl_bytes=", "num_rdma_bytes="]


def layers(layouts: list[dict]) -> list[list[float]]:
    """Largest differences of a layer's output and gradients between the two dispatchers, under each layout."""
    from megatron.core import parallel_state as mpu

    from megarl.models.layers.experts.training import expert_groups

    found = []
    for layout in layouts:
        fresh_parallel(**layout)
        layer = build("qwen3_moe", hf={"num_hidden_layers": 1}, **layout)[0].decoder.layers[0].mlp
        random, results = torch.Generator().manual_seed(mpu.get_data_parallel_rank()), []
        with torch.no_grad():  # rank 1 has few tokens, all for the first experts
            tokens = torch.randn(12 if mpu.get_data_parallel_rank() != 1 else 2, 1, 64, generator=random)
        for kind in (None, deepep.DeepEPDispatcher):
            if kind is not None:
                layer.token_dispatcher = kind(layer.num_local_experts, layer.config, expert_groups())
            layer.zero_grad()
            given = tokens.clone().requires_grad_()
            out = layer(given)[0]
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            results.append([out.detach(), given.grad, *(weight.grad.clone() for weight in layer.parameters())])
        assert min(grad.abs().max() for grad in results[0][:2]) > 1e-3
        found.append([(a - b).abs().max().item() for a, b in zip(*results, strict=True)])
        del out  # its graph holds the buffer
        assert is_freed_for_a_wider_model(layer.token_dispatcher.tp_ep_group)
    return found


def is_freed_for_a_wider_model(group) -> bool:
    """Whether layers that have run do not hold the buffer that is replaced by one for a model with wider rows."""
    before = weakref.ref(deepep._buffer)
    assert deepep.buffer_of(group, 64) is before()
    deepep.buffer_of(group, 128)
    return before() is None


def trained(sizes: list[tuple[dict, dict]], reference: dict) -> list[dict[str, float]]:
    """Errors of engines whose layers use DeepEP, and the number of buffers that they made."""
    from deep_ep import Buffer

    from megarl.models import config

    config.dispatch_of = lambda facts, parallel, dtype, world: parallel.dispatch
    found = test_layouts._all_cases(
        [("moe", {**layout, "dispatch": "deepep"}, settings) for layout, settings in sizes], reference
    )
    assert Buffer.made == len(sizes)
    return found


@pytest.mark.procs
def test_a_layer_computes_what_it_does_with_all_to_alls(double):
    layouts = [{"tp": 2, "ep": 2, "etp": 2}, {"tp": 2, "ep": 2}]
    for rank in run_distributed(layers, 4, 120, layouts):
        for layout, worst in zip(layouts, rank, strict=True):
            assert max(worst) < 1e-6, (layout, worst)


@pytest.mark.procs
def test_training_equals_a_plain_process(double):
    layouts = [({"tp": 2, "sp": True, "ep": 2}, {"recompute": "full"})]
    (reference,) = run_distributed(test_layouts._reference, 1, 120, [("moe", *layout) for layout in layouts])
    for rank in run_distributed(trained, 2, 240, layouts, reference):
        for layout, worst in zip(layouts, rank, strict=True):
            assert max(worst.values()) < 5e-6, (layout, worst)  # as in test_layouts


MOE = facts_of(cases.hf_config("moe"))


def chosen(
    monkeypatch, dtype=torch.bfloat16, here=8, there=True, cuda=True, broken=None, other=None, facts=None, **layout
) -> str:
    def imported():
        if broken is not None:
            raise broken

    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr(deepep, "has_deepep", lambda: there)
    monkeypatch.setattr(deepep, "import_deepep", imported)
    monkeypatch.setattr(deepep.device, "has_cuda", lambda: cuda)
    world = SimpleNamespace(all_gather_json=lambda mine: [other or mine, mine])
    return deepep.dispatch_of(facts or MOE, ParallelConfig(**layout), dtype, world)


@pytest.mark.parametrize("there", [True, False])
def test_all_ranks_choose_the_same(monkeypatch, there):
    with pytest.warns(UserWarning, match="rank .: .*: all-to-alls bring"):
        assert chosen(monkeypatch, ep=16, there=there, other=[not there, None]) == "alltoall"
    with pytest.raises(ConfigError, match="rank 0: deep_ep does not import"):
        chosen(monkeypatch, ep=16, dispatch="deepep", other=[True, "deep_ep does not import"])


def test_dense_models_need_no_dispatcher(monkeypatch):
    assert chosen(monkeypatch, facts=facts_of(cases.hf_config("dense")), dispatch="deepep") == "alltoall"


def test_auto_is_deepep_for_experts_over_machines(monkeypatch):
    assert chosen(monkeypatch, ep=16) == "deepep"
    assert chosen(monkeypatch, ep=8) == "alltoall"
    assert chosen(monkeypatch, ep=8, dispatch="deepep") == "deepep"
    assert chosen(monkeypatch, ep=16, dispatch="alltoall") == "alltoall"
    assert chosen(monkeypatch, ep=16, there=False) == "alltoall"
    with pytest.warns(UserWarning, match="its kernels support bf16 only.*all-to-alls bring"):
        assert chosen(monkeypatch, ep=16, dtype=torch.float32) == "alltoall"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"there": False}, "not installed"),
        ({"cuda": False}, "needs a CUDA device"),
        ({"broken": AssertionError("Invalid NCCL versions")}, "does not import: Invalid NCCL"),
        ({"dtype": torch.float32}, "bf16 only"),
        ({"ep": 1}, "shared by 1 process"),
        ({"ep": 12}, "shared by 12 processes"),
        ({"ep": 8, "here": 4}, "on machines with 4"),
        ({"ep": 16, "here": 16}, "on machines with 16"),
        ({"ep": 4, "etp": 32}, "too many experts"),
    ],
)
def test_deepep_that_cannot_be_is_an_error_at_its_key(monkeypatch, settings, says):
    with pytest.raises(ConfigError, match=rf"parallel\.dispatch: DeepEP cannot .*{says}"):
        chosen(monkeypatch, **{"ep": 16, "dispatch": "deepep", **settings})
