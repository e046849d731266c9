"""Numbers for the device without kernels: what an operation would have written is computed on the CPU.

    with numbers.Numbers():       # or numbers.on(), for the rest of the process
        ...

The operation itself is asked of the device as ever, so it takes what it takes from PyTorch's allocator. Beside it the
CPU computes the same from the device's memory, which is memory of the host, and writes the answer there: slowly, and
for small tensors. Random numbers follow from the state of CUDA's generator, so that a state that is saved and set gives
the same ones again; they are other ones than a GPU's.

On a CPU the last bit of torch's fused Adam depends on where a tensor is cut: elements after the last whole vector are
computed by other instructions. On a GPU it does not.

An operation that the CPU does not have, or whose tensors have more than `LIMIT` bytes together, is left without numbers
and named in `missing`.
"""

import ctypes
import os
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from . import VARIABLE, libphantom
from .formulas import ON_THE_CPU, seed_of

LIMIT = 256 * 2**20
missing = {}  # operation → why it has no numbers
PLAIN = (torch.Tensor, torch.nn.Parameter)
# These make no numbers, or make them by copies, which are real.
UNTOUCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "set_",
             "resize_", "_local_scalar_dense", "is_pinned", "_pin_memory", "detach", "lift_fresh", "alias"}


COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}  # to be run once, on the device


class Numbers(TorchDispatchMode):
    """While it is on, operations on CUDA tensors have the values that they have on a CPU."""

    def __enter__(self):
        libphantom().phantom_numbers(1)
        return super().__enter__()

    def __exit__(self, *exception):
        libphantom().phantom_numbers(0)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not concerns(func, args, kwargs):
            return func(*args, **kwargs)
        if "index_put" in func._schema.name:
            args = _with_places(*args)
        computed = _on_the_cpu(func, args, kwargs)
        if computed is None:
            return func(*args, **kwargs)
        answer, written = computed
        if torch.Tag.dynamic_output_shape in func.tags and not _static_index(func, args):
            return tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, answer)  # its size needs numbers
        out = func(*args, **kwargs)
        for theirs, ours in written:
            in_host_memory(theirs).copy_(ours)
        if isinstance(answer, (bool, int, float)):  # equal, allclose
            return answer
        if not any(each.alias_info for each in func._schema.returns):
            _write(out, answer)
        return out


def on():
    """Have numbers for the rest of the process, when tensors are printed, too."""
    Numbers().__enter__()
    if torch._tensor_str._str is not _printed:
        _printed.original, torch._tensor_str._str = torch._tensor_str._str, _printed


def _printed(tensor, *, tensor_contents=None):
    """Print from a copy on the host: to print turns all modes off, and then computes on the device."""
    return _printed.original(tensor, tensor_contents=tensor_contents) if not on_the_device(tensor) else \
        _printed.original(tensor.cpu(), tensor_contents=tensor_contents)[:-1] + f", device='{tensor.device}')"


def on_the_device(x):
    """Say whether `x` is a plain tensor on CUDA: not a fake one of a dry run, nor one that is made of others."""
    return isinstance(x, torch.Tensor) and type(x) in PLAIN and x.device.type == "cuda"


def in_host_memory(x):
    """Return the memory of a tensor on the device as a tensor of the CPU, valid while `x` is."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    with warnings.catch_warnings(action="ignore"):
        plain = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(plain, x.storage_offset(), x.size(), x.stride())


def concerns(func, args, kwargs):
    """Say whether an operation reads or writes numbers on the device, and all of its tensors are plain ones."""
    space, _, name = func._schema.name.partition("::")
    if space in COLLECTIVES or name in UNTOUCHED or any(
            each.alias_info and not each.alias_info.is_write for each in func._schema.returns):  # a view
        return False
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    if not any(map(on_the_device, tensors)) and torch.device(kwargs.get("device") or "cpu").type != "cuda":
        return False
    if any(type(x) not in PLAIN or x.is_sparse for x in tensors):
        return False
    if (nbytes := sum(x.nbytes for x in tensors)) > LIMIT:
        missing[str(func)] = f"its tensors have {nbytes:,} bytes, more than {LIMIT:,}"
        return False
    return True


def _on_the_cpu(func, args, kwargs):
    """Return (what the CPU answers, [(tensor on the device, what it shall hold)]), None if the CPU does not have it."""
    copies, written = {}, []
    names = [each.name for each in func._schema.arguments]
    writes = {each.name: bool(each.alias_info and each.alias_info.is_write) for each in func._schema.arguments}

    def taken(x, write):
        if isinstance(x, torch.Tensor):
            if id(x) not in copies:
                ours = in_host_memory(x) if on_the_device(x) else x
                if write:
                    ours = ours.clone()
                    written.extend([(x, ours)] if on_the_device(x) else [])
                copies[id(x)] = ours
            return copies[id(x)]
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return _cpu_generator(x) if isinstance(x, torch.Generator) and x.device.type == "cuda" else x

    named = dict(zip(names, args, strict=False)) | kwargs
    # What is written comes first, so that the same tensor among what is read is the copy that changes.
    for name in sorted(named, key=lambda name: not writes[name]):
        named[name] = tree_map(lambda x, write=writes[name]: taken(x, write), named[name])
    new_args = [named[name] for name in names[:len(args)]]
    new_kwargs = {name: False if name == "pin_memory" else named[name] for name in kwargs}
    call = ON_THE_CPU.get(func, func)
    try:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return call(*new_args, **new_kwargs), written
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed_of(torch.cuda.default_generators[torch.cuda.current_device()]))
            return call(*new_args, **new_kwargs), written
    except (NotImplementedError, RuntimeError, TypeError) as error:
        missing[str(func)] = str(error).partition("\n")[0][:200]
        return None


def _cpu_generator(generator):
    found = torch.Generator()
    return found.manual_seed(seed_of(generator))


def _with_places(x, indices, *rest):
    """Give an index_put the places that its masks mean: a mask's count is a number, which a kernel would have made."""
    places = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            places += [each.to(index.device) for each in (in_host_memory(index) if on_the_device(index) else index)
                       .nonzero().unbind(1)]
        else:
            places.append(index)
    return x, places, *rest


def _static_index(func, args):
    """Say whether an index has no mask in it, so that the size of what it takes is known."""
    return func is torch.ops.aten.index.Tensor and all(
        each is None or each.dtype not in (torch.bool, torch.uint8) for each in args[1])


def _write(out, answer):
    for theirs, ours in zip(tree_flatten(out)[0], tree_flatten(answer)[0], strict=False):
        if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor) and theirs.numel() == ours.numel():
            (in_host_memory(theirs) if on_the_device(theirs) else theirs).copy_(ours.view(theirs.shape))


if os.environ.get(f"{VARIABLE}_NUMBERS"):  # phantom.start(numbers=True)
    on()
