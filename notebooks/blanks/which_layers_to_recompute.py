"""What readers build on the page *Which layers to recompute*: a chain that runs by a plan, and the best plan."""

import random
from functools import partial
from math import inf

import torch

from exercises import close
from exercises.asking import ANYTHING, Asked, Complaint
from refimpl import memory
from refimpl.checkpointing import checkpoint, costs, run_chain

from . import blank

HINTS = {
    "run_plan": [
        "Go through the plan and change x at each item. A number calls its function.",
        "A tuple is a plan, too: `checkpoint(run_plan, functions, item, x)` runs it as a region. Its own tuples are "
        "found when `run_plan` gets there.",
        "A `lambda` reads a loop's variable only when it runs, and in backward that is the last item. So give "
        "`checkpoint` the item as an argument, or bind it: `lambda x, item=item: …`."],
    "keep_first": [
        "If m is less than `room_to_keep(chain, i, j)`, the answer is `(inf, [])`.",
        "What stage i keeps, and its output, stay until its backward. So the others have that much less of m: "
        "`best(i + 1, j, m - chain.activation_bytes[i] - chain.output_bytes[i])`.",
        "Add the stage's two times to what `best` says, and put i in front of its plan."],
    "recompute_first": [
        "For each k from i + 1 to j, stages i … k−1 run and keep nothing. Only the output of stage k−1 stays.",
        "Backward of k … j comes first: `best(k, j, m - chain.output_bytes[k - 1])`. Then stages i … k−1 begin anew, "
        "with all of m: `best(i, k - 1, m)`.",
        "The time is `sum(chain.forward_times[i:k])` and both of these. The plan is `[tuple(region), *rest]`. Leave "
        "out each k for which m is less than `room_to_run(chain, i, k, j)`, and take the least time."]}


def run_plan(functions, plan, x):
    """Return x after all functions (of one tensor, returning one), run by a plan: a list of their numbers, in order.

    A tuple is a region: `checkpoint(function, *args)` runs it and keeps only x. Regions may be inside regions.
    """
    for item in plan:
        x = checkpoint(run_plan, functions, item, x) if isinstance(item, tuple) else functions[item](x)
    return x


def keep_first(chain, i, j, m, best):
    """Return (time, plan) of the stages i … j within m bytes, where stage i keeps what backward needs.

    `best(i, j, m)` returns the best (time, plan) of other stages, (0, []) if i > j. It keeps its lists: make new ones.
    Return (inf, []) if m is below `room_to_keep(chain, i, j)`.
    """
    if m < room_to_keep(chain, i, j):
        return inf, []
    time, plan = best(i + 1, j, m - chain.activation_bytes[i] - chain.output_bytes[i])
    return chain.forward_times[i] + chain.backward_times[i] + time, [i, *plan]


def recompute_first(chain, i, j, m, best):
    """Return (time, plan) of the stages i … j within m bytes, where i … k−1 are a region, for the best k in i+1 … j.

    The plan begins with the region, a tuple. Return (inf, []) if m is below `room_to_run(chain, i, k, j)` for all k.
    """
    options = [(inf, [])]
    for k in range(i + 1, j + 1):
        if m >= room_to_run(chain, i, k, j):
            time, rest = best(k, j, m - chain.output_bytes[k - 1])
            again, region = best(i, k - 1, m)
            options.append((sum(chain.forward_times[i:k]) + time + again, [tuple(region), *rest]))
    return min(options, key=lambda option: option[0])


def room_to_keep(chain, i, j):
    """Return the bytes that stage i needs at its two peaks: its forward, which keeps, beside the gradient of the last
    stage's output; and its backward."""
    return max(chain.gradient_bytes[j] + chain.saving_peaks[i], chain.backward_peaks[i])


def room_to_run(chain, i, k, j):
    """Return the bytes that the stages i … k−1 need to run one after another, keeping nothing."""
    before = [0, *chain.output_bytes[i : k - 1]]
    return chain.gradient_bytes[j] + max(x + peak for x, peak in zip(before, chain.forward_peaks[i:k], strict=True))


# --- checks ----------------------------------------------------------------------------------------------------------

PLANS = ([0, 1, 2, 3, 4], [(0, 1), 2, (3,), 4], [((0, 1), 2), 3, (4,)], [(((0,), 1), 2, 3), 4])
RUNS = ([1, 1, 1, 1, 1], [2, 2, 1, 2, 1], [3, 3, 2, 1, 2], [4, 3, 2, 2, 1])  # of each function, in forward and backward


def _step(run, plan):
    """Return (output, gradients, bytes kept by forward, [how often each function runs])."""
    torch.manual_seed(0)
    layers, runs = [torch.nn.Linear(48, 48) for _ in range(5)], [0] * 5
    x = torch.randn(200, 48, requires_grad=True)
    leaves = [x, *(p for layer in layers for p in layer.parameters())]

    def function(number, x):
        runs[number] += 1
        return (layers[number](x).sin() + x).tanh()

    with memory.track(leaves) as t:
        y = run([partial(function, number) for number in range(5)], plan, x)
        kept, output = t.now.total - t.start.total - y.nbytes, y.detach().clone() if y.requires_grad else y
        loss = y.square().sum()
        del y
        try:
            Asked(loss.backward, ANYTHING)()
        except Complaint as complaint:
            raise Complaint(f"plan {plan}, in backward, when regions run again: {complaint}") from None
    return output, [leaf.grad for leaf in leaves], kept, runs


@blank(run_plan, "parity and bytes", torch.Tensor)
def check_run_plan(run_plan):
    """Check output, gradients, kept bytes and the runs of each function, for plans without and with regions."""
    for plan, runs in zip(PLANS, RUNS, strict=True):
        output, gradients, kept, ran = _step(run_plan, plan)
        expected, found, least, _ = _step(run_chain, plan)
        if not close(output, expected):
            return f"plan {plan}: the output is not that of the functions, one after another"
        if not all(each is not None and close(each, gradient) for each, gradient in zip(gradients, found, strict=True)):
            return f"plan {plan}: the output is right, but the gradients are not"
        if ran != runs:
            return (f"plan {plan}: the gradients are right, but functions 0 to 4 run {ran} times in forward and "
                    f"backward, expected {runs}")
        if kept > least + 20_000:  # a tensor has 38,400 bytes; the random state that a region may keep has 5,056
            return f"plan {plan}: the gradients are right, but forward keeps {kept:,} bytes, expected about {least:,}"
    return None


def _chains():
    """Yield (chain, i, j, m): random chains and budgets, also those that are just enough and just too small."""
    rng = random.Random(0)
    for n in (3, 5, 6, 6, 7):
        def numbers(low, high, n=n):
            return [rng.randint(low, high) for _ in range(n)]

        chain = costs(numbers(1, 99), numbers(20, 90), numbers(5, 40), backward_times=numbers(1, 99),
                      gradient_bytes=numbers(5, 40), forward_peaks=numbers(50, 150), saving_peaks=numbers(60, 190),
                      backward_peaks=numbers(60, 190), input_bytes=7)
        for i, j in ((0, n - 1), (1, n - 1), (0, n - 2), (1, 2), (n - 1, n - 1)):
            rooms = [room_to_keep(chain, i, j)] + [room_to_run(chain, i, k, j) for k in range(i + 1, j + 1)]
            for m in (*rooms, *(room - 1 for room in rooms), 400):
                yield chain, i, j, m


def _best(i, j, m):
    """Stand in for what is best for other stages; the plan tells what was asked for."""
    return (random.Random(f"{i} {j} {m}").randint(1, 500), [f"best({i}, {j}, {m})"]) if i <= j else (0, [])


def _remembering():
    """Return (`_best`, which keeps what it returned as the page's own does; what it keeps)."""
    kept = {}

    def best(i, j, m):
        return kept.setdefault((i, j, m), _best(i, j, m))

    return best, kept


def _differs(function, ours):
    for chain, i, j, m in _chains():
        best, kept = _remembering()
        (said, plan), (time, expected) = function(chain, i, j, m, best), ours(chain, i, j, m, _best)
        where = f"stages {i} to {j} within {m} bytes"
        if said != time or (time < inf and plan != expected):
            return (f"{where}: you return {said}, {plan}; expected {time}, {expected}\n"
                    "'best(i, j, m)' in a plan stands for the list that this call returned")
        if changed := [asked for asked, found in kept.items() if found != _best(*asked)]:
            return (f"{where}: right, but your function changes the list that best{changed[0]} returned. `best` "
                    "remembers that list, and returns it changed from then on: make a new one")
    return None


@blank(keep_first, "times and plans", (float, list))
def check_keep_first(keep_first):
    """Check the answer for random chains, with a `best` that shows what it was asked."""
    return _differs(keep_first, globals()["keep_first"])


@blank(recompute_first, "times and plans", (float, list))
def check_recompute_first(recompute_first):
    """Check the answer for random chains, with a `best` that shows what it was asked."""
    return _differs(recompute_first, globals()["recompute_first"])
