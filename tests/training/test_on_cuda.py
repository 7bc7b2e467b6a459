"""Engines on a pretended GPU: everything is on it, nothing waits for it too often, numbers are those of a CPU."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.dist import run_distributed, run_pretending
from tests.training.cases import make_batch, make_engine, outputs, split_over, train
from tests.training.test_shared_prefixes import engine
from tests.training.test_shared_prefixes import make_batch as batch_with_prefixes

MODELS = ("tied", "moe", "critic")
STEP = 8
"""Waits of a training step beside those of its micro-batches; layers, of experts too, have none."""
MICRO_BATCH = 6 + 3 * 3
"""Copies that build a micro-batch, all before the first one runs, and what the test's own loss reads."""


def left_on_host(engine) -> list[str]:
    return [
        name
        for chunk in engine.chunks
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
        if not tensor.is_cuda
    ]


def numbers(engine, batch) -> dict:
    return {name: jagged.values for name, jagged in outputs(engine, batch).items()}


def logits_of(engine, batch) -> list[str]:
    """Dtypes of the logits that log-probs are made of."""
    from megarl.training import logprob

    seen, reduce = set(), logprob.reduce_logits
    with mock.patch.object(
        logprob, "reduce_logits", lambda logits, *args: (seen.add(logits.dtype), reduce(logits, *args))
    ):
        outputs(engine, batch)
    return sorted(map(str, seen))


def live(model: str) -> dict:
    """An engine's life in bf16."""
    from megarl.system.offload_schedule import PARTS
    from megarl.training import checkpoint
    from tests.pretend_cuda import SEEN, Pretend

    with Pretend():
        engine, batch = make_engine(model, layers=2, dtype=torch.bfloat16), make_batch()
        found: dict = {"on host": left_on_host(engine), "before": numbers(engine, batch)}
        found["logits"] = logits_of(engine, batch)
        engine.hold()
        engine.hold(*PARTS)
        found["after"] = numbers(engine, batch)
        SEEN.clear()
        found["losses"] = [train(engine, batch).result()["loss"]]
        found["waits"] = SEEN.by_place()
        with tempfile.TemporaryDirectory() as folder:
            saved = checkpoint.save(Path(folder), 1, {"actor": engine}, {})
            other = make_engine(model, layers=2, dtype=torch.bfloat16, seed=9)
            checkpoint.load(saved, {"actor": other})
        found["went on"] = [train(e, batch).result()["loss"] for e in (engine, other)]
        frozen = make_engine(model, layers=2, dtype=torch.bfloat16, frozen=True)
        found["frozen on host"], found["frozen"] = left_on_host(frozen), numbers(frozen, batch)
    return found


def share_prefixes() -> list[dict]:
    """Log-probs, loss and waits of a step of whole samples, and of one with shared prefixes."""
    from tests.pretend_cuda import SEEN, Pretend

    found = []
    with Pretend():
        for share in (False, True):
            made, batch = engine("dense", share=share, dtype=torch.bfloat16), batch_with_prefixes()
            before = numbers(made, batch)
            SEEN.clear()
            loss = train(made, batch).result()["loss"]
            found.append({**before, "loss": loss, "waits": SEEN.by_place()})
    return found


def every_life() -> dict:
    return {**{model: live(model) for model in MODELS}, "shared prefixes": share_prefixes()}


@contextlib.contextmanager
def watched(log: list[str]):
    """Write to `log` when numbers of rows begin to travel to the host, when rows are copied, when numbers are read."""
    from megarl.models.layers.experts import training
    from megarl.models.rows import RowRoute

    spread = RowRoute.spread

    class Copy(training.HostCopy):
        def __init__(self, tensor) -> None:
            log.append("sent")
            super().__init__(tensor)

        def tolist(self):
            log.append("read")
            return super().tolist()

    def logged(self, tokens):
        log.append("rows")
        return spread(self, tokens)

    with mock.patch.object(training, "HostCopy", Copy), mock.patch.object(RowRoute, "spread", logged):
        yield


def exact(models: list[str], tp: int = 1, pretend: bool = True) -> dict:
    """Log-probs of all samples and a step's loss in float32; this rank's share of data-parallel ranks is all of it."""
    from megarl.config.model import ParallelConfig
    from tests.dist import no_parallel

    found: dict = {}
    if pretend:
        from tests.pretend_cuda import SEEN, Pretend
    with Pretend() if pretend else contextlib.nullcontext():
        for model in models:
            no_parallel()
            engine = make_engine(model, ParallelConfig(tp=tp, sp=tp > 1), layers=1)
            batch = split_over(make_batch(), engine.layout.dp_rank, engine.layout.dp_size)
            log: list[str] = []
            if pretend:
                SEEN.clear()
            with watched(log):
                found[model] = {**numbers(engine, batch), "loss": train(engine, batch).result()["loss"]}
            found[model]["log"] = log
            found[model]["waits"] = SEEN.by_place() if pretend else {}
            found[model]["again"] = train(engine, batch).result()["loss"]
    return found


@pytest.fixture(scope="module")
def lives() -> dict:
    return run_pretending(every_life, 1, 300)[0]


@pytest.mark.procs
@pytest.mark.parametrize("model", MODELS)
def test_no_parameter_and_no_buffer_stays_on_the_host(lives, model):
    assert lives[model]["on host"] == lives[model]["frozen on host"] == []


@pytest.mark.procs
def test_logits_of_bf16_weights_are_float32(lives):
    assert lives["tied"]["logits"] == lives["moe"]["logits"] == ["torch.float32"]


@pytest.mark.procs
@pytest.mark.parametrize("model", MODELS)
def test_offload_and_checkpoints_keep_every_number(lives, model):
    found = lives[model]
    for name, before in found["before"].items():
        assert torch.equal(found["after"][name], before), name
        assert torch.equal(found["frozen"][name], before), name
    assert found["went on"][0] == found["went on"][1] < found["losses"][0]


@pytest.mark.procs
@pytest.mark.parametrize("model", MODELS)
def test_the_host_waits_a_bounded_number_of_times(lives, model):
    micros = 3
    waits = lives[model]["waits"]
    assert sum(waits.values()) <= STEP + micros * MICRO_BATCH, waits
    assert not [place for place in waits if "nonzero" in place], waits


@pytest.mark.procs
def test_shared_prefixes_compute_what_whole_samples_do(lives):
    whole, shared = lives["shared prefixes"]
    torch.testing.assert_close(shared["logp"], whole["logp"], rtol=0, atol=0.05)  # bf16: eight bits
    assert shared["loss"] == pytest.approx(whole["loss"], abs=2e-3)
    assert sum(shared["waits"].values()) <= STEP + 3 * MICRO_BATCH, shared["waits"]


@pytest.mark.procs
def test_two_tensor_parallel_ranks_compute_what_a_cpu_does():
    models = ["tied", "moe"]
    (plain,) = run_distributed(exact, 1, 240, models, 1, False)
    for found in run_pretending(exact, 2, 240, models, 2):
        for model in models:
            for name in ("logp", "entropy", "loss", "again"):
                # float32, summed in other orders; the second loss comes after an update
                torch.testing.assert_close(found[model][name], plain[model][name], rtol=1e-4, atol=1e-4)
        log, waits = found["moe"]["log"], found["moe"]["waits"]
        # The rows of tokens keep the device busy while the host waits for their numbers, once in a layer and pass.
        assert log[:4] == ["sent", "rows", "read", "rows"]
        assert log.count("sent") == log.count("read") == log.count("rows") / 3
        assert not [place for place in waits if place.startswith("training.py") and "tolist" in place], waits
