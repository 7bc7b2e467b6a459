"""Changed elements find their places in a server's parameters through the model's own loading."""

import importlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megarl.sync.delta import make_delta, patch_header
from megarl.sync.plan import Entry
from megarl.system.compat.sglang import LOADERS

HIDDEN, HEADS, MIDDLE, EXPERTS, VOCABULARY = 6, 8, 12, 4, 10
SHAPES = {
    "q": (HEADS, HIDDEN),
    "k": (HEADS // 2, HIDDEN),
    "o": (HIDDEN, HEADS),
    "bias": (HEADS,),
    "decay": (2,),
    "embed": (VOCABULARY, HIDDEN),
    "turned": (HIDDEN, MIDDLE),
    **{f"expert{i}.{part}": (MIDDLE, HIDDEN) for i in range(EXPERTS) for part in ("gate", "up")},
    **{f"expert{i}.down": (HIDDEN, MIDDLE) for i in range(EXPERTS)},
}


@pytest.fixture(scope="module")
def loader():
    return load_loader()


def load_module(name: str):
    """A module as a server imports it."""
    if str(LOADERS) not in sys.path:
        sys.path.insert(0, str(LOADERS))
    return importlib.import_module(name)


def load_loader():
    return load_module("megarl_loader")


class Model(nn.Module):
    """One rank of a server with 2: it loads in the ways of SGLang's layers. `loaded` counts what it was given."""

    def __init__(self, rank: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.rank, self.loaded = rank, 0
        for name, shape in {
            "qk": (HEADS // 2 + HEADS // 4, HIDDEN),
            "o": (HIDDEN, HEADS // 2),
            "bias": (HEADS // 2,),
            "decay": (1,),
            "embed": (VOCABULARY // 2 + 3, HIDDEN),  # padded
            "head": (VOCABULARY // 2 + 3, HIDDEN),  # the same numbers
            "turned": (MIDDLE, HIDDEN),
            "w13": (EXPERTS, MIDDLE, HIDDEN),
            "w2": (EXPERTS // 2, HIDDEN, MIDDLE),  # this rank's experts
        }.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))

    def load_weights(self, weights) -> None:
        with ThreadPoolExecutor(2) as pool:  # as SGLang loads experts
            list(pool.map(lambda pair: self._load(*pair), weights))

    def _half(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        size = tensor.shape[dim] // 2
        return tensor.narrow(dim, self.rank * size, size)

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        self.loaded += 1
        if name in ("q", "k"):
            start = 0 if name == "q" else HEADS // 2
            part = self._half(tensor)
            self.qk.data.narrow(0, start, len(part)).copy_(part)
        elif name == "o":
            self.o.data.copy_(self._half(tensor, 1))
        elif name == "bias":
            self.bias.data.copy_(tensor.chunk(2)[self.rank])
        elif name == "decay":
            self.decay.data.fill_(self._half(tensor).item())
        elif name == "embed":
            for target in (self.embed, self.head):
                target[: VOCABULARY // 2].data.copy_(self._half(tensor))
                target[VOCABULARY // 2 :].data.fill_(0)
        elif name == "turned":
            self.turned.data.copy_(tensor.t())
        elif name == "padded":
            self.turned.data.copy_(F.pad(tensor, (0, 1)).t())
        else:
            expert, kind = int(name[6]), name.split(".")[1]
            if kind != "down":
                start = 0 if kind == "gate" else MIDDLE // 2
                self.w13.data[expert].narrow(0, start, MIDDLE // 2).copy_(self._half(tensor).to(tensor.dtype))
            elif expert // 2 == self.rank:
                self.w2.data[expert % 2].copy_(tensor.unsqueeze(0)[0])


def tensors(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g).to(torch.bfloat16) for name, shape in SHAPES.items()}


def patch_of(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    entries = [Entry(name, tuple(t.shape), "bfloat16", 0, t.nbytes, name) for name, t in new.items()]
    base, now = ([t.clone().view(-1).view(torch.uint8) for t in side.values()] for side in (old, new))
    delta = make_delta(base, now, [2] * len(base), 10**6)
    return [(json.dumps(patch_header(entries, delta)), torch.cat([delta.distances, delta.values]))]


def bucket_of(name: str, tensor: torch.Tensor, update: str, *, last: bool) -> list[tuple[str, torch.Tensor]]:
    """A bucket of one tensor, which begins after four other bytes."""
    entry = [name, tensor.shape, "bfloat16", 4, tensor.nbytes]
    header = {"tensors": [entry], "update": update, "sender": "a", "last": last}
    return [(json.dumps(header), torch.cat([torch.zeros(4, dtype=torch.uint8), tensor.view(-1).view(torch.uint8)]))]


def test_a_bucket_is_loaded_and_kept_mapped_until_the_last(loader):
    given = tensors(0)
    model, expected = Model(1), Model(1)
    expected.load_weights(given.items())
    for number, (name, tensor) in enumerate(given.items(), 1):
        last = number == len(given)
        loader.load(model, bucket_of(name, tensor, "1", last=last))
        assert len(loader._MAPPED.get(("1", "a"), ())) == (0 if last else number)
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    for update in ("2", "3"):  # the first of these is never ended
        loader.load(model, bucket_of("bias", given["bias"], update, last=False))
        assert list(loader._MAPPED) == [(update, "a")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("part", [0.05, 0.5, 1.0])
def test_a_patched_model_is_the_loaded_model(loader, rank, part, dtype):
    old, other = tensors(0), tensors(1)
    g = torch.Generator().manual_seed(2)
    new = {name: torch.where(torch.rand(t.shape, generator=g) < part, other[name], t) for name, t in old.items()}
    patched, expected = Model(rank, dtype), Model(rank, dtype)
    patched.load_weights(old.items())
    expected.load_weights(new.items())
    loader.patch(patched, patch_of(old, new))
    for name, parameter in expected.named_parameters():
        assert torch.equal(patched.get_parameter(name).float(), parameter.float()), name
    assert any((p.float() != 0).any() for p in patched.parameters())


def test_places_are_looked_up_once_and_again_when_parameters_move(loader):
    old, model, draft = tensors(0), Model(0), Model(1)  # a server patches its model and its draft model by turns
    model.load_weights(old.items())
    model.loaded = 0
    for seed, lookups in ((1, len(SHAPES)), (2, 0)):
        new = tensors(seed)
        for each in (model, draft):
            loader.patch(each, patch_of(old, new))
            assert each.loaded == lookups
            each.loaded = 0
        old = new
    model.w13.data = model.w13.data.clone()
    loader.patch(model, patch_of(old, tensors(3)))
    assert model.loaded == len(SHAPES)
    expected = Model(0)
    expected.load_weights(tensors(3).items())
    assert torch.equal(model.w13, expected.w13)


def load_all(loader, model: nn.Module, given: dict[str, torch.Tensor]) -> None:
    for number, (name, tensor) in enumerate(given.items(), 1):
        loader.load(model, bucket_of(name, tensor, "1", last=number == len(given)))


@pytest.mark.parametrize("rank", [0, 1])
def test_later_buckets_are_copied_to_the_places_that_the_first_update_has_found(loader, rank):
    model, expected, given = (
        Model(rank),
        Model(rank),
        tensors(1) | {"padded": torch.ones(HIDDEN, MIDDLE - 1).bfloat16()},
    )
    del given["turned"]  # the same parameter; loading it pads, so it has no places
    load_all(loader, model, {name: tensor + 1 for name, tensor in given.items()})
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.loaded = 0
    load_all(loader, model, given)
    expected.load_weights(given.items())
    for name, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    # The first has padding, which only loading makes zero again. A tensor without places may be kept for a later one,
    # and `turned` has no known source here: so experts of the other rank are passed on.
    assert model.loaded == 2 + EXPERTS // 2


class Latent(nn.Module):
    """It joins two projections when it has both, and keeps a derived weight beside its parameters."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.joined = nn.Parameter(torch.zeros(5, HIDDEN, dtype=dtype), requires_grad=False)
        self.calls = 0

    def load_weights(self, weights) -> None:
        self.calls += 1
        kept = dict(weights)
        if len(kept) == 2:
            self.joined.data.copy_(torch.cat([kept["a"], kept["b"]], dim=0))
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.derived = self.joined.float() * 2


def joined_bucket(seed: int) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]:
    both = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()
    entries = [["a", [2, HIDDEN], "bfloat16", 0, 4 * HIDDEN], ["b", [3, HIDDEN], "bfloat16", 4 * HIDDEN, 6 * HIDDEN]]
    header = {"tensors": entries, "update": str(seed), "sender": "a", "last": True}
    return both, [(json.dumps(header), both.view(-1).view(torch.uint8))]


def test_joined_projections_have_places_and_derived_weights_are_never_stale(loader):
    model = Latent()
    for seed, calls in ((1, 1), (2, 1)):  # the one call has probes
        both, bucket = joined_bucket(seed)
        loader.load(model, bucket)
        assert torch.equal(model.joined, both)
        assert torch.equal(model.derived, both.float() * 2)
        assert model.calls == calls
    old, new = ({"a": both[:2], "b": both[2:]} for both in (model.joined.clone(), joined_bucket(3)[0]))
    loader.patch(model, patch_of(old, new))
    assert torch.equal(model.joined, joined_bucket(3)[0])
    assert torch.equal(model.derived, model.joined.float() * 2)


def test_a_tensor_that_loading_changes_is_refused(loader):
    old = {"padded": torch.zeros(HIDDEN, MIDDLE - 1, dtype=torch.bfloat16)}
    with pytest.raises(load_module("megarl_weight_map").CannotPatch, match="pad"):
        loader.patch(Model(0), patch_of(old, {"padded": old["padded"] + 1}))
