"""One rank's life, in parts, and what a function can do to its own process without its answer being lost."""

import io
import os
import pickle
import sys
import threading

import pytest
import torch.distributed as dist
from rank_pool import failure

from refimpl.comm import launch
from refimpl.ranks import worker
from refimpl.ranks.worker import LENGTH, Setup, UnpicklableResult, describe, pickled_result, read_payload, report


def raised(function):
    try:
        function()
    except BaseException as error:
        return error


def test_a_payload_is_read_from_a_shared_file_whatever_its_position(tmp_path):
    setup = Setup("a world", 1, "/", [], {}, {}, (64, 64))
    head = pickle.dumps(setup)
    with open(tmp_path / "payload", "w+b") as file:
        file.write(LENGTH.pack(len(head)) + head + b"the function")
        file.flush()
        for _ in range(2):
            read, packed = read_payload(file.fileno())
            assert read == setup and bytes(packed) == b"the function"


def test_a_message_is_its_length_and_itself():
    class Parent:
        sent = b""

        def sendall(self, data):
            self.sent += data

    parent = Parent()
    report(parent, "returned", [1, 2])
    length, = LENGTH.unpack(parent.sent[:LENGTH.size])
    assert length == len(parent.sent) - LENGTH.size and pickle.loads(parent.sent[LENGTH.size:]) == ("returned", [1, 2])


def test_a_failure_tells_what_was_raised_with_the_lines_of_the_reader():
    def fail():
        raise ValueError("on purpose")

    failure = describe(3, raised(fail))
    assert (failure.rank, failure.what, failure.consequence) == (3, "raised ValueError: on purpose", False)
    assert 'raise ValueError("on purpose")' in failure.text and failure.text.startswith("Traceback")
    assert pickle.loads(failure.exception).args == ("on purpose",)
    assert describe(0, SystemExit("bye")).what == "exited with code 'bye' (sys.exit) before it returned"
    error = raised(lambda: pickled_result(threading.Lock()))
    assert isinstance(error, UnpicklableResult)
    assert describe(0, error).what.startswith("returned an unpicklable value: the result cannot be pickled: lock")


def test_the_lines_of_the_rank_itself_are_left_out_unless_there_are_no_others():
    def fail():
        raise ValueError("on purpose")

    called = compile("call()", worker.__file__, "exec")
    outer = describe(0, of_worker(raised(lambda: exec(called, {"call": fail})))).text
    assert worker.__file__ not in outer and "in fail" in outer
    own = describe(0, of_worker(raised(lambda: exec(compile("1 / 0", worker.__file__, "exec"))))).text
    assert f'File "{worker.__file__}", line 1' in own


def of_worker(error):
    """The error as if its traceback began in worker.py, as that of a rank does."""
    frames = error.__traceback__
    while frames.tb_frame.f_code.co_filename != worker.__file__:
        frames = frames.tb_next
    return error.with_traceback(frames)


def test_what_torch_distributed_raises_may_be_a_consequence_wrapped_or_not():
    def torch_raises():
        dist.distributed_c10d._check_valid_timeout  # noqa: B018  its file is torch's
        exec(compile("raise RuntimeError('Connection closed')", dist.distributed_c10d.__file__, "exec"))

    def wrapped():
        try:
            torch_raises()
        except RuntimeError as error:
            raise LookupError("the step failed") from error

    assert describe(0, raised(torch_raises)).consequence and describe(0, raised(wrapped)).consequence
    assert not describe(0, raised(lambda: {}["key"])).consequence


@pytest.mark.parametrize("harm", ["close", "none", "replace"])
def test_a_function_that_closes_its_output_is_answered_all_the_same(harm):
    def fn(comm, fail):
        if harm == "close":
            sys.stdout.close()
        sys.stdout = {"close": sys.stdout, "none": None, "replace": io.StringIO()}[harm]
        if fail:
            raise ValueError("the real reason")
        return comm.rank

    assert launch(fn, 2, False) == [0, 1]
    failure("rank . raised ValueError: the real reason", fn, 2, True)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, BaseException])
def test_any_exception_is_told(kind):
    def fn(comm):
        if comm.rank:
            raise kind("odd")
        comm.barrier()

    failure(f"rank 1 raised {kind.__name__}: odd", fn, 2)


def test_a_rank_that_closes_every_file_is_named_and_one_that_forks_answers_once():
    # gloo's thread may end it first
    failure("rank 0 (exited|was killed)", lambda comm: os.closerange(3, 200), 1)

    def forks(comm):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return comm.rank

    assert launch(forks, 2) == [0, 1]
