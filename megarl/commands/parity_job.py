"""The command around `megarl.commands.parity`: load a model twice, draw tokens, compare, show."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.comm import WorkerGroup, own_world
from megarl.commands.parity import Parity, compare
from megarl.compat.sglang import find_python
from megarl.config.model import ModelConfig, ParallelConfig
from megarl.config.sglang import SGLangConfig
from megarl.config.training import EngineConfig
from megarl.device import DTYPES, device, dist_backend, has_cuda

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from megarl.models.policy import PolicyModel

LENGTHS = (64, 17, 40, 5)
_SERVER_TOKENS = 4096
_DEADLINE_S = 600.0  # of collectives of one process, which do not wait


def parity(source: Path, dtype: str = "fp32", *, server: bool = True) -> Parity:
    """Compare the implementations on random tokens.

    Args:
        source: a Hugging Face folder, or a checkpoint of a run (RUN_DIR/checkpoints/step_N).
        dtype: `fp32` or `bf16`, of parameters and computation.
        server: start an SGLang server with the model, and compare its log-probs too.

    Raises:
        ConfigError: no such model, or no interpreter for a server.
        ServerError: the server did not start or did not answer.
    """
    from megarl.models.config import load_hf_config
    from megarl.models.weights.files import CheckpointReader
    from megarl.training.parallel import init_parallel

    with ExitStack() as stack:
        python = find_python(None, cuda=has_cuda()) if server else None  # before anything that takes long
        if (source / "meta.json").is_file() or CheckpointReader(source).quantized:
            # transformers and servers would compute with the quantised weights, in other kernels.
            from megarl.commands.convert import convert

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "hf"
            convert(source, folder)
        else:
            folder = source
        hf = load_hf_config(ModelConfig(path=str(folder)))
        g = torch.Generator().manual_seed(0)
        sequences = [torch.randint(hf.vocab_size, (n,), generator=g) for n in LENGTHS]
        # First: a server takes most of a GPU's memory, and has given it back when the models come.
        others = {} if python is None else {"server": _server_logprobs(folder, dtype, sequences)}
        layout = init_parallel(ParallelConfig(), own_world(dist_backend(), _DEADLINE_S))
        stack.callback(layout.close)
        reference, policy = _load_both(folder, hf, DTYPES[dtype])
        return compare(reference, policy, sequences, others)


def _server_logprobs(folder: Path, dtype: str, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Log-probs [n - 1] that a server with the weights of `folder` gives to the tokens of each sequence."""
    from megarl.rollout.sglang.launch import WorkerPlace, open_fleet

    config = SGLangConfig(max_total_tokens=_SERVER_TOKENS)
    found = []
    name = str(DTYPES[dtype]).removeprefix("torch.")
    with (
        tempfile.TemporaryDirectory() as logs,
        open_fleet(
            config, WorkerPlace(), Path(logs), folder, name, cuda=has_cuda(), world=WorkerGroup.alone()
        ) as fleet,
    ):
        for ids in sequences:
            request = {
                "input_ids": ids.tolist(),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answer = fleet.servers[0].api.call(
                "/generate", request, deadline_s=config.request_timeout_s, phase="log-probs of given tokens"
            )
            rows = answer["meta_info"]["input_token_logprobs"]  # [log-prob, token, text], the first without
            found.append(torch.tensor([row[0] for row in rows[1:]]))
    return found


def _load_both(folder: Path, hf: PretrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, PolicyModel]:
    """transformers' model and ours; the layout must be there."""
    from transformers import AutoModelForCausalLM

    from megarl.models.build import build_policy
    from megarl.models.config import transformer_config
    from megarl.models.weights import load_weights

    (policy,) = build_policy(hf, transformer_config(hf, ParallelConfig(), dtype=dtype, engine=EngineConfig()))
    load_weights([policy], folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return reference.eval().to(device()), policy.eval()


def as_table(found: Parity) -> Table:
    """Every place, the first beyond the tolerance marked."""
    from rich.table import Table

    table = Table("place", "largest difference", "relative", "", title="against transformers")
    for place in (*found.places, *found.logprobs):
        mark = "<- first beyond rounding" if place is found.first else ""
        table.add_row(place.name, f"{place.largest:.3g}", f"{place.relative:.3g}", mark)
    return table
