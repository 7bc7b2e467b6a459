"""Settings of TRL, verl, NeMo-RL and EasyR1 with the keys that replace them here, for error messages.

A setting is looked up by its last parts, the longest match first (`trainer.total_epochs`, then `total_epochs`), and
then by the sections around it (`ray_init` of `ray_init.num_cpus`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

from megarl.config.fields import fields_of, find_key, iter_keys, nearest_keys
from megarl.config.other_values import NO_SUCH_PREFERENCE
from megarl.config.placement import TeamRole
from megarl.config.run import RunConfig
from megarl.system.errors import ConfigError, close_matches

_SIZES = "actor.engine.micro_batch_tokens (micro-batches are filled by tokens)"
_KL_COEF = "algorithm.kl.coef, with algorithm.kl.use=loss or reward"
_LOSS_TYPE = (
    "algorithm.loss.aggregation (token-mean for dapo and bnpo, seq-mean-token-mean for grpo, seq-mean-token-sum-norm "
    "for dr_grpo) and algorithm.loss.name (ppo, but for cispo); of pairs preference.loss"
)


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Return a table that maps each of the names in a key of `table` (separated by spaces) to that key's text."""
    return {name: text for text, names in table.items() for name in names.split()}


#: Key here, with remarks -> its names in other projects. The next two tables have the same form.
_KEYS = {
    "name": "experiment_name run_name wandb.name",
    "model.path": "model_name model_name_or_path model.model_path model.name",
    "model.tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "model.trust_remote_code": "trust_remote_code",
    "model.dtype": "dtype torch_dtype bf16 precision megatron.dtype",
    "actor.mtp": "mtp.enable mtp.enable_train enable_mtp_training enable_mtp mtp_num_layers",
    "actor.mtp.loss_weight": "mtp_loss_scaling_factor mtp_loss_coef",
    "model.lora.rank": "lora_r lora_rank peft.dim lora.r peft.r lora.dim",
    "model.lora.alpha": "lora_alpha peft.alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets (attention, mlp, experts, tower, merger)": "lora_target_modules target_modules",
    "model.lora.path": "lora_path lora_adapter_path",
    "data.train_files, as NAME:CONFIG@SPLIT": "dataset_config dataset_train_split",
    "data.val_files, as NAME:CONFIG@SPLIT": "dataset_test_split",
    "data.train_files": "dataset_name dataset_path train_dataset data_path",
    "data.val_files": "eval_dataset test_files data.validation",
    "data.prompt_key": "dataset_text_field input_key",
    "data.batch_size": "train_batch_size rollout_batch_size num_prompts_per_step",
    "data.batch_size (prompts per step over all ranks)": "per_device_train_batch_size",
    "data.batch_size (prompts, where this counts responses)": "generation_batch_size",
    "data.val_batch_size (over all ranks)": "per_device_eval_batch_size",
    "data.max_prompt_tokens": "max_prompt_length max_input_seq_length",
    "data.overlong": "filter_overlong_prompts",
    "data.overlong (filter or error; nothing is cut)": "truncation",
    "data.shuffle": "shuffle_dataset",
    "data.system_prompt": "system_prompt system_prompt_file",
    "data.val_split": "split_validation_size val_size",
    "data.chat_template_kwargs": "apply_chat_template_kwargs tokenizer.chat_template_kwargs chat_template_kwargs",
    "data.chat_template_kwargs, as {enable_thinking: false}": "enable_thinking",
    "data.prompt_key and sft.response_key, both of them": "messages_key",
    "data.answer_key": "output_key",
    "data.max_val_samples": "val_max_samples max_val_samples",
    "data.val_batch_size": "val_batch_size",
    "data.loader_workers": "dataloader_num_workers num_loader_workers",
    "data.override_chat_template": "custom_chat_template chat_template_path tokenizer.chat_template",
    "rollout.sampling.max_new_tokens": "max_response_length max_completion_length response_length max_new_tokens",
    "rollout.sampling.n": "num_generations rollout.n num_generations_per_prompt",
    "rollout.sampling.temperature": "rollout.temperature generation.temperature temperature",
    "rollout.sampling.top_p": "rollout.top_p generation.top_p top_p",
    "rollout.sampling.top_k": "rollout.top_k generation.top_k top_k",
    "rollout.sampling.min_p": "rollout.min_p generation.min_p min_p",
    "rollout.engine=sglang (servers are SGLang's; vLLM is not there)": "use_vllm",
    "rollout.engine (embedded or sglang; vLLM is not there)": "rollout.name generation.backend",
    "rollout.engine (embedded or sglang); generation during training is async.max_staleness": "rollout.mode",
    "rollout.engine=embedded, or rollout.sglang.colocated: both share the devices of training": "hybrid_engine",
    "rollout.sglang.attention_dp": "sglang_dp_size enable_dp_attention attn_dp_size",
    "rollout.sglang.memory_fraction": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "rollout.sglang.start_timeout_s": "vllm_server_timeout",
    "rollout.sglang.tp_size": "vllm_tensor_parallel_size tensor_parallel_size rollout.tensor_model_parallel_size",
    "rollout.sglang.urls": "vllm_server_port vllm_server_host vllm_server_base_url",
    "rollout.sglang.colocated (memory is then released for each update)": "free_cache_engine",
    "rollout.sglang.colocated": "vllm_mode colocated.enabled",
    "rollout.cuda_graphs": "enforce_eager",
    "rollout.max_prefill_tokens": "max_num_batched_tokens",
    "rollout.max_running": "max_num_seqs",
    "rollout.limits.turns": "max_turns max_assistant_turns max_tool_calling_iterations max_rollout_turns",
    "rollout.sampling.logprobs (full or processed)": "logprobs_mode",
    "rollout.sampling.stop_token_ids": "generation.stop_token_ids",
    "rollout.sampling.stop (a list of strings)": "rollout.stop generation.stop_strings stop_strings stop",
    "rollout.sampling.ignore_eos": "ignore_eos",
    "rollout.sglang.context_length": "max_model_len vllm_max_model_length",
    "env.name": "multi_turn",
    "env.parser, of env.name=tools": "multi_turn.format tool_parser",
    "env.tools, of env.name=tools: a list of functions": "tool_config_path function_tool_path",
    "env.name=tools, and a list of functions in section env": "tools",
    "reward.name, or reward.parts for several functions": "reward_funcs",
    "reward.name": "reward_function reward.function reward_manager",
    "reward.kwargs": "reward_function_kwargs",
    "reward.parts.NAME.weight; or algorithm.advantage.parts, with algorithm.advantage.name=gdpo": "reward_weights",
    "reward.name and reward.kwargs": "custom_reward_function",
    "reward.workers": "reward_model.num_workers reward.num_workers",
    "algorithm.advantage.name": "adv_estimator",
    "algorithm.advantage.gamma": "algorithm.gamma gae_gamma",
    "algorithm.advantage.lam": "algorithm.lam gae_lambda",
    "algorithm.advantage.norm_by_std": "scale_rewards norm_adv_by_std_in_grpo normalize_rewards",
    _LOSS_TYPE: "loss_type",
    "algorithm.loss.name": "policy_loss loss_mode",
    "algorithm.loss.aggregation": "loss_agg_mode token_level_loss",
    "algorithm.loss.name (gspo for sequences)": "importance_sampling_level",
    "algorithm.loss.clip_low and algorithm.loss.clip_high": "epsilon cliprange clip_ratio",
    "algorithm.loss.clip_low": "clip_ratio_low ratio_clip_min",
    "algorithm.loss.clip_high": "epsilon_high clip_ratio_high ratio_clip_max",
    "algorithm.loss.dual_clip": "delta clip_ratio_c clip_ratio_dual ratio_clip_c",
    "algorithm.loss.entropy_coef": "entropy_coeff entropy_coef",
    f"{_KL_COEF}; of pairs preference.beta; of a teacher algorithm.distillation.beta": "beta",
    _KL_COEF: "init_kl_coef kl_coef kl_loss_coef reference_policy_kl_penalty",
    "algorithm.kl.adaptive, algorithm.kl.coef, algorithm.kl.target and algorithm.kl.horizon": "kl_ctrl",
    "algorithm.kl.use (none, loss or reward)": "use_kl_loss use_kl_in_reward disable_kl",
    "algorithm.kl.estimator": "kl_loss_type kl_penalty reference_policy_kl_type",
    "algorithm.kl.estimator=unbiased_k3": ("use_unbiased_kl use_on_policy_kl_approximation use_bias_correction_kl"),
    "algorithm.dynamic_sampling.enabled": "filter_groups online_filtering use_dynamic_sampling",
    "algorithm.dynamic_sampling.low": "filter_low",
    "algorithm.dynamic_sampling.high": "filter_high",
    "algorithm.dynamic_sampling.max_rounds": "max_try_make_batch max_num_gen_batches dynamic_sampling_max_gen_batches",
    "algorithm.overlong.buffer_tokens and algorithm.overlong.factor": (
        "overlong_buffer soft_overlong_punishment reward_shaping"
    ),
    "algorithm.filter.truncated": "mask_truncated_completions overlong_filtering",
    "algorithm.resampling.name": "use_pf_ppo reweight_method",
    "algorithm.resampling.power": "weight_pow",
    "algorithm.distillation.coef": "distillation_loss_coef",
    "algorithm.distillation.task_loss": "use_task_rewards",
    "algorithm.distillation.through (loss or policy)": "use_policy_gradient",
    "algorithm.distillation.loss_max_clamp": "loss_max_clamp",
    "algorithm.advantage.name=gdpo, with algorithm.advantage.parts": "multi_objective_aggregation",
    "algorithm.advantage.name=rloo": "use_leave_one_out_baseline",
    "algorithm.loss.name=cispo": "use_cispo",
    "algorithm.loss.name=gspo": "sequence_level_importance_ratios",
    "algorithm.loss.tau_pos, of algorithm.loss.name=sapo": "sapo_temperature_pos actor.tau_pos",
    "algorithm.loss.tau_neg, of algorithm.loss.name=sapo": "sapo_temperature_neg actor.tau_neg",
    "algorithm.loss.off_policy_threshold, of algorithm.loss.name=opsm": "off_policy_mask_threshold opsm_delta",
    **{
        f"algorithm.loss.{key}, of algorithm.loss.name=vespo": f"vespo_{key}"
        for key in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
    },
    "algorithm.loss.name=opsm": "use_opsm",
    "algorithm.distillation.topk, with algorithm.distillation.estimator=forward_kl or reverse_kl": "topk_logits_k",
    "algorithm.distillation.tail (renormalise or bucket)": "zero_outside_topk",
    "algorithm.distillation.estimator (forward_kl, reverse_kl or jsd)": "kl_type",
    "algorithm.distillation.beta, with algorithm.distillation.estimator=jsd": "mixed_kl_weight",
    "rollout_correction.is_threshold, with rollout_correction.is_level=token": "tis_imp_ratio_cap",
    "rollout_correction.preset": "vllm_importance_sampling_correction use_importance_sampling_correction",
    "rollout_correction.is_threshold": (
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max truncated_importance_sampling_ratio "
        "rollout_is_threshold"
    ),
    "rollout_correction.is_batch_normalize": "rollout_is_batch_normalize",
    "rollout_correction.is_level, or rollout_correction.rs_level for masks": (
        "vllm_importance_sampling_mode truncated_importance_sampling_type"
    ),
    "rollout_correction.is_level": "rollout_is",
    "rollout_correction.rs": "rollout_rs",
    "rollout_correction.rs, with a level, bounds and a stat each": "rollout_rs_threshold off_policy_mask_threshold",
    "rollout_correction.mode=bypass": "bypass_mode",
    "preference.max_tokens of pairs, sft.max_tokens of examples": "max_length max_total_sequence_length",
    "preference.beta": "dpo.reference_policy_kl_penalty",
    "preference.label_smoothing, of algorithm.pipeline=dpo": "label_smoothing",
    "preference.sft_coef": "sft_loss_weight",
    "preference.length_normalised": "preference_average_log_probs",
    "preference.center_coef": "center_rewards_coefficient",
    "preference.desirable_weight, of algorithm.pipeline=kto": "desirable_weight",
    "preference.undesirable_weight, of algorithm.pipeline=kto": "undesirable_weight",
    "teacher.path": "teacher.model_name",
    "teacher.models, and teacher.key for the column that names a row's": "teachers",
    "actor.optim.lr": "learning_rate optimizer.lr",
    "actor.optim.schedule": "lr_scheduler_type warmup_style lr_decay_style",
    "actor.optim.warmup_steps": "lr_warmup_steps lr_warmup_iters",
    "actor.optim.warmup_ratio": "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio",
    "actor.optim.min_lr": "min_lr_ratio optimizer.min_lr",
    "actor.optim.clip_grad": "max_grad_norm grad_clip",
    "actor.optim.beta1": "adam_beta1",
    "actor.optim.beta2": "adam_beta2",
    "actor.optim.beta1 and actor.optim.beta2": "betas",
    "actor.optim.eps": "adam_epsilon",
    "actor.mini_batch_size": "ppo_mini_batch_size global_batch_size num_mini_batches steps_per_generation",
    "actor.ppo_epochs": "num_iterations num_ppo_epochs",
    _SIZES: (
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu "
        "micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience ppo_max_token_len_per_gpu "
        "use_dynamic_bsz dynamic_batching gradient_accumulation_steps train_micro_batch_size train_mb_tokens"
    ),
    "actor.engine.recompute": "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "actor.engine.offload": "param_offload optimizer_offload grad_offload",
    "actor.parallel.tp": "tensor_model_parallel_size dtensor_cfg.tensor_parallel_size",
    "actor.parallel.pp": "pipeline_model_parallel_size",
    "actor.parallel.vpp": "virtual_pipeline_model_parallel_size",
    "actor.parallel.first_stage_layers": "num_layers_in_first_pipeline_stage decoder_first_pipeline_num_layers",
    "actor.parallel.last_stage_layers": "num_layers_in_last_pipeline_stage decoder_last_pipeline_num_layers",
    "actor.parallel.cp": "context_parallel_size ulysses_sequence_parallel_size ulysses_size",
    "actor.parallel.ep": "expert_model_parallel_size",
    "actor.parallel.etp": "expert_tensor_parallel_size",
    "actor.parallel.dispatch": "moe_token_dispatcher_type",
    "actor.optim.weight_decay": "optimizer.weight_decay",
    "actor.optim.decay_steps": "lr_decay_steps lr_decay_iters",
    "actor.mini_batch_size (prompts, not samples)": "train_global_batch_size",
    "actor.engine.logits_chunk_tokens": "logprob_chunk_size",
    "actor.engine.fp8": "fp8_cfg fp8_training",
    "actor.parallel.sp": "sequence_parallel",
    "critic.aggregation": "critic.loss_agg_mode",
    "critic.value_clip": "cliprange_value",
    "critic.warmup_steps": "critic_warmup",
    "trainer.steps": "max_steps total_training_steps max_num_steps",
    "trainer.epochs": "max_num_epochs",
    "trainer.epochs, of megarl sft sft.epochs": "num_train_epochs total_epochs",
    "sft.epochs": "sft.max_num_epochs",
    "trainer.save_every": "save_steps save_freq save_strategy save_period",
    "trainer.profile.steps": "global_profiler.steps profile_steps",
    "trainer.profile.ranks": "profile_ranks",
    "trainer.profile.tool": "global_profiler.tool",
    "trainer.save_by_s (seconds)": "checkpoint_must_save_by exit_duration_in_mins",
    "trainer.resume_every": "non_persistent_save_interval",
    "trainer.keep_last": "max_critic_ckpt_to_keep save_total_limit save_limit max_actor_ckpt_to_keep keep_top_k",
    "trainer.best_metric": "metric_for_best_model checkpointing.metric_name",
    "trainer.early_stop.patience": "early_stopping_patience",
    "trainer.early_stop.metric": "stop_at_validation_metric",
    "trainer.early_stop.target": "stop_at_validation_threshold",
    "trainer.early_stop.min_delta": "early_stopping_threshold",
    "trainer.best_metric (the best model is exported as hf_best/)": "load_best_model_at_end",
    "trainer.resume; megarl train RECIPE --run-dir RUN_DIR continues a run": (
        "resume_from_checkpoint resume_mode resume_from_path load_checkpoint_path find_last_checkpoint"
    ),
    "trainer.seed": "seed",
    "validation.sampling.n": "num_generations_eval val_num_generations_per_prompt val_kwargs.n",
    "validation.sampling (greedy; what is not said is as in rollout.sampling)": "val_kwargs val_override_config",
    "validation.every": "eval_steps eval_strategy test_freq val_freq val_period",
    "validation.before_train": "eval_on_start val_before_train val_at_start",
    "validation.log_samples": (
        "num_completions_to_print log_completions log_val_generations val_generations_to_log num_val_samples_to_print"
    ),
    "validation.sampling.temperature": "val_temperature val_kwargs.temperature",
    "async.max_staleness": "async_grpo",
    "async.partial": "in_flight_weight_updates",
    "cluster.grace_s (SIGTERM saves anyway)": "exit_signal_handler",
    "cluster.nproc (over all nodes)": "n_gpus_per_node gpus_per_node",
    "cluster.nproc": "num_processes",
    "cluster.nnodes": "num_machines num_nodes",
    "cluster.start_timeout_s": "ray_wait_register_center_timeout",
    "tracking.dir, or the option --run-dir": (
        "output_dir default_local_dir save_checkpoint_path logging_dir checkpoint_dir log_dir"
    ),
    "tracking.project": "project_name wandb.project",
    "tracking.mlflow, and tracking.loggers (wandb, tensorboard, trackio)": (
        "report_to trainer.logger wandb_enabled tensorboard_enabled"
    ),
    "tracking.mlflow": "mlflow_enabled",
    "reward_model.path, with reward.name=reward_model": "reward_model.model.path",
    "the column data_source of a row, and reward.name for all rows": "reward_fn_key env_name",
}
#: Name in another project -> key here, with remarks.
KEYS = _by_name(_KEYS)

_LORA = "adapters are in section model.lora: rank, alpha, dropout, targets"
_FROZEN = "to freeze parts of a model set model.freeze=[tower], [tower, merger] or [language_model]"
_QUANTISED = "quantised weights cannot be trained here; model.dtype is fp32 or bf16"
_WANDB = "set trackers in tracking.loggers (wandb, tensorboard, trackio, or your own class) and tracking.project"
_SHARDS = "FSDP and DeepSpeed do not exist here; use Megatron's layouts (actor.parallel, actor.engine)"
_PICTURES = "set the column of images in data.image_key, and data.image_dir, min_pixels, max_pixels, limit_images"
_VIDEOS = "set the column of videos in data.video_key, and data.video_fps, max_frames, video_max_pixels"
_REFERENCE = "the reference policy is always frozen here (reference.path)"
_REWARD_MODEL = "use a reward model as a reward: reward.name=reward_model or classifier, or http for a served one"
_ALWAYS = "this is always on here, and has no key"
_REVISION = (
    "revisions cannot be chosen here: run hf download NAME --revision REVISION --local-dir FOLDER, and set model.path "
    "to FOLDER"
)
_VLLM = "vLLM is not supported; servers run SGLang (rollout.engine=sglang)"
_SAMPLING = (
    "this sampling rule does not exist here; rollout.sampling has temperature, top_p, top_k, min_p, min_new_tokens, "
    "stop"
)
_PENALTY = (
    "this penalty does not exist here: it depends on earlier tokens, and training computes log-probs without it, so "
    "ratios would be wrong. A reward can punish repetition (reward.name=FILE.py:FUNCTION)"
)
_PAIRS = "set algorithm.pipeline=dpo, and the keys of the section preference: loss, beta, label_smoothing, sft_coef"
_ABSENT = {
    _LORA: "use_lora lora use_peft peft peft_config modules_to_save",
    f"there is no DoRA here; {_LORA}": "use_dora dora",
    _FROZEN: "freeze_vision_tower freeze_vision freeze_llm freeze_aligner",
    _QUANTISED: "load_in_4bit load_in_8bit use_bnb_nested_quant",
    "there is no training in fp16 here (rollout.dtype=fp16 generates in it); model.dtype is fp32 or bf16": "fp16 amp",
    _WANDB: (
        "wandb use_wandb wandb_project wandb_entity wandb_log_unique_prompts tensorboard tensorboard_dir "
        "use_tensorboard swanlab trackio_space_id"
    ),
    _SHARDS: "fsdp fsdp_config fsdp_size deepspeed ds_config zero_stage dtensor_cfg",
    _PICTURES: "image_key min_pixels max_pixels limit_images",
    _VIDEOS: "video_key video_fps video_max_pixels",
    _REFERENCE: "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    _REWARD_MODEL: "reward_model_path rm",
    _ALWAYS: "packing padding_free use_remove_padding balance_batch calculate_log_probs",
    f"{_ALWAYS}: every step is logged": "logging_steps logging_strategy log_level",
    f"{_ALWAYS}: only responses are trained on": "completion_only_loss assistant_only_loss train_on_prompt",
    _PAIRS: "dpo dpo_beta loss_type rpo_alpha reference_free",
    "this is a command here, after the run: megarl convert RUN_DIR/hf TARGET --push-to-hub NAME": (
        "push_to_hub hub_model_id hub_strategy"
    ),
    "rows hold complete prompts here, as messages or text (data.prompt_key)": "return_raw_chat",
    "the training engine is always Megatron-Core here (actor.parallel sets its layout)": "strategy",
    "Ray is started by launch.launcher=ray, without settings; threads are cluster.threads": "ray_init",
    "the attention kernel depends on the installed packages here": "attn_implementation",
    "Liger kernels are not used here": "use_liger_kernel use_liger",
    "Liger kernels are not used here; actor.engine.logits_chunk_tokens bounds the memory of logits": "use_liger_loss",
    "NEFTune does not exist here": "neftune_noise_alpha",
    _REVISION: "revision model_revision",
    _VLLM: (
        "vllm vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_group_port "
        "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged"
    ),
    _SAMPLING: "generation_kwargs cache_implementation do_sample",
    _PENALTY: "repetition_penalty frequency_penalty presence_penalty",
    "the model's own configuration is used here, with model.dtype and model.trust_remote_code": "model_init_kwargs",
    "pairs and prompts that are too long are left out here, never truncated (data.overlong)": "truncation_mode",
    f"{_ALWAYS}: actor.engine.recompute sets which activations are recomputed": "gradient_checkpointing_kwargs",
    "activations stay on the device here: recompute more of them with actor.engine.recompute": (
        "activation_offloading enable_activation_offload fine_grained_activation_offloading offload_modules"
    ),
    "rows are read and rendered by the trainer's processes here, without data workers": (
        "dataset_num_proc filter_overlong_prompts_workers dataset_kwargs remove_unused_columns dataloader_pin_memory"
    ),
    f"{_ALWAYS}: log-probs of the reference are computed once per step": (
        "precompute_ref_log_probs precompute_ref_batch_size"
    ),
    f"{_ALWAYS}: sequences are packed, never padded": "pad_to_multiple_of packing_strategy eval_packing use_shm",
    f"{_ALWAYS}, and models are trained without dropout except model.lora.dropout": "disable_dropout",
    f"{_ALWAYS} by the engine of generation": "enable_chunked_prefill enable_prefix_caching load_format",
    "every token counts equally here; write a loss of your own to weight tokens": "top_entropy_quantile",
    "the entropy coefficient is constant here (algorithm.loss.entropy_coef)": (
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target"
    ),
    "the balance of experts is set in the model's own configuration": "router_aux_loss_coef",
    f"{_ALWAYS}: the run folder has every sample": "rollout_data_dir validation_data_dir",
    "environments run in one process per replica here, and tools in processes of their own (section env)": (
        "agent.num_workers"
    ),
    "a round of generation takes data.batch_size prompts, or fewer (rollout.round_prompts); set more rounds by "
    "algorithm.dynamic_sampling.max_rounds": "gen_batch_size",
    "preference losses here use DPO's KL divergence": "f_divergence_type f_alpha_divergence_coef",
    "only one preference loss can be set (preference.loss); preference.sft_coef adds an SFT term": "loss_weights",
    "rank-stabilised LoRA does not exist here; the scale is model.lora.alpha / rank": "use_rslora",
    "adapters are on linear layers here (model.lora.targets)": "lora_target_parameters lora_modules_to_save",
    "there is no moving average of weights here": "ema",
    "the optimizer is always AdamW here (actor.optim has its settings)": (
        "optim optimizer optim.name optimizer.name optim.optimizer muon adafactor lion sgd adamw_torch adamw_8bit "
        "adamw_bnb_8bit paged_adamw_8bit paged_adamw_32bit"
    ),
    "this is a command here: megarl eval RECIPE": "val_only eval_only",
}
#: Name in another project -> why it does not exist here, and what to use instead.
ABSENT = _by_name(_ABSENT)

_METHODS = {
    _PAIRS: "dpo",
    "set algorithm.pipeline=dpo and preference.loss=ipo": "ipo",
    NO_SUCH_PREFERENCE: "orpo simpo cpo bco online_dpo nash_md xpo",
    "set algorithm.pipeline=reward_model for training one": "rm reward reward_modeling",
    _REWARD_MODEL: "reward_model prm",
    "use the command megarl sft RECIPE; before RL set sft.steps": "sft cold_start",
    "set algorithm.distillation.coef and teacher.path": "gkd distillation opd",
    _LORA: "lora peft",
    f"{_QUANTISED}; {_LORA}": "qlora",
    "set algorithm.pipeline=dapo, and algorithm.loss.clip_high, such as 0.28": "dapo",
    "set reward.name=math": "accuracy_reward math_verify",
    "set reward.name=format": "think_format_reward",
    "set algorithm.advantage.name=rloo": "rloo",
    "set algorithm.advantage.name=remax and rollout.sampling.n=1": "remax",
    "set algorithm.advantage.name=reinforce_pp": "reinforce_plus_plus reinforce++",
    "set algorithm.advantage.name=reinforce_pp_baseline": "reinforce_plus_plus_baseline",
    "set algorithm.advantage.norm_by_std=false and algorithm.loss.aggregation=seq-mean-token-sum-norm": "dr_grpo",
    "set algorithm.loss.name=gspo": "gspo",
    "set algorithm.loss.name=gspo and algorithm.loss.aggregation=seq-mean-token-sum": "luspo",
    "set algorithm.loss.name=cispo": "cispo",
    "set algorithm.loss.aggregation=token-mean, and algorithm.loss.name=ppo": "bnpo",
    "set algorithm.loss.name=ppo": "vanilla clip",
}
#: Method of another project, as written for a pipeline, estimator, loss or reward -> what to set here.
METHODS = _by_name(_METHODS)


#: Sections of verl and EasyR1 that wrap sections of this project, and the wrapped sections whose names differ here.
_AROUND = ("actor_rollout_ref", "worker")
_INSIDE = {"ref": "reference"}
#: Names of this project's sections. Other projects have sections with some of these names (such as optim) elsewhere.
_SECTIONS = {key.path.rpartition(".")[2] for key in iter_keys() if key.section is not None}


def meaning_of(path: tuple[str, ...]) -> str | None:
    """Return what to set instead of a key of another project; None for an unknown name.

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


def key_of(path: tuple[str, ...]) -> str | None:
    """Return the key here that takes the same value as another project's setting.

    None if no key has this name, several keys share it, or its value means something else here.

    >>> key_of(("trainer", "save_freq")), key_of(("policy_loss", "clip_cov_ratio"))
    ('trainer.save_every', None)
    """
    here = _unwrapped(path)
    key = find_key(here)
    if key is not None and key.path == ".".join(here) and key.section is None:
        return key.path
    ends = (".".join(path[start:]).lower() for start in range(len(path)))
    text = next((KEYS[end] for end in ends if end in KEYS), "")
    return text if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)*", text) and path[-1] not in _OTHER_MEANING else None


#: Settings of other frameworks whose values cannot be copied to megarl's key: a negation, a share, a number of
#: mini-batches or a function's name.
_OTHER_MEANING = frozenset(
    (
        *("enforce_eager", "disable_kl", "min_lr_ratio", "num_mini_batches", "reward_manager", "use_pf_ppo"),
        *("use_importance_sampling_correction", "vllm_importance_sampling_correction", "max_total_sequence_length"),
        *("token_level_loss", "train_micro_batch_size", "log_completions", "save_strategy", "eval_strategy"),
    )
)


def _unwrapped(path: tuple[str, ...]) -> tuple[str, ...]:
    return (_INSIDE.get(path[1], path[1]), *path[2:]) if len(path) > 1 and path[0] in _AROUND else path


def _keys_ending(path: tuple[str, ...]) -> list[str]:
    """Return up to four keys that end with `path` (actor.optim.lr for optim.lr); none for a single name."""
    return [key.path for key in iter_keys() if len(path) > 1 and key.path.endswith(f".{'.'.join(path)}")][:4]


def option_meaning(options: Sequence[str]) -> str:
    """Return `; ` and a hint for the first option that is a key here or in another project; else an empty text."""
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
    """Return what to set for an unknown method name: by another project's name, else by spelling among `known`."""
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
    """Return the error for an unknown key, or one error for each key in a section of another project. One of the key's
    parents may already be unknown; `owned` returns the dotted paths of the components' keys with a given name.
    """
    leaves = list(_leaves(path, value))
    if path[0] in _AROUND or any(meaning_of(leaf) or _keys_ending(leaf) for leaf in leaves):
        return [_unknown_key(leaf, where(leaf), owned) for leaf in leaves]
    unknown = _unknown_part(path)
    # A section that neither megarl nor another project has is reported once, not key by key.
    return [_unknown_key(unknown, where(path), owned)]


def _unknown_part(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return `path` up to its first unknown part; all of it if every part is known."""
    return next((path[:depth] for depth in range(1, len(path) + 1) if find_key(path[:depth]) is None), path)


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the settings in an unknown section; only its own path if other trainers have that section."""
    if not isinstance(value, Mapping) or not value or (path[-1] not in _SECTIONS and meaning_of(path) is not None):
        yield path
        return
    for name, inner in value.items():
        yield from _leaves((*path, str(name)), inner)


def _unknown_key(path: tuple[str, ...], where: str, owned: Callable[[str], Sequence[str]]) -> ConfigError:
    unknown = _unknown_part(_unwrapped(path))
    near = _components_keys(unknown, owned) or _keys_ending(path) or nearest_keys(unknown)
    # A key here that begins with the unknown key (beta1 with `beta`) is a better hint than another project's meaning.
    is_prefix = any(key.startswith(".".join(path)) for key in near)
    meant = None if is_prefix else meaning_of(path)
    parent = find_key(unknown[:-1]).section if len(unknown) > 1 else RunConfig  # type: ignore[union-attr]
    # Allowed keys are not listed for another framework's key with a known equivalent. The list of all sections is long;
    # it is shown only if no key is similar.
    listed = not meant and (parent is not RunConfig or not near)
    allowed = list(fields_of(parent)) if parent and listed else None
    spelt = f"did you mean {' or '.join(near)}?" if near else "remove it, or use one of the keys above"
    if not any(key.rpartition(".")[0] in (".".join(unknown[:-1]), _kwargs_of(unknown[:-1])) for key in near):
        spelt = _as_argument(unknown) or spelt
    if unknown[:-1] == ("placement",) and unknown[-1] in get_args(TeamRole):
        spelt = f"give the role to a team: placement: {{teams: {{NAME: {{roles: [{unknown[-1]}], devices: 1}}}}}}"
    return ConfigError(f"unknown key {'.'.join(path)}", where=where, allowed=allowed, fix=meant or spelt)


#: Mappings whose keys the user chooses -> what a key in them is, for a key that was written beside the mapping.
_OPEN = {
    "kwargs": "an argument of the function",
    "loader_kwargs": "an argument of a pkg.mod:fn source",
    "hf_config": "a key of the model's config.json",
}


def _kwargs_of(path: tuple[str, ...]) -> str | None:
    """Return the path of the mapping with user-chosen keys in the section at `path`, or None."""
    key = find_key(path) if path else None
    fields = fields_of(key.section) if key is not None and key.section is not None else {}
    return next((".".join([*path, name]) for name in _OPEN if name in fields), None)


def _components_keys(path: tuple[str, ...], owned: Callable[[str], Sequence[str]]) -> list[str]:
    """Return the keys of components that the unknown key `path` may mean. For a key of a built-in reward that was
    written beside `kwargs`, return the key inside `kwargs`."""
    beside = _kwargs_of(path[:-1])
    keys = [key for key in owned(path[-1]) if key.startswith(f"{path[0]}.")]
    if keys and beside is not None and path[0] == "reward":
        return [f"{beside}.{path[-1]}"]
    return keys


def _as_argument(path: tuple[str, ...]) -> str | None:
    """Return a hint that the key at `path` may belong to a mapping in its section, if there is one."""
    place = _kwargs_of(path[:-1])
    if place is None:
        return None
    return f"if it is {_OPEN[place.rpartition('.')[2]]}, write {place}.{path[-1]}; otherwise remove it"
