"""A server of two ranks whose second one sees another folder than the trainer's, with SGLang's own `LoRAManager`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megarl.models.weights.peft import DIGESTS, NAME
from megarl.system.compat import sglang
from tests.rollout.forked import run_program
from tests.rollout.servers import need_interpreter

pytestmark = [pytest.mark.procs, pytest.mark.servers, pytest.mark.timeout(300), pytest.mark.campaign("servers")]
SERVE = Path(sglang.__file__).with_name("sglang_server") / "serve.py"
STEM = "base_model.model.model.layers.0.self_attn.o_proj"


def adapter(folder: Path, name: str, change: float = 0.0) -> str:
    """Write an adapter into `folder`, and return its path; `change` is added to B after the hashes were made."""
    folder.mkdir()
    tensors = {f"{STEM}.lora_A.weight": torch.ones(2, 4), f"{STEM}.lora_B.weight": torch.ones(4, 2)}
    sums = {key: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for key, tensor in tensors.items()}
    tensors[f"{STEM}.lora_B.weight"] += change
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"], NAME: name, DIGESTS: sums}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def test_no_rank_keeps_an_adapter_that_one_rank_cannot_load(tmp_path):
    need_interpreter()
    right = adapter(tmp_path / "right", "3@run")
    others = [
        adapter(tmp_path / "changed", "3@run", change=1.0),
        adapter(tmp_path / "before", "3@before"),
        str(tmp_path / "missing"),
        right,
    ]
    out, log = tmp_path / "out.json", tmp_path / "log"
    log.touch()
    folders = [",".join([right] * len(others)), ",".join(others)]
    code = run_program(Path(__file__).with_name("adapter_ranks.py"), [str(SERVE), str(out), "3@run", *folders], log)
    assert code == 0, log.read_text()
    replies = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1)]
    assert replies[0] == replies[1]
    changed, before, missing, loaded = replies[0]
    assert changed == [False, f"rank 1: 1 of 2 adapter tensors differ from the trainer's: {STEM}.lora_B.weight", [], 0]
    assert before[1].startswith(f"rank 1: {others[1]} is adapter 3@before and not 3@run, so ")
    assert f" does not see {others[2]}; set sync.folder to " in missing[1]
    assert [before[0], missing[0]] == [False, False]
    assert loaded == [True, "compared 3@run", ["3@run"], 1]
