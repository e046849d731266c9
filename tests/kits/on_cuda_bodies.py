"""What is asked of PyTorch on the device without kernels about each operation, beside what refimpl says of it.

    python on_cuda_bodies.py 8.0     # on a GPU of that capability; prints what differs
"""

import itertools
import random
import sys

DTYPES = ("float32", "float16", "bfloat16")
HEADS = ((64, 64), (80, 80), (20, 20), (100, 100), (136, 136), (160, 160), (192, 192), (224, 224), (248, 248),
         (256, 256), (264, 264), (128, 64))
MASKS = (None, "bool", "same", "row", "grad")
CHOICES = {"math": 0, "flash": 1, "efficient": 2, "cuDNN": 3}


def attention_that_differs(gpu, count=1500):
    """[call] for which PyTorch takes another kernel than `choose` says, of `count` drawn ones."""
    import torch

    from refimpl.memory.on_cuda.attention import choose

    found = []
    cases = itertools.product(DTYPES, HEADS, MASKS, (0.0, 0.1), (False, True), (8, 2), (False, True),
                              ((512, 512), (500, 500), (1, 512), (7, 13)))
    for case in random.Random(0).sample([*cases], count):
        name, (size, wide), mask, dropout, causal, groups, grad, (rows, keys) = case
        if mask and causal:
            continue
        dtype = getattr(torch, name)
        q, k, v = (torch.empty(2, heads, length, width, dtype=dtype, device="cuda", requires_grad=grad)
                   for heads, length, width in ((8, rows, size), (groups, keys, size), (groups, keys, wide)))
        scores = {None: None, "bool": (torch.bool, False), "same": (dtype, False), "row": (dtype, False),
                  "grad": (dtype, True)}[mask]
        if scores is not None:
            shape = (1, keys) if mask == "row" else (2, 1, rows, keys)
            scores = torch.empty(shape, dtype=scores[0], device="cuda", requires_grad=scores[1])
            scores = scores.expand(rows, keys) if mask == "row" else scores
        taken = torch._fused_sdp_choice(q, k, v, scores, dropout, causal, scale=None, enable_gqa=groups == 2)
        said = choose(gpu, q, k, v, scores, dropout, causal, groups == 2)
        if CHOICES[said] != taken:
            found.append((case, said, taken))
    return found


def inside_that_differs(gpu):
    """[(operation, its arguments, bytes that its kernel took inside, bytes that are said)] in the calls below."""
    import torch
    from torch.nn import functional as F
    from torch.utils._python_dispatch import TorchDispatchMode

    from refimpl.memory.on_cuda.inside import INSIDE

    found = []

    def read():
        stats = torch.cuda.memory_stats()
        return stats["requested_bytes.all.current"], stats["requested_bytes.all.peak"]

    class Inside(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            torch.cuda.reset_peak_memory_stats()
            before = read()[0]
            outputs = func(*args, **kwargs or {})
            now, peak = read()
            if func in INSIDE and peak - max(before, now) != sum(INSIDE[func](gpu, *args)):
                shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in args]
                found.append((func, shapes, peak - max(before, now), INSIDE[func](gpu, *args)))
            return outputs

    def new(*shape, dtype, grad=True):
        return torch.empty(*shape, dtype=dtype, device="cuda", requires_grad=grad)

    def calls(dtype):
        x = lambda *shape, grad=True: new(*shape, dtype=dtype, grad=grad)  # noqa: E731
        ids = torch.zeros(8, 1024, dtype=torch.int64, device="cuda")
        images = x(2, 16, 8, 8).to(memory_format=torch.channels_last)
        for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits):
            for reduction in ("mean", "none"):
                yield loss(x(64, 100), x(64, 100, grad=False), reduction=reduction)
        yield from (torch.logsumexp(x(64, 100), -1), F.softmax(images, 1), F.log_softmax(images, 1))
        yield from (F.layer_norm(x(20, 30).T, (20,), x(20), x(20)), F.rms_norm(x(20, 30).T, (20,), x(20)))
        yield from (F.linear(x(*shape), x(out, shape[-1]), x(out)) for shape, out in (
            ((2048, 64), 512), ((4, 1000, 64), 126), ((16384, 32), 8192), ((300, 32), 8), ((7, 32), 3)))
        yield from (F.embedding(ids, x(rows, 96)) for rows in (1000, 50257))
        yield from (x(2048, 640).amax(0), x(2048, 640).mean(0), x(4096, 64).sum(1))
        yield from (x(2048, 640).norm(dim=0), x(2048, 640).prod(0), x(2048, 640).max(0)[0], x(2048, 640).std(0))
        for heads in (4, 2):  # in (B, H, T, D)
            yield F.scaled_dot_product_attention(x(2, 4, 128, 64), *(x(2, heads, 128, 64) for _ in range(2)), None, 0.1,
                                                 enable_gqa=heads == 2)
        for size, rows, groups in itertools.product((32, 64, 72, 80, 128, 192, 256, 264), (500, 1024), (8, 2)):
            for dropout, masked in ((0.0, True), (0.1, False), (0.0, False)):
                q = x(2, rows, 8, size).transpose(1, 2)
                k, v = (x(2, rows, groups, size).transpose(1, 2) for _ in range(2))
                mask = x(2, 1, rows, rows, grad=False) if masked else None
                yield F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=groups == 2)

    with Inside():
        for dtype in DTYPES:
            for output in calls(getattr(torch, dtype)):
                output.backward(torch.empty_like(output))
    return found


if __name__ == "__main__":
    from refimpl import phantom

    capability = tuple(map(int, sys.argv[1].split(".")))
    phantom.start(memory=80 * 2**30, capability=capability, processors=132)
    import torch

    from refimpl.memory.on_cuda.inside import INSIDE
    from refimpl.memory.tracking.taking import Processors

    if sys.argv[2:]:
        INSIDE[torch.ops.aten.sum.dim_IntList] = lambda gpu, *args: ()
    gpu = Processors(capability, 132)
    for each in (*attention_that_differs(gpu), *inside_that_differs(gpu)):
        print(*each)
    # torch 2.11 ends with SIGABRT where the device's thread lets go of the mode after Python's end began. It takes this
    # backward, which holds nothing of Python's, once it has let go.
    torch.ones((), device="cuda", requires_grad=True).backward()
