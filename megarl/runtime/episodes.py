"""The environment of a run, on one rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from megarl.data.announcement import Announcement
from megarl.data.render import chat_of
from megarl.data.rows import Row
from megarl.data.turns import Turns
from megarl.envs.host import Host
from megarl.envs.protocol import Services
from megarl.envs.registry import check_longest, check_plays_policies, load_environment
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.run import RunConfig
    from megarl.data.image_prompts import ImagePrompts
    from megarl.training.parallel import Layout


@dataclass(frozen=True)
class Episodes:
    """The environment of a run on one rank."""

    scores: bool  # whether the environment gives the rewards; otherwise the recipe's reward function does
    replayable: bool  # whether an episode can be replayed from its recorded turns
    tools: Announcement  # the tools that prompts announce to the policy
    turns: Turns  # turns text and messages of the environment into tokens
    host: Host | None  # runs the environments; only on the first rank of a replica
    images: ImagePrompts | None  # prepares images of observations; None: observations are text
    bodies: bool  # whether samples get the mask of the observations' own tokens
    has_lanes: bool = False  # whether an episode may have several sequences
    may_drop_turns: bool = False  # whether environments may end turns in flight
    has_simultaneous_turns: bool = False  # whether an episode may have several turns in flight at the same time
    has_shares: bool = False  # whether the sequences of an episode may have different shares of its advantage

    def close(self) -> None:
        """Stop the environments."""
        if self.host is not None:
            self.host.close()


def build_episodes(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: list[int],
    layout: Layout,
    images: ImagePrompts | None,
) -> Episodes | None:
    """Build the environment of the section `env`; None: samples are one prompt and one response.

    Args:
        eos_ids: tokens that end a turn, in addition to `rollout.sampling.stop_token_ids`.
        images: prepares images of observations; None: observations are text.

    Raises:
        ConfigError: the environment cannot be found or loaded, or does not accept its keys; or the tokenizer cannot
            find the observations' own tokens, which `algorithm.loss.echo_coef` needs.
    """
    if not config.has_turns:
        return None
    kind, settings = load_environment(config.env)
    answer_s = config.cluster.timeout_s / 2
    check_longest(settings.longest_s, answer_s)
    check_plays_policies(kind, config.policies)
    # Only rank 0 loads the tools: they may start programs, and all prompts must announce the same ones.
    announced = asdict(kind.announcement(settings)) if layout.world.rank == 0 else None
    tools = Announcement(**layout.world.broadcast_json(announced))
    data = config.data
    render = None
    written = chat_of(data, tokenizer, tools)
    if written is not None:
        render = lambda messages: written.observed(messages, Row({}, "messages of the environment", 0))  # noqa: E731
    sampling = config.rollout.sampling
    turns = Turns(tokenizer, render, [*eos_ids, *sampling.stop_token_ids])
    most = data.max_prompt_tokens, config.response_tokens(sampling), config.rollout.limits.turns
    services = Services(written, turns, tokenizer, *most, config.policies, images)
    host = Host(kind, settings, answer_s, images, services) if layout.is_lead else None
    bodies = config.algorithm.loss.echo_coef > 0
    if bodies and not tokenizer.is_fast:
        raise ConfigError(
            "training on observations needs a tokenizer that returns the place of each token in the text",
            where="algorithm.loss.echo_coef",
            found=type(tokenizer).__name__,
            allowed="0, or a fast tokenizer (with a tokenizer.json)",
            fix="set algorithm.loss.echo_coef=0",
        )
    return Episodes(
        kind.gives_scores(settings),
        kind.replayable,
        tools,
        turns,
        host,
        images,
        bodies,
        config.has_lanes,
        kind.may_drop_turns,
        kind.has_simultaneous_turns,
        config.has_shares,
    )
