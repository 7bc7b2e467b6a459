"""Load tokenizers: Hugging Face ones, and ones with a token per character or word for tiny models."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.artifacts.model_files import check_tokenizer_files
from megarl.config.model import ModelConfig
from megarl.system.compat import transformers
from megarl.system.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARS, WORDS = "chars:", "words:"
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that `model.tokenizer` names, or else the one in the model folder `model.path`."""
    name = model.tokenizer or model.path
    if name is None:
        raise ConfigError(
            "the run has no tokenizer",
            where="model.tokenizer",
            allowed="a folder, a hub name, 'chars:<alphabet>', or 'words:<word> ...'",
            fix="set model.tokenizer, or set model.path to a folder with a tokenizer",
        )
    if name.startswith(CHARS):
        return character_tokenizer(name.removeprefix(CHARS))
    if name.startswith(WORDS):
        return word_tokenizer(name.removeprefix(WORDS))
    key = "model.tokenizer" if model.tokenizer else "model.path"
    if Path(name).expanduser().is_dir():
        check_tokenizer_files(Path(name).expanduser(), key)
    # AutoTokenizer imports the model's config class, whose checks would otherwise import slow modelling code.
    transformers.install()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        from megarl.data.hub import advice, own_code_advice

        raise ConfigError(
            f"the tokenizer cannot be loaded: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}",
            where=key,
            found=name,
            fix=own_code_advice(error)
            or _missing_package(Path(name).expanduser())
            or advice("models", name, "name a folder or hub repository with a tokenizer.json"),
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "the tokenizer has no end token, so no response could ever end",
            where=key,
            found=name,
            fix="set eos_token in its tokenizer_config.json",
        )
    return tokenizer


def _missing_package(folder: Path) -> str | None:
    """Return the fix if the folder has only a tokenizer.model, and sentencepiece, which reads this file, is not
    installed."""
    if (folder / "tokenizer.json").is_file() or not (folder / "tokenizer.model").is_file():
        return None
    if importlib.util.find_spec("sentencepiece") is not None:
        return None
    return "pip install sentencepiece, which reads tokenizer.model, or add the tokenizer.json of this model"


def written_tokens(name: str) -> list[str]:
    """Return the characters or words that a tokenizer name `chars:...` or `words:...` lists."""
    words = name.startswith(WORDS)
    kind, noun, between = (WORDS, "word", " ") if words else (CHARS, "character", "")
    such = kind + ("push the disc" if words else "0123456789+=")
    text = name.removeprefix(kind)
    tokens = text.split() if words else list(text)
    whole = "the list of words" if words else "the alphabet"
    twice = sorted(token for token, times in Counter(tokens).items() if times > 1)
    if not tokens or twice:
        raise ConfigError(
            f"{whole} repeats {noun}s: {', '.join(map(repr, twice))}" if twice else f"{whole} is empty",
            where="model.tokenizer",
            found=name,
            allowed=f"'{kind}' and then each {noun} once{', with spaces between them' if words else ''}",
            fix=f"write {kind + between.join(dict.fromkeys(tokens))!r}"
            if twice
            else f"list the {noun}s of all texts, as in {such!r}",
        )
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(
            f"{whole} contains half of a surrogate pair, which is not a character",
            where="model.tokenizer",
            found=name,
            fix="write the whole character",
        )
    return tokens


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per character: <pad>=0, <bos>=1, <eos>=2, <unk>=3, then the alphabet in its
    order.

    The tokenizer adds no special tokens by itself, decodes back to the same text, and reloads through AutoTokenizer.
    """
    tokens = written_tokens(CHARS + alphabet)
    from tokenizers import Regex, decoders, pre_tokenizers

    return _one_each(tokens, pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse())


def word_tokenizer(words: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per word; ids are numbered as in `character_tokenizer`.

    Texts are split at spaces, so "square." and "square" are two words. The tokenizer decodes to words separated by
    single spaces, adds no special tokens by itself, and reloads through AutoTokenizer.
    """
    tokens = written_tokens(WORDS + words)
    from tokenizers import pre_tokenizers

    return _one_each(tokens, pre_tokenizers.WhitespaceSplit())


def _one_each(tokens: Iterable[str], splits: Any, decoder: Any = None) -> PreTrainedTokenizerBase:
    """Build a tokenizer with one id per entry of `tokens`, whose pre-tokenizer `splits` cuts a text into tokens.

    Without a decoder, decoding joins tokens with spaces.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS.values(), *tokens])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    backend.pre_tokenizer = splits
    if decoder is not None:
        backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **SPECIAL_TOKENS)
