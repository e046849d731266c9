"""Right answers pass, wrong and unanswered ones do not."""

import pytest

from refimpl.exercises import offload_to_cpu as page


def predict(parameters, way, micro_batches):
    if way == "store":
        both = (12 + 2 * micro_batches) * parameters
        return both, both
    return 2 * micro_batches * parameters, 2 * parameters


def fp32_gradients(parameters, way, micro_batches):
    return predict(parameters, way, micro_batches) if way == "store" else (4 * parameters, 2 * parameters)


def once(parameters, way, micro_batches):
    return predict(parameters, way, 1)


def seconds(computes, copies, buffers):
    computed, copied = 0.0, []
    for compute, copy in zip(computes, copies, strict=True):
        computed = max(computed, copied[-buffers] if len(copied) >= buffers else 0.0) + compute
        copied.append(max(computed, copied[-1] if copied else 0.0) + copy)
    return copied[-1]


def no_limit(computes, copies, buffers):
    return seconds(computes, copies, 100)


def put(host, key, tensors, changed):
    copied = 0
    if changed or key not in host:
        host[key] = [tensor.clone() for tensor in tensors]
        copied = sum(tensor.nbytes for tensor in tensors)
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    return copied


def always(host, key, tensors, changed):
    return put(host, key, tensors, True)


def only_once(host, key, tensors, changed):
    return put(host, key, tensors, False)


def keeps_all(host, key, tensors, changed):
    host[key] = [tensor.clone() for tensor in tensors]
    return 0


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, predict), (page.second, seconds), (page.third, put)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, fp32_gradients, "you say 1,024 bytes to the host, 512 were copied"),
    (page.first, once, "4 micro-batches: you say 8,192 bytes to the host, 32,768 were copied"),
    (page.first, lambda *_: 5, "expected a pair"),
    (page.second, no_limit, "1 buffers: you say 5 s, it takes 8"),
    (page.second, lambda computes, copies, buffers: sum(computes) + sum(copies), "it takes"),
    (page.third, always, "put number 2 (changed=False): you copied 1252 bytes, 0 are needed"),
    (page.third, only_once, "put number 4 (changed=True) host[key] does not hold"),
    (page.third, keeps_all, "still has bytes after put"),
    (page.third, lambda host, key, tensors, changed: put({}, key, tensors, changed), "does not hold")])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer) and "right, on" not in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
