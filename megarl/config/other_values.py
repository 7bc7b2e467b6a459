"""Values of TRL, verl and NeMo-RL with their names here, by the key that takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_SUCH_PREFERENCE = (
    "this method does not exist here; preference methods are DPO, IPO, SLiC, robust DPO, KTO and reward models "
    "(section preference)"
)
_NO_VLLM = "vLLM is not supported: set rollout.engine=sglang, or embedded to generate on the training weights"
_ATTENTION, _MLP = (
    ("q_proj", "k_proj", "v_proj", "o_proj", "linear_qkv", "linear_proj"),
    (
        "gate_proj",
        "up_proj",
        "down_proj",
        "linear_fc1",
        "linear_fc2",
    ),
)
#: Names of modules with adapters in PEFT and Megatron -> target here.
_TARGETS = {**dict.fromkeys(_ATTENTION, "attention"), **dict.fromkeys(_MLP, "mlp")}
_ALL_LINEAR = ("all-linear", "all-linear-layers", "all")

#: Key -> value of another project -> value here.
VALUES: Mapping[str, Mapping[str, Any]] = {
    "model.dtype": {"bfloat16": "bf16", "torch.bfloat16": "bf16", "float32": "fp32", "torch.float32": "fp32"},
    "rollout.dtype": {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "auto": "model"},
    "actor.optim.schedule": {
        "constant_with_warmup": "constant",
        "schedulertype.linear": "linear",
        "schedulertype.cosine": "cosine",
    },
    "algorithm.advantage.name": {
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
    },
    "algorithm.loss.name": {"vanilla": "ppo", "clip": "ppo"},
    "algorithm.loss.aggregation": {
        "dapo": "token-mean",
        "bnpo": "token-mean",
        "grpo": "seq-mean-token-mean",
        "dr_grpo": "seq-mean-token-sum-norm",
    },
    "data.overlong": {"left": "filter", "right": "filter", "middle": "filter"},
    "env.parser": {"hermes": "qwen25"},
    "rollout.sampling.logprobs": {"raw_logprobs": "full", "processed_logprobs": "processed"},
    "preference.loss": {"dpo": "sigmoid", "slic": "hinge"},
    "rollout.engine": {"hf": "embedded", "megatron": "embedded", "transformers": "embedded"},
}
#: Key -> value of another project that does not exist here -> what to do.
_ABSENT: Mapping[str, Mapping[str, str]] = {
    "rollout.engine": dict.fromkeys(("vllm", "trtllm", "tensorrt_llm"), _NO_VLLM),
    "model.dtype": dict.fromkeys(
        ("fp16", "float16", "half", "fp8"), "training is in bf16 or fp32 here: write one of these"
    ),
    "preference.loss": dict.fromkeys(
        (
            *("orpo", "simpo", "cpo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
            *("apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft"),
        ),
        NO_SUCH_PREFERENCE,
    ),
    "tracking.loggers": {
        "mlflow": "remove it: MLflow has its own key, tracking.mlflow",
        "console": "remove it: the console always shows the steps (tracking.console sets the format)",
        "file": "remove it: metrics.jsonl in the run folder has every number",
        "none": "write []",
        "all": "name them",
    },
}


def value_fix(path: str, value: Any) -> str | None:
    """Return what to write for a `value` of another project at the key `path`; None when the value is unknown.

    >>> value_fix("model.dtype", "bfloat16"), value_fix("model.lora.targets", ["q_proj", "up_proj"])
    ('write bf16', 'write [attention, mlp]')
    """
    if path == "model.lora.targets":
        targets = lora_targets(value)
        if targets is False:
            return None
        return f"write [{', '.join(targets)}]" if targets else "write null"
    name = str(value[0] if isinstance(value, list) and len(value) == 1 else value).lower()
    absent, known = _ABSENT.get(path, {}), VALUES.get(path, {})
    return absent.get(name) or (f"write {known[name]}" if name in known else None)


def lora_targets(value: Any) -> Any:
    """Return `model.lora.targets` for names of modules: None for all linear layers, False when a name is unknown."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if names and all(name in _ALL_LINEAR for name in names):
        return None
    if not names or any(name not in _TARGETS for name in names):
        return False
    return list(dict.fromkeys(_TARGETS[name] for name in names))


def values_elsewhere(name: str) -> str | None:
    """Return the keys for which `name` is a value of another project, with what to write there; None when there is no
    such key.

    >>> values_elsewhere("bfloat16")
    'at model.dtype write bf16'
    """
    fixes = {path: value_fix(path, name) for path in [*VALUES, *_ABSENT, "model.lora.targets"]}
    return "; ".join(f"at {path} {fix}" for path, fix in fixes.items() if fix is not None) or None
