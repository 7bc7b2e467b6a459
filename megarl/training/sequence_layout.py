"""How samples become sequences of the model: as text, or as policy calls of a robot.

A sequence layout turns samples into rows, one per sequence, and packs rows end to end. It returns which columns predict
the response tokens, and the model's other inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.data.batch import Batch, Jagged
from megarl.data.fields import ROUTES
from megarl.data.prefix_tree import SHORTEST, PrefixTree, prefix_tree
from megarl.data.routes import RouteError, RouteForm

if TYPE_CHECKING:
    from megarl.training.heads import Head


@dataclass(frozen=True)
class PackedRows:
    """Sequences (rows) packed end to end: T token positions (columns), N response tokens."""

    lengths: list[int]  # number of columns of each row
    tokens: Tensor  # int64 [T], the input tokens
    sources: Tensor  # int64 [N], the column that predicts each of the N response tokens
    targets: Tensor  # int64 [N], the response tokens to predict
    open_from: Sequence[int] = ()  # column of each row from which tokens attend to the whole row; empty: never
    seen: Any = None  # image inputs, with their places among the T columns
    # int64 [1, T], or [3, T] for models whose positions have three numbers; None: the index in the row
    positions: Tensor | None = None
    # the tree of the rows' prefixes if they share some: `lengths` then has the columns of each node of the tree
    prefixes: PrefixTree | None = None
    # routes to replay: their form (`megarl.data.routes`), and uint8 or int16 [T, layers * chosen]; None: no replay
    routes: tuple[RouteForm, Tensor] | None = None
    following: Tensor | None = None  # int64 [T], the next token of the row, 0 after its last; None: not needed
    keeps_keys: bool = False  # whether a head (an action expert) reads the attention keys and values of the layers


class SequenceLayout(Protocol):
    """Turns samples into packed rows.

    Attributes:
        columns: first and one past the last token over which log-probs are computed; None: the whole vocabulary.
    """

    @property
    def columns(self) -> tuple[int, int] | None:
        """First and one past the last token id over which log-probs are computed; None: the whole vocabulary."""

    def rows(self, samples: Batch) -> Batch:
        """Return one row per input sequence of the model; a sample may have several. Response tokens stay in order."""

    def sample_columns(self, samples: Batch) -> list[list[int]]:
        """Return, for each sample, the number of tokens (with prompt) of each of its model inputs, to count FLOPs."""

    def lengths(self, batch: Batch) -> Tensor:
        """Return the number of columns of each row, int64 [B]."""

    def patches(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Return {digest: number of patches} of each row's images, which count towards the size of a micro-batch.

        Empty if samples have no images, or if `lengths` already counts each patch as a column.
        """

    def prompts(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Return {number of the prompt: its columns} for each row, so that a prompt shared by rows counts once in a
        micro-batch; empty if rows do not share prompts.
        """

    def pack(self, rows: Batch) -> PackedRows:
        """Pack one or more rows end to end into a stream."""

    def filler(self) -> PackedRows:
        """Return a row without effect that uses every parameter, for a rank without samples that must take part."""

    def head(self, *, entropy: bool) -> Head | None:
        """Return the head that computes log-probs (and the entropy) of response tokens that are not in the vocabulary,
        such as continuous actions; None: all response tokens are in the vocabulary.
        """


@dataclass(frozen=True)
class TextLayout:
    """The layout of text: P prompt and R response tokens become P + R - 1 columns (the last token is not an input).

    Column P - 1 + j predicts response token j.

    Attributes:
        routes: form of the routes that the model replays; None: its routers choose.
        share: whether rows that are packed together share the columns of common prefixes (`megarl.data.prefix_tree`).
        drafts: whether a draft head needs the token after each token.
    """

    routes: RouteForm | None = field(default=None, kw_only=True)
    share: bool = field(default=False, kw_only=True)
    drafts: bool = field(default=False, kw_only=True)
    columns: ClassVar[None] = None

    def rows(self, samples: Batch) -> Batch:
        """Return the samples unchanged, because each sample is one sequence."""
        return samples

    def sample_columns(self, samples: Batch) -> list[list[int]]:
        """Return [tokens of prompt and response] of each sample, because each sample is one sequence."""
        lengths = samples["prompt_ids"].lengths + samples["response_ids"].lengths
        return [[length] for length in lengths.tolist()]

    def lengths(self, batch: Batch) -> Tensor:
        """Return the number of columns of each row, P + R - 1, int64 [B]. Raise ValueError if a prompt or response is
        empty."""
        prompts, responses = batch["prompt_ids"].lengths.cpu(), batch["response_ids"].lengths.cpu()
        if len(batch) and min(int(prompts.min()), int(responses.min())) < 1:
            bad = int(((prompts < 1) | (responses < 1)).nonzero()[0])
            raise ValueError(
                f"a sample needs prompt and response tokens, but sample {bad} has "
                f"{int(prompts[bad])} and {int(responses[bad])}"
            )
        return prompts + responses - 1

    def patches(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Return an empty sequence, because text has no images."""
        return ()

    def prompts(self, batch: Batch) -> Sequence[Mapping[int, int]]:
        """Implement `SequenceLayout.prompts`. Prompts are equal if their tokens are, and the routes to replay for them;
        those with fewer than `SHORTEST` tokens are not shared."""
        if not self.share:
            return ()
        rows = [prompt.numpy() for prompt in batch["prompt_ids"].to("cpu").unbind()]
        keys = [row.tobytes() for row in rows]
        if self.routes is not None and ROUTES in batch:
            routes = [each[: len(row)] for each, row in zip(batch[ROUTES].to("cpu").unbind(), rows, strict=True)]
            keys = [
                key + hashlib.sha256(each.numpy().tobytes()).digest() for key, each in zip(keys, routes, strict=True)
            ]
        numbers = dict[bytes, int]()
        return [
            {numbers.setdefault(key, len(numbers)): len(row)} if len(row) >= SHORTEST else {}
            for key, row in zip(keys, rows, strict=True)
        ]

    def pack(self, rows: Batch) -> PackedRows:
        """Pack prompts and responses end to end, with the routes to replay if the rows have them."""
        packed = self._pack(rows["prompt_ids"].to("cpu"), rows["response_ids"].to("cpu"))
        packed = self._with_following(self._with_routes(packed, rows))
        return share_prefixes(packed) if self.share else packed

    def _with_routes(self, packed: PackedRows, rows: Batch) -> PackedRows:
        if self.routes is None or ROUTES not in rows:  # examples of supervised training have none
            return packed
        routes, lengths = rows[ROUTES].to("cpu"), packed.lengths
        if routes.lengths.tolist() != lengths or routes.values.shape[1] != self.routes.width:
            raise RouteError(
                f"routes of {routes.lengths.tolist()[:8]} tokens, {routes.values.shape[1]} numbers each, do not belong "
                f"to samples of {lengths[:8]} tokens of a model with {self.routes.width} numbers\n"
                f"  where:   field {ROUTES!r}\n  fix:     set rollout.replay_routes=false"
            )
        return replace(packed, routes=(self.routes, routes.values))

    def filler(self) -> PackedRows:
        """Return a prompt of one token with a response of one token."""
        token = Jagged.from_list([[0]], dtype=torch.int64)
        routes = None if self.routes is None else (self.routes, self.routes.empty(1))
        return self._with_following(replace(self._pack(token, token), routes=routes))

    def head(self, *, entropy: bool) -> None:
        """Return None, because response tokens are in the vocabulary."""

    def _with_following(self, packed: PackedRows) -> PackedRows:
        if not self.drafts:
            return packed
        following = packed.tokens.roll(-1)
        following[torch.tensor(packed.lengths).cumsum(0) - 1] = 0
        return replace(packed, following=following)

    @staticmethod
    def _pack(prompts: Jagged, responses: Jagged) -> PackedRows:
        tokens, sources, end = [], [], 0
        for prompt, response in zip(prompts.unbind(), responses.unbind(), strict=True):
            tokens += [prompt, response[:-1]]
            end += len(prompt) + len(response) - 1
            sources.append(torch.arange(end - len(response), end))
        lengths = (prompts.lengths + responses.lengths - 1).tolist()
        return PackedRows(lengths, torch.cat(tokens), torch.cat(sources), responses.values)


def share_prefixes(packed: PackedRows) -> PackedRows:
    """Return rows of text in which each prefix that several rows share appears once; unchanged if no rows share one.

    Rows share a prefix if its tokens are equal, and so are the experts to replay for them.
    """
    assert packed.following is None, "a shared prefix has several next tokens"
    inputs = packed.tokens.numpy() if packed.routes is None else _numbered(packed.tokens, packed.routes[1])
    tree = prefix_tree(np.split(inputs, np.cumsum(packed.lengths)[:-1]))
    if sum(tree.lengths) == len(inputs):
        return packed
    columns = tree.columns()
    moved = torch.from_numpy(np.concatenate(columns))  # for each column of `packed` its column in the tree's stream
    # for each column of the tree's stream one of the equal columns of `packed`
    index = torch.empty(sum(tree.lengths), dtype=torch.int64)
    index[moved] = torch.arange(len(inputs))
    return replace(
        packed,
        lengths=tree.lengths,
        tokens=packed.tokens[index],
        sources=moved[packed.sources],
        positions=torch.from_numpy(tree.positions())[None],
        prefixes=tree,
        routes=None if packed.routes is None else (packed.routes[0], packed.routes[1][index]),
    )


def _numbered(tokens: Tensor, routes: Tensor) -> np.ndarray:
    """Return a number for each token, int64 [T]; numbers are equal where token and routes are."""
    whole = np.concatenate([tokens.numpy()[:, None].view(np.uint8), routes.contiguous().numpy().view(np.uint8)], 1)
    content, width, numbers = whole.tobytes(), whole.shape[1], dict[bytes, int]()
    rows = (content[start : start + width] for start in range(0, len(content), width))
    return np.fromiter((numbers.setdefault(row, len(numbers)) for row in rows), np.int64, len(tokens))


TEXT = TextLayout()
