"""Tensors that hold quantized numbers: none is made without parameters in FP8."""

import torch


class QuantizedTensor(torch.Tensor):
    pass
