"""Adam, SGD and what works on many tensors at once."""

import torch


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
    ):
        assert adam_w_mode
        assert not amsgrad
        assert not capturable
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }

    def initialize_state(self, param, store_param_remainders):
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[param][name] = torch.zeros(param.shape, dtype=self.name_to_dtype_map[name], device=param.device)
        if self.master_weights:
            self.state[param]["master_param"] = param.detach().float()

    def get_unscaled_state(self, param, state_name, skip_unscale=False):
        return self.state[param][state_name].float()

    def set_scaled_state(self, param, state_name, unscaled_state):
        self.state[param][state_name].copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            for param in group["params"]:
                grad = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if not self.state[param]:
                    self.initialize_state(param, self.store_param_remainders)
                if grad is not None:
                    self._update(param, grad.float(), group, step)

    def _update(self, param, grad, group, step):
        state, (beta1, beta2) = self.state[param], group["betas"]
        first = state["exp_avg"].float().lerp(grad, 1 - beta1)
        second = state["exp_avg_sq"].float().lerp(grad.square(), 1 - beta2)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        main = state.get("master_param", param)
        change = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
        main.sub_(group["lr"] * (change + group["weight_decay"] * main))
        param.copy_(main)


class FusedSGD(torch.optim.SGD):
    """Only named: Megatron imports it beside Adam."""


def multi_tensor_applier(op, noop_flag_buffer, tensor_lists, *args):
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor=False):
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else None
