"""Adam and SGD on the CPU with the interface of Apex's `FusedAdam` and `FusedSGD`.

What Megatron relies on, and what is kept here: the step counter is an int in the parameter group, not a tensor in each
state; states are created on the first step; `exp_avg` and `exp_avg_sq` (or `momentum_buffer`) are float32 and shaped as
the parameter. The arithmetic is AdamW's (decoupled weight decay, bias correction), in float32.
"""

import math

import torch


class FusedAdam(torch.optim.Optimizer):
    """AdamW (https://arxiv.org/abs/1711.05101) with `step` in the parameter group, as in Apex and Transformer Engine."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True, capturable=False, master_weights=False, **kwargs):
        if amsgrad or capturable or master_weights or kwargs:
            raise ValueError(f"the CPU FusedAdam takes no {sorted(kwargs) or 'amsgrad, capturable or master_weights'}")
        super().__init__(params, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                                      weight_decay=weight_decay))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            correction1, correction2 = 1.0, 1.0
            if group["bias_correction"]:
                correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            for param in group["params"]:
                grad = param.grad
                if grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
                if self.adam_w_mode:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                elif group["weight_decay"]:
                    grad = grad.add(param, alpha=group["weight_decay"])
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denominator = (state["exp_avg_sq"].sqrt() / math.sqrt(correction2)).add_(group["eps"])
                param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / correction1)


class FusedSGD(torch.optim.SGD):
    """SGD with momentum; accepts Apex's extra arguments."""

    def __init__(self, params, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False,
                 wd_after_momentum=False, materialize_master_grads=True, set_grad_none=False):
        if wd_after_momentum:
            raise ValueError("the CPU FusedSGD takes no wd_after_momentum")
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
