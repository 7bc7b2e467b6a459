"""Expert responses: answers to training prompts that somebody else wrote, as further samples of prompt groups.

    data.experts.files --tokenised once--> responses by prompt --drawn per group by a seed--> rows beside the policy's

A row of an expert has `source: expert`, `expert_mask` on all its tokens, and no log-probs but those of its file: NaN
stands for a log-prob that nobody knows. The weights that generated it are unknown, too: version -1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.config.data import ExpertsConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.fields import EXPERT, EXPERT_MASK, POLICY, SOURCE
from megarl.data.groups import group_places
from megarl.data.sft import SFTDataset
from megarl.data.versions import version_values
from megarl.system.errors import DataError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.run import RunConfig
    from megarl.rollout.seeds import Seeds

#: Weight version of expert responses: the weights that generated them are unknown.
UNKNOWN_VERSION = -1


class ExpertResponses(SFTDataset):
    """The responses of `data.experts.files`; error messages name the keys of that section."""

    limit_key = "data.experts.max_tokens"
    response_setting = "data.experts.response_key"


class Experts:
    """The expert responses of a run, by the tokens of their prompts.

    Attributes:
        unmatched: number of responses to prompts that are not training prompts.
    """

    def __init__(self, settings: ExpertsConfig, responses: SFTDataset, prompts: Jagged, *, joins: bool) -> None:
        """Match responses with training prompts.

        Args:
            prompts: int64, the tokens of all training prompts.
            joins: whether the responses are samples of their groups; otherwise the policy loss leaves them out.

        Raises:
            DataError: no response answers a training prompt, a part of a response is not to be learnt, or log-probs do
                not fit the tokens of their response.
        """
        self.settings, self._responses, self._joins = settings, responses, joins
        _refuse_unlearnt(responses)
        self._logp = None if settings.logp_key is None else _logps(responses, settings.logp_key)
        known = {_key(ids) for ids in prompts.unbind()}
        self._places: dict[tuple[int, ...], list[int]] = {}
        for place, ids in enumerate(responses.prompt_ids.unbind()):
            if (key := _key(ids)) in known:
                self._places.setdefault(key, []).append(place)
        self._prompts = len(known)
        self.unmatched = len(responses) - sum(map(len, self._places.values()))
        if not self._places:
            raise DataError(
                "no expert response answers a training prompt: none has the same prompt tokens",
                where=responses.rows[0].where,
                found=f"the prompt {responses.texts[0]!r}",
                allowed="prompts of data.train_files, in the same column and form",
                fix="write the responses to these prompts, or add the experts' prompts to data.train_files",
            )

    def describe(self) -> str:
        """Return a log line with the number of responses and of prompts that have some."""
        matched = len(self._responses) - self.unmatched
        text = f"experts: {count(matched, 'response')} to {len(self._places)} of {count(self._prompts, 'prompt')}"
        if self._responses.too_long:
            text += f"; {self._responses.too_long} longer than {self._responses.max_tokens} tokens dropped"
        return text + (f"; {self.unmatched} to other prompts dropped" if self.unmatched else "")

    def added_to(self, samples: Batch, seeds: Seeds) -> Batch:
        """Return the samples group by group, each group's own samples followed by the expert responses drawn for it.
        The draw depends only on the run's seed and the group's uid, so ranks, teams and resumed runs agree.
        """
        mask = samples["response_mask"]
        none = mask.like(torch.zeros_like(mask.values))
        of_policy = samples.with_values({SOURCE: [POLICY] * len(samples), EXPERT_MASK: none})
        first, places, order = list[int](), list[int](), list[int]()
        prompts = samples["prompt_ids"].unbind()
        for group in group_places(samples["uid"]):
            chosen = self._draw(seeds, samples["uid"][group[0]], prompts[group[0]])
            order += [*group, *(len(samples) + len(places) + number for number in range(len(chosen)))]
            first += [group[0]] * len(chosen)
            places += chosen
        if not places:
            return of_policy
        return Batch.concat([of_policy, self._rows(of_policy.select(first), places)]).select(order)

    def _draw(self, seeds: Seeds, uid: str, prompt: Tensor) -> list[int]:
        """Draw expert responses for a group and return their places; none with chance 1 - data.experts.share."""
        known = self._places.get(_key(prompt), [])
        drawn = random.Random(seeds.expert(uid))
        if drawn.random() >= self.settings.share:
            return []
        return drawn.sample(known, min(len(known), self.settings.per_group))

    def _rows(self, rows: Batch, places: Sequence[int]) -> Batch:
        """Return `rows`, samples of the groups, with the responses at `places` in place of their own."""
        index = torch.tensor(places, dtype=torch.int64)
        ids = self._responses.response_ids.select(index)
        all_tokens = torch.ones_like(ids.values, dtype=torch.bool)
        logp = torch.full_like(ids.values, math.nan, dtype=torch.float32)
        values: dict[str, Any] = {
            "response_ids": ids,
            "response_mask": ids.like(all_tokens if self._joins else ~all_tokens),
            EXPERT_MASK: ids.like(all_tokens),
            "rollout_logp": ids.like(logp) if self._logp is None else self._logp.select(index),
            **version_values([[[UNKNOWN_VERSION, length]] for length in ids.lengths.tolist()]),
            "sample_id": [f"{uid}#{EXPERT}{place}" for uid, place in zip(rows["uid"], places, strict=True)],
            "response_text": [self._responses.responses[place] for place in places],
            "finish_reason": ["stop"] * len(places),
            SOURCE: [EXPERT] * len(places),
        }
        return rows.with_values(values)


def open_experts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: Jagged, stop_ids: Sequence[int], positions: int
) -> Experts | None:
    """Read the expert responses of `data.experts`; None without that section.

    Args:
        prompts: int64, the tokens of all training prompts.
        stop_ids: tokens that end a turn.
        positions: maximum sequence length of the model.
    """
    settings = config.data.experts
    if settings is None:
        return None
    data = config.data.model_copy(update={"train_files": settings.files, "val_split": None})
    responses = ExpertResponses(
        data,
        tokenizer,
        settings.response_key,
        max_tokens=min(positions, settings.max_tokens or positions),
        stop_ids=[*stop_ids, *config.rollout.sampling.stop_token_ids],
        overlong="filter",
    )
    return Experts(settings, responses, prompts, joins=settings.in_group)


def _key(ids: Tensor) -> tuple[int, ...]:
    return tuple(ids.tolist())


def _refuse_unlearnt(responses: SFTDataset) -> None:
    """Raise a DataError for a response with tokens that are not learnt, such as those of a user's message."""
    batch = responses.batch(range(len(responses)))
    for row, learnt in zip(responses.rows, batch["response_mask"].unbind(), strict=True):
        if not bool(learnt.all()):
            raise DataError(
                "an expert response is trained on as a whole, but a part of this one is not to be learnt",
                where=row.where,
                found="messages of a user or a tool, or messages with weight 0, inside the response",
                allowed="one turn of the assistant",
                fix="leave the row out, or train on it with megarl sft first",
            )


def _logps(responses: SFTDataset, key: str) -> Jagged:
    """Return the log-probs of the responses from column `key`: float32, one per token.

    Raises:
        DataError: a row's log-probs are not as many numbers up to 0 as its response has tokens.
    """
    values = []
    for row, ids in zip(responses.rows, responses.response_ids.unbind(), strict=True):
        given = row.column(key, "data.experts.logp_key")
        fit = isinstance(given, list) and all(
            isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) and x <= 0 for x in given
        )
        if not fit or len(given) != len(ids):
            raise DataError(
                "the log-probs of an expert response do not fit its tokens",
                where=row.where,
                found=f"{len(given)} entries" if fit else f"{str(given)[:60]}",
                allowed=f"{len(ids)} finite numbers up to 0, one per token of the response, its end token included",
                fix="tokenise the responses with the policy's tokenizer, or set data.experts.logp_key=null",
            )
        values.append([float(x) for x in given])
    return Jagged.from_list(values, dtype=torch.float32)
