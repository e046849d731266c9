"""What cannot be pickled is refused before anything is started, by the name of the variable that holds it."""

import concurrent.futures
import functools
import importlib.util
import linecache
import pickle
import socket
import sys
import threading
import types

import pytest
import torch
from rank_pool import failure
from torch._subclasses.fake_tensor import FakeTensorMode

from refimpl.comm import launch
from refimpl.ranks import pickling

LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def nothing_starts(request, monkeypatch):
    """A refusal comes before the first process."""
    if "works" not in request.node.name:
        monkeypatch.setattr("refimpl.ranks.launched_ranks.open_channel",
                            lambda module: pytest.fail("a process would start"))


class Holder:
    def __init__(self, held):
        self.held = held

    def run(self, comm):
        return self.held


def uses_a_global(comm):
    with LOCK:
        return 1


def refused(fn, *args):
    with pytest.raises(TypeError) as caught:
        launch(fn, 2, *args)
    return str(caught.value)


def test_a_closure_variable(tmp_path):
    (tmp_path / "file.txt").write_text("text")
    lock, generator, sock = threading.Lock(), (i for i in range(3)), socket.socket()
    with open(tmp_path / "file.txt") as readable, open(tmp_path / "other.txt", "w") as writable, sock:
        for name, fn in {"lock": lambda comm: lock, "generator": lambda comm: generator, "sock": lambda comm: sock,
                         "readable": lambda comm: readable, "writable": lambda comm: writable}.items():
            message = refused(fn)
            assert f"closure variable '{name}' cannot be pickled: {'lock' if name == 'lock' else ''}" in message
            assert name != "readable" or "pass its path" in message


def test_a_tensor_on_a_gpu_belongs_to_its_process(monkeypatch):
    x = torch.empty(3, device="meta")
    monkeypatch.setattr(pickling, "HOST", ("cpu",))  # as if "meta" were a GPU: here there is none
    message = refused(lambda comm: x)
    assert "closure variable 'x' cannot be pickled" in message and "a tensor on meta" in message and ".cpu()" in message


def test_a_fake_tensor():
    with FakeTensorMode():
        x = torch.empty(3)
    assert "closure variable 'x' cannot be pickled" in refused(lambda comm: x)


def test_an_argument():
    message = refused(print, 1, {"models": [1, Holder({"loader": LOCK})]})
    assert message.startswith("argument 2 cannot be pickled: dict: ") and "lock" in message


def test_a_global_variable():
    assert "the function uses_a_global → global variable 'LOCK' cannot be pickled" in refused(uses_a_global)


def test_a_function_inside_a_function():
    def inner():
        return LOCK

    assert "closure variable 'inner' → global variable 'LOCK' cannot be pickled" in refused(lambda comm: inner())


def test_a_method_a_default_and_a_partial():
    assert "the function Holder.run cannot be pickled: method: " in refused(Holder(LOCK).run)
    assert "a default cannot be pickled" in refused(lambda comm, lock=LOCK: 1)
    assert "the function partial → its argument 'held' cannot be pickled: lock: " in refused(
        functools.partial(print, held=LOCK))
    assert "the function partial → its function → global variable 'LOCK' cannot" in refused(
        functools.partial(uses_a_global, 1))


def test_an_attribute_of_a_module():
    model = torch.nn.Linear(2, 2)
    model.lock = threading.Lock()
    assert "argument 1 cannot be pickled: Linear: " in refused(print, model)


def test_something_that_contains_itself():
    held = [LOCK]
    held.append(held)
    assert "argument 1 cannot be pickled: list: " in refused(print, held)


def calls_itself(comm):
    return calls_itself(comm) if LOCK else 0


def test_a_function_that_calls_itself():
    assert "the function calls_itself → global variable 'LOCK' cannot be pickled: lock" in refused(calls_itself)


def test_a_module_made_by_hand_goes_by_value_and_works():
    module = types.ModuleType("made_by_hand")
    exec("def answer(comm):\n    return comm.rank + OFFSET\nOFFSET = 5", module.__dict__)
    assert launch(module.answer, 2) == [5, 6]


def test_a_file_found_nowhere_goes_by_value_and_works(tmp_path, monkeypatch):
    path = tmp_path / "not_on_the_path.py"
    path.write_text("def helper(n):\n    return n + 1\n\ndef answer(comm):\n    return helper(comm.rank)\n")
    spec = importlib.util.spec_from_file_location("not_on_the_path", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "not_on_the_path", module)
    spec.loader.exec_module(module)
    assert launch(module.answer, 2) == [1, 2]


def test_what_is_open_elsewhere_but_not_used_works():
    lock = threading.Lock()  # in scope, and not in the closure
    assert launch(lambda comm: comm.rank, 1) == [0] and lock


def there_and_back(value):
    return pickle.loads(pickling.pack_result(value)), pickle.loads(pickling.pack(print, (value,))[0])[1][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.uint16, torch.uint64,
                                   torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_tensors_of_every_dtype_travel_both_ways(dtype):
    raw = torch.arange(64, dtype=torch.uint8).remainder(2) if dtype is torch.bool else torch.arange(64).byte()
    for x in (raw.view(dtype), raw.view(8, 8).view(dtype)[1:3, :1], raw[:0].view(dtype), raw.view(dtype)[0]):
        for came in there_and_back(x):
            assert came.dtype == dtype and came.shape == x.shape
            there, back = (each.reshape(-1).clone().view(torch.uint8) for each in (x, came))
            assert torch.equal(there, back)


def test_a_view_travels_without_the_rest_of_its_storage():
    large = torch.arange(10**6, dtype=torch.float32)
    for part in (large[5:7], large.view(1000, 1000)[:, 3], large[9], torch.ones(1).expand(10**6), large.conj()[:3]):
        assert all(torch.equal(came, part) for came in there_and_back(part))
        assert len(pickling.pack_result(part)) < 4 * 1000 + 1000
    parameter = torch.nn.Parameter(large[:2])
    assert len(pickling.pack_result(parameter)) < 1000 and type(there_and_back(parameter)[0]) is torch.nn.Parameter


def test_what_a_tensor_is_besides_its_numbers_travels_too():
    x = torch.ones(4, requires_grad=True)
    assert all(came.requires_grad for came in there_and_back(x) + there_and_back(x[:1]))
    assert there_and_back(torch.zeros(2, 3).t())[0].stride() == (1, 3)
    assert there_and_back(torch.eye(2).to_sparse())[0].layout is torch.sparse_coo
    assert there_and_back(torch.empty(3, device="meta"))[0].device.type == "meta"
    x = torch.ones(2)
    x.tag = "mine"
    assert there_and_back(x)[0].tag == "mine"
    twice = there_and_back([x, x])[0]
    assert twice[0] is twice[1]


def test_a_module_that_is_no_plain_module_works():
    assert launch(lambda comm: torch._dynamo.config.disable, 1) == [False]


def test_a_variable_that_is_not_assigned_yet_hides_no_other():
    def outer():
        def fn(comm):
            return later, LOCK

        return fn
        later = 1

    assert "global variable 'LOCK' cannot be pickled" in refused(outer())


def test_lines_of_code_that_is_in_no_file_come_along_and_works():
    source = "def fn(comm):\n    raise ValueError('from a cell')\n"
    linecache.cache["<cell 7>"] = (len(source), None, source.splitlines(True), "<cell 7>")
    scope = {"__name__": "__main__"}
    exec(compile(source, "<cell 7>", "exec"), scope)
    failure("    raise ValueError..from a cell..", scope["fn"], 1)
    del linecache.cache["<cell 7>"]


def test_threads_can_pickle_at_once():
    """Functions of this module, which no other process can import: cloudpickle has one register of such modules."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            packed = pool.map(lambda _: bytes(pickling.pack(threads_pickle_this, ())[0]), range(1000))
    finally:
        sys.setswitchinterval(before)
    assert all(pickle.loads(each)[0]() == "pickled" for each in packed)


def threads_pickle_this():
    return "pickled"
