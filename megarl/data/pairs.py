"""Rows that are preference pairs: a prompt, its better response and its worse one; and rows that are examples of KTO.
Without torch, as render.py.

A row is one of these, as text or as chat messages:

    {"prompt": ..., "chosen": ..., "rejected": ...}      responses may repeat the prompt's messages at their start
    {"chosen": ..., "rejected": ...}                     both begin with the prompt: what they have in common
    {"prompt": ..., "completion": ..., "label": true}    an example of KTO, which also takes a pair as two
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from megarl.config.data import DataConfig
from megarl.config.training import PreferenceConfig
from megarl.data.messages import ASSISTANT, read_messages
from megarl.data.rows import Row
from megarl.system.errors import DataError, count


def as_pairs(rows: Sequence[Row], config: DataConfig, settings: PreferenceConfig) -> list[Row]:
    """Return the rows with prompt, chosen and rejected response in columns of their own, without equal responses.

    Raises:
        DataError: a row lacks a column, its responses are of different forms, or have no beginning in common that
            could be the prompt; the row is named.
    """
    found = []
    for row in rows:
        chosen = row.column(settings.chosen_key, "preference.chosen_key")
        rejected = row.column(settings.rejected_key, "preference.rejected_key")
        for key, value in ((settings.chosen_key, chosen), (settings.rejected_key, rejected)):
            if not isinstance(value, str | list) or not value:
                raise _no_response(row, key, value)
        if isinstance(chosen, str) is not isinstance(rejected, str):
            raise DataError(
                "one response is text and the other one is messages",
                where=row.where,
                found=f"{settings.chosen_key}: {chosen!r:.60}, {settings.rejected_key}: {rejected!r:.60}",
                fix="give both the same form",
            )
        if settings.margin_key is not None:
            _check_margin(row, settings.margin_key)
        if chosen != rejected:
            found.append(_with_prompt(row, config, settings, chosen, rejected))
    return found


def differing_pairs(rows: Sequence[Row], config: DataConfig, settings: PreferenceConfig, split: str) -> list[Row]:
    """Return `as_pairs` of the rows of a split.

    Raises:
        DataError: as `as_pairs`, or the responses of every row are equal.
    """
    pairs = as_pairs(rows, config, settings)
    if rows and not pairs:
        raise DataError(
            "there is no pair: the two responses of every row are equal",
            where=f"data.{split}_files",
            found=count(len(rows), "row"),
            allowed="rows whose responses differ",
            fix=f"correct the columns {settings.chosen_key!r} and {settings.rejected_key!r}, or name others",
        )
    return pairs


def as_examples(rows: Sequence[Row], config: DataConfig, settings: PreferenceConfig) -> list[Row]:
    """Return the rows with prompt, completion and label in columns of their own; chosen responses of pairs come first.

    Raises:
        DataError: a row lacks a column, its label is neither true nor false, its completion is empty, or it is no pair
            (see `as_pairs`); the row is named.
    """
    alone, paired = list[Row](), list[Row]()
    for row in rows:
        is_pair = not row.has(settings.completion_key) and row.has(settings.chosen_key)
        (paired if is_pair else alone).append(row)
    for row in alone:
        row.column(config.prompt_key, "data.prompt_key")
        response = row.column(settings.completion_key, "preference.completion_key")
        if not isinstance(response, str | list) or not response:
            raise _no_response(row, settings.completion_key, response)
        label_of(row, settings)
    pairs = as_pairs(paired, config, settings)
    for key, label in ((settings.chosen_key, True), (settings.rejected_key, False)):
        for row in pairs:
            own = {settings.completion_key: row.column(key, ""), settings.label_key: label}
            alone.append(Row({**row, **own}, row.source, row.number, row.unit))
    return alone


#: What a label may be as text, in lower case: every column of a csv file is text.
_LABEL_TEXTS = {"true": True, "1": True, "false": False, "0": False}


def label_of(row: Row, settings: PreferenceConfig) -> bool:
    """Return whether the response of an example is desirable.

    Raises:
        DataError: its column says neither; the row is named.
    """
    key = settings.label_key
    label = row.column(key, "preference.label_key")
    if isinstance(label, str):
        label = _LABEL_TEXTS.get(label.strip().lower(), label)
    if label not in (True, False):  # also 1, 0, 1.0 and 0.0
        raise DataError(
            f"column {key!r} does not say whether the response is desirable",
            where=row.where,
            found=label,
            allowed="true or false, or 1 or 0",
            fix=row.way_out,
        )
    return bool(label)


def _no_response(row: Row, key: str, value: Any) -> DataError:
    return DataError(
        f"column {key!r} holds no response",
        where=row.where,
        found=value,
        allowed="text, or chat messages",
        fix=row.way_out,
    )


def _check_margin(row: Row, key: str) -> None:
    margin = row.column(key, "preference.margin_key")
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(
            f"column {key!r} holds no number", where=row.where, found=margin, allowed="a finite number", fix=row.way_out
        )


def _with_prompt(row: Row, config: DataConfig, settings: PreferenceConfig, chosen: Any, rejected: Any) -> Row:
    """Return the row with its prompt in a column: as it is, or taken from the beginning of both responses.

    Responses that are conversations tell the whole prompt; text beside them, as in UltraFeedback, repeats a part.
    """
    talks = isinstance(chosen, list)
    if row.has(config.prompt_key):
        prompt = row.column(config.prompt_key, "data.prompt_key")
        if not (talks and isinstance(prompt, str) and _begins_with_others(chosen, row, settings.chosen_key)):
            return row
    if talks:
        chosen = read_messages(chosen, row, settings.chosen_key)
        rejected = read_messages(rejected, row, settings.rejected_key)
    alike = (a == b for a, b in zip(chosen, rejected, strict=False))
    shared = sum(1 for _ in takewhile(bool, alike))
    if not talks and shared and chosen[shared - 1] == " ":  # a space belongs to the word after it, as in TRL
        shared -= 1
    if not shared or shared in (len(chosen), len(rejected)):
        raise DataError(
            "the two responses do not begin with a prompt that they have in common, and go on after it",
            where=row.where,
            found=f"{settings.chosen_key}: {chosen!r:.80}, {settings.rejected_key}: {rejected!r:.80}",
            allowed=f"a column {config.prompt_key!r}, or responses with a common beginning",
            fix="set data.prompt_key to the column of the prompt",
        )
    values = {
        config.prompt_key: chosen[:shared],
        settings.chosen_key: chosen[shared:],
        settings.rejected_key: rejected[shared:],
    }
    return Row({**row, **values}, row.source, row.number, row.unit)


def _begins_with_others(messages: list[Any], row: Row, column: str) -> bool:
    return read_messages(messages, row, column)[0]["role"] != ASSISTANT
