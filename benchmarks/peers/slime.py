"""slime on a case of ours: its GRPO on Megatron and SGLang with the same model, prompts, samples, lengths and updates.

    python -m megarl.benchmarks.peers.slime --case llama31_8b_h100x16 --slime-root SLIME --checkpoint DIST --print
    python -m megarl.benchmarks.peers.slime --case llama31_8b_h100x16 --slime-root SLIME --checkpoint DIST --python ...

SLIME is a checkout, whose scripts/models/*.sh describe models; DIST is the model as its converter writes it
(tools/convert_hf_to_torch_dist.py). Arguments are those of its commit 624b824a (2026-08-21). Its log has the tokens
of a step and its seconds; tokens per second and GPU follow from these, prompts counted. Not run in this version.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import shlex
import sys
from pathlib import Path

from megarl.benchmarks.peers.work import NoSuch, Peer, Work, main, prompts
from megarl.config.run import RunConfig
from megarl.system.errors import UserError

REWARDS = {"math": "math"}
#: slime's script in scripts/models for each model.
MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama3.1-8B-Instruct",
    "Qwen/Qwen2.5-1.5B": "qwen2.5-1.5B",
    "Qwen/Qwen3-0.6B": "qwen3-0.6B",
    "Qwen/Qwen3-8B": "qwen3-8B",
    "Qwen/Qwen3-30B-A3B": "qwen3-30B-A3B",
    "Qwen/Qwen3-32B": "qwen3-32B",
    "Qwen/Qwen3-235B-A22B": "qwen3-235B-A22B",
}
#: megarl's KL estimator -> slime's name of it.
KL_TYPES = {"kl": "k1", "mse": "k2", "low_var_kl": "low_var_kl"}
_PERF = re.compile(r"\bperf \d+: (\{.*\})")


def options(parser: argparse.ArgumentParser) -> None:
    """Add options for its checkout and the model."""
    parser.add_argument("--slime-root", type=Path, required=True, metavar="FOLDER", help="its checkout")
    converted = "the model as its tools/convert_hf_to_torch_dist.py writes it"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help=converted)


def no_such(config: RunConfig) -> NoSuch:
    """Return the settings that it has no arguments for."""
    kl, actor, ends = config.algorithm.kl, config.actor, not config.rollout.sampling.ignore_eos
    return [
        ("algorithm.kl.estimator", kl.estimator, kl.use == "none" or kl.estimator in KL_TYPES, ", ".join(KL_TYPES)),
        ("actor.ppo_epochs", actor.ppo_epochs, actor.ppo_epochs == 1, "1"),
        ("rollout.sampling.ignore_eos", not ends, ends, "false"),
    ]


def command(work: Work, arguments: argparse.Namespace) -> list[str]:
    """Return a shell command that reads the model's arguments from its checkout and runs its train.py."""
    root: Path = arguments.slime_root
    path = work.config.model.path
    if path not in MODELS:
        raise UserError("no script of slime is known for it", where="model.path", found=path, allowed=list(MODELS))
    parts = [*_run(work, arguments), *_training(work), *_layout(work), *_generation(work)]
    model = shlex.quote(str(root / "scripts" / "models" / f"{MODELS[path]}.sh"))
    train = shlex.join([arguments.python, str(root / "train.py")])
    script = f'source {model} && exec {train} "${{MODEL_ARGS[@]}}" {shlex.join(map(str, parts))}'
    return ["bash", "-c", script]


def _run(work: Work, arguments: argparse.Namespace) -> list[object]:
    config = work.config
    flags = ["--actor-num-nodes", config.cluster.nnodes, "--actor-num-gpus-per-node", work.gpus_per_node, "--colocate"]
    flags += ["--hf-checkpoint", config.model.path, "--ref-load", arguments.checkpoint]
    flags += ["--prompt-data", work.rows, "--input-key", "prompt", "--label-key", "label"]
    flags += ["--apply-chat-template"] if config.data.chat_template else []
    flags += ["--rm-type", work.reward(REWARDS, "slime"), "--num-rollout", work.steps]
    return flags


def _training(work: Work) -> list[object]:
    config = work.config
    optim, loss, kl = config.actor.optim, config.algorithm.loss, config.algorithm.kl
    flags = ["--advantage-estimator", "grpo", "--entropy-coef", loss.entropy_coef]
    flags += [] if config.algorithm.advantage.own.get("norm_by_std", True) else ["--disable-grpo-std-normalization"]
    flags += ["--eps-clip", loss.own.get("clip_low", 0.2), "--eps-clip-high", loss.own.get("clip_high", 0.2)]
    dual = loss.own.get("dual_clip", 3.0)
    flags += [] if dual is None else ["--eps-clip-c", dual]
    flags += ["--calculate-per-token-loss"] if loss.aggregation == "token-mean" else []
    if kl.use == "loss":
        flags += ["--use-kl-loss", "--kl-loss-coef", kl.coef, "--kl-loss-type", KL_TYPES[kl.estimator]]
    flags += ["--optimizer", "adam", "--lr", optim.lr, "--lr-decay-style", optim.schedule]
    # slime rejects a warm-up that is longer than the run, and a run for a measurement is short.
    updates = work.steps * (config.data.batch_size // work.mini_batch)
    flags += ["--lr-warmup-iters", min(optim.warmup(updates), updates - 1), "--weight-decay", optim.weight_decay]
    flags += ["--adam-beta1", optim.beta1, "--adam-beta2", optim.beta2, "--clip-grad", optim.clip_grad]
    flags += ["--attention-dropout", 0.0, "--hidden-dropout", 0.0, "--accumulate-allreduce-grads-in-fp32"]
    flags += ["--attention-softmax-in-fp32", "--attention-backend", "flash"]
    return flags


def _layout(work: Work) -> list[object]:
    parallel, engine = work.config.actor.parallel, work.config.actor.engine
    flags = ["--tensor-model-parallel-size", parallel.tp, "--pipeline-model-parallel-size", parallel.pp]
    flags += ["--context-parallel-size", parallel.cp, "--expert-model-parallel-size", parallel.ep]
    flags += ["--expert-tensor-parallel-size", parallel.etp or (1 if parallel.ep > 1 else parallel.tp)]
    ends = {"first": parallel.first_stage_layers, "last": parallel.last_stage_layers}
    for end, layers in ends.items():
        flags += [] if layers is None else [f"--decoder-{end}-pipeline-num-layers", layers]
    flags += ["--sequence-parallel"] if parallel.sp and parallel.tp > 1 else []
    flags += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", max(engine.micro_batch_tokens, work.longest)]
    flags += ["--balance-data"]
    if engine.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1]
    return flags


def _generation(work: Work) -> list[object]:
    config = work.config
    servers, sampling = config.rollout.sglang, config.rollout.sampling
    flags = ["--rollout-batch-size", config.data.batch_size, "--n-samples-per-prompt", sampling.n]
    flags += ["--global-batch-size", work.mini_batch * sampling.n]
    flags += ["--rollout-max-prompt-len", config.data.max_prompt_tokens]
    flags += ["--rollout-max-response-len", sampling.max_new_tokens]
    flags += ["--rollout-temperature", sampling.temperature, "--rollout-top-p", sampling.top_p]
    flags += ["--rollout-top-k", sampling.top_k or -1, "--rollout-num-gpus-per-engine", servers.tp_size]
    if servers.memory_fraction is not None:
        flags += ["--sglang-mem-fraction-static", servers.memory_fraction]
    return flags


def write(work: Work) -> None:
    """Write rows as JSON lines; a prompt that gets a chat template is a message."""
    chat = work.config.data.chat_template
    with work.rows.open("w") as file:
        for prompt, answer in prompts(work):
            given = [{"role": "user", "content": prompt}] if chat else prompt
            file.write(json.dumps({"prompt": given, "label": str(answer)}) + "\n")


def per_gpu(log: str, gpus: int) -> list[float]:
    """Return the tokens per second and GPU of every step, from lines `perf 3: {'perf/step_time': ..., ...}` of its log.

    `actor_train_tok_per_s` is the tokens of all sequences of a step over the seconds of its update.
    """
    rates = []
    for text in _PERF.findall(log):
        named = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", text))
        rate, update, step = (named.get(f"perf/{key}") for key in _KEYS)
        if all(isinstance(number, (int, float)) and math.isfinite(number) for number in (rate, update, step)):
            rates.append(rate * update / step / gpus)
    return rates


_KEYS = ("actor_train_tok_per_s", "actor_train_time", "step_time")
PEER = Peer("slime", ".jsonl", command, write, per_gpu, options, no_such)

if __name__ == "__main__":
    sys.exit(main(PEER, __doc__))
