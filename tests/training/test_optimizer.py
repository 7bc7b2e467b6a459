"""Schedules by hand, and AdamW against torch's own."""

import pytest
import torch

from megarl.config.training import EngineConfig, OptimConfig
from megarl.training.optimizer import learning_rate
from tests.training import cases


def _rates(steps=range(10), total=10, **kwargs) -> list[float]:
    config = OptimConfig(lr=1.0, **kwargs)
    return [learning_rate(config, step, total) for step in steps]


def test_constant_with_warm_up():
    assert _rates(range(6), warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_linear_decay_over_the_run():
    assert _rates(schedule="linear") == pytest.approx([1 - k / 10 for k in range(10)])
    assert _rates([10, 50], schedule="linear", min_lr=0.1) == pytest.approx([0.1, 0.1])


def test_cosine_from_warm_up_to_decay_steps():
    found = _rates([0, 2, 4, 6, 7], schedule="cosine", warmup_steps=2, decay_steps=6, min_lr=0.2)
    assert found == pytest.approx([1 / 3, 1.0, 0.6, 0.2, 0.2])


def test_a_shortened_run_cuts_its_warm_up():
    assert _rates(range(4), total=3, schedule="cosine", warmup_steps=10) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.0])
    assert _rates([0, 1], total=1, schedule="linear", warmup_steps=10) == pytest.approx([1.0, 0.0])


def test_warm_up_as_a_share_of_the_run():
    assert _rates(range(6), total=40, warmup_ratio=0.1) == _rates(range(6), total=40, warmup_steps=4)
    assert _rates(range(2), total=40, warmup_ratio=0.0) == [1.0, 1.0]
    assert _rates([28], total=100, warmup_ratio=0.29) == _rates([28], total=100, warmup_steps=29)  # 28.999999999999996


@pytest.mark.parametrize("distributed", [True, False])
def test_step_is_clipped_adamw_with_undecayed_vectors(alone, distributed):
    optim = OptimConfig(lr=1e-2, weight_decay=0.5, eps=1e-3, clip_grad=0.1, schedule="linear")
    engine = cases.make_engine(
        "tied", optim=optim, engine=EngineConfig(micro_batch_tokens=64, distributed_optimizer=distributed)
    )
    mine = [torch.nn.Parameter(p.detach().clone()) for p in engine.chunks[0].parameters()]
    groups = [
        {"params": [p for p in mine if p.dim() > 1]},
        {"params": [p for p in mine if p.dim() == 1], "weight_decay": 0.0},
    ]
    oracle = torch.optim.AdamW(groups, lr=optim.lr, weight_decay=0.5, eps=optim.eps)
    for step in range(3):
        metrics = engine.train_step(cases.make_batch(seed=step), cases.loss_fn).result()
        norm = metrics["actor/grad_norm"]
        for p, own in zip(engine.chunks[0].parameters(), mine, strict=True):
            # What is in the buffer has been clipped in place.
            own.grad = p.main_grad.clone()
        clipped = torch.stack([p.grad.norm() for p in mine]).norm().item()
        assert norm > 0.1
        assert clipped == pytest.approx(0.1, rel=1e-4)
        for group in oracle.param_groups:
            group["lr"] = metrics["actor/lr"]
        oracle.step()
    for p, own in zip(engine.chunks[0].parameters(), mine, strict=True):
        torch.testing.assert_close(p, own, rtol=1e-6, atol=1e-7)
