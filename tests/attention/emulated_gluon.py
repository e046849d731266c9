"""Gluon's kernel step by step on the CPU: its functions as plain Python, its partitions as threads, real barriers.

What runs in the background is put off as long as it may be: a product reads its operands when somebody waits for it, a
store when somebody waits for that, and a load fills its buffer with NaN before it brings the values. So what is waited
for too late or given back too early is wrong here as well, and a barrier that is missing blocks until a timeout.
"""

import queue
import threading
import time
import types
from types import SimpleNamespace

import torch

from refimpl.attention import gluon_forward
from refimpl.attention.call.arguments import empty_outputs

TIMEOUT, PRODUCT_TAKES, LOAD_TAKES = 20, 0, 0  # seconds


class Tile:
    """Values in registers."""
    def __init__(self, x):
        self.x, self.shape, self.dtype, self.type = x, x.shape, x.dtype, SimpleNamespace(layout=None)

    def to(self, dtype):
        return Tile(self.x.to(dtype))

    def __getitem__(self, at):
        return Tile(self.x[at])


def _operator(name):
    def apply(self, other):
        result = getattr(bare(self), name)(bare(other))
        assert result is not NotImplemented
        return Tile(result)
    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "lt", "le", "ge", "eq", "and"):
    setattr(Tile, f"__{_name}__", _operator(f"__{_name}__"))


def bare(x):
    """The torch tensor of a Tile; a product that nobody waited for has none."""
    assert not isinstance(x, Product), "used before it is complete"
    return x.x if isinstance(x, Tile) else x


def on_tiles(function):
    def apply(*values, **_):
        wrapped = any(isinstance(x, Tile) for x in values)
        result = function(*(torch.as_tensor(bare(x)) for x in values))
        return Tile(result) if wrapped else Scalar(result)
    return apply


class Scalar(int):
    """An int of a kernel: quotients are rounded to 0, as in C."""
    def to(self, dtype):
        return self


def _scalar_operator(name):
    def apply(self, other):
        if name in ("__floordiv__", "__mod__"):
            quotient = abs(int(self)) // int(other) * (1 if self >= 0 else -1)
            return Scalar(quotient if name == "__floordiv__" else int(self) - quotient * int(other))
        result = getattr(int, name)(self, other)
        return result if result is NotImplemented else Scalar(result)
    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "lt", "and", "xor"):
    setattr(Scalar, f"__{_name}__", _scalar_operator(f"__{_name}__"))


class Pointer:
    def __init__(self, x, offset=0):
        self.x, self.offset, self.dtype = x, offset, SimpleNamespace(element_ty=x.dtype)

    def __add__(self, offset):
        return Pointer(self.x, bare(offset) + self.offset)


class Buffer:
    """Shared memory."""
    def __init__(self, x):
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def index(self, i):
        return Buffer(self.x[i])

    def permute(self, order):
        return Buffer(self.x.permute(order))

    def store(self, value):
        self.x.copy_(bare(value))


class Barrier:
    def __init__(self):
        self.changed, self.phase, self.bytes = threading.Condition(), 0, 0

    def start(self, count):
        self.count = self.missing = count

    def arrive(self, count=0, expected=0):
        with self.changed:
            self.missing, self.bytes = self.missing - count, self.bytes + expected
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if not self.missing and not self.bytes:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, phase):
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != phase, TIMEOUT), "a barrier that nobody completes"


class Product:
    """A product under way."""
    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc

    def complete(self):
        product = self.a.x @ self.b.x
        return Tile(product + bare(self.acc) if self.use_acc else product)


class Descriptor:
    def __init__(self, base, shape, strides, block, layout):
        self.x = base.x.as_strided([int(n) for n in shape], [int(n) for n in strides])
        self.block, self.block_type = block, SimpleNamespace(nbytes=torch.Size(block).numel() * base.x.element_size())

    def cut(self, place):
        return self.x[tuple(slice(i, i + n) for i, n in zip(place, self.block, strict=True))]


class Machine:
    """One program at a time, with all that it calls `gl`, `tl`, `mbarrier`, `tma` and so on."""
    def __init__(self, modules, programs):
        self.programs, self.own, self.loads = programs, threading.local(), queue.SimpleQueue()
        self.names = {
            "gl": self.language(), "tl": self.language(), "tma": SimpleNamespace(
                make_tensor_descriptor=Descriptor, async_copy_global_to_shared=self.load,
                async_copy_shared_to_global=lambda desc, place, buf: self.own.stores.append((desc, place, buf)),
                store_wait=self.store_wait),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: "barrier", init=lambda bar, count: bar.start(count),
                wait=lambda bar, phase: bar.wait(int(phase)), arrive=lambda bar, count: bar.arrive(count),
                expect=lambda bar, nbytes: bar.arrive(1, nbytes)),
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.wait, "fence_async_shared": lambda: None}
        for module in modules:  # each jitted function as plain Python, under the names above
            for name, function in vars(module).items():
                if isinstance(getattr(function, "fn", None), types.FunctionType):
                    self.names[name] = types.FunctionType(function.fn.__code__, self.names, name)

    def language(self):
        return SimpleNamespace(
            program_id=lambda axis: Scalar(self.program), num_programs=lambda axis: Scalar(self.programs),
            int32=torch.int32, int64=torch.int64, float32=torch.float32, static_range=range,
            arange=lambda first, end, layout: Tile(torch.arange(first, end)), convert_layout=lambda x, layout: x,
            full=lambda shape, value, dtype, layout: Tile(torch.full(shape, float(value)).to(dtype)),
            zeros=lambda shape, dtype, layout: Tile(torch.zeros(shape, dtype=dtype)),
            minimum=on_tiles(torch.minimum), maximum=on_tiles(torch.maximum), exp2=on_tiles(torch.exp2),
            log2=on_tiles(torch.log2), where=on_tiles(torch.where), cdiv=lambda a, b: Scalar(a + b - 1) // b,
            max=lambda x, axis: Tile(x.x.amax(axis)), sum=lambda x, axis: Tile(x.x.sum(axis)), store=self.write,
            NVMMASharedLayout=lambda *_, **__: None, NVMMADistributedLayout=lambda *_: None,
            SliceLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize)

    def allocate(self, dtype, shape, layout):
        if layout == "barrier":
            return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
        return Buffer(torch.full(shape, torch.nan, dtype=dtype))

    def load(self, desc, place, bar, buf):
        buf.x.fill_(torch.nan)
        self.loads.put((desc, place, bar, buf))

    def bring(self):
        """The tensor memory accelerator: another thread."""
        while (job := self.loads.get()) is not None:
            time.sleep(LOAD_TAKES)
            desc, place, bar, buf = job
            found = desc.cut(place)[0, 0]
            buf.x.zero_()[:found.shape[0], :found.shape[1]] = found
            bar.arrive(0, -desc.block_type.nbytes)

    def store_wait(self, pending):
        assert pending == 0
        for desc, place, buf in self.own.stores:
            target = desc.cut(place)[0, 0]
            target.copy_(buf.x[:target.shape[0], :target.shape[1]])
        self.own.stores = []

    def write(self, pointer, value, mask):
        pointer.x.view(-1)[pointer.offset[mask.x]] = value.x[mask.x]

    def multiply(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        self.own.products.append(Product(a, b, acc, use_acc))
        return self.own.products[-1]

    def wait(self, outstanding, deps):
        done = self.own.products[:len(self.own.products) - outstanding]
        self.own.products = self.own.products[len(done):]
        time.sleep(PRODUCT_TAKES)
        results = [product.complete() for product in done]
        found = [results[done.index(x)] for x in deps]
        return found[0] if len(found) == 1 else tuple(found)

    def specialize(self, partitions, warps, registers):
        failures = []
        def run(function, args):
            self.own.products, self.own.stores = [], []
            try:
                function(*args)
                assert not self.own.products and not self.own.stores, "left under way"
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=x) for x in (*partitions, (self.bring, ()))]
        for thread in threads:
            thread.start()
        for thread in threads[:-1]:
            thread.join()
        self.loads.put(None)
        threads[-1].join()
        if failures:
            raise failures[0]


def forward(modules, q, k, v, *, causal, window, programs=3):
    """(out, lse2) from the functions of `modules`, the last one before others; NaN where nothing was written."""
    out, lse2 = (x.fill_(torch.nan) for x in empty_outputs(q))
    values, constants = gluon_forward.launch_arguments(q, k, v, out, lse2, q.shape[-1] ** -0.5, causal, window)
    scalars = {name: Scalar(x) if isinstance(x, int) else x for name, x in values.items()}
    pointers = {name: Pointer(x) for name, x in values.items() if isinstance(x, torch.Tensor)}
    machine = Machine(modules, programs)
    for machine.program in range(programs):
        machine.names["forward_kernel"](**scalars | pointers, **constants)
    return out, lse2
