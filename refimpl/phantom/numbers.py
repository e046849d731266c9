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
and named in `missing`; so are sparse and nested tensors.
"""

import ctypes
import os
import threading
import warnings

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from .formulas import ON_THE_CPU, seed_of
from .status import VARIABLE, libphantom

LIMIT = 256 * 2**20
missing = {}  # operation → why it has no numbers
_entered = []  # the Numbers that are on, in all threads; those of `on` stay
PLAIN = (torch.Tensor.__torch_dispatch__, torch._C._disabled_torch_dispatch_impl)  # of a class that dispatches nothing
# These make no numbers, or make them by copies, which are real.
UNTOUCHED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "record_stream", "set_",
             "resize_", "_local_scalar_dense", "is_pinned", "_pin_memory", "detach", "lift_fresh", "alias"}


COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}  # to be run once, on the device


class Numbers(TorchDispatchMode):
    """While it is on, operations on CUDA tensors have the values that they have on a CPU."""
    leaves_fake_tensors_alone = True  # for trackers: autograd minds it no more in a dry run

    def __enter__(self):
        libphantom().phantom_numbers(1)
        _entered.append(self)
        return super().__enter__()

    def __exit__(self, *exception):
        _entered.remove(self)
        libphantom().phantom_numbers(bool(_entered))
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # a dry run
            return func(*args, **kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if any(type(x).__torch_dispatch__ not in PLAIN for x in tensors):
            return NotImplemented  # it knows what it is made of, and asks again for each part
        if not concerns(func, tensors, kwargs):
            return func(*args, **kwargs)
        seed, dynamic, out = None, torch.Tag.dynamic_output_shape in func.tags and not _static_index(func, args), None
        if torch.Tag.nondeterministic_seeded in func.tags:
            seed = seed_of(torch.cuda.default_generators[_device_of(tensors, kwargs)])
        if "index_put" in func._schema.name:
            args = _with_places(*args)
        if not (dynamic or func._schema.is_mutable):  # what it takes first: it may be more than the host has
            out = func(*args, **kwargs)
            if _cannot(func, [*tensors, *tree_flatten(out)[0]]):
                return out
        computed = _on_the_cpu(func, args, kwargs, seed)
        if computed is None:
            return func(*args, **kwargs) if out is None else out
        answer, written = computed
        if dynamic:
            return tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, answer)  # its size needs numbers
        out = func(*args, **kwargs) if out is None else out
        for theirs, ours in written:
            in_host_memory(theirs).copy_(ours)
        if isinstance(answer, (bool, int, float)):  # equal, allclose
            return answer
        if not any(each.alias_info for each in func._schema.returns):
            _write(out, answer)
        return out


def on():
    """Have numbers for the rest of the process, in all of its threads, and when tensors are printed."""
    Numbers().__enter__()
    print_from_the_host()
    run, compile = threading.Thread._bootstrap_inner, torch.compile

    def run_with_numbers(thread):
        with Numbers():
            run(thread)

    def compile_nothing(*args, **kwargs):
        missing["torch.compile"] = "while there are numbers it leaves the program as it is, which may take other bytes"
        return compile(*args, **kwargs)

    threading.Thread._bootstrap_inner, torch.compile = run_with_numbers, compile_nothing
    torch.cuda.nccl.is_available = lambda tensors: False  # DataParallel then adds gradients by operations


def print_from_the_host():
    """Have tensors of the device printed from copies: to print turns all modes off, and computes on the device."""
    if torch._tensor_str._str is not _printed:
        _printed.original, torch._tensor_str._str = torch._tensor_str._str, _printed


def _printed(tensor, *, tensor_contents=None):
    return _printed.original(tensor, tensor_contents=tensor_contents) if not on_the_device(tensor) else \
        _printed.original(tensor.cpu(), tensor_contents=tensor_contents)[:-1] + f", device='{tensor.device}')"


def on_the_device(x):
    """Say whether `x` is a plain tensor on CUDA: not a fake one of a dry run, nor one that is made of others."""
    return (isinstance(x, torch.Tensor) and type(x).__torch_dispatch__ in PLAIN and x.device.type == "cuda"
            and x.layout is torch.strided and not x.is_nested and not is_functorch_wrapped_tensor(x))


def in_host_memory(x):
    """Return the memory of a tensor on the device as a tensor of the CPU, valid while `x` is."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    with warnings.catch_warnings(action="ignore"):
        plain = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    found = torch.empty(0, dtype=x.dtype).set_(plain, x.storage_offset(), x.size(), x.stride())
    found = torch._conj(found) if x.is_conj() else found  # of which the memory holds the conjugate
    return torch._neg_view(found) if x.is_neg() else found


def concerns(func, tensors, kwargs):
    """Say whether an operation reads or writes numbers on the device that have a place in its memory."""
    space, _, name = func._schema.name.partition("::")
    if space in COLLECTIVES or name in UNTOUCHED or torch.Tag.inplace_view in func.tags or any(
            each.alias_info and not each.alias_info.is_write for each in func._schema.returns):  # a view
        return False
    there = any(x.device.type == "cuda" for x in tensors) or torch.device(kwargs.get("device") or "cpu").type == "cuda"
    return there and not _cannot(func, tensors)


def _cannot(func, tensors):
    """Say whether a CPU is not to compute an operation of these tensors, and note why."""
    there = [x for x in tensors if isinstance(x, torch.Tensor) and x.device.type == "cuda"]
    if not all(map(on_the_device, there)):
        missing[str(func)] = "its tensors are sparse or nested"
    elif (nbytes := sum(x.nbytes for x in there)) > LIMIT:
        missing[str(func)] = f"its tensors have {nbytes:,} bytes, more than {LIMIT:,}"
    else:
        return False
    return True


def _device_of(tensors, kwargs):
    """Return the number of the device on which an operation runs."""
    found = next((x.device for x in tensors if x.device.type == "cuda"), None) or torch.device(kwargs["device"])
    return torch.cuda.current_device() if found.index is None else found.index


def _on_the_cpu(func, args, kwargs, seed):
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
    call = ON_THE_CPU.get(func, func)
    try:
        # What is written comes first, so that the same tensor among what is read is the copy that changes.
        for name in sorted(named, key=lambda name: not writes[name]):
            named[name] = tree_map(lambda x, write=writes[name]: taken(x, write), named[name])
        new_args = [named[name] for name in names[:len(args)]]
        new_kwargs = {name: False if name == "pin_memory" else named[name] for name in kwargs}
        if seed is None:
            return call(*new_args, **new_kwargs), written
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
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
