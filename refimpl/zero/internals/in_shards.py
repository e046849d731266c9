"""What stands in `parameter.grad` while the gradient is in shards on the ranks."""

import torch


class InShards(torch.Tensor):
    """Has the gradient's shape and no data. RuntimeError from whatever computes with it.

    Were `parameter.grad` None, `torch.nn.utils.clip_grad_norm_` would find no gradients, return 0.0, and clip nothing.
    """

    @staticmethod
    def __new__(cls, parameter, name):
        kind = {"dtype": parameter.dtype, "device": parameter.device}
        # strides of 0 and no storage: it has a shape, and takes no bytes
        return cls._make_wrapper_subclass(cls, parameter.shape, [0] * parameter.dim(), **kind, storage_size=0)

    def __init__(self, parameter, name):
        self.of = name

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        mine = [x for each in args for x in (each if isinstance(each, (list, tuple)) else [each]) if isinstance(x, cls)]
        raise RuntimeError(f"the gradient of {mine[0].of if mine else 'a parameter'} is in shards on all ranks, and "
                           f"{func} needs it whole here. Clip by engine.clip_grad_norm_(max_norm), call "
                           "engine.backward(loss) for loss.backward(), and engine.step()")

    def __repr__(self):
        return f"<gradient of {self.of}, in shards>"

    def __deepcopy__(self, memo):  # copies of a model have its parameters' gradients copied
        return self
