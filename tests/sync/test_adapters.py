"""Separate adapters on real servers: every architecture for which they are allowed, against transformers.

tests/runtime/test_sglang_run.py trains with them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.artifacts.facts import facts_from_config
from megarl.config.model import LoraConfig
from megarl.config.sglang import SGLangConfig
from megarl.rollout.sglang.adapters import ARCHITECTURES, serving_adapters
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.probe import greedy_probe
from tests.dist import fresh_parallel, run_distributed, world
from tests.models.tiny import tiny_dict
from tests.sync import test_sglang
from tests.sync.receivers import weight_sync
from tests.sync.test_sglang import KEY, PROMPT, oracle, serving

pytestmark = [*test_sglang.pytestmark, pytest.mark.campaign("servers")]
LORA = {"rank": 4, "alpha": 6.0}


def push_twice(folder: str, url: str, run_dir: str, tp: int, targets: list[str] | None) -> list[Any]:
    """Push version 1, change all adapters, push version 2; its tag and the reports as data."""
    from megarl.config.sync import SyncConfig
    from megarl.models.weights import export_weights
    from megarl.rollout.sglang.fleet import Fleet, Server
    from tests.models.test_peft import adapted

    fresh_parallel()
    chunks = adapted(Path(folder), LoraConfig(**LORA, targets=targets))
    fleet = Fleet([Server(0, ServerApi(url, KEY, "server 0"), "catching_up")], SGLangConfig())
    sync = weight_sync(chunks, fleet, SyncConfig(adapters="separate", verify="every", timeout_s=60.0), run_dir, tp)
    reports = [sync.push(1)]
    with torch.no_grad():
        for name, parameter in chunks[0].named_parameters():
            if ".adapter." in name:
                parameter.mul_(0.5)
    reports.append(sync.push(2))
    export_weights(chunks, Path(run_dir) / "merged", chunks[0].hf_config, world=world())
    sync.close()
    return [f"2@{sync.run}", *map(dataclasses.asdict, reports)]


@pytest.mark.parametrize(
    ("name", "tp", "targets", "changes"),
    [
        *((name, 1, None, {"moe_intermediate_size": 64}) for name in ARCHITECTURES),  # no width that a CPU server pads
        ("qwen3", 2, None, {"intermediate_size": 128}),
        ("qwen3", 1, ["mlp"], {}),
        ("qwen3_moe", 2, ["attention"], {"intermediate_size": 128, "moe_intermediate_size": 64}),
    ],
)
def test_a_server_computes_with_adapters_what_transformers_computes_with_merged_weights(
    tmp_path, name, tp, targets, changes
):
    lora = LoraConfig(**LORA, targets=targets)
    settings = serving_adapters(
        SGLangConfig(), lora, facts_from_config(tiny_dict(name, **changes), "a test"), cuda=False
    )
    with serving(tmp_path, name, tp_size=tp, arguments=settings.extra_args, **changes) as url:
        run = (str(tmp_path / "model"), url, str(tmp_path), tp, targets)
        ((tag, first, second),) = run_distributed(push_twice, 1, 240, *run)
        assert first["updated"] == second["updated"] == [0]
        assert first["verified"] == second["verified"] > 0
        assert second["nbytes"] < first["nbytes"] / 2
        probe = greedy_probe(ServerApi(url, KEY, "server 0"), PROMPT, 8, 60.0, {"lora_path": tag})
    choice, logps = oracle(tmp_path / "merged", probe.token_ids, negated=False)
    assert probe.token_ids == choice
    # fp32 on both sides: 1.2e-6 was measured.
    torch.testing.assert_close(torch.tensor(probe.logprobs), torch.tensor(logps), atol=1e-4, rtol=0)
