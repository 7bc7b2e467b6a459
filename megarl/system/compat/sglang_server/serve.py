"""Run the unmodified SGLang server as a child of a trainer: `python serve.py ARGUMENTS OF sglang.launch_server`.

This file runs in the servers' own interpreter, without megarl. What it adds to `python -m sglang.launch_server`:

* the server, with all its processes, ends when its parent does, however that happens;
* the API key comes from the environment, so that no process list shows it, and is blotted out of the log;
* the store where its ranks meet listens on one address, where torch's listens on every interface;
* its shared memory has a name that its parent knows, and can remove when the server was killed;
* megarl's loaders are on the path, and an update that fails on any rank is refused, where it would end the server
  or pass unseen (not when memory cannot be mapped: that still ends it);
* adapters of a megarl trainer are read from safetensors files, also by a server that starts with random weights, and
  compared with the name and the hashes that the trainer has written; if any rank fails, no rank keeps the adapter;
* a broadcast bucket is copied to the places in the parameters that megarl's loader has found once;
* a cache that one group of ranks could not drop is reported, where SGLang reports that of the first group;
* an update makes it forget the features of images that earlier weights have made;
* a sample with a seed is the same whatever other requests its batch has;
* expert-parallel ranks load their experts from a tensor with all experts of a layer, where SGLang copies the whole;
* without CUDA, stand-ins for what needs it are on the path, and `sampling_seed` of a request is honoured: SGLang itself
  does that only in its deterministic mode, whose kernels need a GPU;
* without CUDA, the server's processes are forked from this one, and a paused server leaves the core to others.

With CUDA SGLang starts its processes by importing this file again, so what they need stands at the top level.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import importlib.util
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

KEY = os.environ.get("MEGARL_SERVER_KEY", "")
INSTANCE = os.environ.get("MEGARL_SERVER_INSTANCE", "")
ON_CPU = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
PARENT = int(os.environ.get("MEGARL_SERVER_PARENT", "0"))
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Kill this process group when the process PARENT ends.

    The kernel's signal also kills a stopped process, but it is sent when the thread that started this process ends, so
    it is requested only if that was the main thread. A thread that polls works always and kills the whole group.
    """

    def watch() -> None:
        while os.getppid() == PARENT:
            time.sleep(1.0)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    if os.environ.get("MEGARL_SERVER_PDEATHSIG") == "1" and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def mask_api_key() -> None:
    """Replace the API key in every log message of this process, because SGLang logs all its arguments at the start."""
    make = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        text = made.getMessage()
        if KEY in text:
            made.msg, made.args = text.replace(KEY, "***"), ()
        return made

    logging.setLogRecordFactory(record)


def listen_on_one_address() -> None:
    """Make torch's TCPStore, which has no password, listen only on the address by which this server reaches it."""
    # torch.distributed.rendezvous is also a function, so the module is imported by name
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    make = rendezvous.TCPStore

    def store(host_name: str, port: int, is_master: bool = False, **kwargs: Any) -> Any:
        if is_master:
            kwargs["master_listen_fd"] = socket.create_server((host_name, port)).detach()
        return make(host_name=host_name, port=port, is_master=is_master, **kwargs)

    rendezvous.TCPStore = store


def extend_path() -> None:
    """Put megarl's weight loaders, and replacements for packages that are missing or need CUDA, at the front of
    sys.path.
    """
    sys.path.insert(0, str(Path(__file__).parent / "loaders"))
    folder = Path(__file__).parent / "stand_ins"
    if ON_CPU:
        sys.path.insert(0, str(folder / "cpu"))
        importlib.import_module("vision_operators")
    if importlib.util.find_spec("torchvision") is None:
        sys.path.insert(0, str(folder / "text"))


def succeeded_everywhere(success: bool) -> bool:
    """Return whether an update succeeded on all ranks of this server. Every rank calls this once per update."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        return success
    everywhere = torch.tensor(int(success))
    group = get_parallel().tp_group.cpu_group
    torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN, group=group)
    return bool(everywhere.item())


def forget_images() -> None:
    """Drop cached image features, which SGLang would reuse for equal images even with new encoder weights."""
    from sglang.srt.managers import mm_schedule

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def reply_to_failed_updates() -> None:
    """Reply to a failed weight update with the failing rank's message, even if the update raised an exception.
    Unpatched SGLang ends when a tensor update raises, and reports only rank 0's result.
    """
    elsewhere = "another rank of this server failed; see its log"

    def update(call: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        try:
            success, message = call(*args, **kwargs)
        except Exception as error:
            logging.getLogger(__name__).exception("a weight update failed")
            success, message = False, f"{type(error).__name__}: {error}"
        forget_images()
        everywhere = succeeded_everywhere(success)
        return everywhere, elsewhere if success and not everywhere else message

    def handle(call: Any, *args: Any, **kwargs: Any) -> Any:
        answer = call(*args, **kwargs)
        forget_images()
        if not succeeded_everywhere(answer.success) and answer.success:
            answer.success, answer.message = False, elsewhere
        return answer

    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    hook(f"{updater}.update_weights_from_tensor", update)
    # Each of these calls consists of several steps on every rank, so the ranks compare their success after the last.
    manager = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for way in ("disk", "distributed"):
        hook(f"{manager}.update_weights_from_{way}", handle)


def copy_broadcast_buckets() -> None:
    """Make SGLang copy tensors of a broadcast bucket directly into its parameters where megarl knows the places, and
    load only the other tensors itself.

    SGLang's own loading also computes tensors that the model derives from its weights. The direct copy does not, so
    these are computed at the end of the update.
    """

    def load(call: Any, updater: Any, named_tensors: Any) -> tuple[bool, str]:
        from megarl_weight_map import copy_mapped

        try:
            rest = copy_mapped(updater.get_model(), named_tensors)
        except Exception as error:
            logging.getLogger(__name__).exception("a weight update failed")
            return False, f"{type(error).__name__}: {error}"
        return call(updater, rest)

    def end(call: Any, updater: Any, **options: Any) -> None:
        from megarl_weight_map import derive_if_written

        derive_if_written(updater.get_model())
        call(updater, **options)

    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    hook(f"{updater}.load_weights_from_distributed", load)
    hook(f"{updater}.end_weight_update", end)


def first_failure(problem: str) -> str:
    """Return the problem of the first rank of this server that has one; empty if none has. Every rank calls this."""
    import torch
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        return problem
    text = torch.zeros(400, dtype=torch.uint8)
    encoded = problem.encode()[: len(text)]
    text[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    texts = [torch.empty_like(text) for _ in range(get_parallel().tp_size)]
    torch.distributed.all_gather(texts, text, group=get_parallel().tp_group.cpu_group)
    decoded = (bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in texts)
    return next((f"rank {rank}: {each}" if rank else each for rank, each in enumerate(decoded) if each), "")


def load_adapters() -> None:
    """Load low-rank adapters that a megarl trainer has written. Each rank compares them with the trainer's.

    SGLang reads adapters as it reads the model, so a server that starts with random weights could read none. It ignores
    tensors of names that it does not know, and reports only rank 0's result. The trainer writes the name of the adapter
    and the SHA-256 of each tensor into the adapter's settings. The reply to a successful load names the adapter that
    was compared, so the trainer recognises a server that does not compare.
    """

    def load(call: Any, manager: Any, ref: Any) -> Any:
        path, problem, name = Path(ref.lora_path), "", None
        if path.is_absolute() and not path.is_dir():  # SGLang would look for it on the hub
            problem = (
                f"the machine {socket.gethostname()} does not see {path}; set sync.folder to a folder that it shares "
                "with the trainer"
            )
        else:
            result = call(manager, ref)
            problem = "" if result.success else result.error_message or "the adapter cannot be loaded"
        if not problem:
            name = manager.configs[ref.lora_id].hf_config.get("megarl_adapter")
            if name not in (None, ref.lora_name):
                problem = (
                    f"{path} is adapter {name} and not {ref.lora_name}, so this machine does not see the trainer's "
                    "folder; set sync.folder to a folder that it shares with the trainer"
                )
        if failure := first_failure(problem):
            manager.unload_lora_adapter(ref)  # from the ranks that have loaded it
            return manager.create_lora_update_result(success=False, error_message=failure)
        if name is not None:
            result.error_message = f"compared {name}"
        return result

    def read(call: Any, adapter: Any) -> None:
        if "megarl_adapter" not in adapter.config.hf_config:
            call(adapter)
            return
        from safetensors.torch import load_file

        adapter.initialize_weights_from_tensors(load_file(Path(adapter.config.path) / "adapter_model.safetensors"))

    def compare(call: Any, adapter: Any) -> None:
        expected = adapter.config.hf_config.get("megarl_sha256")
        if expected is not None:
            import torch

            loaded = {
                name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
                for layer in adapter.layers
                for name, tensor in layer.weights.items()
            }
            wrong = sorted(name for name in expected if loaded.get(name) != expected[name])
            if wrong:
                shown = ", ".join(wrong[:3])
                raise ValueError(f"{len(wrong)} of {len(expected)} adapter tensors differ from the trainer's: {shown}")
        call(adapter)

    hook("sglang.srt.lora.lora_manager.LoRAManager.load_lora_adapter", load)
    hook("sglang.srt.lora.lora.LoRAAdapter.initialize_weights", read)
    hook("sglang.srt.lora.lora.LoRAAdapter._normalize_weights", compare)


def split_stacked_experts() -> None:
    """Make each expert-parallel rank load only its experts from a tensor with all unquantised experts of a layer, as
    gpt-oss's checkpoints have; SGLang splits only the width of the experts in it.
    """

    def load(call: Any, layer: Any, param: Any, loaded_weight: Any, *args: Any, **kwargs: Any) -> None:
        count = layer.num_local_experts
        if layer.moe_ep_size > 1 and len(loaded_weight) == count * layer.moe_ep_size:
            loaded_weight = loaded_weight[layer.moe_ep_rank * count : (layer.moe_ep_rank + 1) * count]
        call(layer, param, loaded_weight, *args, **kwargs)

    hook("sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE.weight_loader_fused", load)


def report_unflushed_groups() -> None:
    """Make /flush_cache fail if any attention group (`--attn-dp-size`) has kept its cache. SGLang sends the call to all
    groups and waits for their replies, but reports the first reply only.
    """

    async def call_groups(call: Any, communicator: Any, request: Any) -> Any:
        replies = await call(communicator, request)
        flushes = type(request).__name__ == "FlushCacheReqInput"
        return sorted(replies, key=lambda reply: bool(reply.success)) if flushes else replies

    hook("sglang.srt.managers.communicator.FanOutCommunicator.__call__", call_groups)


def name_shared_memory() -> None:
    """Name the server's shared memory after `INSTANCE`, so that leftovers of a killed server can be recognised;
    SGLang's own names cannot."""

    def name_loads(ports: Any, *args: Any, **kwargs: Any) -> None:
        ports.instance_id = INSTANCE

    def name_queue(call: Any, *args: Any, **kwargs: Any) -> str:
        return str(call(*args, **kwargs)).replace("sgl_shm_", f"sgl_shm_{INSTANCE}_", 1)

    hook("sglang.srt.server_args.PortArgs.init_new", name_loads, "AFTER")
    # makes the names of queues between ranks
    queue = "sglang.srt.distributed.device_communicators.shm_broadcast.make_shm_name"
    hook(queue, name_queue)


def hook(target: str, function: Any, when: str = "AROUND") -> None:
    """Make SGLang call `function` around the function `target` (a dotted name), or after it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, getattr(HookType, when))


def require_hooks() -> None:
    """End the server if a function to hook does not exist; unpatched SGLang would log this and run without the hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply, wanted = HookRegistry.apply_hooks, set(HookRegistry._hooks)

    def apply_all() -> None:
        apply()
        missing = wanted - HookRegistry._patched
        if missing:
            raise RuntimeError(
                f"megarl cannot work with this version of SGLang, which lacks {', '.join(missing)}; install the one "
                "that `make sglang-env` installs"
            )

    HookRegistry.apply_hooks = apply_all


def honour_seeds() -> None:
    """Make SGLang pass the `sampling_seed` of every request to its sampling batch, which it does not do by itself."""

    def add_seeds(info: Any, cls: Any, batch: Any, vocab_size: int) -> Any:
        import torch

        if info.sampling_seed is None:
            seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64)
        return info

    target = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    hook(target, add_seeds, "AFTER")


def sample_by_token() -> None:
    """Draw a seeded sample's noise by token id, so that the sample does not depend on other requests in its batch.

    If one request of a batch needs top_k or top_p, as health checks do, SGLang sorts the tokens of the whole batch, and
    then applies the noise by position in the sorted order.
    """

    def sample(call: Any, probs: Any, *filters: Any, **options: Any) -> Any:
        import torch
        from sglang.srt.layers.sampler import sampling_from_probs_torch

        *_, seed, positions = filters  # arguments after top_ks, top_ps, min_ps and the flag for min_ps
        if seed is None:
            return call(probs, *filters, **options)
        _, probabilities, tokens, _ = call(probs, *filters, **options | {"return_filtered_probs": True})
        filtered = torch.zeros_like(probs).scatter_(1, tokens.long(), probabilities)
        sampled = sampling_from_probs_torch(filtered, seed, positions)
        if not options.get("return_filtered_probs"):
            return sampled
        return sampled, probabilities, tokens, filtered.gather(1, sampled.long()[:, None])[:, 0]

    target = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
    hook(target, sample)


def skip_pinning() -> None:
    """Leave host memory unpinned: SGLang pins its buffer of recorded routes, and pinning needs CUDA."""
    hook("sglang.srt.mem_cache.pool_host.common._cuda_host_register", lambda call, *args, **kwargs: None)


def skip_pinning_of_adapters() -> None:
    """Leave the host memory of low-rank adapters unpinned: SGLang pins the tables of each batch, and pinning needs
    CUDA.
    """

    def unpinned(call: Any, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.overrides import TorchFunctionMode

        class Unpinned(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is torch.Tensor.pin_memory:
                    return args[0]
                return function(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})

        with Unpinned():
            return call(*args, **kwargs)

    for method in ("__init__", "prepare_lora_batch"):
        hook(f"sglang.srt.lora.lora_manager.LoRAManager.{method}", unpinned)


def absorb_latents() -> None:
    """Use the form of latent attention that attends to the cached latents, also for prompts: SGLang's attention in
    plain torch reads all keys and values from the cache.
    """

    def handler(call: Any, *args: Any) -> Any:
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

        return lambda attention, batch: AttnForwardMethod.MLA

    registry = "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry"
    hook(f"{registry}.get_handler", handler)


def pad_batches() -> None:
    """Give SGLang's attention in plain torch the method that data-parallel attention needs to pad batches.

    It returns the length of the requests that are added. SGLang's other attention backends have this method.
    """

    def name_length(_: None, backend: Any, *args: Any, **kwargs: Any) -> None:
        backend.get_cpu_graph_seq_len_fill_value = lambda: 1

    hook("sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.__init__", name_length, "AFTER")


def fork_processes() -> None:
    """Fork the server's processes from this one, because a new process would spend ten seconds on imports. Forking is
    safe without CUDA while OpenMP has not started threads.
    """

    def fork(*args: Any, **kwargs: Any) -> None:
        multiprocessing.set_start_method("fork", force=True)

    hook("sglang.srt.entrypoints.engine._set_envs_and_config", fork, "AFTER")


def sleep_while_paused() -> None:
    """Make a paused scheduler sleep until a message arrives, as `--sleep-on-idle` does without requests. SGLang's own
    loop polls, which would keep a CPU core busy during a weight update.
    """

    def rest(call: Any, scheduler: Any) -> None:
        call(scheduler)
        scheduler.maybe_sleep_on_idle()

    paused = "sglang.srt.managers.scheduler.Scheduler._record_scheduler_state_for_paused_engine"
    hook(paused, rest)


if KEY:
    mask_api_key()
if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    if PARENT:
        end_with_parent()
    extend_path()
listen_on_one_address()
reply_to_failed_updates()
copy_broadcast_buckets()
load_adapters()
sample_by_token()
split_stacked_experts()
report_unflushed_groups()
if INSTANCE:
    name_shared_memory()
if ON_CPU:
    honour_seeds()
    skip_pinning()
    skip_pinning_of_adapters()
    absorb_latents()
    pad_batches()
    fork_processes()
    sleep_while_paused()
require_hooks()
if __name__ == "__main__":
    if KEY:
        sys.argv.append(f"--api-key={KEY}")  # written with =, because a key may begin with a dash
    runpy.run_module("sglang.launch_server", run_name="__main__")
