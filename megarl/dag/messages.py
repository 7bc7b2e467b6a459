"""The messages between the teams of a run: one class for each, with who sends it, who reads it, and when.

A team holds one or more roles. The actor's team leads. Samples are not messages (megarl/disaggregated/buffer).

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
        """Store a text under a name that is not in use yet."""

    def read(self, name: str) -> str:
        """Wait until a text is posted under this name, and return it."""

    def read_together(self, name: str) -> str:
        """Wait until a text is posted under this name, and return it. All workers of the team must call this, so that
        one of them reads the text for all."""


class NoMail:
    """The mailbox of a run with one team: no other team posts or reads."""

    def post(self, name: str, text: str) -> None:
        """Drop the text, since there is no other team."""

    def read(self, name: str) -> str:
        """Raise an error, because the message would never arrive."""
        raise AssertionError(f"the run has only one team, so message {name!r} would never arrive")

    read_together = read


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
        """Return the name of the message of this class whose first fields have the values `keys`."""
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
            raise WorkerError(
                f"the message {cls.__name__} of another team has wrong fields: {wrong}; all machines need the same "
                "version of megarl"
            ) from error

    def post(self, mail: Mail) -> None:
        """Post this message to all teams; one rank calls this."""
        mail.post(self.name, self.encode())

    @classmethod
    def read(cls, mail: Mail, *keys: str | int) -> Self:
        """Wait for the message whose first fields have the values `keys`, and return it."""
        return cls.decode(mail.read(cls.name_of(*keys)))

    @classmethod
    def read_together(cls, mail: Mail, *keys: str | int) -> Self:
        """Wait for the message whose first fields have the values `keys`, and return it. All workers of the team must
        call this, so that one of them reads the message for all."""
        return cls.decode(mail.read_together(cls.name_of(*keys)))


# -- start ------------------------------------------------------------------------------------------------------------


class LoaderAtStart(Message, topic="loader"):
    """The data loader's initial state; the rollout's team sends it before the actor's team chooses a checkpoint."""

    state: dict[str, Any]  # the result of `PromptLoader.state_dict`


class RunStart(Message, topic="start"):
    """The point at which the run begins; the actor's team sends it to all teams once it has the initial actor."""

    resumed_at: int | None  # step of the checkpoint that the run resumes from; None: it starts without a checkpoint
    source: str | None  # folder of the checkpoint that the run resumes from, RUN_DIR/checkpoints/step_N
    # folder or hub name of the reference's weights; empty: the actor without its adapters; None: there is no reference
    reference: str | None
    # folder or hub name of the actor's weights, from which critic and further models of other teams start; None: each
    # of them has a path, or is loaded from the checkpoint in `source`
    initial: str | None
    reference_key: str = ""  # the recipe key that names the reference's weights; empty: they are in the run's folder

    @property
    def begun(self) -> bool:
        """Whether the run resumes after a step of RL; a checkpoint of step 0 has the actor that RL starts from."""
        return bool(self.resumed_at)

    @property
    def recorded_until(self) -> int | None:
        """The step after which the run's record continues; -1: record step 0 again; None: there is no record yet."""
        return -1 if self.resumed_at == 0 else self.resumed_at


class EngineAddresses(Message, topic="engines", keys=1):
    """Addresses that the rollout's team sends to the team that trains a model when its embedded engines wait for the
    model's weights."""

    model: str  # role of the model: actor, or a further model
    # for each engine, the host and port at which each of its ranks receives weights
    engines: list[list[list[str | int]]]


class ServersStarted(Message, topic="servers_started"):
    """The servers' addresses and states, which the rollout's team sends to the actor's team when the servers reply."""

    servers: list[dict[str, Any]]


class WeightsName(Message, topic="weights_name"):
    """The run's part of the names of weight versions (megarl/sync/protocol.py), which the actor's team sends to the
    rollout's team after `ServersStarted`.
    """

    run: str


class TeamReady(Message, topic="ready", keys=1):
    """Sent by every other team to the actor's team when it has loaded its models; no step begins before that."""

    team: str
    frozen: dict[str, Any]  # checksums of the team's frozen models, for checkpoints


# -- weights ----------------------------------------------------------------------------------------------------------


class WeightsPushed(Message, topic="weights", keys=2):
    """Sent by the team that trains a model to the rollout's team when all embedded engines have the model's weights of
    `version`."""

    model: str
    version: int


class ServerStates(Message, topic="servers", keys=1):
    """The servers' states, which the rollout's team sends to the actor's team before each push of weights to servers,
    after restarting failed servers.
    """

    version: int
    servers: list[dict[str, Any]]  # the result of `Fleet.reports`


class ServersFilled(Message, topic="servers_filled", keys=1):
    """Sent by the actor's team to the rollout's team after each push of weights to servers; only servers that have this
    version get requests.
    """

    version: int
    updated: list[int]  # numbers of the servers that have the version
    failed: dict[str, str]  # for each server that has failed, the reason, by the server's number


class StepGenerated(Message, topic="generated", keys=1):
    """Sent by the rollout's team to the actor's team (with async.order=in_order) when all its replicas have generated
    the samples of `step`.
    """

    step: int


class UpdateWanted(Message, topic="wanted", keys=1):
    """The request to stop generating for a weight update, which the actor's team sends to the rollout's team after a
    step (with async.order=as_ready).
    """

    update: int  # number of the weight update since the start of the processes


class ReplicasOpen(Message, topic="open", keys=1):
    """Sent by the rollout's team to the actor's team (with async.order=as_ready) when all its replicas wait for weight
    update number `update`.
    """

    update: int


class UpdateSent(Message, topic="update", keys=1):
    """The weight version of update number `update`, which the actor's team sends to the rollout's team before it pushes
    the weights (with async.order=as_ready).
    """

    update: int
    version: int


# -- steps ------------------------------------------------------------------------------------------------------------


class LoaderPlace(Message, topic="loader", keys=1):
    """The data loader's state, which the rollout's team sends to the actor's team for checkpoints: after it has
    generated `step` or, with async.order=as_ready, before it generates with the weights of `step`.
    """

    step: int
    state: dict[str, Any]


class Validated(Message, topic="validation", keys=1):
    """Results that the rollout's team sends to the actor's team after it has evaluated the weights of `step`."""

    step: int
    accuracy: float  # `val/acc`: mean accuracy on the held-out rows, or mean score if the reward has no accuracy
    metrics: MetricsJson  # metrics, reduced over the team's ranks
    rows: list[dict[str, Any]]  # generated samples for the report


class StepIsLast(Message, topic="last", keys=1):
    """Whether `step` is the run's last one, whose weights are validated. The actor's team sends it to the rollout's
    team after each step at which `trainer.early_stop` may end the run by a training metric.
    """

    step: int
    last: bool


class StepMetrics(Message, topic="metrics", keys=2):
    """Metrics that every other team sends to the actor's team at the end of its step."""

    team: str
    # number of the training step; with async.order=as_ready, the rollout's team sends the number of its weight update
    step: int
    metrics: MetricsJson  # metrics, reduced over the team's ranks


class StepFormed(Message, topic="formed", keys=1):
    """The metrics of a step's samples, which the buffer sends to the actor's team when it has formed the step (with
    async.order=as_ready).
    """

    step: int
    metrics: MetricsJson


# -- checkpoints ------------------------------------------------------------------------------------------------------


class SavesStep(Message, topic="saves", keys=1):
    """Whether the actor's team may save a checkpoint of `step`; it sends this to the rollout's team before the weights
    of `step` (with async.order=as_ready).
    """

    step: int
    saves: bool


class CheckpointTag(Message, topic="checkpoint", keys=1):
    """Sent by the actor's team after each step to all teams that write into checkpoints."""

    step: int
    tag: str | None  # part of the name of the checkpoint's temporary folder; None: the step has no checkpoint


class PartCopied(Message, topic="checkpoint_part", keys=2):
    """Sent to the actor's team by every other team that writes into checkpoints, when it has copied its part to host
    memory.

    Attributes:
        optimizer_steps, vocab_sizes: optimizer steps and vocabulary sizes of the team's models, by name.
    """

    team: str
    step: int
    workers: list[int]  # number of the team's first worker, and how many workers it has
    layout: dict[str, int]  # sizes of the parallel layout of the team's models
    optimizer_steps: dict[str, int]
    vocab_sizes: dict[str, int]
    nbytes: int  # bytes of all files of the team


class CheckpointFolder(Message, topic="checkpoint_folder", keys=1):
    """Sent by the actor's team to all teams that write into a checkpoint, when it has created or failed to create the
    folder.
    """

    step: int
    problem: str | None  # why the folder could not be made; None: it exists
    fix: str  # how the user can fix the problem
