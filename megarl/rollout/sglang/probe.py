"""Compares servers' log-probs of a greedy continuation with the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megarl.rollout.sglang.adapters import adapter_fields
from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError

_PROBE_TOKENS = 8  # number of tokens of the prompt, and also of its continuation


@dataclass(frozen=True)
class Probe:
    """A greedy continuation of a prompt, the server's log-probs of its tokens at temperature 1, and its weight
    version."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    version: str


def greedy_probe(
    api: ServerApi, prompt_ids: list[int], tokens: int, deadline_s: float, adapter: dict[str, str] | None = None
) -> Probe:
    """Make the server continue `prompt_ids` greedily by `tokens` tokens and return the result.

    Args:
        adapter: the fields that name an adapter (`adapter_fields`).
    """
    payload = (adapter or {}) | {
        "input_ids": prompt_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    meta = api.call("/generate", payload, deadline_s=deadline_s, phase="probe")["meta_info"]
    pairs = meta["output_token_logprobs"]
    return Probe(prompt_ids, [int(p[1]) for p in pairs], [float(p[0]) for p in pairs], str(meta["weight_version"]))


def probe_servers(
    fleet: Fleet, numbers: Sequence[int], vocabulary: int, deadline_s: float, tag: str, world: WorkerGroup
) -> list[Probe]:
    """Return a greedy probe of each of these servers, with the same prompt; the probes are the same on every rank.

    Servers that do not answer, or answer with weights other than `tag`, are marked failed and killed. Collective over
    `world`, whose ranks each probe a part of the servers.
    """
    prompt = [(7919 * i + 11) % vocabulary for i in range(_PROBE_TOKENS)]
    probes = []
    for server in (fleet.servers[number] for number in numbers[world.rank :: world.size]):
        try:
            probe = greedy_probe(server.api, prompt, _PROBE_TOKENS, deadline_s, adapter_fields(fleet.config, tag))
            if probe.version == tag:
                probes.append(asdict(probe))
            else:
                why = f"probe: generated with the weights {probe.version!r}; this run has sent {tag!r}"
                fleet.mark_failed(server, why)
        except ServerError as error:
            fleet.mark_failed(server, f"{error.phase}: {error.reason}")
    fleet.share_failures()
    return [Probe(**fields) for part in world.all_gather_json(probes) for fields in part]


def probe_gap(probes: Sequence[Probe], trainer: Sequence[Sequence[float]]) -> float:
    """Return the largest difference between a server's and the trainer's log-prob of the same token."""
    pairs = zip(probes, trainer, strict=True)
    return max(abs(a - b) for probe, logprobs in pairs for a, b in zip(probe.logprobs, logprobs, strict=True))
