"""Servers are started with what the recipe says of them, and what needs a GPU is refused without one."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megarl.architectures import ARCHITECTURES
from megarl.config.model import ModelConfig
from megarl.config.sglang import SGLangConfig
from megarl.models.hf import facts_of, load_hf_config
from megarl.rollout.sglang.block_fp8 import quantization_config, unsplittable, write_block_fp8
from megarl.rollout.sglang.launch import WorkerPlace, open_fleet
from megarl.rollout.sglang.server import ServerProcess, ServerSpec
from megarl.sync.plan import wire_tensors
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ConfigError
from tests.rollout.forked import run_program
from tests.rollout.servers import need_interpreter

SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "mlp_only_layers": []}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: Reads configurations as SGLang does, and writes which modules it quantises.
READ = """
import json, pathlib, sys
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import is_layer_skipped
found = []
for settings, names in json.loads(sys.argv[1]):
    config = Fp8Config.from_config(settings)
    assert config.is_checkpoint_fp8_serialized and config.weight_block_size == [128, 128]
    found.append({name: not is_layer_skipped(name, config.ignored_layers) for name in names})
pathlib.Path(sys.argv[2]).write_text(json.dumps(found))
"""


def facts(model_type: str, **more: Any):
    return facts_of(
        load_hf_config(ModelConfig(hf_config={"model_type": model_type, **SIZES, **more}, tokenizer="bytes"))
    )


def spec(cuda: bool = True, **settings: Any) -> ServerSpec:
    return ServerSpec(0, SGLangConfig(**settings), Path("model"), "bfloat16", "127.0.0.1", "key", Path("logs"), cuda)


def test_a_draft_is_named_to_the_server_and_read_from_its_files() -> None:
    draft = {"algorithm": "EAGLE3", "draft_path": "some/draft", "steps": 3, "topk": 2, "draft_tokens": 6}
    found = spec(speculative=draft).arguments(1234)
    told = {name: value for name, value in itertools.pairwise(found) if name.startswith("--spec")}
    assert told == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "some/draft",
        "--speculative-draft-load-format": "auto",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "2",
        "--speculative-num-draft-tokens": "6",
    }
    plain = spec(speculative={"algorithm": "NGRAM"}).arguments(1234)
    assert [one for one in plain if one.startswith("--spec")] == ["--speculative-algorithm"]
    backup = "--enable-draft-weights-cpu-backup"  # SGLang frees the draft's weights with the model's
    assert backup in spec(speculative=draft, colocated=True).arguments(1234)
    assert not {backup} & {*found, *spec(colocated=True).arguments(1234)}


@pytest.mark.parametrize(
    ("settings", "released"),
    [({}, True), ({"extra_args": ["--cuda-graph-backend-prefill", "full"]}, False), ({"colocated": False}, False)],
)
def test_graphs_are_captured_so_that_they_can_be_released(settings, released, tmp_path) -> None:
    """SGLang 0.5.23 raises NotImplementedError if its default graphs of prompts meet the variable."""
    made = dataclasses.replace(spec(**{"colocated": True, **settings}), log_dir=tmp_path)
    arguments = made.arguments(1234)
    assert (("--cuda-graph-backend-prefill", "disabled") in itertools.pairwise(arguments)) == released
    with (
        mock.patch.multiple("megarl.rollout.sglang.server", find_python=mock.DEFAULT, sglang_version=mock.DEFAULT),
        mock.patch("megarl.rollout.sglang.server.server_environment", return_value={}),
        mock.patch("megarl.rollout.sglang.server._start_process") as start,
    ):
        ServerProcess(made).start()
    assert start.call_args.args[1].get("SGLANG_MEMORY_SAVER_CUDA_GRAPH") == ("true" if released else None)


def test_the_dtype_of_the_cache_is_told_to_the_server() -> None:
    assert ("--kv-cache-dtype", "fp8_e4m3") in itertools.pairwise(spec(kv_cache_dtype="fp8_e4m3").arguments(1234))
    assert "--kv-cache-dtype" not in spec().arguments(1234)


def test_a_node_process_is_told_its_place_and_where_the_others_are() -> None:
    settings = SGLangConfig(tp_size=4, nnodes=2)
    node = ServerSpec(3, settings, Path("model"), "bfloat16", "10.0.0.2", "key", Path("logs"), True, node=1)
    found = dict(itertools.pairwise(node.arguments(1234, "10.0.0.1:5000")))
    told = {"--tp-size": "4", "--nnodes": "2", "--node-rank": "1", "--dist-init-addr": "10.0.0.1:5000"}
    assert told.items() <= found.items()
    assert node.log == Path("logs/server_3_node1.log")
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & {*spec().arguments(1234)}


@pytest.mark.parametrize(
    ("settings", "fp8", "key"),
    [
        ({"speculative": {"algorithm": "NGRAM"}}, False, "rollout.sglang.speculative"),
        ({}, True, "sync.fp8"),
        ({"tp_size": 2, "ep_size": 2}, False, "rollout.sglang.ep_size"),
        ({"tp_size": 2, "nnodes": 2}, False, "rollout.sglang.nnodes"),  # this run has one machine
    ],
)
def test_what_this_place_has_no_servers_for_is_refused(tmp_path, settings, fp8, key) -> None:
    with pytest.raises(ConfigError) as raised:
        open_fleet(
            SGLangConfig(**settings), WorkerPlace(), tmp_path, tmp_path, "float32", cuda=False, fp8=fp8,
            world=WorkerGroup.alone(),
        )  # fmt: skip
    assert raised.value.where == key


@pytest.mark.procs
@pytest.mark.servers
def test_sglang_quantises_just_the_modules_whose_weights_are_sent_as_fp8(tmp_path) -> None:
    kinds = {"qwen3": {}, "qwen3_moe": EXPERTS, "mixtral": MIXTRAL}
    asked, sent = [], []
    for model_type, more in kinds.items():
        names = [
            source.name.removesuffix(".weight").format(i=1, e=0)
            for rule in ARCHITECTURES[model_type].tensors
            for source in rule.sources
            if len(source.shape) == 2 and "{i}" in source.name
        ]
        asked.append([quantization_config(facts(model_type, **more)), [*names, "lm_head"]])
        on_wire = {name: wire_tensors(f"{name}.weight", (256, 256), "bfloat16", True) for name in names}
        sent.append({name: len(parts) == 2 for name, parts in on_wire.items()} | {"lm_head": False})
    whole = [[name for name, quantised in one.items() if not quantised] for one in sent]
    routers = [[], ["model.layers.1.mlp.gate"], ["model.layers.1.block_sparse_moe.gate"]]
    assert whole == [[*router, "lm_head"] for router in routers]
    need_interpreter()
    program, written, log = tmp_path / "read.py", tmp_path / "written", tmp_path / "log"
    program.write_text(READ)
    assert run_program(program, [json.dumps(asked), str(written)], log) == 0, log.read_text()[-2000:]
    assert json.loads(written.read_text()) == sent


def test_the_model_of_fp8_servers_says_how_its_weights_come(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    write_block_fp8(tmp_path, facts("qwen3"))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_widths_that_ranks_cannot_hold_in_whole_blocks_are_named() -> None:
    assert unsplittable(facts("qwen3"), 1, 1) == unsplittable(facts("qwen3"), 2, 1) == []
    assert unsplittable(facts("qwen3", intermediate_size=384), 2, 1) == ["feed-forward part 192"]
    assert unsplittable(facts("qwen3_moe", **EXPERTS), 4, 1) == ["experts 64"]
    assert unsplittable(facts("qwen3_moe", **EXPERTS), 4, 4) == []  # whole experts
