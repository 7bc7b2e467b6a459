"""Builds the state of a rank: process groups, tokenizer, models, rollout, rewards, data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from megarl.algorithms.kl import KLController
from megarl.architectures.decoders import DECODERS
from megarl.architectures.vision_language import VideoSettings
from megarl.artifacts.draft_training import draft_problem
from megarl.artifacts.shared_prefixes import prefix_problem, shares_prefixes
from megarl.config.base import raise_problems
from megarl.config.run import RunConfig, repeated_problem, steps_of_epochs, steps_text
from megarl.dag.stage import Role
from megarl.data.announcement import NO_TOOLS, Announcement
from megarl.data.curriculum import CurriculumLoader
from megarl.data.end_tokens import end_tokens
from megarl.data.experts import Experts, open_experts
from megarl.data.image_prompts import ImagePrompts
from megarl.data.in_flight_loader import InFlightLoader
from megarl.data.loader import Described, PromptLoader
from megarl.data.preferences import LabelledDataset, PairDataset, open_preferences
from megarl.data.prompts import PromptDataset
from megarl.data.sources import check_loader_kwargs
from megarl.data.teachers import check_teachers
from megarl.data.tokenizer import load_tokenizer
from megarl.models.config import load_hf_config
from megarl.models.hf import (
    check_trainable,
    encoder_of,
    facts_of,
    image_settings,
    moe_layers,
    route_form,
)
from megarl.models.weights import init_random, load_weights
from megarl.rewards.parts import Rewards, functions_of
from megarl.rewards.policies import PolicyRewards
from megarl.rewards.references import check_answers, reads_answers, uses_reward
from megarl.rollout.embedded.engine import EmbeddedEngine
from megarl.rollout.embedded.stale import StaleWeights
from megarl.rollout.engine import RolloutEngine, UnopenedEngine
from megarl.rollout.families import family_of
from megarl.rollout.stop_strings import check_stop_strings
from megarl.runtime.context import StepContext
from megarl.runtime.episodes import Episodes, build_episodes
from megarl.runtime.oversampling import Oversampling, groups_needed
from megarl.runtime.rank_state import RankState, TeamContext
from megarl.runtime.roles import ActorRole, ModelRole, RolloutRole, ScorerRole, prompt_column, whole_texts
from megarl.system.comm import team_world
from megarl.system.device import DTYPES, ProcessState, device, dist_backend, gpu_id, has_cuda, refuse_shared_gpu
from megarl.system.errors import ConfigError
from megarl.system.numa import bind_to_gpu
from megarl.system.offload_schedule import ACTOR, CRITIC, REWARD_MODEL, OffloadSchedule
from megarl.system.rendezvous import join
from megarl.system.tracing import keep_beating, phase
from megarl.training.engine import MegatronEngine, Weights
from megarl.training.parallel import Layout, init_parallel
from megarl.training.rng import seed_generators
from megarl.training.sequence_layout import SequenceLayout, TextLayout

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.config.model import ParallelConfig
    from megarl.config.run import TrainerConfig
    from megarl.config.task import TaskPlayer
    from megarl.config.training import PreferenceConfig, SFTConfig
    from megarl.data.render import Split
    from megarl.models.policy import PolicyModel

Scored = Collection[str]
SCORED: Scored = ("train", "val")


def init_processes(config: RunConfig, run_dir: Path, parallel: ParallelConfig) -> Layout:
    """Join the team's other ranks and create the process groups, whose collectives time out after `cluster.timeout_s`.

    With a GPU, this also binds the process to the cores of the GPU's NUMA node.
    """
    if has_cuda():
        torch.cuda.set_device(device())
        bind_to_gpu(torch.cuda.current_device())  # before host memory is pinned, so that it is near the GPU
    with phase("join"):
        join(dist_backend(), config.cluster.timeout_s, run_dir)
        world = team_world(config.cluster.timeout_s)
        if has_cuda():
            refuse_shared_gpu(world.all_gather_json(gpu_id()))
        return init_parallel(parallel, world)


def build_rank_state(
    config: RunConfig,
    run_dir: Path,
    team: TeamContext | None = None,
    *,
    trainable: bool = True,
    scored: Scored = SCORED,
) -> RankState:
    """Build the state of a rank of `team` (None: one team that holds all roles), with the policy's weights loaded.

    Critic, reference and teacher are built later (megarl/runtime/role_models.py): they depend on where RL starts.
    Without `trainable` there is no optimizer and no training data. `scored`: data splits whose samples are scored; if
    empty, no reward function is loaded.
    """
    team = team or TeamContext.of_all(config)
    seed_generators(config.trainer.seed)
    layout = init_processes(config, run_dir, team.plan.parallel)
    with phase("load_data"), keep_beating():  # downloads data, and reads and tokenizes all rows
        tokenizer = load_tokenizer(config.model)
        hf_config = load_hf_config(config.model)
        if trainable:
            check_trainable(hf_config, config.model.path or "model.hf_config")
        _check_model_config(config, team, hf_config)
        check_vocabulary(config, len(tokenizer), hf_config.vocab_size)
        kl = config.algorithm.kl
        context = StepContext(
            config,
            layout,
            hf_config,
            OffloadSchedule(layout.world.barrier) if config.rollout.colocated else OffloadSchedule(),
            KLController(kl.coef, kl.target if kl.adaptive else None, kl.horizon),
            sequences=sequence_layout_of(config, hf_config),
            cuts=team.plan.cuts if config.placement.share == "tokens" else None,
            tokens=len(tokenizer),
        )
        source, pairs = _load_data(context, team, tokenizer, trainable=trainable, scored=scored)
    held: dict[str, ModelRole | RolloutRole | ScorerRole] = {}
    with phase("load_model"):
        if team.holds(Role.ACTOR):
            engine = build_engine(config, hf_config, layout, weights_of(config, hf_config), trainable=trainable)
            held["actor"] = ActorRole(engine, context, offloads=config.actor.engine.offloaded)
            chunks = engine.chunks
            if source is not None and source.player is not None:
                source.player.take_policy(engine, config, layout)
        elif source is not None and config.rollout.holds_model:
            chunks = build_engine(config, hf_config, layout, _published, trainable=False, name="rollout").chunks
        else:
            chunks = []
        if source is not None:
            held |= source.roles(context, tokenizer, chunks)
    return RankState(
        team,
        context,
        run_dir,
        tokenizer,
        held,
        pairs.loader if source is None else pairs.loader or source.loader,
        None if source is None else source.val_data,
        pairs.held_out,
    )


def _published(chunks: object) -> None:
    """Load no weights: the actor's team publishes all of them before the first sample."""


def _load_data(
    c: StepContext, team: TeamContext, tokenizer: PreTrainedTokenizerBase, *, trainable: bool, scored: Scored
) -> tuple[_Source | None, _Pairs]:
    """Load prompts and environment of a team that generates (else None), or preference data if the run needs them."""
    source, pairs = None, _Pairs()
    generates = team.holds(Role.ROLLOUT)
    learns_pairs = c.config.preference is not None and not generates
    # The actor's team also generates for the validation of a cold start.
    if generates or (team.holds(Role.ACTOR) and c.config.sft.steps):
        state = ProcessState.now()
        source = _Source.load(
            c,
            tokenizer,
            trainable=trainable and generates,
            scored=() if learns_pairs else scored,
            held_out=not learns_pairs,
        )
        state.check("the environment, or a function of the data,")
    if c.config.preference is not None and not generates:
        pairs = _Pairs.load(c, c.config.preference, tokenizer)
    return source, pairs


@dataclass(frozen=True)
class _Pairs:
    """Training and held-out preference pairs or labelled examples of a run without generation."""

    loader: PromptLoader | None = None
    held_out: PairDataset | LabelledDataset | None = None

    @classmethod
    def load(cls, c: StepContext, settings: PreferenceConfig, tokenizer: PreTrainedTokenizerBase) -> _Pairs:
        config = c.config
        read = partial(
            open_preferences,
            config.data,
            settings,
            tokenizer,
            max_tokens=c.hf_config.max_position_embeddings,
            stop_ids=[*_end_tokens(c, tokenizer), *config.rollout.sampling.stop_token_ids],
            images=image_prompts(config, c.hf_config, tokenizer),
        )
        data = read("train")
        held_out = read("val") if config.data.held_out else None
        if held_out is not None and c.layout.rank == 0:
            print(held_out.describe(), flush=True)
        return cls(_training_loader(c, data), held_out)


@dataclass(frozen=True)
class _Source:
    """End tokens, prompts, environment and reward function of a team that generates samples."""

    eos_ids: list[int]
    episodes: Episodes | None
    player: TaskPlayer | None
    loader: PromptLoader | None
    val_data: Described | None
    reward: Rewards | None
    experts: Experts | None = None

    @classmethod
    def load(
        cls, c: StepContext, tokenizer: PreTrainedTokenizerBase, *, trainable: bool, scored: Scored, held_out: bool
    ) -> _Source:
        config, layout, loader, val_data, experts = c.config, c.layout, None, None, None
        trains = trainable and "train" in scored
        player = config.task.open_player(config, c.hf_config, tokenizer, layout)
        if player is not None:
            loader = _training_loader(c, player.rows("train")) if trains else None
            val_data = player.rows("val") if config.data.held_out else None
            return cls([tokenizer.eos_token_id], None, player, loader, val_data, None)
        check_loader_kwargs(config.data, config.sft.train_files or ())
        check_stop_strings("rollout.sampling", config.rollout.sampling.stop, tokenizer)
        check_stop_strings("validation.sampling", config.validation.sampling.stop, tokenizer)
        eos_ids, images = _end_tokens(c, tokenizer), image_prompts(config, c.hf_config, tokenizer)
        episodes = build_episodes(config, tokenizer, eos_ids, layout, images)
        prompts = partial(_prompts, config, tokenizer, NO_TOOLS if episodes is None else episodes.tools, images)
        if trains and config.data.train_files:
            data = prompts("train", scored=True)
            experts = open_experts(config, tokenizer, data.prompt_ids, eos_ids, c.hf_config.max_position_embeddings)
            loader = _training_loader(c, data)
            if experts is not None and layout.rank == 0:
                print(experts.describe(), flush=True)
        if config.data.held_out and held_out:
            val_data = prompts("val", scored="val" in scored)
        reward = None
        if scored and layout.is_lead:
            reward = PolicyRewards(config) if config.policy_rewards else Rewards(config.reward)
        return cls(eos_ids, episodes, None, loader, val_data, reward, experts)

    def roles(
        self, c: StepContext, tokenizer: PreTrainedTokenizerBase, chunks: Sequence[PolicyModel]
    ) -> dict[str, ModelRole | RolloutRole | ScorerRole]:
        """Return the objects of the roles `rollout` and `scorer`, by name.

        Args:
            chunks: the policy's pipeline chunks, with which the rollout decodes; empty if servers decode.
        """
        config, episodes = c.config, self.episodes
        engine: RolloutEngine = UnopenedEngine()
        stale, routes = None, route_form(c.hf_config) if config.rollout.replay_routes else None
        if self.player is not None:
            return {
                "rollout": RolloutRole(engine, tokenizer, self.eos_ids, player=self.player),
                "scorer": ScorerRole(None, by_environment=True),
            }
        if chunks:
            engine = embedded = EmbeddedEngine(chunks, config.rollout, c.layout, tokenizer)
            lag = config.rollout.stale_steps
            stale = StaleWeights(chunks, embedded, lag) if lag else None
        by_environment = episodes is not None and episodes.scores
        return {
            "rollout": RolloutRole(
                engine,
                tokenizer,
                self.eos_ids,
                episodes,
                stale=stale,
                routes=routes,
                keeps_tokens=config.rollout.replay_kept_tokens,
                experts=self.experts,
                oversampling=Oversampling(self.loader) if isinstance(self.loader, InFlightLoader) else None,
            ),
            "scorer": ScorerRole(
                self.reward,
                by_environment,
                prompt_column(config),
                None if config.reward.skip_special_tokens else partial(whole_texts, tokenizer),
            ),
        }


def _check_model_config(config: RunConfig, team: TeamContext, hf_config: PretrainedConfig) -> None:
    """Run the checks that need the model's configuration, which for a model on the hub is available only now."""
    if team.others and any(moe_layers(hf_config)):
        raise_problems(family_of(config).experts_problems(config))
    problem = config.model.freeze_problem(facts_of(hf_config).visual_parts)
    raise_problems([] if problem is None else [problem])
    facts = facts_of(hf_config)
    problems = [
        draft_problem(config, facts),
        *(prefix_problem(config, facts, role) for role in ("actor", "critic", *config.models)),
    ]
    raise_problems([problem for problem in problems if problem is not None])


def _end_tokens(c: StepContext, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a response, and print them if there are several. Collective.

    Rank 0 reads them for all ranks, because machines may have different files and ranks that decode together must
    use the same tokens.
    """
    ids = None
    if c.layout.world.rank == 0:
        tokens = end_tokens(tokenizer, c.config.model, c.config.data)
        ids = tokens.ids
        lines = [] if len(ids) == 1 else [tokens.describe(lambda number: str(tokenizer.convert_ids_to_tokens(number)))]
        for line in [*lines, *tokens.notes]:
            print(line, flush=True)
    return list(c.layout.world.broadcast_json(ids))


def check_vocabulary(config: RunConfig, tokens: int, vocabulary: int) -> None:
    """Raise ConfigError if the tokenizer has more tokens than the model has embeddings."""
    if tokens > vocabulary:
        raise ConfigError(
            f"the tokenizer has {tokens} tokens, but the model's vocab_size is {vocabulary}",
            where="model.tokenizer" if config.model.tokenizer else "model.path",
            found=config.model.tokenizer or config.model.path,
            allowed=f"a tokenizer of at most {vocabulary} tokens",
            fix=f"name the model's own tokenizer, or set model.hf_config.vocab_size={tokens} for a fresh model",
        )


def check_embeddings(model: PretrainedConfig, policy: PretrainedConfig, key: str) -> None:
    """Raise ConfigError if the model of key `key` has fewer embeddings than the policy or cannot read its images."""
    if encoder_of(policy) is not None and encoder_of(model) is None:
        raise ConfigError(
            "this model cannot read images, but the policy does",
            where=key,
            found=model.model_type,
            allowed=f"a vision-language model: {', '.join(DECODERS)}",
            fix="choose a model of the policy's kind",
        )
    if model.vocab_size < policy.vocab_size:
        raise ConfigError(
            "the policy can sample tokens for which this model has no embedding",
            where=key,
            found=f"{model.vocab_size} tokens",
            allowed=f"at least the policy's {policy.vocab_size} tokens; more are padding",
            fix="choose a model whose vocab_size is at least as large",
        )


def read_other_config(c: RankState, path: str, key: str) -> PretrainedConfig:
    """Return the Hugging Face config of the model at `path` (recipe key `key`), checked by `check_embeddings`."""
    hf_config = load_hf_config(c.config.model.model_copy(update={"path": path, "hf_config": None}), key)
    check_embeddings(hf_config, c.hf_config, key)
    return hf_config


def build_frozen(c: RankState, hf_config: PretrainedConfig, path: str, name: str) -> MegatronEngine:
    """Build a frozen model with the weights at `path`; `name`: name of the role."""
    read: Weights = lambda chunks: load_weights(chunks, path)  # noqa: E731
    return build_engine(c.config, hf_config, c.layout, read, trainable=False, name=name)


def weights_of(config: RunConfig, hf_config: PretrainedConfig) -> Weights:
    """Return the function that sets the policy's initial weights: from `model.path`, or random by `model.init_seed`."""
    source = config.model.path
    if source is None:
        return lambda chunks: init_random(chunks, hf_config, config.model.init_seed)
    return lambda chunks: load_weights(chunks, source)


def build_engine(
    config: RunConfig,
    hf_config: PretrainedConfig,
    layout: Layout,
    weights: Weights,
    *,
    trainable: bool,
    name: str = ACTOR,
) -> MegatronEngine:
    """Build the Megatron engine of a role; frozen unless `trainable`. Only actor and critic get adapters."""
    settings = config.training_of(name)
    return MegatronEngine(
        hf_config,
        config.parallel_of(name),
        settings.engine,
        settings.optim if trainable else None,
        dtype=DTYPES[config.model.dtype],
        layout=layout,
        total_steps=config.updates(settings),
        weights=weights,
        name=name,
        seed=config.trainer.seed,
        sequences=sequence_layout_of(
            config, hf_config, replays=name == ACTOR, shares=shares_prefixes(config, facts_of(hf_config), name)
        ),
        lora=config.model.lora if name in (ACTOR, CRITIC) else None,
        value_head=name in (CRITIC, REWARD_MODEL) or (name == ACTOR and config.trains_reward_model),
        freeze=config.model.freeze if trainable else (),
        mtp=config.actor.mtp if name == ACTOR else None,
    )


def sequence_layout_of(
    config: RunConfig, hf_config: PretrainedConfig, *, replays: bool = False, shares: bool = False
) -> SequenceLayout:
    """Return how a run's samples are laid out as input sequences of its models.

    With `replays` the sequences have the rollout's routes, if `rollout.replay_routes` is set; with `shares` they share
    the columns of common prefixes.
    """
    if (of_task := config.task.sequence_layout(config, hf_config)) is not None:
        return of_task
    routes = route_form(hf_config) if replays and config.rollout.replay_routes else None
    encoder = encoder_of(hf_config)
    if encoder is None:
        return TextLayout(routes=routes, share=shares)
    from megarl.training.vlm_sequences import ImageLayout

    return ImageLayout(encoder, config.data.image_key is not None, routes=routes)


def image_prompts(
    config: RunConfig, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ImagePrompts | None:
    """Return the object that prepares the images of prompts; None: the model reads only text.

    Raises:
        ConfigError: the recipe names a column of images, but the model reads only text; or as `ImagePrompts.of`.
    """
    encoder = encoder_of(hf_config)
    if encoder is not None:
        data, frames = config.data, None
        if data.video_key is not None:
            limits = data.video_min_pixels, data.video_max_pixels
            frames = VideoSettings.of(encoder, hf_config.video_preprocessor, *limits)
        return ImagePrompts.of(data, encoder, image_settings(hf_config), tokenizer, frames)
    key, column = config.data.shows
    if column is not None:
        raise ConfigError(
            "the model cannot read images or videos",
            where=key,
            found=f"{column!r} for a {hf_config.model_type}",
            allowed=f"a vision-language model: {', '.join(DECODERS)}",
            fix=f"choose such a model, or set {key} to null",
        )
    return None


def _prompts(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Announcement,
    images: ImagePrompts | None,
    split: Split,
    *,
    scored: bool,
) -> PromptDataset:
    """Read the prompts of a split, with reference answers if a reward that reads answers scores the split."""
    answered, whole = scored and reads_answers(config), config.whole_conversations
    data = PromptDataset(
        config.data,
        tokenizer,
        split,
        tools,
        whole=whole,
        answered=answered,
        images=images,
        keeps_given=config.has_lanes,
    )
    if split == "train":
        check_teachers(config.teacher, data.rows)
    if answered and uses_reward(config):
        check_answers(functions_of(config), config.data.answer_key, zip(data.rows, data.answers, strict=True))
    return data


def check_epochs(config: RunConfig, samples: int, section: Literal["trainer", "sft"] = "trainer") -> None:
    """Reject `SECTION.steps` that do not match `SECTION.epochs`, now that the number of samples is known.

    Raises:
        ConfigError: steps and epochs do not match, for instance because an environment's tools make prompts too long.
    """
    settings: TrainerConfig | SFTConfig = getattr(config, section)
    unit, batches = ("examples", config.sft) if section == "sft" else ("prompts", config.data)
    if settings.epochs is None:
        return
    steps = steps_of_epochs(settings.epochs, samples, batches.batch_size)
    if steps != settings.steps:
        raise ConfigError(
            f"{settings.epochs:g} epochs of {samples} {unit} are {steps} steps, but the run was started with "
            f"{settings.steps}",
            where=f"{section}.epochs",
            found=settings.epochs,
            allowed=f"null, or epochs of {unit} that are the same for the command and its workers",
            fix=f"set {section}.epochs=null and {section}.steps={steps}",
        )


def _training_loader(c: StepContext, data: Described) -> PromptLoader:
    check_epochs(c.config, len(data))
    return open_loader(c.config, data, c.layout, "data")


def open_loader(config: RunConfig, data: Described, layout: Layout, section: Literal["data", "sft"]) -> PromptLoader:
    """Print a description of the training data, and return its loader. A batch has `sft.batch_size` examples, or the
    prompts of one round of generation (`rollout.round_prompts`, by default `data.batch_size`)."""
    size, supervised = getattr(config, section).batch_size, section == "sft"
    if layout.rank == 0:
        print(data.describe(), flush=True)
        if supervised or config.task.writes_text:
            steps, unit = (config.sft.steps, "example") if supervised else (config.trainer.steps, config.data_unit)
            print(steps_text(steps, size, len(data), unit), flush=True)
        if (problem := repeated_problem(f"{section}.batch_size", size, len(data))) is not None:
            print(f"WARNING: {problem}", flush=True)
    place = (size if supervised else config.round_prompts, layout.dp_rank, layout.dp_size, config.trainer.seed)
    workers = config.data.loader_workers if config.data.image_key or config.data.video_key else 0
    if config.rollout.oversamples and not supervised:
        most = config.rollout.in_flight(config.round_prompts)
        loader = InFlightLoader(data, *place, config.data.shuffle, most=most, workers=workers)
        loader.needed = groups_needed(config, 0)
        return loader
    if config.data.curriculum is not None and not supervised:
        return CurriculumLoader(data, *place, settings=config.data.curriculum, workers=workers)
    return PromptLoader(data, *place, config.data.shuffle, workers=workers)
