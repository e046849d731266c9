"""Sums of low-precision gradients in a higher precision.

bf16 has 8 significant bits. Once a sum is 256 times as large as a summand, adding that summand no longer changes it
(Higham 2002, "Accuracy and Stability of Numerical Algorithms", section 4.2). So the sum is kept in fp32, 4 bytes a
parameter. As soon as autograd has computed a parameter's gradient, it is added to the sum and freed.
"""

from ..common.marks import mark


class GradientSums:
    """Sums gradients narrower than `dtype` in `dtype` while this context is open. Their `.grad` is None meanwhile.

    Gradients that exist already become part of the sums. After the context, `write_gradients()` moves the sums to
    `.grad`. With `dtype` None, and for parameters whose gradient is wide enough, autograd sums in `.grad` as usual.

    Call `check_kept()` after each backward. It, or backward, raises RuntimeError if another hook takes a gradient away.
    """

    def __init__(self, parameters, dtype):
        self._all, self._dtype, self._sums, self._hooks = parameters, dtype, {}, []
        self.parameters = [] if dtype is None else [p for p in parameters if is_narrower(p, dtype)]
        self._written = []  # parameters whose `.grad` autograd wrote in this backward and nobody else may take

    def __enter__(self):
        narrow = set(self.parameters)
        try:
            for parameter in self._all:
                if parameter in narrow and parameter.grad is not None:
                    self._add(parameter)
                hook = self._add if parameter in narrow else self._written.append  # a C function: cheap
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        except BaseException:
            self.__exit__()  # a hook that is left would act in other backwards
            raise
        return self

    def __exit__(self, *exception):
        while self._hooks:
            self._hooks.pop().remove()

    def _add(self, parameter):
        """Move `parameter.grad`, which autograd has just written, to the sum."""
        _check_present(parameter)
        gradient, parameter.grad = parameter.grad, None  # so autograd makes a new one, and does not add in bf16
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = mark(gradient.to(self._dtype), "gradients")

    def check_kept(self):
        """Raise RuntimeError if a gradient that autograd wrote into `.grad` in the last backward is gone."""
        for parameter in self._written:
            _check_present(parameter)
        self._written.clear()

    def so_far(self, parameter):
        """Return the gradient of `parameter`, wherever it is summed; None if there is none."""
        return self._sums.get(parameter, parameter.grad)

    def start_from_zeros(self, parameter):
        """Start the sum of a parameter without a gradient: zeros, in the place and dtype of its sum."""
        summed = any(each is parameter for each in self.parameters)
        dtype = self._dtype if summed else gradient_dtype(parameter)
        zeros = mark(parameter.detach().new_zeros(parameter.shape, dtype=dtype), "gradients")
        if summed:
            self._sums[parameter] = zeros
        else:
            parameter.grad = zeros
        return zeros

    def write_gradients(self):
        """Round each sum once into its parameter's `.grad`, in the gradient's own dtype, and free the sum."""
        while self._sums:
            parameter, total = self._sums.popitem()  # one by one: a sum goes before the next gradient is made
            parameter.grad = mark(total.to(gradient_dtype(parameter)), "gradients")


def _check_present(parameter):
    """Raise RuntimeError if a hook took away the gradient that autograd has just written."""
    if parameter.grad is None:
        raise RuntimeError(f"the gradient of a parameter of shape {tuple(parameter.shape)} was taken away during "
                           "backward, by a hook that is not accumulate's (an optimizer's step in backward, say), which "
                           "sees one micro-batch's gradient only: remove it, and step after accumulate")


def gradient_dtype(parameter):
    """Return the dtype of `.grad`: the parameter's own, unless the user chose another (`parameter.grad_dtype`)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def is_narrower(parameter, dtype):
    """Tell whether the gradient of `parameter` is floating-point and has fewer bytes an element than `dtype`."""
    return parameter.is_floating_point() and gradient_dtype(parameter).itemsize < dtype.itemsize
