"""Everything in fp64: also what a model computes in fp32 on purpose, as norms and losses do."""

import torch
from torch.overrides import TorchFunctionMode

CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
SINGLE = (torch.float32, torch.float16, torch.bfloat16)


class InFP64(TorchFunctionMode):
    """A mode in which a dtype that an operation is given is fp64 wherever it is a smaller one, and so is what is made
    in the default dtype.

    So two computations of the same differ by 1e-14 or so, and what differs by more is a difference in what they do.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = tuple(torch.float64 if isinstance(x, torch.dtype) and x in SINGLE else x for x in args)
        kwargs = {name: torch.float64 if isinstance(x, torch.dtype) and x in SINGLE else x
                  for name, x in (kwargs or {}).items()}
        made = (torch.Tensor.double if func in CASTS else func)(*args, **kwargs)
        new = type(made) is torch.Tensor and made.dtype in SINGLE and not any(
            isinstance(x, torch.Tensor) for x in (*args, *kwargs.values()))
        return made.double() if new else made
