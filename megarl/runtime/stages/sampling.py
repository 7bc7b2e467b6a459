"""Dynamic sampling: keep the groups that carry a signal, and generate more until the batch is full."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from megarl.algorithms.group_filter import informative_groups, live_rows, score_histogram, uncut_groups
from megarl.dag.stage import Role, stage
from megarl.data.groups import ORDINAL, by_group, group_places
from megarl.data.lanes import EPISODE, LANE, branches, leads
from megarl.runtime.stages import logprob
from megarl.runtime.stages.logprob import SURPLUS_LOGP, SURPLUS_SUM
from megarl.runtime.stages.needs import call_fields
from megarl.system.errors import MegarlError

if TYPE_CHECKING:
    from collections.abc import Callable

    from megarl.config.run import RunConfig
    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext
    from megarl.runtime.roles import ActorRole


def _read(config: RunConfig) -> list[str]:
    """List the fields from which dynamic sampling decides whether to keep a group."""
    settings = config.algorithm.dynamic_sampling
    cut = ["finish_step", "max_steps"] if settings.drop_cut else []
    mask = ["response_mask"] if config.has_episodes else []
    return [settings.metric, *cut, *mask, *call_fields(config)]


class NoSignalError(MegarlError):
    """Too few groups carry a learning signal; the message shows the groups' scores."""

    repeats = True


@stage(
    reads=["uid"],
    needs=_read,
    optional=["prompt_ids", "response_ids", EPISODE, LANE],  # for sharing by tokens, and for scoring surplus groups
    writes=[],
    may_write=[SURPLUS_LOGP, SURPLUS_SUM, ORDINAL],
    role=Role.DYNAMIC_SAMPLING,
    resamples=True,
    refills=True,
)
def dynamic_sampling(c: StepContext, samples: Batch, more: Callable[[], Batch], *, actor: ActorRole) -> Batch:
    """Return this rank's share of `data.batch_size` groups that carry a learning signal.

    The chosen groups do not depend on the number of ranks. Surplus groups wait for the next step
    (`algorithm.dynamic_sampling.surplus`) with log-probs of this step's policy. If samples for `max_rounds` times
    `data.batch_size` prompts do not fill the batch, `short: fill` fills it with the last dropped groups.

    Raises:
        NoSignalError: the batch is not full, and `short` is not `fill`.
    """
    from megarl.runtime.exchange import pool_of
    from megarl.system.tracing import phase

    settings, wanted = c.config.algorithm.dynamic_sampling, c.config.data.batch_size
    if not settings.enabled or not c.config.async_.in_order:  # as_ready: `admitted` has dropped groups without a signal
        return samples
    pool = pool_of(c)
    if c.surplus is not None:
        pool.add(c.surplus, [True] * len(group_places(c.surplus["uid"])))
    seen: list[list[float]] = []
    # number of rounds of generation that together have as many prompts as a step trains on
    rounds = -(-wanted // c.config.round_prompts)
    recent: deque[tuple[Batch, list[bool]]] = deque(maxlen=rounds)
    for round_ in range(1, settings.max_rounds * rounds + 1):
        if round_ > 1:
            with phase("refill"):
                samples = more()
        samples, keep = logprob.with_surplus_fields(c, samples), signal(c, samples, seen)
        pool.add(samples, keep)
        if settings.short == "fill":
            recent.append((samples, keep))
        if len(pool) >= wanted:
            break
    informative = len(pool)
    if informative < wanted and settings.short == "fill":
        # The recent rounds together generated a whole batch, so adding the groups that they dropped fills the batch.
        for samples, keep in recent:
            pool.add(samples, [not is_kept for is_kept in keep])
    elif informative < wanted:
        every = [scores for share in c.layout.dp_group.all_gather_json(seen) for scores in share]
        problem = (
            f"step {c.step}: after {round_} rounds of generation {len(pool)} of {wanted} groups have "
            f"{settings.kept_groups}"
        )
        raise no_signal(problem, "groups generated in this step", every)
    batch, rest = pool.split(wanted)
    left = max(0, informative - wanted)
    c.surplus = logprob.score_surplus(c, rest, actor) if left and settings.surplus == "keep" else None
    c.metrics.max("sampling/rounds", round_)
    c.metrics.max("sampling/surplus", left)
    if settings.short == "fill":
        c.metrics.max("sampling/filled", max(0, wanted - informative))
    return batch


def signal(c: StepContext, samples: Batch, seen: list[list[float]]) -> list[bool]:
    """Return, for each group, whether `algorithm.dynamic_sampling` keeps it; append the groups' scores to `seen`."""
    samples = samples.select(leads(samples)) if branches(samples) else samples
    live = None
    if c.config.has_episodes:
        response_mask = samples["response_mask"]
        live = live_rows(response_mask.values, response_mask.offsets)
    settings, uid = c.config.algorithm.dynamic_sampling, samples["uid"]
    metric = samples[settings.metric].float() if settings.metric == "success" else samples["score"]
    mask = informative_groups(metric, uid, low=settings.low, high=settings.high, live=live)
    if settings.drop_cut:
        mask &= uncut_groups(samples["finish_step"], samples["max_steps"], uid, live=live)
    keep = [of_samples[0] for of_samples in by_group(uid, mask.tolist())]
    c.metrics.mean("sampling/kept", sum(keep), len(keep))
    seen += by_group(uid, metric.tolist())
    return keep


def admitted(c: StepContext, samples: Batch, seen: list[list[float]]) -> list[bool]:
    """Return, for each group, whether async.order=as_ready trains on it; append the groups' scores to `seen`.

    A group is used if dynamic sampling keeps it and `algorithm.filter` keeps at least one of its samples; other prompts
    replace dropped groups.
    """
    uid = samples["uid"]
    if c.config.algorithm.dynamic_sampling.enabled:
        keep = signal(c, samples, seen)
    else:
        led = samples.select(leads(samples)) if branches(samples) else samples
        scores = by_group(led["uid"], led["score"].tolist())
        seen += scores
        keep = [True] * len(scores)
    if not c.config.filter_admits:
        return keep
    mask = samples["response_mask"]
    left = [any(of_samples) for of_samples in by_group(uid, live_rows(mask.values, mask.offsets).tolist())]
    c.metrics.mean("filter/groups_kept", sum(left), len(left))
    return [kept and has_sample for kept, has_sample in zip(keep, left, strict=True)]


def group_condition(config: RunConfig) -> str | None:
    """Return, as text for messages, the condition for a group to be trained on; None: every group is trained on."""
    sampling, chosen = config.algorithm.dynamic_sampling, config.algorithm.filter
    conditions = [sampling.kept_groups] if sampling.enabled else []
    conditions += [f"a sample that the filter {chosen.name} keeps"] if config.filter_admits else []
    return " and ".join(conditions) or None


def no_signal(what: str, groups: str, seen: list[list[float]], others: str = "") -> NoSignalError:
    """Return the error that too few groups carry a learning signal.

    Args:
        what: first sentence of the message.
        groups: how the message names the groups with the scores `seen`.
        seen: scores of the samples, by group.
        others: further advice for the user, inserted into the error's fix.
    """
    return NoSignalError(
        f"{what}\n  {groups} by the scores of their samples: {score_histogram(seen)}\n"
        f"  fix:     choose easier or harder prompts, raise rollout.sampling.n or the temperature, {others}or raise "
        "algorithm.dynamic_sampling.max_rounds"
    )
