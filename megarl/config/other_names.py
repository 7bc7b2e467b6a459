"""Settings of TRL, verl, NeMo-RL and EasyR1: their names here, or that they do not exist here, for messages.

A name is looked up by its last parts, the longest match first: `trainer.total_epochs`, then `total_epochs`; then by
parts on the way to it, as `ray_init` of `ray_init.num_cpus`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megarl.config.fields import fields_of, find_key, iter_keys, nearest_keys
from megarl.config.run import RunConfig
from megarl.errors import ConfigError, close_matches

_SIZES = "actor.engine.micro_batch_tokens (micro-batches are filled by tokens)"
_CLIP = "algorithm.loss.clip_low and algorithm.loss.clip_high"
_USE_KL = "algorithm.kl.use (none, loss or reward)"
_KL_COEF = "algorithm.kl.coef, with algorithm.kl.use=loss or reward"
_RESUME = "trainer.resume; megarl train RECIPE --run-dir RUN_DIR continues a run"
_FOLDER = "tracking.dir, or the option --run-dir"
_TRACKERS = "tracking.mlflow, and tracking.loggers (wandb, tensorboard, trackio)"
_GREEDY = "validation.sampling (greedy; what is not said is as in rollout.sampling)"

#: Name in another project -> key here, with remarks.
KEYS: dict[str, str] = {
    # Model and data.
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "model.model_path": "model.path",
    "model.name": "model.path",
    "tokenizer_name": "model.tokenizer",
    "tokenizer_name_or_path": "model.tokenizer",
    "tokenizer_path": "model.tokenizer",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "dataset_name": "data.train_files",
    "dataset_path": "data.train_files",
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "test_files": "data.val_files",
    "dataset_text_field": "data.prompt_key",
    "train_batch_size": "data.batch_size",
    "rollout_batch_size": "data.batch_size",
    "per_device_train_batch_size": "data.batch_size (prompts per step over all ranks)",
    "per_device_eval_batch_size": "data.val_batch_size (over all ranks)",
    "max_prompt_length": "data.max_prompt_tokens",
    "filter_overlong_prompts": "data.overlong",
    "truncation": "data.overlong (filter or error; nothing is cut)",
    "shuffle_dataset": "data.shuffle",
    "system_prompt": "data.system_prompt",
    "split_validation_size": "data.val_split",
    "val_size": "data.val_split",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "enable_thinking": "data.chat_template_kwargs, as {enable_thinking: false}",
    "messages_key": "data.prompt_key and sft.response_key, both of them",
    # Generation.
    "max_response_length": "rollout.sampling.max_new_tokens",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "response_length": "rollout.sampling.max_new_tokens",
    "max_new_tokens": "rollout.sampling.max_new_tokens",
    "num_generations": "rollout.sampling.n",
    "rollout.n": "rollout.sampling.n",
    "num_generations_eval": "validation.sampling.n",
    "val_kwargs": _GREEDY,
    "val_override_config": _GREEDY,
    "rollout.temperature": "rollout.sampling.temperature",
    "rollout.top_p": "rollout.sampling.top_p",
    "rollout.top_k": "rollout.sampling.top_k",
    "use_vllm": "rollout.engine=sglang (servers are SGLang's; vLLM is not there)",
    "rollout.name": "rollout.engine (embedded or sglang; vLLM is not there)",
    "rollout.mode": "rollout.engine (embedded or sglang); generation during training is async.max_staleness",
    "hybrid_engine": "rollout.engine=embedded, or rollout.sglang.colocated: both share the devices of training",
    "vllm_gpu_memory_utilization": "rollout.sglang.memory_fraction",
    "gpu_memory_utilization": "rollout.sglang.memory_fraction",
    "vllm_tensor_parallel_size": "rollout.sglang.tp_size",
    "tensor_parallel_size": "rollout.sglang.tp_size",
    "rollout.tensor_model_parallel_size": "rollout.sglang.tp_size",
    "vllm_server_host": "rollout.sglang.urls",
    "vllm_server_base_url": "rollout.sglang.urls",
    "free_cache_engine": "rollout.sglang.colocated (memory is then released for each update)",
    "vllm_mode": "rollout.sglang.colocated",
    "enforce_eager": "rollout.cuda_graphs",
    "max_num_batched_tokens": "rollout.max_prefill_tokens",
    "max_num_seqs": "rollout.max_running",
    "multi_turn": "env.name",
    "max_turns": "rollout.limits.turns",
    "max_assistant_turns": "rollout.limits.turns",
    # Rewards.
    "reward_funcs": "reward.name, or reward.parts for several functions",
    "reward_function": "reward.name",
    "reward.function": "reward.name",
    "reward_function_kwargs": "reward.kwargs",
    "reward_weights": "reward.parts.NAME.weight; or algorithm.advantage.parts, with algorithm.advantage.name=gdpo",
    "custom_reward_function": "reward.name and reward.kwargs",
    "reward_manager": "reward.name",
    # The objective.
    "adv_estimator": "algorithm.advantage.name",
    "algorithm.gamma": "algorithm.advantage.gamma",
    "algorithm.lam": "algorithm.advantage.lam",
    "scale_rewards": "algorithm.advantage.norm_by_std",
    "norm_adv_by_std_in_grpo": "algorithm.advantage.norm_by_std",
    "loss_type": "algorithm.loss.aggregation (token-mean for dapo and bnpo, seq-mean-token-mean for grpo, "
    "seq-mean-token-sum-norm for dr_grpo) and algorithm.loss.name (ppo, but for cispo); of pairs preference.loss",
    "policy_loss": "algorithm.loss.name",
    "loss_mode": "algorithm.loss.name",
    "loss_agg_mode": "algorithm.loss.aggregation",
    "critic.loss_agg_mode": "critic.aggregation",
    "importance_sampling_level": "algorithm.loss.name (gspo for sequences)",
    "epsilon": _CLIP,
    "cliprange": _CLIP,
    "clip_ratio": _CLIP,
    "clip_ratio_low": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "delta": "algorithm.loss.dual_clip",
    "clip_ratio_c": "algorithm.loss.dual_clip",
    "clip_ratio_dual": "algorithm.loss.dual_clip",
    "entropy_coeff": "algorithm.loss.entropy_coef",
    "beta": f"{_KL_COEF}; of pairs preference.beta; of a teacher algorithm.distillation.beta",
    "init_kl_coef": _KL_COEF,
    "kl_coef": _KL_COEF,
    "kl_loss_coef": _KL_COEF,
    "kl_ctrl": "algorithm.kl.adaptive, algorithm.kl.coef, algorithm.kl.target and algorithm.kl.horizon",
    "use_kl_loss": _USE_KL,
    "use_kl_in_reward": _USE_KL,
    "disable_kl": _USE_KL,
    "kl_loss_type": "algorithm.kl.estimator",
    "kl_penalty": "algorithm.kl.estimator",
    "filter_groups": "algorithm.dynamic_sampling.enabled",
    "online_filtering": "algorithm.dynamic_sampling.enabled",
    "filter_low": "algorithm.dynamic_sampling.low",
    "filter_high": "algorithm.dynamic_sampling.high",
    "max_try_make_batch": "algorithm.dynamic_sampling.max_rounds",
    "max_num_gen_batches": "algorithm.dynamic_sampling.max_rounds",
    "overlong_buffer": "algorithm.overlong.buffer_tokens and algorithm.overlong.factor",
    "soft_overlong_punishment": "algorithm.overlong.buffer_tokens and algorithm.overlong.factor",
    "mask_truncated_completions": "algorithm.filter.truncated",
    "tis_imp_ratio_cap": "rollout_correction.is_threshold, with rollout_correction.is_level=token",
    "vllm_importance_sampling_correction": "rollout_correction.preset",
    "vllm_importance_sampling_cap": "rollout_correction.is_threshold",
    "cliprange_value": "critic.value_clip",
    "rollout_is_batch_normalize": "rollout_correction.is_batch_normalize",
    "logprobs_mode": "rollout.sampling.logprobs (full or processed)",
    "use_pf_ppo": "algorithm.resampling.name",
    "reweight_method": "algorithm.resampling.name",
    "weight_pow": "algorithm.resampling.power",
    "distillation_loss_coef": "algorithm.distillation.coef",
    "use_task_rewards": "algorithm.distillation.task_loss",
    "use_policy_gradient": "algorithm.distillation.through (loss or policy)",
    "loss_max_clamp": "algorithm.distillation.loss_max_clamp",
    # Optimizer and engine.
    "learning_rate": "actor.optim.lr",
    "lr_scheduler_type": "actor.optim.schedule",
    "warmup_style": "actor.optim.schedule",
    "lr_warmup_steps": "actor.optim.warmup_steps",
    "warmup_ratio": "actor.optim.warmup_ratio",
    "lr_warmup_ratio": "actor.optim.warmup_ratio",
    "lr_warmup_steps_ratio": "actor.optim.warmup_ratio",
    "min_lr_ratio": "actor.optim.min_lr",
    "max_grad_norm": "actor.optim.clip_grad",
    "grad_clip": "actor.optim.clip_grad",
    "adam_beta1": "actor.optim.beta1",
    "adam_beta2": "actor.optim.beta2",
    "betas": "actor.optim.beta1 and actor.optim.beta2",
    "adam_epsilon": "actor.optim.eps",
    "ppo_mini_batch_size": "actor.mini_batch_size",
    "global_batch_size": "actor.mini_batch_size",
    "num_mini_batches": "actor.mini_batch_size",
    "steps_per_generation": "actor.mini_batch_size",
    "num_iterations": "actor.ppo_epochs",
    "num_ppo_epochs": "actor.ppo_epochs",
    "ppo_micro_batch_size": _SIZES,
    "ppo_micro_batch_size_per_gpu": _SIZES,
    "log_prob_micro_batch_size_per_gpu": _SIZES,
    "micro_batch_size_per_device_for_update": _SIZES,
    "micro_batch_size_per_device_for_experience": _SIZES,
    "ppo_max_token_len_per_gpu": _SIZES,
    "use_dynamic_bsz": _SIZES,
    "dynamic_batching": _SIZES,
    "gradient_accumulation_steps": _SIZES,
    "gradient_checkpointing": "actor.engine.recompute",
    "enable_gradient_checkpointing": "actor.engine.recompute",
    "param_offload": "actor.engine.offload",
    "optimizer_offload": "actor.engine.offload",
    "grad_offload": "actor.engine.offload",
    "tensor_model_parallel_size": "actor.parallel.tp",
    "pipeline_model_parallel_size": "actor.parallel.pp",
    "virtual_pipeline_model_parallel_size": "actor.parallel.vpp",
    "context_parallel_size": "actor.parallel.cp",
    "ulysses_sequence_parallel_size": "actor.parallel.cp",
    "ulysses_size": "actor.parallel.cp",
    "expert_model_parallel_size": "actor.parallel.ep",
    "expert_tensor_parallel_size": "actor.parallel.etp",
    "moe_token_dispatcher_type": "actor.parallel.dispatch",
    # The loop.
    "max_steps": "trainer.steps",
    "total_training_steps": "trainer.steps",
    "num_train_epochs": "trainer.epochs",
    "total_epochs": "trainer.epochs",
    "save_steps": "trainer.save_every",
    "save_freq": "trainer.save_every",
    "save_strategy": "trainer.save_every",
    "save_period": "trainer.save_every",
    "checkpoint_must_save_by": "trainer.save_by_s (seconds)",
    "exit_duration_in_mins": "trainer.save_by_s (seconds)",
    "non_persistent_save_interval": "trainer.resume_every",
    "exit_signal_handler": "cluster.grace_s (SIGTERM saves anyway)",
    "save_total_limit": "trainer.keep_last",
    "save_limit": "trainer.keep_last",
    "max_actor_ckpt_to_keep": "trainer.keep_last",
    "metric_for_best_model": "trainer.best_metric",
    "early_stopping_patience": "trainer.early_stop.patience",
    "stop_at_validation_metric": "trainer.early_stop.metric",
    "stop_at_validation_threshold": "trainer.early_stop.target",
    "system_prompt_file": "data.system_prompt",
    "reward_model.model.path": "reward_model.path, with reward.name=reward_model",
    "early_stopping_threshold": "trainer.early_stop.min_delta",
    "load_best_model_at_end": "trainer.best_metric (the best model is exported as hf_best/)",
    "resume_from_checkpoint": _RESUME,
    "resume_mode": _RESUME,
    "resume_from_path": _RESUME,
    "load_checkpoint_path": _RESUME,
    "find_last_checkpoint": _RESUME,
    "eval_steps": "validation.every",
    "eval_strategy": "validation.every",
    "test_freq": "validation.every",
    "val_freq": "validation.every",
    "eval_on_start": "validation.before_train",
    "val_before_train": "validation.before_train",
    "log_completions": "validation.log_samples",
    "log_val_generations": "validation.log_samples",
    "val_generations_to_log": "validation.log_samples",
    "critic_warmup": "critic.warmup_steps",
    "n_gpus_per_node": "cluster.nproc (over all nodes)",
    "num_processes": "cluster.nproc",
    "num_machines": "cluster.nnodes",
    "ray_wait_register_center_timeout": "cluster.start_timeout_s",
    "output_dir": _FOLDER,
    "default_local_dir": _FOLDER,
    "save_checkpoint_path": _FOLDER,
    "logging_dir": _FOLDER,
    "experiment_name": "name",
    "run_name": "name",
    "project_name": "tracking.project",
    "report_to": _TRACKERS,
    "trainer.logger": _TRACKERS,
    # NeMo-RL's names, and those that need a section to be understood.
    "precision": "model.dtype",
    "megatron.dtype": "model.dtype",
    **dict.fromkeys(("lora_r", "lora_rank", "peft.dim"), "model.lora.rank"),
    **dict.fromkeys(("lora_alpha", "peft.alpha"), "model.lora.alpha"),
    "lora_dropout": "model.lora.dropout",
    **dict.fromkeys(("lora_target_modules", "target_modules"), "model.lora.targets (attention, mlp, experts)"),
    **dict.fromkeys(("lora_path", "lora_adapter_path"), "model.lora.path"),
    "data_path": "data.train_files",
    "data.validation": "data.val_files",
    **dict.fromkeys(("reward_fn_key", "env_name"), "the column data_source of a row, and reward.name for all rows"),
    "input_key": "data.prompt_key",
    "output_key": "data.answer_key",
    "num_prompts_per_step": "data.batch_size",
    "val_max_samples": "data.max_val_samples",
    "max_val_samples": "data.max_val_samples",
    "val_batch_size": "data.val_batch_size",
    "max_input_seq_length": "data.max_prompt_tokens",
    "tokenizer.chat_template_kwargs": "data.chat_template_kwargs",
    "custom_chat_template": "data.override_chat_template",
    "num_generations_per_prompt": "rollout.sampling.n",
    "generation.temperature": "rollout.sampling.temperature",
    "generation.top_p": "rollout.sampling.top_p",
    "generation.top_k": "rollout.sampling.top_k",
    "generation.stop_token_ids": "rollout.sampling.stop_token_ids",
    "generation.backend": "rollout.engine (embedded or sglang; vLLM is not there)",
    "colocated.enabled": "rollout.sglang.colocated",
    "max_model_len": "rollout.sglang.context_length",
    "vllm_max_model_length": "rollout.sglang.context_length",
    "tools": "env.name=tools, and a list of functions in section env",
    "max_tool_calling_iterations": "rollout.limits.turns",
    "max_rollout_turns": "rollout.limits.turns",
    "async_grpo": "async.max_staleness",
    "in_flight_weight_updates": "async.partial",
    "multi_objective_aggregation": "algorithm.advantage.name=gdpo, with algorithm.advantage.parts",
    "reward_model.num_workers": "reward.workers",
    "normalize_rewards": "algorithm.advantage.norm_by_std",
    "gae_gamma": "algorithm.advantage.gamma",
    "gae_lambda": "algorithm.advantage.lam",
    "use_leave_one_out_baseline": "algorithm.advantage.name=rloo",
    "ratio_clip_min": "algorithm.loss.clip_low",
    "ratio_clip_max": "algorithm.loss.clip_high",
    "ratio_clip_c": "algorithm.loss.dual_clip",
    "token_level_loss": "algorithm.loss.aggregation",
    "use_cispo": "algorithm.loss.name=cispo",
    "sequence_level_importance_ratios": "algorithm.loss.name=gspo",
    **dict.fromkeys(("sapo_temperature_pos", "actor.tau_pos"), "algorithm.loss.tau_pos, of algorithm.loss.name=sapo"),
    **dict.fromkeys(("sapo_temperature_neg", "actor.tau_neg"), "algorithm.loss.tau_neg, of algorithm.loss.name=sapo"),
    "reference_policy_kl_penalty": _KL_COEF,
    "reference_policy_kl_type": "algorithm.kl.estimator",
    "overlong_filtering": "algorithm.filter.truncated",
    "use_dynamic_sampling": "algorithm.dynamic_sampling.enabled",
    "dynamic_sampling_max_gen_batches": "algorithm.dynamic_sampling.max_rounds",
    "reward_shaping": "algorithm.overlong.buffer_tokens and algorithm.overlong.factor",
    "use_importance_sampling_correction": "rollout_correction.preset",
    "vllm_importance_sampling_mode": "rollout_correction.is_level, or rollout_correction.rs_level for masks",
    "vllm_importance_sampling_clip_max": "rollout_correction.is_threshold",
    "truncated_importance_sampling_type": "rollout_correction.is_level, or rollout_correction.rs_level for masks",
    "truncated_importance_sampling_ratio": "rollout_correction.is_threshold",
    "rollout_is": "rollout_correction.is_level",
    "rollout_is_threshold": "rollout_correction.is_threshold",
    "rollout_rs": "rollout_correction.rs",
    "bypass_mode": "rollout_correction.mode=bypass",
    "dpo.reference_policy_kl_penalty": "preference.beta",
    "label_smoothing": "preference.label_smoothing, of algorithm.pipeline=dpo",
    "sft_loss_weight": "preference.sft_coef",
    "preference_average_log_probs": "preference.length_normalised",
    "center_rewards_coefficient": "preference.center_coef",
    "desirable_weight": "preference.desirable_weight, of algorithm.pipeline=kto",
    "undesirable_weight": "preference.undesirable_weight, of algorithm.pipeline=kto",
    "teacher.model_name": "teacher.path",
    "teachers": "teacher.models, and teacher.key for the column that names a row's",
    "topk_logits_k": "algorithm.distillation.topk, with algorithm.distillation.estimator=forward_kl or reverse_kl",
    "zero_outside_topk": "algorithm.distillation.tail (renormalise or bucket)",
    "kl_type": "algorithm.distillation.estimator (forward_kl, reverse_kl or jsd)",
    "mixed_kl_weight": "algorithm.distillation.beta, with algorithm.distillation.estimator=jsd",
    "optimizer.lr": "actor.optim.lr",
    "optimizer.min_lr": "actor.optim.min_lr",
    "optimizer.weight_decay": "actor.optim.weight_decay",
    "lr_decay_style": "actor.optim.schedule",
    "lr_warmup_iters": "actor.optim.warmup_steps",
    "lr_decay_steps": "actor.optim.decay_steps",
    "lr_decay_iters": "actor.optim.decay_steps",
    "train_global_batch_size": "actor.mini_batch_size (prompts, not samples)",
    "train_micro_batch_size": _SIZES,
    "train_mb_tokens": _SIZES,
    "activation_checkpointing": "actor.engine.recompute",
    "logprob_chunk_size": "actor.engine.logits_chunk_tokens",
    "fp8_cfg": "actor.engine.fp8",
    "sequence_parallel": "actor.parallel.sp",
    "dtensor_cfg.tensor_parallel_size": "actor.parallel.tp",
    "max_num_steps": "trainer.steps",
    "max_num_epochs": "trainer.epochs",
    "seed": "trainer.seed",
    "keep_top_k": "trainer.keep_last",
    "checkpointing.metric_name": "trainer.best_metric",
    "val_period": "validation.every",
    "val_at_start": "validation.before_train",
    "val_num_generations_per_prompt": "validation.sampling.n",
    **dict.fromkeys(("val_temperature", "val_kwargs.temperature"), "validation.sampling.temperature"),
    "val_kwargs.n": "validation.sampling.n",
    "num_val_samples_to_print": "validation.log_samples",
    "wandb_enabled": _TRACKERS,
    "tensorboard_enabled": _TRACKERS,
    "mlflow_enabled": "tracking.mlflow",
    "wandb.project": "tracking.project",
    "wandb.name": "name",
    "checkpoint_dir": _FOLDER,
    "log_dir": _FOLDER,
    "num_nodes": "cluster.nnodes",
    "gpus_per_node": "cluster.nproc (over all nodes)",
}
_LORA = "adapters are in section model.lora: rank, alpha, dropout, targets"
_FROZEN = "parts of a model that stay as they are: model.freeze=[tower], [tower, merger] or [language_model]"
_QUANTISED = "there is no training of quantised weights here; model.dtype is fp32 or bf16"
_WANDB = "trackers are named in tracking.loggers (wandb, tensorboard, trackio, a class of yours), tracking.project"
_SHARDS = "there is no FSDP or DeepSpeed here: Megatron's layouts are (actor.parallel, actor.engine)"
_PICTURES = "images of prompts are named by data.image_key, with data.image_dir, min_pixels, max_pixels, limit_images"
_REFERENCE = "the reference is frozen here (reference.path)"
_REWARD_MODEL = "a reward model is a reward here: reward.name=reward_model or classifier, or http where it is served"
_ALWAYS = "this is always so here, and there is no key for it"
_PREFERENCES = "of preference methods DPO, IPO, SLiC, robust DPO, KTO and reward models are here (section preference)"
_PAIRS = "set algorithm.pipeline=dpo, and keys of section preference: loss, beta, label_smoothing, sft_coef"
#: Name in another project -> why it does not exist here, and what to use.
ABSENT: dict[str, str] = {
    **dict.fromkeys(("use_lora", "lora", "use_peft", "peft", "peft_config", "use_dora", "modules_to_save"), _LORA),
    **dict.fromkeys(("freeze_vision_tower", "freeze_vision", "freeze_llm", "freeze_aligner"), _FROZEN),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "use_bnb_nested_quant", "fp8_training"), _QUANTISED),
    **dict.fromkeys(("fp16", "amp"), "there is no fp16 here; model.dtype is fp32 or bf16"),
    **dict.fromkeys(("wandb", "use_wandb", "wandb_project", "wandb_entity", "wandb_log_unique_prompts"), _WANDB),
    **dict.fromkeys(("tensorboard", "tensorboard_dir", "use_tensorboard", "swanlab", "trackio_space_id"), _WANDB),
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp_size", "deepspeed", "ds_config"), _SHARDS),
    **dict.fromkeys(("zero_stage", "dtensor_cfg"), _SHARDS),
    **dict.fromkeys(("image_key", "video_key", "min_pixels", "max_pixels", "limit_images"), _PICTURES),
    **dict.fromkeys(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), _REFERENCE),
    **dict.fromkeys(("reward_model_path", "rm"), _REWARD_MODEL),
    **dict.fromkeys(("packing", "padding_free", "use_remove_padding", "balance_batch", "calculate_log_probs"), _ALWAYS),
    **dict.fromkeys(("logging_steps", "logging_strategy", "log_level"), f"{_ALWAYS}: every step is logged"),
    **dict.fromkeys(
        ("completion_only_loss", "assistant_only_loss", "train_on_prompt"), f"{_ALWAYS}: only responses are learnt"
    ),
    **dict.fromkeys(("dpo", "dpo_beta", "loss_type", "rpo_alpha", "reference_free"), _PAIRS),
    **dict.fromkeys(
        ("push_to_hub", "hub_model_id", "hub_strategy"),
        "this is a command here, after the run: megarl convert RUN_DIR/hf TARGET --push-to-hub NAME",
    ),
    "return_raw_chat": "prompts are taken as they are in the rows here, messages or text (data.prompt_key)",
    "strategy": "the engine is always Megatron-Core's here (actor.parallel has its layout)",
    "ray_init": "Ray is started with launch.launcher=ray here, without settings; threads are cluster.threads",
    "attn_implementation": "the attention kernel is chosen by what is installed here",
    **dict.fromkeys(("use_liger_kernel", "use_liger"), "there are no Liger kernels here"),
    "use_liger_loss": "there are no Liger kernels here; actor.engine.logits_chunk_tokens bounds the logits",
    "neftune_noise_alpha": "there is no NEFTune here",
    "ema": "there is no moving average of weights here",
    **dict.fromkeys(("optim", "optimizer"), "the optimizer is AdamW here (actor.optim has its settings)"),
    "val_only": "this is a command here: megarl eval RECIPE",
    "eval_only": "this is a command here: megarl eval RECIPE",
}
#: Methods that are named where a pipeline, an estimator or a loss is chosen, or a reward -> what to set here.
METHODS: dict[str, str] = {
    "dpo": _PAIRS,
    "ipo": "set algorithm.pipeline=dpo and preference.loss=ipo",
    **dict.fromkeys(("orpo", "simpo", "cpo", "bco", "online_dpo", "nash_md", "xpo"), _PREFERENCES),
    **dict.fromkeys(("rm", "reward", "reward_modeling"), "set algorithm.pipeline=reward_model for training one"),
    **dict.fromkeys(("reward_model", "prm"), _REWARD_MODEL),
    **dict.fromkeys(("sft", "cold_start"), "this is a command here: megarl sft RECIPE; before RL it is sft.steps"),
    **dict.fromkeys(("gkd", "distillation", "opd"), "set algorithm.distillation.coef and teacher.path"),
    **dict.fromkeys(("lora", "qlora", "peft"), _LORA),
    "accuracy_reward": "set reward.name=math",
    "math_verify": "set reward.name=math",
    "think_format_reward": "set reward.name=format",
    "rloo": "set algorithm.advantage.name=rloo",
    "remax": "set algorithm.advantage.name=remax and rollout.sampling.n=1",
    "reinforce_plus_plus": "set algorithm.advantage.name=reinforce_pp",
    "reinforce++": "set algorithm.advantage.name=reinforce_pp",
    "reinforce_plus_plus_baseline": "set algorithm.advantage.name=reinforce_pp_baseline",
    "dr_grpo": "set algorithm.advantage.norm_by_std=false and algorithm.loss.aggregation=seq-mean-token-sum-norm",
    "gspo": "set algorithm.loss.name=gspo",
    "cispo": "set algorithm.loss.name=cispo",
    "bnpo": "set algorithm.loss.aggregation=token-mean, and algorithm.loss.name=ppo",
    "vanilla": "set algorithm.loss.name=ppo",
    "clip": "set algorithm.loss.name=ppo",
}


#: Sections of verl and EasyR1 that enclose sections of this project, and those of their keys with another name here.
_AROUND = ("actor_rollout_ref", "worker")
_INSIDE = {"ref": "reference"}
#: Names of sections of this project, such as optim, in any enclosing section.
_SECTIONS = {key.path.rpartition(".")[2] for key in iter_keys() if key.section is not None}


def meaning_of(path: tuple[str, ...]) -> str | None:
    """Describe what to do instead of setting a key of another project; None when no such name is known.

    >>> meaning_of(("trainer", "save_steps"))
    'here this is trainer.save_every'
    """
    ends = [path[start:] for start in range(len(path))]
    middles = [path[start:end] for end in range(len(path) - 1, 0, -1) for start in range(end)]
    here = _unwrapped(path)
    key = find_key(here)
    if key is not None and key.path == ".".join(here):
        return f"here this is {key.path}"
    for parts in [*ends, *(part for part in middles if part[-1] not in _SECTIONS)]:
        name = ".".join(parts).lower()
        if name in KEYS:
            return f"here this is {KEYS[name]}"
        if name in ABSENT:
            return ABSENT[name]
    return None


def _unwrapped(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return `path` without an enclosing section of verl or EasyR1."""
    return (_INSIDE.get(path[1], path[1]), *path[2:]) if len(path) > 1 and path[0] in _AROUND else path


def _keys_ending(path: tuple[str, ...]) -> list[str]:
    """Return the keys of this project that end with `path` (actor.optim.lr for optim.lr); none for a single name."""
    return [key.path for key in iter_keys() if len(path) > 1 and key.path.endswith(f".{'.'.join(path)}")][:4]


def option_meaning(options: Sequence[str]) -> str:
    """Return the hint of `meaning_of` for the first command-line option that is a key here or in another project.

    Returns:
        `; ` and what to do, or an empty text.
    """
    for text in options:
        name, _, value = text.lstrip("-").partition("=")
        path = tuple(name.replace("-", "_").split("."))
        if not text.startswith("--"):
            continue
        if len(path) > 1 and find_key(path) is not None:
            return f"; write {'.'.join(path)}={value or 'VALUE'}, without dashes"
        meant = meaning_of(path)
        if meant is not None:
            return f"; {meant}"
    return ""


def method_fix(name: str, known: Sequence[str]) -> str | None:
    """Describe what to set for an unknown method name: by another project's name, else by spelling among `known`."""
    meant = METHODS.get(name.lower().replace("-", "_"))
    if meant is not None:
        return meant
    close = close_matches(name, known)
    return f"did you mean {close[0]}?" if close else None


def unknown_keys(
    path: tuple[str, ...],
    value: Any,
    where: Callable[[tuple[str, ...]], str],
    owned: Callable[[str], Sequence[str]] = lambda key: (),
) -> list[ConfigError]:
    """Return the errors for an unknown key, or one for each key in a section of another project.

    Args:
        path: of the key, of which a part may be unknown already.
        value: the value given.
        where: returns the place at which a path was given.
        owned: returns the dotted keys of components that have this name.
    """
    leaves = list(_leaves(path, value))
    if path[0] in _AROUND or any(meaning_of(leaf) or _keys_ending(leaf) for leaf in leaves):
        return [_unknown_key(leaf, where(leaf), owned) for leaf in leaves]
    unknown = _unknown_part(path)
    # A section that is none of another project's is one problem, whatever is in it.
    return [_unknown_key(unknown, where(path), owned)]


def _unknown_part(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return `path` up to its first unknown part; all of it if every part is known."""
    return next((path[:depth] for depth in range(1, len(path) + 1) if find_key(path[:depth]) is None), path)


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the settings in an unknown section; a section that has a meaning as a whole is one path."""
    if not isinstance(value, Mapping) or not value or (path[-1] not in _SECTIONS and meaning_of(path) is not None):
        yield path
        return
    for name, inner in value.items():
        yield from _leaves((*path, str(name)), inner)


def _unknown_key(path: tuple[str, ...], where: str, owned: Callable[[str], Sequence[str]]) -> ConfigError:
    """Return the error for a `path` that is unknown from some part on."""
    unknown = _unknown_part(_unwrapped(path))
    near = _components_keys(unknown, owned) or _keys_ending(path) or nearest_keys(unknown)
    is_prefix = any(key.startswith(".".join(path)) for key in near)  # as beta1 is by beta
    meant = None if is_prefix else meaning_of(path)
    parent = find_key(unknown[:-1]).section if len(unknown) > 1 else RunConfig  # type: ignore[union-attr]
    # All sections would be too many to read.
    allowed = list(fields_of(parent)) if parent and (parent is not RunConfig or not (near or meant)) else None
    spelt = f"did you mean {' or '.join(near)}?" if near else "remove it, or use one of the keys above"
    if not any(key.rpartition(".")[0] in (".".join(unknown[:-1]), _kwargs_of(unknown[:-1])) for key in near):
        spelt = _as_argument(unknown) or spelt
    return ConfigError(f"unknown key {'.'.join(path)}", where=where, allowed=allowed, fix=meant or spelt)


#: Mappings with keys of the user's own: what a key that was written beside one of them may be.
_OPEN = {
    "kwargs": "an argument of the function",
    "loader_kwargs": "an argument of a pkg.mod:fn source",
    "hf_config": "a key of the model's config.json",
}


def _kwargs_of(path: tuple[str, ...]) -> str | None:
    """Return the mapping with keys of the user's own in the section at `path`; None where it has none."""
    key = find_key(path) if path else None
    fields = fields_of(key.section) if key is not None and key.section is not None else {}
    return next((".".join([*path, name]) for name in _OPEN if name in fields), None)


def _components_keys(path: tuple[str, ...], owned: Callable[[str], Sequence[str]]) -> list[str]:
    """Return the keys of components for a key that was written beside the mapping or section that holds them."""
    beside = _kwargs_of(path[:-1])
    found = [key for key in owned(path[-1]) if key.startswith(f"{path[0]}.")]
    if found and beside is not None and path[0] == "reward":
        return [f"{beside}.{path[-1]}"]
    return found


def _as_argument(path: tuple[str, ...]) -> str | None:
    """Describe a key that may belong to a mapping in its section; None where there is no such mapping."""
    place = _kwargs_of(path[:-1])
    if place is None:
        return None
    return f"if it is {_OPEN[place.rpartition('.')[2]]}, write {place}.{path[-1]}; else remove it"
