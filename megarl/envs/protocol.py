"""The protocol of an environment: a small class that replies to the turns of a policy, one object per episode.

    reset(row, seed) -> first observation
    step(action)     -> observation, reward, done, info        after every turn of the policy

An observation is text (tokenised as it is), chat messages (the chat template adds their delimiters), token ids, or
parts of text and images; the content of a message may also be such parts (`megarl.data.observations`). Both methods may
be coroutines, so that the episodes of a batch run concurrently.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megarl.config.base import Section
from megarl.data.announcement import Announcement

if TYPE_CHECKING:
    from megarl.config.policies import AgentPolicyConfig
    from megarl.data.image_prompts import ImagePrompts
    from megarl.data.image_set import ImageSet
    from megarl.data.templates import ChatTemplate
    from megarl.data.turns import Turns

#: Text, chat messages or parts of text and images, or token ids.
Observation = str | list[dict[str, Any]] | list[int]


class EnvSettings(Section):
    """The keys of the section `env` that only this environment has. Give every field a description."""

    @property
    def longest_s(self) -> float | None:
        """Seconds within which the environment always replies; None: it has no deadline of its own."""
        return None


@dataclass(frozen=True)
class Action:
    """One turn of the policy.

    Attributes:
        text: text of the turn, without special tokens, up to its stop string.
        raw: text of the whole turn, with special tokens.
        token_ids: token ids as sampled, end token included.
        finish_reason: `stop`; `length` or `abort` when the token or time limit cut the turn, after which no turn
            follows.
        turn: number of the turn, from 0.
        logprobs: log-prob of each token, as the engine sampled it.
        beside: the other turns that were sampled at the same time, in the order of `Continuation.beside`.
    """

    text: str
    raw: str
    token_ids: list[int]
    finish_reason: str
    turn: int
    logprobs: list[float] = field(default_factory=list)
    beside: tuple[Action, ...] = ()


@dataclass(frozen=True)
class Continuation:
    """The observation of an environment that keeps a tree of turns: the input of the next turn, as tokens.

    Attributes:
        token_ids: tokens that follow the turn `after`, or the whole input of a new sequence.
        after: number of a turn, counted over all turns of the episode; None: the input begins a new sequence.
        room: maximum tokens of the next turn; None: only the run's limits.
        stop: strings that end the next turn with the token that completes one of them.
        policy: name of the policy that takes the next turn; empty: the run has only one.
        images: the images of `token_ids`, with their positions in `token_ids`; None: there are none.
        beside: the inputs of other turns that are sampled at the same time; no turn reads another's tokens. These turns
            get the next numbers, in their order. `step` is called once, when all of them have ended.
    """

    token_ids: list[int]
    after: int | None = None
    room: int | None = None
    stop: tuple[str, ...] = ()
    policy: str = ""
    images: ImageSet | None = None
    beside: tuple[Continuation, ...] = ()


@dataclass(frozen=True)
class Ending:
    """The observation of the last step of an environment that keeps a tree of turns.

    Attributes:
        untrained: numbers of turns, counted as in `Continuation`, that are not trained on.
        answer: number of the turn that reward functions score; None: the last one.
        output: text that the environment has written during the episode, for the report.
        rewards: the policies' rewards, as `Trajectory.rewards`; empty: the run has one policy.
        shares: number of a turn -> factor of its tokens' advantages; turns that it lacks have the factor 1.
    """

    untrained: tuple[int, ...] = ()
    answer: int | None = None
    output: str = ""
    rewards: Mapping[str, float | list[float]] = field(default_factory=dict)
    shares: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Services:
    """The parts of a run that an environment uses if it reads and writes tokens itself.

    Attributes:
        template: the model's chat template, without tools; None: there is none.
        turns: tokenises the text between turns.
        tokenizer: the model's tokenizer.
        prompt_tokens, tokens: maximum tokens of a prompt, and after it.
        turns_limit: maximum turns of an episode.
        policies: the run's policies by name; empty: it has one.
        images: how the model sees images; None: it reads text.
    """

    template: ChatTemplate | None
    turns: Turns
    tokenizer: Any
    prompt_tokens: int
    tokens: int
    turns_limit: int
    policies: Mapping[str, AgentPolicyConfig] = field(default_factory=dict)
    images: ImagePrompts | None = None


class Step(NamedTuple):
    """The reply of an environment to an action.

    Attributes:
        observation: next input of the policy; None when the episode is done.
        reward: reward of this turn; ignored when the recipe's reward function scores (`Environment.scores` is false).
        done: the episode has ended.
        info: numbers, summed over the turns of an episode; their means over episodes are the metrics `env/<name>`.
    """

    observation: Observation | Continuation | Ending | None = None
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = {}


class EpisodeFailure(Exception):
    """An environment cannot go on with an episode; the message describes the failure without a place in the code."""


class Environment:
    """The base class of environments. An object plays one episode and is discarded; it shares no state with other
    objects.

    Attributes:
        Settings: pydantic model of the environment's recipe keys.
        scores: the environment gives the rewards. If false, the recipe's reward function scores the episode, with the
            last turn of the policy as the response.
        replayable: the same row, seed and actions give the same replies, and repeating the actions does no harm. If
            true, a run that is resumed plays the recorded turns of an unfinished episode into a new object and goes on
            from there; if false, the episode begins again from its prompt.
        times_itself: the environment limits the time of its own calls (`EnvSettings.longest_s`), so the run does not.
        plays_policies, needs_policies: several policies (the section `policies`) may, or must, play this environment.
        services: the parts of the run that the environment may use; the host sets this attribute.
        is_waiting: this object waits until other episodes end, so a batch must not wait for it.
        may_drop_turns: the environment may end turns while they are sampled.
        dropped_turns: the turns that the environment ends now, as positions among the turns that are sampled at the
            same time (0 if there is only one). `step` is called with the tokens sampled so far.
        has_simultaneous_turns: the environment may return a `Continuation` with turns in `beside`.
    """

    Settings: ClassVar[type[EnvSettings]] = EnvSettings
    scores: ClassVar[bool] = True
    replayable: ClassVar[bool] = False
    times_itself: ClassVar[bool] = False
    may_drop_turns: ClassVar[bool] = False
    has_simultaneous_turns: ClassVar[bool] = False
    plays_policies: ClassVar[bool] = False
    needs_policies: ClassVar[bool] = False
    is_waiting = False
    services: Services  # set before `reset`
    dropped_turns: Collection[int] = ()

    def __init__(self, settings: Any, shared: Any) -> None:
        """Create the environment of one episode.

        Args:
            settings: the validated keys.
            shared: the value that `open` returned.
        """
        self.settings, self.shared = settings, shared

    @classmethod
    def tools(cls, settings: Any) -> list[dict[str, Any]]:
        """Return JSON schemas of the tools that prompts present, in the form of chat templates.

        Called on the first rank only.
        """
        return []

    @classmethod
    def announcement(cls, settings: Any) -> Announcement:
        """Return how prompts announce the tools; called on the first rank only."""
        return Announcement(cls.tools(settings))

    @classmethod
    def needs_tool_template(cls, settings: Any) -> bool:
        """Return whether the chat template must be able to write tools. Called before a run; must start no
        processes."""
        return bool(cls.tools(settings))

    @classmethod
    def check(cls, settings: Any) -> None:
        """Raise a ConfigError for settings that cannot work. Called before a run, so it should be fast."""
        cls.tools(settings)

    @classmethod
    def open(cls, settings: Any) -> Any:
        """Open resources that all episodes share (processes, connections). Called once, in the hosting process."""
        return None

    @classmethod
    def gives_scores(cls, settings: Any) -> bool:
        """Return whether the environment gives the rewards; see `scores`."""
        return cls.scores

    @classmethod
    def open_with(cls, settings: Any, services: Services | None) -> Any:
        """Open shared resources as `open` does, for an environment that uses parts of the run (`Services`)."""
        return cls.open(settings)

    @classmethod
    def close(cls, shared: Any) -> None:
        """Close `shared`, the resources that `open` returned."""

    def reset(self, row: dict[str, Any], seed: int) -> Observation | Awaitable[Observation | None] | None:
        """Begin the episode.

        Args:
            row: the columns of the data, with `prompt` (as text), `answer` and `data_source`; with `data.image_key`
                also `images`, the prompt's images as PIL images in the size that the model sees.
            seed: equal for all samples of a prompt, so that a group starts from one state.

        Returns:
            The first observation; None: the policy sees the prompt of the data.
        """
        return None

    def step(self, action: Action) -> Step | tuple[Any, ...] | Awaitable[Step | tuple[Any, ...]]:
        """Reply to one turn of the policy."""
        raise NotImplementedError

    def discard(self) -> None:
        """Free what the episode still holds, because no further turn follows. Called in the thread of coroutines."""


class SingleTurn(Environment):
    """An environment that ends after the first turn. Its responses are generated all together, like plain answers."""

    scores: ClassVar[bool] = False

    def step(self, action: Action) -> Step:
        """End the episode."""
        return Step(done=True)
