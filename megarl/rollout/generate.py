"""Text in, text out, over any generation engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.rollout import SamplingConfig
from megarl.errors import DataError
from megarl.rollout.engine import Request, RolloutEngine
from megarl.rollout.seeds import sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def generate_text(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    sampling: SamplingConfig,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """`sampling.n` completions of every prompt, as rows for a jsonl file.

    Prompts go in as they are: a chat template is the caller's business. The same seed gives the same completion of a
    prompt text, whatever else is asked for beside it.

    Returns:
        Rows with prompt, sample (0 to n - 1), response, finish_reason, tokens (count) and logprob (sum over tokens).

    Raises:
        DataError: a prompt has no tokens.
    """
    requests = []
    for number, prompt in enumerate(prompts):
        ids = tokenizer(prompt)["input_ids"]
        if not ids:
            raise DataError("a prompt has no tokens", where=f"prompt {number}", found=prompt, fix="give it some text")
        requests.append(Request(ids, [sample_seed(seed, 0, prompt, i) for i in range(sampling.n)]))
    return [
        {
            "prompt": prompt,
            "sample": i,
            "response": tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "logprob": sum(completion.logprobs),
        }
        for prompt, group in zip(prompts, engine.generate(requests, sampling, [tokenizer.eos_token_id]), strict=True)
        for i, completion in enumerate(group)
    ]
