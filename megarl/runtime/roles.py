"""The roles that stages name in their signatures: the models of a run, the rollout and the scorer.

    role         on the device while it works (megarl.system.offload_schedule)       gives
    actor        parameters; in an update also optimizer state and gradients  log_probs, train_step
    critic       the same                                                     values, train_step
    reference    parameters                                                   log_probs
    teacher      parameters                                                   log_probs
    reward_model parameters                                                   scores
    models.NAME  as the critic, or frozen: parameters                         log_probs, train_step
    rollout      the actor's parameters or a server's weights, and a cache    generating, engine
    scorer       nothing                                                      runner, by_environment

A model enters its phase of the offload schedule by itself, so stages need not do it. The nodes of the graph
decide which models are built. All methods of models are collective over the ranks of the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from megarl.config.data import BY_MODEL
from megarl.data.batch import Batch, Jagged
from megarl.data.messages import PromptColumn
from megarl.data.teachers import choose_teacher
from megarl.models.lora import adapters_off
from megarl.rewards.classifier import shown_text
from megarl.rollout.family import WeightLink
from megarl.runtime.policies import sampling_of
from megarl.system import offload_schedule, tracing
from megarl.system.errors import RewardError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from megarl.config.run import RunConfig
    from megarl.config.task import TaskPlayer
    from megarl.config.training import OptimConfig
    from megarl.data.experts import Experts
    from megarl.data.routes import RouteForm
    from megarl.models.policy import PolicyModel
    from megarl.rewards.parts import Rewards
    from megarl.rollout.embedded.stale import StaleWeights
    from megarl.rollout.engine import RolloutEngine
    from megarl.runtime.context import StepContext
    from megarl.runtime.episodes import Episodes
    from megarl.runtime.oversampling import Oversampling
    from megarl.system.metrics import Metrics
    from megarl.training.engine import Divisor, LossFn, MegatronEngine, TeacherTargets


class ModelRole:
    """A model of the run in its role, such as the actor; `offloads`: parts of it that may be moved to host memory."""

    name: str

    def __init__(self, engine: MegatronEngine, c: StepContext, *, offloads: Collection[str]) -> None:
        self.engine, self._c = engine, c
        c.offload.add(self.name, engine, offloads=offloads)

    @property
    def temperature(self) -> float:
        """The temperature at which samples are scored."""
        return self._c.temperature

    @property
    def chunks(self) -> list[PolicyModel]:
        """This rank's pipeline chunks of the model."""
        return self.engine.chunks

    def score(self, samples: Batch, temperature: float | None = None) -> Jagged:
        """Return the log-prob of every response token (float32) at `temperature`; None: as generated. The work is not
        added to `perf/flops`."""
        with self._c.offload.phase("score", self.name):
            return self._logprobs(self.engine, samples, temperature)

    def _logprobs(self, engine: MegatronEngine, samples: Batch, temperature: float | None) -> Jagged:
        return engine.logprobs(samples, self.temperature if temperature is None else temperature, entropy=False)[0]


class ActorRole(ModelRole):
    """The policy that is trained."""

    name = offload_schedule.ACTOR

    @property
    def step(self) -> int:
        """Number of optimizer steps so far."""
        return self.engine.step

    def log_probs(self, samples: Batch, temperature: float | None = None) -> Jagged:
        """Return the log-prob of every response token (float32) at `temperature` (None: as generated)."""
        self._c.count_pass(samples)
        return self.score(samples, temperature)

    def train_step(
        self,
        mini: Batch,
        loss: LossFn,
        divisor: Divisor | None = None,
        targets: TeacherTargets | None = None,
        unit: int = 1,
    ) -> Metrics:
        """Take one optimizer step on this rank's part of a mini-batch; see `MegatronEngine.train_step`."""
        with self._c.offload.phase("update", self.name):
            return self.engine.train_step(mini, loss, self.temperature, divisor, targets, unit)

    def scores(self, sequences: Batch) -> Jagged:
        """Return the score of every sequence, float32, if the actor is a reward model in training."""
        with self._c.offload.phase("score", self.name):
            return self.engine.values(sequences)

    def score_step(self, mini: Batch, loss: LossFn, unit: int) -> Metrics:
        """Take one optimizer step of a reward model; see `MegatronEngine.value_step`."""
        with self._c.offload.phase("update", self.name):
            return self.engine.value_step(mini, loss, unit)

    def sft_step(self, batch: Batch) -> Metrics:
        """Take one supervised optimizer step; see `MegatronEngine.sft_step`."""
        with self._c.offload.phase("update", self.name):
            return self.engine.sft_step(batch)

    def reset_optimizer(self, optim: OptimConfig, total_steps: int) -> None:
        """Keep the parameters, and replace the optimizer: new moments, a schedule of `total_steps`, and step 0."""
        with self._c.offload.phase("update", self.name):
            self.engine.reset_optimizer(optim, total_steps)


class CriticRole(ModelRole):
    """The value model of PPO."""

    name = offload_schedule.CRITIC

    def values(self, samples: Batch) -> Jagged:
        """Predict the return at every response token (float32), from the tokens before it."""
        with self._c.offload.phase("score", self.name):
            values = self.engine.values(samples)
        self._c.count_pass(samples, head=False)
        return values

    def train_step(self, mini: Batch, loss: LossFn) -> Metrics:
        """Take one optimizer step on this rank's part of a mini-batch; see `MegatronEngine.value_step`."""
        with self._c.offload.phase("update", self.name):
            return self.engine.value_step(mini, loss)


class FurtherRole(ActorRole):
    """A further model of the recipe (`models.NAME`), for stages of the user; `perf/flops` does not include it, because
    its size may differ. A frozen model has no `train_step`."""

    def __init__(self, name: str, engine: MegatronEngine, c: StepContext, *, offloads: Collection[str]) -> None:
        self.name, self.engine, self._c = name, engine, c
        self._temperature = sampling_of(c.config, name).temperature
        c.offload.add(name, engine, offloads=offloads, further=True)

    @property
    def temperature(self) -> float:
        """The temperature at which samples of its policy are generated and scored."""
        return self._temperature

    def log_probs(self, samples: Batch, temperature: float | None = None) -> Jagged:
        """Return the log-prob of every response token (float32) at `temperature` (None: as generated)."""
        return self.score(samples, temperature)

    def sft_step(self, batch: Batch) -> Metrics:
        """Take one supervised optimizer step; see `MegatronEngine.sft_step`. Its metrics are `NAME/loss` and so on."""
        return super().sft_step(batch).renamed(lambda name: name.replace("sft/", f"{self.name}/", 1))


class ReferenceRole(ModelRole):
    """The frozen policy that RL starts from."""

    name = offload_schedule.REFERENCE

    def log_probs(self, samples: Batch, temperature: float | None = None) -> Jagged:
        """Return the reference's log-prob of every response token (float32) at `temperature` (None: as generated)."""
        logp = self.score(samples, temperature)
        self._c.count_pass(samples)
        return logp

    def hidden_states(self, samples: Batch) -> Jagged:
        """Return the hidden state before every response token; see `MegatronEngine.hidden_states`."""
        self._c.count_pass(samples, head=False)
        with self._c.offload.phase("score", self.name):
            return self.engine.hidden_states(samples)


class BaseReferenceRole(ReferenceRole):
    """The reference for an actor whose adapters change nothing at the start of RL: the actor with adapters off."""

    def __init__(self, engine: MegatronEngine, c: StepContext) -> None:
        # not added to the offload schedule, which already has this engine as the actor
        self.engine, self._c = engine, c

    def score(self, samples: Batch, temperature: float | None = None) -> Jagged:
        """Return the log-prob of every response token (float32) under the actor without its adapters."""
        with self._c.offload.phase("score", offload_schedule.ACTOR), adapters_off(self.engine.chunks):
            return self._logprobs(self.engine, samples, temperature)

    def hidden_states(self, samples: Batch) -> Jagged:
        """Return, for every response token, the final hidden state of the token before it, of the actor without its
        adapters.
        """
        self._c.count_pass(samples, head=False)
        with self._c.offload.phase("score", offload_schedule.ACTOR), adapters_off(self.engine.chunks):
            return self.engine.hidden_states(samples)


class TeacherRole(ModelRole):
    """The frozen teachers that a policy is distilled from. `perf/flops` excludes them because their sizes differ."""

    name = offload_schedule.TEACHER

    def __init__(self, engines: Mapping[str, MegatronEngine], c: StepContext, *, offloads: Collection[str]) -> None:
        """Create the role from `engines`: the teachers by name in `teacher.models`; one teacher has an empty name."""
        self._c, self._turns = c, _InTurn(engines)
        c.offload.add(self.name, self._turns, offloads=offloads)

    def score(self, samples: Batch, temperature: float | None = None) -> Jagged:
        """Return the log-prob of every response token (float32) under the teacher of the sample's prompt."""
        return self._of_each(samples, lambda engine, some: self._logprobs(engine, some, temperature))

    def log_probs(self, samples: Batch, temperature: float | None = None) -> Jagged:
        """Return the log-prob of every response token (float32) under the teacher of the sample's prompt."""
        return self.score(samples, temperature)

    def top_tokens(self, samples: Batch, k: int) -> Jagged:
        """Return ids and log-probs of the k likeliest tokens at every response token, by each prompt's teacher.

        All are tokens of the policy's vocabulary; see `MegatronEngine.top_tokens`.
        """
        limit, temperature = self._c.hf_config.vocab_size, self._c.temperature
        return self._of_each(samples, lambda engine, some: engine.top_tokens(some, k, limit, temperature))

    def hidden_states(self, samples: Batch) -> Jagged:
        """Return the teacher's hidden state before every response token; see `MegatronEngine.hidden_states`.

        The states of several teachers are side by side, so that their output embeddings, side by side, give each
        sample the logits of its own teacher: the states of all others are 0.
        """
        widths = [engine.model_config.hidden_size for engine in self._turns.engines.values()]
        before = dict(zip(self._turns.engines, accumulate([0, *widths]), strict=False))

        def compute(engine: MegatronEngine, some: Batch) -> Jagged:
            states, first = engine.hidden_states(some), before[self._turns.on]
            width = states.values.shape[1]
            return states.like(torch.nn.functional.pad(states.values, (first, sum(widths) - first - width)))

        return self._of_each(samples, compute)

    def _of_each(self, samples: Batch, compute: Callable[[MegatronEngine, Batch], Jagged]) -> Jagged:
        """Return `compute` of each sample by its own teacher, in the order of the samples; one teacher at a time is on
        the device."""
        engines = self._turns.engines
        if len(engines) == 1:
            with self._c.offload.phase("score", self.name):
                return compute(engines[self._turns.on], samples)
        names, results, order = self._names(samples), [], list[int]()
        counts = torch.tensor([names.count(name) for name in engines], dtype=torch.float64)
        totals = self._c.all_sum(counts)
        if not totals.any():  # no replica has a sample: the first teacher returns the empty result
            totals[0] = 1
        for name, anywhere in zip(engines, totals.tolist(), strict=True):
            places = [place for place, other in enumerate(names) if other == name]
            self._c.metrics.mean(f"teacher/{name}", len(places), len(samples))
            if anywhere:
                self._turns.on = name
                with self._c.offload.phase("score", self.name):
                    results.append(compute(engines[name], samples.select(places)))
                order += places
        return Jagged.concat(results).select(torch.tensor(order, dtype=torch.int64).argsort())

    def _names(self, samples: Batch) -> list[str]:
        settings, seeds = self._c.config.teacher, self._c.seeds
        return [
            choose_teacher(settings, {"data_source": source, **row}, seeds.teacher(uid))
            for uid, row, source in zip(samples["uid"], samples["row"], samples["data_source"], strict=True)
        ]


class _InTurn:
    """Several engines that take turns: only the engine named `on` may be on the device."""

    def __init__(self, engines: Mapping[str, MegatronEngine]) -> None:
        # name of the engine on the device: the last one that was loaded
        self.engines, self.on = engines, list(engines)[-1]

    @property
    def parts(self) -> frozenset[str]:
        return self.engines[self.on].parts

    @property
    def held(self) -> frozenset[str]:
        return self.engines[self.on].held

    def hold(self, *parts: str) -> None:
        for name, engine in self.engines.items():
            if name != self.on:
                engine.hold()
        self.engines[self.on].hold(*parts)


class RewardModelRole(ModelRole):
    """The frozen reward model, a sequence classifier; `perf/flops` does not include it, because its size differs.

    The score is computed at the last token that is not the padding token, as transformers' classifiers do.
    """

    name = offload_schedule.REWARD_MODEL

    def __init__(
        self, engine: MegatronEngine, c: StepContext, tokenizer: PreTrainedTokenizerBase, *, offloads: Collection[str]
    ) -> None:
        super().__init__(engine, c, offloads=offloads)
        self._tokenizer, self._settings = tokenizer, c.config.reward_model
        self._prompts = prompt_column(c.config)

    def scores(self, samples: Batch) -> Tensor:
        """Return the score of every sample, float32 [B]; NaN for a sample that is too long for the model.

        Raises:
            RewardError: a sample is too long, and `reward.on_error` is `raise`.
        """
        rows = self.token_ids(samples)
        limit = self._settings.max_tokens or self.engine.hf_config.max_position_embeddings
        long = torch.tensor([len(row) > limit for row in rows], dtype=torch.bool)
        if long.any() and self._c.config.reward.on_error == "raise":
            first = int(long.nonzero()[0])
            raise RewardError(
                f"reward {BY_MODEL!r}: sample {samples['sample_id'][first]!r} is too long for the reward model",
                where="reward_model.max_tokens",
                found=f"{len(rows[first])} tokens",
                allowed=f"at most {limit} tokens",
                fix="lower rollout.sampling.max_new_tokens or data.max_prompt_tokens, raise reward_model.max_tokens if "
                "the model can read more, or set reward.on_error to a score for such samples",
            )
        sequences = as_sequences([row[:limit] for row in rows])
        with self._c.offload.phase("score", self.name):
            scores = self.engine.values(sequences).values.float().cpu()
        return scores.masked_fill(long, math.nan)

    def token_ids(self, samples: Batch) -> list[list[int]]:
        """Return the reward model's input tokens of every sample, without trailing padding."""
        if self._settings.form == "tokens":
            both = zip(samples["prompt_ids"].unbind(), samples["response_ids"].unbind(), strict=True)
            rows = [[*prompt.tolist(), *response.tolist()] for prompt, response in both]
        else:
            rows = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in self._texts(samples)]
        return [_without_padding(row, self.engine.hf_config.pad_token_id) for row in rows]

    def _texts(self, samples: Batch) -> list[str]:
        columns = (samples["prompt_text"], samples["response_text"], samples["row"])
        return [
            shown_text(
                {"prompt": prompt, "response": response, "messages": self._prompts.messages(row)},
                self._tokenizer,
                form=self._settings.form,
                end=self._settings.end,
            )
            for prompt, response, row in zip(*columns, strict=True)
        ]


def prompt_column(config: RunConfig) -> PromptColumn:
    """Return the column of the recipe's data that contains the prompts."""
    data = config.data
    return PromptColumn(
        data.prompt_key,
        config.whole_conversations,
        images=data.image_key is not None,
        videos=data.video_key is not None,
    )


def as_sequences(rows: Sequence[Sequence[int]]) -> Batch:
    """Return token sequences as samples with a response of one dummy token, so that each gets one value at its end."""
    prompts = Jagged.from_list(rows, dtype=torch.int64)
    ends = torch.tensor([row[-1] for row in rows], dtype=torch.int64)
    return Batch({"prompt_ids": prompts, "response_ids": Jagged.from_lengths(ends, torch.ones_like(ends))})


def _without_padding(row: list[int], pad: int | None) -> list[int]:
    """Return `row` without trailing padding tokens, but at least one token."""
    end = len(row)
    while end > 1 and row[end - 1] == pad:
        end -= 1
    return row[:end]


def whole_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of token lists, with special tokens and every space."""
    if not token_ids:
        return []  # batch_decode reads an empty list as one empty sequence
    return tokenizer.batch_decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass
class RolloutRole:
    """The role that generates samples."""

    engine: RolloutEngine  # the engine that generates; its `weight_version` is the version of the weights it uses
    tokenizer: PreTrainedTokenizerBase  # the policy's tokenizer
    eos_ids: list[int]  # tokens that end a response (`megarl.data.end_tokens`), the tokenizer's own first
    episodes: Episodes | None = None  # the recipe's environment; None: a sample is one prompt and one response
    player: TaskPlayer | None = None  # plays the episodes of a task other than text; None: the engine generates text
    stale: StaleWeights | None = None  # makes training samples with older weights on purpose (`rollout.stale_steps`)
    # generates training samples with several policies, whose sampling settings may differ (`policies`); None: `engine`
    # generates them
    training_engine: RolloutEngine | None = None
    routes: RouteForm | None = None  # form of the routes that samples have (`rollout.replay_routes`)
    # whether samples have the tokens that the sampling filters kept (`rollout.replay_kept_tokens`)
    keeps_tokens: bool = False
    experts: Experts | None = None  # expert responses that join the groups of a training step (`data.experts`)
    oversampling: Oversampling | None = None  # generates training samples if `rollout.oversample` > 1
    link: WeightLink = field(default_factory=WeightLink)  # transfers new weights to the engine

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of token lists, without special tokens."""
        if not token_ids:
            return []  # batch_decode reads an empty list as one empty sequence
        return self.tokenizer.batch_decode(list(token_ids), skip_special_tokens=True)

    @contextmanager
    def generating(self, c: StepContext, count: int) -> Iterator[Callable[[int], None]]:
        """Prepare memory and a progress bar to generate `count` samples; yield a function that advances the bar."""
        name = tracing.current().rpartition("/")[2]
        with c.offload.phase("generate"), self.link.held(), c.progress(name, count) as advance:
            yield advance


@dataclass(frozen=True)
class ScorerRole:
    """The role that scores samples."""

    runner: Rewards | None  # runs the reward functions; only on the first rank of a replica, None elsewhere
    by_environment: bool = False  # whether the environment gives the rewards, so that no functions run
    # the data's column of prompts, whose messages reward functions get
    prompts: PromptColumn = field(default_factory=PromptColumn)
    # returns the texts of token lists with special tokens, for reward functions; None: functions get texts without them
    # (`reward.skip_special_tokens`)
    whole_texts: Callable[[Sequence[Sequence[int]]], list[str]] | None = None
