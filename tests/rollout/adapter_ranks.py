"""Runs in the servers' interpreter: two ranks of SGLang's `LoRAManager` load adapters with the hooks of serve.py.

    python adapter_ranks.py SERVE.py OUT.json NAME FOLDERS_OF_RANK_0 FOLDERS_OF_RANK_1

FOLDERS are separated by commas; the ranks load each pair as the adapter NAME. A rank's replies go to OUT.json.RANK.
"""

from __future__ import annotations

import json
import multiprocessing
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import torch


def manager():
    """A manager without a model, which the first steps of a load do not use."""
    from sglang.srt.lora.lora_manager import LoRAManager

    made = LoRAManager.__new__(LoRAManager)
    made.device, made.attn_dp_enabled, made.max_loras_per_batch = torch.device("cpu"), False, 3
    made.configs, made.loras, made.lora_refs, made.num_pinned_loras = {}, {}, {}, 0
    made.load_config = made.lora_backend = made.base_model = made.speculative_algorithm = None
    made.base_hf_config = SimpleNamespace(vocab_size=100, num_hidden_layers=1)
    made.memory_pool = SimpleNamespace(can_support=lambda config: True, remove_lora=lambda uid: None)
    return made


def load_all(rank: int, serve: str, out: str, name: str, *folders: str) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.plugins.hook_registry import HookRegistry

    torch.distributed.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=2)
    layout = SimpleNamespace(tp_size=2, tp_group=SimpleNamespace(cpu_group=torch.distributed.group.WORLD))
    runtime_context.get_parallel = lambda: layout
    apply = HookRegistry.apply_hooks
    runpy.run_path(serve, run_name="serve")
    HookRegistry._hooks = {target: made for target, made in HookRegistry._hooks.items() if ".lora.lora" in target}
    apply()
    loading, replies = manager(), []
    for folder in folders[rank].split(","):
        reply = loading.load_lora_adapter(LoRARef(lora_name=name, lora_path=folder, pinned=False))
        replies.append([reply.success, reply.error_message, list(reply.loaded_adapters), len(loading.loras)])
    Path(f"{out}.{rank}").write_text(json.dumps(replies))


if __name__ == "__main__":
    ranks = [multiprocessing.get_context("fork").Process(target=load_all, args=(n, *sys.argv[1:])) for n in (0, 1)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(each.exitcode for each in ranks))
