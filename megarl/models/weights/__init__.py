"""Weights in and out: Hugging Face safetensors and Megatron shards."""

from megarl.models.weights.export import export_weights, iter_hf_tensors
from megarl.models.weights.fill import init_random, load_weights

__all__ = ["export_weights", "init_random", "iter_hf_tensors", "load_weights"]
