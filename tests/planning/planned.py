"""Recipes and hardware for the tests of plans."""

from __future__ import annotations

from dataclasses import replace

from megarl.config.load import load_config
from megarl.planning.assumptions import PlanAssumptions, assume, pairs
from megarl.planning.hardware import KINDS, Hardware
from megarl.planning.step import model_sizes, plan_step
from megarl.recipes.build import build_task_graph
from megarl.recipes.components import COMPONENTS

H100 = replace(KINDS["h100"], nodes=1)
#: The machine of docs/performance.md as two processes: products with both cores 447 and 205 GFLOP/s.
TWO_CORES = Hardware(
    name="cpu",
    bf16_tflops=0.4474 / 2,
    fp32_tflops=0.205 / 2,
    memory_gb=12.6,
    memory_tb_s=0.02,
    node_gb_s=4.3,
    net_gbit=34.4,
    per_node=2,
    source="docs/performance.md",
    gpu=False,
)
#: Nothing but matrix products at their peak takes time.
IDEAL = PlanAssumptions(
    gemm_share=1.0,
    expert_share=1.0,
    gemm_half_rows=0.0,
    layer_ms=0.0,
    experts_ms=0.0,
    element_bytes=0.0,
    logit_elements=0.0,
    node_share=1.0,
    node_hop_us=0.0,
    link_share=1.0,
    hop_us=0.0,
    memory_share=1.0,
    decode_ms=0.0,
)


def read(name, *overrides):
    """(recipe, its graph, sizes of its models)."""
    config = load_config(name, list(overrides), components=COMPONENTS)
    graph = build_task_graph(config)
    return config, graph, model_sizes(config, graph)


def planned(name, *overrides, hardware=H100, given=None, assumed=()):
    """The plan of a recipe, on H100s unless said otherwise."""
    config, graph, sizes = read(name, *overrides)
    given = assume(given or PlanAssumptions.of(gpu=hardware.gpu), pairs(assumed))
    return plan_step(config, graph, sizes, hardware, given)


def seconds_by(parts):
    """Seconds of parts by their formula."""
    found: dict[str, float] = {}
    for part in parts:
        found[part.formula] = found.get(part.formula, 0.0) + part.seconds
    return found
