"""Supervised examples from rows of data: prompt, response and end token; only response tokens count in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from megarl.config.data import DataConfig
from megarl.data.announcement import NO_TOOLS, Announcement
from megarl.data.batch import Batch, Jagged
from megarl.data.continuation import continued
from megarl.data.conversations import Conversations, Turn
from megarl.data.end_tokens import is_special, turn_end
from megarl.data.messages import SFT_RESPONSE, Message, response_of
from megarl.data.prompts import PromptDataset, dropped, fingerprint, tokens_text
from megarl.data.render import Split, tokenize, uses_chat
from megarl.data.rows import Row
from megarl.system.errors import DataError, count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.run import RunConfig
    from megarl.data.image_prompts import ImagePrompts

Overlong = Literal["filter", "cut", "error"]


class Response(NamedTuple):
    """The tokens of a supervised example."""

    prompt: list[int]  # token ids before the assistant's first turn
    ids: list[int]  # token ids from the assistant's first turn to the last end token
    learnt: list[bool]  # for each token of `ids`, whether it counts in the loss


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
    """Read the supervised examples of a split: `train` to train on, `val` to validate.

    Args:
        positions: maximum sequence length of the model; None: no limit.
        stop_ids, tools, images: as in SFTDataset.
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
    """Prompts with responses to train on.

    Prompts have the same tokens as in RL. A response has the tokens that continue its prompt when the chat template
    writes the whole conversation. A response may be several messages; only the assistant's are trained on.

    Attributes:
        too_long: number of examples dropped because they exceed `max_tokens`.
        cut: number of examples whose response was cut because they exceed `max_tokens`.
    """

    limit_key: ClassVar[str] = "sft.max_tokens"  # the recipe key that limits an example's tokens, for error messages
    response_setting: ClassVar[str] = SFT_RESPONSE  # the recipe key of the column of responses, for error messages

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
        """Read, render and tokenise the prompts and responses.

        Args:
            max_tokens: maximum number of tokens per example, including prompt and end token. None: no limit.
            overlong: how to treat longer examples: `filter` drops them, `cut` drops the end of the response, `error`
                raises an error. None: as data.overlong.
            tools, images, rows: as in PromptDataset.
            stop_ids: tokens that end a turn, in addition to the tokenizer's end token. A response ends with the token
                that the chat template writes.
        """
        whole = response_key == config.prompt_key
        super().__init__(config, tokenizer, split, tools, whole=whole, answered=False, images=images, rows=rows)
        shown, moving, setting = config.image_key is not None, config.video_key is not None, self.response_setting
        talks = [
            response_of(row, config.prompt_key, response_key, images=shown, videos=moving, setting=setting)
            for row in self.rows
        ]
        examples = self._tokens(talks, tokenizer, _end(tokenizer, config, stop_ids), stop_ids)
        responses = ["".join(message["content"] for message in talk) for talk in talks]
        self.max_tokens = max_tokens
        prompts = [example.prompt for example in examples]
        ids, learnt = [example.ids for example in examples], [example.learnt for example in examples]
        self.cut = 0
        if overlong == "cut" and max_tokens is not None:
            self.cut = _cut_ends(ids, learnt, [max_tokens - len(prompt) for prompt in prompts])
        lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, ids, strict=True)]
        indices = within_tokens(max_tokens, lengths, self.rows, config, self.limit_key, overlong)
        self.too_long = len(ids) - len(indices)
        self.rows = [self.rows[i] for i in indices]
        self.texts = [self.texts[i] for i in indices]
        self.given = [self.given[i] for i in indices]
        self.answers = [self.answers[i] for i in indices]
        self.prompt_ids = Jagged.from_list([prompts[i] for i in indices], dtype=torch.int64)
        self.responses = [responses[i] for i in indices]
        self.response_ids = Jagged.from_list([ids[i] for i in indices], dtype=torch.int64)
        self._learnt = Jagged.from_list([learnt[i] for i in indices], dtype=torch.bool)
        self.fingerprint = fingerprint(self.response_ids.values, self.response_ids.offsets, self.fingerprint)

    def describe(self) -> str:
        """Return a log line with the number of examples, their tokens, and how many were dropped or cut."""
        lengths = self.prompt_ids.lengths + self.response_ids.lengths
        text = f"sft: {count(len(self), 'example')} of {tokens_text(lengths)}{self._template}"
        text += dropped(
            (self.overlong, f"prompts longer than {self.config.max_prompt_tokens}"),
            (self.too_long, f"longer than {self.max_tokens} tokens"),
        )
        cut = f"; {self.cut} cut to {self.max_tokens} tokens" if self.cut else ""
        return text + cut + self.notes()

    def batch(self, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Return the examples at `indices` as a batch: PromptDataset's fields, response_ids, response_mask (1 for the
        assistant's tokens, end tokens included) and the column response_text."""
        batch = super().batch(indices, epoch)
        places = torch.tensor(indices, dtype=torch.int64)
        responses = self.response_ids.select(places)
        batch.set("response_ids", responses)
        batch.set("response_mask", responses.like(self._learnt.select(places).values))
        batch.set("response_text", [self.responses[i] for i in indices])
        return batch

    def _tokens(
        self, talks: Sequence[list[Message]], tokenizer: PreTrainedTokenizerBase, end: int, stops: Sequence[int]
    ) -> list[Response]:
        """Tokenise each row's prompt and response.

        The prompt differs from the RL prompt if the template ends RL prompts with `<think>` but leaves it out of whole
        conversations.
        """
        # A template may end some turns with another token: Llama 3.1's does so for turns that call a tool.
        others = [] if self.chat is None else [token for token in stops if is_special(tokenizer, token)]
        ends = [str(tokenizer.decode([token])) for token in (end, int(tokenizer.eos_token_id), *others)]
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        writer = Conversations(self.chat, ends, special)
        conversations = [writer.turns(*row) for row in zip(self.texts, self.given, talks, self.rows, strict=True)]
        self._noted = (
            (writer.without_reasoning, "without reasoning where its prompt opens <think>"),
            (writer.shortened, "with reasoning that the chat template leaves out"),
        )
        prompts = [ids.tolist() for ids in self.prompt_ids.unbind()]
        known = dict(zip(self.texts, prompts, strict=True)) if self._images is None else {}
        responses = response_tokens(tokenizer, conversations, self.rows, end, known, special=self.chat is None)
        examples = []
        for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            text = conversations[number][0].before
            if text != self.texts[number]:
                images, self.texts[number] = self._images, text
                prompt = response.prompt if images is None else images.expanded(response.prompt, self.rows[number])
            examples.append(response._replace(prompt=prompt))
        return examples

    def notes(self) -> str:
        """Return the end of a log line: how many responses lack their reasoning or lose it, and the first such row."""
        return "".join(
            f"; {count(len(rows), 'response')} {note} ({rows[0].where})" for rows, note in self._noted if rows
        )


def response_tokens(
    tokenizer: Any,
    conversations: Sequence[Sequence[Turn]],
    rows: Sequence[Row],
    end: int,
    known: Mapping[str, list[int]],
    *,
    special: bool,
) -> list[Response]:
    """Tokenise conversations, given as the assistant's turns, each with the text before it.

    Args:
        rows: the row of each conversation, for error messages.
        end: the token that is added after a turn without an end token.
        known: text -> token ids for texts that are tokenised already, such as most prompts.
        special: whether the tokenizer adds its begin token, because no chat template writes it.
    """
    every = [(turn, row) for turns, row in zip(conversations, rows, strict=True) for turn in turns]
    new = {turn.before: row for turn, row in every if turn.before not in known}
    before = {
        **known,
        **dict(zip(new, tokenize(tokenizer, list(new), list(new.values()), special=special), strict=True)),
    }
    texts, of_turns = [turn.before + turn.text for turn, _ in every], [row for _, row in every]
    whole = tokenize(tokenizer, texts, of_turns, special=special)
    parts = iter([(before[turn.before], tokens) for (turn, _), tokens in zip(every, whole, strict=True)])
    return [_response(tokenizer, [(turn, *next(parts)) for turn in turns], end) for turns in conversations]


def _response(tokenizer: Any, turns: Sequence[tuple[Turn, list[int], list[int]]], end: int) -> Response:
    """Join the turns of a conversation to token ids, each with whether it is learnt.

    Args:
        turns: a turn, the tokens of the text before it, and the tokens of that text with the turn.
        end: the token that ends turns.
    """
    ids, learnt = list[int](), list[bool]()
    for number, (turn, before, whole) in enumerate(turns):
        between = before[1:] if number else []  # `before` starts with the previous turn's end token, which `ids` has
        tokens = [*continued(tokenizer, before, whole, turn.text), *([] if turn.ended else [end])]
        ids += [*between, *tokens]
        learnt += [False] * len(between) + [turn.learnt] * len(tokens)
    return Response(turns[0][1], ids, learnt)


def _cut_ends(ids: list[list[int]], learnt: list[list[bool]], rooms: Sequence[int]) -> int:
    """Cut each response in place to at most `rooms[i]` tokens, the room that prompt i leaves; return how many were cut.

    A response that would lose all its trained tokens is not cut; its example is dropped later as too long.
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
    """Return the indices of the examples or pairs of at most `limit` tokens (None: no limit).

    Raise DataError if none is left, or if one is longer and `overlong` is `error`.

    Args:
        lengths: tokens of each example.
        key: the recipe key that sets the limit, for the message.
        overlong: as in SFTDataset.
    """
    fitting = [i for i, length in enumerate(lengths) if limit is None or length <= limit]
    if fitting and (len(fitting) == len(lengths) or (overlong or config.overlong) != "error"):
        return fitting
    first = next(i for i, length in enumerate(lengths) if limit is not None and length > limit)
    raise DataError(
        f"prompt and response are too long (in {len(lengths) - len(fitting)} of {len(lengths)} rows)",
        where=rows[first].where,
        found=f"{lengths[first]} tokens",
        allowed=f"{limit} tokens (the model's max_position_embeddings, or {key})",
        fix=f"set {'data.overlong' if overlong is None else 'sft.overlong'}: filter"
        if fitting
        else f"shorten the rows, raise {key}, or train a model that takes more tokens",
    )


def _end(tokenizer: PreTrainedTokenizerBase, config: DataConfig, stops: Sequence[int]) -> int:
    """Return the id of the token that ends a response.

    It is the token that the chat template writes after a turn if that is special or in `stops`, else the tokenizer's
    end token.
    """
    if not uses_chat(config, bool(tokenizer.chat_template)):
        return int(tokenizer.eos_token_id)
    turn, text = turn_end(tokenizer, config)
    if turn is None and text is not None:
        first = tokenizer(text.lstrip(), add_special_tokens=False)["input_ids"][:1]
        turn = first[0] if first and first[0] in stops else None
    return int(tokenizer.eos_token_id) if turn is None else turn
