"""The engine in one process (and two where it is about ranks): what a step does, and what it never does."""

import pytest
import torch
import torch.distributed as dist

from megarl.config.training import EngineConfig, OptimConfig
from megarl.data.batch import Batch, Jagged
from megarl.system.metrics import Metrics
from megarl.training.guard import NonFiniteError
from tests.dist import fresh_layout, run_distributed
from tests.training import cases


def _hashes(engine) -> list[str]:
    return [cases.digest(p) for chunk in engine.chunks for p in chunk.parameters()]


def _hidden(engine, batch):
    """Float64 hidden states [P + R, H] of one sample after the other, each with its prompt and response."""
    from megarl.models.packing import pack_stream

    chunk = engine.chunks[0]
    for prompt, response in zip(batch["prompt_ids"].unbind(), batch["response_ids"].unbind(), strict=True):
        tokens = torch.cat([prompt, response])
        stream = pack_stream([len(tokens)])
        with torch.no_grad():
            hidden = chunk(stream.input_ids(tokens), stream.position_ids, None, packed_seq_params=stream.params)[:, 0]
        yield hidden.double(), prompt, response


def _logits_oracle(engine, batch, temperature):
    """Log-probs and entropies of one sample after the other, from full float64 logits."""
    chunk, logp, entropy = engine.chunks[0], [], []
    for hidden, prompt, response in _hidden(engine, batch):
        logits = (hidden @ chunk.lm_head_weight.double().t()) / temperature
        rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        logp.append(rows.gather(1, response[:, None])[:, 0])
        entropy.append(-(rows.exp() * rows).sum(-1))
    return torch.cat(logp), torch.cat(entropy)


@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
@pytest.mark.parametrize("budget", [1, 70, 10_000])
def test_logprobs_are_those_of_full_logits_one_by_one(alone, model, budget):
    engine = cases.make_engine(model, frozen=True, engine=EngineConfig(micro_batch_tokens=budget))
    batch = cases.make_batch()
    logp, entropy = engine.logprobs(batch, 0.7)
    want = _logits_oracle(engine, batch, 0.7)
    assert logp.offsets.tolist() == batch["response_ids"].offsets.tolist()
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.values.double(), want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.values.double(), want[1], rtol=1e-5, atol=1e-5)
    assert engine.logprobs(batch, 0.7, entropy=False)[1].values.abs().max() == 0


@pytest.mark.parametrize("model", ["critic", "moe critic"])
@pytest.mark.parametrize("budget", [1, 70])
def test_a_value_is_the_head_on_the_state_before_its_token(alone, model, budget):
    engine = cases.make_engine(model, frozen=True, engine=EngineConfig(micro_batch_tokens=budget))
    batch = cases.make_batch()
    values = engine.values(batch)
    head = engine.chunks[0].value_weight.double()
    want = torch.cat([(hidden[len(prompt) - 1 : -1] @ head.t())[:, 0] for hidden, prompt, _ in _hidden(engine, batch)])
    assert want.std() > 0.1
    assert values.offsets.tolist() == batch["response_ids"].offsets.tolist()
    torch.testing.assert_close(values.values.double(), want, rtol=1e-5, atol=1e-5)


def test_values_of_a_bf16_critic_are_float32(alone):
    engine = cases.make_engine("critic", frozen=True, dtype=torch.bfloat16)
    values = engine.values(cases.make_batch()).values
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_no_samples_give_no_logprobs(alone):
    engine = cases.make_engine(frozen=True)
    logp, entropy = engine.logprobs(cases.make_batch().select([]))
    assert len(logp) == len(entropy) == 0


def test_a_sample_without_prompt_is_refused(alone):
    engine = cases.make_engine(frozen=True)
    rows = {"prompt_ids": [[1], []], "response_ids": [[2], [3]]}
    batch = Batch({key: Jagged.from_list(value, dtype=torch.int64) for key, value in rows.items()})
    with pytest.raises(ValueError, match="sample 1 has 0"):
        engine.logprobs(batch)


def test_frozen_engine_holds_parameters_only(alone):
    engine = cases.make_engine(frozen=True)
    assert engine.optimizer is None
    assert not any(p.requires_grad or hasattr(p, "main_grad") for c in engine.chunks for p in c.parameters())
    with pytest.raises(RuntimeError, match="frozen"):
        engine.train_step(cases.make_batch(), cases.loss_fn)


def test_same_seed_and_layout_are_bit_identical(alone):
    runs = []
    for _ in range(2):
        engine = cases.make_engine("moe")
        metrics = [engine.train_step(cases.make_batch(seed=s), cases.loss_fn).result() for s in range(3)]
        runs.append((metrics, _hashes(engine)))
    assert runs[0] == runs[1]


def test_only_steps_run_in_the_mode_of_training(alone, monkeypatch):
    engine = cases.make_engine(layers=1)
    found, schedule = [], engine._schedule

    def look(*args, **kwargs):
        found.append({module.training for chunk in engine.chunks for module in chunk.modules()})
        return schedule(*args, **kwargs)

    monkeypatch.setattr(engine, "_schedule", look)
    batch = cases.make_batch(2)
    for call in (engine.logprobs, engine.logprobs, lambda batch: engine.train_step(batch, cases.loss_fn)) * 2:
        call(batch)
    assert found == [{False}, {False}, {True}] * 2


@pytest.mark.parametrize(
    ("kept", "distributed", "dtype"),
    [
        ((), True, torch.float32),
        ((), False, torch.bfloat16),
        (("parameters",), True, torch.bfloat16),
        (("parameters",), False, torch.float32),
        (("parameters", "optimizer"), True, torch.bfloat16),
    ],
)
def test_training_goes_on_bit_for_bit_after_parts_were_away(alone, dtype, distributed, kept):
    settings = EngineConfig(micro_batch_tokens=64, distributed_optimizer=distributed)
    ends = []
    for offloads in (False, True):
        engine = cases.make_engine("moe", dtype=dtype, engine=settings)
        engine.train_step(cases.make_batch(), cases.loss_fn)
        if offloads:
            buffers = [b.grad_data for b in (*engine.wrapped[0].buffers, *engine.wrapped[0].expert_parallel_buffers)]
            engine.hold(*kept)
            engine.hold(*kept)
            assert engine.held == set(kept)
            assert sum(b.untyped_storage().nbytes() for b in buffers) == 0
            with pytest.raises(RuntimeError, match="not on the device"):
                engine.train_step(cases.make_batch(), cases.loss_fn)
            engine.hold(*engine.parts)
        metrics = [engine.train_step(cases.make_batch(seed=s), cases.loss_fn).result() for s in (1, 2)]
        ends.append((metrics, _hashes(engine)))
    assert ends[0] == ends[1]


def _nan_at(sample: str):
    def loss(logp, entropy, micro):
        value, metrics = cases.loss_fn(logp, entropy, micro)
        return (value * float("nan"), metrics) if sample in micro["sample_id"] else (value, metrics)

    return loss


@pytest.mark.parametrize("distributed", [True, False])
def test_nan_stops_before_parameters_move(alone, distributed):
    settings = EngineConfig(micro_batch_tokens=64, distributed_optimizer=distributed)
    engine = cases.make_engine(engine=settings)
    engine.train_step(cases.make_batch(), cases.loss_fn)
    before = _hashes(engine)
    with pytest.raises(NonFiniteError) as error:
        engine.train_step(cases.make_batch(), _nan_at("s3"))
    for part in ("optimizer step 1", "phase optimizer", "rank 0", "s3", "decoder.layers.0"):
        assert part in str(error.value)
    assert _hashes(engine) == before
    assert engine.step == 1
    # The step that failed leaves no trace in gradients or moments.
    twin = cases.make_engine(engine=settings)
    for seed in (0, 1):
        want = twin.train_step(cases.make_batch(seed=seed), cases.loss_fn).result()
    assert engine.train_step(cases.make_batch(seed=1), cases.loss_fn).result() == want


def test_infinite_gradient_of_a_finite_loss_is_found(alone):
    def loss(logp, entropy, micro):
        return (logp - logp.detach()).abs().sqrt().sum(), Metrics()

    engine = cases.make_engine()
    with pytest.raises(NonFiniteError, match="gradient of"):
        engine.train_step(cases.make_batch(), loss)


def _one_bad_rank() -> dict:
    from megarl.config.model import ParallelConfig

    out = {}
    for sizes in ({}, {"pp": 2}, {"ep": 2}):
        parallel = ParallelConfig(**sizes)
        layout = fresh_layout(parallel)
        settings = EngineConfig(micro_batch_tokens=64, logits_chunk_tokens=16, balance_replicas=False)
        engine = cases.make_engine("moe", parallel, layout=layout, engine=settings)
        batch = cases.split_over(cases.make_batch(), layout.dp_rank, layout.dp_size)
        before = _hashes(engine)
        try:
            engine.train_step(batch, _nan_at("s8"))
        except NonFiniteError as error:
            out[str(sizes)] = [str(error), _hashes(engine) == before]
    return out


@pytest.mark.procs
def test_all_ranks_stop_when_one_has_a_nan():
    for found in run_distributed(_one_bad_rank, 2, 120):
        assert len(found) == 3
        for message, unchanged in found.values():
            assert unchanged
            assert "rank 1: loss of the micro-batch with samples" in message
            assert "s8" in message


def test_bf16_keeps_small_updates_in_master_weights(alone):
    optim = OptimConfig(lr=2e-4, weight_decay=0.0)
    engine = cases.make_engine(dtype=torch.bfloat16, optim=optim)
    start = [p.detach().clone() for p in engine.chunks[0].parameters()]
    for _ in range(30):
        engine.train_step(cases.make_batch(2), cases.loss_fn)
    moved = [(a - b).abs().max().item() for a, b in zip(start, engine.chunks[0].parameters(), strict=True)]
    # One step of 2e-4 rounds to nothing for the norm weights, which are 1; thirty of them do not.
    assert sum(value > 0 for value in moved) == len(moved)
    assert all(p.dtype == torch.bfloat16 and p.main_grad.dtype == torch.float32 for p in engine.chunks[0].parameters())


def test_bf16_is_near_fp32(alone):
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        engine = cases.make_engine(dtype=dtype)
        found[dtype] = engine.train_step(cases.make_batch(), cases.loss_fn).result()
    for key in ("logp", "actor/grad_norm"):
        assert found[torch.bfloat16][key] == pytest.approx(found[torch.float32][key], rel=0.05)


def test_sft_step_is_minus_weighted_logp(alone):
    engine = cases.make_engine()
    batch = cases.make_batch()
    weights = batch["response_ids"].like(torch.full((len(batch["response_ids"].values),), 0.01))
    batch.set("loss_weights", weights)
    logp, _ = engine.logprobs(batch)
    losses = [engine.sft_step(batch).result()["sft/loss"] for _ in range(4)]
    assert losses[0] == pytest.approx(-0.01 * logp.values.sum().item(), rel=1e-5)
    assert losses[3] < losses[0]


def test_a_sample_of_two_turns_trains_like_its_turns_apart(alone):
    from megarl.algorithms.aggregation import aggregation_weights, local_counts

    def step(samples: list[tuple[list[int], list[int], list[bool]]]):
        batch = Batch(
            {
                name: Jagged.from_list([row[i] for row in samples])
                for i, name in enumerate(("prompt_ids", "response_ids"))
            },
            {"sample_id": [f"s{i}" for i in range(len(samples))]},
        )
        mask = Jagged.from_list([row[2] for row in samples], dtype=torch.bool)
        counts = local_counts(mask.values, mask.offsets)
        weights = aggregation_weights("token-mean", mask.values, counts, offsets=mask.offsets, sum_norm=None)
        batch.set("loss_weights", batch["response_ids"].like(weights))
        engine = cases.make_engine()
        engine.sft_step(batch)
        return [parameter.clone() for chunk in engine.chunks for parameter in chunk.parameters()]

    prompt, first, answer, second = [3, 4, 5], [10, 11, 12, 2], [20, 21], [30, 31, 2]
    holes = [True] * 4 + [False] * 2 + [True] * 3
    together = step([(prompt, first + answer + second, holes)])
    apart = step([(prompt, first, [True] * 4), (prompt + first + answer, second, [True] * 3)])
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "recompute"),
    [("moe", "full"), ("moe", ["attention", "moe", "norm"]), ("dense", ["mlp", "norm"])],
    ids=str,
)
def test_recomputation_changes_nothing(alone, model, recompute):
    ends = []
    for kind in ("none", recompute):
        engine = cases.make_engine(model, engine=EngineConfig(micro_batch_tokens=64, recompute=kind))
        batches = [cases.make_batch(seed=s) for s in (0, 1)]
        if model == "moe":
            batches = [cases.with_routes(batch, cases.MODELS["moe"]["num_hidden_layers"]) for batch in batches]
        metrics = [engine.train_step(batch, cases.loss_fn).result() for batch in batches]
        ends.append((metrics, _hashes(engine)))
    assert ends[0] == ends[1]


def test_world_of_this_process(alone):
    assert dist.get_world_size() == alone.world_size == 1
    assert (alone.is_lead, alone.is_first_stage, alone.is_last_stage) == (True, True, True)
    assert alone.describe()["dp"] == 1
