"""What readers build on the page *Which layers to recompute*: right functions are taken, others are not."""

from functools import partial
from math import inf

import torch
from exercises_kit import Answers, graded

from blanks import which_layers_to_recompute as page
from refimpl.checkpointing import checkpoint, run_chain
from refimpl.papers import recomputation as paper

# --- run_plan --------------------------------------------------------------------------------------------------------


def run_by_torch(functions, plan, x):
    for item in plan:
        if isinstance(item, tuple):
            def region(x, item=item):
                return run_by_torch(functions, item, x)

            x = torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False)
        else:
            x = functions[item](x)
    return x


def run_from_the_front(functions, plan, x):
    if not plan:
        return x
    first, *rest = plan
    if isinstance(first, int):
        return run_from_the_front(functions, rest, functions[first](x))
    return run_from_the_front(functions, rest, paper.checkpoint(partial(run_from_the_front, functions, list(first)), x))


def flat(item):
    return [number for each in item for number in flat(each)] if isinstance(item, tuple) else [item]


def run_flat(functions, plan, x, *, each=False, regions=True, kept=None):
    """Runs a region without the regions in it."""
    for item in plan:
        def region(x, item=item):
            for number in flat(item):
                x = functions[number](x)
            return x

        if isinstance(item, tuple) and regions and not each:
            x = checkpoint(region, x)
        elif each and isinstance(item, tuple):
            for number in flat(item):
                x = checkpoint(functions[number], x)
        else:
            x = region(x)
        if kept is not None:
            kept.append(x)
    return x


def run_under_no_grad(functions, plan, x):
    for item in plan:
        if isinstance(item, tuple):
            with torch.no_grad():
                x = run_under_no_grad(functions, item, x)
        else:
            x = functions[item](x)
    return x


def run_in_place_of_regions(functions, plan, x):
    for item in plan:
        x = functions[item[0]](x) if isinstance(item, tuple) else functions[item](x)
    return x


def run_by_a_lambda(functions, plan, x):
    """In backward, `item` is the last one."""
    for item in plan:
        if isinstance(item, tuple):
            x = checkpoint(lambda x: run_by_a_lambda(functions, item, x), x)  # noqa: B023  that is the fault
        else:
            x = functions[item](x)
    return x


def run_all_in_regions(functions, plan, x):
    for item in plan:
        x = checkpoint(run_all_in_regions, functions, item, x) if isinstance(item, tuple) else checkpoint(
            functions[item], x)
    return x


# --- keep_first ------------------------------------------------------------------------------------------------------


def keep_by_steps(chain, i, j, m, best):
    enough = m >= chain.gradient_bytes[j] + chain.saving_peaks[i] and m >= chain.backward_peaks[i]
    if not enough:
        return inf, []
    left = m
    left -= chain.activation_bytes[i]
    left -= chain.output_bytes[i]
    later = best(i + 1, j, left)
    return sum([chain.forward_times[i], chain.backward_times[i], later[0]]), [i] + list(later[1])


def keep_in_a_line(chain, i, j, m, best):
    time, plan = best(i + 1, j, m - (chain.activation_bytes[i] + chain.output_bytes[i]))
    spent = chain.forward_times[i] + chain.backward_times[i]
    return (time + spent, [i] + plan) if page.room_to_keep(chain, i, j) <= m else (inf, plan)


def keep_the_last_alone(chain, i, j, m, best):
    if m < page.room_to_keep(chain, i, j):
        return inf, []
    time = chain.forward_times[i] + chain.backward_times[i]
    if i == j:
        return time, [i]
    later, plan = best(i + 1, j, m - chain.activation_bytes[i] - chain.output_bytes[i])
    return time + later, [i] + plan


def keep_in_the_list_of_best(chain, i, j, m, best):
    if m < page.room_to_keep(chain, i, j):
        return inf, []
    time, plan = best(i + 1, j, m - chain.activation_bytes[i] - chain.output_bytes[i])
    plan.insert(0, i)
    return chain.forward_times[i] + chain.backward_times[i] + time, plan


def keep(chain, i, j, m, best, *, room=True, strict=False, activation=1, output=1, forward=1, backward=1, later=1,
         order=1, region=False):
    need = page.room_to_keep(chain, i, j)
    if room and (m <= need if strict else m < need):
        return inf, []
    time, plan = best(i + later, j, m - activation * chain.activation_bytes[i] - output * chain.output_bytes[i])
    first = [(i,) if region else i]
    return forward * chain.forward_times[i] + backward * chain.backward_times[i] + time, (first + plan)[::order]


# --- recompute_first -------------------------------------------------------------------------------------------------


def recompute_by_min(chain, i, j, m, best):
    def with_region(k):
        (time, rest), (again, region) = best(k, j, m - chain.output_bytes[k - 1]), best(i, k - 1, m)
        return time + again + sum(chain.forward_times[h] for h in range(i, k)), [tuple(region)] + rest

    possible = [k for k in range(i + 1, j + 1) if m >= page.room_to_run(chain, i, k, j)]
    return min(map(with_region, possible), default=(inf, []), key=lambda option: option[0])


def recompute_by_a_loop(chain, i, j, m, best):
    least, plan, run = inf, [], 0
    for k in range(i + 1, j + 1):
        run += chain.forward_times[k - 1]
        if m < page.room_to_run(chain, i, k, j):
            continue
        right, left = best(k, j, m - chain.output_bytes[k - 1]), best(i, k - 1, m)
        if run + right[0] + left[0] < least:
            least, plan = run + right[0] + left[0], [tuple(left[1])] + right[1]
    return least, plan


def recompute_in_the_list_of_best(chain, i, j, m, best):
    least, plan = inf, []
    for k in range(i + 1, j + 1):
        if m >= page.room_to_run(chain, i, k, j):
            time, rest = best(k, j, m - chain.output_bytes[k - 1])
            again, region = best(i, k - 1, m)
            rest.insert(0, tuple(region))
            least, plan = min((least, plan), (sum(chain.forward_times[i:k]) + time + again, rest), key=lambda o: o[0])
    return least, plan


def recompute_without_inner_regions(chain, i, j, m, best):
    options = [(inf, [])]
    for k in range(i + 1, j + 1):
        if m >= page.room_to_run(chain, i, k, j):
            time, rest = best(k, j, m - chain.output_bytes[k - 1])
            options.append((sum(chain.forward_times[i:k]) + time + best(i, k - 1, m)[0], [tuple(range(i, k)), *rest]))
    return min(options, key=lambda option: option[0])


def recompute(chain, i, j, m, best, *, last=1, room=True, strict=False, output=1, forward=True, again=True, held=0,
              region=tuple, which=min, first=False, order=1, at=-1):
    options = [(inf, [])]
    for k in range(i + 1, j + last):
        need = page.room_to_run(chain, i, k, j)
        if room and (m <= need if strict else m < need):
            continue
        time, rest = best(k, j, m - output * chain.output_bytes[k + at])
        more, inner = best(i, k - 1, m - held * chain.output_bytes[k - 1])
        run = sum(chain.forward_times[i:k]) if forward else 0
        options.append((run + time + more * again, [region(inner), *rest][::order]))
        if first:
            return options[-1]
    return which(options, key=lambda option: option[0])


ANSWERS = {
    page.check_run_plan: Answers(
        right=[page.run_plan, run_by_torch, run_from_the_front,
               lambda functions, plan, x: run_chain(functions, plan, x)],
        wrong=[
            (run_flat, "plan [((0, 1), 2), 3, (4,)]: the gradients are right, but functions 0 to 4 run [2, 2, 2, 1"),
            (partial(run_flat, each=True), "forward keeps 230,400 bytes, expected about 192,000"),
            (run_under_no_grad, "plan [(0, 1), 2, (3,), 4]: the output is right, but the gradients are not"),
            (run_in_place_of_regions, "the output is not that of the functions"),
            (run_by_a_lambda, "plan [(0, 1), 2, (3,), 4], in backward, when regions run again: your function raises"),
            (run_all_in_regions, "plan [0, 1, 2, 3, 4]: the gradients are right, but functions 0 to 4 run [2, 2, 2"),
            (lambda functions, plan, x: page.run_plan(functions, plan[::-1], x), "the output is not that of"),
            (lambda functions, plan, x: page.run_plan(functions, plan[:-1], x), "the output is not that of"),
            (lambda functions, plan, x: [x := functions[i](x) for i in plan][-1], "your function raises TypeError"),
            (lambda *given: page.run_plan(*given).detach(), "your function raises RuntimeError"),
            (lambda *given: checkpoint(page.run_plan, *given), "functions 0 to 4 run [2, 2, 2")],
        saves_nothing=(partial(run_flat, regions=False), "plan [(0, 1), 2, (3,), 4]: the gradients are right, but"),
    ),
    page.check_keep_first: Answers(
        right=[page.keep_first, keep_by_steps, keep_in_a_line, keep_the_last_alone],
        wrong=[
            (keep_in_the_list_of_best, "bytes: right, but your function changes the list that best(1, 2, "),
            (partial(keep, room=False), "expected inf, []"),
            (partial(keep, strict=True), "you return inf, []; expected"),
            (partial(keep, activation=0), "stages 0 to 2 within"),
            (partial(keep, output=0), "stages 0 to 2 within"),
            (partial(keep, output=-1), "stages 0 to 2 within"),
            (partial(keep, forward=2), "stages 0 to 2 within"),
            (partial(keep, backward=0), "stages 0 to 2 within"),
            (partial(keep, later=0), "'best(i, j, m)' in a plan stands for the list that this call returned"),
            (partial(keep, order=-1), "stages 0 to 2 within"),
            (partial(keep, region=True), "you return"),
            (lambda chain, i, j, m, best: keep(chain, i, j, m, lambda *asked: (best(*asked)[0], [])), "expected"),
            (lambda *given: keep(*given)[0], "expected 2 values"),
            (lambda *given: (0.0, []), "you return 0.0, []")],
    ),
    page.check_recompute_first: Answers(
        right=[page.recompute_first, recompute_by_min, recompute_by_a_loop],
        wrong=[
            (recompute_in_the_list_of_best, "bytes: right, but your function changes the list that best(1, 2, "),
            (recompute_without_inner_regions, "[(0,), 'best(1, 2, 103)']; expected 562, [('best(0, 0, 139)',), 'best("),
            (partial(recompute, last=0), "stages "),
            (partial(recompute, room=False), "stages 0 to 2 within 99 bytes"),
            (partial(recompute, strict=True), "expected"),
            (partial(recompute, output=0), "stages 0 to 2 within"),
            (partial(recompute, at=0), "stages 0 to 2 within"),
            (partial(recompute, forward=False), "stages 0 to 2 within"),
            (partial(recompute, again=False), "stages 0 to 2 within"),
            (partial(recompute, held=1), "stages 0 to 2 within"),
            (partial(recompute, region=list), "stages 0 to 2 within"),
            (partial(recompute, which=max), "you return inf, []"),
            (partial(recompute, first=True), "stages 0 to "),
            (partial(recompute, order=-1), "stages 0 to 2 within"),
            (lambda *given: recompute(*given)[::-1], "expected a number, you return"),
            (lambda *given: (inf, []), "you return inf, []")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
