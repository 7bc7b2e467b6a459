"""A reward model in the reward process: a sequence classifier in Hugging Face format."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.algorithms.registry import Settings
from megarl.rewards.registry import KWARGS, REWARDS
from megarl.rewards.scoring import Sample, ScoringFailure
from megarl.system.errors import ConfigError


class ClassifierSettings(Settings):
    """The classifier, and the form in which it reads samples."""

    path: str = Field(description="Hugging Face folder or hub name of a sequence classifier, such as RUN_DIR/hf")
    form: Literal["text", "chat"] = Field(
        "text",
        description="input of the classifier. text: prompt and response as the policy's tokenizer writes them, for a "
        "model of the same family; chat: the conversation in the classifier's chat template",
    )
    end: bool = Field(True, description="append the classifier's end token when the text does not end with it")
    label: NonNegativeInt = Field(0, description="index of the label whose logit is the score")
    max_tokens: PositiveInt | None = Field(
        None, description="maximum tokens of a sample; longer samples fail; null: the classifier's limit"
    )
    batch_size: PositiveInt = Field(8, le=65536, description="samples per forward pass")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="dtype of the weights")
    device: str = Field("cpu", description="cpu, or a GPU of the worker with enough free memory, such as cuda:0")

    def problems(self, path: str) -> list[ConfigError]:
        """Return an error if `path` is a folder that holds no model."""
        from megarl.models.hf import check_folder

        try:
            check_folder(self.path, f"{path}.path")
        except ConfigError as error:
            return [error]
        return []


@REWARDS.register("classifier", settings=ClassifierSettings, batch=True, process=True)
def classifier(samples: list[Sample], **settings: Any) -> list[Any]:
    """Return the classifier's logit of each sample, or the failure of the sample. Raise ConfigError if the classifier,
    the label or the chat template does not exist."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    options = ClassifierSettings(**settings)
    model, tokenizer = _load(os.path.expanduser(options.path), options.dtype, options.device)
    if options.label >= model.config.num_labels:
        raise ConfigError(
            "the classifier has no label with this index",
            where=f"{KWARGS}.label",
            found=options.label,
            allowed=f"0 to {model.config.num_labels - 1}",
        )
    if options.form == "chat" and not tokenizer.chat_template:
        raise ConfigError(
            "the classifier's tokenizer has no chat template",
            where=f"{KWARGS}.form",
            found="chat",
            fix=f"set {KWARGS}.form: text",
        )
    texts = [shown_text(item, tokenizer, form=options.form, end=options.end) for item in samples]
    tokens = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    limit = options.max_tokens or getattr(model.config, "max_position_embeddings", None)
    results: list[Any] = [
        ScoringFailure(f"has {len(ids)} tokens, and the classifier accepts at most {limit}")
        if limit and len(ids) > limit
        else 0.0
        for ids in tokens
    ]
    places = sorted((i for i, result in enumerate(results) if result == 0.0), key=lambda i: len(tokens[i]))
    pad = model.config.pad_token_id
    size = 1 if pad is None else options.batch_size
    for start in range(0, len(places), size):
        batch = places[start : start + size]
        rows = [torch.tensor(tokens[i], dtype=torch.int64) for i in batch]
        ids = pad_sequence(rows, batch_first=True, padding_value=pad or 0).to(model.device)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(model.device)
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits
        for i, score in zip(batch, logits[:, options.label].float().tolist(), strict=True):
            results[i] = score
    return results


@lru_cache(maxsize=2)
def _load(path: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Return model and tokenizer, loaded once per process; raise ConfigError if they cannot be loaded, the model has no
    score weights, or the device cannot hold it."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(path, dtype=kind, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers and safetensors raise many types of errors
        raise ConfigError(
            f"the classifier cannot be loaded: {type(error).__name__}: {error}",
            where=f"{KWARGS}.path",
            found=path,
            allowed="a folder or hub name that AutoModelForSequenceClassification loads",
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            "weights of the classifier are missing",
            where=f"{KWARGS}.path",
            found=f"{path} without {', '.join(missing[:3])}",
            fix="name a complete reward model, such as the result of algorithm.pipeline=reward_model; a language model "
            "lacks the weights of the score",
        )
    try:
        return model.to(device).eval(), tokenizer
    except Exception as error:  # torch and CUDA raise many types of errors
        raise ConfigError(
            f"the classifier cannot be moved to this device: {type(error).__name__}: {error}",
            where=f"{KWARGS}.device",
            found=device,
            allowed="cpu, or a GPU of the worker with enough free memory, such as cuda:0",
        ) from error


def shown_text(sample: Sample, tokenizer: Any, *, form: str, end: bool) -> str:
    """Return a sample as the text that the reward model scores.

    Args:
        form: `text` (prompt and response), or `chat` (written by the tokenizer's chat template).
        end: whether to append the tokenizer's end token (EOS) if the text does not end with it.
    """
    if form == "text":
        text = f"{sample['prompt']}{sample['response']}"
    else:
        answer = sample.get("messages") or [{"role": "user", "content": sample["prompt"]}]
        conversation = [*answer, {"role": "assistant", "content": sample["response"]}]
        text = tokenizer.apply_chat_template(conversation, tokenize=False)
    last = tokenizer.eos_token
    return str(text + last if end and last and not text.rstrip().endswith(last) else text)
