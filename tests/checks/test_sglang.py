"""Checks of `rollout.engine: sglang`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import get_args

import pytest

from megarl.checks.checklist import Checklist
from megarl.checks.recipe import check_config
from megarl.config.load import load_config
from megarl.config.rollout import RolloutConfig
from megarl.config.run import RunConfig
from megarl.config.sync import SyncConfig
from megarl.rollout.sglang import adapters, server_places
from megarl.rollout.sglang import checks as server_checks
from megarl.system.compat import sglang
from megarl.system.device import DTYPES
from megarl.system.errors import ConfigError
from tests.models.tiny import EXTRA, tiny_dict

BLOCKS = ["model.hf_config={head_dim: 128, intermediate_size: 512}"]  # whole blocks of FP8
GROUPS = ["rollout.sglang.tp_size=2", "rollout.sglang.attention_dp=2"]
URLS = "rollout.sglang.urls=[http://127.0.0.1:1]"
SEPARATE = ["model.lora={rank: 2}", "sync.adapters=separate"]


def _model(name: str) -> str:
    return f"model.hf_config={json.dumps(tiny_dict(name, vocab_size=20))}"


MIXTURE = [_model("qwen3_moe")]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch) -> None:
    """The same checks on any machine."""
    for module in (server_checks, adapters):
        monkeypatch.setattr(module, "nvidia_devices", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def on(tmp_path: Path) -> list[str]:
    """Overrides that choose servers, with an interpreter that says it has the tested sglang."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {sglang.TESTED}\n")
    python.chmod(0o755)
    return ["rollout.engine=sglang", f"rollout.sglang.python={python}"]


def test_the_embedded_engine_needs_no_server(failures, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert failures() == []


def test_separate_adapters_are_for_servers(failures, tmp_path) -> None:
    (check,) = failures(*SEPARATE)
    assert (check.key, check.found) == ("sync.adapters", "separate")
    assert "only servers load adapters separately from the base model" in check.message


def test_a_complete_setting_passes(failures, on) -> None:
    assert failures(*on) == []


def test_an_interpreter_without_sglang_is_found_before_a_run(failures) -> None:
    (check,) = failures("rollout.engine=sglang", f"rollout.sglang.python={sys.executable}")
    assert check.key == "rollout.sglang.python"
    assert check.message == "sglang is not installed in this interpreter"
    assert check.found == sys.executable
    assert "make sglang-env" in check.fix


def test_the_servers_of_another_machine_need_no_interpreter_here(failures, warned, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = ("rollout.engine=sglang", "cluster.device_memory_gb=80")
    assert [check.key for check in failures(recipe[0])] == ["rollout.sglang.python"]
    assert failures(*recipe) == []
    (check,) = [check for check in warned(*recipe) if check.key == "rollout.sglang.python"]
    assert "`make sglang-env SGLANG_KIND=cuda`" in check.fix
    (named,) = [c for c in warned(*recipe, f"rollout.sglang.python={sys.executable}") if c.key == check.key]
    assert "`make sglang-env SGLANG_KIND=cuda`" in named.fix


@pytest.mark.parametrize("named", [False, True])
def test_a_recipe_for_gpus_does_not_take_an_environment_for_cpus(
    failures, warned, monkeypatch, tmp_path, named
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(server_checks, "sglang_version", lambda python, *, cuda: sglang.TESTED)
    python = sglang.environments_folder() / "cpu-1" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (python.parents[1] / sglang.COMPLETE).write_text('{"kind": "cpu"}')
    recipe = ["rollout.engine=sglang", *([f"rollout.sglang.python={python}"] if named else [])]
    assert failures(*recipe) == []
    (check,) = [c for c in warned(*recipe, "cluster.device_memory_gb=80") if c.key == "rollout.sglang.python"]
    assert ("is for CPUs" if named else "none for cuda") in check.message


def test_on_a_gpu_machine_the_environment_is_one_for_gpus(failures, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(
        server_checks, "find_python", lambda configured, *, cuda: asked.append(cuda) or Path(sys.executable)
    )
    monkeypatch.setattr(server_checks, "sglang_version", lambda python, *, cuda: sglang.TESTED)
    monkeypatch.setattr(server_checks, "check_same_nccl", lambda python: None)
    failures("rollout.engine=sglang")
    monkeypatch.setattr(server_checks, "nvidia_devices", lambda: 8)
    failures("rollout.engine=sglang")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # servers run on the CPU then
    failures("rollout.engine=sglang")
    assert asked == [None, True, None]


def test_an_interpreter_that_does_not_answer_is_found_before_a_run(failures, on, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sglang, "_ANSWER_S", 0.1)
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (check,) = failures(*on)
    assert "did not reply within 0.1 s" in check.message
    assert "make sglang-env" in check.fix


def test_keys_of_servers_that_nobody_starts_are_warned_of_once(warned) -> None:
    servers, sync = warned("rollout.sglang.tp_size=2", "sync.transport=disk", "rollout.sglang.servers=1")
    assert servers.message.startswith("nothing reads rollout.sglang.tp_size: ")  # servers: 1 is the default
    assert sync.message.startswith("nothing reads sync.transport: ")
    assert all("rollout.engine=sglang" in check.fix for check in (servers, sync))


def test_keys_that_start_servers_are_not_for_servers_that_run_already(warned) -> None:
    (check,) = warned("rollout.engine=sglang", URLS, "rollout.sglang.servers=2", "rollout.sglang.tp_size=2")
    assert check.key == "rollout.sglang.urls"
    assert check.message.endswith("nothing uses rollout.sglang.servers")  # how they split the model must be known


@pytest.mark.parametrize(
    ("key", "transport", "used"),
    [
        ("sync.folder=/tmp", "tensor", "disk"),
        ("sync.folder=/tmp", "disk", None),
        ("sync.address=10.0.0.1", "delta", "distributed"),
        ("sync.address=10.0.0.1", "auto", None),
        ("sync.folder=/tmp", "auto", "disk"),
    ],
)
def test_a_key_of_another_transport_is_told(warned, on, key, transport, used) -> None:
    found = warned(*on, key, f"sync.transport={transport}")
    assert [(check.key, check.fix) for check in found] == (
        [(key.partition("=")[0], f"set sync.transport={used}, or leave {key.partition('=')[0]} out")] if used else []
    )


@pytest.mark.parametrize("name", ["no.such.host.invalid", "10..0.0.1"])
def test_an_address_that_nobody_knows_is_told(warned, on, name) -> None:
    (check,) = warned(*on, f"sync.address={name}")
    assert (check.key, check.found) == ("sync.address", name)
    assert "cannot resolve this address" in check.message


def test_a_name_that_stands_for_every_interface_is_refused_where_the_run_starts(config_of, on, monkeypatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [("known",)])
    monkeypatch.setattr("socket.gethostbyname", lambda _: "0.0.0.0")
    config = config_of(*on, "sync.address=every.interface")
    for here in (True, False):
        checks = Checklist(name="servers")
        server_checks._check_address(config, checks, here=here)
        assert [check.key for check in checks.items if check.status == "fail"] == ["sync.address"] * here


def test_a_key_of_other_servers_is_told(warned, on) -> None:
    (check,) = warned(*on, "rollout.sglang.api_key_env=HOME")
    assert check.key == "rollout.sglang.api_key_env"


@pytest.mark.parametrize(
    ("settings", "present", "message", "fix"),
    [
        ([], 0, None, None),
        ([], 3, None, None),
        (["gpus=[2]"], 3, None, None),
        (["gpus=[1]"], 0, "share GPUs with the trainer", "{}=[2]"),
        (["gpus=[2,2]", "servers=2"], 0, "share a GPU", "once"),
        (["servers=2"], 4, None, None),
        (["servers=2", "colocated=true"], 2, None, None),
        (["gpus=[0]", "colocated=true"], 2, None, None),
        (["extra_args=[--base-gpu-id=2]"], 2, None, None),
    ],
)
def test_servers_on_the_trainers_gpus_are_told(warned, on, monkeypatch, settings, present, message, fix) -> None:
    for module in (server_checks, server_places):
        monkeypatch.setattr(module, "nvidia_devices", lambda: present)
    key = "rollout.sglang.gpus"
    settings = [f"rollout.sglang.{setting}" for setting in settings]
    found = [check for check in warned(*on, "cluster.nproc=2", *settings) if check.key == key]
    assert len(found) == (0 if message is None else 1)
    for check in found:
        assert message in check.message
        assert check.fix.endswith(fix.format(key))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")  # the trainer's GPUs are others then
    assert [check for check in warned(*on, "cluster.nproc=2", *settings) if check.key == key] == []


@pytest.mark.parametrize(
    ("settings", "present", "fix"),
    [
        ([], 2, "colocated=true"),
        (["servers=2"], 3, "colocated=true"),
        (["servers=2", "tp_size=2", "colocated=true"], 2, "lower rollout.sglang.servers or tp_size"),
    ],
)
def test_a_machine_with_too_few_gpus_for_the_servers_is_refused(failures, on, monkeypatch, settings, present, fix):
    for module in (server_checks, server_places):
        monkeypatch.setattr(module, "nvidia_devices", lambda: present)
    settings = [f"rollout.sglang.{setting}" for setting in settings]
    (check,) = [check for check in failures(*on, "cluster.nproc=2", *settings) if check.key == "rollout.sglang.gpus"]
    assert f"it has {present}, of which the trainer uses 2" in check.message
    assert check.fix.endswith(fix)


@pytest.mark.parametrize(("servers", "told"), [(8, "4 of the 8 GPUs of a machine have no server"), (16, "")])
def test_gpus_that_wait_while_servers_on_others_generate_are_told(servers, told) -> None:
    keys = ["cluster.nnodes=2", "cluster.nproc=16", f"rollout.sglang.servers={servers}"]
    checked = check_config(load_config("grpo_qwen3_8b_8gpu", keys), here=False)
    found = [check.message for check in checked.items if "have no server" in check.message]
    assert [told in message for message in found] == ([True] if told else [])


@pytest.mark.parametrize("verify", ["first", "every"])
def test_fp8_is_told_to_leave_out_checksums(warned, verify) -> None:
    given = "rollout.engine=sglang", URLS, "sync.fp8=true"
    uncorrected, check = warned(*given, f"sync.verify={verify}")
    assert (uncorrected.key, check.key) == ("sync.fp8", "sync.verify")
    assert "no checksums" in check.message
    assert warned(*given, "sync.verify=off", "rollout_correction.preset=decoupled_token_is") == []


def test_fp8_in_the_cache_asks_for_a_correction_and_a_gpu(failures, warned) -> None:
    given = "rollout.engine=sglang", "rollout.sglang.kv_cache_dtype=fp8_e4m3"
    assert "rollout.sglang.kv_cache_dtype" in [check.key for check in failures(*given)]
    gpu = *given, "cluster.device_memory_gb=80"
    assert "rollout.sglang.kv_cache_dtype" in [check.key for check in warned(*gpu)]
    corrected = warned(*gpu, "rollout_correction.preset=decoupled_token_is")
    assert "rollout.sglang.kv_cache_dtype" not in [check.key for check in corrected]


def test_a_missing_interpreter_is_told_with_the_command_that_makes_one(failures, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (check,) = failures("rollout.engine=sglang")
    assert check.key == "rollout.sglang.python"
    assert str(tmp_path) in check.message
    assert "`make sglang-env`" in check.fix


def test_servers_that_run_already_need_no_interpreter(failures, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert failures("rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:30000]") == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.sglang.python=/no/such/python"], "rollout.sglang.python"),
        (["rollout.sglang.tp_size=4", "rollout.sglang.ep_size=3"], "rollout.sglang.ep_size"),
        (["rollout.sglang.tp_size=2", "rollout.sglang.ep_size=2"], "rollout.sglang.ep_size"),  # no experts
        (["rollout.sglang.tp_size=3"], "rollout.sglang.tp_size"),
        (["cluster.nproc=2", "cluster.nnodes=2", "rollout.sglang.servers=3"], "rollout.sglang.servers"),
        (["rollout.sglang.tp_size=2", "rollout.sglang.gpus=[0]"], "rollout.sglang.gpus"),
        (["rollout.sglang.context_length=20"], "rollout.sglang.context_length"),
        (["rollout.sglang.context_length=22", "validation.sampling.max_new_tokens=9"], "rollout.sglang.context_length"),
        (["rollout.sglang.extra_args=[--custom-weight-loader,a.b]"], "rollout.sglang.extra_args"),
        (["cluster.nproc=2", "cluster.timeout_s=200", "reward.timeout_s=10"], "rollout.sglang.start_timeout_s"),
        (["rollout.sampling.min_new_tokens=2"], "rollout.sampling.min_new_tokens"),
        (["rollout.sampling.logprobs=processed"], "rollout.sampling.logprobs"),
        (["validation.sampling.min_new_tokens=2"], "validation.sampling.min_new_tokens"),
        (["rollout.sampling.min_p=0.1"], "rollout.sampling.min_p"),
        (["validation.sampling.min_p=0.1"], "validation.sampling.min_p"),
        (["rollout.stale_steps=1"], "rollout.stale_steps"),
        (["rollout.sglang.host=0"], "rollout.sglang.host"),
        (
            ["cluster.nproc=2", "cluster.nnodes=2", "rollout.sglang.servers=2", "rollout.sglang.host=10.0.0.1"],
            "rollout.sglang.host",
        ),
        (["rollout.sglang.tp_size=2", "rollout.sglang.attention_dp=4"], "rollout.sglang.attention_dp"),
        (
            [*GROUPS, "rollout.sglang.speculative={algorithm: NGRAM}"],
            "rollout.sglang.speculative.algorithm",
        ),
        (
            [*GROUPS, "rollout.sglang.extra_args=[--enable-dp-lm-head]"],
            "rollout.sglang.extra_args",
        ),
        ([*GROUPS, "rollout.sglang.extra_args=[--moe-a2a-backend,deepep]"], "rollout.sglang.extra_args"),
        (["rollout.sglang.extra_args=[--attn-dp-size,'2']"], "rollout.sglang.extra_args"),
        (["rollout.sglang.dp_size=2"], "rollout.sglang.dp_size"),
        (["rollout.sglang.extra_args=[--host,0.0.0.0]"], "rollout.sglang.extra_args"),
        (["rollout.sglang.extra_args=[--hos=0.0.0.0]"], "rollout.sglang.extra_args"),
        (["cluster.nproc=2", "sync.timeout_s=600"], "sync.timeout_s"),
        (["rollout.sglang.colocated=true", "rollout.sglang.urls=[http://127.0.0.1:1]"], "rollout.sglang.colocated"),
        (["sync.fp8=true"], "sync.fp8"),  # 16 keys and values of a head
        (["rollout.sglang.speculative={algorithm: EAGLE}"], "rollout.sglang.speculative.draft_path"),
        (
            ["rollout.sglang.speculative={algorithm: NGRAM, draft_path: some/model}"],
            "rollout.sglang.speculative.draft_path",
        ),
        (
            ["rollout.sglang.speculative={algorithm: STANDALONE, draft_path: a/b}", "sync.transport=disk"],
            "sync.transport",
        ),
        (["rollout.sglang.speculative={algorithm: NGRAM, topk: 2}"], "rollout.sglang.speculative"),
        (["rollout.sglang.speculative={algorithm: EAGLE, draft_path: a/b, steps: 3}"], "rollout.sglang.speculative"),
        (
            ["rollout.sglang.speculative={algorithm: EAGLE, draft_path: a/b, steps: 3, topk: 1, draft_tokens: 8}"],
            "rollout.sglang.speculative.draft_tokens",
        ),
        (["rollout.sglang.extra_args=[--speculative-algorithm,NGRAM]"], "rollout.sglang.extra_args"),
        (["rollout.sglang.urls=[127.0.0.1:1]"], "rollout.sglang.urls"),
        (["rollout.sglang.urls=[http://a:1]", "rollout.sglang.api_key_env=NO_KEY"], "rollout.sglang.api_key_env"),
        (["rollout.sglang.urls=[http://127.0.0.1:1,http://127.0.0.1:1]"], "rollout.sglang.urls"),
        (["rollout.sglang.max_total_tokens=20"], "rollout.sglang.max_total_tokens"),
        (["sync.address=::0"], "sync.address"),
        (["sync.transport=shards", "model.lora={rank: 2}"], "model.lora"),
        (["sync.pause=in_place"], "sync.pause"),
        (["sync.adapters=separate"], "sync.adapters"),  # no adapters
        *(
            ([*SEPARATE, *overrides], key)
            for overrides, key in (
                ([*GROUPS], "rollout.sglang.attention_dp"),
                (["rollout.sglang.speculative={algorithm: NGRAM}"], "rollout.sglang.speculative"),
                (["sync.fp8=true"], "sync.fp8"),
                (["sync.transport=shards"], "sync.transport"),
                (["sync.transport=delta"], "sync.transport"),
                (["cluster.nnodes=2", "cluster.nproc=2", "sync.folder=/dev/shm/a"], "sync.folder"),
                (
                    ["sync.pause=in_place", "rollout.sglang.extra_args=[--disable-radix-cache]"],
                    "sync.pause",
                ),
                (["rollout.sglang.extra_args=[--max-lora-rank,'64']"], "rollout.sglang.extra_args"),
                (["rollout.sglang.tp_size=2", "model.hf_config.intermediate_size=96"], "rollout.sglang.tp_size"),
                ([*MIXTURE, "model.lora.targets=[attention,experts]"], "model.lora.targets"),
                ([_model("mixtral")], "sync.adapters"),
            )
        ),
        (
            [
                "sync.pause=in_place",
                "rollout.sglang.extra_args=[--disable-radix-cache]",
                "rollout.sglang.urls=[http://127.0.0.1:1]",
            ],
            "sync.pause",
        ),
        (["cluster.nproc=2", "cluster.nnodes=2", "rollout.sglang.servers=2", "sync.address=10.0.0.1"], "sync.address"),
        (["model.dtype=fp32", "rollout.dtype=bf16"], "sync.dtype"),
        (["model.dtype=fp32", "sync.dtype=bf16"], "sync.dtype"),
    ],
)
def test_a_setting_that_cannot_work_names_its_key(failures, on, overrides, key) -> None:
    assert key in [check.key for check in failures(*on, *overrides)]


@pytest.mark.parametrize(
    ("model_type", "dense", "keys"),
    [
        ("qwen3_moe", "mlp_only_layers: [1]", ["model: mlp_only_layers, decoder_sparse_step"]),
        ("qwen3_moe", "decoder_sparse_step: 2", ["model: mlp_only_layers, decoder_sparse_step"]),
        ("qwen3_moe", "decoder_sparse_step: 8", ["model: mlp_only_layers, decoder_sparse_step"]),  # no experts at all
        ("qwen3_moe", "mlp_only_layers: []", []),
        ("glm4_moe", "first_k_dense_replace: 1, attention_bias: true", []),  # SGLang reads this key
    ],
)
def test_servers_have_experts_in_all_layers_of_qwens_mixtures(failures, on, model_type, dense, keys) -> None:
    sizes = "hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8"
    sizes += (
        ", intermediate_size: 64, vocab_size: 20, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16"
    )
    mixture = f"model.hf_config={{model_type: {model_type}, {sizes}, {dense}}}"
    found = [check.key for check in failures(*on, mixture) if check.key.startswith("model:")]
    assert found == keys
    assert not [check for check in failures(mixture) if check.key.startswith("model:")], "the embedded engine can"


_WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
_FULL = ["full_attention"] * 4
_LAYERS = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
_ON_GPUS = "cluster.device_memory_gb=80"
#: What SGLang's class of EXAONE 4 expects.
_EXAONE = {"head_dim": 16, "rope_theta": 1000000}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("model_type", "changes", "overrides", "reason"),
    [
        ("deepseek_v3", {}, [], None),
        ("deepseek_v3", {}, ["sync.fp8=true", "model.dtype=bf16"], "cannot be sent as FP8"),
        ("deepseek_v3", {"rope_scaling": None}, [], "kernels for this model on GPUs only"),
        ("deepseek_v3", {"rope_interleave": False}, [], "kernels for this model on GPUs only"),
        ("deepseek_v3", {"rope_scaling": None}, [_ON_GPUS], None),
        ("deepseek_v3", {"rope_scaling": {**_YARN, "mscale": 0.7}}, [], "expects both mscale"),
        ("deepseek_v3", {"rope_scaling": {**_YARN, "truncate": False}}, [], "truncate"),
        ("deepseek_v3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, [], "of the kind linear"),
        ("exaone4", _EXAONE, [], "kernels for this model on GPUs only"),
        ("exaone4", _EXAONE, [_ON_GPUS], None),
        ("exaone4", {"rope_theta": 1000000}, [], "= 16 numbers, not 24"),
        ("exaone4", {"head_dim": 16}, [], "rope_theta of 1e+06, not 10000"),
        ("exaone4", {**_EXAONE, "layer_types": _WINDOWS}, [], "after every n layers"),
        ("exaone4", {**_EXAONE, "layer_types": _FULL}, [], "gives rotary positions to all layers"),
        ("exaone4", {**_EXAONE, "sliding_window": None, "layer_types": _FULL}, [_ON_GPUS], None),
        ("gemma2", {"tie_word_embeddings": True}, [], "kernels for this model on GPUs only"),
        ("gemma2", {}, [_ON_GPUS], "no head of its own"),
        ("gemma2", {"tie_word_embeddings": True}, [_ON_GPUS], None),
        ("gemma2", {"tie_word_embeddings": True, "layer_types": _WINDOWS}, [_ON_GPUS], "first, third"),
        ("gemma2", {"tie_word_embeddings": True, "rope_scaling": _YARN}, [_ON_GPUS], "of the kind yarn"),
        ("gemma3_text", {}, [], "no head of its own"),
        ("gemma3_text", {"tie_word_embeddings": True, "sliding_window": 1}, [], "at least 2 tokens"),
        ("glm4_moe", {}, [], None),
        ("glm4_moe", {"tie_word_embeddings": True}, [], "stays random with tied embeddings"),
        ("glm4_moe_lite", {}, [], "without a q_lora_rank"),
        ("glm4_moe_lite", {"q_lora_rank": 24}, [], None),
        ("glm4_moe_lite", {"q_lora_rank": 24, "rope_interleave": False}, [], "kernels for this model on GPUs only"),
        (
            "glm4_moe_lite",
            {"q_lora_rank": 24, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
            [],
            "before those with experts",
        ),
        ("granite", {}, [], "biases of attention_bias and mlp_bias"),
        ("granite", {"attention_bias": False, "mlp_bias": False}, [], None),
        ("llama", {"rope_scaling": {**_YARN, "attention_factor": 0.5}}, [], "attention_factor"),
        ("llama", {"rope_scaling": {**_YARN, "attention_factor": 1.1386294361119891}}, [], None),  # what it would be
        ("minimax_m2", {}, [], "kernels for this model on GPUs only"),
        ("minimax_m2", {}, [_ON_GPUS], None),
        ("mistral", {}, [], "without its sliding window of 8 tokens"),
        ("mistral", {"sliding_window": 64}, [], None),  # no sample is longer
        ("olmo2", {"head_dim": 24}, [], "= 16 numbers, not 24"),
        ("phi3", {"rope_scaling": {**_LONGROPE, "attention_factor": 0.5}}, [], "attention_factor"),
        # what it would be without the key
        (
            "phi3",
            {"rope_scaling": {**_LONGROPE, "attention_factor": 1.0801234497346435}, "sliding_window": 64},
            [],
            None,
        ),
        ("qwen3_5_text", {}, [], "kernels for this model on GPUs only"),
        ("qwen3_next", {}, [_ON_GPUS], None),
        (
            "qwen3_next",
            {"head_dim": 12, "partial_rotary_factor": 0.25},
            [_ON_GPUS],
            "an even number of a head's numbers, not 3",
        ),
        ("qwen3_next", {"layer_types": _LAYERS}, [_ON_GPUS], "in every n-th layer"),
    ],
)
def test_models_that_servers_would_compute_otherwise_are_refused(
    failures, on, model_type, changes, overrides, reason
) -> None:
    sizes = {"head_dim": 8, **EXTRA[model_type], **changes}  # in place of the recipe's
    model = f"model.hf_config={json.dumps(tiny_dict(model_type, vocab_size=20, **sizes))}"
    messages = [check.message for check in failures(*on, model, *overrides)]
    assert len(messages) == (reason is not None), messages
    assert reason is None or reason in messages[0]


def test_only_some_classes_have_data_parallel_attention(failures, on) -> None:
    assert failures(*on, *GROUPS) == []  # a qwen3
    llama = f"model.hf_config={json.dumps(tiny_dict('llama', vocab_size=20))}"
    (check,) = failures(*on, *GROUPS, llama)
    assert check.key == "rollout.sglang.attention_dp"
    assert "1; more for deepseek_v3, glm4_moe, " in check.allowed


def test_heads_are_shared_by_the_ranks_of_a_group(failures, on) -> None:
    model = f"model.hf_config={json.dumps(tiny_dict('qwen3', vocab_size=20, num_attention_heads=4))}"
    assert failures(*on, model, "rollout.sglang.tp_size=8", "rollout.sglang.attention_dp=4") == []
    (check,) = failures(*on, model, "rollout.sglang.tp_size=24", "rollout.sglang.attention_dp=4")
    assert (check.key, check.allowed) == ("rollout.sglang.tp_size", "4, 8, 16")


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.sglang.extra_args=[--chunked-prefill-size,'4096']"],
        ["model.dtype=fp32", "rollout.dtype=bf16", "sync.dtype=bf16"],
        ["model.dtype=fp32", "sync.dtype=bf16", "sync.verify=off"],
        ["sync.fp8=true", *BLOCKS],
        ["sync.fp8=true", *BLOCKS, "rollout.sglang.urls=[http://127.0.0.1:1]"],
        ["rollout.sglang.speculative={algorithm: NGRAM, draft_tokens: 8}", "sync.transport=disk"],
        ["rollout.sglang.speculative={algorithm: EAGLE, draft_path: a/b, steps: 3, topk: 1, draft_tokens: 4}"],
        ["rollout.sglang.colocated=true"],  # only advice
        ["sync.address=10.0.0.1"],
        ["sync.pause=in_place", "rollout.sglang.extra_args=[--disable-radix-cache]"],
        [*SEPARATE],
        [*SEPARATE, "rollout.sglang.colocated=true", "sync.folder=/some/place", "sync.pause=abort"],
        [*SEPARATE, *MIXTURE],
    ],
)
def test_a_setting_that_works_passes(failures, on, overrides) -> None:
    assert failures(*on, *overrides) == []


@pytest.mark.parametrize("section", [SyncConfig, RolloutConfig])
def test_every_dtype_that_can_be_chosen_is_known(section) -> None:
    assert set(get_args(section.model_fields["dtype"].annotation)) - {"model"} <= DTYPES.keys()


@pytest.mark.parametrize(
    ("settings", "present", "judged"),
    [
        (["sync.transport=distributed"], 8, True),
        ([], 8, True),  # auto, to servers with GPUs of their own
        (["rollout.sglang.colocated=true"], 8, False),
        (["rollout.sglang.colocated=true", "sync.transport=shards"], 8, False),
        (["sync.transport=disk"], 8, False),
        (["sync.transport=distributed"], 0, False),  # gloo
    ],
)
def test_versions_of_nccl_are_compared_where_nccl_joins_them(failures, on, monkeypatch, settings, present, judged):
    asked = []
    for module in (server_checks, server_places):
        monkeypatch.setattr(module, "nvidia_devices", lambda: present)
    monkeypatch.setattr(server_checks, "check_same_nccl", asked.append)
    failures(*on, "cluster.nproc=2", *settings)
    assert bool(asked) is judged


def test_servers_on_gpus_are_told_what_they_would_miss(warned, on, monkeypatch) -> None:
    for module in (server_checks, server_places):
        monkeypatch.setattr(module, "nvidia_devices", lambda: 8)
    monkeypatch.setattr(server_checks, "check_same_nccl", lambda python: None)
    monkeypatch.setattr(server_checks, "version_in", lambda python, package: "2.10.0")
    old = ConfigError("the driver is too old", where="driver", found="575", fix="install another")
    monkeypatch.setattr(server_checks, "driver_problem", lambda: old)
    monkeypatch.setattr(server_checks, "toolkit_problem", lambda python: None)

    def told(*settings: str) -> list[str]:
        found = warned(*on, "cluster.nproc=2", *settings)
        return [check.message for check in found if check.key in ("driver", "rollout.sglang.python")]

    assert told() == [
        "the driver is too old",
        "trainer and servers have different versions of torch, and exchanging weights between these on GPUs "
        "is untested",
    ]
    assert told("sync.transport=disk") == ["the driver is too old"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # they are on the CPU then
    assert told() == []


def test_interrupted_samples_must_fit_when_they_are_sent_again(failures, on) -> None:
    """A server takes inputs of 6 tokens fewer than it holds."""
    longest = "data.max_prompt_tokens=20", "rollout.sampling.max_new_tokens=10", "validation.sampling.max_new_tokens=10"
    ready = [*on, *longest, "async={max_staleness: 1, order: as_ready, partial: true}"]

    def refused(limit: str) -> bool:
        return "async.partial" in [check.key for check in failures(*ready, f"rollout.sglang.{limit}")]

    assert not refused("context_length=36")
    assert refused("context_length=35")
    assert refused("max_total_tokens=35")
    assert not refused("max_total_tokens=36")


NODES = ("cluster={nproc: 4, nnodes: 2}", "rollout.sglang={servers: 1, tp_size: 2, nnodes: 2}", "data.batch_size=16")


@pytest.mark.parametrize("transport", ["disk", "shards", "auto"])
def test_a_server_on_two_machines_passes(failures, on, transport) -> None:
    assert failures(*on, *NODES) == []
    assert failures(*on, *NODES, "sync.transport=disk", "rollout.sglang.gpus=[2]") == []
    shared = ["rollout.sglang.colocated=true", f"sync.transport={transport}", "cluster.device_memory_gb=80"]
    assert failures(*on, *NODES, *shared, "rollout.sglang.servers=2") == []
    (check,) = failures(*on, *NODES, *shared, "rollout.sglang.servers=3")
    assert (check.key, check.fix) == ("rollout.sglang.servers", "set rollout.sglang.servers=2")


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("rollout.sglang.tp_size=3", "rollout.sglang.nnodes", ["share its 3 tensor-parallel ranks", "1, 3"]),
        ("cluster={nproc: 2, nnodes: 1}", "rollout.sglang.nnodes", ["the run has 1 machine", "at most 1"]),
        ("sync.transport=tensor", "sync.transport", ["memory of one of them", "sync.transport=distributed"]),
        ("sync.transport=delta", "sync.transport", ["memory of one of them"]),
        ("rollout.sglang.extra_args=[--node-rank=1]", "rollout.sglang.extra_args", ["--node-rank"]),
        (
            "cluster={nproc: 8, nnodes: 4}",
            "rollout.sglang.servers",
            ["is not divisible by 2 (cluster.nnodes / rollout.sglang.nnodes)"],
        ),
        ("rollout.sglang.gpus=[2, 3]", "rollout.sglang.gpus", ["a machine has 1 rank", "a list of 1 device"]),
    ],
)
def test_what_a_server_on_two_machines_cannot_do_is_refused(failures, on, override, key, words) -> None:
    found = {check.key: check for check in failures(*on, *NODES, override)}
    said = str(found[key].problem())
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize(
    ("override", "key", "fix"),
    [
        ("sync.transport=distributed", "sync.transport", "set sync.transport=shards"),
        ("sync.transport=tensor", "sync.transport", "set sync.transport=shards"),
        ("model.lora={rank: 2}", "model.lora", "set sync.transport=disk"),
    ],
)
def test_a_server_on_the_trainers_gpus_of_two_machines_gets_weights_by_shards_or_disk(
    failures, on, override, key, fix
) -> None:
    found = {check.key: check for check in failures(*on, *NODES, "rollout.sglang.colocated=true", override)}
    assert found[key].fix == fix


def test_each_rank_of_a_server_on_the_trainers_processors_has_a_trainer_rank(failures, on) -> None:
    shared = ["rollout.sglang.colocated=true", "sync.transport=shards", "rollout.sglang.servers=2"]
    assert failures(*on, *shared, "cluster.nproc=2") == []
    for chosen in ("rollout.sglang.gpus=null", "rollout.sglang.gpus=[0,1]"):
        assert "rollout.sglang.servers" in {check.key for check in failures(*on, *shared, chosen)}


@pytest.mark.parametrize(("path", "same"), [("model", True), ("./model", True), ("other", False), (None, False)])
def test_a_draft_in_the_policys_folder_is_its_own(monkeypatch, tmp_path, path, same) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    rollout = {"sglang": {"speculative": {"algorithm": "EAGLE", "draft_path": path}}}
    config = RunConfig(name="case", model={"path": str(tmp_path / "model")}, actor={"mtp": {}}, rollout=rollout)
    assert server_checks.serves_own_draft(config) == same


def test_replicas_inside_a_server_become_servers_only_where_there_are_gpus(failures, on) -> None:
    (check,) = failures(*on, "rollout.sglang.dp_size=2", "rollout.sglang.servers=8")
    assert check.fix == "set rollout.sglang.dp_size=1, and use several servers instead (rollout.sglang.servers)"
    assert failures(*on, "rollout.sglang.dp_size=1") == []  # as in the config.yaml of older runs
