"""PowerSGD beside torch's own hook, and the bytes of its factors."""

import pytest
import torch
from compression_kit import gradient_on
from rank_pool import on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from benchmarks.tensor_parallel import SIZES, Decoder
from refimpl.compression import GradientCompressor
from refimpl.compression.powersgd import FactorLayout, orthonormalize
from refimpl.zero import DataParallel
from refimpl.zero.internals.hook import BucketLayout

SHAPES = [torch.Size(shape) for shape in ((24, 40), (40,), (16, 3, 5), (24, 40), (30, 20), (4, 2), (1,), (20, 30))]


class StandIn:
    """A bucket as DDP hands it to a hook."""

    def __init__(self, flat):
        self.flat = flat

    def buffer(self):
        return self.flat

    def gradients(self):
        parts = self.flat.split([shape.numel() for shape in SHAPES])
        return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]

    parameters = gradients

    def index(self):
        return 0

    def is_last(self):
        return True

    def set_buffer(self, flat):
        self.flat = flat


def layout_of(shapes):
    firsts = torch.tensor([0, *(shape.numel() for shape in shapes)]).cumsum(0).tolist()
    return BucketLayout(firsts[-1], torch.float32, torch.device("cpu"), list(zip(firsts, shapes, strict=False)))


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 4])
@on_ranks(2)
def test_it_is_torchs(comm, rank, feedback):
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, use_error_feedback=feedback)
    state.iter = 2  # past its warm-up
    hook = GradientCompressor("powersgd", rank=rank, error_feedback=feedback)
    hook.attach(comm, [layout_of(SHAPES)])
    for step in range(6):
        g = gradient_on(comm.rank, step, sum(shape.numel() for shape in SHAPES))
        ours = hook.all_reduce(0, g, g.dtype, "").wait()
        hook.step()
        theirs = powerSGD_hook(state, StandIn(g.clone())).wait()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert comm.traffic.total == 6 * FactorLayout(SHAPES, 1, rank).payload_bytes()


class Cold(GradientCompressor):
    """The mutant: factors begin anew in each step."""

    def _latest(self, key):
        return {name: x for name, x in super()._latest(key).items() if name != "q"}


@on_ranks(2)
def test_factors_begin_where_they_ended(comm):
    hooks = [kind("powersgd", rank=1) for kind in (Cold, GradientCompressor)]
    for hook in hooks:
        hook.attach(comm, [layout_of(SHAPES[:1])])
    for step in range(3):
        g = gradient_on(comm.rank, step, 960)
        cold, warm = (hook.all_reduce(0, g, g.dtype, "").wait() for hook in hooks)
        assert torch.allclose(cold, warm, atol=1e-5) == (step == 0)
        for hook in hooks:
            hook.step()


@pytest.mark.parametrize(("rank", "nbytes"), [(1, 198_144), (2, 340_992), (4, 626_688), (16, 2_340_864)])
def test_bytes_of_a_decoder(rank, nbytes):
    with torch.device("meta"):
        shapes = [p.shape for p in Decoder(**SIZES).parameters()]
    assert 4 * sum(shape.numel() for shape in shapes) == 29_546_496
    assert FactorLayout(shapes, 1, rank).payload_bytes() == nbytes


@pytest.mark.parametrize(("rank", "nbytes"), [(1, 198_144), (4, 626_688)])
@on_ranks(2)
def test_they_are_on_the_wire(comm, rank, nbytes):
    """On two ranks an all_reduce sends a tensor's own bytes: 2(N−1)/N = 1."""
    torch.manual_seed(0)
    model = Decoder(**SIZES)
    engine = DataParallel(model, comm, torch.optim.SGD, hook=GradientCompressor("powersgd", rank=rank))
    model.requires_grad_()
    before = comm.traffic
    engine.backward(model.head(engine(torch.arange(8)[None])).sum())
    assert (comm.traffic - before)["all_reduce"] == nbytes


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


def test_a_column_of_zeros_stays():
    for matrix in (torch.zeros(5, 1), torch.zeros(5, 2), torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]])):
        zeros = (matrix == 0).all(0)
        orthonormalize(matrix)
        assert (matrix[:, zeros] == 0).all() and (matrix[:, ~zeros].norm(dim=0) == 1).all()
