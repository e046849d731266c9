"""The dry run: a program on tensors that have shapes and no memory, under the same tracker.

Fake tensors run every operation's shape rules and none of its arithmetic, so the operations, the storages and their
sizes are those of the real run. (What oneDNN's recurrent layers keep for backward on a CPU has no size in their shape
rule: a note says so.)
"""

import copy
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, UnsupportedOperatorException

from .fakes.declared import Declared
from .fakes.mode import KNOWN, DryMode, note_where
from .fakes.program_lines import of_the_program, raised
from .fakes.pytorch import as_on_real_tensors
from .on_cuda import as_on_cuda
from .tracker import track

if TYPE_CHECKING:
    from .tracker import Tracker


def dry_run(function: Callable[..., Any], *args: object, sizes: dict[str, int] | None = None, values: Any = None,
            gpu: str | None = None, **kwargs: object) -> "Tracker":
    """Run `function(*args, **kwargs)` on fake tensors and return the Tracker; `.result` is what it returned.

    No memory is taken; what runs on `"cuda"` needs a GPU to be there, but none of its memory. Models, optimizers and
    tensors in the arguments are replaced by fake copies (the originals are not touched), and count as older than the
    step. What `function` builds is fake from the start.

    Fake tensors have no values, but for small ones that numbers alone made and small integers in the arguments.
    - **Placeholders.** Where the program asks for one value (`loss.item()`, `if loss.isfinite()`), it gets 0.0, 0 or
    True; comparisons are answered for numbers that are 0 (`torch.rand`: 0.5). `.notes` lists each, once, with its line,
    and each operation whose shape rule leaves out what a library keeps.
    - **Declared sizes.** A shape that depends on values (`nonzero`, a mask as index, `unique`) is refused, unless
    `sizes` has its line: a number of elements (int), a share of them (float), a function of the shape of the tensor
    that is looked through, or a list of these, given in turn, over and over. E.g. tokens are balanced among experts:
    `sizes={"modeling_mixtral.py:78": experts, "modeling_mixtral.py:84": 1 / experts}`. A function can stand for its
    lines, which are others in other versions: `{"modeling_mixtral.py:MixtralExperts.forward": [4, *[1 / 4] * 4]}`.
    - **As on a GPU.** `gpu`: its kernels, `refimpl.estimate.kernels_of("h100-sxm")`. Tensors stay on "cpu" by name, and
    each operation goes to the kernels that PyTorch takes on CUDA: attention, dropout, norms, what torch.autocast casts,
    what kernels take inside. `.notes` names the kernel of attention. Not so: cuDNN's recurrent layers, workspaces of
    cuBLAS and cuDNN, the fast path of nn.TransformerEncoder in eval. One such run at a time in a process.
    - **Declared values.** Where a placeholder would be wrong, and where `.tolist()` reads integers, of which there are
    no placeholders: `values={"train.py:31": False, "experts.py:12": [3, 5]}`.

    Raises ValueError, beginning with the line, for a shape that is not declared, for other uses of values (`.numpy()`,
    a sparse tensor), for a real tensor that the function was not given, and if an argument cannot be copied. An error
    of the program's own comes out as it is, with the placeholders given so far in its notes. Either error has the
    tracker so far in its attribute `trace`.
    """
    if gpu is not None and not hasattr(gpu, "casts"):
        raise TypeError(f"gpu={gpu!r}: expected a GPU's kernels, refimpl.estimate.kernels_of(\"a100-80\")")
    fake = DryMode(Declared(sizes, values), gpu)
    args, kwargs = _fake_copies((args, kwargs), fake)
    tracker = track(*_trackable((args, kwargs)))
    tracker.notes, tracker.kernels_of = fake.notes, gpu and "cuda"
    there = nullcontext() if gpu is None else as_on_cuda(fake.composites, gpu.casts)
    with _explained(tracker), as_on_real_tensors(fake.notes), there, fake, tracker:
        tracker.result = function(*args, **kwargs)
    return tracker


# What an error of PyTorch's says when a step cannot be run on fake tensors -> (what it means, what to do).
_VALUES = "needs the values of a tensor, and tensors have none in a dry run"
_NO_RULE = ("calls an operation that has no rule for fake tensors", "write one, torch.library.register_fake")
_MEANINGS = {
    "convert all Tensors to FakeTensors": (
        "uses a real tensor that it was not given",
        "build it inside the function, or pass it (or its model) as an argument"),
    "There was no fake impl registered": _NO_RULE,
    ".numpy() is not supported": (_VALUES, "leave .numpy() out of the step"),
    "its data is not allocated": (_VALUES, "leave what reads its memory out of the step"),
    "shape_env must not be None": ("makes a nested tensor, whose sizes are values, and tensors have none in a dry run",
                                   "pad the batch, or measure the step itself: memory.track"),
    "in DataLoader worker process": ("loads data in another process, which makes real tensors", "set num_workers=0"),
    "data pointer": (_VALUES, "leave what reads its memory out of the step"),
    "data_ptr": (_VALUES, "leave what reads its memory out of the step"),
}


@contextmanager
def _explained(tracker):
    """Turn errors about what fake tensors cannot do into a ValueError that says where, and what to do instead."""
    try:
        yield
    except BaseException as error:
        refusal = _refusal(error)
        (refusal or error).trace = tracker  # how far it came is worth as much as why it ended
        if refusal is not None:
            raise refusal from error
        for note in tracker.notes:
            error.add_note(note)
        raise


def _refusal(error):
    """Return the ValueError that says what `error` means and where it was; None if it is the program's own, or says it
    already."""
    meaning, remedy = next((found for words, found in _MEANINGS.items() if words in str(error)), (None, None))
    if isinstance(error, UnsupportedOperatorException):
        meaning, remedy = _NO_RULE
    places = raised(error)
    place = of_the_program(places)
    if meaning is not None and isinstance(error, (RuntimeError, AssertionError, TypeError)):
        return ValueError(f"{place}: `{place.expression}` {meaning}: {remedy}. {error}")
    if place.is_of_the_meters:  # the program has not begun
        return None
    if type(error) is ValueError and places[0].is_of_the_meters and not str(error).startswith(str(place)):
        return ValueError(f"{place}: `{place.expression}`: {error}")
    return None


def _fake_copies(things, fake):
    """Copy `things`, with what deepcopy leaves out: gradients, and optimizers' own attributes. Its memo holds all
    copies, and is freed here."""
    memo = {}
    with _FakeCopies(fake):
        try:
            copies = copy.deepcopy(things, memo)
            for original in list(memo.get(id(memo), ())):
                if isinstance(original, torch.Tensor) and original.is_leaf and original.grad is not None:
                    memo[id(original)].grad = copy.deepcopy(original.grad, memo)
                elif isinstance(original, torch.optim.Optimizer):
                    _copy_attributes(original, memo)
        except (TypeError, SystemError, RuntimeError) as error:
            raise ValueError(f"dry_run: an argument cannot be copied: build it inside the function. {error}") from error
    return copies


def _copy_attributes(optimizer, memo):
    """Give an optimizer's copy what a subclass added to state and groups; a wrapped `step` is left out."""
    twin = memo[id(optimizer)]
    for name in vars(optimizer).keys() - vars(twin).keys():
        if not isinstance(vars(optimizer)[name], (FunctionType, MethodType)):
            setattr(twin, name, copy.deepcopy(vars(optimizer)[name], memo))


class _FakeCopies(FakeCopyMode):
    """deepcopy under it makes fake tensors. On the CPU, numbers and small tensors of integers keep their values:
    optimizers read their step counters and learning rates, models their masks."""

    def __init__(self, fake):
        super().__init__(fake)
        self._storages = {}  # of the originals -> copies

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__deepcopy__ and id(args[0]) not in args[1] and _is_known(args[0]):
            args[1][id(args[0])] = self._with_values(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def _with_values(self, tensor):
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            copied = self._storages.setdefault(storage._cdata, storage.clone())
            known = torch.empty(0, dtype=tensor.dtype).set_(copied, tensor.storage_offset(), tensor.shape,
                                                            tensor.stride())
            fake = self.fake_mode.fake_tensor_converter.from_real_tensor(self.fake_mode, known, make_constant=True)
            return note_where(fake)


def _is_known(tensor):
    small = tensor.ndim == 0 or not (tensor.is_floating_point() or tensor.is_complex())
    return (small and type(tensor) is torch.Tensor and tensor.is_cpu and tensor.layout is torch.strided
            and not tensor.requires_grad and not tensor.is_complex() and tensor.untyped_storage().nbytes() <= KNOWN)


def _trackable(tree):
    """List the modules, optimizers and tensors in nested lists, tuples and dicts."""
    if isinstance(tree, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [found for item in items for found in _trackable(item)]
