"""launch: what comes back, how fast, from where it can be called, and that nothing is left of it."""

import concurrent.futures
import functools
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from patience import processor_seconds
from rank_pool import on_ranks

from refimpl import memory
from refimpl.comm import launch
from refimpl.comm.launching import place
from refimpl.model import GPT, GPTConfig
from refimpl.ranks import forkserver

SCALE = 10


@dataclass
class Answer:
    rank: int
    value: float


def scaled(value):
    return SCALE * value


def test_results_come_in_rank_order_from_processes_of_their_own():
    def fn(comm, offset):
        return comm.rank, comm.world_size, offset, os.getpid()

    results = launch(fn, 4, 7)
    assert [result[:3] for result in results] == [(0, 4, 7), (1, 4, 7), (2, 4, 7), (3, 4, 7)]
    assert len({pid for *_, pid in results} | {os.getpid()}) == 5


@pytest.mark.alone
def test_eight_ranks_answer_in_half_a_second():
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        assert launch(lambda comm: comm.all_reduce(torch.tensor(1)).item(), 8) == [8] * 8
        seconds.append(time.perf_counter() - start)
    assert processor_seconds(statistics.median(seconds)) < 0.5, seconds


def test_what_a_test_module_defines_travels_and_its_classes_come_back_as_themselves():
    results = launch(lambda comm: Answer(comm.rank, scaled(comm.rank)), 2)
    assert results == [Answer(0, 0), Answer(1, 10)] and all(type(result) is Answer for result in results)


def test_any_callable():
    class Adder:
        def __init__(self, n):
            self.n = n

        def __call__(self, comm, m):
            return self.n + m + comm.rank

        def method(self, comm):
            return self.n * comm.rank

    assert launch(Adder(5), 2, 1) == [6, 7] and launch(Adder(5).method, 2) == [0, 5]
    assert launch(functools.partial(Adder(1), m=2), 2) == [3, 4]


def test_tensors_and_modules_travel_both_ways_and_ranks_change_only_their_copy():
    model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)

    def fn(comm, model, x):
        with torch.no_grad():
            model.weight.fill_(comm.rank)
        x.zero_()
        return model

    before = model.weight.detach().clone()
    models = launch(fn, 2, model, x)
    assert torch.equal(model.weight, before) and x.sum() == 12
    assert [m.weight.unique().item() for m in models] == [0, 1] and isinstance(models[1].weight, torch.nn.Parameter)


def test_large_results_and_many_ranks():
    results = launch(lambda comm: torch.full((1_000_000,), float(comm.rank)), 3)
    assert [result.sum().item() for result in results] == [0, 1e6, 2e6]
    assert launch(lambda comm: comm.all_reduce(torch.tensor(comm.rank)).item(), 16) == [120] * 16


def test_a_rank_has_the_callers_directory_environment_and_path_as_they_are_now(tmp_path, monkeypatch):
    (tmp_path / "found_only_here.py").write_text("def answer(comm):\n    return comm.rank + 40\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REFIMPL_TEST", "now")
    import found_only_here

    def fn(comm):
        return os.getcwd(), os.environ["REFIMPL_TEST"], found_only_here.answer(comm), "RANK" in os.environ

    assert launch(fn, 2) == [(str(tmp_path), "now", 40, False), (str(tmp_path), "now", 41, False)]
    assert launch(found_only_here.answer, 2) == [40, 41]


def test_cores_are_shared_out_and_draws_differ():
    def fn(comm):
        return torch.get_num_threads(), random.random(), np.random.rand()  # noqa: NPY002

    threads, *draws = zip(*launch(fn, 4), strict=True)
    assert set(threads) == {max(1, len(os.sched_getaffinity(0)) // 4)} and all(len(set(drawn)) == 4 for drawn in draws)


@on_ranks(2, launch=launch)
def test_torch_distributed_is_there_for_what_needs_it(comm):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2) * comm.rank).sum().backward()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == 2 and model.module.weight.grad.sum() == 2


@on_ranks(2, launch=launch)
def test_workers_of_a_data_loader_run_in_a_rank(comm):
    loader = torch.utils.data.DataLoader(range(4), batch_size=2, num_workers=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_tracked_step_comes_back_as_a_trace():
    def fn(comm):
        model = GPT(GPTConfig(vocab_size=64, context_length=16, layers=1, hidden=16, heads=2))
        tokens = torch.randint(0, 64, (1, 16))
        with memory.track(model) as t:
            model(tokens, tokens).backward()
            for parameter in model.parameters():
                comm.all_reduce(parameter.grad, "avg", out=parameter.grad)
        return t, sum(4 * p.numel() for p in model.parameters())

    for trace, nbytes in launch(fn, 2):
        assert trace.now["parameters"] == trace.now["gradients"] == nbytes and trace.now["communication"] == 0
        assert "c10d::allreduce_" in {op.name for op in trace.ops}


def test_threads_of_the_caller_can_launch_at_once():
    def one(n):
        return launch(lambda comm: comm.all_reduce(torch.tensor(n)).item(), 2)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(4))) == [[2 * n] * 2 for n in range(4)]


def test_a_rank_can_launch_ranks():
    def outer(comm):
        forkserver.PRELOADED = ("torch",)  # what this rank starts is ready in half the time
        return launch(lambda inner: inner.rank + 10, 2) if comm.rank == 0 else None

    assert launch(outer, 2) == [[10, 11], None]


@pytest.mark.parametrize("world_size", [0, -1, 2.5, "2", True, None])
def test_a_world_size_that_makes_no_sense_is_named(world_size):
    with pytest.raises(ValueError, match=f"world_size={world_size!r}: expected an integer of at least 1"):
        launch(print, world_size)


@pytest.mark.parametrize("timeout", [0, -1, "soon", float("nan")])
def test_a_timeout_that_makes_no_sense_is_named(timeout):
    for name in ("timeout", "limit"):
        with pytest.raises(ValueError, match=f"{name}={timeout!r}: expected a number of seconds above 0, or None"):
            launch(print, 1, **{name: timeout})


def test_tasks_of_slurm_are_the_ranks_of_one_world():
    """They start no ranks of their own."""
    task = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0",
            "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    with mock.patch.dict(os.environ, task):
        with pytest.raises(ValueError, match="world_size=2, but torchrun made a world of 4"):
            launch(print, 2)
        assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR")] == ["3", "1", "gpu03"]


def test_what_cannot_be_called_is_named():
    with pytest.raises(TypeError, match="launch.int, …."):
        launch(3, 1)


def test_no_timeout():
    assert launch(lambda comm: 1, 1, timeout=None, limit=None) == launch(lambda comm: 1, 1, limit=60) == [1]


def test_where_ranks_are_placed():
    nccl = "cpu:gloo,cuda:nccl"
    assert place(3, None, gpus=0) == (["cpu"] * 3, "gloo")
    assert place(2, None, gpus=4) == (["cuda:0", "cuda:1"], nccl)
    assert place(4, None, gpus=1) == (["cuda:0"] * 4, "gloo")  # NCCL refuses two ranks on one GPU
    assert place(3, "cuda", gpus=2) == (["cuda:0", "cuda:1", "cuda:0"], "gloo")
    assert place(2, "cuda:1", gpus=2) == (["cuda:1"] * 2, "gloo")
    assert place(1, "cuda:1", gpus=2) == (["cuda:1"], nccl)
    assert place(2, torch.device("cpu"), gpus=8) == (["cpu"] * 2, "gloo")
    for device in ("cuda", "cuda:3"):
        with pytest.raises(ValueError, match=f"device='{device}': this machine has 0 CUDA GPUs"):
            place(2, device, gpus=0)
    for device in ("meta", "nonsense", ""):
        with pytest.raises(ValueError, match=f"device={device!r}: "):
            launch(print, 1, device=device)
    # A PyTorch that is built for CUDA takes 0 for its first GPU, one that is built for the CPU takes no number.
    with pytest.raises(ValueError, match="device='cuda:0': this machine has 0|device=0: ranks run on"):
        place(1, 0, gpus=0)


def test_the_devices_of_ranks_on_the_cpu():
    assert launch(lambda comm: str(comm.device), 2, device="cpu") == ["cpu"] * 2


def test_the_caller_is_not_the_one_that_is_forked():
    secret = [sys.modules]  # large, and unpicklable: it must not be needed
    assert launch(lambda comm: ("pytest" in sys.modules, __name__), 1) == [(False, __name__)]
    del secret
