"""The recipe's section `rollout.sglang`: SGLang servers."""

from __future__ import annotations

import os
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.config.base import Seconds, Section
from megarl.system.errors import ConfigError


def url_problem(url: str, key: str) -> str | None:
    """Return why `url` cannot be a server's address, or None. `key` is the recipe key that names the variable for API
    keys.
    """
    try:
        place = urlsplit(url)
        port_ok = place.port != 0
    except ValueError:
        return "its host or port is invalid"
    if place.scheme not in ("http", "https") or not place.hostname or not port_ok:
        return "it does not begin with http://host:port or https://host:port"
    if place.username is not None or place.password is not None:
        return f"it contains a user name or password; put an API key into the variable named by {key}"
    return "it has a query or fragment after the path" if place.query or place.fragment else None


class SpeculativeConfig(Section):
    """Speculative decoding in the servers: a draft proposes tokens, and the model checks several in one pass.

    Samples follow the model's own distribution and log-probs, whatever the draft is.
    """

    algorithm: Literal["NGRAM", "EAGLE", "EAGLE3", "STANDALONE"] = Field(
        "NGRAM",
        description="source of the draft. NGRAM: earlier continuations, without a draft model; EAGLE, EAGLE3: a draft "
        "head; STANDALONE: a small model with the same tokens",
    )
    draft_path: str | None = Field(
        None,
        description="Hugging Face folder or hub name of the draft model; the run trains it only "
        "if it is the policy's own draft head (`actor.mtp`)",
    )
    steps: PositiveInt | None = Field(None, description="passes of the draft model per check; null: SGLang's choice")
    topk: PositiveInt | None = Field(None, description="branches of the draft model's tree; null: SGLang's choice")
    draft_tokens: PositiveInt | None = Field(
        None, description="tokens that the model checks in one pass; null: SGLang's choice, which is 12 with NGRAM"
    )


class SGLangConfig(Section):
    """The servers of `rollout.engine: sglang`."""

    python: str | None = Field(
        None, description="Python interpreter that has sglang; null: the newest that `make sglang-env` made"
    )
    servers: PositiveInt = Field(
        1,
        description="number of servers over all machines: equally many on each machine, or, for a rollout team on "
        "several machines, on those whose workers lend their GPUs",
    )
    tp_size: PositiveInt = Field(1, description="tensor-parallel ranks per server")
    ep_size: PositiveInt = Field(1, description="expert-parallel ranks per server, a divisor of tp_size")
    nnodes: PositiveInt = Field(
        1, description="machines per server, a divisor of tp_size; each has equally many of the server's ranks"
    )
    attention_dp: PositiveInt = Field(
        1,
        description="groups of ranks of a server that compute the attention of different samples, a divisor of "
        "tp_size: each group has all heads and a cache of its own. Feed-forward layers and experts are still divided "
        "among all ranks. For models whose keys and values many ranks would hold otherwise, such as DeepSeek-V3",
    )
    dp_size: PositiveInt = Field(1, description="data-parallel replicas inside a server, always 1: use several servers")
    gpus: list[NonNegativeInt] | None = Field(
        None,
        description="devices of each machine that servers use, in order; null: the devices after the trainer's, or "
        "with colocated the trainer's",
    )
    colocated: bool = Field(
        False,
        description="servers share the trainer's GPUs: they free their cache after generation and their weights "
        "during the update; also set memory_fraction and actor.engine.offload",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of a GPU's free memory that a server takes at its start for weights and cache; null: "
        "SGLang's choice",
    )
    max_total_tokens: PositiveInt | None = Field(
        None,
        description="tokens that fit in a server's key/value cache, or in that of each of its attention_dp groups; "
        "null: as many as memory allows, 65536 on a CPU",
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="numbers in which servers on GPUs keep keys and values; auto: those of the model. FP8 makes room "
        "for twice the tokens, and samples come from other probabilities than those that are trained: use "
        "rollout correction",
    )
    context_length: PositiveInt | None = Field(
        None, description="longest sequence of a server, in tokens; null: the model's limit"
    )
    attention_backend: str | None = Field(
        None, description="SGLang's name of the attention backend; null: SGLang's choice, torch_native on a CPU"
    )
    deterministic: bool = Field(
        False,
        description="SGLang's deterministic mode: seeds are then exact on GPUs too, but generation is slower",
    )
    speculative: SpeculativeConfig | None = Field(None, description="speculative decoding on GPU servers; null: none")
    extra_args: list[str] = Field(default_factory=list, description="further arguments of sglang.launch_server")
    urls: list[str] = Field(
        default_factory=list,
        description="addresses of servers that already run (http://host:port or https://host:port, with a proxy's "
        "path if it has one); megarl then starts none",
    )
    api_key_env: str | None = Field(
        None, description="environment variable that holds the API key of the servers in `urls`; null: they need no key"
    )
    host: str | None = Field(
        None,
        description="address, or a name of it, of a private interface that servers listen on; null: loopback on one "
        "machine, on several machines the interface that reaches the first machine",
    )
    max_concurrency: PositiveInt | None = Field(
        None,
        description="maximum samples in flight per server; null: all samples, and the server queues those for which "
        "its cache has no room",
    )
    start_timeout_s: Seconds = Field(300.0, description="deadline for a server to be ready")
    request_timeout_s: Seconds | None = Field(
        None,
        description="deadline of one request for a sample; a sample gets at most three requests; null: none. Whether "
        "the server is alive is checked separately, see health_timeout_s",
    )
    health_timeout_s: Seconds = Field(
        60.0,
        description="a server counts as dead when its scheduler gives no sign of life for this long, or when a call "
        "that moves no weights takes longer; set it to many times the duration of a batch. If the trainer's machine "
        "has a GPU, and for servers of urls, start_timeout_s counts where it is longer until a server has generated "
        "its first sample, because the server may compile kernels; not so for a server of urls that is restarted at "
        "the same address",
    )
    max_restarts: NonNegativeInt = Field(3, description="restarts of each server per run")

    def nccl_environment(self) -> dict[str, str]:
        """Return the NCCL variables that SGLang sets in its processes when they are unset; trainer and servers must
        agree on them.

        With different values the two sides of a connection on one machine offer each other memory of different kinds,
        and NCCL fails with "invalid argument".
        """
        symmetric = "--enable-symm-mem" in self.extra_args
        multicast = symmetric or "--enable-nccl-nvls" in self.extra_args
        return {"NCCL_CUMEM_ENABLE": str(int(symmetric)), "NCCL_NVLS_ENABLE": str(int(multicast))}

    def external_key(self) -> str | None:
        """Return the API key of the servers in `urls` from the environment, or None when they need none. Raise
        ConfigError if the environment variable is not set.
        """
        name = self.api_key_env
        if name is not None and name not in os.environ:
            raise ConfigError(
                "the environment variable is not set",
                where="rollout.sglang.api_key_env",
                found=name,
                allowed="the name of a variable that holds the servers' API key, or null",
                fix="export the variable, or set rollout.sglang.api_key_env=null",
            )
        return None if name is None else os.environ[name]

    def argument(self, name: str) -> str | None:
        """Return the last value of the option `name` in `extra_args`, written `--name=value` or `--name value`; None:
        the option is not there."""
        value = None
        for number, argument in enumerate(self.extra_args):
            option, equals, rest = argument.partition("=")
            if option == name:
                value = rest if equals else "".join(self.extra_args[number + 1 : number + 2])
        return value

    @property
    def releases_graphs(self) -> bool:
        """Whether servers on the trainer's GPUs release the memory of their CUDA graphs together with the KV cache.

        SGLang can release only the default graphs of decode steps, so servers with `extra_args` that choose graphs keep
        theirs.
        """
        chosen = any("cuda-graph" in argument for argument in self.extra_args if argument.startswith("--"))
        return self.colocated and not chosen

    @property
    def first_gpu_given(self) -> bool:
        """Whether `extra_args` sets a server's first GPU on its machine."""
        return any(argument.startswith("--base-gpu-id") for argument in self.extra_args)

    @property
    def count(self) -> int:
        """Number of servers over all machines, whether megarl starts them or not."""
        return len(self.urls) or self.servers

    @property
    def ranks(self) -> int:
        """Number of devices per server."""
        return self.tp_size

    @property
    def attention_tp(self) -> int:
        """Number of ranks that share the attention heads, and the same samples."""
        return max(1, self.tp_size // self.attention_dp)

    @property
    def ranks_per_node(self) -> int:
        """Number of devices that one server has on each of its machines."""
        return self.ranks // self.nnodes
