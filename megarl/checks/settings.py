"""Checks of settings against each other: batch sizes, objective, sampling, schedules, best metric."""

from __future__ import annotations

from megarl.algorithms.kl import KL
from megarl.algorithms.needs import distillation_fields
from megarl.artifacts.facts import ModelFacts
from megarl.artifacts.layout import divisors
from megarl.checks.algorithm import check_algorithm, check_distributions
from megarl.checks.checklist import Checklist, Roles
from megarl.checks.components import check_component, check_signature
from megarl.checks.layout import divides_devices
from megarl.checks.step_metrics import is_known, nearest
from megarl.config.algorithm import DistillationConfig, KLConfig, PolicyLossConfig
from megarl.config.rollout import LimitsConfig, SamplingConfig
from megarl.config.run import RunConfig
from megarl.config.training import CriticConfig, OptimConfig
from megarl.dag.placement import Placement
from megarl.dag.shares import batch_sizes
from megarl.dag.stage import Role
from megarl.evaluation.metrics import metric_names
from megarl.recipes.build import PIPELINES
from megarl.system.errors import close_matches, count

#: Lowest temperature except 0 at which logits of hundreds, divided by it, keep their differences in float32.
_COLDEST = 1e-3
_LARGEST_GROUP = 1024
_TRIAL = 10  # optimizer steps: a shorter run tries out a recipe, and no schedule is meant for it
#: Learning rates above which AdamW breaks randomly initialised and trained models; tiny models still train just below.
_FRESH_LR, _TRAINED_LR = 1e-2, 1e-4


def check_batches(config: RunConfig, placement: Placement | None, checks: Checklist) -> None:
    """Check prompts per step, per mini-batch and per replica."""
    data = config.data
    whole = divisors(data.batch_size)
    for role in ("actor", "critic", *config.models):
        settings, key = config.training_of(role), f"{config.section_of(role)}.mini_batch_size"
        mini = settings.mini_batch_size
        if mini is not None and mini not in whole:
            team = None if placement is None else placement.of_role(Role(role))
            replicas = team.replicas if team is not None and divides_devices(team) else 1
            fit = [size for size in whole if size % replicas == 0] or whole
            nearest = min((abs(size - mini), size) for size in fit)[1]
            checks.of("mini-batches").fail(
                key,
                f"a step of {data.batch_size} prompts cannot be split into mini-batches of {mini}",
                found=mini,
                allowed=fit,
                fix=f"set {key} to {nearest}",
            )
        if settings.shuffle and (mini is None or mini == data.batch_size):
            checks.of("mini-batches").warn(
                key.replace("mini_batch_size", "shuffle"),
                "all prompts of a step are in one mini-batch, so shuffling has no effect",
                found=True,
                fix=f"set {key} below data.batch_size={data.batch_size}, or remove shuffle",
            )
    if placement is None:
        return
    for team in placement.teams:
        sizes = batch_sizes(config, team.roles)
        by = f"the data parallel size{f' of the team {team.name}' if placement.separate else ''}"
        for key, size in sizes.items() if divides_devices(team) else ():
            checks.of("batch").divides(key, size, team.replicas, key, by)


def check_objective(config: RunConfig, roles: Roles, checks: Checklist) -> None:
    """Check the names of estimator, loss and KL, and whether they can be combined."""
    check_algorithm(config, roles, checks)
    _check_aggregation("algorithm.loss", config.algorithm.loss, config, checks)
    if roles is not None and Role.CRITIC in roles:
        _check_aggregation("critic", config.critic, config, checks)
    _check_dapo(config, checks)
    _check_kl_estimators(config, checks)
    _check_kl_controller(config, checks.of("KL"))
    _check_kl_use(config, roles, checks.of("KL"))


def _check_aggregation(key: str, loss: PolicyLossConfig | CriticConfig, config: RunConfig, checks: Checklist) -> None:
    checks = checks.of("aggregation")
    longest = config.response_tokens(config.rollout.sampling)
    if loss.aggregation == "seq-mean-token-sum-norm" and loss.sum_norm is None:
        checks.fail(
            f"{key}.sum_norm",
            "seq-mean-token-sum-norm needs a divisor, which is not set",
            found="null",
            allowed="number > 0",
            fix=f"set {key}.sum_norm={longest} (the response length limit)",
        )
    elif loss.sum_norm is not None and loss.aggregation != "seq-mean-token-sum-norm":
        checks.warn(
            f"{key}.sum_norm",
            f"{loss.aggregation} does not use this divisor",
            found=loss.sum_norm,
            fix=f"set it to null, or {key}.aggregation=seq-mean-token-sum-norm",
        )


def _check_dapo(config: RunConfig, checks: Checklist) -> None:
    algorithm, sampling = config.algorithm, config.rollout.sampling
    longest = config.response_tokens(sampling)
    if algorithm.dynamic_sampling.enabled and sampling.n < 2:
        checks.of("dynamic sampling").fail(
            "rollout.sampling.n",
            "a group of one sample has no variance, so every group would be dropped",
            found=sampling.n,
            allowed="integer >= 2",
            fix="set rollout.sampling.n=8",
        )
    low, high = algorithm.dynamic_sampling.low, algorithm.dynamic_sampling.high
    if low is not None and high is not None and low > high:
        checks.of("dynamic sampling").fail(
            "algorithm.dynamic_sampling.low",
            f"no group has a mean between {low} and {high}",
            found=low,
            allowed=f"number up to {high}",
            fix="exchange low and high",
        )
    buffer = algorithm.overlong.buffer_tokens
    if buffer is not None and buffer >= longest:
        checks.of("overlong penalty").fail(
            "algorithm.overlong.buffer_tokens",
            f"the penalty zone is not shorter than the longest response ({longest} tokens)",
            found=buffer,
            allowed=f"integer from 1 to {longest - 1}",
            fix=f"set algorithm.overlong.buffer_tokens={max(1, longest // 4)}",
        )


def _check_kl_estimators(config: RunConfig, checks: Checklist) -> None:
    kl, distillation = config.algorithm.kl, config.algorithm.distillation
    sections: tuple[tuple[str, str, KLConfig | DistillationConfig, bool], ...] = (
        ("KL", "algorithm.kl", kl, kl.use == "none"),
        ("distillation", "algorithm.distillation", distillation, distillation.coef == 0),
    )
    for name, path, section, off in sections:
        estimator, key = section.estimator, f"{path}.estimator"
        if off and estimator in KL.names():
            checks.of(name).ok("off")
        else:
            chosen = check_component(section, KL, checks.of(name), path)
            if chosen is not None and chosen.spec.distributions:
                check_distributions(path, section, chosen, checks)
            elif chosen is not None and chosen.spec.loss_only and (section is distillation or kl.use == "reward"):
                reason = "multiplies by the ratio pi / old" if chosen.spec.weighted else "needs both distributions"
                instead = f"{key}=low_var_kl+" if chosen.spec.weighted else f"{key}=reverse_kl {path}.topk=null"
                checks.of(name).fail(
                    key,
                    f"{estimator} {reason}, which only the KL to the reference in the loss allows",
                    found=estimator,
                    allowed="algorithm.kl.estimator with algorithm.kl.use=loss",
                    fix=f"set {instead if section is distillation else 'algorithm.kl.use=loss'}",
                )
            elif chosen is not None and chosen.spec.whole:
                _check_full(config, checks.of(name))
            elif chosen is not None:
                check_signature(chosen.function, key, ("d",), list(chosen.spec.settings.model_fields), checks.of(name))


def _check_full(config: RunConfig, checks: Checklist) -> None:
    """Check a KL estimator of whole distributions: an update compares the policy with one model only, on text."""
    if not config.task.writes_text or {"teacher_topk", "teacher_hidden"} & {*distillation_fields(config.algorithm)}:
        checks.fail(
            "algorithm.kl.estimator",
            "an update compares whole distributions with one model only, and only of a policy that writes text",
            found=config.algorithm.kl.estimator,
            allowed="an estimator of the sampled token; full without a divergence from a teacher",
            fix="set algorithm.kl.estimator=low_var_kl+",
        )


def _check_kl_controller(config: RunConfig, checks: Checklist) -> None:
    kl = config.algorithm.kl
    if kl.adaptive and kl.use != "reward":
        checks.fail(
            "algorithm.kl.adaptive",
            "the adaptive controller works only with KL as a reward term",
            found=f"use: {kl.use}",
            allowed="reward",
            fix="set algorithm.kl.use=reward, or algorithm.kl.adaptive=false",
        )
    samples = config.data.batch_size * config.rollout.sampling.n
    if kl.adaptive and 0.2 * samples >= kl.horizon:
        checks.fail(
            "algorithm.kl.horizon",
            f"the controller changes coef by up to 0.2 * samples / horizon, and a step of {samples} samples could make "
            "it zero or negative",
            found=kl.horizon,
            allowed=f"integer > {0.2 * samples:g}",
            fix=f"set algorithm.kl.horizon={max(10_000, samples)}",
        )


def _check_kl_use(config: RunConfig, roles: Roles, checks: Checklist) -> None:
    """Warn of a KL that is computed but has no effect."""
    kl = config.algorithm.kl
    if roles is not None and Role.REFERENCE not in roles and config.reference.path is not None:
        checks.warn(
            "reference.path",
            "a reference model is set, but nothing uses it",
            found=config.reference.path,
            fix="set algorithm.kl.use=loss or reward, or remove reference.path",
        )
    if kl.use != "none" and kl.coef == 0:
        checks.warn(
            "algorithm.kl.coef",
            "the reference model is computed, but its weight is 0",
            found=kl.coef,
            fix="set algorithm.kl.use=none, or a coefficient",
        )
    if kl.use == "reward" and kl.estimator.endswith("+"):
        checks.warn(
            "algorithm.kl.estimator",
            "a reward has no gradient, so the straight-through form has no effect",
            found=kl.estimator,
            fix=f"set algorithm.kl.estimator={kl.estimator[:-1]}",
        )


def check_sampling(config: RunConfig, facts: ModelFacts | None, checks: Checklist) -> None:
    """Check lengths against the model, and sampling settings that make training off-policy."""
    checks = checks.of("sampling")
    training, held_out = config.rollout.sampling, config.validation.sampling
    if config.task.writes_text:  # other tasks check a call's length once the model is loaded
        _check_lengths("rollout.sampling", training, config, facts, checks)
        _check_stop_tokens("rollout.sampling", training.stop_token_ids, facts, checks)
        if held_out.max_new_tokens is not None or held_out.min_new_tokens is not None:
            _check_lengths("validation.sampling", config.validation_sampling, config, facts, checks)
        _check_stop_tokens("validation.sampling", held_out.stop_token_ids, facts, checks)
        _check_stop_strings("rollout.sampling", training, checks)
        _check_stop_strings("validation.sampling", config.validation_sampling, checks)
    if not config.has_turns:
        _check_limits(config.rollout.limits, checks)
    if training.temperature == 0:
        checks.fail(
            "rollout.sampling.temperature",
            "greedy samples of a prompt are all the same, so there is nothing to train on",
            found=training.temperature,
            allowed="number > 0",
            fix="set rollout.sampling.temperature=1",
        )
    for key, temperature in (("rollout", training.temperature), ("validation", held_out.temperature)):
        if 0 < temperature < _COLDEST:
            checks.fail(
                f"{key}.sampling.temperature",
                "this temperature is too low: logits divided by it overflow",
                found=temperature,
                allowed=f"0, or number from {_COLDEST} to 100",
                fix=f"set {key}.sampling.temperature=" + ("1" if key == "rollout" else "0, which is greedy"),
            )
    for key, size in (("rollout", training.n), ("validation", held_out.n)):
        if size > _LARGEST_GROUP:
            checks.warn(
                f"{key}.sampling.n",
                f"{size:,} samples of every prompt are very many: a step generates data.batch_size times as many"
                if key == "rollout"
                else f"{size:,} samples of every held-out prompt",
                found=size,
                fix=f"set {key}.sampling.n to at most {_LARGEST_GROUP:,}; groups of 4 to 64 are usual",
            )
    _check_truncation(config, checks)
    _check_held_out(config, checks)


def _check_truncation(config: RunConfig, checks: Checklist) -> None:
    """Check that samples of a truncated distribution are trained on as such."""
    training = config.rollout.sampling
    corrected = training.logprobs == "processed" and config.rollout_correction.resolved().active
    plain = SamplingConfig()
    filters = [key for key in ("top_p", "top_k", "min_p") if getattr(training, key) != getattr(plain, key)]
    replayed = config.rollout.replay_kept_tokens
    if filters and not corrected and not replayed:
        checks.warn(
            f"rollout.sampling.{filters[0]}",
            "tokens are sampled from a truncated distribution and scored under the full one, which is off-policy",
            found=getattr(training, filters[0]),
            fix="set rollout.replay_kept_tokens=true and a top_k, which trains on this distribution, or "
            "rollout.sampling.top_p=1, top_k=0 and min_p=0, or rollout.sampling.logprobs=processed and a preset of "
            "rollout_correction, for example decoupled_token_is",
        )
    if training.min_new_tokens > 0 and not replayed:
        checks.warn(
            "rollout.sampling.min_new_tokens",
            "the first tokens are sampled without end tokens but scored with them, which is off-policy",
            found=training.min_new_tokens,
            fix="set rollout.sampling.min_new_tokens=0",
        )


def _check_held_out(config: RunConfig, checks: Checklist) -> None:
    """Check the number of samples of a held-out prompt."""
    held_out = config.validation_sampling
    if config.validation.select_by is not None and held_out.n == 1:
        checks.of("validation").fail(
            "validation.select_by",
            "there is nothing to select from: validation generates one sample per prompt",
            found=config.validation.select_by,
            fix="set validation.sampling={n: 8, temperature: 1.0}, or remove it",
        )
    if held_out.temperature == 0 and held_out.n > 1:
        checks.of("sampling").warn(
            "validation.sampling.n",
            "greedy samples of a prompt are all the same",
            found=held_out.n,
            fix="set validation.sampling.n=1, or a temperature above 0",
        )


def _check_lengths(
    key: str, sampling: SamplingConfig, config: RunConfig, facts: ModelFacts | None, checks: Checklist
) -> None:
    checks = checks.of("lengths")
    new, prompt = sampling.max_new_tokens, config.data.max_prompt_tokens
    # Validation uses training's min_new_tokens unless it sets its own: report the same error once.
    reported = checks.failed("rollout.sampling.min_new_tokens")
    if sampling.min_new_tokens > new and not reported:
        checks.fail(
            f"{key}.min_new_tokens",
            f"min_new_tokens is larger than max_new_tokens ({new})",
            found=sampling.min_new_tokens,
            allowed=f"integer from 0 to {new}",
            fix=f"set {key}.min_new_tokens={new} or less",
        )
    if facts is None:
        return
    limit, new = f"{key}.max_new_tokens", config.response_tokens(sampling)
    if config.has_turns and config.rollout.limits.tokens is not None:
        limit = "rollout.limits.tokens"
    if prompt + new > facts.max_positions:
        room = facts.max_positions - prompt
        checks.fail(
            limit,
            f"prompt and response ({prompt} + {new} tokens) exceed the model's {facts.max_positions} positions",
            found=new,
            allowed=f"at most {room}" if room > 0 else f"data.max_prompt_tokens below {facts.max_positions} first",
            fix=f"set {limit}={room}" if room > 0 else "lower data.max_prompt_tokens",
        )
    else:
        checks.ok(f"{key}: {prompt} + {new} tokens fit {facts.max_positions} positions")


def _check_limits(limits: LimitsConfig, checks: Checklist) -> None:
    """Refuse limits of turns without an environment: a sample then has one turn, with only its token limit."""
    for key in limits.model_fields_set:
        default, value = LimitsConfig.model_fields[key].default, getattr(limits, key)
        if value != default:
            checks.of("limits").fail(
                f"rollout.limits.{key}",
                "this limits episodes of several turns, but the recipe names no environment",
                found=value,
                allowed=f"{'null' if default is None else default}, or any with env.name",
                fix="set rollout.sampling.max_new_tokens" if key == "tokens" else "remove it, or set env.name",
            )


def _check_stop_tokens(key: str, ids: list[int], facts: ModelFacts | None, checks: Checklist) -> None:
    outside = [] if facts is None else [token for token in ids if not 0 <= token < facts.vocab]
    if outside and facts is not None:
        checks.of("stop tokens").fail(
            f"{key}.stop_token_ids",
            f"token ids outside the vocabulary of {facts.vocab}",
            found=outside,
            allowed=f"integers from 0 to {facts.vocab - 1}",
            fix="remove them",
        )


def _check_stop_strings(key: str, sampling: SamplingConfig, checks: Checklist) -> None:
    """Refuse stop strings together with settings that prevent a response from ending."""
    checks, plain = checks.of("stop strings"), SamplingConfig()
    for name, why in (
        ("min_new_tokens", "it suppresses end tokens, but cannot suppress a stop string"),
        ("ignore_eos", "it requests responses that nothing ends"),
    ):
        found, allowed = getattr(sampling, name), getattr(plain, name)
        # validation may inherit the key, whose error is reported once
        if sampling.stop and found != allowed and not checks.failed(f"rollout.sampling.{name}"):
            value = str(allowed).lower()
            checks.fail(
                f"{key}.{name}",
                f"{key}.stop={sampling.stop} also ends responses: {why}",
                found=found,
                allowed=value,
                fix=f"set {key}.{name}={value}, or remove {key}.stop",
            )


def check_schedules(config: RunConfig, roles: Roles, checks: Checklist) -> None:
    """Check learning rates, supervised phase and evaluation."""
    has_critic = Role.CRITIC in (roles or ())
    rests = config.critic.warmup_steps if has_critic else 0
    _check_optim("actor.optim", config.actor.optim, config.updates(config.actor, rests), config, checks)
    if has_critic:
        _check_optim("critic.optim", config.critic.optim, config.updates(config.critic), config, checks)
    if rests >= config.trainer.steps and "trainer" not in config.uncounted:
        checks.of("critic warm-up").warn(
            "critic.warmup_steps",
            f"the run ends after {config.trainer.steps} steps, before the actor begins to train",
            found=rests,
            fix=f"set critic.warmup_steps={config.trainer.steps // 10}, or more trainer.steps",
        )
    sft, evaluated = config.sft, bool(config.data.held_out)
    if not config.task.writes_text and (sft.max_tokens, sft.overlong) != (None, None):
        checks.of("supervised phase").fail(
            "sft.max_tokens",
            "demonstrations are trained on one policy call at a time, and have no token limit",
            found=sft.max_tokens or sft.overlong,
            allowed="null, with sft.overlong null",
            fix="remove sft.max_tokens and sft.overlong",
        )
    if sft.steps:
        _check_optim("sft.optim", sft.optim, sft.steps, config, checks)
    if sft.stop_at_accuracy is not None and sft.steps and not (sft.eval_every and evaluated):
        missing = "sft.eval_every" if not sft.eval_every else "data.val_files"
        checks.of("supervised phase").fail(
            missing,
            "sft.stop_at_accuracy needs evaluations on held-out prompts",
            found=0 if not sft.eval_every else [],
            allowed="integer > 0" if not sft.eval_every else "a list of sources",
            fix=f"set {missing}, or sft.stop_at_accuracy=null",
        )
    if config.validation.every and not evaluated:
        checks.of("validation").warn(
            "data.val_files",
            f"validation.every is {config.validation.every}, and there are no held-out prompts",
            found=[],
            fix="set data.val_files, or validation.every=0",
        )


def check_job(config: RunConfig, job: str, checks: Checklist) -> None:
    """Check the requirements of commands other than train: steps to take, or a trained model."""
    # with sft.epochs a submitted job computes the steps itself
    if job == "sft" and config.sft.steps == 0 and config.sft.epochs is None:
        checks.of("supervised phase").fail(
            "sft.steps",
            "megarl sft has no steps, so it would export the model unchanged",
            found=0,
            allowed="integer > 0",
            fix="set sft.epochs, for example to 2, or sft.steps (trainer.epochs and trainer.steps are those of megarl "
            "train)",
        )
    if job != "train" and config.preference is not None and config.trains_reward_model:
        checks.of("model").fail(
            "preference.loss",
            f"the recipe trains a reward model, which scores responses, and megarl {job} needs a language model",
            found=config.preference.loss,
            allowed="null for the whole section",
            fix="name a recipe of a language model; the reward model in hf/ is read by transformers "
            "(AutoModelForSequenceClassification)",
        )
    elif job in ("eval", "generate") and config.model.path is None and config.trainer.resume in ("auto", "never"):
        checks.of("model").fail(
            "model.path",
            f"megarl {job} would use a randomly initialised model",
            found="null",
            allowed="a trained model, or a checkpoint in trainer.resume",
            fix="set model.path=RUN_DIR/hf model.hf_config=null, or trainer.resume=RUN_DIR/checkpoints/step_N",
        )


def _check_optim(key: str, optim: OptimConfig, steps: int, config: RunConfig, checks: Checklist) -> None:
    # AdamW moves every weight by about the learning rate per step, whatever the gradient is, so the learning rate
    # itself has a limit. The limit is lower for trained weights, which large steps would destroy.
    if config.model.path is None:
        trained, limit, usual = "a fresh model is", _FRESH_LR, "1e-3"
    elif config.model.lora is not None:  # new adapters have no trained weights to destroy: their product starts at 0
        trained, limit, usual = "adapters are", _FRESH_LR, "1e-5"
    else:
        trained, limit, usual = "a trained model is", _TRAINED_LR, "1e-5" if key == "sft.optim" else "1e-6"
    if optim.lr > limit:
        checks.of("learning rate").warn(
            f"{key}.lr",
            f"{trained} far more likely to break than to learn above {limit:g}",
            found=optim.lr,
            fix=f"set {key}.lr={usual}",
        )
    checks = checks.of("schedule")
    if optim.min_lr > optim.lr:
        checks.fail(
            f"{key}.min_lr",
            f"the learning rate would rise from {optim.lr} to {optim.min_lr}",
            found=optim.min_lr,
            allowed=f"number from 0 to {optim.lr}",
            fix=f"set {key}.min_lr=0",
        )
    warmup, end = optim.warmup(steps), optim.decay_steps or steps
    if optim.warmup_ratio is not None and optim.warmup_steps:
        checks.fail(
            f"{key}.warmup_ratio",
            "the warm-up is set twice, as steps and as a share of the run",
            found=f"warmup_ratio {optim.warmup_ratio} and warmup_steps {optim.warmup_steps}",
            allowed="one of them",
            fix=f"remove {key}.warmup_steps, or set {key}.warmup_ratio=null",
        )
    if optim.schedule != "constant" and optim.decay_steps is not None and warmup >= end:
        ratio = optim.warmup_ratio is not None
        checks.fail(
            f"{key}.{'warmup_ratio' if ratio else 'warmup_steps'}",
            f"the warm-up is not shorter than the whole schedule of {end} optimizer steps",
            found=f"{optim.warmup_ratio}, which is {count(warmup, 'step')}" if ratio else warmup,
            allowed=f"from 0 to {end - 1} steps of warm-up",
            fix=f"set {f'{key}.warmup_ratio=null ' if ratio else ''}{key}.warmup_steps={end // 10}",
        )
    elif warmup >= steps >= _TRIAL and ("sft" if key == "sft.optim" else "trainer") not in config.uncounted:
        cut = f"; it is cut to {steps - 1}" if optim.schedule != "constant" and optim.decay_steps is None else ""
        checks.warn(
            f"{key}.warmup_steps",
            f"the run ends after {steps} optimizer steps, before the warm-up does{cut}",
            found=warmup,
            fix=f"set {key}.warmup_steps={steps // 10}",
        )


def check_watched_metrics(config: RunConfig, job: str, checks: Checklist) -> None:
    """Check the metrics that `trainer.best_metric` and `trainer.early_stop` watch."""
    checks = checks.of("early stop")
    trainer = config.trainer
    if trainer.best_metric is not None:
        end = "no checkpoint would be the best"
        fix = "name one of these, or null to keep no best checkpoint"
        _check_metric(config, job, checks, "best metric", "trainer.best_metric", trainer.best_metric, end, fix)
    stop = trainer.early_stop
    if stop is None:
        return
    key = "trainer.early_stop.metric"
    end = "the run would never end early"
    _check_metric(config, job, checks, "early stop", key, stop.metric, end, "name one of these")
    if stop.patience is None and stop.target is None:
        fix = "set trainer.early_stop.patience=5, or a target"
        problem = "early stopping needs a patience or a target, but neither is set"
        checks.fail("trainer.early_stop.patience", problem, found="null", fix=fix)
    every = "sft.eval_every" if job == "sft" else "validation.every"
    measured = config.data.held_out and (config.sft.eval_every if job == "sft" else config.validation.every)
    if stop.metric.startswith("val/") and not measured and job in ("train", "sft"):
        checks.fail(
            key,
            "nothing is validated before the last step, so the run would never end early",
            found=stop.metric,
            fix=f"set data.val_files and {every}, or watch a metric of training",
        )


def _check_metric(
    config: RunConfig, job: str, checks: Checklist, subject: str, key: str, name: str, end: str, otherwise: str
) -> None:
    """Check the metric `name` that `key` sets: a name with `/` other than val/... must be a training step's metric, any
    other must be a held-out metric. Data sources are not checked, nor metrics of a user's own pipeline.

    Args:
        subject: what the metric is for, for messages.
        end: what would happen in a run without this metric, for messages.
        otherwise: the fix if no known name is similar.
    """
    if job == "train" and config.algorithm.pipeline_name not in PIPELINES:
        return
    if "/" in name and not name.startswith("val/"):
        _check_step_metric(config, checks.of(subject), key, name, end)
        return
    if not config.data.held_out:
        return
    measures = metric_names(config.validation_sampling.n, ranked=config.validation.select_by is not None)
    errors = {"env_errors": config.has_episodes, "reward_errors": config.reward.on_error != "raise"}
    known = [f"val/{measure}" for measure in (*measures, *(error for error, counts in errors.items() if counts))]
    kind, _, measure = name.rpartition("/")
    if config.preference is not None and kind in ("val/rewards", "val/logps", "val/preference"):
        return
    if name in known or (kind.startswith("val/") and measure in measures):
        return
    near = close_matches(measure, measures)
    meant = f"{kind or 'val'}/{near[0]}" if near else ""
    checks.of(subject).fail(
        key,
        f"no validation of this recipe has this metric, so {end}",
        found=name,
        allowed=f"{', '.join(known)}; the same of one data source, val/SOURCE/acc; another metric of a step",
        fix=f"did you mean {meant}?" if meant else otherwise,
    )


def _check_step_metric(config: RunConfig, checks: Checklist, key: str, name: str, end: str) -> None:
    """Warn if no training step is known to write this metric; a user's own losses and advantages may write others."""
    algorithm = config.algorithm
    if is_known(name) or ":" in f"{algorithm.loss.name}{algorithm.advantage.name}":
        return
    near = nearest(name)
    checks.warn(
        key,
        f"no training step is known to write this metric: without it {end}, and the first step refuses it",
        found=name,
        fix=f"did you mean {' or '.join(near)}?" if near else "name a metric that docs/tracking.md lists",
    )
