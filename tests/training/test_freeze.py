"""Parts of a model that stay as they are: the others learn as without them, and checkpoints bring all of it back."""

import pytest
import torch

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.training import EngineConfig, OptimConfig
from tests.dist import single_process
from tests.robots.models.vla import test_sequences
from tests.training import cases
from tests.training.test_vlm_layouts import batch_for, engine_of

OPTIM = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, clip_grad=0)
PARTS = ["tower", "merger", "language_model"]


@pytest.fixture(autouse=True)
def _alone():
    single_process()


def parameters(engine) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.chunks[0].named_parameters()}


def assert_learns(engine, start: dict, want: dict, freeze: list[str]) -> None:
    """Frozen parameters are the same bit for bit, and the others those of the run in which all learn."""
    from megarl.architectures.tensors import part_of

    for name, parameter in engine.chunks[0].named_parameters():
        if part_of(name) in freeze:
            assert torch.equal(parameter, start[name]), name
        else:
            torch.testing.assert_close(parameter, want[name], atol=1e-6, rtol=1e-5, msg=name)
    learn = sum(p.numel() for name, p in engine.chunks[0].named_parameters() if part_of(name) not in freeze)
    held = sum(buffer.grad_data.numel() for buffer in engine.wrapped[0].buffers)
    assert learn <= held < 1.1 * learn + 1000, "gradients of what learns, and some padding"
    state = engine.optimizer.chained_optimizers[0].optimizer.state
    assert sum(one["exp_avg"].numel() for one in state.values()) == learn


@pytest.mark.parametrize("freeze", [PARTS[:1], PARTS[:2], PARTS[2:]], ids="-".join)
def test_frozen_parts_keep_every_bit_and_the_others_learn_as_before(freeze):
    whole = engine_of("qwen3_vl", ParallelConfig(), EngineConfig(), OPTIM)
    start, batch = parameters(whole), batch_for(whole.hf_config)
    cases.train(whole, batch)
    engine = engine_of("qwen3_vl", ParallelConfig(), EngineConfig(recompute="full"), OPTIM, freeze=freeze)
    cases.train(engine, batch)
    assert_learns(engine, start, parameters(whole), freeze)


def test_a_robots_policy_has_these_parts_too(tmp_path):
    from tests.robots.models.vla.small import save_small

    save_small(tmp_path)
    samples = test_sequences.episodes()
    found = []
    for freeze in ([], ["tower"]):
        engine = test_sequences.engine_of(tmp_path, optim=OPTIM, freeze=freeze)
        start = parameters(engine)
        engine.train_step(samples, test_sequences.loss)
        found.append(parameters(engine))
    assert_learns(engine, start, found[0], ["tower"])


def test_a_checkpoint_brings_frozen_parts_back(tmp_path):
    from megarl.training import checkpoint

    settings = {"engine": EngineConfig(), "dtype": torch.bfloat16, "freeze": ["tower"]}
    engine = engine_of("qwen2_5_vl", ParallelConfig(), **settings)
    batch = batch_for(engine.hf_config)
    cases.train(engine, batch)
    checkpoint.save(tmp_path / "checkpoints", 1, {"actor": engine}, {})
    again = engine_of("qwen2_5_vl", ParallelConfig(), **settings, seed=4)
    checkpoint.load(tmp_path / "checkpoints/step_1", {"actor": again})
    for one in (engine, again):
        cases.train(one, batch)
    for name, parameter in parameters(engine).items():
        assert torch.equal(parameter, parameters(again)[name]), name


@pytest.mark.parametrize(
    ("freeze", "sees", "words"),
    [
        (["tower"], False, "this model has no tower"),
        (["language_model"], False, "all parts are frozen"),
        (PARTS, True, "all parts are frozen"),
        (["tower"], True, None),
    ],
)
def test_what_cannot_be_frozen_is_refused_by_name(freeze, sees, words):
    problem = ModelConfig(freeze=freeze).freeze_problem(PARTS if sees else ())
    assert problem is None if words is None else words in str(problem)
