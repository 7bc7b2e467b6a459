"""The recipe's section `rollout.sglang`: SGLang servers."""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.config.base import Seconds, Section
from megarl.system.errors import ConfigError


def url_problem(url: str, key: str) -> str | None:
    """Explain why `url` cannot be the address of a server; None when it can. `key` names the variable with its key."""
    try:
        place = urlsplit(url)
        port_ok = place.port != 0
    except ValueError:
        return "it has no host and port that can be"
    if place.scheme not in ("http", "https") or not place.hostname or not port_ok:
        return "it does not begin with http://host:port or https://host:port"
    if place.username is not None or place.password is not None:
        return f"it holds a user name or password; a key belongs into the variable of {key}"
    return "it goes on after the path" if place.query or place.fragment else None


class SpeculativeConfig(Section):
    """Speculative decoding of the servers: a draft proposes tokens, the model checks several in one pass.

    Samples have the model's own distribution and log-probs whatever the draft is.
    """

    algorithm: Literal["NGRAM", "EAGLE", "EAGLE3", "STANDALONE"] = Field(
        "NGRAM",
        description="NGRAM: earlier continuations, no draft model; EAGLE, EAGLE3: a draft head; STANDALONE: a small "
        "model with the same tokens",
    )
    draft_path: str | None = Field(
        None, description="Hugging Face folder or hub name of the draft, which is not trained"
    )
    steps: PositiveInt | None = Field(None, description="passes of a draft model per check; null: SGLang's choice")
    topk: PositiveInt | None = Field(None, description="branches of a draft model's tree; null: SGLang's choice")
    draft_tokens: PositiveInt | None = Field(
        None, description="tokens that are checked in one pass; null: SGLang's choice, 12 with NGRAM"
    )


class SGLangConfig(Section):
    """The servers of `rollout.engine: sglang`."""

    python: str | None = Field(
        None, description="interpreter that has sglang; null: the newest that `make sglang-env` made"
    )
    servers: PositiveInt = Field(
        1,
        description="servers over all machines: the same number on each, or, for a rollout team on several machines, "
        "where its workers lend their GPUs",
    )
    tp_size: PositiveInt = Field(1, description="tensor-parallel ranks of a server")
    ep_size: PositiveInt = Field(1, description="expert-parallel ranks of a server, a divisor of tp_size")
    nnodes: PositiveInt = Field(
        1, description="machines of a server, a divisor of tp_size, with equally many of its ranks"
    )
    dp_size: PositiveInt = Field(1, description="replicas inside a server")
    gpus: list[NonNegativeInt] | None = Field(
        None,
        description="devices of each machine for servers, in order; null: those after the trainer's, with colocated "
        "the trainer's",
    )
    colocated: bool = Field(
        False,
        description="servers share the trainer's GPUs: their cache is freed after generation, their weights during "
        "the update; set memory_fraction and actor.engine.offload",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of a GPU's free memory at the server's start, for weights and cache; null: SGLang's choice",
    )
    max_total_tokens: PositiveInt | None = Field(
        None, description="tokens in a server's key/value cache; null: what fits, 65536 on a CPU"
    )
    context_length: PositiveInt | None = Field(None, description="longest sequence; null: the model's")
    attention_backend: str | None = Field(
        None, description="SGLang's name; null: SGLang's choice, torch_native on a CPU"
    )
    deterministic: bool = Field(
        False,
        description="SGLang's deterministic mode: seeds count on GPUs too; slower",
    )
    speculative: SpeculativeConfig | None = Field(
        None, description="speculative decoding, of servers on GPUs; null: none"
    )
    extra_args: list[str] = Field(default_factory=list, description="further arguments of sglang.launch_server")
    urls: list[str] = Field(
        default_factory=list,
        description="running servers (http://host:port or https://host:port, with a proxy's path if it has one); none"
        " is started then",
    )
    api_key_env: str | None = Field(
        None, description="environment variable with the API key of the servers in `urls`; null: they have none"
    )
    host: str | None = Field(
        None,
        description="address of a private interface that servers listen on; null: loopback on one machine, on several"
        " the one that reaches the first machine",
    )
    max_concurrency: PositiveInt | None = Field(
        None,
        description="samples in flight per server; null: all that there are, of which the server queues those that its "
        "cache has no room for",
    )
    start_timeout_s: Seconds = Field(300.0, description="deadline for a server to be ready")
    request_timeout_s: Seconds | None = Field(
        None,
        description="deadline of a request for a sample, of which there are three at most; null: none. It says nothing "
        "about the server, which health_timeout_s looks after",
    )
    health_timeout_s: Seconds = Field(
        60.0,
        description="a server is dead when its scheduler gives no sign of life for so long, or a call that moves no "
        "weights takes longer; set it to many times the time of a batch",
    )
    max_restarts: NonNegativeInt = Field(3, description="restarts of each server in a run")

    def nccl_environment(self) -> dict[str, str]:
        """Return what SGLang sets in its processes where it is unset. Groups of trainer and servers need one value.

        Else the two sides of a connection on one machine offer each other memory of different kinds, and NCCL ends with
        "invalid argument".
        """
        symmetric = "--enable-symm-mem" in self.extra_args
        multicast = symmetric or "--enable-nccl-nvls" in self.extra_args
        return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(multicast))}

    def external_key(self) -> str | None:
        """Return the API key of the servers in `urls`, from the environment; None: they have none.

        Raises:
            ConfigError: the variable is not set.
        """
        name = self.api_key_env
        if name is not None and name not in os.environ:
            raise ConfigError(
                "this environment variable is not set",
                where="rollout.sglang.api_key_env",
                found=name,
                allowed="the name of a variable with the servers' API key, or null",
                fix="export it, or set rollout.sglang.api_key_env=null",
            )
        return None if name is None else os.environ[name]

    @property
    def first_gpu_given(self) -> bool:
        """Whether `extra_args` sets the first GPU of a server on its machine."""
        return any(argument.startswith("--base-gpu-id") for argument in self.extra_args)

    @property
    def count(self) -> int:
        """Number of servers over all machines, started or external."""
        return len(self.urls) or self.servers

    @property
    def ranks(self) -> int:
        """Number of devices of one server."""
        return self.tp_size * self.dp_size

    @property
    def ranks_per_node(self) -> int:
        """Number of devices of one server on each of its machines."""
        return self.ranks // self.nnodes
