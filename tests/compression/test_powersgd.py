"""PowerSGD beside torch's own hook, and the bytes of its factors."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from refimpl.bench.tensor_parallel import SIZES, Decoder
from refimpl.comm import launch
from refimpl.compression import GradientCompressor
from refimpl.compression.powersgd import Layout, orthonormalize
from refimpl.zero.hook import BucketLayout

SHAPES = [torch.Size(shape) for shape in ((24, 40), (40,), (16, 3, 5), (24, 40), (30, 20), (4, 2), (1,), (20, 30))]
STEPS = 6


class StandIn:
    """A bucket as DDP hands it to a hook."""

    def __init__(self, flat):
        self.flat = flat

    def buffer(self):
        return self.flat

    def gradients(self):
        return [part.view(shape) for part, shape in zip(self.flat.split([s.numel() for s in SHAPES]), SHAPES,
                                                        strict=True)]

    def parameters(self):
        return self.gradients()

    def index(self):
        return 0

    def is_last(self):
        return True

    def set_buffer(self, flat):
        self.flat = flat


def both(comm, rank, feedback):
    """[(torch's average, ours)] of each step, and bytes that ours sent."""
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, use_error_feedback=feedback)
    state.iter = 2  # past its warm-up
    numel = sum(shape.numel() for shape in SHAPES)
    firsts = torch.tensor([0, *(shape.numel() for shape in SHAPES)]).cumsum(0).tolist()
    hook = GradientCompressor("powersgd", rank=rank, error_feedback=feedback)
    hook.attach(comm, [BucketLayout(numel, torch.float32, torch.device("cpu"), list(zip(firsts, SHAPES,
                                                                                      strict=False)))])
    found = []
    for step in range(STEPS):
        g = torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        ours = hook.all_reduce(0, g, g.dtype, "")
        ours = ours.wait()
        hook.step()
        theirs = powerSGD_hook(state, StandIn(g.clone())).wait()
        found.append((theirs.clone(), ours))
    return found, comm.traffic.total, dist.get_world_size()


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_it_is_torchs(rank, feedback):
    for found, sent, _ in launch(both, 2, rank, feedback):
        for theirs, ours in found:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert sent == STEPS * Layout(SHAPES, 1, rank).payload_bytes()


class Cold(GradientCompressor):
    """The mutant: factors begin anew in each step."""

    def _latest(self, key):
        return {name: x for name, x in super()._latest(key).items() if name != "q"}


def cold(comm):
    hook = Cold("powersgd", rank=1)
    hook.attach(comm, [BucketLayout(960, torch.float32, torch.device("cpu"), [(0, SHAPES[0])])])
    warm = GradientCompressor("powersgd", rank=1)
    warm.attach(comm, hook.layouts)
    same = []
    for step in range(3):
        g = torch.randn(960, generator=torch.Generator().manual_seed(step + 10 * comm.rank))
        same.append(torch.allclose(*(each.all_reduce(0, g, g.dtype, "").wait() for each in (hook, warm)), atol=1e-5))
        hook.step(), warm.step()
    return same


def test_factors_begin_where_they_ended():
    assert launch(cold, 2) == [[True, False, False]] * 2


@pytest.mark.parametrize(("rank", "nbytes"), [(1, 198_144), (2, 340_992), (4, 626_688), (16, 2_340_864)])
def test_bytes_of_a_decoder(rank, nbytes):
    with torch.device("meta"):
        shapes = [p.shape for p in Decoder(**SIZES).parameters()]
    assert 4 * sum(shape.numel() for shape in shapes) == 29_546_496
    assert Layout(shapes, 1, rank).payload_bytes() == nbytes


def sent(comm, rank):
    torch.manual_seed(0)
    from refimpl.zero import DataParallel
    hook = GradientCompressor("powersgd", rank=rank)
    engine = DataParallel(model := Decoder(**SIZES), comm, torch.optim.SGD, hook=hook)
    for p in model.parameters():
        p.requires_grad_()
    before = comm.traffic
    tokens = torch.arange(8)[None]
    engine.backward(model.head(engine(tokens)).sum())
    return (comm.traffic - before)["all_reduce"]


@pytest.mark.parametrize(("rank", "nbytes"), [(1, 198_144), (4, 626_688)])
def test_they_are_on_the_wire(rank, nbytes):
    """On two ranks an all_reduce sends a tensor's own bytes: 2(N−1)/N = 1."""
    assert launch(sent, 2, rank) == [nbytes, nbytes]


@pytest.mark.parametrize("r", [1, 2, 3, 8])
def test_columns_are_orthonormal(r):
    matrix = torch.randn(20, r)
    spans = matrix.clone()
    orthonormalize(matrix)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(r), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrix @ (matrix.T @ spans), spans, atol=1e-4, rtol=0)


def test_a_matrix_of_that_rank_is_sent_whole():
    x, made = torch.randn(60, 2) @ torch.randn(2, 80), GradientCompressor("powersgd", rank=2)
    torch.testing.assert_close(made.decompress(made.compress(x)), x, atol=1e-4, rtol=1e-4)
