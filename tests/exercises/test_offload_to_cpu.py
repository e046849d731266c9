"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import offload_to_cpu as page
from refimpl.comm import FakeCommunicator
from refimpl.offload import closed_forms
from refimpl.zero import Zero2

# --- first -----------------------------------------------------------------------------------------------------------


def predict(parameters, way, micro_batches):
    gradients, weights, states = 2 * parameters * micro_batches, 2 * parameters, 12 * parameters
    if way == "update":
        return gradients, weights
    return states + gradients, states + gradients


def by_table(parameters, way, micro_batches):
    states = {"store": (12, 12), "update": (0, 2)}[way]
    gradients = {"store": (2, 2), "update": (2, 0)}[way]
    return [parameters * (s + g * micro_batches) for s, g in zip(states, gradients, strict=True)]


def by_closed_forms(parameters, way, micro_batches):
    model = torch.nn.Linear(parameters, 1, bias=False, dtype=torch.bfloat16)
    buckets = Zero2(model, FakeCommunicator(0, 1), page.ADAMW).buckets
    traffic = closed_forms.host_store_traffic if way == "store" else closed_forms.cpu_adam_traffic
    return tuple(traffic(buckets, 2, micro_batches=micro_batches).values())


def with_fault(parameters, way, micro_batches, *, gradient=2, states=12, back=2, accumulates=False, stay=False):
    gradients = gradient * parameters * (1 if accumulates else micro_batches)
    if way == "update":
        return gradients, back * parameters
    return states * parameters + gradients, states * parameters + (0 if stay else gradients)


# --- second ----------------------------------------------------------------------------------------------------------


def seconds(computes, copies, buffers):
    computed, last, copied = 0.0, 0.0, []
    for i, (compute, copy) in enumerate(zip(computes, copies, strict=True)):
        free = copied[i - buffers] if i >= buffers else 0.0
        computed = max(computed, free) + compute
        last = max(computed, last) + copy
        copied.append(last)
    return last


def by_recursion(computes, copies, buffers):
    def computed(i):
        return 0.0 if i < 0 else max(computed(i - 1), copied(i - buffers)) + computes[i]

    def copied(i):
        return 0.0 if i < 0 else max(computed(i), copied(i - 1)) + copies[i]

    return copied(len(computes) - 1)


def by_when_buffers_are_free(computes, copies, buffers):
    free, device, link = [0.0] * buffers, 0.0, 0.0
    for i in range(len(computes)):
        device = max(device, free[i % buffers]) + computes[i]
        link = free[i % buffers] = max(link, device) + copies[i]
    return max(free)


def late(computes, copies, buffers, *, link=True, free=1):
    """As `seconds`, with a link that carries all at a time, or a buffer that is free too early."""
    computed, copied = 0.0, [0.0] * buffers
    for compute, copy in zip(computes, copies, strict=True):
        computed = max(computed, copied[-buffers] if free else 0.0) + compute
        copied.append((max(computed, copied[-1]) if link else computed) + copy)
    return copied[-1]


# --- third -----------------------------------------------------------------------------------------------------------


def put(host, key, tensors, changed):
    copied = 0
    if changed or key not in host:
        host[key] = [tensor.clone() for tensor in tensors]
        copied = sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    return copied


def put_in_place(host, key, tensors, changed):
    """The host's memory is used again."""
    must = changed or key not in host
    kept = host.setdefault(key, [torch.empty_like(tensor) for tensor in tensors])
    for mine, tensor in zip(kept, tensors, strict=True):
        if must:
            mine.copy_(tensor)
        tensor.untyped_storage().resize_(0)
    return sum(mine.nbytes for mine in kept) if must else 0


def put_in_one_piece(host, key, tensors, changed):
    """The copies are parts of one flat storage."""
    nbytes = 0
    if key not in host or changed:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        host[key], nbytes = flat.split([tensor.numel() for tensor in tensors]), flat.nbytes
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    return nbytes


def as_if(always, host, key, tensors, changed):
    return put(host, key, tensors, always)


def copying_in_secret(host, key, tensors, changed):
    copied = 0 if key in host and not changed else sum(tensor.nbytes for tensor in tensors)
    put(host, key, tensors, True)
    return copied


def of_elements(itemsize, host, key, tensors, changed):
    return itemsize and put(host, key, tensors, changed) and itemsize * sum(tensor.numel() for tensor in tensors)


def keeps_all(host, key, tensors, changed):
    if not changed and key in host:
        return 0
    host[key] = [tensor.clone() for tensor in tensors]
    return sum(tensor.nbytes for tensor in tensors)


def without_clones(host, key, tensors, changed, kept=lambda tensor: tensor):
    copied = sum(tensor.nbytes for tensor in tensors) if changed or key not in host else 0
    host[key] = [kept(tensor) for tensor in tensors]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    return copied


def emptied_by_data(host, key, tensors, changed):
    copied = keeps_all(host, key, tensors, changed)
    for tensor in tensors:
        tensor.data = tensor.new_empty(0)
    return copied


def of_shape_0(host, key, tensors, changed):
    copied = put(host, key, tensors, changed)
    for tensor in tensors:
        tensor.resize_(0)
    return copied


def only_the_first(host, key, tensors, changed):
    copied = put(host, key, tensors, changed)
    host[key] = host[key][:1]
    return copied


def with_history(host, key, tensors, changed, history=None):
    if changed and key in host:
        host.setdefault("history", []).extend(host[key])
    return put(host, key, tensors, changed)


def in_fp32(host, key, tensors, changed):
    copied = put(host, key, tensors, changed)
    host[key] = [tensor.float() for tensor in host[key]]
    return copied


ANSWERS = {
    page.first: Answers(
        right=[predict, by_table, by_closed_forms],
        wrong=[
            (partial(with_fault, gradient=4), "you say 1,024 bytes to the host, 512 were copied"),
            (partial(with_fault, back=4), "you say 1,024 bytes to the device, 512 were copied"),
            (partial(with_fault, states=8), "way 'store', 1 micro-batches: you say 2,560 bytes to the host"),
            (partial(with_fault, accumulates=True),
             "4 micro-batches: you say 8,192 bytes to the host, 32,768 were copied"),
            (partial(with_fault, stay=True), "way 'store', 1 micro-batches: you say 3,072 bytes to the device"),
            (lambda parameters, way, m: predict(parameters, way, m)[::-1],
             "4 micro-batches: you say 8,192 bytes to the host, 32,768 were copied"),
            (lambda parameters, way, m: tuple(m * each for each in predict(parameters, way, 1)),
             "4 micro-batches: you say 32,768 bytes to the device, 8,192 were copied"),
            (lambda *given: sum(predict(*given)), "expected 2 values")],
    ),
    page.second: Answers(
        right=[seconds, by_recursion, by_when_buffers_are_free],
        wrong=[
            (lambda computes, copies, buffers: seconds(computes, copies, 100), "1 buffers: you say 5 s, it takes 8"),
            (lambda computes, copies, buffers: seconds(computes, copies, 2), "1 buffers: you say 5 s, it takes 8"),
            (lambda computes, copies, buffers: sum(computes) + sum(copies),
             "copies [3.0, 3.0, 3.0, 3.0], 2 buffers: you say 16 s, it takes 13"),
            (lambda computes, copies, buffers: max(sum(computes), sum(copies)),
             "computes [1.0], copies [2.0], 2 buffers: you say 2 s, it takes 3"),
            (lambda computes, copies, buffers: sum(map(max, computes, copies)) + min(computes[0], copies[0]),
             "1 buffers: you say 5 s, it takes 8"),
            (lambda computes, copies, buffers: seconds(computes, copies, buffers + 1), "you say 5 s, it takes 8"),
            (partial(late, link=False), "copies [3.0, 3.0, 3.0, 3.0], 2 buffers: you say 9 s, it takes 13"),
            (lambda *given: float("nan"), "you say nan s, it takes 3"),
            (lambda *given: given[0], "expected a number")],
        same=("computed, free → free, computed", "computed, last → last, computed"),
    ),
    page.third: Answers(
        right=[put, put_in_place, put_in_one_piece],
        wrong=[
            (partial(as_if, True), "after put number 3 (of key 'masters', changed=False) host['masters'] was copied "
                                   "again, but nothing changed"),
            (copying_in_secret, "host['masters'] was copied again, but nothing changed"),
            (partial(as_if, False), "after put number 5 (of key ('parameters', 3), changed=True) host[('parameters', "
                                    "3)] does not hold what the tensors held"),
            (lambda host, key, tensors, changed: put(host, key, tensors, True) if changed else 0,
             "put number 1 (of key 'masters', changed=False) a tensor's storage still has bytes"),
            (partial(of_elements, 4), "put number 2 (of key ('parameters', 3), changed=True): you say that 1,316 "
                                      "bytes were copied, 658 are needed"),
            (partial(of_elements, 1), "you say that 78 bytes were copied, 312 are needed"),
            (lambda *given: 0 * put(*given), "you say that 0 bytes were copied, 312 are needed"),
            (without_clones, "host['masters'] has tensors of the storage that was emptied: keep clones"),
            (partial(without_clones, kept=torch.Tensor.detach), "storage that was emptied: keep clones"),
            (emptied_by_data, "a tensor's storage still has bytes"),
            (of_shape_0, "a tensor has another shape: empty its storage alone"),
            (only_the_first, "host['masters'] is not a list of 2 tensors"),
            (in_fp32, "host[('parameters', 3)] does not hold what the tensors held"),
            (lambda host, key, tensors, changed: put(host, 0, tensors, changed), "host['masters'] is not a list"),
            (lambda host, key, tensors, changed: put({}, key, tensors, changed), "host['masters'] is not a list"),
            (with_history, "host[key] is right, but 658 bytes more than its copies stay in memory")],
        saves_nothing=(keeps_all, "a tensor's storage still has bytes: resize it to 0"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
