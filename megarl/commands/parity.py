"""`megarl doctor parity`: where transformers and the Megatron engine first part ways on the same tokens.

    tokens --> transformers -----> embedding, attention, MLP and output of every layer, final norm, log-probs
          \\-> Megatron engine --> the same places
          \\-> SGLang server ----> log-probs

Both models run in one process, layer outputs are compared place by place in the order of computation, so the first
place beyond the tolerance is where to look. A server shows log-probs only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.errors import count

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from megarl.models.policy import PolicyModel

#: Relative differences up to these are rounding, summed up over the layers of a deep model. fp32: some 1e-7 per
#: operation; bf16 keeps 8 bits, so every operation may differ by 4e-3 (four layers were seen to differ by 0.03).
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Difference:
    """One place of the model in two implementations.

    Attributes:
        name: such as `layer 3 attention`.
        largest: largest absolute difference of an element.
        relative: root mean square of the difference over that of the reference.
    """

    name: str
    largest: float
    relative: float


@dataclass(frozen=True)
class Parity:
    """Differences in the order of computation.

    Attributes:
        places: hidden states, Megatron engine against transformers.
        logprobs: of every token given those before it: each other implementation against transformers.
        tolerance: relative differences up to this are rounding.
    """

    places: list[Difference]
    logprobs: list[Difference]
    tolerance: float

    @property
    def first(self) -> Difference | None:
        """The first place beyond the tolerance; NaN counts."""
        return next((place for place in (*self.places, *self.logprobs) if not place.relative <= self.tolerance), None)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        if self.first is not None:
            return f"they differ by more than rounding ({self.tolerance:g}), first at: {self.first.name}"
        places = len(self.places) + len(self.logprobs)
        return f"they agree: no relative difference above rounding ({self.tolerance:g}) in {count(places, 'place')}"


def compare(
    reference: PreTrainedModel,
    policy: PolicyModel,
    sequences: Sequence[Tensor],
    others: dict[str, list[Tensor]] | None = None,
) -> Parity:
    """Run both models on the same tokens.

    Args:
        reference: a causal language model of transformers.
        policy: the same model on Megatron, whole in this process.
        sequences: token ids [n] each, n >= 2.
        others: log-probs [n - 1] of every sequence from elsewhere, by name.
    """
    device = policy.lm_head_weight.device
    with torch.no_grad(), _recorded(_reference_places(reference)) as theirs, _recorded(_policy_places(policy)) as ours:
        expected = [_reference_logprobs(reference, ids.to(device)) for ids in sequences]
        found = _policy_logprobs(policy, [ids.to(device) for ids in sequences])
    places = [_difference(name, torch.cat(ours[name]), torch.cat(theirs[name])) for name in theirs]
    wanted = torch.cat(expected).cpu()
    logprobs = {"log-probs, megatron": found, **{f"log-probs, {name}": rows for name, rows in (others or {}).items()}}
    return Parity(
        places,
        [_difference(name, torch.cat(rows).cpu(), wanted) for name, rows in logprobs.items()],
        TOLERANCE[policy.lm_head_weight.dtype],
    )


def _difference(name: str, ours: Tensor, theirs: Tensor) -> Difference:
    gap, scale = (ours - theirs).double(), theirs.double()
    norm = float(scale.square().mean().sqrt())
    return Difference(name, float(gap.abs().max()), float(gap.square().mean().sqrt()) / max(norm, 1e-30))


def _reference_places(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    trunk = model.model
    places = {"embedding": trunk.embed_tokens}
    for number, layer in enumerate(trunk.layers):
        places |= {f"layer {number} attention": layer.self_attn, f"layer {number} mlp": layer.mlp}
        places[f"layer {number}"] = layer
    return places | {"final norm": trunk.norm}


def _policy_places(model: PolicyModel) -> dict[str, torch.nn.Module]:
    places: dict[str, torch.nn.Module] = {"embedding": model.embedding}
    for number, layer in enumerate(model.decoder.layers):
        places |= {f"layer {number} attention": layer.self_attention, f"layer {number} mlp": layer.mlp}
        places[f"layer {number}"] = layer
    return places | {"final norm": model.decoder.final_layernorm}


@contextmanager
def _recorded(places: dict[str, torch.nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Inside the block, what each module returns, as float32 rows [tokens, hidden] on the CPU."""
    seen: dict[str, list[Tensor]] = {name: [] for name in places}

    def note(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            rows = hidden.detach().reshape(-1, hidden.shape[-1])
            seen[name].append(rows.to("cpu", torch.float32, copy=True))  # the next operation may work in place

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in places.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _reference_logprobs(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return _of_tokens(model(input_ids=ids[None]).logits[0], ids)


def _policy_logprobs(model: PolicyModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    from megarl.models.packing import pack_stream

    lengths = [len(ids) for ids in sequences]
    stream = pack_stream(lengths, device=sequences[0].device)
    tokens = stream.input_ids(torch.cat(list(sequences)))
    hidden = model(tokens, stream.position_ids, None, packed_seq_params=stream.params)
    logits = F.linear(hidden[:, 0], model.lm_head_weight)
    return [_of_tokens(rows, ids) for rows, ids in zip(logits.split(lengths), sequences, strict=True)]


def _of_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs [n - 1] of ids[1:], in float32."""
    return logits[:-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
