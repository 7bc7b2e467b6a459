"""verl on a case of ours: its GRPO on Megatron and SGLang with the same model, prompts, samples, lengths and updates.

    python -m megarl.benchmarks.peers.verl --case llama31_8b_h100x16 --print
    RAY_ADDRESS=head:6379 python -m megarl.benchmarks.peers.verl --case llama31_8b_h100x16 --python VERL/bin/python

Keys are those of verl 0.7 (verl/trainer/config at b178a3cd, 2026-01-29); its `perf/throughput` counts tokens of prompts
and responses over all seconds of a step and all GPUs, as ours does. Not run in this version.
"""

from __future__ import annotations

import argparse
import json
import re
import sys

from megarl.benchmarks.peers.work import NoSuch, Peer, Work, main, prompts
from megarl.config.run import RunConfig
from megarl.system.offload_schedule import GRADIENTS, OPTIMIZER, PARAMETERS

# megarl's reward -> a data source for which verl chooses the same reward
REWARDS = {"math": "lighteval/MATH", "gsm8k": "openai/gsm8k"}
KL_TYPES = ("kl", "abs", "mse", "low_var_kl")
_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_THROUGHPUT = re.compile(r"\bperf/throughput:([0-9.eE+-]+)")


def no_such(config: RunConfig) -> NoSuch:
    """Return the settings that it has no keys for."""
    kl, chat = config.algorithm.kl, config.data.chat_template
    dual = config.algorithm.loss.own.get("dual_clip", 3.0)
    return [
        ("algorithm.kl.estimator", kl.estimator, kl.use == "none" or kl.estimator in KL_TYPES, ", ".join(KL_TYPES)),
        ("algorithm.loss.dual_clip", dual, dual is not None, "a bound above 1"),
        ("data.chat_template", chat, chat is not False, "true: its prompts are chat messages"),
    ]


def command(work: Work, arguments: argparse.Namespace) -> list[str]:
    """Return its command line."""
    entry = [arguments.python, "-m", "verl.trainer.main_ppo", "--config-name=ppo_megatron_trainer"]
    settings = {**_data(work), **_training(work), **_layout(work), **_generation(work), **_run(work)}
    return [*entry, *(f"{key}={_text(value)}" for key, value in settings.items())]


def _data(work: Work) -> dict[str, object]:
    data, sampling = work.config.data, work.config.rollout.sampling
    return {
        "data.train_files": str(work.rows),
        "data.val_files": str(work.rows),
        "data.train_batch_size": data.batch_size,
        "data.max_prompt_length": data.max_prompt_tokens,
        "data.max_response_length": sampling.max_new_tokens,
        "data.filter_overlong_prompts": True,
        "data.shuffle": False,
        "actor_rollout_ref.model.path": work.config.model.path,
    }


def _training(work: Work) -> dict[str, object]:
    config = work.config
    optim, loss, kl = config.actor.optim, config.algorithm.loss, config.algorithm.kl
    return {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": config.algorithm.advantage.own.get("norm_by_std", True),
        "algorithm.use_kl_in_reward": False,
        f"{_ACTOR}.ppo_mini_batch_size": work.mini_batch,
        f"{_ACTOR}.ppo_epochs": config.actor.ppo_epochs,
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": max(config.actor.engine.micro_batch_tokens, work.longest),
        f"{_ACTOR}.clip_ratio_low": loss.own.get("clip_low", 0.2),
        f"{_ACTOR}.clip_ratio_high": loss.own.get("clip_high", 0.2),
        f"{_ACTOR}.clip_ratio_c": loss.own.get("dual_clip", 3.0),
        f"{_ACTOR}.loss_agg_mode": loss.aggregation,
        f"{_ACTOR}.entropy_coeff": loss.entropy_coef,
        f"{_ACTOR}.use_kl_loss": kl.use == "loss",
        f"{_ACTOR}.kl_loss_coef": kl.coef,
        f"{_ACTOR}.kl_loss_type": kl.estimator if kl.use == "loss" else "low_var_kl",
        f"{_ACTOR}.optim.lr": optim.lr,
        f"{_ACTOR}.optim.lr_decay_style": optim.schedule,
        f"{_ACTOR}.optim.lr_warmup_steps": optim.warmup(config.updates(config.actor)),
        f"{_ACTOR}.optim.weight_decay": optim.weight_decay,
        f"{_ACTOR}.optim.clip_grad": optim.clip_grad,
    }


def _layout(work: Work) -> dict[str, object]:
    parallel, engine = work.config.actor.parallel, work.config.actor.engine
    sizes = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "sequence_parallel": parallel.sp and parallel.tp > 1,
    }
    made: dict[str, object] = {f"{_ACTOR}.megatron.{key}": value for key, value in sizes.items()}
    parts = {"param": PARAMETERS, "grad": GRADIENTS, "optimizer": OPTIMIZER}
    made |= {f"{_ACTOR}.megatron.{name}_offload": part in engine.offloaded for name, part in parts.items()}
    if engine.recompute == "full":
        transformer = f"{_ACTOR}.megatron.override_transformer_config"
        made |= {f"{transformer}.recompute_granularity": "full", f"{transformer}.recompute_method": "uniform"}
        made[f"{transformer}.recompute_num_layers"] = 1
    return made | {f"{_REF}.megatron.param_offload": PARAMETERS in engine.offloaded}


def _generation(work: Work) -> dict[str, object]:
    servers, sampling = work.config.rollout.sglang, work.config.rollout.sampling
    fraction = (
        {} if servers.memory_fraction is None else {f"{_ROLLOUT}.gpu_memory_utilization": servers.memory_fraction}
    )
    return {
        f"{_ROLLOUT}.name": "sglang",
        f"{_ROLLOUT}.n": sampling.n,
        f"{_ROLLOUT}.temperature": sampling.temperature,
        f"{_ROLLOUT}.top_p": sampling.top_p,
        f"{_ROLLOUT}.top_k": sampling.top_k or -1,
        f"{_ROLLOUT}.ignore_eos": sampling.ignore_eos,
        f"{_ROLLOUT}.tensor_model_parallel_size": servers.tp_size,
        f"{_ROLLOUT}.free_cache_engine": True,
        **fraction,
    }


def _run(work: Work) -> dict[str, object]:
    return {
        "trainer.nnodes": work.config.cluster.nnodes,
        "trainer.n_gpus_per_node": work.gpus_per_node,
        "trainer.total_training_steps": work.steps,
        "trainer.total_epochs": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.critic_warmup": 0,
        "trainer.logger": ["console"],
    }


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write(work: Work) -> None:
    """Write rows as parquet, prompts as chat messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = work.reward(REWARDS, "verl")
    rows = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(answer)},
            "extra_info": {"index": number},
        }
        for number, (prompt, answer) in enumerate(prompts(work))
    ]
    pq.write_table(pa.Table.from_pylist(rows), work.rows)


def per_gpu(log: str, gpus: int) -> list[float]:
    """Return the tokens per second and GPU of every step in verl's console log (`perf/throughput:1234.5`)."""
    return [float(rate) for rate in _THROUGHPUT.findall(log)]


PEER = Peer("verl", ".parquet", command, write, per_gpu, no_such=no_such)

if __name__ == "__main__":
    sys.exit(main(PEER, __doc__))
