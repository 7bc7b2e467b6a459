"""Supervised examples from the same rows: prompt, response and end token, with the loss on the response only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from megarl.config.data import DataConfig
from megarl.data.announcement import NO_TOOLS, Announcement
from megarl.data.batch import Batch, Jagged
from megarl.data.end_tokens import turn_end
from megarl.data.messages import (
    ASSISTANT,
    Message,
    extra_keys,
    is_learnt,
    response_of,
    without_weight,
)
from megarl.data.prompts import PromptDataset, dropped, fingerprint, tokens_text
from megarl.data.render import Split, tokenize, uses_chat
from megarl.data.rows import Row
from megarl.data.templates import ChatTemplate
from megarl.data.turns import Turns
from megarl.errors import DataError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.run import RunConfig
    from megarl.data.image_prompts import ImagePrompts

_THINK = "<think>"
Overlong = Literal["filter", "cut", "error"]


def open_examples(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
    split: Split = "train",
    *,
    stop_ids: Sequence[int],
    tools: Announcement = NO_TOOLS,
    images: ImagePrompts | None = None,
) -> SFTDataset:
    """Read the examples that a run learns from, or its held-out ones.

    Args:
        positions: the model's limit of tokens; None: none.
        stop_ids, tools, images: as in SFTDataset.

    Raises:
        DataError, ConfigError: as SFTDataset.
    """
    settings, data = config.sft, config.data
    if settings.train_files:
        data = data.model_copy(update={"train_files": settings.train_files})
    return SFTDataset(
        data,
        tokenizer,
        settings.response_key,
        split,
        settings.limit(positions),
        tools,
        [*stop_ids, *config.rollout.sampling.stop_token_ids],
        images,
        overlong=settings.overlong,
    )


class SFTDataset(PromptDataset):
    """The data set of prompts with the response to learn.

    Prompt and response are tokenised apart, as they are in RL, so that a model meets the same prompt tokens in both. A
    response may be messages: those of others than the assistant stand between its turns as in RL, and are not learnt.

    Attributes:
        limit_key: the key that limits an example's tokens below the model's limit.
        too_long: examples dropped because they exceed `max_tokens`.
        cut: examples that lost the end of their response for the same reason.
    """

    limit_key: ClassVar[str] = "sft.max_tokens"

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        response_key: str = "answer",
        split: Split = "train",
        max_tokens: int | None = None,
        tools: Announcement = NO_TOOLS,
        stop_ids: Sequence[int] = (),
        images: ImagePrompts | None = None,
        rows: Sequence[Row] | None = None,
        overlong: Overlong | None = None,
    ) -> None:
        """Read, render and tokenise both columns; see PromptDataset for what is refused.

        Args:
            max_tokens: of an example: prompt, response and end token. None: no limit.
            overlong: what becomes of longer examples: `filter` drops them, `cut` drops the end of the response, `error`
                refuses them. None: as data.overlong.
            tools: as in PromptDataset.
            images: as in PromptDataset.
            rows: as in PromptDataset.
            stop_ids: tokens that end a turn, in addition to the tokenizer's. Of these a response of several turns
                learns the one that the chat template writes; one of a single turn does, too, where that is special.

        Raises:
            DataError: the response column is missing, or holds neither text nor an integer; the row is named. An
                example is longer than `max_tokens`, or all are.
        """
        whole = response_key == config.prompt_key
        super().__init__(config, tokenizer, split, tools, whole=whole, answered=False, images=images, rows=rows)
        talks = [self._response(number, response_key) for number in range(len(self.rows))]
        if all(len(talk) == 1 and not extra_keys(talk[0]) for talk in talks):
            texts = [talk[0]["content"] for talk in talks]
            ids = tokenize(tokenizer, texts, self.rows, special=False)
            end = _end(tokenizer, config)
            ends = [tokenizer.eos_token_id, end]
            ids = [[*without_end(own, ends, row), end] for own, row in zip(ids, self.rows, strict=True)]
            learnt = [[True] * len(tokens) for tokens in ids]
        else:
            ids, learnt = self._of_turns(talks, tokenizer, [tokenizer.eos_token_id, *stop_ids])
        responses = ["".join(message["content"] for message in talk) for talk in talks]
        self.max_tokens = max_tokens
        prompts = self.prompt_ids.lengths.tolist()
        self.cut = 0
        if overlong == "cut" and max_tokens is not None:
            self.cut = _cut_ends(ids, learnt, [max_tokens - prompt for prompt in prompts])
        lengths = [prompt + len(own) for prompt, own in zip(prompts, ids, strict=True)]
        kept = within_tokens(max_tokens, lengths, self.rows, config, self.limit_key, overlong)
        self.too_long = len(ids) - len(kept)
        self.rows = [self.rows[i] for i in kept]
        self.texts = [self.texts[i] for i in kept]
        self.given = [self.given[i] for i in kept]
        self.answers = [self.answers[i] for i in kept]
        self.prompt_ids = self.prompt_ids.select(torch.tensor(kept, dtype=torch.int64))
        self.responses = [responses[i] for i in kept]
        self.response_ids = Jagged.from_list([ids[i] for i in kept], dtype=torch.int64)
        self._learnt = Jagged.from_list([learnt[i] for i in kept], dtype=torch.bool)
        self.fingerprint = fingerprint(self.response_ids.values, self.response_ids.offsets, self.fingerprint)

    def describe(self) -> str:
        """Return one line for the log: how many examples, how long, how many dropped."""
        lengths = self.prompt_ids.lengths + self.response_ids.lengths
        text = f"sft: {count(len(self), 'example')} of {tokens_text(lengths)}{self._template}"
        return (
            text
            + dropped(
                (self.overlong, f"prompts longer than {self.config.max_prompt_tokens}"),
                (self.too_long, f"longer than {self.max_tokens} tokens"),
            )
            + (f"; {self.cut} cut to {self.max_tokens} tokens" if self.cut else "")
        )

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the examples at `indices`: PromptDataset's batch plus response_ids, response_mask (1 where the
        assistant speaks, end tokens included), and the column response_text."""
        batch = super().batch(indices, epoch)
        places = torch.tensor(indices, dtype=torch.int64)
        responses = self.response_ids.select(places)
        batch.set("response_ids", responses)
        batch.set("response_mask", responses.like(self._learnt.select(places).values))
        batch.set("response_text", [self.responses[i] for i in indices])
        return batch

    def _response(self, number: int, key: str) -> list[Message]:
        """Return the messages to learn of one row, without what the prompt ends with already."""
        images = self.config.image_key is not None
        talk = response_of(self.rows[number], self.config.prompt_key, key, images=images)
        text = self.texts[number].rstrip()
        if text.endswith(_THINK) and talk[0]["content"].lstrip().startswith(_THINK):
            opened = talk[0]["content"].lstrip().removeprefix(_THINK)
            talk[0] = {**talk[0], "content": opened.lstrip("\n") if self.texts[number].endswith("\n") else opened}
        return talk

    def _of_turns(
        self, talks: Sequence[list[Message]], tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]
    ) -> tuple[list[list[int]], list[list[bool]]]:
        """Return the tokens of responses that are messages, and which of them the assistant says and learns."""
        ids, learnt = list[list[int]](), list[list[bool]]()
        for talk, row, given in zip(talks, self.rows, self.given, strict=True):
            chat = self.chat
            turns = Turns(tokenizer, None if chat is None else partial(_render, chat, row), stops)
            before = list(given) if isinstance(given, list) else []
            tokens: list[int] = []
            said: list[bool] = []
            answers: list[Message] = []
            for message in talk:
                if message["role"] != ASSISTANT:
                    answers.append(message)
                    continue
                between = turns.following(answers, ended=True) if answers else []
                before += answers
                text = message["content"]
                if keys := extra_keys(message):
                    text = _as_written(chat, before, message, keys, row)
                [own] = tokenize(tokenizer, [text], [row], special=False)
                own = without_end(own, [tokenizer.eos_token_id, turns.end], row)
                tokens += [*between, *own, turns.end]
                said += [False] * len(between) + [is_learnt(message)] * (len(own) + 1)
                before += without_weight([message])
                answers = []
            ids.append(tokens)
            learnt.append(said)
        return ids, learnt


def _cut_ends(ids: list[list[int]], learnt: list[list[bool]], rooms: Sequence[int]) -> int:
    """Cut each response in place to its room, in tokens, and return how many were cut.

    A response that would have nothing left to learn stays as it is: the whole example is too long.
    """
    cut = 0
    for number, room in enumerate(rooms):
        if len(ids[number]) > room > 0 and any(learnt[number][:room]):
            ids[number], learnt[number] = ids[number][:room], learnt[number][:room]
            cut += 1
    return cut


def within_tokens(
    limit: int | None,
    lengths: Sequence[int],
    rows: Sequence[Row],
    config: DataConfig,
    key: str,
    overlong: Overlong | None = None,
) -> list[int]:
    """Return the indices of the examples, or pairs, of at most `limit` tokens; None: of all.

    Args:
        key: limits them, too, beside the model.
        overlong: as in SFTDataset.

    Raises:
        DataError: a longer one with overlong: error, or all are.
    """
    kept = [i for i, length in enumerate(lengths) if limit is None or length <= limit]
    if kept and (len(kept) == len(lengths) or (overlong or config.overlong) != "error"):
        return kept
    first = next(i for i, length in enumerate(lengths) if limit is not None and length > limit)
    raise DataError(
        f"prompt and response are too long ({len(lengths) - len(kept)} of {len(lengths)} such rows)",
        where=rows[first].where,
        found=f"{lengths[first]} tokens",
        allowed=f"{limit} tokens (the model's max_position_embeddings, or {key})",
        fix=f"set {'data.overlong' if overlong is None else 'sft.overlong'}: filter"
        if kept
        else f"shorten the rows, or train a model that takes more, or raise {key}",
    )


def _end(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> int:
    """Return the token that ends a response of one turn: the one that the chat template in use writes there, or the
    tokenizer's."""
    turn = turn_end(tokenizer, config)[0] if uses_chat(config, bool(tokenizer.chat_template)) else None
    return int(tokenizer.eos_token_id) if turn is None else turn


def without_end(tokens: list[int], ends: Sequence[int], row: Row) -> list[int]:
    """Return a response's tokens without the end token that its text may have at the end, which is learnt once.

    Raises:
        DataError: the text has an end token before its end, where a model would stop.
    """
    own = tokens[:-1] if tokens[-1] in ends else tokens
    if not own:
        raise DataError("the response is nothing but an end token", where=row.where, fix="take the row out")
    inside = next((place for place, token in enumerate(own) if token in ends), None)
    if inside is not None:
        raise DataError(
            "the response holds an end token before its end, where the model stops",
            where=row.where,
            found=f"token {own[inside]}, the {inside + 1}th of {len(tokens)}",
            fix="write a conversation as messages, or take the end token out of the text",
        )
    return own


def _as_written(chat: ChatTemplate | None, before: list[Message], message: Message, keys: list[str], row: Row) -> str:
    """Return a message of the assistant that is more than its content, as the chat template writes it."""
    if chat is None:
        raise DataError(
            f"a message of the response holds {', '.join(map(repr, keys))}, and no chat template is in use",
            where=row.where,
            fix="set data.chat_template: true, or take it out of the row",
        )
    return chat.answer(before, without_weight([message])[0], row).rstrip()


def _render(render: Callable[..., str], row: Row, messages: list[Message]) -> str:
    return render(messages, row)
