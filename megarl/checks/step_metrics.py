"""Names of the metrics that training steps write, as far as they are known before a run.

Parts of a reward, environments and a user's own stages add names, and the data decide which of the known metrics a step
writes. So an unknown name only causes a warning before the start; the first step refuses it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from megarl.system.errors import close_matches

_SUGGESTED = 3
_GIVEN = {
    "actor": "entropy pg_loss pg_clipfrac pg_clipfrac_lower ppo_kl ratio_mean ratio_min ratio_max kl_loss kl_coef "
    "reward_kl reward_kl_coef distillation_loss_max distillation_loss_min grad_norm mtp_grad_norm lr shared_tokens "
    "expert_prob",
    "balance": "tokens_max_over_mean tokens_max_over_mean_dealt",
    "critic": "score/mean score/max score/min score/group_std rewards/mean returns/mean advantages/mean "
    "advantages/max advantages/min groups/zero_std groups/all_correct groups/none_correct greedy_score/mean vf_loss "
    "vf_clipfrac vf_explained_var vpred_mean grad_norm lr",
    "env": "errors greedy_errors cut success turns/mean turns/max tokens/mean tokens/max steps/mean steps/total "
    "calls/mean calls/max calls/total",
    "filter": "kept groups_kept",
    "images": "per_sample tokens/mean tokens/max",
    "logps": "chosen rejected",
    "oversample": "started completed carried dropped dropped_tokens age/mean age/max",
    "perf": "throughput total_tokens generated_tokens flops tflops mfu max_memory_gb total_memory_gb resident_gb cpu_s "
    "wait_for_simulators",
    "preference": "loss sft_loss kl",
    "prompt_length": "mean max",
    "resampling": "used copies_max score/mean",
    "response_length": "mean min max clip_ratio",
    "reward": "errors overlong_penalty",
    "rewards": "chosen rejected margins accuracies",
    "rollout": "unknown_tokens drafts_accepted servers_replaced",
    "sampling": "rounds kept surplus filled",
    "sft": "loss lr grad_norm",
    "srpo": "shaped_share failure_score/mean clusters invalid distance/mean distance/min distance/max rank_correlation "
    "rank_correlation/in_group encoder/loss encoder/accuracy",
    "store": "given_gb read_gb",
    "sync": "seconds gb gb_per_s gather_s send_s servers failed verified_tensors probe_gap",
    "timing_s": "step act wait_for_simulators",
}
#: Metrics of a training step whose names do not depend on the recipe.
STEP_METRICS = tuple(f"{section}/{name}" for section, names in _GIVEN.items() for name in names.split())
#: Patterns of the other metrics' names, which depend on the recipe, its data, or events of the run.
_FORMS = (
    *(
        "actor/*_loss",
        "actor/*_coef",
        "actor/distillation_*",
        "curriculum/*",
        "experts/*",
        "replay/*",
        "retries/*",
        "env/*",
        "filter/*/kept",
        "perf/bottleneck/*",
        "perf/imbalance/*",
        "perf/imbalance_given/*",
    ),
    *("reward/*", "rollout_corr/*", "srpo/distance/bin_*", "store/queue/*", "teacher/*", "team/*", "timing_s/*"),
)


def is_known(name: str) -> bool:
    """Return whether a training step may write a metric of this name.

    >>> is_known("critic/score/mean"), is_known("reward/format"), is_known("critic/score/maen")
    (True, True, False)
    """
    return name in STEP_METRICS or any(fnmatchcase(name, form) for form in _FORMS)


def nearest(name: str) -> list[str]:
    """Return the known names that are closest to a misspelt name, best first."""
    return close_matches(name, STEP_METRICS, _SUGGESTED)
