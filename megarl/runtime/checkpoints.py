"""The run's checkpoints in the actor's team: when a step is saved, what is saved, and how a run resumes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.lock import refuse_if_taken
from megarl.artifacts.trained import forget_exported, steps_in
from megarl.dag.messages import CheckpointTag
from megarl.dag.stage import Role
from megarl.data.batch import Batch
from megarl.data.groups import group_places
from megarl.runtime.checkpoint_part import FOLDER, CheckpointPart, newest_intact, save_requests
from megarl.runtime.early_stop import EarlyStop
from megarl.runtime.epochs import epochs_end, prompts_used
from megarl.runtime.files_read import FilesRead, changed_lines, files_read
from megarl.runtime.frozen_models import install_reference, set_aside_reference
from megarl.runtime.oversampling import carried_entry
from megarl.runtime.replay import load_replay, replay_entry, replay_file
from megarl.runtime.resume_compatibility import (
    Command,
    buffered_entry,
    describe_buffered,
    left_out,
    refuse_left_out,
    refuse_other_batches,
    refuse_other_sampling,
    steps_held,
)
from megarl.runtime.stages.rollout import generated_fields
from megarl.runtime.validate import due, validates
from megarl.system.errors import ConfigError, close_matches, count, relative_path_fix
from megarl.system.metrics import Metrics
from megarl.system.processes import JOB_BEGAN
from megarl.system.tracing import phase
from megarl.training import checkpoint
from megarl.training.checksums import few
from megarl.training.multi_team_commit import Teams
from megarl.training.shards import CheckpointError

if TYPE_CHECKING:
    from megarl.runtime.context import StepContext
    from megarl.runtime.rank_state import RankState


class Checkpoints(CheckpointPart):
    """The run's checkpoints in the actor's team, which decides which steps are saved and whether the run ends early.

    Attributes:
        source: the checkpoint to resume from, chosen by `find`.
        best: best value of `trainer.best_metric` so far; larger is better, and on a tie the later step wins.
        best_step: the step with the value `best`; None: no checkpoint has been rated.
        accuracy: held-out accuracy after the step of `source`; None: not measured at that step.
        must_stop: whether the job must stop after the step that was just saved, because its time limit is near
            (`trainer.save_by_s`).
        stopped_early: whether the run has ended before `trainer.steps`.
    """

    def __init__(self, c: RankState, roles: Collection[Role] = ()) -> None:
        super().__init__(c)
        self.best = -math.inf
        self._samples_again = Role.DYNAMIC_SAMPLING in roles
        self.best_step: int | None = None
        self._root = c.run_dir / FOLDER
        self.source: Path | None = None
        self._meta: dict[str, Any] | None = None
        self._read: FilesRead = {}
        self.accuracy: float | None = None
        self._withdraws = self._continues = self._begun = False
        self._save_by = SaveBy(c.config.trainer.save_by_s)
        self._early_stop = EarlyStop(c.config.trainer.early_stop)
        self._epochs_end: str | None = None  # why `trainer.epochs` ends the run
        self._decided: tuple[int, bool] = (-1, False)
        self._requests = save_requests(c.run_dir)

    def find(self, key: str, steps: int) -> int | None:
        """Return the step of the checkpoint to resume from, by `trainer.resume`; None: start from the beginning.

        Prints how many steps are left. Nothing in the run folder changes before `begin`.

        Args:
            key: recipe key of the run's number of steps.
            steps: number of steps of the run.

        Raises:
            CheckpointError: there are checkpoints, but none is intact, or metrics.jsonl is lost.
            ConfigError: the checkpoint does not exist, or this configuration cannot continue it.
            DataError: the data differ from the data of the checkpoint.
        """
        resume = self._c.config.trainer.resume
        with phase("resume"):
            now = self._c.config.model_dump(mode="json")
            self._read = self._world.broadcast_json(files_read(now) if self._world.rank == 0 else None)
            if resume == "auto":
                chosen = self._newest_intact()
            else:
                chosen = None if resume == "never" else self._named(Path(resume))
            if chosen is None:
                self._withdraws = True
                return None
            self.source, self._meta = chosen
            lines, step = self._check(*chosen, key, steps), self._meta["step"]
            self._continues = self.source.resolve().parent == self._root.resolve()
            if self._continues and self._c.config.trainer.early_stop is not None:
                self._early_stop.load_state_dict(checkpoint.read_state(self.source).get("early_stop"))
            if self._samples_again and self._c.config.trainer.epochs is not None:
                state = checkpoint.read_state(self.source)
                self._epochs_end = epochs_end(self._c.config, prompts_used(state), state["loader"]["samples"])
            self._withdraws = step < steps and not self.stopped_early
            if self._world.rank == 0:
                early = self._early_reason()
                print(*lines, _outlook(step, steps, key, str(self.source), early), sep="\n", flush=True)
        return step

    def _named(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Return the checkpoint that `trainer.resume` names, and the contents of its meta.json."""
        if not folder.is_dir():
            raise ConfigError(
                "this checkpoint is not a folder" if folder.exists() else "this checkpoint folder does not exist",
                where="trainer.resume",
                found=str(folder),
                allowed="auto, never, or RUN_DIR/checkpoints/step_N",
                fix=relative_path_fix(),
            )
        return folder, checkpoint.verify(folder, self._world)

    def _check(self, source: Path, meta: dict[str, Any], key: str, steps: int) -> list[str]:
        """Check that this run can resume from `source`; return the lines to print. Arguments and errors as in
        `find`."""
        c, step, lines = self._c, meta["step"], list[str]()
        command: Command = "sft" if key.startswith("sft.") else "train"
        now = c.config.model_dump(mode="json")
        checkpoint.check_model(source, meta, c.trained, self._world)
        state = checkpoint.read_state(source)
        c.loading.check_state(state["loader"])
        refuse_other_batches(step, state["loader"], meta["config"], now, command)
        ahead = None
        if step < steps:  # if no step is left to train, buffered samples are not used
            buffered = buffered_entry(state)
            if state.get("surplus_parts") and (why := self._why_no_surplus()):
                lines.append(f"the checkpoint's surplus samples of dynamic sampling are not used: {why}")
            if state.get("carried") is not None and not c.config.rollout.oversamples:
                skipped = count(state["carried"]["groups"], "prompt group")
                lines.append(f"{skipped} in flight in the checkpoint are skipped: rollout.oversample is 1")
            if buffered is not None and steps_held(buffered):
                refuse_other_sampling(step, buffered, c.config, c.team.placement)
                ahead = step + steps_held(buffered)
            elif buffered is not None:
                refuse_left_out(step, left_out(source, buffered["parts"]), c.config)
        return [*changed_lines(meta, state, now, self._read, command, begun=step > 0, generated=ahead), *lines]

    def _why_no_surplus(self) -> str | None:
        """Return why this run would not use a checkpoint's surplus of dynamic sampling; None: the next step uses it."""
        if not self._samples_again:
            return "the task graph has no node for dynamic sampling"
        if not self._c.config.async_.in_order:
            return "with async.order=as_ready surplus groups stay in the buffer"
        enabled = self._c.config.algorithm.dynamic_sampling.enabled
        return None if enabled else "algorithm.dynamic_sampling.enabled is false"

    def _newest_intact(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest intact checkpoint of the run folder with its meta.json; None: there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints, but none is intact, or metrics.jsonl is lost, without which the
                finished run would lack the metrics of its earlier steps.
        """
        chosen, faults = newest_intact(self._root, self._world)
        if chosen is None and faults:
            raise CheckpointError(
                "no checkpoint of this run is intact",
                where=str(self._root),
                found=few(faults),
                fix="trainer.resume=never starts from the beginning and keeps these folders in checkpoints.old-K; "
                "trainer.resume=OTHER_RUN/checkpoints/step_N continues from another run",
            )
        file = self._c.run_dir / "metrics.jsonl"
        lost = self._world.broadcast_json(not file.exists() if self._world.rank == 0 else None)
        if chosen is not None and (step := chosen[1]["step"]) > 0 and lost:
            raise CheckpointError(
                "the metrics of the steps before the checkpoint are lost; was a part of the run folder deleted?",
                where=str(file),
                found=f"the file does not exist, but there is a checkpoint of step {step}",
                fix=f"put the file back; else trainer.resume={chosen[0]} continues without these metrics, and "
                "trainer.resume=never starts from the beginning",
            )
        return chosen

    def begin(self) -> None:
        """Prepare the run folder for this start of the run.

        Checkpoints that this start does not continue are moved to another folder, the new reference moves to its final
        folder, and a model that an earlier attempt exported is no longer listed as the run's result, unless no step
        is left to train. Call this after every check that may reject the start. A run with a cold start calls it twice:
        before the cold start, and after it, when the reference exists.
        """
        refuse_if_taken(self._c.run_dir)
        self._world.barrier()  # before the reference moves to its final folder, all ranks must have read it
        if self._world.rank == 0:
            if not self._begun:
                self._leave_others()
            install_reference(self._c.run_dir)
            self._requests[-1].unlink(missing_ok=True)  # a killed launcher may have left a request
            if self._withdraws:
                forget_exported(self._c.run_dir)
            if self.best_step is not None:
                checkpoint.keep_best(self._root, self.best_step)
        self._begun = True
        self._save_by.steps_begin()

    def _leave_others(self) -> None:
        """Move checkpoints that this run does not continue into another folder, and print its path; rank 0 only."""
        last = self._meta["step"] if self._meta is not None and self._continues else None
        aside = checkpoint.set_aside(self._root, last)
        if aside is not None:
            print(f"checkpoints of steps that this run does not continue are now in {aside}", flush=True)
            if not self._continues:
                set_aside_reference(self._c.run_dir, aside)

    def load(self, source: Path) -> None:
        """Restore the run from the checkpoint `source`, which `find` has chosen."""
        c = self._c
        with c.offload.phase("resume"):
            c.context.step, state = checkpoint.load(source, c.trained, self._meta)
        c.loading.load_state_dict(state["loader"])
        c.context.kl_controller.load_state_dict(state["kl"])
        # Checkpoints of older versions have no baselines.
        c.context.baselines.load_state_dict(state.get("baselines", {}))
        parts = state["surplus_parts"]
        # without a node that uses the surplus, every later checkpoint would contain it again
        if parts and self._why_no_surplus() is None:
            c.context.surplus = read_surplus(c.context, source, parts)
        if c.oversampling is not None:
            if (carried := state.get("carried")) is not None:
                c.oversampling.load(c.context, source, carried)
            else:
                c.oversampling.count(c.context, c.context.step)
        load_replay(c.context, source, state.get("replay"))
        if c.context.scores is not None:
            c.context.scores.load(source)
        c.config.task.check_checkpoint(c.hf_config, source)
        metric = c.config.trainer.best_metric
        same = state.get("best_metric", metric) == metric  # values of different metrics cannot be compared
        if same and state["best"] is not None and self._has(state["best_step"]):
            self.best, self.best_step = state["best"], state["best_step"]
        self.accuracy = state.get("accuracy")

    def _has(self, best_step: int) -> bool:
        """Return whether the checkpoint of `best_step` is in this run's folder; else a worse one may become the best.

        The checkpoint can be missing because the run was killed before best.json was written, because the checkpoint is
        damaged, or because it is in another run's folder.
        """
        exists = self._continues and best_step in steps_in(self._root)
        return self._world.broadcast_json(exists if self._world.rank == 0 else None)

    def save_start(self) -> None:
        """Save the result of a cold start as step 0, so that a resumed run does not repeat the cold start; wait until
        it is written.

        The critic does not exist yet, so no other team writes a part of this checkpoint.
        """
        self._save(0, {}, None, None)
        self._in_flight.wait()

    def rate_step_0(self, numbers: dict[str, float]) -> None:
        """Make step 0 the best checkpoint if it exists and its held-out metrics `numbers` are the best.

        Raises:
            ConfigError: no validation step records `trainer.best_metric`; only for a metric `val/...`.
        """
        self._save_by.steps_begin()
        value = numbers.get(self._c.config.trainer.best_metric or "", -math.inf)
        kept = value > self.best and self._world.rank == 0 and checkpoint.keep_best(self._root, 0)
        if value > self.best and self._world.broadcast_json(kept):
            self.best, self.best_step = value, 0
        # metrics of training exist only after the first step
        if (self._c.config.trainer.best_metric or "").startswith("val/"):
            check_best_metric(self._c.config.trainer.best_metric, numbers)

    def after_step(self, step: int, numbers: dict[str, float], accuracy: float | None, *, last: bool) -> None:
        """Start to write a checkpoint of `step` if one is due.

        A checkpoint is due at the last step, by `trainer.save_every` or `trainer.resume_every`, for the best value of
        `trainer.best_metric`, when the batch job or the user requests one, and near the job's time limit. It is written
        in the background during the next steps; after the last step, or on request, the method waits until it is
        complete.

        Args:
            step: the step that is complete.
            numbers: the step's metrics, equal on all ranks.
            accuracy: on held-out prompts; None: not a validation step.
            last: whether this is the run's last step.

        Raises:
            ConfigError: the metrics of a validation step lack `trainer.best_metric`.
            CheckpointError: a checkpoint could not be written; the previous checkpoint is intact.
        """
        self._in_flight.poll()
        settings = self._c.config.trainer
        value = numbers.get(settings.best_metric or "", -math.inf)
        improved = accuracy is not None and not math.isinf(value) and value >= self.best
        requested = self._is_requested(step)
        self._early_stop.record(step, numbers)
        self._epochs_end = self._find_epochs_end()
        early = self._early_reason() if not last else None
        last = last or early is not None
        kept = last or requested or due(step, settings.save_every) or bool(improved and settings.save_every)
        if kept or due(step, settings.resume_every):
            self._save(step, numbers, accuracy, self._teams, kept=kept)
        elif self._teams is not None and self._world.rank == 0:
            CheckpointTag(step, None).post(self._teams.mail)
        if last or requested:
            self._in_flight.wait()
        self.must_stop = self.must_stop and not last
        if requested and self._world.rank == 0:
            for request in self._requests:
                request.unlink(missing_ok=True)
        if accuracy is not None:
            check_best_metric(settings.best_metric, numbers)
        if self._early_stop.measures(validated=accuracy is not None) and step > self._c.context.resting:
            self._early_stop.refuse_unknown(numbers)
        if early is not None and self._world.rank == 0:
            print(f"the run ends after step {step}: {early}", flush=True)
        if self.must_stop and self._world.rank == 0:
            print(
                f"saved at step {step}: trainer.save_by_s = {settings.save_by_s:g}, and the next step may come too "
                "late. The run stops here and resumes from this step when it is started again",
                flush=True,
            )

    def may_save(self, step: int) -> bool:
        """Return whether `after_step` may save `step`; called before the step's weights are published to other teams.

        A step with validation may be saved, because it may become the best. A request that comes after this call is
        handled at the next step.
        """
        config = self._c.config
        trainer, requested = config.trainer, self._is_requested(step)
        due_now = due(step, trainer.save_every) or due(step, trainer.resume_every)
        validated = bool(trainer.save_every or trainer.early_stop) and validates(config, step)
        early = self._early_stop.may_end(validated=validated) or trainer.epochs is not None
        return requested or due_now or early or step == trainer.steps or (bool(trainer.save_every) and validated)

    def ends_early(self, step: int, others: Callable[[], Iterable[Metrics]] = tuple) -> bool:
        """Return whether `after_step` will end the run: because of a training metric of `step` (`trainer.early_stop`),
        or because enough prompts were used (`trainer.epochs`).

        Called before the end of the step, so that the last step is validated even if the run ends early.

        Args:
            others: waits for the other teams' metrics of the step; called only if the result depends on them.
        """
        if self._find_epochs_end() is not None:
            return True
        if not self._early_stop.may_end(validated=False):
            return False
        local = self._c.context.metrics if self._c.layout.is_lead else Metrics()
        reduced = self._world.reduce_metrics(local)
        for metrics in others():
            reduced.merge(metrics)
        return self._early_stop.would_end(step, reduced.result())

    @property
    def stopped_early(self) -> bool:
        """Whether `trainer.early_stop` or `trainer.epochs` has ended the run before `trainer.steps`."""
        return self._early_reason() is not None

    def _early_reason(self) -> str | None:
        """Return why the run ends before `trainer.steps`; None: it continues."""
        reason = self._early_stop.reason()
        return self._epochs_end if reason is None else f"trainer.early_stop: {reason}"

    def _find_epochs_end(self) -> str | None:
        """Return why `trainer.epochs` ends the run now; None: it does not, or another team draws the prompts."""
        loader = self._c.loader if self._samples_again else None
        return None if loader is None else epochs_end(self._c.config, loader.used, len(loader.dataset))

    def _is_requested(self, step: int) -> bool:
        """Return whether to save `step` on request or because the job's time limit is near; decided once per step."""
        if self._decided[0] != step:
            decided = [any(map(Path.exists, self._requests)), self._save_by.is_near(self._in_flight.longest_s)]
            requested, self.must_stop = self._world.broadcast_json(decided if self._world.rank == 0 else None)
            self._decided = (step, requested or self.must_stop)
        return self._decided[1]

    def _save(
        self, step: int, numbers: dict[str, float], accuracy: float | None, teams: Teams | None, *, kept: bool = True
    ) -> None:
        """Start to write a checkpoint of `step` once the previous one is complete; arguments as in `after_step`.

        Without `kept` the checkpoint is temporary (`trainer.resume_every`) and cannot become the best one.
        """
        c, settings = self._c, self._c.config.trainer
        value = numbers.get(settings.best_metric or "", -math.inf)
        is_best = kept and not math.isinf(value) and value >= self.best  # on a tie the later step wins
        if is_best:
            self.best, self.best_step = value, step
        extra: dict[str, Any] = {
            "loader": c.loading.state_dict(),
            "kl": c.context.kl_controller.state_dict(),
            "baselines": c.context.baselines.state_dict(),
            "surplus_parts": 0 if c.context.surplus is None else c.layout.dp_size,
            "carried": carried_entry(c.context, c.oversampling),
            "replay": replay_entry(c.context),
            "best": None if math.isinf(self.best) else self.best,
            "best_step": self.best_step,
            "best_metric": settings.best_metric,
            "accuracy": accuracy,
            "early_stop": self._early_stop.state_dict(),
            "frozen": c.frozen,
            "read": self._read,
            "generated": None if teams is None else describe_buffered(c.config, c.team.placement, step),
        }
        self._in_flight.wait()
        began = time.monotonic()
        with phase("checkpoint"), c.offload.phase("checkpoint"):
            scores = {} if c.context.scores is None else c.context.scores.files()
            saving = checkpoint.begin(
                self._root,
                step,
                c.trained,
                extra,
                files=surplus_file(c.context)
                | ({} if c.oversampling is None else c.oversampling.files(c.context))
                | replay_file(c.context)
                | scores
                | c.config.task.checkpoint_files(c.hf_config, c.layout),
                config=c.config.model_dump(mode="json"),
                keep_last=settings.keep_last,
                best=is_best,
                kept=kept,
                teams=teams,
            )
        self._in_flight.began(saving, began)


def _outlook(step: int, steps: int, key: str, source: str, early: str | None) -> str:
    """Return a text on the number of steps that a resumed run has left; `early`: why it needs no further step."""
    if early is not None and step < steps:
        return (
            f"this run is finished: it ended early after step {step} ({source}): {early}\n"
            "  to continue: raise trainer.epochs, or change trainer.early_stop or set it to null, whichever ended it"
        )
    if step < steps:
        return f"resuming after step {step} of {steps}, from {source}"
    done = f"step {step} of {steps} is done" if step == steps else f"step {step} is done, and {key} is {steps}"
    return f"this run is finished: {done} ({source}), there is nothing left to train\n  to continue: raise {key}"


def check_best_metric(name: str | None, numbers: dict[str, float]) -> None:
    """Refuse a `trainer.best_metric` that is not among the metrics `numbers` of a validation step, because then no
    checkpoint would ever be the best.

    Raises:
        ConfigError: names the metrics that exist.
    """
    if name is None or name in numbers:
        return
    near = close_matches(name, numbers)
    raise ConfigError(
        "no validation step records this metric",
        where="trainer.best_metric",
        found=name,
        allowed=sorted(numbers),
        fix=f"did you mean {near[0]}?" if near else "name one of these, or null to keep no best checkpoint",
    )


def surplus_file(c: StepContext) -> dict[str, bytes]:
    """Return this replica's surplus of dynamic sampling as {file name: content}; empty except on its first rank."""
    if c.surplus is None or not c.layout.is_lead:
        return {}
    return {_surplus_name(c.layout.dp_rank): c.surplus.to_bytes()}


def read_surplus(c: StepContext, folder: Path, parts: int) -> Batch | None:
    """Read this replica's share of the surplus of dynamic sampling, which `parts` replicas wrote to `folder`.

    None if there is no surplus (`parts` is 0).

    Group k of the whole surplus goes to replica k modulo the number of replicas.

    Raises:
        ConfigError: the surplus lacks fields that are needed now: an older version of megarl wrote it, or the recipe
            has changed.
    """
    if not parts:
        return None
    files = [folder / _surplus_name(part) for part in range(parts)]
    shares = [Batch.from_bytes(file.read_bytes()) for file in files]
    missing = [name for name in generated_fields(c.config) if name not in shares[0]]
    if missing:
        raise ConfigError(
            f"the checkpoint holds samples for the next step without {', '.join(missing)}, which this recipe needs",
            where=str(files[0]),
            found=shares[0].names(),
            allowed="samples of the same recipe and version of megarl",
            fix="continue with the recipe and the version that wrote them, or start again with trainer.resume=never",
        )
    starts = [sum(len(share) for share in shares[:part]) for part in range(parts)]
    groups = [group_places(share["uid"]) for share in shares]
    places = [
        starts[k % parts] + place
        for k in range(c.layout.dp_rank, sum(map(len, groups)), c.layout.dp_size)
        for place in groups[k % parts][k // parts]
    ]
    return Batch.concat(shares).select(places)


def _surplus_name(part: int) -> str:
    return f"surplus_{part}.safetensors"


_SPARE = 1.1  # the next step and save may take this many times as long as the longest ones so far


class SaveBy:
    """Decides when to save because the next step might end after the job's time limit; rank 0 decides for all ranks.

    Args:
        limit_s: seconds from the start of the job to its time limit; None: no limit.
        now: returns unix time.
    """

    def __init__(self, limit_s: float | None, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._end = None if limit_s is None else float(os.environ.get(JOB_BEGAN) or now()) + limit_s
        self._last = now()
        self._longest_step = 0.0

    def steps_begin(self) -> None:
        """Start the clock of the first step, so that the start of the process does not count as a step."""
        self._last = self._now()

    def is_near(self, save_s: float) -> bool:
        """Return whether to save the step that just ended, because the next step may end after the time limit.

        Call it once per step.

        Args:
            save_s: seconds that the longest save took; 0: none so far, so a save is assumed to take as long as a step.
        """
        now = self._now()
        self._longest_step, self._last = max(self._longest_step, now - self._last), now
        needed = self._longest_step + (save_s or self._longest_step)
        return self._end is not None and now + _SPARE * needed > self._end
