"""The messages between the teams of a run: one class for each, and who sends it, who reads it and when.

A team holds one or more roles. The actor's team leads. Samples do not go by message (megarl/disaggregated/buffer).

    actor's team                               rollout's team                               critic's, reference's ...

    start
                     <- LoaderAtStart --------
    RunStart ------------------------------->  make models ------------------------------>  make models
                     <- EngineAddresses ------  embedded engine
                     <- ServersStarted -------  servers
    WeightsName ---------------------------->  servers
                     <- TeamReady ------------  <------------------------------------------  TeamReady
    WeightsPushed or ServersFilled, of the first weights

    step t, in order, k = async.max_staleness (here 1)
    train t                                    generate t + 1 with weights t - 1            walk their nodes of t
                     <- LoaderPlace(t + 1) ---
                     <- StepGenerated(t + 1) -  weights t - 1 are not needed any more
                     <- ServerStates(t) ------  servers only
    WeightsPushed(t) or ServersFilled(t) --->  generate t + 2 with weights t
    StepIsLast(t) -------------------------->  only with trainer.early_stop
                     <- Validated(t) ---------  only at a validation
    log t            <- StepMetrics(t) -------  <------------------------------------------  StepMetrics(t)

    as ready, weight update n                  generate any group that may begin with the weights
    SavesStep(t), UpdateWanted(n) ---------->  finish or interrupt what is in flight
                     <- ReplicasOpen(n) ------  no replica generates
    UpdateSent(n), WeightsPushed(v) -------->  generate with weights v
                     <- StepMetrics(n) -------  what the replicas measured between two updates
    log t            <- StepFormed(t), by the buffer: the metrics of its samples

    checkpoint of step t (megarl/training/multi_team_commit.py)
    CheckpointTag(t) ----------------------->  -------------------------------------------> copy to host memory
                     <- PartCopied(t) --------  <------------------------------------------
    CheckpointFolder(t) -------------------->  -------------------------------------------> write their files

No wait closes a circle: weights t wait for the samples of step t + k, which wait for weights t - 1 and no others.

The first rank of a team posts, and every rank that needs a message reads it by itself. A message is posted once under
its name and stays: anybody may read it at any time. Only the last ones of a series (`buffer.core.KEPT`) are kept.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, ClassVar, Protocol, Self, TypeAlias

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from megarl.system.errors import WorkerError

_STRICT = ConfigDict(strict=True, extra="forbid")
#: `Metrics.to_json`
MetricsJson: TypeAlias = dict[str, list[Any]]


class Mail(Protocol):
    """The mailbox between the teams of a run: texts by name."""

    def post(self, name: str, text: str) -> None:
        """Leave a text, once."""

    def read(self, name: str) -> str:
        """Wait until a text is posted under this name, and return it."""


class NoMail:
    """The mailbox of a run with one team: nobody else posts or reads."""

    def post(self, name: str, text: str) -> None:
        """Drop the text."""

    def read(self, name: str) -> str:
        """Fail: the message would never come."""
        raise AssertionError(f"a run of one team waits for {name!r}")


@dataclass(frozen=True, config=_STRICT)
class Message:
    """A message between teams, posted as JSON under a name: its topic and its first `keys` fields.

    >>> StepIsLast(7, last=True).name
    'last/7'
    >>> StepIsLast.decode('{"step": 7, "last": "yes"}')
    Traceback (most recent call last):
    megarl.system.errors.WorkerError: the message StepIsLast of another team has wrong fields: last
    """

    topic: ClassVar[str]
    keys: ClassVar[int] = 0

    @classmethod
    def name_of(cls, *keys: str | int) -> str:
        """Return the name of the message with these keys."""
        assert len(keys) == cls.keys, f"{cls.__name__} has {cls.keys} keys, found {keys}"
        return "/".join([cls.topic, *map(str, keys)])

    @property
    def name(self) -> str:
        """The name of this message."""
        return self.name_of(*(getattr(self, field.name) for field in fields(self)[: self.keys]))

    def encode(self) -> str:
        """Return the fields as JSON."""
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the message of a JSON text.

        Raises:
            WorkerError: a field is missing, unknown or of another type.
        """
        try:
            return cls(**json.loads(text))
        except ValidationError as error:
            wrong = ", ".join(str(problem["loc"][0]) for problem in error.errors())
            raise WorkerError(f"the message {cls.__name__} of another team has wrong fields: {wrong}") from error

    def post(self, mail: Mail) -> None:
        """Post this message to all teams; one rank calls this."""
        mail.post(self.name, self.encode())

    @classmethod
    def read(cls, mail: Mail, *keys: str | int) -> Self:
        """Wait for the message with these keys, and return it."""
        return cls.decode(mail.read(cls.name_of(*keys)))


# -- start ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_STRICT)
class LoaderAtStart(Message):
    """Rollout's team to actor's team, before a checkpoint is looked for: the data and the place of the loader.

    Attributes:
        state: `PromptLoader.state_dict`.
    """

    topic = "loader"
    state: dict[str, Any]


@dataclass(frozen=True, config=_STRICT)
class RunStart(Message):
    """Actor's team to all teams, as soon as it has the actor that RL starts from: where the run begins.

    Attributes:
        resumed_at: step of the checkpoint that it resumes from; None: from none.
        source: that checkpoint, RUN_DIR/checkpoints/step_N.
        reference: where the weights of the reference are; None: there is no reference.
        reference_key: of the recipe, that names them; empty: the run keeps them.
        critic: where those of a critic are that begins in another team; None: at `critic.path`, or in a checkpoint.
    """

    topic = "start"
    resumed_at: int | None
    source: str | None
    reference: str | None
    critic: str | None
    reference_key: str = ""

    @property
    def begun(self) -> bool:
        """Whether it resumes from a step of RL: the actor of step 0 is where RL starts."""
        return bool(self.resumed_at)

    @property
    def shown_from(self) -> int | None:
        """The step that the record continues after; step 0 is measured again. None: there is no record yet."""
        return -1 if self.resumed_at == 0 else self.resumed_at


@dataclass(frozen=True, config=_STRICT)
class EngineAddresses(Message):
    """Rollout's team to actor's team, when its embedded engines wait for weights.

    Attributes:
        engines: for each engine, host and port of the inbox of each of its ranks.
    """

    topic = "engines"
    engines: list[list[list[str | int]]]


@dataclass(frozen=True, config=_STRICT)
class ServersStarted(Message):
    """Rollout's team to actor's team, when its servers answer: `Fleet.reports`."""

    topic = "servers_started"
    servers: list[dict[str, Any]]


@dataclass(frozen=True, config=_STRICT)
class WeightsName(Message):
    """Actor's team to rollout's team, after `ServersStarted`: the first part of the names of weight versions
    (megarl/sync/protocol.py)."""

    topic = "weights_name"
    run: str


@dataclass(frozen=True, config=_STRICT)
class TeamReady(Message):
    """Every other team to the actor's team, when it has its models; no step begins before that.

    Attributes:
        frozen: checksums of its models that do not learn, for checkpoints.
    """

    topic, keys = "ready", 1
    team: str
    frozen: dict[str, Any]


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_STRICT)
class WeightsPushed(Message):
    """Actor's team to rollout's team, when all embedded engines have received the weights of `version`."""

    topic, keys = "weights", 1
    version: int


@dataclass(frozen=True, config=_STRICT)
class ServerStates(Message):
    """Rollout's team to actor's team, before each push to servers: `Fleet.reports`, with failed ones restarted."""

    topic, keys = "servers", 1
    version: int
    servers: list[dict[str, Any]]


@dataclass(frozen=True, config=_STRICT)
class ServersFilled(Message):
    """Actor's team to rollout's team, after each push to servers; only servers with the version get requests.

    Attributes:
        updated: numbers of the servers that hold the version.
        failed: why others failed, by their number.
    """

    topic, keys = "servers_filled", 1
    version: int
    updated: list[int]
    failed: dict[str, str]


@dataclass(frozen=True, config=_STRICT)
class StepGenerated(Message):
    """Rollout's team to actor's team (in order), when all its replicas have generated the samples of `step`."""

    topic, keys = "generated", 1
    step: int


@dataclass(frozen=True, config=_STRICT)
class UpdateWanted(Message):
    """Actor's team to rollout's team (as ready), after a step, when the next weights cannot wait.

    Attributes:
        update: number of the weight update since the start of the processes.
    """

    topic, keys = "wanted", 1
    update: int


@dataclass(frozen=True, config=_STRICT)
class ReplicasOpen(Message):
    """Rollout's team to actor's team (as ready), when all its replicas wait for weight update number `update`."""

    topic, keys = "open", 1
    update: int


@dataclass(frozen=True, config=_STRICT)
class UpdateSent(Message):
    """Actor's team to rollout's team (as ready), before it pushes: which version update number `update` brings."""

    topic, keys = "update", 1
    update: int
    version: int


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_STRICT)
class LoaderPlace(Message):
    """Rollout's team to actor's team, for the checkpoint: the state of the loader after it has generated `step`, or as
    ready before the first group with the weights of `step`."""

    topic, keys = "loader", 1
    step: int
    state: dict[str, Any]


@dataclass(frozen=True, config=_STRICT)
class Validated(Message):
    """Rollout's team to actor's team, after it has evaluated the weights of `step`.

    Attributes:
        metrics: reduced over its ranks.
        rows: generations for the report.
    """

    topic, keys = "validation", 1
    step: int
    accuracy: float
    metrics: MetricsJson
    rows: list[dict[str, Any]]


@dataclass(frozen=True, config=_STRICT)
class StepIsLast(Message):
    """Actor's team to rollout's team, after a step that `trainer.early_stop` may end the run with by a metric of
    training: whether it does, so that the last weights are validated."""

    topic, keys = "last", 1
    step: int
    last: bool


@dataclass(frozen=True, config=_STRICT)
class StepMetrics(Message):
    """Every other team to the actor's team, at the end of its step.

    Attributes:
        step: as ready, of the rollout's team the number of the weight update that ends what it measured.
        metrics: reduced over its ranks.
    """

    topic, keys = "metrics", 2
    team: str
    step: int
    metrics: MetricsJson


@dataclass(frozen=True, config=_STRICT)
class StepFormed(Message):
    """The buffer to the actor's team (as ready), when it has formed a step: the metrics of the step's samples."""

    topic, keys = "formed", 1
    step: int
    metrics: MetricsJson


# -- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_STRICT)
class SavesStep(Message):
    """Actor's team to rollout's team (as ready), before the weights of `step` go: whether a checkpoint may follow."""

    topic, keys = "saves", 1
    step: int
    saves: bool


@dataclass(frozen=True, config=_STRICT)
class CheckpointTag(Message):
    """Actor's team to all teams with a part in checkpoints, after each step.

    Attributes:
        tag: of the folder in which the checkpoint is written; None: the step has no checkpoint.
    """

    topic, keys = "checkpoint", 1
    step: int
    tag: str | None


@dataclass(frozen=True, config=_STRICT)
class PartCopied(Message):
    """Every other team with a part to the actor's team, when its part of the checkpoint is in host memory.

    Attributes:
        workers: number of its first worker, and how many there are.
        layout: sizes of the layout of its engines.
        optimizer_steps, vocab_sizes: of its engines, by their names.
        nbytes: bytes of all its files.
    """

    topic, keys = "checkpoint_part", 2
    team: str
    step: int
    workers: list[int]
    layout: dict[str, int]
    optimizer_steps: dict[str, int]
    vocab_sizes: dict[str, int]
    nbytes: int


@dataclass(frozen=True, config=_STRICT)
class CheckpointFolder(Message):
    """Actor's team to all teams with a part, when the folder of the checkpoint is there.

    Attributes:
        problem: why there is no folder; None: there is one.
        fix: for the user's error.
    """

    topic, keys = "checkpoint_folder", 1
    step: int
    problem: str | None
    fix: str
