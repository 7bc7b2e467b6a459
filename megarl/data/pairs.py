"""Read rows of preference data: pairs of a better and a worse response, and labelled examples for KTO. Needs no torch.

A row has one of these forms; values are text or chat messages:

    {"prompt": ..., "chosen": ..., "rejected": ...}      responses may repeat the prompt's messages first
    {"chosen": ..., "rejected": ...}                     the prompt is their common beginning
    {"prompt": ..., "completion": ..., "label": true}    a KTO example; a pair counts as two examples
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
    """Return one row per preference pair, with prompt, chosen and rejected response in separate columns.

    Rows with two equal responses are dropped.
    """
    pairs = []
    for row in rows:
        chosen = row.column(settings.chosen_key, "preference.chosen_key")
        rejected = row.column(settings.rejected_key, "preference.rejected_key")
        for key, value in ((settings.chosen_key, chosen), (settings.rejected_key, rejected)):
            if not isinstance(value, str | list) or not value:
                raise _no_response(row, key, value)
        if isinstance(chosen, str) is not isinstance(rejected, str):
            raise DataError(
                "one response is text and the other a list of messages",
                where=row.where,
                found=f"{settings.chosen_key}: {chosen!r:.60}, {settings.rejected_key}: {rejected!r:.60}",
                fix="write both as text, or both as chat messages",
            )
        margin_key = settings.margin_key
        margin = 0.0 if margin_key is None else row.column(margin_key, "preference.margin_key")
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise DataError(
                f"column {margin_key!r} is not a number",
                where=row.where,
                found=margin,
                allowed="a finite number",
                fix=row.column_fix,
            )
        if chosen != rejected:
            pairs.append(_with_prompt(row, config, settings, chosen, rejected))
    return pairs


def differing_pairs(rows: Sequence[Row], config: DataConfig, settings: PreferenceConfig, split: str) -> list[Row]:
    """Return the preference pairs of a split (see `as_pairs`), and raise an error if none is left."""
    pairs = as_pairs(rows, config, settings)
    if rows and not pairs:
        raise DataError(
            "no preference pair is left: the two responses are equal in every row",
            where=f"data.{split}_files",
            found=count(len(rows), "row"),
            allowed="rows whose responses differ",
            fix=f"correct the columns {settings.chosen_key!r} and {settings.rejected_key!r}, or name others",
        )
    return pairs


def as_examples(rows: Sequence[Row], config: DataConfig, settings: PreferenceConfig) -> list[Row]:
    """Return KTO examples: one row per response, with its prompt, completion and label.

    A pair becomes two examples. Labelled rows come first, then all chosen responses, then all rejected ones.
    """
    examples, paired = list[Row](), list[Row]()
    for row in rows:
        is_pair = not row.has(settings.completion_key) and row.has(settings.chosen_key)
        (paired if is_pair else examples).append(row)
    for row in examples:
        row.column(config.prompt_key, "data.prompt_key")
        response = row.column(settings.completion_key, "preference.completion_key")
        if not isinstance(response, str | list) or not response:
            raise _no_response(row, settings.completion_key, response)
        label_of(row, settings)
    pairs = as_pairs(paired, config, settings)
    for key, label in ((settings.chosen_key, True), (settings.rejected_key, False)):
        for row in pairs:
            values = {settings.completion_key: row.column(key, ""), settings.label_key: label}
            examples.append(Row({**row, **values}, row.source, row.number, row.unit))
    return examples


#: Labels as text, in lower case: every column of a csv file is text.
_LABEL_TEXTS = {"true": True, "1": True, "false": False, "0": False}


def label_of(row: Row, settings: PreferenceConfig) -> bool:
    """Return whether a KTO example's response is desirable, from the column `preference.label_key`."""
    key = settings.label_key
    label = row.column(key, "preference.label_key")
    if isinstance(label, str):
        label = _LABEL_TEXTS.get(label.strip().lower(), label)
    if label not in (True, False):  # 1, 0, 1.0 and 0.0 are also accepted, because they equal True or False
        raise DataError(
            f"column {key!r} is not a label of true or false",
            where=row.where,
            found=label,
            allowed="true or false, or 1 or 0",
            fix=row.column_fix,
        )
    return bool(label)


def _no_response(row: Row, key: str, value: Any) -> DataError:
    return DataError(
        f"column {key!r} has no response",
        where=row.where,
        found="null" if value is None else value,
        allowed="text, or chat messages, not empty",
        fix=row.column_fix,
    )


def _with_prompt(row: Row, config: DataConfig, settings: PreferenceConfig, chosen: Any, rejected: Any) -> Row:
    """Return the row with a prompt column; if it has none, the common beginning of both responses is the prompt.

    Responses that are conversations contain the whole prompt. A text column of the prompt beside them, as in
    UltraFeedback, repeats only a part of it and is replaced.
    """
    talks = isinstance(chosen, list)
    if row.has(config.prompt_key):
        prompt = row.column(config.prompt_key, "data.prompt_key")
        repeats = talks and isinstance(prompt, str)
        if not repeats or read_messages(chosen, row, settings.chosen_key)[0]["role"] == ASSISTANT:
            return row
    if talks:
        chosen = read_messages(chosen, row, settings.chosen_key)
        rejected = read_messages(rejected, row, settings.rejected_key)
    alike = (a == b for a, b in zip(chosen, rejected, strict=False))
    shared = sum(1 for _ in takewhile(bool, alike))
    # as in TRL, a space at the end of the common beginning belongs to the responses
    if not talks and shared and chosen[shared - 1] == " ":
        shared -= 1
    if not shared or shared in (len(chosen), len(rejected)):
        repeated = row.has(config.prompt_key)
        raise DataError(
            ("the conversations do not show where the prompt ends" if repeated else "the row has no prompt")
            + ": the two responses have no common beginning, or nothing follows it",
            where=row.where,
            found=f"{settings.chosen_key}: {chosen!r:.80}, {settings.rejected_key}: {rejected!r:.80}",
            allowed="conversations that begin with the same messages of the prompt, or with the assistant's"
            if repeated
            else f"a column {config.prompt_key!r}, or responses with a common beginning",
            fix="correct or remove the row" if repeated else "set data.prompt_key to the column of the prompt",
        )
    values = {
        config.prompt_key: chosen[:shared],
        settings.chosen_key: chosen[shared:],
        settings.rejected_key: rejected[shared:],
    }
    return Row({**row, **values}, row.source, row.number, row.unit)
