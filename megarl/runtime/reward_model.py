"""The reward model of a run: a frozen sequence classifier that scores samples, in the processes and layout of its team.

Its score of a sample is made from the state at the last token, where a classifier of transformers has it: at the last
one that is not its padding token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megarl import offload_schedule
from megarl.config.data import BY_MODEL
from megarl.data.messages import PromptColumn
from megarl.errors import ConfigError, RewardError
from megarl.rewards.classifier import shown_text
from megarl.runtime.frozen_models import differing_tokens, load_tokenizer_of, record_frozen
from megarl.runtime.roles import ModelRole
from megarl.runtime.setup import build_frozen, check_embeddings
from megarl.tracing import phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from megarl.data.batch import Batch
    from megarl.runtime.context import StepContext
    from megarl.runtime.rank_state import RankState
    from megarl.training.engine import MegatronEngine

_PATH = "reward_model.path"


class RewardModelRole(ModelRole):
    """The frozen classifier. It has a shape of its own: its work is not in `perf/flops`."""

    name = offload_schedule.REWARD_MODEL

    def __init__(
        self, engine: MegatronEngine, c: StepContext, tokenizer: PreTrainedTokenizerBase, *, offloads: bool
    ) -> None:
        super().__init__(engine, c, offloads=offloads)
        self._tokenizer, self._settings = tokenizer, c.config.reward_model
        data = c.config.data
        self._prompts = PromptColumn(data.prompt_key, c.config.whole_conversations, data.image_key is not None)

    def scores(self, samples: Batch) -> Tensor:
        """Score every sample: float32 [B]; NaN: it has more tokens than the model takes.

        Raises:
            RewardError: a sample has more, and `reward.on_error` is `raise`.
        """
        import torch

        rows = self.token_ids(samples)
        limit = self._settings.max_tokens or self.engine.hf_config.max_position_embeddings
        long = torch.tensor([len(row) > limit for row in rows], dtype=torch.bool)
        if long.any() and self._c.config.reward.on_error == "raise":
            first = int(long.nonzero()[0])
            raise RewardError(
                f"reward {BY_MODEL!r}: sample {samples['sample_id'][first]!r} is too long for the reward model",
                where="reward_model.max_tokens",
                found=f"{len(rows[first])} tokens",
                allowed=f"{limit} tokens",
                fix="lower rollout.sampling.max_new_tokens or data.max_prompt_tokens, or set reward.on_error to a "
                "score for such samples",
            )
        sequences = as_sequences([row[:limit] for row in rows])
        with self._c.offload.phase("score", self.name):
            found = self.engine.values(sequences).values.float().cpu()
        return found.masked_fill(long, math.nan)

    def token_ids(self, samples: Batch) -> list[list[int]]:
        """Return what the model reads of every sample, up to the token that it is scored at."""
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


def as_sequences(rows: Sequence[Sequence[int]]) -> Batch:
    """Return sequences of one value each: that of a token after the last one, which is not read."""
    import torch

    from megarl.data.batch import Batch, Jagged

    prompts = Jagged.from_list(rows, dtype=torch.int64)
    ends = torch.tensor([row[-1] for row in rows], dtype=torch.int64)
    return Batch({"prompt_ids": prompts, "response_ids": Jagged.from_lengths(ends, torch.ones_like(ends))})


def _without_padding(row: list[int], pad: int | None) -> list[int]:
    """Return the tokens up to the last one that is not padding; at least one."""
    end = len(row)
    while end > 1 and row[end - 1] == pad:
        end -= 1
    return row[:end]


def make_reward_model(c: RankState, checkpoint: str | None) -> RewardModelRole:
    """Make the reward model of this run. Collective over its team.

    Args:
        checkpoint: that the run goes on from; None: it begins.

    Raises:
        ConfigError: the model has no score or several, other tokens than the policy has mean other things to it, it has
            no chat template, or as `record_frozen`.
    """
    from megarl.models.config import load_hf_config

    settings = c.config.reward_model
    path = settings.path
    assert path is not None, "the checks ask for it"
    record_frozen(c, BY_MODEL, _PATH, path, checkpoint)
    with phase("load_reward_model"), c.offload.phase("load"):
        own = c.config.model.model_copy(update={"path": path, "hf_config": None})
        hf_config = load_hf_config(own, _PATH)
        _check_scores(hf_config, path)
        tokenizer = load_tokenizer_of(c.config.model, path, _PATH)
        if settings.form == "tokens":
            _check_tokens(c.tokenizer, tokenizer, path)
            check_embeddings(hf_config, c.hf_config, _PATH)
        elif settings.form == "chat" and not tokenizer.chat_template:
            raise ConfigError(
                "the reward model's tokenizer has no chat template",
                where="reward_model.form",
                found="chat",
                fix="set it to text",
            )
        engine = build_frozen(c, hf_config, path, offload_schedule.REWARD_MODEL)
        return RewardModelRole(engine, c.context, tokenizer, offloads=c.config.actor.engine.offload)


def _check_scores(hf_config: PretrainedConfig, path: str) -> None:
    """Refuse a model without exactly one score; a missing head would be read as zeros."""
    from megarl.models.weights.files import CheckpointReader

    classifies = any("SequenceClassification" in name for name in hf_config.architectures or ())
    if classifies and hf_config.num_labels == 1 and "score.weight" in CheckpointReader(path):
        return
    raise ConfigError(
        "this is no sequence classifier with one score",
        where=_PATH,
        found=f"{path}: {', '.join(hf_config.architectures or ())}, {hf_config.num_labels} labels",
        allowed="a ...ForSequenceClassification with one label, and score.weight in its files",
        fix="name a reward model, such as the result of algorithm.pipeline=reward_model",
    )


def _check_tokens(policy: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, path: str) -> None:
    if other := differing_tokens(policy, own):
        raise ConfigError(
            "reward model and policy have different vocabularies, and the sample's tokens would mean other things: "
            + other,
            where="reward_model.form",
            found=f"tokens, with {path}",
            allowed="text or chat, for a model with a tokenizer of its own",
            fix="set reward_model.form=chat if it has a chat template, else text",
        )
