"""Ours and other right functions pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from blanks import smaller_activations as page
from refimpl.papers import activations as paper


def encode_group_by_group(x, group):
    parts = x.split(group)
    least = torch.stack([part.min() for part in parts])[:, None]
    step = torch.stack([(part.max() - part.min()) / 255 for part in parts])[:, None]
    codes = [((part - low) / by).nan_to_num(0).round() for part, low, by in zip(parts, least, step, strict=True)]
    return torch.cat(codes).to(torch.uint8), least, step


def encode_with_amin(x, group):
    rows = x.reshape(-1, group)
    least, most = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = torch.div(most - least, 255)
    scaled = (rows - least).mul_(255).div_((most - least).clamp(min=1e-30))
    return torch.floor(scaled + 0.5).byte().view(-1), least, step


def coded(x, group, *, levels=255, rounded=torch.round, guard=torch.inf, dtype=torch.uint8, change=lambda x: x):
    """Encode with a fault."""
    rows = x.view(-1, group)
    least, most = rows.aminmax(dim=1, keepdim=True)
    step = (most - least) / levels
    codes = rounded((rows - least) / torch.where(step > 0, step, guard))
    return change((codes.flatten().to(dtype), least, step))


def with_a_step_of_one(x, group):
    """Its guard against a step of 0 changes other steps as well."""
    rows = x.view(-1, group)
    least, most = rows.aminmax(dim=1, keepdim=True)
    step = (most - least) / 255
    return ((rows - least) / step.clamp(min=1)).round().flatten().to(torch.uint8), least, step


def with_a_small_number(x, group):
    """Its guard against a step of 0 is larger than the steps of tiny values."""
    rows = x.view(-1, group)
    least, most = rows.aminmax(dim=1, keepdim=True)
    step = (most - least) / 255
    return ((rows - least) / (step + 1e-8)).round().flatten().to(torch.uint8), least, step


def in_place(x, group):
    least, most = x.view(-1, group).aminmax(dim=1, keepdim=True)
    step = (most - least) / 255
    x.view(-1, group).sub_(least).div_(torch.where(step > 0, step, 1)).round_()
    return x.to(torch.uint8), least, step


def by_sorting(x, group):
    rows = x.view(-1, group).sort(dim=1).values
    return page.encode(x, group)[0], rows[:, :1], (rows[:, -1:] - rows[:, :1]) / 255


def one_range(x, group):
    codes, least, step = page.encode(x, len(x))
    return codes, least.expand(len(x) // group, 1).clone(), step.expand(len(x) // group, 1).clone()


def by_columns(x, group):
    rows = x.view(group, -1).T
    codes, least, step = page.encode(rows.flatten(), group)
    return codes.view(-1, group).T.flatten(), least, step


def of_the_largest(x, group):
    """Symmetric: codes around 0, as weights are often coded."""
    rows = x.view(-1, group)
    step = rows.abs().amax(1, keepdim=True) / 127
    return (rows / step).round().flatten().to(torch.int8), -127 * step, step


def freed(x, group):
    codes, least, step = page.encode(x, group)
    codes.untyped_storage().resize_(0)
    return codes, least, step


def decode_with_addcmul(codes, least, step):
    rows = codes.view(least.numel(), -1).float()
    return torch.addcmul(least, rows, step).reshape(-1)


def decode_by_repeating(codes, least, step):
    group = codes.numel() // step.numel()
    return least.flatten().repeat_interleave(group) + codes * step.flatten().repeat_interleave(group)


def hooks_of_a_class(model, group):
    class Whole:
        def __init__(self, x):
            self.x = x.detach()

    storages = [p.untyped_storage() for p in model.parameters()]

    def pack(x):
        shared = any(x.untyped_storage().data_ptr() == each.data_ptr() for each in storages)
        if shared or x.requires_grad is False or x.numel() % group != 0:
            return Whole(x)
        return [x.size(), page.encode(x.detach().reshape(-1), group)]

    def unpack(kept):
        if isinstance(kept, Whole):
            return kept.x
        shape, code = kept
        return page.decode(*code).reshape(shape)

    return pack, unpack


def hooks_of_the_paper(model, group):
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}

    @torch.no_grad()
    def pack(x):
        if x.requires_grad and x.untyped_storage().data_ptr() not in owned and not x.numel() % group:
            codes = paper.encode(x.contiguous().view(-1), group)
            return lambda shape=x.shape: paper.decode(*codes, group).view(shape)
        x = x.detach()
        return lambda: x

    return pack, lambda kept: kept()


def hooked(model, group, *, without_gradient=True, parameters=True, divides=True, detach=True, keep=False,
           code=page.encode, shaped=True, strided=False):
    """Hooks with a fault."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        if ((without_gradient and not x.requires_grad) or (divides and x.numel() % group)
                or (parameters and x.untyped_storage().data_ptr() in owned)):
            return x.detach() if detach else x
        flat = x.detach().T.flatten() if strided else x.detach().flatten()
        return *code(flat, group), x.shape, x if keep else None

    def unpack(kept):
        if torch.is_tensor(kept):
            return kept
        flat = page.decode(*kept[:3])
        return flat.view(kept[3]) if shaped else flat

    return pack, unpack


def by_identity(model, group):
    """Knows parameters by themselves: a view of a weight, which Linear saves, is another tensor."""
    pack, unpack = page.hooks(torch.nn.Module(), group)
    return lambda x: x.detach() if any(x is p for p in model.parameters()) else pack(x), unpack


def by_is_leaf(model, group):
    """Takes leaves for parameters."""
    pack, unpack = page.hooks(torch.nn.Module(), group)
    return lambda x: x.detach() if x.is_leaf else pack(x), unpack


def by_the_last_dimension(model, group):
    """Asks whether group divides a row, not all values."""
    pack, unpack = page.hooks(model, group)
    return lambda x: x.detach() if x.shape[-1] % group else pack(x), unpack


def in_bf16(model, group):
    return lambda x: x.detach().bfloat16(), lambda kept: kept.float()


def nothing_left(model, group):
    pack, unpack = page.hooks(model, group)
    return pack, lambda kept: kept if torch.is_tensor(kept) else torch.zeros(kept[3])


ANSWERS = {
    page.check_encode: Answers(
        right=[page.encode, encode_group_by_group, encode_with_amin],
        wrong=[
            (partial(coded, rounded=torch.floor), "of a step; 0.5 is the most"),
            (partial(coded, levels=256), "step is not (largest − least) / 255"),
            (partial(coded, levels=127), "step is not (largest − least) / 255"),
            (with_a_step_of_one, "of a step; 0.5 is the most. Its values go from"),
            (with_a_small_number, "of a step; 0.5 is the most. Its values go from -3.5e-07 to"),
            (partial(coded, rounded=lambda codes: codes.round() + 1), "is off by"),
            (partial(coded, guard=torch.zeros(()), rounded=lambda codes: codes.nan_to_num(7).round()),
             "the values of group 1 are all equal: expected codes of 0"),
            (partial(coded, dtype=torch.int32), "codes: expected shape (768,) in torch.uint8, you return"),
            (partial(coded, dtype=torch.float32), "codes: expected shape (768,) in torch.uint8, you return"),
            (partial(coded, change=lambda code: (code[0].view(6, 128), *code[1:])), "you return (6, 128)"),
            (partial(coded, change=lambda code: (code[0], code[1].flatten(), code[2].flatten())),
             "least: expected shape (6, 1)"),
            (partial(coded, change=lambda code: (code[0], code[2], code[1])), "least is not the least value"),
            (partial(coded, change=lambda code: (code[0], code[1], 255 * code[2])), "step is not (largest − least)"),
            (partial(coded, change=lambda code: code[:2]), "expected 3 values"),
            (partial(coded, change=lambda code: (255 - code[0], *code[1:])), "group 0 of 128 values is off by"),
            (in_place, "x was changed"),
            (by_sorting, "does a view keep a larger storage?"),
            (one_range, "least is not the least value of each group"),
            (by_columns, "least is not the least value of each group"),
            (of_the_largest, "codes: expected shape (768,) in torch.uint8"),
            (freed, "a tensor has no bytes")],
        same=("> → >=",),  # 0 / 0 becomes a code of 0, too
    ),
    page.check_decode: Answers(
        right=[page.decode, decode_with_addcmul, decode_by_repeating],
        wrong=[
            (lambda codes, least, step: least + codes.view(len(step), -1) * step, "expected shape (768,)"),
            (lambda codes, least, step: (codes.view(len(step), -1) * step).flatten(), "value 0 is least + code"),
            (lambda codes, least, step: (least + codes.view(len(step), -1)).flatten(), "value 0 is least + code"),
            (lambda codes, least, step: page.decode(codes, step, least), "value 0 is least + code · step"),
            (lambda codes, least, step: ((least + codes.view(len(step), -1)) * step).flatten(), "value 0 is"),
            (lambda codes, least, step: (least + codes.view(-1, len(step)).T * step).flatten(), "is least + code"),
            (lambda codes, least, step: page.decode(codes, least, step / 255), "value 0 is least + code · step"),
            (lambda codes, least, step: page.decode(codes, least[:1].expand_as(least), step), "value 128 is"),
            (lambda codes, least, step: page.decode(codes, least, step).half(), "in torch.float16"),
            (lambda codes, least, step: page.decode(codes.view(torch.int8), least, step), "is least + code · step"),
            (lambda codes, least, step: page.decode(codes, least, step).tolist(), "expected a tensor")],
    ),
    page.check_hooks: Answers(
        right=[page.hooks, hooks_of_a_class, hooks_of_the_paper, hooked],
        wrong=[
            (partial(hooked, without_gradient=False), "a tensor that requires no gradient does not stay whole: "),
            (partial(hooked, parameters=False), "a view of a weight, which shares the parameter's storage, does not"),
            (by_identity, "storage, does not stay whole: pack makes 4,352 bytes for it"),
            (by_is_leaf, "storage, does not stay whole: pack makes 4,352 bytes for it"),
            (by_the_last_dimension, "of shape (256, 3) pack makes 0 bytes with group = 128: expected 816"),
            (partial(hooked, divides=False), "your function raises RuntimeError"),
            (partial(hooked, detach=False), "bytes stay when a loss is dropped without backward"),
            (partial(hooked, keep=True), "bytes are kept: expected"),
            (partial(hooked, code=lambda x, group: page.encode(x, len(x))), "bytes are kept: expected"),
            (partial(hooked, shaped=False), "pack was given a tensor of shape"),
            (partial(hooked, strided=True), "the gradient is off by"),
            (in_bf16, "a tensor that requires no gradient does not stay whole: pack makes"),
            (nothing_left, "the gradient is off by"),
            (lambda model, group: page.hooks(model, group)[::-1], "unpack: expected a tensor"),
            (lambda model, group: page.hooks(model, 128), "bytes are kept: expected"),
            (lambda model, group: page.hooks(model, group)[0], "expected 2 values")],
        saves_nothing=(lambda model, group: (torch.Tensor.detach, lambda x: x), "bytes are kept: expected"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
