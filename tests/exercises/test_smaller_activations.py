"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import numpy as np
import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from exercises import smaller_activations as page
from refimpl.activations import compress_activations
from refimpl.activations.codecs import encode_bits
from refimpl.checkpointing import recompute

# --- first -----------------------------------------------------------------------------------------------------------


def hooks():
    places = torch.arange(8)

    def pack(x):
        if x.dtype is not torch.bool:
            return x
        bits = F.pad(x.flatten(), (0, -x.numel() % 8)).view(-1, 8)  # False fills the last byte up
        return (bits << places).sum(1).to(torch.uint8), x.shape

    def unpack(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        packed, shape = kept
        bits = packed[:, None] >> places & 1
        return bits.flatten()[: shape.numel()].bool().view(shape)

    return pack, unpack


def hooks_of_the_library():
    def pack(x):
        return (encode_bits(x.flatten()), x.shape) if x.dtype is torch.bool else x

    return pack, lambda kept: kept if isinstance(kept, torch.Tensor) else kept[0].decode().view(kept[1])


def hooks_in_numpy():
    def pack(x):
        return (np.packbits(x.numpy(), axis=None), x.shape) if x.dtype is torch.bool else x

    def unpack(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        packed, shape = kept
        return torch.from_numpy(np.unpackbits(packed, count=shape.numel())).bool().view(shape)

    return pack, unpack


def bit_by_bit():
    def pack(x):
        if x.dtype != torch.bool:
            return x
        flat, packed = x.reshape(-1), torch.zeros((x.numel() + 7) // 8, dtype=torch.uint8)
        for i in range(8):
            part = flat[i::8]
            packed[: len(part)] += part * 2**i
        shape = x.shape
        return lambda: (packed, shape)

    def unpack(kept):
        if not callable(kept):
            return kept
        packed, shape = kept()
        flat = torch.empty(shape.numel(), dtype=torch.bool)
        for i in range(8):
            flat[i::8] = (packed[: len(flat[i::8])] // 2**i) % 2
        return flat.reshape(shape)

    return pack, unpack


def packing(pack_bool, unpack_bool, is_mask=lambda x: x.dtype is torch.bool):
    """Return an answer: `pack_bool(x)` returns a tuple of what is kept, which `unpack_bool` takes."""
    def pack(x):
        return pack_bool(x) if is_mask(x) else x

    return lambda: (pack, lambda kept: kept if isinstance(kept, torch.Tensor) else unpack_bool(*kept))


def library_bits(x):
    return encode_bits(x.flatten()), x.shape


def decoded(bits, shape):
    return bits.decode().view(shape)


def reversed_bits(bits, shape):
    return torch.cat([part.flip(0) for part in bits.decode().split(8)]).view(shape)


def with_x_in_a_closure():
    pack, unpack = hooks()
    return lambda x: (lambda: (pack(x), x.dtype)[0]), lambda kept: unpack(kept())


def whole_bytes_only(x):
    return (x.reshape(-1, 8) << torch.arange(8)).sum(1).to(torch.uint8), x.shape


def in_int64(x):
    bits = F.pad(x.flatten(), (0, -x.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8)).sum(1), x.shape


def from_int64(packed, shape):
    return (packed[:, None] >> torch.arange(8) & 1).flatten()[: shape.numel()].bool().view(shape)


# --- second ----------------------------------------------------------------------------------------------------------


def code(x, group):
    n = len(x)
    padded = torch.cat((x, x[-1:].expand(-n % group)))  # the last group: its last value once more
    rows = padded.view(-1, group)
    least, most = rows.aminmax(dim=1, keepdim=True)
    step = (most - least) / 15
    codes = ((rows - least) / torch.where(step > 0, step, torch.inf)).round().to(torch.uint8).flatten()[:n]
    codes = F.pad(codes, (0, n % 2))
    packed = codes[::2] | codes[1::2] << 4  # two codes in a byte

    def decode(packed, least, step):
        codes = torch.stack((packed & 15, packed >> 4), 1).flatten()[:n]
        rows = F.pad(codes, (0, -n % group)).view(-1, group)
        return (least + rows * step).flatten()[:n]

    return (packed, least, step), decode


def code_group_by_group(x, group):
    ranges, codes = [], []
    for part in x.split(group):
        low, high = part.min(), part.max()
        ranges.append(torch.stack((low, high)))
        codes.append(torch.round((part - low) * 15 / (high - low)).nan_to_num(0))
    flat = torch.cat([*codes, torch.zeros(len(x) % 2)]).view(-1, 2)
    packed = (16 * flat[:, 0] + flat[:, 1]).to(torch.uint8)

    def decode(packed, ranges):
        codes = torch.stack((packed // 16, packed % 16), dim=1).float().flatten()[: len(x)]
        return torch.cat([low + part * (high - low) / 15 for (low, high), part in zip(
            ranges, codes.split(group), strict=True)])

    return [packed, torch.stack(ranges)], decode


def code_by_halves(x, group):
    """The first half of the values in the low bits, the second in the high ones."""
    n, place = len(x), torch.arange(len(x)) // group
    low = torch.full((place[-1] + 1,), torch.inf).scatter_reduce(0, place, x, "amin")
    step = (torch.full_like(low, -torch.inf).scatter_reduce(0, place, x, "amax") - low) / 15
    codes = torch.div(x - low[place], step[place]).nan_to_num(0).round().to(torch.uint8)
    half = (n + 1) // 2
    packed = codes[:half].clone()
    packed[: n - half] += codes[half:] * 16

    def decode(packed, low, step):
        codes = torch.cat((packed % 16, packed.div(16, rounding_mode="floor")))[:n]
        return torch.addcmul(low[place], codes.float(), step[place])

    return (packed, low, step), decode


def coded(x, group, *, levels=15, rounded=torch.round, guard=True, shared=False, dtype=torch.float32, more=0):
    """Quantize with a fault. Returns (codes in fp32, least, step, of each group)."""
    parts = x.split(len(x) if shared else group)
    least, most = (torch.stack(each).to(dtype).float() for each in zip(*map(torch.aminmax, parts), strict=True))
    step = ((most - least) / levels).to(dtype).float()
    codes = [rounded((part - low) / (by + more if by > 0 or not guard else 1)) for part, low, by in zip(
        parts, least, step, strict=True)]
    return torch.cat(codes).clamp(0, 15).nan_to_num(7), least, step


def faulty(x, group, *, width=torch.uint8, two=True, **options):
    """Code with a fault, in two codes a byte or one."""
    codes, least, step = coded(x, group, **options)
    even = F.pad(codes, (0, len(x) % 2)).view(-1, 2)
    packed = (even[:, 0] + 16 * even[:, 1]).to(width) if two else codes.to(width)
    size = len(x) if options.get("shared") else group

    def decode(packed, least, step):
        codes = torch.stack((packed % 16, packed // 16), 1).flatten()[: len(x)] if two else packed
        return torch.cat([low + part * (by if by > 0 or options.get("guard", True) else 1) for part, low, by in zip(
            codes.float().split(size), least, step, strict=True)])

    return (packed, least, step), decode


def keeping_x(x, group):
    tensors, _ = code(x, group)
    return tensors, lambda *tensors: x


def without_the_last_group(x, group):
    whole = len(x) // group * group
    tensors, decode = code(x[:whole], group)
    return tensors, decode


def swapped_halves(x, group):
    (packed, least, step), decode = code(x, group)
    return (packed << 4 | packed >> 4, least, step), decode


def freed(x, group):
    tensors, decode = code(x, group)
    tensors[0].untyped_storage().resize_(0)
    return tensors, decode


def decoding_to(change):
    def answer(x, group):
        tensors, decode = code(x, group)
        return tensors, lambda *tensors: change(decode(*tensors))

    return answer


# --- third -----------------------------------------------------------------------------------------------------------


def forward(model, tokens):
    norms, handles = [], []

    def note(x):
        norms.append(x.detach().norm().item())

    for block in model.blocks:
        handles.append(block.register_forward_hook(lambda block, args, x: note(x)))
        handles.append(block.mlp.register_forward_hook(lambda mlp, args, x: note(args[0])))
    with compress_activations(model):
        loss = model(tokens, tokens)
    for handle in handles:
        handle.remove()
    return loss, norms


def forward_twice(model, tokens):
    with torch.no_grad():
        _, norms = page.saves_nothing(model, tokens)
    del model.outputs
    with compress_activations(model):
        return model(tokens, tokens), norms


def forward_by_parts(model, tokens):
    norms = []
    with compress_activations(model, group=256):
        x = model.embed(tokens)
        for block in model.blocks:
            x = x + block.attention(block.norm1(x))
            y = block.norm2(x)
            norms.append(torch.linalg.vector_norm(y.detach()))
            x = x + block.mlp(y)
            norms.append(torch.linalg.vector_norm(x.detach()))
        return model.predict(x, tokens), tuple(norms)


def forward_again(model, tokens):
    """Recomputes in place of rounding."""
    _, norms = forward_twice(model, tokens)
    with recompute(model.blocks):
        return model(tokens, tokens), norms


def hooked(model, tokens, *, of_block=lambda x: x.detach().norm().item(), of_mlp=None, blocks_first=False,
           remove=True, context=None, kept=None):
    found, handles, of_mlp = {}, [], of_mlp or of_block

    def note(where, x, function):
        found[where] = function(x)
        if kept:
            model.kept = [*getattr(model, "kept", []), kept(x)]

    for i, block in enumerate(model.blocks):
        handles.append(block.register_forward_hook(lambda block, args, x, i=i: note((1, i), x, of_block)))
        handles.append(block.mlp.register_forward_hook(lambda mlp, args, x, i=i: note((0, i), args[0], of_mlp)))
    with context(model) if context else compress_activations(model, smallest=0):
        loss = model(tokens, tokens)
    for handle in handles if remove else ():
        handle.remove()
    order = sorted(found) if blocks_first else sorted(found, key=lambda where: where[::-1])
    return loss, [found[where] for where in order]


def blocks_alone(model, tokens):
    loss, norms = hooked(model, tokens)
    return loss, norms[1::2]


def logits(model, tokens):
    return model(tokens), hooked(model, tokens)[1]


def loss_and_plain_norms(model, tokens):
    loss, norms = hooked(model, tokens)
    return loss.item(), norms


def signs(model):
    """Keeps the signs of activations, of which gradients are wrong."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        if not x.requires_grad or x.untyped_storage().data_ptr() in owned or x.is_leaf:
            return x.detach()
        return encode_bits((x >= 0).flatten()), x.shape

    def unpack(kept):
        return kept if isinstance(kept, torch.Tensor) else kept[0].decode().view(kept[1]).float() - 0.5

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


ANSWERS = {
    page.first: Answers(
        right=[hooks, hooks_of_the_library, hooks_in_numpy, bit_by_bit],
        wrong=[
            (packing(lambda x: (encode_bits(x.flatten()),), lambda bits: bits.decode()),
             "pack was given a tensor of shape (384, 256) in torch.bool, and unpack returns one of shape (98304,)"),
            (packing(library_bits, lambda bits, shape: decoded(bits, shape).byte()), "and unpack returns one of shape "
             "(384, 256) in torch.uint8"),
            (packing(library_bits, reversed_bits), "the gradient is another"),
            (packing(library_bits, lambda bits, shape: ~decoded(bits, shape)), "the gradient is another"),
            (packing(library_bits, decoded, lambda x: not x.is_floating_point()), "in torch.int64, and unpack returns"),
            (packing(lambda x: library_bits(x != 0), decoded, lambda x: True), "in torch.float32, and unpack returns"),
            (packing(lambda x: (encode_bits(x.t().flatten()), x.shape), decoded), "the gradient is another"),
            (packing(lambda x: (x.byte(),), lambda x: x.bool()), "98,304 elements in bits leaves"),
            (packing(in_int64, from_int64), "the gradient is right, but"),
            (packing(lambda x: (library_bits(x), x), lambda kept, x: decoded(*kept)), "the gradient is right, but"),
            (packing(whole_bytes_only, from_int64), "your function raises RuntimeError"),
            (packing(lambda x: (x.tolist(),), torch.tensor), "the mask is kept outside of tensors"),
            (packing(lambda x: (x.numpy().copy(),), torch.from_numpy), "the mask is kept outside of tensors"),
            (packing(library_bits, lambda *kept: None), "unpack: expected a tensor, you return None"),
            (packing(library_bits, lambda kept: kept), "your function raises TypeError"),
            (lambda: (hooks()[0], lambda: None), "and does not take them"),
            (with_x_in_a_closure, "the gradient is right, but"),
            (lambda: hooks()[0], "expected 2 values")],
        saves_nothing=(lambda: (lambda x: x, lambda x: x), "the gradient is right, but"),
    ),
    page.second: Answers(
        right=[code, code_group_by_group, code_by_halves],
        wrong=[
            (lambda x, group: ((x,), lambda x: x), "1024 values in groups of 64 take 4,096 bytes: expected 640"),
            (lambda x, group: ((x.half(),), lambda x: x.float()), "take 2,048 bytes: expected 640"),
            (partial(faulty, two=False), "take 1,152 bytes: expected 640"),
            (partial(faulty, width=torch.int64), "take 4,224 bytes: expected 640"),
            (partial(faulty, shared=True), "group 0 of 1024 values in groups of 64 is off by"),
            (partial(faulty, rounded=torch.floor), "of a step; 0.5 is the most"),
            (partial(faulty, rounded=lambda x: (x + torch.rand(len(x))).floor()), "of a step; 0.5 is the most"),
            (partial(faulty, levels=16), "of a step; 0.5 is the most"),
            (partial(faulty, levels=14), "of a step; 0.5 is the most"),
            (partial(faulty, more=1e-8), "is off by 4.000 of a step; 0.5 is the most. Its values go from -1.57e-07"),
            (partial(faulty, guard=False), "is off by 7, and its values are all equal"),
            (partial(faulty, dtype=torch.bfloat16), "of a step; 0.5 is the most"),
            (keeping_x, "when decode gets the tensors of other values: it may use its arguments alone"),
            (without_the_last_group, "expected 1000 values in torch.float32, of shape (1000,), you return"),
            (swapped_halves, "of a step; 0.5 is the most"),
            (freed, "a tensor has no bytes"),
            (decoding_to(lambda x: x.view(1, -1)), "of shape (1024,), you return a tensor of shape (1, 1024)"),
            (decoding_to(torch.Tensor.half), "you return a tensor of shape (1024,) in torch.float16"),
            (decoding_to(torch.Tensor.tolist), "decode: expected a tensor"),
            (lambda x, group: (*code(x, group)[0], code(x, group)[1]), "expected 2 values (a list or tuple, each of it "
             "a tensor; a function), you return"),
            (lambda x, group: code(x, group)[0], "expected 2 values")],
        same=("> → >=",),  # 0 / 0: whatever code it becomes, the step is 0
    ),
    page.third: Answers(
        right=[forward, forward_twice, forward_by_parts, forward_again],
        wrong=[
            (partial(hooked, kept=lambda x: x.detach()), "loss and norms are right, but"),
            (partial(hooked, kept=lambda x: x.clone()), "loss and norms are right, but"),
            (partial(hooked, context=lambda model: torch.enable_grad()), "1.00 of what a plain forward keeps"),
            (partial(hooked, context=partial(compress_activations, method="lossless")), "loss and norms are right"),
            (partial(hooked, context=partial(compress_activations, method="bf16")), "0.50 of what a plain"),
            (partial(hooked, context=lambda model: torch.no_grad()), "your loss has no graph"),
            (partial(hooked, context=signs), "the gradient is off by more than 5 %"),
            (partial(hooked, blocks_first=True), "norm 1 is"),
            (partial(hooked, of_block=lambda x: x.detach().norm(1).item()), "norm 0 is"),
            (partial(hooked, of_mlp=lambda x: x.detach().square().mean().sqrt().item()), "norm 0 is"),
            (partial(hooked, of_block=lambda x: x.detach()), "a number, or a tensor of one, you return a tensor of"),
            (partial(hooked, remove=False), "hooks are left on 6 modules"),
            (blocks_alone, "saves_nothing returns 6 norms, you return 3"),
            (logits, "you return a tensor of shape (2, 64, 256)"),
            (loss_and_plain_norms, "expected a tensor, you return"),
            (lambda model, tokens: (model(tokens, tokens) / 2, forward(model, tokens)[1]),
             "the loss is 4.8469: you return 2.4234 in torch.float32")],
        saves_nothing=(page.saves_nothing, "loss and norms are right, but"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


class LeavesCycles(TorchDispatchMode):
    """Leaves 10 kB of each operation, as trackers do, until garbage is collected."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        left = [bytes(10_000)]
        left.append(left)
        return func(*args, **kwargs or {})


def test_what_a_dispatch_mode_leaves_of_operations_is_not_the_answer_s(said):
    with LeavesCycles():
        assert said(page.first, hooks) == "first exercise: right, on parity and bytes\n"
        assert "the mask is kept outside of tensors" in said(page.first, packing(lambda x: (x.tolist(),), torch.tensor))
