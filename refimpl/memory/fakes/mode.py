"""Fake tensors for a whole program: where it asks for values, which they have not, it gets an answer or is refused.

Three kinds of answer:
- what is known: small tensors that numbers alone made (`linspace(0, 0.1, 12)`, step counters) keep their values;
- a placeholder, where one value is asked for: 0.0, 0, or True; a comparison is answered for numbers that are 0, so
that `isnan` says no and `isfinite` says yes. Each is noted once, with its line;
- what the user declared for a line. A shape that depends on values is never guessed.
"""

import math
import weakref
from contextlib import contextmanager, nullcontext

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    disable_fake_tensor_cache,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from ..on_cuda.dispatch import RULES, composites
from ..tracking.taking import NOT_COUNTED
from .declared import Declared, made_in_size
from .program_lines import of_the_program, running

aten = torch.ops.aten
KNOWN = 2**16  # bytes of the largest tensor whose values are kept
_MAKERS = frozenset({  # from numbers alone
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.linspace.default, aten.logspace.default,
    aten.full.default, aten.zeros.default, aten.ones.default, aten.eye.default, aten.eye.m, aten.scalar_tensor.default,
})
_PASSED_ON = frozenset("alias all any clone detach expand lift_fresh permute reshape select slice squeeze t transpose "
                       "unsqueeze view _to_copy _unsafe_view".split())
_COMPUTED = frozenset("eq ne lt le gt ge isnan isinf isposinf isneginf logical_and logical_or logical_not logical_xor "
                      "bitwise_and bitwise_or bitwise_not bitwise_xor mul".split())


def _contiguous(outputs, *args):
    """Return contiguous gradients, as the kernel does; PyTorch's rule keeps the inputs' order of dimensions."""
    return tuple(x if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in outputs)


def _statistics(outputs, x, shape, weight, *args):
    """Return float32 statistics of bfloat16 tensors under float32 weights; PyTorch's rule says bfloat16."""
    if weight is None or weight.dtype == x.dtype:
        return outputs
    return outputs[0], *(torch.empty(y.shape, dtype=weight.dtype, device=y.device) for y in outputs[1:])


def _mean_where_it_was(output, x, target, reduction=1, *args):
    """Return a mean or a sum in a storage as large as the elements: the kernel leaves it where it computed them."""
    if not reduction:
        return output
    shape = torch.broadcast_shapes(x.shape, target.shape)
    return torch.empty(shape, dtype=output.dtype, device=output.device).as_strided((), ())


# Rules of PyTorch's that say other than its kernels do: on a CPU and on CUDA, and on a CPU alone.
_AS_KERNELS_DO = {aten.mse_loss.default: _mean_where_it_was, aten.smooth_l1_loss.default: _mean_where_it_was,
                  aten.soft_margin_loss.default: _mean_where_it_was,
                  aten.binary_cross_entropy.default: lambda output, x, target, weight=None, *args: _mean_where_it_was(
                      output, x, target, *args)}
_AS_ON_A_CPU = {aten.native_layer_norm_backward.default: _contiguous, aten.native_layer_norm.default: _statistics}


class DryMode(FakeTensorMode):
    """FakeTensorMode that answers. `notes`: a line for each placeholder given. `gpu`: the GPU by whose kernels the
    tensors on "cpu" are computed; None for a CPU's."""

    is_dry_run = True  # by which `is_dry` knows it

    def __init__(self, declared=None, gpu=None):
        super().__init__()
        self.notes, self.gpu = [], gpu
        self.composites = {} if gpu is None else composites(gpu, self.notes)
        self._declared = declared or Declared()
        self._rules = _AS_KERNELS_DO | (_AS_ON_A_CPU if gpu is None else RULES)

    def __deepcopy__(self, memo):
        return self  # a copy of a fake tensor, made inside, stays in this mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return note_where(self._run(func, types, args, kwargs or {}))

    def _run(self, func, types, args, kwargs):
        for tensor in args:
            if isinstance(tensor, FakeTensor):
                if tensor.constant is not None:
                    _forget_if_replaced(tensor)
            elif isinstance(tensor, torch.Tensor) and tensor.is_meta:  # torch.tensor(3.0), where meta is the default
                args = [self.from_tensor(x) if x is tensor else x for x in args]
        try:
            if func in _MAKERS:
                known = self._made_from_numbers(func, args, kwargs)
                if known is not None:
                    return known
            if func in (aten.randperm.default, aten.randperm.generator):  # 0, 1, 2 … is as good as any other
                known = self._made_from_numbers(aten.arange.default, args, {**kwargs, "generator": None}, math.inf)
                if known is not None:
                    return known
            if func in self.composites:  # of tensors that autograd does not see
                with self:
                    return self.composites[func](*args, **kwargs)
            if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
                return self._grouped(func, types, args, kwargs)
            # PyTorch keeps what fake operations return by their arguments, storages among them, which would stay
            storage = any(isinstance(each, torch.UntypedStorage) for each in args)
            with self._large_unknown(func, args, kwargs), disable_fake_tensor_cache(self) if storage else nullcontext():
                outputs = super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return self._answer(error, args, kwargs)
        if isinstance(outputs, FakeTensor) and outputs.dtype is torch.bool and outputs.constant is None:
            outputs.stands_for = _truth(func, args)
        if func is aten.rand.default:
            outputs.stands_for = 0.5  # a layer that is dropped with a probability below stays
        if func is aten.mkldnn_rnn_layer.default:
            self._note(f"{NOT_COUNTED} that {func} keeps for backward: PyTorch's rule for fake tensors gives them "
                            "0 bytes")
        if func in self._rules and args[0].device.type == "cpu":
            with self:
                return self._rules[func](outputs, *args)
        return outputs

    # --- what is known ----------------------------------------------------------------------------------------------

    def may_turn_const(self, t):
        """Tell whether the values of this real tensor are kept."""
        return t.layout is torch.strided and t.is_cpu and not self.is_our_fake(t) and t.nbytes <= KNOWN

    def invalidate_written_to_constants(self, func, flat_arg_fake_tensors, args, kwargs):
        """Forget the values of what `func` writes into; PyTorch overlooks lists of tensors."""
        super().invalidate_written_to_constants(func, flat_arg_fake_tensors, args, kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if isinstance(value, (list, tuple)) and argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in value:
                    if self.is_our_fake(tensor) and tensor.constant is not None:
                        self.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)

    @contextmanager
    def _large_unknown(self, func, args, kwargs):
        """Hide what is known if the result would be too large to be: PyTorch would compute it all the same."""
        known = {tensor: tensor.constant for tensor in args if isinstance(tensor, FakeTensor)}
        all_known = known and all(constant is not None for constant in known.values())
        if not all_known or any(isinstance(leaf, torch.Tensor) and leaf not in known
                                for leaf in tree_leaves((args, kwargs))):
            yield
            return
        try:
            with no_dispatch():
                made = func(*(known[arg].to("meta") if isinstance(arg, FakeTensor) else arg for arg in args), **kwargs)
            large = isinstance(made, torch.Tensor) and made.nbytes > KNOWN
        except (RuntimeError, NotImplementedError):  # values are asked for, or it has no rule: then it is small
            large = False
        try:
            for tensor in known if large else ():
                tensor.constant = None
            yield
        finally:
            for tensor, constant in known.items() if large else ():
                tensor.constant = constant

    def _made_from_numbers(self, func, args, kwargs, limit=KNOWN):
        """Return the result of a maker, with its values, or None if it is large or not on the CPU."""
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        device = torch.device(kwargs.get("device", "cpu"))
        size = func(*args, **{**kwargs, "device": "meta", "pin_memory": False})
        if device.type != "cpu" or size.nbytes > limit:
            return None
        with no_dispatch():
            real = func(*args, **kwargs)
        return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)

    # --- what is not ------------------------------------------------------------------------------------------------

    def _answer(self, error, args, kwargs):
        func, place = error.func, of_the_program(running())
        if isinstance(error, DynamicOutputShapeException):
            return made_in_size(self, self._declared, place, func, args, kwargs, error)
        if func in (aten._local_scalar_dense.default, aten.item.default):
            return self._declared.value(place, running(), lambda: self._placeholder(place, _stand_in(args[0])))
        if func in (aten.equal.default, aten.allclose.default):
            return self._declared.value(place, running(), lambda: self._placeholder(place, True))
        raise ValueError(f"{place}: `{place.expression}` needs the values of a tensor ({func}), and tensors have none "
                         "in a dry run: leave it out of the step, or track a real run") from error

    def refuse_unless_declared(self, tensor):
        """Raise ValueError if no values are declared for the line that reads all integers of `tensor`: they are sizes
        or places, for which there is no placeholder."""
        place = of_the_program(running())
        if not self._declared.has_value(place):
            raise ValueError(f"{place}: `{place.expression}` reads {tensor.numel()} integers, and tensors have no "
                             f"values in a dry run. Declare them: memory.dry_run(…, values={{{str(place)!r}: [3, 5]}})")

    def _placeholder(self, place, value):
        self._note(f"{place}: `{place.expression}` reads {value} in a dry run, a placeholder: tensors have no values")
        return value

    def _note(self, note):
        if note not in self.notes:  # a loop asks at the same line each time
            self.notes.append(note)

    def _grouped(self, func, types, args, kwargs):
        """Run a grouped matmul of another type: PyTorch's rule knows bfloat16 alone, and the shape is the same."""
        with self:
            one, two = (tensor.to(torch.bfloat16) for tensor in args[:2])
        result = super().__torch_dispatch__(func, types, (one, two, *args[2:]), kwargs)
        with self:
            return torch.empty_strided(result.shape, result.stride(), dtype=args[0].dtype, device=result.device)


def note_where(output):
    """Note in which storage a tensor has the values that are known. Return it."""
    if isinstance(output, FakeTensor) and output.constant is not None:
        output.known_in = weakref.ref(output.untyped_storage())
    return output


def _forget_if_replaced(tensor):
    """Forget values that belong to what the tensor was, before `tensor.data = …`. PyTorch would put what it makes of
    them, views too, in a storage of theirs."""
    known, where = tensor.constant, getattr(tensor, "known_in", None)
    if (known.dtype, known.shape, known.stride()) != (tensor.dtype, tensor.shape, tensor.stride()) or (
            where is not None and where() is not tensor.untyped_storage()):
        tensor.constant = None


def _stand_in(value):
    """Return the number that stands for every element of a tensor."""
    if not isinstance(value, FakeTensor):
        return value
    if value.constant is not None and value.constant.numel() == 1:
        return value.constant.item()
    if hasattr(value, "stands_for"):
        return value.stands_for
    if value.dtype is torch.bool:
        return True
    if value.dtype.is_complex:
        return 0j
    return 0.0 if value.dtype.is_floating_point else 0


def _truth(func, args):
    """Return the boolean that stands for every element of `func`'s result: `func` of what stands for its arguments."""
    name = func.overloadpacket.__name__
    if name in _PASSED_ON and isinstance(args[0], FakeTensor):
        return bool(_stand_in(args[0]))
    if name.removesuffix("_") in _COMPUTED:
        with no_dispatch():
            return bool(func.overloadpacket(*(torch.tensor(_stand_in(arg)) if isinstance(arg, FakeTensor) else arg
                                              for arg in args)))
    return True
