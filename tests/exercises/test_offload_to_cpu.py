"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

from exercises_kit import Answers, graded

from exercises import offload_to_cpu as page


def predict(parameters, way, micro_batches, *, gradient=2):
    if way == "store":
        both = (12 + 2 * micro_batches) * parameters
        return both, both
    return gradient * micro_batches * parameters, 2 * parameters


def seconds(computes, copies, buffers):
    computed, copied = 0.0, []
    for compute, copy in zip(computes, copies, strict=True):
        computed = max(computed, copied[-buffers] if len(copied) >= buffers else 0.0) + compute
        copied.append(max(computed, copied[-1] if copied else 0.0) + copy)
    return copied[-1]


def put(host, key, tensors, changed):
    copied = 0
    if changed or key not in host:
        host[key] = [tensor.clone() for tensor in tensors]
        copied = sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    return copied


def as_if(always, host, key, tensors, changed):
    return put(host, key, tensors, always)


def keeps_all(host, key, tensors, changed):
    host[key] = [tensor.clone() for tensor in tensors]
    return 0


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, gradient=4), "you say 1,024 bytes to the host, 512 were copied"),
            (lambda parameters, way, micro_batches: predict(parameters, way, 1), "4 micro-batches: you say 8,192 bytes to the host, 32,768 were copied"),
            (lambda *_: 5, "expected a pair")],
    ),
    page.second: Answers(
        right=[seconds],
        wrong=[
            (lambda *times: seconds(*times[:2], buffers=100), "1 buffers: you say 5 s, it takes 8"),
            (lambda computes, copies, buffers: sum(computes) + sum(copies), "it takes")],
    ),
    page.third: Answers(
        right=[put],
        wrong=[
            (partial(as_if, True), "put number 2 (changed=False): you copied 1252 bytes, 0 are needed"),
            (partial(as_if, False), "put number 4 (changed=True) host[key] does not hold"),
            (keeps_all, "still has bytes after put"),
            (lambda host, key, tensors, changed: put({}, key, tensors, changed), "does not hold")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
