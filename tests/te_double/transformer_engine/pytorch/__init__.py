"""The modules that work on torch tensors."""

from transformer_engine.pytorch import ops, optimizers  # noqa: F401
from transformer_engine.pytorch.attention import DotProductAttention  # noqa: F401
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker, checkpoint  # noqa: F401
from transformer_engine.pytorch.module import (  # noqa: F401
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
)
from transformer_engine.pytorch.quantization import (  # noqa: F401
    fp8_autocast,
    fp8_model_init,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
)
