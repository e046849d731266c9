"""Mixed precision in one screen: products in 16 bits, weights and sums in 32, and a loss that is scaled.

"Mixed Precision Training" (Micikevicius et al. 2018) has three parts, and here is a class for each. Use either
`Autocast` (weights in fp32, each operation casts) or `Masters` (weights in 16 bits), and `LossScaler` with fp16 only.
"""

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

LOW = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.mm, torch.addmm,
       torch.baddbmm, torch.einsum, F.linear, F.conv1d, F.conv2d, F.scaled_dot_product_attention}  # products
LOSSES = {F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.kl_div, F.binary_cross_entropy_with_logits}
STEEP = {torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log, torch.pow, torch.Tensor.pow, torch.rsqrt,
         torch.softmax, F.softmax, torch.Tensor.softmax, F.log_softmax, F.layer_norm, F.rms_norm, F.group_norm,
         torch.sum, torch.Tensor.sum, torch.cumsum}  # they overflow, or add up many numbers
FP32 = {"cpu": LOSSES, "cuda": LOSSES | STEEP}  # on a CPU kernels of 16 bits add up in fp32, and bf16 has its range


class Autocast(TorchFunctionMode):  # while it is on, torch calls __torch_function__ in place of each of its functions
    """Cast for each operation, section 3.3: `with Autocast(torch.bfloat16): loss = model(x)`. Operations of LOW get
    fp32 as `dtype`, those of FP32 get `dtype` as fp32, others run as called. A weight is cast once for all its uses."""

    def __init__(self, dtype, device="cpu"):
        super().__init__()
        self.dtype, self.fp32, self.casts = dtype, FP32[device], {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        to = self.dtype if function in LOW else torch.float32 if function in self.fp32 else None
        args, kwargs = [self.cast(x, to) for x in args], {k: self.cast(x, to) for k, x in (kwargs or {}).items()}
        return function(*args, **kwargs)  # the mode is off in here: an operation made of others is one operation

    def cast(self, x, to):
        """Return x as `to`, if it is a tensor of floating point. autograd casts its gradient back."""
        if to is None or not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, self.dtype) or x.dtype is to:
            return x
        if not isinstance(x, torch.nn.Parameter) or not torch.is_grad_enabled():
            return x.to(to)  # a cast made under no_grad has no way back to its weight: not for other uses
        if x not in self.casts:
            self.casts[x] = x.to(to)
        return self.casts[x]

    def __exit__(self, *exception):
        self.casts.clear()
        return super().__exit__(*exception)


class Masters:
    """Update in fp32, section 3.1: w₃₂ ← w₃₂ − η g₃₂, w₁₆ = round(w₃₂); 1 − 10⁻⁴ in bf16 would round to 1 again.

    2Ψ weights + 2Ψ gradients + 4Ψ masters + 8Ψ moments of Adam = 16Ψ bytes, and 4Ψ more while the optimizer steps.
    `optimizer` is a function of parameters, such as `partial(torch.optim.AdamW, lr=3e-4)`.
    """

    def __init__(self, model, optimizer, dtype):
        self.weights = list(model.parameters())
        self.masters = [w.detach().float().clone().requires_grad_() for w in self.weights]  # 4Ψ
        for w in self.weights:
            w.data = w.data.to(dtype)  # 2Ψ
        self.optimizer = optimizer(self.masters)

    @torch.no_grad()
    def step(self, scale=1.0):
        """Call it in place of `optimizer.step(); optimizer.zero_grad()`."""
        for master, w in zip(self.masters, self.weights, strict=True):
            master.grad = w.grad.float() / scale  # in fp32: g / S may be too small for fp16
        self.optimizer.step()
        for master, w in zip(self.masters, self.weights, strict=True):
            w.copy_(master)  # rounds
            w.grad = master.grad = None


class LossScaler:
    """Scale the loss, section 3.2: (S · L).backward() gives S · g, of which less falls below fp16's 6·10⁻⁸. S is as
    large as it can be: doubled after 2000 good steps, and where a gradient overflows, halved and the step skipped."""

    def __init__(self, scale=2.0**16, interval=2000):
        self.scale, self.interval, self.good_steps = scale, interval, 0

    def step(self, masters):
        """Call it after `(loss.float() * scaler.scale).backward()`."""
        if all(w.grad.isfinite().all() for w in masters.weights):
            masters.step(self.scale)
            self.good_steps += 1
            if self.good_steps % self.interval == 0:
                self.scale *= 2
        else:
            for w in masters.weights:
                w.grad = None
            self.scale, self.good_steps = self.scale / 2, 0
