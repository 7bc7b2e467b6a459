"""The names that Megatron still looks for here."""

from transformer_engine.pytorch.quantization import FP8GlobalStateManager, fp8_autocast, fp8_model_init  # noqa: F401
