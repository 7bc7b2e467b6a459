"""megarl: large-scale post-training of language models on Megatron-Core."""

__version__ = "0.1.0"
