"""The messages between the teams of a run: one class for each, with who sends it, who reads it, and when.

A team holds one or more roles. The actor's team leads. Samples are no messages (megarl/disaggregated/buffer).

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
                     <- StepGenerated(t + 1) -  no longer needs weights t - 1
                     <- ServerStates(t) ------  servers only
    WeightsPushed(t) or ServersFilled(t) --->  generate t + 2 with weights t
    StepIsLast(t) -------------------------->  only with trainer.early_stop
                     <- Validated(t) ---------  only at a validation
    log t            <- StepMetrics(t) -------  <------------------------------------------  StepMetrics(t)

    as ready, weight update n                  generate any group that may begin with the weights
    SavesStep(t), UpdateWanted(n) ---------->  finish or interrupt what is in flight
                     <- ReplicasOpen(n) ------  no replica generates
    UpdateSent(n), WeightsPushed(v) -------->  generate with weights v
                     <- StepMetrics(n) -------  metrics of the replicas between two updates
    log t            <- StepFormed(t), by the buffer: the metrics of the step's samples

    checkpoint of step t (megarl/training/multi_team_commit.py)
    CheckpointTag(t) ----------------------->  -------------------------------------------> copy to host memory
                     <- PartCopied(t) --------  <------------------------------------------
    CheckpointFolder(t) -------------------->  -------------------------------------------> write their files

The waits cannot deadlock: weights t wait for the samples of step t + k, which wait for weights t - 1 and nothing later.

The first rank of a team posts a message, and every rank that needs it reads it. A message is posted once under its name
and may be read any number of times. Of a series (`name/1`, `name/2`, ...) only the last `buffer.core.KEPT` are kept.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Protocol, Self, TypeAlias, dataclass_transform

from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from megarl.system.errors import WorkerError

#: Metrics as `Metrics.to_json` returns them.
MetricsJson: TypeAlias = dict[str, list[Any]]


class Mail(Protocol):
    """The mailbox between the teams of a run: texts by name."""

    def post(self, name: str, text: str) -> None:
        """Keep a text under a new name."""

    def read(self, name: str) -> str:
        """Wait until a text is posted under this name, and return it."""


class NoMail:
    """The mailbox of a run with one team: no other team posts or reads."""

    def post(self, name: str, text: str) -> None:
        """Drop the text, since there is no other team."""

    def read(self, name: str) -> str:
        """Raise, because the message would never arrive."""
        raise AssertionError(f"the run has only one team, so message {name!r} would never arrive")


@dataclass_transform(frozen_default=True)
class Message:
    """A message between teams, posted as JSON under a name, which is its topic and its first `keys` fields.

    >>> StepIsLast(7, last=True).name
    'last/7'
    >>> StepIsLast.decode('{"step": 7, "last": "yes"}')
    Traceback (most recent call last):
    megarl.system.errors.WorkerError: the message StepIsLast of another team has wrong fields: last
    """

    topic: ClassVar[str]
    keys: ClassVar[int]

    def __init_subclass__(cls, topic: str, keys: int = 0) -> None:
        """Make every message a frozen dataclass that accepts its own fields only, each of its type."""
        cls.topic, cls.keys = topic, keys
        dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))(cls)

    @classmethod
    def name_of(cls, *keys: str | int) -> str:
        """Return the name of the message of this class with these values of its first fields."""
        assert len(keys) == cls.keys, f"{cls.__name__} has {cls.keys} keys, found {keys}"
        return "/".join([cls.topic, *map(str, keys)])

    @property
    def name(self) -> str:
        """The name of this message."""
        return self.name_of(*list(vars(self).values())[: self.keys])

    def encode(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(vars(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """Return the message with the fields in `text`, which is JSON from `encode`.

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
        """Wait for the message with these values of its first fields, and return it."""
        return cls.decode(mail.read(cls.name_of(*keys)))


# -- start ------------------------------------------------------------------------------------------------------------


class LoaderAtStart(Message, topic="loader"):
    """Rollout's team to actor's team, before it chooses a checkpoint: the data, and the loader's place at the start."""

    state: dict[str, Any]  # `PromptLoader.state_dict`


class RunStart(Message, topic="start"):
    """Actor's team to all teams, as soon as it has the actor that RL starts from: where the run begins."""

    resumed_at: int | None  # step of the checkpoint that the run resumes from; None: it starts without a checkpoint
    source: str | None  # folder of this checkpoint, RUN_DIR/checkpoints/step_N
    reference: str | None  # folder of the reference's weights; None: there is no reference
    # folder of the weights that a critic of another team starts from; None: `critic.path` or `source`
    critic: str | None
    reference_key: str = ""  # the recipe key that names the reference's weights; empty: they are in the run's folder

    @property
    def begun(self) -> bool:
        """Whether the run resumes after a step of RL; a checkpoint of step 0 has the actor that RL starts from."""
        return bool(self.resumed_at)

    @property
    def shown_from(self) -> int | None:
        """The step after which the run's record continues; -1: record step 0 again; None: there is no record yet."""
        return -1 if self.resumed_at == 0 else self.resumed_at


class EngineAddresses(Message, topic="engines"):
    """Rollout's team to actor's team, when its embedded engines wait for weights."""

    # for each engine, the host and port at which each of its ranks receives weights
    engines: list[list[list[str | int]]]


class ServersStarted(Message, topic="servers_started"):
    """Rollout's team to actor's team, when its servers answer: their addresses and states (`Fleet.reports`)."""

    servers: list[dict[str, Any]]


class WeightsName(Message, topic="weights_name"):
    """Actor's team to rollout's team, after `ServersStarted`: the first part of the names of weight versions
    (megarl/sync/protocol.py)."""

    run: str


class TeamReady(Message, topic="ready", keys=1):
    """Every other team to the actor's team, when it has loaded its models; no step begins before that."""

    team: str
    frozen: dict[str, Any]  # checksums of its frozen models, for checkpoints


# -- weights ----------------------------------------------------------------------------------------------------------


class WeightsPushed(Message, topic="weights", keys=1):
    """Actor's team to rollout's team, when all embedded engines have received the weights of `version`."""

    version: int


class ServerStates(Message, topic="servers", keys=1):
    """Rollout's team to actor's team, before each push to servers: their states, after failed ones are restarted."""

    version: int
    servers: list[dict[str, Any]]  # `Fleet.reports`


class ServersFilled(Message, topic="servers_filled", keys=1):
    """Actor's team to rollout's team, after each push to servers; only servers with this version get requests."""

    version: int
    updated: list[int]  # numbers of the servers that have the version
    failed: dict[str, str]  # why each other server failed, by its number


class StepGenerated(Message, topic="generated", keys=1):
    """Rollout's team to actor's team (in order), when all its replicas have generated the samples of `step`."""

    step: int


class UpdateWanted(Message, topic="wanted", keys=1):
    """Actor's team to rollout's team (as ready), after a step: stop generating, so that an update can be sent."""

    update: int  # number of the weight update since the start of the processes


class ReplicasOpen(Message, topic="open", keys=1):
    """Rollout's team to actor's team (as ready), when all its replicas wait for weight update number `update`."""

    update: int


class UpdateSent(Message, topic="update", keys=1):
    """Actor's team to rollout's team (as ready), before it pushes: the weight version of update number `update`."""

    update: int
    version: int


# -- steps ------------------------------------------------------------------------------------------------------------


class LoaderPlace(Message, topic="loader", keys=1):
    """Rollout's team to actor's team, for a checkpoint: the loader's state after it has generated `step`; as ready,
    before it generates with the weights of `step`."""

    step: int
    state: dict[str, Any]


class Validated(Message, topic="validation", keys=1):
    """Rollout's team to actor's team, after it has evaluated the weights of `step`."""

    step: int
    accuracy: float  # of the held-out rows, 0 to 1
    metrics: MetricsJson  # reduced over its ranks
    rows: list[dict[str, Any]]  # generated samples for the report


class StepIsLast(Message, topic="last", keys=1):
    """Actor's team to rollout's team, after a step at which `trainer.early_stop` may end the run by a training metric:
    whether it does, because the last weights are validated."""

    step: int
    last: bool


class StepMetrics(Message, topic="metrics", keys=2):
    """Every other team to the actor's team, at the end of its step."""

    team: str
    step: int  # the training step; from the rollout's team as ready, the number of the weight update that ended it
    metrics: MetricsJson  # reduced over its ranks


class StepFormed(Message, topic="formed", keys=1):
    """The buffer to the actor's team (as ready), when it has formed a step: the metrics of the step's samples."""

    step: int
    metrics: MetricsJson


# -- checkpoints ------------------------------------------------------------------------------------------------------


class SavesStep(Message, topic="saves", keys=1):
    """Actor's team to rollout's team (as ready), before it sends the weights of `step`: whether it may save a
    checkpoint."""

    step: int
    saves: bool


class CheckpointTag(Message, topic="checkpoint", keys=1):
    """Actor's team to all teams with a part in checkpoints, after each step."""

    step: int
    tag: str | None  # part of the name of the checkpoint's temporary folder; None: the step has no checkpoint


class PartCopied(Message, topic="checkpoint_part", keys=2):
    """Every other team that writes into checkpoints to the actor's team, when it has copied its part to host memory.

    Attributes:
        optimizer_steps, vocab_sizes: of its models, by name.
    """

    team: str
    step: int
    workers: list[int]  # number of the team's first worker, and how many workers it has
    layout: dict[str, int]  # sizes of the parallel layout of its models
    optimizer_steps: dict[str, int]
    vocab_sizes: dict[str, int]
    nbytes: int  # bytes of all its files


class CheckpointFolder(Message, topic="checkpoint_folder", keys=1):
    """Actor's team to all teams that write into a checkpoint, when it has made the folder, or failed to."""

    step: int
    problem: str | None  # why the folder could not be made; None: it exists
    fix: str  # what the user can do about the problem
