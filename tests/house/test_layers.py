"""Imports that import-linter cannot see: by name, at run time. Each place that makes one is listed with its reason.

tests/house/test_source.py looks at every file of the product.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

#: Functions that import, or look for, what a text names.
IMPORTERS = {
    *("import_module", "__import__", "import_callable", "resolve_name"),
    *("find_spec", "exec_module", "run_module", "run_path", "load_module", "spec_from_file_location"),
}
#: file -> why it may import what a text names. None of these texts is a constant that names a module of this package.
BY_NAME = {
    "benchmarks/sync/receiver.py": "the loaders that servers have on their path, from their file",
    "launchers/relative_paths.py": "is a module of the user installed? nothing is imported",
    "megarl/algorithms/registry.py": "a function of the user",
    "megarl/certificate/harness.py": "the program runs the section that its command line names",
    "megarl/checks/environment.py": "is an optional package installed?",
    "megarl/checks/references.py": "where is the source of a function of the user?",
    "megarl/system/compat/megatron.py": "changes megatron-core while it loads",
    "megarl/system/compat/sglang_server/serve.py": "runs in the interpreter of a server, without this package",
    "megarl/system/compat/transformer_engine.py": "the modules of an optional package, whose arguments it reads",
    "megarl/system/compat/sglang_server/stand_ins/cpu/vision_operators.py": "where torchvision is in that interpreter",
    "megarl/config/engines.py": "an engine family of the user",
    "megarl/config/load.py": "the folder of the built-in recipes; nothing is imported",
    "megarl/config/task.py": "the task of a recipe, from the list of tasks in the file",
    "megarl/dag/node.py": "a function of the user",
    "megarl/data/sources.py": "a function of the user",
    "megarl/data/tokenizer.py": "is an optional package installed?",
    "megarl/envs/registry.py": "an environment of the user, or a built-in one, of the same folder",
    "megarl/gateway/inside.py": "the program calls the function that its command line names",
    "megarl/gateway/runner.py": "the program calls the function that its command line names",
    "megarl/gateway/start.py": "the program runs the module that its command line names",
    "megarl/gateway/sandbox.py": "where is the source of a function of the user?",
    "megarl/models/layers/experts/deepep.py": "is an optional package installed?",
    "megarl/system/imports.py": "what the others call",
    "megarl/system/compat/sglang_server/loaders/megarl_shards.py": "files of megarl/sync/shards, without this package",
    "megarl/robots/simulators/registry.py": "a simulator of the user, or a built-in one, of the same folder",
    "megarl/robots/simulators/robotwin.py": "a task's module, in the interpreter of a simulator, without this package",
    "megarl/rollout/families.py": "an engine family of the user",
    "megarl/rewards/preflight.py": "the program runs the function that its command line names",
    "megarl/runtime/worker.py": "the program runs the function that its command line names",
    "megarl/dag/staleness.py": "a policy of the user",
    "megarl/tracking/loggers.py": "a tracker of the user",
    "recipes/build.py": "a function of the user",
    "recipes/listed.py": "the modules of the stages, which are all in one folder",
}
#: file -> why it holds texts that name modules of this package.
NAMES = {
    "benchmarks/case.py": "a recipe names a reward; workers get an entry function",
    "benchmarks/oversample.py": "a recipe names rows and an environment",
    "benchmarks/sync/measure.py": "starts a program",
    "launchers/local.py": "starts a program",
    "launchers/preflight_links.py": "starts a program",
    "launchers/slurm.py": "starts a program",
    "launchers/torchrun.py": "starts a program",
    "megarl/certificate/harness.py": "starts a program",
    "megarl/cli.py": "whose warnings are shown",
    "megarl/commands/init.py": "the written recipe names built-in data",
    "megarl/commands/job.py": "workers get an entry function",
    "megarl/models/layers/attention/training.py": "torch imports the kernels of flash-attn-4 by name",
    "megarl/config/load.py": "the folder of the built-in recipes",
    "megarl/config/task.py": "the tasks that have a section of the recipe",
    "megarl/dag/ahead.py": "which stage a node has; it imports neither",
    "megarl/envs/registry.py": "the built-in environments, of the same folder",
    "megarl/envs/tools/functions.py": "starts a program",
    "megarl/gateway/programs.py": "starts a program",
    "megarl/gateway/verifiers.py": "starts a program",
    "megarl/rewards/reasoning_gym.py": "how a recipe names its rows, for an error message",
    "megarl/robots/simulators/registry.py": "what a module was called before, for an error message",
    "megarl/rewards/pool.py": "starts a program",
    "megarl/rollout/sglang/keeper.py": "starts a program",
    "megarl/sync/transports/delta.py": "starts a program",
    "megarl/system/imports.py": "what modules were called before, for an error message",
    "megarl/tracking/report.py": "files of its own folder",
}
#: Where it holds.
FOLDERS = ("megarl/", "recipes/", "launchers/", "benchmarks/", "kernels/")
#: What the text of every such file has in it.
ANY = re.compile(rf"{'|'.join(IMPORTERS)}|[\"']megarl\.")
MODULE = re.compile(r"megarl\.[\w.]*(:[\w.]+)?")


def names_of(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """(names of functions in a file that import by text, texts in it that name modules of this package)."""
    called, texts = set(), set()
    for node in nodes:
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            called |= {name} & IMPORTERS
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            texts.add(node.value)
    return called, texts


def test_functions_that_import_and_names_of_modules_are_found() -> None:
    code = "importlib.import_module(name)\nstart('megarl.runtime.worker:main')\nprint('megarl.yaml is a file')"
    assert names_of(ast.walk(ast.parse(code))) == ({"import_module"}, {"megarl.runtime.worker:main"})
