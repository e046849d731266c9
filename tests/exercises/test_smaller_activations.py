"""Right answers pass, wrong and unanswered ones do not."""

import pytest
import torch

from refimpl.activations import compress_activations
from refimpl.activations.codecs import encode_bits, encode_groups
from refimpl.exercises import smaller_activations as page


def bits():
    def pack(tensor):
        return encode_bits(tensor.flatten()) if tensor.dtype is torch.bool else tensor

    return pack, lambda packed: packed if isinstance(packed, torch.Tensor) else packed.decode()


def groups(x, group):
    code = encode_groups(x, group)
    return (code.codes, code.ranges), lambda codes, ranges: code.decode()


def two_bytes(x, group):
    return (x.half(),), lambda x: x.float()


def one_range(x, group):
    code = encode_groups(x, len(x))
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
    order = []
    for i in range(len(model.blocks)):
        order += [(1, i), (0, i)]
    with compress_activations(model, smallest=0):
        loss = model(tokens, tokens)
    for handle in handles:
        handle.remove()
    return loss, [norms[key] for key in order]


def uncompressed(model, tokens):
    _, norms = page.saves_nothing(model, tokens)
    del model.outputs
    return model(tokens, tokens), norms


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, bits), (page.second, groups), (page.third, norms_alone)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, lambda: (lambda t: t, lambda t: t), "keeps 4,096 bytes: expected 512"),
    (page.first, lambda: (len, lambda n: torch.ones(n, dtype=torch.bool)), "gives another gradient"),
    (page.second, two_bytes, "take 2,048 bytes: expected 1,152"),
    (page.second, one_range, "is off by"),
    (page.second, without_a_range, "is off by"),
    (page.third, page.saves_nothing, "expected below 0.3"),
    (page.third, uncompressed, "expected below 0.3"),
    (page.third, lambda model, tokens: (model(tokens, tokens), [1.0] * 6), "not those of saves_nothing"),
])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
