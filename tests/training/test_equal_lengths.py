"""Micro-batches of a pipeline on a GPU: equally long where that takes little padding, so that no shapes are sent."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megarl.config.model import ParallelConfig
from megarl.data.batch import Batch, Jagged
from megarl.training import microbatch
from tests.dist import run_distributed, run_pretending
from tests.training.cases import VOCAB, make_engine, outputs, train

CUDA = torch.device("cuda")


def batch_of(*lengths: int) -> Batch:
    """Samples of a prompt token and these many response tokens; each is a micro-batch of its own."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(0, VOCAB, (count,), generator=rng)  # noqa: E731
    fields = {"prompt_ids": [draw(1) for _ in lengths], "response_ids": [draw(count) for count in lengths]}
    fields["loss_weights"] = [torch.full((count,), 1.0 / sum(lengths)) for count in lengths]
    return Batch(
        {name: Jagged.from_list(rows) for name, rows in fields.items()},
        {"sample_id": [f"s{number}" for number in range(len(lengths))]},
    )


def length_of(*lengths: int, pp: int = 2, vpp: int | None = None, device: torch.device = CUDA) -> int | None:
    """Return the common length of micro-batches of these numbers of tokens."""
    parallel = ParallelConfig(pp=pp, vpp=vpp)
    layout = SimpleNamespace(parallel=parallel, pp_size=pp, cp_size=1, cp_rank=0, tp_size=1)
    groups = [[number] if length else [] for number, length in enumerate(lengths)]
    batch = batch_of(*(length or 1 for length in lengths))
    with mock.patch.object(microbatch, "build", lambda *given: given[4]):
        totals, length = microbatch.build_all(batch, groups, layout, device)  # type: ignore[arg-type]
    assert set(totals) == {length}
    return length


@pytest.mark.parametrize(
    ("lengths", "settings", "length"),
    [
        pytest.param((40, 39, 39), {}, 40, id="120 tokens for 118"),
        pytest.param((40, 37, 37), {}, None, id="120 tokens for 114"),
        pytest.param((40, 39, 0), {"device": torch.device("cpu")}, None, id="messages of a CPU wait for nothing"),
        pytest.param((40, 39, 39), {"pp": 1}, None, id="no stages"),
        pytest.param((40, 10), {"vpp": 2, "device": torch.device("cpu")}, 40, id="interleaved stages always"),
    ],
)
def test_padding_is_bounded(lengths, settings, length):
    assert length_of(*lengths, **settings) == length


def steps(pp: int, pretend: bool) -> dict:
    """Log-probs, the loss of a step, and its waits for other stages, on equally long and on uneven samples."""
    import contextlib

    from tests.dist import no_parallel

    found: dict = {}
    if pretend:
        from tests.pretend_cuda import SEEN, Pretend
    with Pretend() if pretend else contextlib.nullcontext():
        no_parallel()
        engine = make_engine("tied", ParallelConfig(pp=pp), layers=2)
        for name, lengths in {"even": (40, 39, 40, 40), "uneven": (40, 25, 40, 30)}.items():
            batch = batch_of(*lengths)
            found[name] = {key: jagged.values for key, jagged in outputs(engine, batch).items()}
            if pretend:
                SEEN.clear()
            found[name]["loss"] = train(engine, batch).result()["loss"]
            if pretend:
                waits = SEEN.by_place()
                found[name]["waits"] = sum(count for place, count in waits.items() if place.startswith("p2p_comm"))
    return found


@pytest.mark.procs
def test_stages_send_shapes_only_of_uneven_micro_batches():
    """And the numbers are those of one process, in which nothing is padded."""
    (plain,) = run_distributed(steps, 1, 240, 1, False)
    every = run_pretending(steps, 2, 240, 2, True)
    assert [found["even"]["waits"] for found in every] == [0, 0]
    assert all(found["uneven"]["waits"] > 0 for found in every)
    for found in every:
        for name in ("even", "uneven"):
            for key, value in plain[name].items():
                # float32, summed in other orders; the second step follows an update
                torch.testing.assert_close(found[name][key], value, rtol=1e-4, atol=1e-4)
