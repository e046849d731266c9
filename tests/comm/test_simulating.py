"""Ranks as threads: what they compute, send and are told is what real ranks compute, send and are told."""

import functools
import random
import threading

import pytest
import torch
from rank_pool import pooled as launch
from torch import nn
from zero_kit import ADAMW, ENGINES, farthest, gpt, parameters_of, train_gpt

from refimpl.comm import CollectiveMismatch, FakeCommunicator, RankError, simulate
from refimpl.mesh import Mesh
from refimpl.tensor import tensor_parallel

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def collectives(comm):
    """What each collective gives, of all dtypes; sums are of small integers, so that no order of adding matters."""
    N, rank, found = comm.world_size, comm.rank, []
    for dtype in DTYPES:
        x = (torch.arange(2 * N).reshape(2 * N, 1) * (rank + 1) % 3).to(dtype)
        ops = ("sum", "max", "min", "product") + (("avg",) if dtype.is_floating_point else ())
        found += [collective(x, op) for collective in (comm.all_reduce, comm.reduce_scatter) for op in ops]
        found += [comm.all_gather(x), comm.all_to_all(x), comm.broadcast(x, N - 1), comm.all_gather(x[0, 0])]
        whole = torch.zeros(2 * N, 1, dtype=dtype)
        own = whole[2 * rank : 2 * rank + 2].copy_(x[:2])
        found += [comm.all_gather(own, out=whole), comm.reduce_scatter(x.clone().T.contiguous().T),
                  comm.all_reduce(x.T, out=torch.empty(1, 2 * N, dtype=dtype)), comm.all_reduce(x[:0])]
    return found


def messages(comm):
    """A ring, both ways, received out of turn; sub-groups in sub-groups; what is begun now and waited for later."""
    N, rank = comm.world_size, comm.rank
    x, found = torch.full((3,), float(rank)), []
    if N > 1:
        left, right = (rank - 1) % N, (rank + 1) % N
        found.append(comm.send_recv(x, right, x, left))
        sent = [comm.send(x * k, right, async_op=True) for k in (2, 3)]
        second, third = (comm.recv(x, left, async_op=True) for _ in range(2))
        found += [third.wait(), second.wait(), *(handle.wait() for handle in sent if handle.wait() is not None)]
    half = comm.split([r for r in range(N) if r % 2 == rank % 2])
    found += [half.all_gather(x), comm.host().all_gather(torch.tensor([rank]))]
    own = half.split([half.rank])
    handles = [group.all_reduce(x, op, async_op=True) for group, op in ((comm, "sum"), (half, "max"), (own, "sum"))]
    found += [handle.wait() for handle in reversed(handles)]
    comm.barrier()
    return found


def run_all(comm):
    found = [collectives(comm), messages(comm)]
    return found, dict(comm.traffic), (comm.order.count, comm.order.digest)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_traffic_and_order_are_those_of_processes(world_size):
    for simulated, launched in zip(simulate(run_all, world_size), launch(run_all, world_size), strict=True):
        assert simulated[1:] == launched[1:]
        for ours, theirs in zip(sum(simulated[0], []), sum(launched[0], []), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def trained(comm, stage):
    engine = ENGINES[stage](gpt(), comm, ADAMW)
    train_gpt(engine, 2, micro_batches=2, max_norm=0.5)
    return parameters_of(engine)


def split(comm):
    """A GPT that is cut over all ranks: gradients of what is split, and of what is whole."""
    model = gpt().double()
    tensor_parallel(model, Mesh(tp=comm.world_size).connect(comm).get_parallel_group("tp"))
    tokens = torch.arange(32).reshape(2, 16) % 64
    loss = model(tokens, tokens)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", range(4))
def test_engines_train_what_they_train_in_processes(stage):
    for ours, theirs in zip(simulate(trained, 3, stage), launch(trained, 3, stage), strict=True):
        assert farthest(ours, theirs) < 1e-6  # fp32, where processes add in another order


def test_a_split_model_computes_what_it_computes_in_processes():
    for ours, theirs in zip(simulate(split, 2), launch(split, 2), strict=True):
        assert farthest(ours, theirs) < 1e-14


def test_a_gradient_that_nobody_sums_shows():
    """The mutant that a FakeCommunicator, whose ranks hold the same, lets pass."""
    def gradient(comm, summed):
        layer = nn.Linear(3, 1, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1)
        layer(torch.full((1, 3), 1.0 + comm.rank)).backward()
        return comm.all_reduce(layer.weight.grad, "avg") if summed else layer.weight.grad

    assert [each[0, 0].item() for each in simulate(gradient, 3, True)] == [2, 2, 2]
    assert [each[0, 0].item() for each in simulate(gradient, 3, False)] == [1, 2, 3]
    fake = [gradient(FakeCommunicator(0, 3), summed) for summed in (True, False)]
    assert torch.equal(*fake)


def test_every_run_goes_the_same_way_and_one_rank_runs_at_a_time():
    def steps(comm, *, log, running):
        for step in range(3):
            running.append(comm.rank)
            log.append((comm.rank, step))
            assert running == [comm.rank]
            running.clear()
            comm.all_reduce(torch.ones(1)) if step % 2 else comm.barrier()

    logs = [], []
    for log in logs:
        simulate(functools.partial(steps, log=log, running=[]), 3)
    assert logs[0] == logs[1] and len(logs[0]) == 9
    assert [rank for rank, _ in logs[0][:3]] == [0, 1, 2]


def test_random_numbers_are_each_ranks_own_and_the_callers_stay():
    def drawn(comm):
        found = []
        for _ in range(3):
            found.append((torch.rand(1).item(), random.random()))
            comm.barrier()
        return found

    state = torch.get_rng_state()
    first, *others = simulate(drawn, 3)
    assert all(each == first for each in others) and len(set(first)) == 3
    assert torch.equal(torch.get_rng_state(), state)


def test_arguments_are_copied_for_each_rank():
    model = nn.Linear(2, 2)
    def change(comm, model):
        model.weight.data.fill_(comm.rank)
        comm.barrier()
        return model.weight[0, 0].item()

    assert simulate(change, 3, model) == [0, 1, 2] and model.weight.abs().max() < 1


WRONG = {
    "another shape": (lambda comm: comm.all_reduce(torch.ones(2 + (comm.rank == 1))), CollectiveMismatch, (1,),
                      r"rank 1 differs in a collective:\n.*shape \(2,\).*\n.*rank 1: all_reduce of shape \(3,\)"),
    "another collective": (lambda comm: comm.barrier() if comm.rank == 2 else comm.all_gather(torch.ones(1)),
                           CollectiveMismatch, (2,), "rank 2: barrier"),
    "another op": (lambda comm: comm.all_reduce(torch.ones(1), "max" if comm.rank else "sum"), CollectiveMismatch,
                   (0,), "op sum"),
    "one returns": (lambda comm: comm.rank and comm.barrier(), CollectiveMismatch, (0,),
                    "rank 0 returned, and others wait .*\n  rank 1: barrier\n  rank 2: barrier"),
    "all receive": (lambda comm: comm.recv(torch.ones(1), (comm.rank + 1) % 3), CollectiveMismatch, (0, 1, 2),
                    r"rank 2: recv of shape \(1,\) from rank 0"),
    "a message that does not fit": (lambda comm: comm.send(torch.ones(2), 1) if comm.rank == 0 else
                                    comm.recv(torch.ones(3), 0) if comm.rank == 1 else None, CollectiveMismatch,
                                    (0, 1), r"rank 0: send of shape \(2,\)"),
    "sub-groups that differ": (lambda comm: comm.split([0, 1] if comm.rank == 0 else [0, 1, 2]), CollectiveMismatch,
                               (0,), r"rank 2 makes a sub-group of ranks \[0, 1, 2\], and rank 0 one of \[0, 1\]"),
    "in a sub-group": (lambda comm: comm.split([1, 2] if comm.rank else [0]).all_reduce(torch.ones(1 + comm.rank)),
                       CollectiveMismatch, (2,), r"rank 1: .*\n  rank 2: "),
    "one raises": (lambda comm: comm.barrier() if comm.rank != 1 else 1 // 0, RankError, (1,),
                   "rank 1 raised ZeroDivisionError")}


@pytest.mark.parametrize("case", WRONG)
def test_what_ranks_do_wrong_is_named_and_no_thread_is_left(case):
    fn, kind, ranks, match = WRONG[case]
    with pytest.raises(kind, match=match) as raised:
        simulate(fn, 3)
    assert type(raised.value) is kind and raised.value.ranks == ranks
    assert not [thread for thread in threading.enumerate() if thread.name in ("rank 0", "rank 1", "rank 2")]


@pytest.mark.parametrize(("fn", "world_size", "error"), [
    (None, 2, TypeError), (print, 0, ValueError), (print, True, ValueError), (print, 2.0, ValueError)])
def test_bad_input(fn, world_size, error):
    with pytest.raises(error):
        simulate(fn, world_size)


def test_a_hundred_ranks_and_a_thousand_collectives_take_seconds():
    def sums(comm):
        return [comm.all_reduce(torch.ones(1)).item() for _ in range(10)]

    assert simulate(sums, 100) == [[100.0] * 10] * 100
