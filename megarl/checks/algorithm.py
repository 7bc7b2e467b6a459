"""Checks of what single estimators, losses and filters require of the rest of a recipe."""

from __future__ import annotations

import re

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.advantages.base import GroupSettings
from megarl.algorithms.divergences import DivergenceSettings
from megarl.algorithms.group_filter import FILTERS, OFFERED
from megarl.algorithms.kl import KL
from megarl.algorithms.losses import POLICY_LOSSES
from megarl.algorithms.losses.base import LossSpec
from megarl.algorithms.needs import distillation_fields, estimator_fields
from megarl.algorithms.registry import Chosen
from megarl.algorithms.resampling import RESAMPLING
from megarl.checks.checklist import Checklist, Roles
from megarl.checks.components import check_component, check_signature
from megarl.config.algorithm import DistillationConfig, KLConfig
from megarl.config.run import RunConfig
from megarl.config.training import TeacherConfig
from megarl.dag.stage import Role
from megarl.system.errors import ConfigError, UserError


def check_algorithm(config: RunConfig, roles: Roles, checks: Checklist) -> None:
    """Check the requirements and conflicts of the chosen estimator, loss, filter and teacher."""
    _check_estimator(config, checks.of("estimator"))
    _check_teacher(config, roles, checks.of("teacher"))
    _check_distillation(config, checks.of("distillation"))
    _check_filter(config, checks.of("filter"))
    _check_resampling(config, checks.of("resampling"))
    _check_loss(config, checks.of("policy loss"))


def _check_estimator(config: RunConfig, checks: Checklist) -> None:
    algorithm, n = config.algorithm, config.rollout.sampling.n
    name, fields = algorithm.advantage.name, estimator_fields(algorithm)
    chosen = check_component(algorithm.advantage, ADVANTAGES, checks)
    if chosen is None:
        return
    settings = chosen.settings
    try:
        required = ADVANTAGES.required(name)
    except ConfigError as error:
        checks.from_error(error)
        return
    if ADVANTAGES.declared(chosen.function) is not None:
        given = [*required, *chosen.spec.settings.model_fields]
        check_signature(chosen.function, ADVANTAGES.key, (), given, checks)
    alone = isinstance(settings, GroupSettings) and n < 2 and not settings.allow_singleton
    if alone and not config.policies:  # checks/policies.py checks the group sizes of several policies
        checks.of("group size").fail(
            "rollout.sampling.n",
            f"{name} compares the samples of a prompt with each other, but there is only one",
            found=n,
            allowed="integer >= 2, or 1 with algorithm.advantage.allow_singleton",
            fix="set rollout.sampling.n=8",
        )
    if "turn_keys" in fields and not (config.has_turns and config.task.writes_text):
        checks.fail(
            "algorithm.advantage.name",
            f"{name} compares turns that begin after the same observation, but the recipe has no environment of text",
            found=name,
            allowed="an estimator of whole responses, or an environment in env.name",
            fix="set env.name, or algorithm.advantage.name=grpo",
        )
    if "reward_parts" in fields:
        _check_parts(config, checks)
    if getattr(settings, "is_weighted", False) and config.rollout_correction.resolved().is_level == "none":
        checks.fail(
            "algorithm.advantage.is_weighted",
            f"{name} needs the importance weights of rollout correction, but they are off",
            found=True,
            allowed="false, or true with rollout_correction.is_level: token or sequence",
            fix="set rollout_correction.preset=decoupled_token_is",
        )


def _check_parts(config: RunConfig, checks: Checklist) -> None:
    """Check that penalties on the whole reward are off when the estimator reads parts of the reward."""
    algorithm = config.algorithm
    in_reward = algorithm.kl.use == "reward"
    if in_reward or algorithm.overlong.buffer_tokens is not None:
        checks.of("reward parts").fail(
            "algorithm.kl.use" if in_reward else "algorithm.overlong.buffer_tokens",
            f"{algorithm.advantage.name} reads the parts of the reward, so a penalty on the whole reward has no effect",
            found=algorithm.kl.use if in_reward else algorithm.overlong.buffer_tokens,
            allowed="none or loss" if in_reward else "null",
            fix="remove the penalty, or return it as a part from the reward function",
        )


def _check_teacher(config: RunConfig, roles: Roles, checks: Checklist) -> None:
    if roles is None:
        return
    needed, path, several = Role.TEACHER in roles, config.teacher.path, config.teacher.models
    if several:
        _check_teachers(config.teacher, checks.of("teacher"))
    if needed and path is None and not several:
        checks.fail(
            "teacher.path",
            "distillation needs a teacher",
            found=None,
            allowed="a Hugging Face folder or hub name, or several in teacher.models",
            fix="set teacher.path",
        )
    if config.teacher.paths and not needed:
        checks.warn(
            "teacher.path",
            "a teacher is set, but nothing uses it",
            found=list(config.teacher.paths.values()),
            fix="set algorithm.advantage.name=reverse_kl or algorithm.distillation.coef, or remove teacher.path",
        )


def _check_teachers(settings: TeacherConfig, checks: Checklist) -> None:
    """Check that `teacher.models` is not combined with `teacher.path`, and that its names fit into metric names."""
    if settings.path is not None:
        checks.fail(
            "teacher.path",
            "both teacher.path and teacher.models are set",
            found=settings.path,
            allowed="null with teacher.models",
            fix="move it to teacher.models, or remove it",
        )
    for name in settings.models:
        if not re.fullmatch(r"[\w-]+", name):
            checks.fail(
                f"teacher.models.{name}",
                "a teacher's name becomes part of metric names, which do not allow this name",
                found=name,
                allowed="letters, digits, _ and -",
                fix="rename the teacher",
            )


def check_distributions(path: str, section: KLConfig | DistillationConfig, chosen: Chosen, checks: Checklist) -> None:
    """Check an estimator that compares the distributions of a teacher and the policy."""
    name = section.estimator
    if isinstance(section, KLConfig):
        checks.of("KL").fail(
            f"{path}.estimator",
            f"{name} compares the policy with a teacher, so it cannot be the KL estimator",
            found=name,
            allowed=[other for other in KL.names() if not KL.spec(other).distributions],
            fix=f"set {path}.estimator=full, which is reverse_kl over the whole vocabulary, or use it as "
            "algorithm.distillation.estimator",
        )
    elif not issubclass(KL.spec(name).settings, DivergenceSettings):
        checks.of("distillation").fail(
            f"{path}.estimator",
            f"{name} compares distributions, but does not set over how many tokens",
            found=KL.spec(name).settings.__name__,
            allowed="settings that are a subclass of megarl.algorithms.divergences.DivergenceSettings",
            fix="derive its settings from DivergenceSettings",
        )
    elif chosen.settings.topk is None and chosen.settings.tail != (
        default := type(chosen.settings).model_fields["tail"].default
    ):
        checks.of("distillation").fail(
            f"{path}.tail",
            "tail has no effect: the whole vocabulary is compared, so no other tokens are left",
            found=chosen.settings.tail,
            allowed=f"{default}, its default, with topk: null",
            fix=f"remove it, or set {path}.topk",
        )
    elif section.through == "policy":
        checks.of("distillation").warn(
            f"{path}.through",
            f"{name} measures all likely tokens, but used as an advantage it is credited to the sampled token only",
            found="policy",
            fix=f"set {path}.through=loss, or {path}.estimator=k1",
        )


def _check_distillation(config: RunConfig, checks: Checklist) -> None:
    section, loss = config.algorithm.distillation, config.algorithm.loss.name
    whole = "teacher_hidden" in distillation_fields(config.algorithm)
    if whole and not config.task.writes_text:
        checks.fail(
            "algorithm.distillation.topk",
            "comparing the whole vocabulary works only with a teacher of text",
            found=None,
            allowed="an integer; null with a policy that writes text",
            fix="set algorithm.distillation.topk=64",
        )
    if not section.coef:
        if not section.task_loss:
            checks.fail(
                "algorithm.distillation.task_loss",
                "nothing is trained: the policy loss of the rewards and the distillation are both off",
                found=False,
                allowed="true, or false with algorithm.distillation.coef above 0",
                fix="set algorithm.distillation.coef=1",
            )
        return
    if section.through == "loss" and section.estimator in ("kl", "k1"):
        checks.warn(
            "algorithm.distillation.estimator",
            "the gradient of k1 as a loss does not depend on the teacher, and is 0 on average",
            found=section.estimator,
            fix="set algorithm.distillation.estimator=k1+, or algorithm.distillation.through=policy",
        )
    if section.through == "policy" and _chooses_before(loss):
        checks.fail(
            "algorithm.distillation.through",
            f"{loss} chooses tokens by the rewards' advantages, before the teacher's advantages exist",
            found="policy",
            allowed="loss, or policy with another policy loss",
            fix="set algorithm.distillation.through=loss, or algorithm.loss.name=ppo",
        )


def _chooses_before(loss: str) -> bool:
    """Return whether the policy loss uses the advantages of the whole mini-batch before it is split."""
    try:
        return POLICY_LOSSES.spec(loss).prepare is not None
    except UserError:
        return False  # the check of the loss reports the error


def _check_filter(config: RunConfig, checks: Checklist) -> None:
    chosen = check_component(config.algorithm.filter, FILTERS, checks)
    if chosen is not None:
        named = FILTERS.parameters(config.algorithm.filter.name)
        offered = [name for name in OFFERED if name in named]
        given = [*offered, *chosen.spec.reads, *chosen.spec.settings.model_fields]
        check_signature(chosen.function, FILTERS.key, ("score", "uid"), given, checks)


def _check_resampling(config: RunConfig, checks: Checklist) -> None:
    section = config.algorithm.resampling
    chosen = check_component(section, RESAMPLING, checks)
    if chosen is not None:
        settings = list(chosen.spec.settings.model_fields)
        check_signature(chosen.function, RESAMPLING.key, ("scores",), settings, checks)


def _check_loss(config: RunConfig, checks: Checklist) -> None:
    loss = config.algorithm.loss
    chosen = check_component(loss, POLICY_LOSSES, checks)
    if chosen is None:
        return
    spec, key, known = chosen.spec, "algorithm.loss.name", ("old_logp", "advantages", "mask", "cfg")
    given, made = ("offsets", *spec.reads), spec.prepare is not None
    check_signature(chosen.function, key, ("logp", *known), given, checks, more=made)
    if spec.prepare is not None:
        check_signature(spec.prepare, key, known, ("keys", "all_sum", *spec.prepare_reads), checks)
    _check_mode(config, spec, checks)
    # seq-mean-token-sum makes gspo the loss of LUSPO, which weighs sequences by their length on purpose
    if chosen.spec.per_sequence and loss.aggregation not in ("seq-mean-token-mean", "seq-mean-token-sum"):
        checks.warn(
            "algorithm.loss.aggregation",
            f"{loss.name} is a loss per sequence, but {loss.aggregation} does not weigh sequences equally",
            found=loss.aggregation,
            fix="set algorithm.loss.aggregation=seq-mean-token-mean",
        )
    if chosen.spec.ratio_free:
        _check_ratio_free(config, checks)
    if loss.echo_coef:
        _check_echo(config, checks.of("ECHO"))


def _check_echo(config: RunConfig, checks: Checklist) -> None:
    """Check that the cross-entropy on observations (ECHO) has observations of text, and that the gradient is not
    divided by a number of tokens that is known only after the update."""
    correction, value = config.rollout_correction.resolved(), config.algorithm.loss.echo_coef
    texts = config.has_turns and config.task.writes_text and not config.has_lanes
    if not texts or config.data.image_key is not None:
        checks.fail(
            "algorithm.loss.echo_coef",
            "the cross-entropy on observations needs an environment that returns text without images",
            found=value,
            allowed="0, or more with env.name (other than agent) and without data.image_key and data.video_key",
            fix="set algorithm.loss.echo_coef=0",
        )
    if correction.bypass and correction.rejects:
        checks.fail(
            "algorithm.loss.echo_coef",
            "with mode bypass and rejection the gradient is divided by the number of trained tokens, which is known "
            "only after the update; the cross-entropy on observations has another divisor",
            found=value,
            allowed="0, or more with mode decoupled or without rejection",
            fix="set algorithm.loss.echo_coef=0, or rollout_correction.mode=decoupled with loss: ppo",
        )


def _check_mode(config: RunConfig, spec: LossSpec, checks: Checklist) -> None:
    """Check that rollout correction gives the loss the log-probs that it compares."""
    name, correction = config.algorithm.loss.name, config.rollout_correction.resolved()
    if spec.mode not in (None, correction.mode):
        needed = "the engine's log-probs as the old ones"
        if spec.mode == "decoupled":
            needed = "the engine's log-probs and the trainer's before the update"
        checks.warn(
            "rollout_correction.mode",
            f"{name} compares with {needed}, which it gets only with mode {spec.mode}",
            found=correction.mode,
            fix=f"set rollout_correction.preset={'ppo_is_bypass' if spec.mode == 'bypass' else 'disabled'}",
        )
    elif spec.mode == "decoupled" and correction.is_level != "none":
        checks.fail(
            "rollout_correction.is_level",
            f"{name} already has the ratio pi_theta / pi_rollout, so weights would count the gap twice",
            found=correction.is_level,
            allowed="none, or another loss",
            fix="set rollout_correction.is_level=none",
        )


def _check_ratio_free(config: RunConfig, checks: Checklist) -> None:
    """Warn of settings that train on samples of older weights with a loss that has no ratio to correct for that."""
    name, size = config.algorithm.loss.name, config.data.batch_size
    for role in dict.fromkeys(["actor", *(p.model for p in config.policies.values() if p.model in config.models)]):
        settings, section = config.training_of(role), config.section_of(role)
        minis = size // (settings.mini_batch_size or size) * settings.ppo_epochs
        if minis > 1:
            checks.warn(
                "algorithm.loss.name",
                f"{name} has no ratio with which to correct {minis} optimizer steps on one step's samples",
                found=name,
                fix=f"set {section}.mini_batch_size=null and {section}.ppo_epochs=1, or another loss",
            )
    sampling = config.algorithm.dynamic_sampling
    if sampling.enabled and sampling.surplus == "keep" and config.async_.in_order:
        checks.warn(
            "algorithm.dynamic_sampling.surplus",
            f"{name} has no ratio with which to correct groups that an earlier step's policy generated",
            found="keep",
            fix="set algorithm.dynamic_sampling.surplus=drop, or another loss",
        )
    correction = config.rollout_correction.resolved()
    if correction.bypass and correction.loss == "ppo":
        checks.warn(
            "algorithm.loss.name",
            f"mode bypass corrects through the ratio of the policy loss, but {name} has none, so nothing is corrected",
            found=name,
            fix="set rollout_correction.preset=pg_is, or another loss",
        )
