"""The recipe's section `sync`: how weights reach the generation servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from megarl.config.base import Seconds, Section


class SyncConfig(Section):
    """How the trainer's weights are sent to the servers."""

    transport: Literal["auto", "tensor", "distributed", "disk", "delta", "shards"] = Field(
        "auto",
        description="tensor: shared memory or CUDA IPC on the server's host; distributed: broadcast over gloo or "
        "nccl; disk: safetensors in a shared folder; delta: changed elements to a relay on the server's "
        "host; shards: from every trainer rank directly to the server ranks that store the values; "
        "auto: tensor where every server shares a host with the trainer and has no GPUs of its own, shards where a "
        "server shares GPUs of several machines with it, else distributed",
    )
    bucket_mb: PositiveInt = Field(
        256,
        description="size of a bucket in MB (10**6 bytes); a sender holds two buckets; with "
        "transport=shards what a rank sends or receives in a round; a rank with a server on its GPU has two more",
    )
    dtype: Literal["model", "bf16", "fp16", "fp32"] = Field(
        "model", description="dtype in which weights are sent; model: the dtype of the trainer's parameters"
    )
    adapters: Literal["merged", "separate"] = Field(
        "merged",
        description="what an update sends when only low-rank adapters are trained (`model.lora`). merged: all weights, "
        "with adapters merged in; separate: the base model once, then only the adapters, as files in `folder` that "
        "the servers' machines must see; requests name the adapter of their weights",
    )
    fp8: bool = Field(False, description="send projections in FP8 with one scale per 128 x 128 block")
    pause: Literal["abort", "retract", "in_place"] = Field(
        "retract",
        description="what happens to running requests at a weight update. abort: they end with the tokens that they "
        "have; retract: they continue under the new weights with a recomputed cache; in_place: they continue with the "
        "old cache (for servers without a prefix cache). With adapters=separate and retract they finish with the "
        "adapter that they began with",
    )
    verify: Literal["off", "first", "every"] = Field(
        "first",
        description="when to compare checksums of all tensors of a server with the trainer's; first: at the first "
        "update after the server's start",
    )
    timeout_s: Seconds = Field(300.0, description="deadline of each step of a weight update")
    address: str | None = Field(
        None,
        description="address at which servers reach a trainer on one machine (distributed, shards); null: that of the "
        "interface that reaches the server",
    )
    folder: str | None = Field(
        None, description="folder of the disk transport, and of adapters=separate; null: sync/ of the run folder"
    )
