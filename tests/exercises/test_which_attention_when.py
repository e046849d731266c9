"""Right answers pass, wrong and unanswered ones do not."""

import torch
from exercises_kit import Answers, graded

from exercises import which_attention_when as page


def as_many_flops(config):
    return sum(config.layer_parameters().values()) / (config.heads * config.head_dim)


def by_search(config):
    """The length at which the square overtakes the line, from halves of what is left."""
    low, high = 0.0, 1e9
    for _ in range(100):
        middle = (low + high) / 2
        attention, matrices = 2 * middle**2 * config.q_hidden, 2 * middle * sum(config.layer_parameters().values())
        low, high = (middle, high) if attention < matrices else (low, middle)
    return high

def part_by_part(config):
    """Each part of a layer alone would be overtaken earlier; their lengths add up."""
    return sum(numbers / config.q_hidden for numbers in config.layer_parameters().values())


def that_see_ahead(attend, x):
    x = x.detach().requires_grad_()
    out, count = attend(x), 0
    out = out * torch.randn(out.shape[-1])
    for t in range(x.shape[1]):
        (g,) = torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)
        count += bool(g[0, t + 1:].any())
    return count


def by_changes(attend, x):
    count = 0
    for t in range(x.shape[1] - 1):
        other = x.clone()
        other[:, t + 1:] += 1 + torch.rand_like(other[:, t + 1:])
        count += not torch.allclose(attend(x)[:, t], attend(other)[:, t], atol=1e-6)
    return count


def by_jacobian(attend, x):
    jacobian = torch.autograd.functional.jacobian(attend, x)[0, :, :, 0]  # T, C, T, C
    return sum(bool(jacobian[t, :, t + 1:].abs().sum()) for t in range(x.shape[1]))


def by_last(attend, x):
    other = x.clone()
    other[:, -1] += 1
    return int((attend(x) != attend(other)).any(-1)[0, :-1].sum())


def by_sums(attend, x):
    x = x.detach().requires_grad_()
    out = attend(x)
    return sum(bool((torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)[0][0, t + 1:].abs() > 1e-5).any())
               for t in range(x.shape[1]))


def with_itself(attend, x):
    x = x.detach().requires_grad_()
    out = attend(x) * torch.randn(x.shape[-1])
    return sum(bool(torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)[0][0, t:].any())
               for t in range(x.shape[1]))


def seen_from(attend, x):
    """Counts the tokens that are seen from before, not those that see ahead."""
    x = x.detach().requires_grad_()
    out, seen = attend(x) * torch.randn(x.shape[-1]), set()
    for t in range(x.shape[1]):
        (g,) = torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)
        seen |= {t + 1 + n for n in g[0, t + 1:].any(-1).nonzero().flatten().tolist()}
    return len(seen)


ANSWERS = {
    page.first: Answers(
        right=[as_many_flops, by_search, part_by_part],
        wrong=[
            (lambda config: sum(config.layer_parameters().values()) / config.hidden, "heads of 256 features: at"),
            (lambda config: as_many_flops(config) / 2, "GPT-2 small: at 4,61"),
            (lambda config: 2 * as_many_flops(config), "GPT-2 small: at"),
            (lambda config: 12 * config.hidden, "GPT-2 small: at 9,216.0 tokens half of the pairs take"),
            (lambda config: sum(config.layer_parameters().values()) / (config.kv_heads * config.head_dim),
             "Llama 3 8B: at"),
            (lambda config: as_many_flops(config) * config.layers, "GPT-2 small: at"),
            (lambda config: 0, "GPT-2 small: 0 is no length")]),
    page.second: Answers(
        right=[that_see_ahead, by_changes, by_jacobian],
        wrong=[
            (by_last, "a window of one token on each side: 1 of 24 positions are said to see ahead, and 23 do"),
            (by_sums, "features whose sum is 0: 0 of 24 positions"),
            (with_itself, "a causal mask: 24 of 24 positions are said to see ahead, and 0 do"),
            (seen_from, "all see the last token: 1 of 24 positions"),
            (lambda attend, x: int(attend(x).isnan().any()), "no mask: 0 of 24 positions"),
            (lambda attend, x: 23 * bool(by_changes(attend, x)), "blocks of 8 that are seen whole: 23 of 24")]),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
