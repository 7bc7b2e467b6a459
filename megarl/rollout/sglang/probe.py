"""Log-probs of a greedy probe: a server's with its weights, compared with the trainer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megarl.rollout.sglang.api import ServerApi
from megarl.rollout.sglang.fleet import Fleet
from megarl.system.comm import WorkerGroup
from megarl.system.errors import ServerError

_PROBE_TOKENS = 8  # of the prompt, and of its continuation


@dataclass(frozen=True)
class Probe:
    """A greedy continuation and the server's log-probs of its tokens, at temperature 1."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    version: str


def greedy_probe(api: ServerApi, prompt_ids: list[int], tokens: int, deadline_s: float) -> Probe:
    """Let the server continue `prompt_ids` greedily by `tokens` tokens."""
    payload = {
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
    """Return a greedy probe of each of these servers, the same on every rank.

    One that does not answer, or not with the weights that are called `tag`, is marked failed and killed.

    Collective: the servers are shared out over the ranks of `world`. The prompt is the same for all.
    """
    prompt = [(7919 * i + 11) % vocabulary for i in range(_PROBE_TOKENS)]
    probes = []
    for server in (fleet.servers[number] for number in numbers[world.rank :: world.size]):
        try:
            probe = greedy_probe(server.api, prompt, _PROBE_TOKENS, deadline_s)
            if probe.version == tag:
                probes.append(asdict(probe))
            else:
                fleet.mark_failed(
                    server, f"probe: generated with the weights {probe.version!r}; this run has sent {tag!r}"
                )
        except ServerError as error:
            fleet.mark_failed(server, f"{error.phase}: {error.reason}")
    fleet.share_failures()
    return [Probe(**fields) for part in world.all_gather_json(probes) for fields in part]


def probe_gap(probes: Sequence[Probe], trainer: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of log-probs of the probes' tokens between servers and trainer."""
    pairs = ((p.logprobs, ours) for p, ours in zip(probes, trainer, strict=True))
    return max(abs(a - b) for theirs, ours in pairs for a, b in zip(theirs, ours, strict=True))
