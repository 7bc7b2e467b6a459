"""How held-out responses are drawn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.config.rollout import HeldOutSamplingConfig, RolloutConfig, SamplingConfig, ValidationConfig
from megarl.config.run import RunConfig
from megarl.runtime import inference, validate
from megarl.system.comm import WorkerGroup


class SeenError(Exception):
    """The settings that generation is called with."""


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (validate, validate.validate),
        (inference.rollout, inference._write_responses),
    ],
)
def test_end_tokens_of_training_also_end_held_out_responses(module, call, monkeypatch, tmp_path: Path) -> None:
    def generate(c: object, rollout: object, prompts: object, sampling: SamplingConfig) -> None:
        raise SeenError(sampling)

    monkeypatch.setattr(validate, "rounds", lambda *args: [["prompt"]])
    monkeypatch.setattr(inference, "rounds", lambda *args: [["prompt"]])
    monkeypatch.setattr(module, "generate", generate)
    config = RunConfig(
        name="case",
        rollout=RolloutConfig(sampling=SamplingConfig(stop_token_ids=[7, 5])),
        validation=ValidationConfig(sampling=HeldOutSamplingConfig(stop_token_ids=[9, 5])),
    )
    layout = SimpleNamespace(rank=0, dp_rank=0, dp_size=1, dp_group=WorkerGroup.alone())
    with pytest.raises(SeenError) as caught:
        call(SimpleNamespace(config=config, layout=layout, val_data=[1], run_dir=tmp_path, context=None, rollout=None))
    (sampling,) = caught.value.args
    assert sampling.stop_token_ids == [9, 5, 7]
    assert sampling.temperature == 0
