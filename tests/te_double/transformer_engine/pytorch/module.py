"""Linear layers and norms: tensor parallelism over the group they are given, gradients into `main_grad` on demand."""

import torch
import torch.nn.functional as F

from transformer_engine.pytorch import ops
from transformer_engine.pytorch.distributed import Exchange, gathered, same, scattered_sum, summed
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, rounded


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False
        self.tp_group = None

    def set_tensor_parallel_group(self, tp_group):
        self.tp_group = tp_group

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def init_fp8_metadata(self, num_gemms=1):
        pass

    def _parallel(self, tp_group, tp_size, sequence_parallel, parallel_mode):
        assert parallel_mode in ("row", "column", None)
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.set_tensor_parallel_group(tp_group)
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def _make_weights(self, names, bias, init_method, params_dtype, device):
        """One weight of `out_features` x `in_features` for each name, and its bias where there is one."""
        if self.parallel_mode == "column":
            assert self.out_features % self.tp_size == 0
            self.out_features //= self.tp_size
        if self.parallel_mode == "row":
            assert self.in_features % self.tp_size == 0
            self.in_features //= self.tp_size
        for number in names:
            weight = torch.nn.Parameter(
                torch.empty(self.out_features, self.in_features, dtype=params_dtype, device=device)
            )
            if init_method is not None:
                init_method(weight)
            self.register_parameter(f"weight{number}", weight)
            _mark(weight, 1 if self.parallel_mode == "row" else 0)
            if not bias:
                setattr(self, f"bias{number}", torch.empty(0, dtype=params_dtype, device=device))
                continue
            vector = torch.nn.Parameter(torch.zeros(self.out_features, dtype=params_dtype, device=device))
            self.register_parameter(f"bias{number}", vector)
            if self.parallel_mode == "row":
                vector.sequence_parallel = self.sequence_parallel
            elif self.parallel_mode == "column":
                _mark(vector, 0)

    def _multiply(self, x, weight, bias):
        assert x.dtype == weight.dtype, "Data types for parameters must match when outside of autocasted region."
        if self.tp_size > 1 and self.parallel_mode == "column":
            there, back = (gathered, scattered_sum) if self.sequence_parallel else (same, summed)
            recipe = FP8GlobalStateManager.get_fp8_recipe()
            if self.sequence_parallel and recipe is not None and recipe.float8_block_scaling():
                whole = len(x) % 128 == 0 and x.shape[-1] % 128 == 0
                assert whole, "All-gather requires quantizable tensor for quantizer Float8BlockQuantizer"
            x = Exchange.apply(x, self.tp_group, there, back)
        held = Fused.apply(weight) if self.fuse_wgrad_accumulation and weight.requires_grad else weight
        out = F.linear(rounded(x), rounded(held))
        if self.tp_size > 1 and self.parallel_mode == "row":
            there, back = (scattered_sum, gathered) if self.sequence_parallel else (summed, same)
            out = Exchange.apply(out, self.tp_group, there, back)
        return out if bias.numel() == 0 or self.return_bias else out + bias


def _mark(tensor, dim):
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        assert not hasattr(tensor, name)
        setattr(tensor, name, value)


class Fused(torch.autograd.Function):
    """A weight whose gradient is added to `main_grad`; the gradient that torch gets is not to be read."""

    @staticmethod
    def forward(ctx, weight):
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.weight.main_grad.add_(grad)
        if not hasattr(ctx.weight, "grad_added_to_main_grad"):
            return None
        ctx.weight.grad_added_to_main_grad = True
        return torch.full_like(grad, torch.nan)


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self._parallel(tp_group, tp_size, sequence_parallel, parallel_mode)
        self._make_weights([""], bias, init_method, params_dtype, device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        out = self._multiply(inp, self.weight, self.bias)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features,
        out_features,
        eps=1e-5,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        init_method=None,
        bias=True,
        normalization="LayerNorm",
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        return_layernorm_output=False,
        return_layernorm_output_gathered=False,
        parameters_split=None,
        zero_centered_gamma=False,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_wgrad=False,
        ub_bulk_dgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        name=None,
    ):
        super().__init__()
        assert normalization == "RMSNorm"
        assert not return_layernorm_output
        assert not zero_centered_gamma
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self._parallel(tp_group, tp_size, sequence_parallel, parallel_mode)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype, device=device))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self._make_weights([""], bias, init_method, params_dtype, device)

    def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
        normed = F.rms_norm(inp, (inp.shape[-1],), self.layer_norm_weight, self.eps)
        out = self._multiply(normed, self.weight, self.bias)
        return (out, self.bias) if self.return_bias else out


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        device="cuda",
        ub_overlap_rs=False,
        ub_overlap_ag=False,
        ub_name=None,
        delay_wgrad_compute=False,
        save_original_input=False,
        single_grouped_weight=False,
        single_grouped_bias=False,
        name=None,
        use_grouped_tensor=None,
    ):
        super().__init__()
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias, self.return_bias = bias, return_bias
        self.save_original_input = save_original_input
        self._parallel(tp_group, tp_size, sequence_parallel, parallel_mode)
        self._make_weights(range(num_gemms), bias, init_method, params_dtype, device)

    def forward(self, inp, m_splits, is_first_microbatch=None, out=None, dgrad_out=None):
        assert len(m_splits) == self.num_gemms
        parts = inp.split(list(m_splits))
        held = ((getattr(self, f"weight{n}"), getattr(self, f"bias{n}")) for n in range(self.num_gemms))
        return torch.cat([self._multiply(part, *pair) for part, pair in zip(parts, held, strict=True)])


class RMSNorm(ops.RMSNorm):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        **kwargs,
    ):
        if params_dtype is not None:
            kwargs["dtype"] = params_dtype
        shape = hidden_size if normalized_shape is None else normalized_shape
        super().__init__(shape, eps=eps, zero_centered_gamma=zero_centered_gamma, **kwargs)
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel


class LayerNorm(ops.BasicOperation):
    """Only named: no supported architecture has one."""
