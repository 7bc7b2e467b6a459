"""What can be known about the rows of a run before its workers start.

Files are read, columns are looked for, prompts are rendered and tokenised: what a worker would refuse half a minute
later is refused here, by the same functions. Only local files of moderate size are read, and tokens are counted for two
seconds at most. Everything else (hub names, functions, large files, chat templates, tokenizers that only transformers
reads) is checked by the workers. What a chat template writes is not known here, so that only the form of the messages
is looked at then, and whether there is a template.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.checks.files import trains_supervised
from megarl.checks.recipe import ConfigWarning
from megarl.checks.references import check_reference, signature_of
from megarl.config.run import RunConfig
from megarl.data.light_tokenizer import LightTokenizer, light_tokenizer
from megarl.data.messages import Message, response_of
from megarl.data.render import Chat, Split, render_prompts, tokenize, uses_chat, within_limit
from megarl.data.rows import Row, hidden_columns, reference_of
from megarl.data.sources import SUFFIXES, TEXT, load_rows
from megarl.data.templates import no_chat_template, prompt_formatter
from megarl.errors import ConfigError
from megarl.rewards import REWARDS
from megarl.rewards.references import check_answers, reads_answers, uses_reward
from megarl.rewards.signatures import OWN, columns_of, form_of

_READ_BYTES = 32 << 20  # per source; about a second of JSON
_TOKENIZE_S = 2.0
_AT_ONCE = 256


def check_rows(config: RunConfig, job: str, clock: Callable[[], float] = time.monotonic) -> bool:
    """Read the rows that `job` (train, sft, eval, generate) needs; look for columns, templates, tokens, lengths.

    Returns:
        Whether there was a row that can be read here.

    Raises:
        DataError: a broken file, no rows, a missing column, a prompt without tokens, or none that is short enough; file
            and line are named.
        ConfigError: a chat template is asked for, and the tokenizer has none; data.format_prompt does not parse.
    """
    data = config.data
    if config.robot is not None:
        return False  # the simulator tells them
    prompt_formatter(data.format_prompt)
    tokenizer = light_tokenizer(config.model)
    chats = uses_chat(data, tokenizer is None or tokenizer.has_chat_template)
    if chats:
        if tokenizer is not None and not data.override_chat_template and not tokenizer.has_chat_template:
            raise no_chat_template()
        tokenizer = None  # templates drop parts of a message (thinking) and trim it: no text is certain
    chat = _contents if chats else None
    deadline = clock() + _TOKENIZE_S
    rows = _Rows(config, tokenizer, chat, lambda: clock() < deadline)
    read = rows.check("val", data.val_files, scored=job != "generate")
    if job in ("eval", "generate"):
        return read
    supervised, examples = trains_supervised(config, job), config.sft.train_files
    response = config.sft.response_key if supervised else None
    read |= rows.check("train", data.train_files, None if examples else response, scored=job == "train")
    if supervised and examples:
        read |= rows.check("train", examples, response)
    return read


@dataclass(frozen=True)
class _Rows:
    """Looks at rows until the time is over. `tokenizer`: None where no text is certain."""

    config: RunConfig
    tokenizer: LightTokenizer | None
    chat: Chat | None
    in_time: Callable[[], bool]

    def check(self, split: Split, sources: list[str], response: str | None = None, *, scored: bool = False) -> bool:
        """The rows of a split, and whether any was read.

        Args:
            response: the column that supervised examples learn.
            scored: samples of them get a score.
        """
        data, whole = self.config.data, self.config.whole_conversations
        known = [row for source in sources if _is_readable_here(source) for row in load_rows(source)]
        for row in known:
            row.column(data.prompt_key, "data.prompt_key")
        if scored:
            self._check_answers(known)
            self._check_columns(known)
        answers = [self._response(row, response) for row in known if response]
        ids: list[list[int]] = []
        for start in range(0, len(known), _AT_ONCE):
            if not self.in_time():
                return True
            rows = known[start : start + _AT_ONCE]
            texts = render_prompts(data, self.chat, rows, whole=whole)
            if self.tokenizer is None:
                continue
            ids += tokenize(self.tokenizer, texts, rows, special=True)
            learnt = [i for i in range(start, len(ids)) if answers and len(ids[i]) <= data.max_prompt_tokens]
            tokenize(self.tokenizer, [answers[i] for i in learnt], [known[i] for i in learnt], special=False)
        if len(ids) == len(known) and all(_is_readable_here(source) for source in sources) and known:
            within_limit(data, split, known, ids)
        return bool(known)

    def _check_answers(self, rows: Sequence[Row]) -> None:
        key = self.config.data.answer_key
        if not reads_answers(self.config):
            return
        answers = [(row, reference_of(row, key, demanded=True)) for row in rows]
        if uses_reward(self.config):
            check_answers(self.config.reward, key, answers)

    def _check_columns(self, rows: Sequence[Row]) -> None:
        """What a user's reward function reads: columns that it takes as parameters, and those that samples hide."""
        config, name = self.config, self.config.reward.name
        if name in REWARDS.names() or not uses_reward(config):
            return
        tree = check_reference(name, REWARDS.key)
        signature = None if tree is None else signature_of(tree, name)
        wanted = [] if signature is None else columns_of(signature, config.reward.kwargs)
        hidden: dict[str, None] = {}
        for row in rows:
            for column in wanted:
                if column not in ("answer", "data_source"):
                    row.column(column, f"the parameter {column} of {name}")
            hidden |= dict.fromkeys(hidden_columns(row, config.data.prompt_key, config.data.answer_key))
        if hidden and signature is not None and form_of(signature) is OWN:
            problem = ConfigError(
                "samples have values of their own under these names, so that a reward finds the columns in "
                f"sample['row'] only: {', '.join(hidden)}",
                where=name,
                fix="read them there, or rename the columns",
            )
            warnings.warn(str(problem), ConfigWarning, stacklevel=2)

    def _response(self, row: Row, key: str) -> str:
        """A response to learn, as text: all that is said in it."""
        return "".join(message["content"] for message in response_of(row, self.config.data.prompt_key, key))


def _contents(messages: Sequence[Message], row: Row) -> str:
    """Stands for a chat template, so that the messages' form is checked."""
    return "".join(message["content"] for message in messages)


def _is_readable_here(source: str) -> bool:
    """True for a file, or a folder of files, that is read quickly."""
    if source.startswith(TEXT):
        return True
    path = Path(source).expanduser()
    if path.is_file():
        return path.stat().st_size <= _READ_BYTES
    if not path.is_dir() or (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return False
    files = [file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES]
    return sum(file.stat().st_size for file in files) <= _READ_BYTES
