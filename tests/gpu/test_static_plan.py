"""A step in its arena on a CUDA device: the same bits, and no call to the allocator once it is captured."""

import pytest
import torch

from refimpl.allocator import ActivationReuseOptimizer, GPUMemoryPool, defragment, without_out
from refimpl.allocator.static import record_step
from refimpl.model import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=300, context_length=64, layers=3, hidden=128, heads=4)
pytestmark = pytest.mark.usefixtures("deterministic")


def trainer(capturable=False):
    torch.manual_seed(0)
    model = GPT(CONFIG, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=capturable)

    def step(tokens):
        optimizer.zero_grad()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, step


@pytest.fixture
def batches():
    return list(torch.randint(300, (8, 4, 64), device="cuda"))


def calls():
    """(calls of the caching allocator, calls of cudaMalloc) so far."""
    torch.cuda.synchronize()
    read = torch.cuda.memory_stats()
    return read["allocation.all.allocated"], read["num_device_alloc"]


def test_the_same_bits_and_only_what_has_no_out_is_allocated(batches):
    (model, step), (other, plain) = trainer(), trainer()
    train = ActivationReuseOptimizer(step)
    losses = [(train(tokens), plain(tokens)) for tokens in batches[:5]]
    assert all(torch.equal(*each) for each in losses)
    assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad)
               for a, b in zip(model.parameters(), other.parameters(), strict=True))
    del losses
    train(batches[5])
    before = calls()
    train(batches[6])
    after = calls()
    _, trace = record_step(plain, batches[0])
    makes = sum(made is not None for each in trace.operations for made in each.made)
    assert after[1] == before[1], "nothing is asked of the driver"
    assert after[0] - before[0] < 0.5 * makes, without_out(trace)
    assert all(p.grad in train.arena for p in model.parameters())


def test_no_call_to_the_allocator_once_it_is_captured(batches):
    (model, step), (other, plain) = trainer(True), trainer(True)
    train = ActivationReuseOptimizer(step, graph=True)
    for tokens in batches[:4]:
        assert torch.equal(train(tokens), plain(tokens))
    losses = [train(batches[4])]
    before = calls()
    losses.append(train(batches[5]))
    assert calls() == before, "no call of the caching allocator, none of the driver"
    assert [loss.item() for loss in losses] == [plain(tokens).item() for tokens in batches[4:6]]
    assert all(torch.equal(a, b) and torch.equal(a.grad, b.grad)
               for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_other_shapes_are_another_step(batches):
    _, step = trainer(True)
    train = ActivationReuseOptimizer(step, graph=True)
    for tokens in batches[:3]:
        train(tokens)
    assert train(batches[3][:2]).isfinite() and train(batches[4]).isfinite()


def test_tensors_of_a_pool_move():
    pool = GPUMemoryPool(2**20, device="cuda")
    kept = [pool.allocate((1000,)).fill_(i) for i in range(20)]
    for tensor in kept[::2]:
        pool.free(tensor)
    kept = kept[1::2]
    del tensor
    defragment(pool, kept)
    assert all((tensor == i).all() for i, tensor in zip(range(1, 20, 2), kept, strict=True))  # a mean rounds on CUDA
    assert pool.largest_hole == pool.capacity - pool.allocated
