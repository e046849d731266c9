"""Right functions pass, wrong and unanswered ones do not."""

import copy
from functools import partial

import torch
from exercises_kit import Answers, graded

from blanks import mixed_precision as page

# --- make_masters ----------------------------------------------------------------------------------------------------


def one_by_one(model, dtype):
    masters = []
    for w in model.parameters():
        masters.append(torch.nn.Parameter(w.data))  # the fp32 weight itself becomes the master
        w.data = w.data.to(dtype)
    return masters


def of_a_copy(model, dtype):
    masters = list(copy.deepcopy(model).float().parameters())
    model.to(dtype)
    return masters


def masters_of(model, dtype, *, low=None, first=False, copied=True, leaf=True, order=1, requires=True):
    """make_masters with a fault."""
    if first:
        model.to(dtype)
    masters = [w.detach().to(torch.float32, copy=copied) if low is None else w.detach().to(low)
               for w in model.parameters()]
    for w in () if first else model.parameters():
        w.data = w.data.to(dtype)
    masters = [each.requires_grad_() for each in masters] if requires else masters
    return [each if leaf else each * 1 for each in masters][::order]


KEPT = []


def fp32_kept(model, dtype):
    KEPT.append([w.data for w in model.parameters()])
    return page.make_masters(model, dtype)


# --- step_on_masters -------------------------------------------------------------------------------------------------


@torch.no_grad()
def in_lists(model, masters, optimizer):
    weights = list(model.parameters())
    for w, master in zip(weights, masters, strict=True):
        master.grad = w.grad.to(torch.float32)
    model.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    torch._foreach_copy_([w.data for w in weights], [master.data for master in masters])


def with_new_data(model, masters, optimizer):
    for w, master in zip(model.parameters(), masters, strict=True):
        master.grad = w.grad.float()
        w.grad = None
    optimizer.step()
    for w, master in zip(model.parameters(), masters, strict=True):
        master.grad = None
        w.data = master.detach().to(w.dtype)


def on_masters(model, masters, optimizer, *, add=False, factor=1.0, step=True, back=True, free="wm", wide=False,
               from_weights=False, some=None):
    """step_on_masters with a fault."""
    for w, master in zip(model.parameters(), masters, strict=True):
        if from_weights:
            master.data.copy_(w.data)
        master.grad = w.grad.float() * factor
    if step:
        optimizer.step()
    for w, master in list(zip(model.parameters(), masters, strict=True))[:some]:
        if back:
            w.data = master.data.clone() if wide else master.data.to(w.dtype)
        if "w" in free:
            w.grad = None
        if "m" in free:
            master.grad = None


def kept_gradients(model, masters, optimizer):
    KEPT.append([w.grad for w in model.parameters()])
    page.step_on_masters(model, masters, optimizer)


def freed(model, masters, optimizer):
    page.step_on_masters(model, masters, optimizer)
    model[0].weight.data.untyped_storage().resize_(0)


# --- step_scaled -----------------------------------------------------------------------------------------------------


def by_norm(model, optimizer, scale):
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if not torch.isfinite(norm):
        return scale * 0.5
    torch._foreach_mul_([p.grad for p in model.parameters()], 1 / scale)
    optimizer.step()
    return scale


def by_flags(model, optimizer, scale):
    found = False
    for p in model.parameters():
        p.grad.div_(scale)
        found = found or bool(torch.isnan(p.grad).any() or torch.isinf(p.grad).any())
    if found:
        scale /= 2
    else:
        optimizer.step()
    return scale


def scaled(model, optimizer, scale, *, finite=torch.isfinite, of=slice(None), divide=True, skip=True, down=0.5, up=1.0,
           divisor=None):
    """step_scaled with a fault."""
    good = all(finite(p.grad).all() for p in list(model.parameters())[of])
    for p in model.parameters():
        p.grad /= (divisor or scale) if divide else 1
        if not skip:
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
    if good or not skip:
        optimizer.step()
    return scale * (up if good else down)


ANSWERS = {
    page.check_make_masters: Answers(
        right=[page.make_masters, one_by_one, of_a_copy],
        wrong=[
            (partial(masters_of, first=True), "a master is the 16-bit weight, widened: copy the fp32 weight before"),
            (partial(masters_of, low=torch.bfloat16), "you return a master in torch.bfloat16 and (50, 70)"),
            (partial(masters_of, low=torch.float64), "you return a master in torch.float64 and (50, 70)"),
            (partial(masters_of, order=-1), "expected the former weight, in torch.float32 and (50, 70); you return a"),
            (partial(masters_of, requires=False), "expected a leaf that requires a gradient"),
            (partial(masters_of, leaf=False), "expected a leaf that requires a gradient"),
            (lambda model, dtype: masters_of(model, dtype)[:1], "expected a master for each of 4 parameters"),
            (lambda model, dtype: masters_of(model, torch.bfloat16), "a weight is in torch.bfloat16"),
            (lambda model, dtype: list(model.parameters()), "a weight is in torch.float32"),
            (lambda model, dtype: [w.detach().clone().requires_grad_() for w in model.parameters()],
             "after make_masters(model, torch.bfloat16) a weight is in torch.float32")],
        saves_nothing=(lambda model, dtype: fp32_kept(model, dtype), "right, but it takes"),
    ),
    page.check_step_on_masters: Answers(
        right=[page.step_on_masters, in_lists, with_new_data],
        wrong=[
            (partial(on_masters, step=False), "after step 1 a master is not what SGD makes of it"),
            (partial(on_masters, factor=0.5), "after step 1 a master is not what SGD makes of it"),
            (partial(on_masters, back=False), "the masters are right, but after step"),
            (partial(on_masters, some=3), "the masters are right, but after step"),
            (partial(on_masters, from_weights=True), "after step 1 a master is not what SGD makes of it"),
            (partial(on_masters, wide=True), "a weight is in torch.float32 and its master in torch.float32"),
            (partial(on_masters, free="m"), "a `.grad` is left: set it to None"),
            (partial(on_masters, free="w"), "a `.grad` is left: set it to None"),
            (freed, "the storage of a weight or of a master was freed"),
            (lambda model, masters, optimizer: optimizer.step(), "after step 1 a master is not what SGD makes of it")],
        saves_nothing=(kept_gradients, "bytes more stay after 20 steps; the momentum takes"),
    ),
    page.check_step_scaled: Answers(
        right=[page.step_scaled, by_norm, by_flags],
        wrong=[
            (partial(scaled, divide=False), "where all gradients are finite, with scale 1024: the weights are other"),
            (partial(scaled, divisor=1024.0), "where all gradients are finite, with scale 32768: the weights"),
            (partial(scaled, skip=False), "inf, with scale 1024: the weights are other than after no step"),
            (partial(scaled, finite=lambda g: ~g.isnan()), "where a gradient is inf, with scale 1024: the weights"),
            (partial(scaled, finite=lambda g: ~g.isinf()), "where a gradient is nan, with scale 1024: the weights"),
            (partial(scaled, finite=lambda g: g < torch.inf), "where a gradient is -inf, with scale 1024: the weights"),
            (partial(scaled, of=slice(1)), "where a gradient is nan, with scale 1024: the weights are other"),
            (partial(scaled, of=slice(-1)), "where a gradient is -inf, with scale 1024: the weights are other"),
            (partial(scaled, down=1.0), "you return 1024: expected 512, as scale was 1024"),
            (partial(scaled, down=2.0), "you return 2048: expected 512, as scale was 1024"),
            (lambda model, optimizer, scale: scaled(model, optimizer, scale) * 2 // 2, "you return 0: expected 0.5"),
            (partial(scaled, up=2.0), "you return 2048: expected 1024, as scale was 1024"),
            (lambda model, optimizer, scale: scaled(model, optimizer, scale) == scale, "expected a number")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
