"""Supervised examples from the same rows: prompt, response and end token, with the loss on the response only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megarl.config.data import DataConfig
from megarl.data.batch import Batch, Jagged
from megarl.data.end_tokens import turn_end
from megarl.data.prompts import PromptDataset, tokens_text
from megarl.data.render import Split, response_messages, tokenize, uses_chat
from megarl.data.rows import Row
from megarl.data.templates import chat_renderer
from megarl.data.turns import Turns
from megarl.errors import DataError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class SFTDataset(PromptDataset):
    """Prompts with the response to learn.

    Prompt and response are tokenised apart, as they are in RL, so that a model meets the same prompt tokens in both. A
    response may be messages: what others than the assistant say stands between its turns as in RL, and is not learnt.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        response_key: str = "answer",
        split: Split = "train",
        max_tokens: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Read, render and tokenise both columns; see PromptDataset for what is refused.

        Args:
            max_tokens: what the model takes; longer examples (prompt, response and end token) are dropped and counted
                in `too_long`, or refused when data.overlong is `error`. None: no limit.
            tools: as in PromptDataset.
            stop_ids: tokens that end a turn, in addition to the tokenizer's. Of these a response of several turns
                learns the one that the chat template writes; one of a single turn does, too, where that is special.

        Raises:
            DataError: the response column is missing, or holds neither text nor an integer; the row is named. An
                example is longer than `max_tokens`, or all are.
        """
        super().__init__(config, tokenizer, split, tools)
        talks = [
            response_messages(row.column(response_key, "sft.response_key"), response_key, row) for row in self.rows
        ]
        if all(len(talk) == 1 for talk in talks):
            ids = tokenize(tokenizer, [talk[0]["content"] for talk in talks], self.rows, special=False)
            end = _end(tokenizer, config)
            ids = [[*tokens, end] for tokens in ids]
            learnt = [[True] * len(tokens) for tokens in ids]
        else:
            stops = [tokenizer.eos_token_id, *stop_ids]
            ids, learnt = _of_turns(talks, self.rows, tokenizer, config, tools, stops)
        responses = ["".join(message["content"] for message in talk) for talk in talks]
        self.max_tokens = max_tokens
        kept = list(range(len(ids))) if max_tokens is None else self._that_fit(ids, max_tokens)
        self.too_long = len(ids) - len(kept)
        self.rows = [self.rows[i] for i in kept]
        self.texts = [self.texts[i] for i in kept]
        self.answers = [self.answers[i] for i in kept]
        self.prompt_ids = self.prompt_ids.select(torch.tensor(kept, dtype=torch.int64))
        self.responses = [responses[i] for i in kept]
        self.response_ids = Jagged.from_list([ids[i] for i in kept], dtype=torch.int64)
        self._learnt = Jagged.from_list([learnt[i] for i in kept], dtype=torch.bool)
        digest = hashlib.blake2b(self.response_ids.values.numpy().tobytes(), digest_size=16)
        digest.update(self.response_ids.offsets.numpy().tobytes() + self.fingerprint.encode())
        self.fingerprint = digest.hexdigest()

    def describe(self) -> str:
        """One line for the log: how many examples, how long, how many dropped."""
        lengths = self.prompt_ids.lengths + self.response_ids.lengths
        parts = [f"sft: {count(len(self), 'example')} of {tokens_text(lengths)}{self._template}"]
        if self.overlong:
            parts.append(f"{self.overlong} prompts longer than {self.config.max_prompt_tokens} dropped")
        if self.too_long:
            parts.append(f"{self.too_long} longer than the model's {self.max_tokens} positions dropped")
        return "; ".join(parts)

    def _that_fit(self, responses: list[list[int]], limit: int) -> list[int]:
        """Indices of the examples of at most `limit` tokens."""
        prompts = self.prompt_ids.lengths.tolist()
        lengths = [prompt + len(response) for prompt, response in zip(prompts, responses, strict=True)]
        kept = [i for i, length in enumerate(lengths) if length <= limit]
        if kept and (len(kept) == len(lengths) or self.config.overlong == "filter"):
            return kept
        first = next(i for i, length in enumerate(lengths) if length > limit)
        raise DataError(
            f"prompt and response are longer than the model takes ({len(lengths) - len(kept)} of {len(lengths)} such "
            "examples)",
            where=self.rows[first].where,
            found=f"{lengths[first]} tokens",
            allowed=f"{limit} tokens (max_position_embeddings)",
            fix="set data.overlong: filter" if kept else "shorten the examples, or train a model that takes more",
        )

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Examples at `indices`: PromptDataset's batch plus response_ids, response_mask (1 where the assistant speaks,
        end tokens included), and the column response_text."""
        batch = super().batch(indices, epoch)
        places = torch.tensor(indices, dtype=torch.int64)
        responses = self.response_ids.select(places)
        batch.set("response_ids", responses)
        batch.set("response_mask", responses.like(self._learnt.select(places).values))
        batch.set("response_text", [self.responses[i] for i in indices])
        return batch


def _end(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> int:
    """The token that ends a response of one turn: what the chat template in use writes there, or the tokenizer's."""
    turn = turn_end(tokenizer, config)[0] if uses_chat(config, bool(tokenizer.chat_template)) else None
    return int(tokenizer.eos_token_id) if turn is None else turn


def _of_turns(
    talks: Sequence[list[dict[str, str]]],
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    tools: Sequence[dict[str, Any]],
    stops: Sequence[int],
) -> tuple[list[list[int]], list[list[bool]]]:
    """Tokens of responses of several turns, and which of them the assistant says."""
    chats = uses_chat(config, bool(tokenizer.chat_template))
    render = chat_renderer(tokenizer, config.override_chat_template, tools) if chats else None
    ids, learnt = list[list[int]](), list[list[bool]]()
    for talk, row in zip(talks, rows, strict=True):
        turns = Turns(tokenizer, None if render is None else partial(_render, render, row), stops)
        tokens: list[int] = []
        said: list[bool] = []
        answers: list[dict[str, Any]] = []
        for message in talk:
            if message["role"] != "assistant":
                answers.append(message)
                continue
            between = turns.following(answers, ended=True) if answers else []
            [own] = tokenize(tokenizer, [message["content"]], [row], special=False)
            tokens += [*between, *own, turns.end]
            said += [False] * len(between) + [True] * (len(own) + 1)
            answers = []
        ids.append(tokens)
        learnt.append(said)
    return ids, learnt


def _render(render: Callable[..., str], row: Row, messages: list[dict[str, Any]]) -> str:
    return render(messages, row)
