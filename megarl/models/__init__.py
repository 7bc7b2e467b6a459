"""Hugging Face models as Megatron-Core models: configuration, attention, weights in and out."""
