"""Who talks to other ranks says which ones: nothing takes torch's default group, one place sets Megatron's state.

tests/house/test_source.py looks for findings in every file.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "monitored_barrier", "recv"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send", "get_rank", "get_world_size"),
}
#: Joining a world, and groups of a world: whoever needs one is given a WorkerGroup.
MAKERS = {"init_process_group", "new_group"}
#: file: what it may do, and why
ALLOWED = {
    "megarl/system/comm.py": (MAKERS | {"group.WORLD"}, "it makes WorkerGroups"),
    "megarl/system/rendezvous.py": ({"init_process_group"}, "a process joins its team there"),
    "launchers/preflight_links.py": (
        {"init_process_group", "group.WORLD"},
        "a program of its own: each pair of nodes is a world for the length of a measurement",
    ),
    "benchmarks/checkpoint.py": ({"init_process_group"}, "a program of its own below torchrun"),
    "benchmarks/sync/limits.py": (MAKERS | COLLECTIVES, "two bare processes: what torch itself can do"),
    "benchmarks/sync/many.py": ({"init_process_group"}, "one of several trainer ranks that the benchmark starts"),
    "benchmarks/sync/receiver.py": ({"init_process_group"}, "it stands for a server, which is in no team of ours"),
}
#: Where it holds.
FOLDERS = ("megarl/", "benchmarks/", "launchers/")
#: What the text of every finding has in it.
ANY = re.compile(r"\b(dist|distributed)\b")
MEGATRON = {"initialize_model_parallel", "destroy_model_parallel"}
FILES = sorted(path for folder in ("megarl", "benchmarks", "launchers") for path in (ROOT / folder).rglob("*.py"))


def names(node: ast.AST) -> str:
    """The dotted name that `node` is, without `torch.`: `dist.group.WORLD`."""
    if isinstance(node, ast.Attribute):
        return f"{names(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def findings(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """What takes the default group or makes one, and the line; calls with a group of their own are none."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and names(node).endswith(("dist.group.WORLD", "distributed.group.WORLD")):
            yield "group.WORLD", node.lineno
        if not isinstance(node, ast.Call):
            continue
        base, _, name = names(node.func).rpartition(".")
        if base not in ("dist", "torch.distributed"):
            continue
        given = any(keyword.arg == "group" for keyword in node.keywords)
        given |= name in ("get_rank", "get_world_size") and bool(node.args)
        if name in MAKERS or (name in COLLECTIVES and not given):
            yield name, node.lineno


def test_a_call_without_group_is_found():
    code = (
        "dist.barrier()\ndist.all_reduce(x, group=g)\ntorch.distributed.get_rank()\ndist.get_rank(g)\ndist.group.WORLD"
    )
    assert sorted(findings(ast.walk(ast.parse(code)))) == [("barrier", 1), ("get_rank", 3), ("group.WORLD", 5)]


def test_one_place_sets_the_state_of_megatron():
    found = [str(path.relative_to(ROOT)) for path in FILES if any(f".{name}(" in path.read_text() for name in MEGATRON)]
    assert found == ["megarl/training/parallel.py"]
