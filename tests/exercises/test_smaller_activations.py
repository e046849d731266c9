"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import smaller_activations as page
from refimpl.activations import compress_activations
from refimpl.activations.codecs import encode_bits, encode_groups


def bits():
    def pack(tensor):
        return encode_bits(tensor.flatten()) if tensor.dtype is torch.bool else tensor

    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else packed.decode()


def groups(x, group, all_in_one=False):
    code = encode_groups(x, len(x) if all_in_one else group)
    return (code.codes, code.ranges), lambda codes, ranges: code.decode()


def without_a_range(x, group):
    """Divides by a step of 0."""
    parts = x.split(group)
    low, step = (torch.stack(each) for each in zip(*[(p.min(), (p.max() - p.min()) / 255) for p in parts], strict=True))
    codes = torch.cat([((p - a) / b).round() for p, a, b in zip(parts, low, step, strict=True)]).nan_to_num(255)

    def decode(codes, low, step):
        return torch.cat([a + c * b + (b == 0) * c for c, a, b in zip(
            codes.float().split(group), low, step, strict=True)])

    return (codes.byte(), low, step), decode


def norms_alone(model, tokens):
    norms, handles = {}, []
    for i, block in enumerate(model.blocks):
        handles.append(block.register_forward_hook(
            lambda block, args, x, i=i: norms.__setitem__((0, i), x.detach().norm().item())))
        handles.append(block.mlp.register_forward_hook(
            lambda mlp, args, x, i=i: norms.__setitem__((1, i), args[0].detach().norm().item())))
    with compress_activations(model, smallest=0):
        loss = model(tokens, tokens)
    for handle in handles:
        handle.remove()
    return loss, [norms[which, i] for i in range(len(model.blocks)) for which in (1, 0)]


def uncompressed(model, tokens):
    _, norms = page.saves_nothing(model, tokens)
    del model.outputs
    return model(tokens, tokens), norms


ANSWERS = {
    page.first: Answers(
        right=[bits],
        wrong=[
            (lambda: (lambda t: t, lambda t: t), "keeps 4,096 bytes: expected 512"),
            (lambda: (len, lambda n: torch.ones(n, dtype=torch.bool)), "gives another gradient")],
    ),
    page.second: Answers(
        right=[groups],
        wrong=[
            (lambda x, group: ((x.half(),), lambda x: x.float()), "take 2,048 bytes: expected 1,152"),
            (partial(groups, all_in_one=True), "is off by"),
            (without_a_range, "is off by")],
    ),
    page.third: Answers(
        right=[norms_alone],
        wrong=[
            (page.saves_nothing, "expected below 0.3"),
            (uncompressed, "expected below 0.3"),
            (lambda model, tokens: (model(tokens, tokens), [1.0] * 6), "not those of saves_nothing")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
