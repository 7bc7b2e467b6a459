"""The work of a recipe's step: samples, their tokens, and the share of one replica."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.algorithms.divergences import chosen_divergence
from megarl.architectures.vision_language import VisionEncoder
from megarl.artifacts.facts import ModelFacts, model_facts
from megarl.config.model import ModelConfig
from megarl.config.run import RunConfig
from megarl.data.fields import KEPT_IDS, ROUTES
from megarl.planning.assumptions import PlanAssumptions
from megarl.planning.lengths import Lengths, refuse_longer
from megarl.planning.shards import BYTES
from megarl.planning.vision import image_patches
from megarl.system.errors import ConfigError

_NUMBER = 8  # bytes of a field per token, at most: those of a token id (int64); a log-prob or a value is float32
_MANY_ROUTES = 960  # bytes of a token's routes in a model of unknown size: those of the largest mixtures
_WIDE = 8192  # hidden size of a teacher of unknown size: that of the largest dense models


def token_bytes(config: RunConfig, field: str) -> int:
    """Return the approximate bytes per token of a batch field; fields of teachers, routes and kept tokens have several
    numbers."""
    if field == "teacher_topk" and (chosen := chosen_divergence(config.algorithm.distillation)) is not None:
        # A float32 id and log-prob for each of the top tokens, and one pair for all other tokens together.
        return _NUMBER * (chosen.settings.topk + 1)
    if field == "teacher_hidden":
        sizes = [_hidden_size(ModelConfig(path=path)) for path in config.teacher.paths.values()]
        return BYTES[config.model.dtype] * (sum(sizes) or _WIDE)
    if field == "ref_hidden":
        return BYTES[config.model.dtype] * _hidden_size(config.model)
    if field == ROUTES:
        return _route_bytes(config.model)
    if field == KEPT_IDS:
        return 4 * config.rollout.sampling.top_k
    return _NUMBER


def _hidden_size(model: ModelConfig) -> int:
    facts = _facts_of(model)
    return _WIDE if facts is None else facts.hidden


def _route_bytes(model: ModelConfig) -> int:
    """Return the bytes of a token's routes (`megarl.data.routes`)."""
    facts = _facts_of(model)
    if facts is None or facts.mixture is None:
        return _MANY_ROUTES
    router = facts.mixture.router
    return facts.copies["router"] * router.chosen * (1 if router.experts < 256 else 2)


def _facts_of(model: ModelConfig) -> ModelFacts | None:
    try:
        return model_facts(model)
    except ConfigError:  # `megarl.checks` reports this error
        return None


@dataclass(frozen=True)
class Share:
    """Sizes of the samples that a replica has in a step, taken from the replica with the most tokens."""

    samples: float  # number of samples
    prompt: float
    response: float  # mean response tokens
    variance: float = 0.0  # variance of response tokens, for costs that are quadratic in them
    patches: float = 0.0  # image patches per prompt
    group: int = 1  # number of samples of a prompt, which share its images
    once: bool = False  # whether the samples of a prompt share its tokens (`share_prefixes`)

    @property
    def length(self) -> float:
        """Mean tokens per sample."""
        return self.prompt + self.response

    @property
    def prompts(self) -> float:
        """How many times a pass computes a prompt: for each sample, or with `once` for each group of samples."""
        return min(self.samples, max(1.0, self.samples / self.group)) if self.once else self.samples

    @property
    def tokens(self) -> float:
        """Number of tokens that a pass over all samples computes."""
        return self.samples * self.response + self.prompts * self.prompt


@dataclass(frozen=True)
class Workload:
    """The samples of one step."""

    groups: int  # number of prompts
    samples: int  # samples per group
    prompt: float
    lengths: Lengths
    # all replicas compute about equally many tokens (`engine.balance_replicas` or `placement.share=tokens`)
    even: bool = False
    patches: float = 0.0  # image patches per prompt, or per episode
    apart: bool = False  # samples of a group have different images, which an environment shows
    replayed: int = 0  # groups of earlier steps that a step trains on again (`data.replay`)

    @classmethod
    def of(cls, config: RunConfig, given: PlanAssumptions, encoder: VisionEncoder | None = None) -> Workload:
        """Return the work of a step of `megarl train`. An episode counts as one response with the tokens of all turns.

        Raises:
            ConfigError: the assumed responses are longer than allowed.
        """
        sampling = config.rollout.sampling
        longest = config.response_tokens(sampling)
        allowed = f"up to {longest}, of rollout.sampling.max_new_tokens"
        refuse_longer(given.mean_tokens, longest, "--assume mean_tokens", allowed)
        fixed = sampling.ignore_eos and not given.mean_tokens
        mean = given.mean_tokens or (longest if fixed else longest / 4)
        prompt = given.prompt_tokens or config.data.max_prompt_tokens / 2
        lengths = Lengths(mean, 0.0 if fixed else given.sigma, longest)
        patches = 0.0
        if encoder is not None and config.data.image_key is not None:
            most = image_patches(config, encoder)
            patches = min(given.prompt_patches or most / 2, most)
        even = config.actor.engine.balance_replicas or config.placement.share == "tokens"
        replay = config.data.replay
        replayed = 0 if replay is None else replay.groups(config.data.batch_size)
        return cls(config.data.batch_size, sampling.n, prompt, lengths, even, patches, config.has_turns, replayed)

    @property
    def seen(self) -> int:
        """How many sets of images the encoder processes in one pass over all samples: one per group, or one per sample
        if the samples of a group have different images (`apart`)."""
        return self.number if self.apart else self.groups

    @property
    def number(self) -> int:
        """Number of samples per step."""
        return self.groups * self.samples

    @property
    def trained(self) -> float:
        """Samples that a step trains on per sample that it generates: more than 1 with replay."""
        return 1 + self.replayed / self.groups

    @property
    def tokens(self) -> float:
        """Prompt and response tokens per step."""
        return self.number * (self.prompt + self.lengths.expected)

    def share(self, replicas: int, groups: float | None = None) -> Share:
        """Return the work of the busiest of `replicas` replicas that share the samples of `groups` prompts (None: all
        prompts of a step).

        The mean of n lengths has a standard deviation of `Lengths.variation` / sqrt(n) times the mean, and the largest
        of R such means is approximately sqrt(2 ln R) standard deviations above it.
        """
        number = (groups or self.groups) * self.samples / replicas
        mean = self.lengths.expected
        if not self.even and replicas > 1:
            mean *= 1 + self.lengths.variation * math.sqrt(2 * math.log(replicas) / max(number, 1))
        longest = min(mean, self.lengths.longest)
        return Share(
            number, self.prompt, longest, self.lengths.variance, self.patches, 1 if self.apart else self.samples
        )
