"""Nothing unpickles what a process with foreign code says; what unpickles elsewhere is on a list, with its reason.

tests/house/test_source.py looks for findings in every file.
"""

import ast
import re
from collections.abc import Iterable, Iterator

FOLDERS = ("megarl/", "launchers/", "recipes/", "kernels/", "benchmarks/", "tools/")
#: Where messages of rewards, tools, environments and simulators are read: no exceptions.
FOREIGN = (
    "megarl/rewards/",
    "megarl/envs/",
    "megarl/robots/envs/",
    "megarl/robots/simulators/",
    "megarl/robots/rollout/",
)
#: Modules that read pickles or bytecode, or whose queues, pipes, pools and managers do.
MODULES = {
    *("pickle", "_pickle", "cPickle", "pickletools", "cloudpickle", "dill", "marshal", "shelve", "joblib", "copyreg"),
    *("multiprocessing", "torch.multiprocessing", "concurrent.futures.process", "ray.cloudpickle"),
}
#: Functions that do, by the last part of their name.
FUNCTIONS = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "read_pickle", "unsafe_load", "full_load", "ProcessPoolExecutor"),
}
#: The same, by their last two parts.
METHODS = {("torch", "load"), ("ray", "get"), ("serialization", "load")}
#: What the text of every finding has in it.
ANY = re.compile(
    "|".join(
        [rf"\b{name.rpartition('.')[2]}\b" for name in (*MODULES, *FUNCTIONS, "allow_pickle")]
        + [rf"\b{module}\.{name}\b" for module, name in METHODS]
    )
)
#: file: why it may.
ALLOWED = {
    "launchers/ray.py": "actors of ours answer with numbers and addresses; what a user's code raises stays in them",
    "megarl/artifacts/vla_folder.py": "a file of a published checkpoint, with weights_only: tensors by name",
    "megarl/disaggregated/buffer/client.py": "the buffer runs no user's code; samples are bytes with JSON inside",
    "megarl/data/wire.py": "how Ray copies a block of bytes: nothing is read",
    "megarl/sync/shared.py": "torch's functions for handles, which travel as JSON",
    "megarl/rollout/sglang/wire.py": "writes what SGLang's servers read; reads nothing",
    "megarl/system/compat/sglang_server/serve.py": "how SGLang starts its own processes",
    "benchmarks/sync/limits.py": "a measurement of shared memory",
    "benchmarks/sync/receiver.py": "stands for a server of SGLang, with its list of admitted classes",
}


def dotted(node: ast.AST) -> list[str]:
    """The parts of a dotted name."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def is_module(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in MODULES for end in range(1, len(parts) + 1))


def findings(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """What of a tree's nodes unpickles, or brings a module that does, with its line."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if is_module(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name, node.lineno) for name in full if is_module(name) or name.split(".")[-1] in FUNCTIONS)
        elif isinstance(node, ast.Attribute):
            parts = dotted(node)
            if parts[-1] in FUNCTIONS or tuple(parts[-2:]) in METHODS:
                yield ".".join(parts), node.lineno
        elif isinstance(node, ast.Call):
            yield from (("allow_pickle", node.lineno) for keyword in node.keywords if keyword.arg == "allow_pickle")


def test_it_finds_every_kind() -> None:
    code = """
import pickle, os
import multiprocessing.connection as c
from multiprocessing import Pipe
from torch import multiprocessing
from concurrent.futures import ProcessPoolExecutor
torch.load(file)
numpy.load(file, allow_pickle=True)
dist.all_gather_object(out, value)
ray.get(reference)
pandas.read_pickle(file)
json.loads(text)
"""
    assert sorted(line for _, line in findings(ast.walk(ast.parse(code)))) == list(range(2, 12))
