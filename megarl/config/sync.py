"""The recipe's section `sync`: weights from the trainer to generation servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from megarl.config.base import Seconds, Section


class SyncConfig(Section):
    """The transfer of the trainer's weights to the servers."""

    transport: Literal["auto", "tensor", "distributed", "disk", "delta"] = Field(
        "auto",
        description="tensor: shared memory or CUDA IPC on the server's host; distributed: broadcast over gloo or "
        "nccl; disk: safetensors in a shared folder; delta: changed elements to a relay on the server's "
        "host; auto: tensor where every server shares a host with the trainer and has no GPUs of its own,"
        " else distributed",
    )
    bucket_mb: PositiveInt = Field(256, description="MB (10**6 bytes) of a bucket; a sender holds two")
    dtype: Literal["model", "bf16", "fp32"] = Field(
        "model", description="dtype on the wire; model: that of the trainer's parameters"
    )
    fp8: bool = Field(False, description="send projections as FP8 with one scale per 128 x 128 block")
    pause: Literal["abort", "retract", "in_place"] = Field(
        "retract",
        description="running requests at a weight update. abort: end with what they have; retract: continue under the"
        " new weights, with their cache recomputed; in_place: continue with the old cache, for servers "
        "without a prefix cache",
    )
    verify: Literal["off", "first", "every"] = Field(
        "first",
        description="compare checksums of all tensors of a server with the trainer's; first: at its first update "
        "since it started",
    )
    timeout_s: Seconds = Field(300.0, description="deadline of every single step of a synchronisation")
    address: str | None = Field(
        None,
        description="address at which servers reach a trainer of one machine (distributed); null: that of the "
        "interface that reaches the server",
    )
    folder: str | None = Field(None, description="folder of the disk transport; null: sync/ of the run folder")
