"""Models, requests and oracles of the rollout tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from megarl.architectures.vision_language import FAMILIES
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.rollout import RolloutConfig, SamplingConfig
from megarl.config.training import EngineConfig
from megarl.data.image_set import image_sets
from megarl.rollout.engine import Completion, Request
from tests.dist import current_layout
from tests.models.tiny import tiny_dict, two_layers
from tests.models.vlm_tiny import batch_of, config_of, draw

STOP = [2, 5, 9]


def build(model_type: str = "qwen3", seed: int = 3, dtype: torch.dtype = torch.float32, hf: Any = None, **layout: Any):
    """Chunks of a tiny random model under the parallel state that is set up now, the same in every layout.

    `hf`: changes of its configuration, which has two layers. `lora`: settings of adapters, which are random, too.
    """
    lora = layout.pop("lora", None)
    from megarl.models.build import build_policy
    from megarl.models.config import load_hf_config, transformer_config
    from megarl.models.lora import init_adapters, local_adapters
    from megarl.models.weights import init_random

    images, changes = model_type in FAMILIES, hf or {}
    if not images and "num_hidden_layers" not in changes:
        changes = two_layers(model_type) | changes
    described = (config_of if images else tiny_dict)(model_type, **changes)
    hf = load_hf_config(ModelConfig(hf_config=described, vision=images or None))
    config = transformer_config(hf, ParallelConfig(**layout), dtype=dtype, engine=EngineConfig(), lora=lora)
    chunks = build_policy(hf, config)
    init_random(chunks, hf, seed)
    if lora is not None:
        init_adapters(chunks, lora, seed)
        for _, parameter in local_adapters(chunks, lora):
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(parameter.numel()))
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)  # distributions that differ clearly from uniform
    return chunks


def engine(chunks: Sequence[Any], tokenizer: Any = None, **config: Any):
    from megarl.rollout.embedded.engine import EmbeddedEngine

    return EmbeddedEngine(chunks, RolloutConfig(**config), current_layout(), tokenizer)


def strings_of(results: list[list[Completion]], tokenizer: Any) -> list[str]:
    """Return stop strings that end some of these samples: the texts of two tokens in the middle of one."""
    return [tokenizer.decode(group[0].token_ids[4:6]).strip("\ufffd") or "!" for group in results]


def cut_at(strings: Any, results: list[list[Completion]]) -> list[list[tuple[list[int], str]]]:
    """Return tokens and finish reasons of samples that `strings` end, from those without them."""
    ends = [[(c, strings.end(c.token_ids)) for c in group] for group in results]
    return [[(c.token_ids[:n], c.finish_reason if n is None else "stop") for c, n in group] for group in ends]


def make_requests(count: int = 5, n: int = 3, seed: int = 0, longest: int = 14) -> list[Request]:
    """Prompts of 1 to `longest` tokens with `n` seeds each."""
    rng = torch.Generator().manual_seed(seed)
    requests = []
    for i in range(count):
        size = 1 if i == 0 else int(torch.randint(2, longest + 1, (), generator=rng))
        ids = torch.randint(0, 131, (size,), generator=rng).tolist()
        requests.append(Request(ids, [1000 * i + k for k in range(n)]))
    return requests


def requests_for(hf: Any, **numbers: int) -> list[Request]:
    """`make_requests`; for a model with an encoder every other prompt has images."""
    from megarl.models.hf import encoder_of, image_settings

    requests, rng, encoder = make_requests(**numbers), random.Random(1), encoder_of(hf)
    if encoder is None:
        return requests
    shapes = [((2, 3),), (), ((1, 1), (3, 2)), (), ((1, 4),)]
    samples = [draw(rng, encoder, *shape) for shape in shapes[: len(requests)]]
    sets = image_sets(batch_of(samples, image_settings(hf)))
    seen = zip(requests, samples, sets, strict=True)
    return [Request(sample.prompt, request.seeds, images=images) for request, sample, images in seen]


def tokens(results: list[list[Completion]]) -> list[list[list[int]]]:
    return [[c.token_ids for c in group] for group in results]


def logprobs(results: list[list[Completion]]) -> torch.Tensor:
    return torch.tensor([x for group in results for c in group for x in c.logprobs])


def full_forward(
    chunk: Any, prompt: list[int], response: list[int], temperature: float = 1.0, grad: bool = False
) -> torch.Tensor:
    """Log-probs of `response` from one forward pass of the training model over prompt + response."""
    from megarl.models.packing import pack_stream

    ids = torch.tensor(prompt + response)
    stream = pack_stream([len(ids)])
    with torch.set_grad_enabled(grad):
        hidden = chunk(stream.input_ids(ids), stream.position_ids, None, packed_seq_params=stream.params)
        logits = chunk.logits(hidden[len(prompt) - 1 : -1, 0]).float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def sampled(**kwargs: Any) -> SamplingConfig:
    return SamplingConfig(**{"max_new_tokens": 20, **kwargs})


PROMPTS = dict(enumerate([[4], [5, 6, 7], [5, 6, 7], list(range(20, 33)), [9] * 30]))
ANSWERS = [[7, 8, 9], [3], list(range(40, 60))]


def play_turns(made: Any, prompts: dict[int, list[int]], **settings: Any) -> dict[int, list[tuple]]:
    """Four turns of every prompt, with ANSWERS in between: (tokens before, drawn, log-probs, finish reason) of each.

    Turn t of prompt i has the seed 1000 i + t. `settings`: of sampling.
    """
    generation = made.open(sampled(max_new_tokens=6, **settings), STOP, len(prompts), 80)
    numbers, talk = list(prompts), list(prompts.values())
    turns: dict[int, list[tuple]] = {number: [] for number in numbers}
    for place, number in enumerate(numbers):
        generation.submit(place, talk[place], 1000 * number, 6)
    live = len(numbers)
    while generation.any_busy(live > 0):
        for place, done in generation.wait().items():
            mine = turns[numbers[place]]
            mine.append((talk[place], done.token_ids, done.logprobs, done.finish_reason))
            if len(mine) > len(ANSWERS):
                generation.forget(place)
                live -= 1
                continue
            talk[place] = [*talk[place], *done.token_ids, *ANSWERS[len(mine) - 1]]
            generation.submit(place, talk[place], 1000 * numbers[place] + len(mine), 6)
    return turns
