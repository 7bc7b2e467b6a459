"""Checks of the rows of a run before its workers start.

Files are read, columns looked up, prompts rendered and tokenised: errors that a worker would raise half a minute later
are raised here, by the same functions. Only local files of moderate size are read, and tokens are counted for at most
two seconds. The workers check everything else (hub names, functions, large files, chat templates, tokenizers that only
transformers reads). If the text of a chat template is not available here, only the form of the messages is checked, and
that a template exists.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.checks.checklist import Checklist
from megarl.checks.files import trains_supervised
from megarl.checks.recipe import ConfigWarning
from megarl.checks.references import check_reference, signature_of
from megarl.config.base import as_config_error, raise_problems
from megarl.config.data import RewardConfig
from megarl.config.run import RunConfig, repeated_problem
from megarl.config.training import PreferenceConfig
from megarl.data.images import image_folder, image_size
from megarl.data.light_tokenizer import LightTokenizer, light_tokenizer
from megarl.data.messages import ASSISTANT, Message, response_of
from megarl.data.pairs import as_examples, as_pairs, differing_pairs
from megarl.data.render import Chat, Split, given_prompts, render_prompts, tokenize, uses_chat, within_limit
from megarl.data.row_images import check_marks, row_images
from megarl.data.rows import SAMPLE_KEYS, TRUTH, MissingColumnError, Row, hidden_columns, reference_of
from megarl.data.sources import SUFFIXES, TEXT, files_of_folder, is_saved_set, load_rows
from megarl.data.split import split_rows
from megarl.data.teachers import check_teachers
from megarl.data.templates import no_chat_template, prompt_formatter
from megarl.data.videos import check_video_marks, open_video, row_videos
from megarl.rewards import REWARDS
from megarl.rewards.parts import functions_of, located
from megarl.rewards.references import check_answers, explain_missing_columns, reads_answers, uses_reward
from megarl.rewards.registry import reward_settings
from megarl.rewards.signatures import OWN, columns_of, form_of
from megarl.system.errors import ConfigError, DataError, UserError, close_matches

_READ_BYTES = 32 << 20  # bytes per source; about a second of JSON
_TOKENIZE_S = 2.0
_AT_ONCE = 256
_SAMPLE = 1024  # number of chats whose tokens are counted at first; tokens that the chat template adds are left out


def check_rows(
    config: RunConfig, job: str, clock: Callable[[], float] = time.monotonic, checks: Checklist | None = None
) -> bool:
    """Read the rows that `job` (train, sft, eval, generate) needs; check columns, templates, tokens and lengths.

    Args:
        checks: records how many lengths were checked, and why the others were not.

    Returns:
        Whether there was a row that can be read here.

    Raises:
        DataError: a broken file, no rows, a missing column, a prompt without tokens, or no prompt that is short enough;
            the message names file and line.
        ConfigErrors: several of these problems; one per file and kind.
        ConfigError: a chat template is required but the tokenizer has none, or data.format_prompt cannot be parsed.
    """
    data = config.data
    if not config.task.writes_text:
        return False  # rows are the simulator's trials, which are known when it runs
    prompt_formatter(data.format_prompt)
    tokenizer = light_tokenizer(config.model)
    chats = uses_chat(data, tokenizer is None or tokenizer.has_chat_template)
    lengths = (checks or Checklist()).of("lengths")
    counter = None if data.image_key is not None else tokenizer
    if chats:
        if tokenizer is not None and not data.override_chat_template and not tokenizer.has_chat_template:
            raise no_chat_template()
        tokenizer = None  # a chat template may trim messages and drop parts (thinking), so text and length are unknown
    if data.image_key is not None:
        tokenizer = None  # tokens of images are not counted here, so no length is certain
    chat = _contents if chats else None
    deadline = clock() + _TOKENIZE_S
    rows = _Rows(config, tokenizer, counter, chat, lambda: clock() < deadline, lengths)
    if config.preference is not None and job == "train":
        read = rows.check_pairs("val", data.held_out, config.preference)
        read |= rows.check_pairs("train", data.train_files, config.preference)
        if config.sft.steps:
            read |= rows.check("train", config.sft.train_files or data.train_files, config.sft.response_key)
        rows.raise_all()
        rows.warn_of_repeats(job)
        return read
    read = rows.check("val", data.held_out, scored=job != "generate", needless=job == "sft")
    if job not in ("eval", "generate"):
        supervised, examples = trains_supervised(config, job), config.sft.train_files
        response = config.sft.response_key if supervised else None
        read |= rows.check("train", data.train_files, None if examples else response, scored=job == "train")
        if supervised and examples:
            read |= rows.check("train", examples, response)
    rows.raise_all()
    rows.warn_of_repeats(job)
    return read


@dataclass(frozen=True)
class _Rows:
    """Reads rows and records their problems within a time limit.

    Attributes:
        tokenizer: None if the exact text of prompts is unknown here.
        counter: counts the minimum number of tokens of a prompt; None if only the workers can load the tokenizer.
        sizes: number of training samples in sources that were read whole.
    """

    config: RunConfig
    tokenizer: LightTokenizer | None
    counter: LightTokenizer | None
    chat: Chat | None
    in_time: Callable[[], bool]
    lengths: Checklist
    problems: list[UserError] = field(default_factory=list)
    sizes: dict[tuple[str, ...], int] = field(default_factory=dict)

    def check(
        self,
        split: Split,
        sources: list[str],
        response: str | None = None,
        *,
        scored: bool = False,
        needless: bool = False,
    ) -> bool:
        """Record the problems of the rows of a split; return whether any row was read.

        Args:
            response: the column that supervised examples train on.
            scored: whether samples of these rows are scored.
            needless: whether the job can do without the split.
        """
        known: list[Row] = []
        before = len(self.problems)
        for source in filter(is_readable_here, sources):
            with self._recorded():
                rows = load_rows(source)
                known += rows
                with self._recorded(), explain_missing_columns(self.config) if scored else contextlib.nullcontext():
                    for row in rows:
                        row.column(self.config.data.prompt_key, "data.prompt_key")
                if split == "train":
                    with self._recorded():
                        check_teachers(self.config.teacher, rows)
                if scored:
                    with self._recorded(), explain_missing_columns(self.config):
                        self._check_answers(rows, needless)
                    with self._recorded():
                        self._check_parameters(rows)
                    with self._recorded():
                        self._check_names(rows)
        if scored:
            self._warn_of_names(known)
        if len(self.problems) == before:
            self._check_split(split, sources, known, len(known))
            with self._recorded():
                self._check_texts(split, sources, known, response)
        self.problems[:] = self.problems[before:] + self.problems[:before]  # problems of training rows come first
        return bool(known)

    def check_pairs(self, split: Split, sources: list[str], settings: PreferenceConfig) -> bool:
        """Record the problems of rows with preference pairs or labelled examples; return whether any row was read."""
        data, known = self.config.data, list[Row]()
        before, differing = len(self.problems), 0
        for source in filter(is_readable_here, sources):
            with self._recorded():
                rows = load_rows(source)
                known += rows
                if settings.labelled:
                    pairs, keys = as_examples(rows, data, settings), [settings.completion_key]
                else:
                    pairs, keys = as_pairs(rows, data, settings), [settings.chosen_key, settings.rejected_key]
                differing += len(pairs)
                given_prompts(data, pairs, chat=self.chat is not None)
                for row in pairs:
                    for key in keys:
                        self._response(row, key)
        if len(self.problems) == before:
            self._check_split(split, sources, known, differing)
            if known and not differing and all(map(is_readable_here, sources)):
                with self._recorded():
                    differing_pairs(known, data, settings, split)
        if known:
            self.lengths.skip(f"{_of(split)}: those of pairs are known when the run starts")
        return bool(known)

    def warn_of_repeats(self, job: str) -> None:
        """Warn of batches that would hold a sample twice, if the number of samples is known."""
        data, sft = self.config.data, self.config.sft
        batches = [("data.batch_size", data.batch_size, data.train_files)] if job == "train" else []
        if trains_supervised(self.config, job):
            batches.append(("sft.batch_size", sft.batch_size, sft.train_files or data.train_files))
        for key, size, sources in batches:
            samples = self.sizes.get(tuple(sources))
            if samples is not None and (problem := repeated_problem(key, size, samples)) is not None:
                self.lengths.of("batches").warn_of(problem)

    def raise_all(self) -> None:
        """Raise the recorded problems, if there are any."""
        each = {str(problem): problem for problem in self.problems}  # each problem once: a file may be named twice
        if len(each) == 1:
            raise next(iter(each.values()))
        raise_problems([as_config_error(problem) for problem in each.values()])

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.problems.append(error)

    def _check_split(self, split: Split, sources: list[str], known: list[Row], samples: int) -> None:
        """Record that `data.val_split` leaves a split without rows, if all of its files are known; note the size of the
        training data.

        Args:
            samples: number of samples if `data.val_split` is not set.
        """
        if not known or not all(map(is_readable_here, sources)):
            return
        if self.config.data.val_split is not None:
            samples = 0
            with self._recorded():
                samples = len(split_rows(known, self.config.data, split))
        if split == "train" and samples:
            self.sizes[tuple(sources)] = samples

    def _check_texts(self, split: Split, sources: list[str], known: list[Row], response: str | None) -> None:
        """Render and tokenise rows within the time limit."""
        data, whole = self.config.data, self.config.whole_conversations
        answers = [self._response(row, response) for row in known if response]
        ids: list[list[int]] = []
        contents: list[str] = []
        for start in range(0, len(known), _AT_ONCE):
            if not self.in_time():
                self.lengths.skip(f"{_of(split)}: only {start:,} of {len(known):,} prompts were looked at, for time")
                return
            rows = known[start : start + _AT_ONCE]
            mark = None if data.image_key is None else self._counted
            texts = render_prompts(data, self.chat, rows, whole=whole, mark=mark)
            contents += texts
            self._check_images(rows)
            if self.tokenizer is None:
                continue
            ids += tokenize(self.tokenizer, texts, rows, special=True)
            learnt = [i for i in range(start, len(ids)) if answers and len(ids[i]) <= data.max_prompt_tokens]
            tokenize(self.tokenizer, [answers[i] for i in learnt], [known[i] for i in learnt], special=False)
        if not known:
            return
        if not all(map(is_readable_here, sources)):
            self.lengths.skip(f"{_of(split)}: not all of its sources are read before the start")
        elif self.tokenizer is not None:
            within_limit(data, split, known, ids)
            self.lengths.ok(f"{_of(split)}: {len(ids):,} prompts of {_range(map(len, ids))} tokens")
        elif self.counter is not None:
            self._check_contents(split, known, contents, self.counter)
        else:
            why = "images become tokens" if data.image_key is not None else "the tokenizer is known"
            self.lengths.skip(f"{_of(split)}: {why} when the run starts")

    def _check_contents(self, split: Split, known: list[Row], contents: list[str], counter: LightTokenizer) -> None:
        """Refuse prompts that are too long even without a template. Only the longest contents are counted, and the
        shortest, which show whether any prompt fits."""
        data, limit = self.config.data, self.config.data.max_prompt_tokens
        order = sorted(range(len(contents)), key=lambda i: len(contents[i]))
        sample = order if len(order) <= _SAMPLE else [*order[: _SAMPLE // 2], *order[-_SAMPLE // 2 :]]
        lengths = self._count(contents, sample, counter)
        # When overlong prompts are filtered out, one prompt that fits is enough: if the sample has none, count all.
        if data.overlong != "error" and min(lengths.values()) > limit:
            lengths = self._count(contents, order, counter)
        longest = max(lengths, key=lengths.__getitem__)
        tokens = f"{_range(lengths.values())} tokens without what the chat template adds"
        if lengths[longest] > limit and (data.overlong == "error" or min(lengths.values()) > limit):
            single = data.overlong == "error"
            raise DataError(
                "the prompt is longer than the limit" if single else "all prompts are longer than the limit",
                where=known[longest].where if single else f"data.{split}_files",
                found=f"{lengths[longest]:,} tokens without what the chat template adds" if single else tokens,
                allowed=f"data.max_prompt_tokens: {limit}",
                fix="raise data.max_prompt_tokens" + (", or set data.overlong: filter" if single else ""),
            )
        number = f"{len(lengths):,} of " if len(lengths) < len(known) else ""
        self.lengths.ok(f"{_of(split)}: {number}{len(known):,} prompts of {tokens}")

    @staticmethod
    def _count(contents: Sequence[str], places: Sequence[int], counter: LightTokenizer) -> dict[int, int]:
        """Return the number of tokens of the texts at these places, by place."""
        ids = counter([contents[i] for i in places], add_special_tokens=False)["input_ids"]
        return dict(zip(places, map(len, ids), strict=True))

    def _counted(self, text: str, row: Row) -> str:
        """Check the number of `<image>` in the text of a prompt, and return the text unchanged."""
        data = self.config.data
        check_marks(text, len(self._images(row)), str(data.image_key), row)
        if data.video_key is not None:
            check_video_marks(text, len(row_videos(row, data.video_key)), data.video_key, row)
        return text

    def _images(self, row: Row) -> list[Any]:
        data = self.config.data
        return [] if data.image_key is None else row_images(row, data.image_key, data.prompt_key, data.limit_images)

    def _check_images(self, rows: Sequence[Row]) -> None:
        """Open the images of rows within the time limit, and check their format and size."""
        folder = image_folder(self.config.data)
        for row in rows:
            for value in self._images(row):
                if not self.in_time():
                    return
                image_size(value, folder, f"{row.where}: column {self.config.data.image_key!r}")
            data = self.config.data
            for value in [] if data.video_key is None or not self.in_time() else row_videos(row, data.video_key):
                open_video(value, folder, data.video_fps, data.max_frames, f"{row.where}: column {data.video_key!r}")

    def _check_answers(self, rows: Sequence[Row], needless: bool) -> None:
        key, reward = self.config.data.answer_key, self.config.reward
        if not reads_answers(self.config):
            return
        answers = []
        for row in rows:
            try:
                answers.append((row, reference_of(row, key, demanded=True)))
            except MissingColumnError as error:
                if not needless:
                    raise
                instead = (
                    f"; held-out rows are scored by {reward.described}: without answers set reward.name=format to "
                    "measure only their loss, or remove data.val_files"
                )
                raise DataError(
                    error.what, where=error.where, found=error.found, allowed=error.allowed, fix=f"{error.fix}{instead}"
                ) from error
        if not uses_reward(self.config):
            return
        rewards = functions_of(self.config)
        check_answers(rewards, key, answers)
        objects = [value for _, value in answers if isinstance(value, dict) and TRUTH in value]
        functions = [section.name for section in rewards.values() if section.name not in REWARDS.names()]
        if objects and functions:
            problem = f"the reference answers are objects, which {functions[0]} gets whole"
            _warn(
                problem,
                "data.answer_key",
                str(objects[0])[:100],
                f"set data.answer_key={key}.{TRUTH} to pass their content",
            )

    def _signatures(self) -> list[tuple[RewardConfig, str, inspect.Signature]]:
        """Return the users' reward functions with known parameters, as (section, its key, signature)."""
        signatures = []
        for place, reward in functions_of(self.config).items() if uses_reward(self.config) else ():
            if reward.name in REWARDS.names():
                continue
            with located(place):
                tree = check_reference(reward.name, REWARDS.key)
            signature = None if tree is None else signature_of(tree, reward.name)
            if signature is not None:
                signatures.append((reward, f"{place}.kwargs", signature))
        return signatures

    def _check_parameters(self, rows: Sequence[Row]) -> None:
        """Check that the columns that a user's reward function takes as parameters exist."""
        for reward, _, signature in self._signatures():
            wanted = columns_of(signature, reward.kwargs)
            for row in rows:
                for column in wanted:
                    if column not in row and column not in ("answer", "data_source"):
                        raise _no_parameter(row, column, reward.name, self.config.data.answer_key)

    def _check_names(self, rows: Sequence[Row]) -> None:
        """Check that samples will have the names that a built-in reward is set to read."""
        for place, reward in functions_of(self.config).items() if uses_reward(self.config) else ():
            spec = REWARDS.spec(reward.name) if reward.name in REWARDS.names() else None
            if spec is None or spec.names is None:
                continue
            with located(place):
                names = spec.names(reward_settings(reward.name, reward.kwargs, spec))
            sample_keys = SAMPLE_KEYS | {TRUTH, "data_source"}
            for row, name in (
                (row, name) for row in rows for name in sorted(names) if name not in sample_keys | row.keys()
            ):
                near = close_matches(name, [*sample_keys, *row])
                raise DataError(
                    f"samples have no field {name!r}, which the kwargs of the reward function {reward.name} name",
                    where=row.where,
                    found=f"{place}.kwargs: {name}",
                    allowed=f"columns here: {', '.join(row)}; fields of all samples: {', '.join(sorted(sample_keys))}",
                    fix=f"did you mean {near[0]!r}?" if near else None,
                )

    def _warn_of_names(self, rows: Sequence[Row]) -> None:
        """Warn of columns that a sample's own values hide, and of settings that may be intended as columns."""
        readers = []
        for reward, place, signature in self._signatures():
            if form_of(signature) is OWN:
                readers.append(reward.name)
                continue
            for key, value in reward.kwargs.items():
                if isinstance(value, str) and rows and rows[0].has(value):
                    problem = (
                        f"this is the name of a column, but {reward.name} gets the text itself, not the column's "
                        "content"
                    )
                    _warn(problem, f"{place}.{key}", value, _rename_fix(key, value, reward.name))
        if not readers:
            return
        config, hidden = self.config, dict[str, None]()
        for row in rows:
            hidden |= dict.fromkeys(hidden_columns(row, config.data.prompt_key, config.data.answer_key))
        if hidden:
            problem = (
                "samples have their own values under these names, so that a reward finds the columns only in "
                f"sample['row']: {', '.join(hidden)}"
            )
            _warn(problem, ", ".join(readers), None, "read them there, or rename the columns")

    def _response(self, row: Row, key: str) -> str:
        """Return the whole text of a response to train on."""
        data = self.config.data
        images, videos = data.image_key is not None, data.video_key is not None
        talk = response_of(row, data.prompt_key, key, images=images, videos=videos)
        return "".join(message["content"] for message in talk)


def _no_parameter(row: Row, column: str, name: str, answer_key: str | None) -> DataError:
    """Return the error for a row without a column that is a parameter of a user's reward function."""
    near = next(iter(close_matches(column, row)), None)
    holder = f"{near!r}" if near else "the column that holds it"
    answer = f"; for the reference answer, call the parameter answer: data.answer_key ({answer_key}) leads to it"
    return DataError(
        f"no column {column!r}",
        where=row.where,
        found=f"the parameter {column} of {name}",
        allowed=f"columns here: {', '.join(row)}",
        fix=f"rename the parameter to {holder}, or the column to {column!r}{answer}",
    )


def _rename_fix(key: str, value: str, name: str) -> str:
    """Describe the fix for a setting whose value is the name of a column."""
    top = value.partition(".")[0]
    inner = f", and read {value} in it" if top != value else ""
    return (
        f"call the parameter {key} of {name} {top}{inner}, and remove this; or, for the reference answer, call it "
        f"answer and set data.answer_key={value}"
    )


def _warn(what: str, where: str, found: object, fix: str) -> None:
    warnings.warn(str(ConfigError(what, where=where, found=found, fix=fix)), ConfigWarning, stacklevel=3)


def _contents(messages: Sequence[Message], row: Row) -> str:
    """Join the parts of the messages that every chat template keeps, from which the checks count a prompt's fewest
    tokens. A template may drop the assistant's messages and thoughts, and trim any content.
    """
    others = (message["content"] for message in messages if message["role"] != ASSISTANT)
    return "".join(content.rpartition("</think>")[2].strip() for content in others)


def _of(split: Split) -> str:
    return "training data" if split == "train" else "held-out data"


def _range(lengths: Iterable[int]) -> str:
    least, most = min(known := list(lengths)), max(known)
    return f"{least:,} to {most:,}" if least < most else f"{most:,}"


def is_readable_here(source: str) -> bool:
    """Return whether a source can be read quickly: a text in the recipe, or a small file or folder of files."""
    if source.startswith(TEXT):
        return True
    path = Path(source).expanduser()
    if path.is_file():
        return path.suffix.lower() in SUFFIXES and path.stat().st_size <= _READ_BYTES
    if not path.is_dir() or is_saved_set(path):
        return False
    files = files_of_folder(path)
    return bool(files) and sum(file.stat().st_size for file in files) <= _READ_BYTES
