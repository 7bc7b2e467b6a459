"""The arguments of the real Transformer Engine, by version: the double has those of the newest one.

`python -m tests.te_double.signatures FOLDER...` writes signatures.json from the sources of the real package: each
FOLDER has the name of a version and holds its `transformer_engine`. Nothing of it is imported. The file holds what
differs from the version before.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from packaging.version import Version

TABLE = Path(__file__).with_name("signatures.json")

_LINEAR = ("__init__", "forward")
CALLS = {
    "pytorch.module.Linear": ("pytorch/module/linear.py", "Linear", _LINEAR),
    "pytorch.module.LayerNormLinear": ("pytorch/module/layernorm_linear.py", "LayerNormLinear", _LINEAR),
    "pytorch.module.GroupedLinear": ("pytorch/module/grouped_linear.py", "GroupedLinear", _LINEAR),
    "pytorch.module.RMSNorm": ("pytorch/module/rmsnorm.py", "RMSNorm", ("__init__",)),
    "pytorch.ops.RMSNorm": ("pytorch/ops/basic/rmsnorm.py", "RMSNorm", ("__init__",)),
    "pytorch.ops.SwiGLU": ("pytorch/ops/basic/activation.py", "_ActivationOperation", ("__init__",)),
    "pytorch.attention.DotProductAttention": (
        "pytorch/attention/dot_product_attention/dot_product_attention.py",
        "DotProductAttention",
        ("__init__", "forward", "set_context_parallel_group"),
    ),
    "pytorch.attention.rope": ("pytorch/attention/rope.py", None, ("apply_rotary_pos_emb",)),
    "pytorch.quantization": (
        "pytorch/quantization.py",
        None,
        ("fp8_autocast", "fp8_model_init", "is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"),
    ),
    "pytorch.distributed": ("pytorch/distributed.py", None, ("checkpoint",)),
    "pytorch.distributed.CudaRNGStatesTracker": (
        "pytorch/distributed.py",
        "CudaRNGStatesTracker",
        ("add", "fork", "get_states", "set_states", "reset"),
    ),
    "pytorch.distributed.activation_recompute_forward": (
        "pytorch/distributed.py",
        "activation_recompute_forward",
        ("__init__",),
    ),
    "pytorch.router": (
        "pytorch/router.py",
        None,
        ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss"),
    ),
    "pytorch.optimizers.FusedAdam": (
        "pytorch/optimizers/fused_adam.py",
        "FusedAdam",
        ("__init__", "step", "initialize_state", "get_unscaled_state", "set_scaled_state"),
    ),
}
"""What the double has: where it is in the double, the file and class of the real package, and the functions."""


def read_signatures(folder: Path) -> dict[str, list[str]]:
    """Arguments of every function of `CALLS`, from the source files in `folder`, as `arguments_of` writes them."""
    found = {}
    for place, (file, owner, functions) in CALLS.items():
        body = ast.parse((folder / file).read_text()).body
        if owner is not None:
            body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
        defined = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
        for name in functions:
            found[f"{place}.{name}"] = arguments_of(defined[name])
    return found


def arguments_of(function: ast.FunctionDef) -> list[str]:
    """Names in order; `name=` has a default, and `*` comes before those that are given by keyword only."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    without = len(plain) - len(given.defaults)
    names = [argument.arg + ("=" if number >= without else "") for number, argument in enumerate(plain)]
    if given.vararg or given.kwonlyargs:
        names.append(f"*{given.vararg.arg if given.vararg else ''}")
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        names.append(argument.arg + ("=" if default is not None else ""))
    return [*names, f"**{given.kwarg.arg}"] if given.kwarg else names


def stored_signatures() -> dict[str, dict[str, list[str]]]:
    """What `read_signatures` returned of each version, oldest first."""
    versions, signatures = {}, {}
    for version, changed in json.loads(TABLE.read_text()).items():
        signatures = signatures | {name: arguments.split() for name, arguments in changed.items()}
        versions[version] = signatures
    return versions


def write(folders: list[Path]) -> None:
    """Write the file of versions from their sources."""
    table, before = {}, {}
    for folder in sorted(folders, key=lambda folder: Version(folder.name)):
        signatures = {name: " ".join(names) for name, names in read_signatures(folder / "transformer_engine").items()}
        table[folder.name] = {name: names for name, names in signatures.items() if before.get(name) != names}
        before = signatures
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    write([Path(folder) for folder in sys.argv[1:]])
