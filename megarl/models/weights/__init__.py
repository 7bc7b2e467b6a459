"""Weights in and out: Hugging Face safetensors and Megatron shards."""

from megarl.models.weights.export import export_weights, iter_hf_tensors
from megarl.models.weights.fill import init_random, load_weights
from megarl.models.weights.plan import Coordinate, Piece, Shard, hf_tensors, slices_for

__all__ = [
    "Coordinate",
    "Piece",
    "Shard",
    "export_weights",
    "hf_tensors",
    "init_random",
    "iter_hf_tensors",
    "load_weights",
    "slices_for",
]
