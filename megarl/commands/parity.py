"""`megarl doctor parity`: find the first place where transformers and the Megatron engine differ on the same tokens.

    tokens --> transformers -----> embedding, attention, MLP and output of every layer, final norm, log-probs
           \\-> Megatron engine --> the same places \\-> SGLang server ----> log-probs

Both models run in one process. Layer outputs are compared in the order of computation, so the first place beyond the
tolerance is where to look for the error. Of a server only log-probs are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.sglang import SGLangConfig
from megarl.config.training import EngineConfig
from megarl.system.comm import WorkerGroup, single_world
from megarl.system.compat.sglang import find_python
from megarl.system.device import DTYPES, device, dist_backend, has_cuda
from megarl.system.errors import count

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PretrainedConfig, PreTrainedModel

    from megarl.models.policy import PolicyModel


#: Relative differences up to these values are rounding, accumulated over the layers of a deep model. fp32: about 1e-7
#: per operation; bf16 keeps 8 bits, so every operation may differ by 4e-3 (0.03 was measured over four layers).
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
#: Share of the tokens, those with the largest differences, that is left out of the relative differences of a mixture of
#: experts in bf16. Rounding routes a token near a tie to another expert, whose output is unrelated. With the
#: certificate's two mixtures and six seeds each, on a CPU, up to 5% of the tokens differed by more than 0.1 at one of
#: the compared places, and the others by 0.02. A wrong weight, even of one expert of eight, affects more tokens than
#: this share.
REROUTED = 0.1


@dataclass(frozen=True)
class Difference:
    """One place of the model, compared between two implementations.

    Attributes:
        name: name of the place, such as `layer 3 attention`.
        largest: largest absolute difference of an element.
        relative: root mean square of the difference divided by that of the reference, without the tokens left out.
    """

    name: str
    largest: float
    relative: float


@dataclass(frozen=True)
class Parity:
    """The differences between the implementations of one model, in the order of computation.

    Attributes:
        places: hidden states of the Megatron engine against transformers.
        logprobs: log-probs of all tokens, of each other implementation against transformers.
        tolerance: largest relative difference that counts as rounding.
        left_out: share of the tokens that relative differences leave out: `REROUTED`, or 0.
    """

    places: list[Difference]
    logprobs: list[Difference]
    tolerance: float
    left_out: float = 0.0

    @property
    def first(self) -> Difference | None:
        """The first place whose difference is NaN or above the tolerance; None: all places agree."""
        return next((place for place in (*self.places, *self.logprobs) if not place.relative <= self.tolerance), None)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.first is not None:
            return f"they differ by more than rounding ({self.tolerance:g}), first at: {self.first.name}"
        places = len(self.places) + len(self.logprobs)
        rest = f", without the {self.left_out:.0%} of tokens that differ most" if self.left_out else ""
        return (
            f"they agree: no relative difference above rounding ({self.tolerance:g}) in {count(places, 'place')}{rest}"
        )


def compare(
    reference: PreTrainedModel,
    policy: PolicyModel,
    sequences: Sequence[Tensor],
    others: dict[str, list[Tensor]] | None = None,
) -> Parity:
    """Run a model of transformers and the same model on Megatron on the same tokens, and compare them. A sequence is
    token ids [n], n >= 2; `others` has log-probs [n - 1] of every sequence from other implementations, by name.
    """
    device = policy.lm_head_weight.device
    trunk, decoder = reference.model, policy.decoder
    their_places = _places(trunk.embed_tokens, trunk.layers, "self_attn", trunk.norm)
    our_places = _places(policy.embedding, decoder.layers, "self_attention", decoder.final_layernorm)
    with torch.no_grad(), _recorded(their_places) as theirs, _recorded(our_places) as ours:
        on_device = [ids.to(device) for ids in sequences]
        expected = [_of_tokens(reference(input_ids=ids[None]).logits[0], ids) for ids in on_device]
        logprobs_here = _policy_logprobs(policy, on_device)
    dtype = policy.lm_head_weight.dtype
    left_out = REROUTED if dtype == torch.bfloat16 and policy.config.num_moe_experts is not None else 0.0
    places = [_difference(name, torch.cat(ours[name]), torch.cat(theirs[name]), left_out) for name in theirs]
    wanted = torch.cat(expected).cpu()
    implementations = {"megatron": logprobs_here, **(others or {})}
    logprobs = [
        _difference(f"log-probs, {name}", torch.cat(rows).cpu(), wanted, left_out)
        for name, rows in implementations.items()
    ]
    return Parity(places, logprobs, TOLERANCE[dtype], left_out)


def _difference(name: str, ours: Tensor, theirs: Tensor, left_out: float) -> Difference:
    """Compare two tensors [tokens, ...]. The relative difference leaves out the share `left_out` of tokens that differ
    most; it is NaN if any value is NaN or infinite."""
    gap, scale = (ours - theirs).double(), theirs.double()
    norm = float(scale.square().mean().sqrt())
    squares = gap.square().reshape(len(gap), -1).mean(-1)
    counted = squares.sort().values[: len(gap) - int(left_out * len(gap))] if squares.isfinite().all() else squares
    return Difference(name, float(gap.abs().max()), float(counted.mean().sqrt()) / max(norm, 1e-30))


def _places(
    embedding: torch.nn.Module, layers: Iterable[Any], attention: str, final_norm: torch.nn.Module
) -> dict[str, torch.nn.Module]:
    """Return, by name, the modules of a model whose outputs are compared with the other implementation's.

    Args:
        attention: name of a layer's attribute with the attention.
    """
    places = {"embedding": embedding}
    for number, layer in enumerate(layers):
        places |= {f"layer {number} attention": getattr(layer, attention), f"layer {number} mlp": layer.mlp}
        places[f"layer {number}"] = layer
    return places | {"final norm": final_norm}


@contextmanager
def _recorded(places: dict[str, torch.nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """Record the outputs of the modules `places` while they run inside the block: by name, a list of float32 [tokens,
    hidden] on the CPU."""
    seen: dict[str, list[Tensor]] = {name: [] for name in places}

    def note(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            rows = hidden.detach().reshape(-1, hidden.shape[-1])
            # copied, as the next operation may work in place
            seen[name].append(rows.to("cpu", torch.float32, copy=True))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in places.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _policy_logprobs(model: PolicyModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    from megarl.models.packing import pack_stream

    lengths = [len(ids) for ids in sequences]
    stream = pack_stream(lengths, device=sequences[0].device)
    tokens = stream.input_ids(torch.cat(list(sequences)))
    hidden = model(tokens, stream.position_ids, None, packed_seq_params=stream.params)
    logits = model.logits(hidden[:, 0])
    return [_of_tokens(rows, ids) for rows, ids in zip(logits.split(lengths), sequences, strict=True)]


def _of_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


LENGTHS = (64, 17, 40, 5)
_SERVER_TOKENS = 4096
_DEADLINE_S = 600.0  # deadline of collectives; a single process never waits for one


def parity(source: Path, dtype: str = "fp32", *, server: bool = True) -> Parity:
    """Compare a model's implementations on random tokens; with `server` also the log-probs of an SGLang server.
    `source` is a Hugging Face folder, or a checkpoint of a run (RUN_DIR/checkpoints/step_N).
    """
    from megarl.models.config import load_hf_config
    from megarl.models.weights.files import CheckpointReader
    from megarl.training.parallel import init_parallel

    with ExitStack() as stack:
        python = find_python(None, cuda=has_cuda()) if server else None  # checked before the slow parts
        if (source / "meta.json").is_file() or CheckpointReader(source).quantized:
            # A run's checkpoint is exported, because transformers cannot read it. Quantised weights are dequantised,
            # because transformers and servers would otherwise use quantised kernels.
            from megarl.commands.convert import convert

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hf"
            convert(source, folder)
        else:
            folder = source
        hf = load_hf_config(ModelConfig(path=str(folder)))
        g = torch.Generator().manual_seed(0)
        sequences = [torch.randint(hf.vocab_size, (n,), generator=g) for n in LENGTHS]
        # The server runs first, because it takes most of a GPU's memory; it has ended when the models are loaded.
        others = {} if python is None else {"server": _server_logprobs(folder, dtype, sequences)}
        layout = init_parallel(ParallelConfig(), single_world(dist_backend(), _DEADLINE_S))
        stack.callback(layout.close)
        reference, policy = _load_both(folder, hf, DTYPES[dtype])
        return compare(reference, policy, sequences, others)


def _server_logprobs(folder: Path, dtype: str, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Return the log-probs [n - 1] of each sequence's tokens from a server with the weights of `folder`."""
    from megarl.rollout.sglang.launch import WorkerPlace, open_fleet

    config = SGLangConfig(max_total_tokens=_SERVER_TOKENS)
    logprobs = []
    name, alone = str(DTYPES[dtype]).removeprefix("torch."), WorkerGroup.alone()
    with (
        tempfile.TemporaryDirectory() as logs,
        open_fleet(config, WorkerPlace(), Path(logs), folder, name, cuda=has_cuda(), world=alone) as fleet,
    ):
        for ids in sequences:
            request = {"input_ids": ids.tolist(), "return_logprob": True, "logprob_start_len": 0}
            request["sampling_params"] = {"max_new_tokens": 1, "temperature": 1.0}
            api, limit_s = fleet.servers[0].api, config.start_timeout_s
            answer = api.call("/generate", request, deadline_s=limit_s, phase="log-probs of given tokens")
            # entries are [log-prob, token, text]; the first token has no log-prob
            rows = answer["meta_info"]["input_token_logprobs"]
            logprobs.append(torch.tensor([row[0] for row in rows[1:]]))
    return logprobs


def _load_both(folder: Path, hf: PretrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, PolicyModel]:
    """Load the model in transformers and on Megatron. The parallel layout must be set up already."""
    from transformers import AutoModelForCausalLM

    from megarl.models.build import build_policy
    from megarl.models.config import transformer_config
    from megarl.models.weights import load_weights

    (policy,) = build_policy(hf, transformer_config(hf, ParallelConfig(), dtype=dtype, engine=EngineConfig()))
    load_weights([policy], folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return reference.eval().to(device()), policy.eval()


def as_table(parity_result: Parity) -> Table:
    """Return a table of all outputs in the model that were compared (such as a layer's attention); an arrow marks the
    first one beyond the tolerance.
    """
    from rich.table import Table

    table = Table("place", "largest difference", "relative", "", title="against transformers")
    for place in (*parity_result.places, *parity_result.logprobs):
        mark = "<- first beyond rounding" if place is parity_result.first else ""
        table.add_row(place.name, f"{place.largest:.3g}", f"{place.relative:.3g}", mark)
    return table
