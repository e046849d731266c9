"""Partitioned inputs of regions: the gradients of whole ones bit for bit; bytes and traffic of each rank 0 off."""

import functools

import partitioned_bodies as bodies
import pytest
import torch
from partitioned_bodies import CONFIG, REGIONS, SHAPE, built, held, partitioned
from rank_pool import pooled
from tensor_kit import ROWS, T
from torch import nn

from refimpl import memory
from refimpl.checkpointing import AdaptiveCheckpoint, checkpoint, checkpoint_sequential, recompute
from refimpl.comm import FakeCommunicator
from refimpl.tensor import partitioned as module
from refimpl.tensor.partitioned import PartitionedInputs, UnequalInputs, bit_sum, partitioned_bytes, partitioned_traffic

WIDTHS = {"gpt": (CONFIG.layers, CONFIG.hidden), "llama": (2, 64)}  # blocks, hidden


def inputs(name, precision="fp32"):
    """(blocks, elements of a block's input, its dtype)."""
    layers, hidden = WIDTHS[name]
    return layers, SHAPE[0] * SHAPE[1] * hidden, torch.bfloat16 if precision == "bf16" else torch.float32


def expected(name, ranks, precision="fp32", check=True):
    """(bytes saved, bytes sent) of a step."""
    layers, elements, dtype = inputs(name, precision)
    return (layers * (elements * dtype.itemsize - partitioned_bytes(elements, ranks, dtype, check)),
            layers * partitioned_traffic(elements, ranks, dtype))


# --- a step on real ranks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("precision", REGIONS)
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradients_are_bit_equal_and_bytes_and_traffic_are_0_off(name, precision, ranks):
    saved, sent = expected(name, ranks, precision)
    for found in pooled(held, ranks, name, precision):
        assert found["equal"] and found["saved"] == saved
        assert found["backward"] == {"all_gather": sent} and found["forward"] == found["none"] == 0
        assert found["left"] == 0, "parts go with the graph"
    assert (saved > 0) == (ranks > 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_mutant_that_keeps_the_whole_saves_nothing(ranks):
    for found in pooled(held, ranks, "gpt", "fp32", functools.partial(bodies.Sliced, smallest=0)):
        assert found["equal"] and found["backward"]["all_gather"] == expected("gpt", ranks)[1]
        assert found["saved"] == -8 * CONFIG.layers, "its checksums come on top"


def test_without_the_check_no_checksum_is_kept():
    for found in pooled(functools.partial(held, check=False), 2, "gpt"):
        assert found["equal"] and found["saved"] == expected("gpt", 2, check=False)[0]


def test_small_inputs_stay_whole():
    for found in pooled(functools.partial(held, make=PartitionedInputs), 2, "gpt"):
        assert found["saved"] == 0 and found["backward"].total == 0 and SHAPE[0] * SHAPE[1] * 32 * 4 < module.SMALLEST


@pytest.mark.parametrize(("plan", "regions"), [([(0, 1), 2], 1), ([((0, 1), 2)], 1), ([((0,), (1,)), (2,)], 2)])
def test_regions_within_regions(plan, regions):
    """In the forward only the outermost regions keep a part; the tensors that the others would keep do not exist."""
    _, elements, _ = inputs("gpt")
    inner = sum(isinstance(stage, tuple) for item in plan if isinstance(item, tuple) for stage in item)
    for saved, equal in pooled(bodies.nested, 2, plan):
        assert equal and saved == regions * (elements * 4 - partitioned_bytes(elements, 2)) - 8 * (inner > 1)


@pytest.mark.parametrize("outer", ["ours", "torch's"])
def test_inside_a_recomputation_without_parts(outer):
    assert pooled(bodies.inside_another, 2, outer) == [True, True]


@pytest.mark.parametrize("when", [1, 2])
def test_an_exception_leaves_nothing(when):
    assert pooled(bodies.interrupted, 2, when) == [(0, True)] * 2


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("name", "hidden"), [("grouped gpt", 32), ("gpt2", 32), ("llama", 64)])
def test_of_models_that_tensor_parallelism_has_split(name, hidden, ranks):
    elements, blocks = ROWS * T * hidden, 2
    saved = blocks * (elements * 8 - partitioned_bytes(elements, ranks, torch.float64))
    sent = blocks * partitioned_traffic(elements, ranks, torch.float64)
    assert pooled(bodies.split_step, ranks, name) == [(saved, sent, True)] * ranks and saved > 0


def test_where_ranks_have_their_own_tokens_already_it_is_refused():
    for said in pooled(bodies.split_step, 2, "gpt", True):
        assert "not what this rank computed with" in said and "sequence_parallel" in said


# --- ranks that differ ------------------------------------------------------------------------------------------------

CHANGES = {"other_values": torch.Tensor.neg_, "first_bit": lambda x: x[0, 0].fill_(1e-45),
           "last_bit": lambda x: x[-1, -1].add_(2**-13), "sequences_swapped": lambda x: x.copy_(x.flip(0)),
           "swapped_within_the_parts": lambda x: x.copy_(x[[1, 0, 3, 2]])}


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_with_other_inputs_are_an_error(change):
    said = [each for each in pooled(bodies.unequal, 2, CHANGES[change]) if each]
    assert said, "the mutant: check=False"
    words = "of 2: the input of a recomputed region, float32 [4, 256], is not what this rank"
    assert all(words in each for each in said) and pooled(bodies.unequal, 2, CHANGES[change], False) == ["", ""]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("elements", [1, 63, 1000, 5000])
def test_a_checksum_is_of_the_bits_and_of_their_places(dtype, elements):
    x = torch.randn(elements + 1).to(dtype)
    one, other = x[:-1].clone(), x[:-1].clone()
    assert torch.equal(bit_sum(one), bit_sum(other)) and bit_sum(one).nbytes == 8
    assert torch.equal(bit_sum(x[1:]), bit_sum(x[1:].clone())), "wherever it lies in memory"
    other[elements // 2] *= 2
    assert not torch.equal(bit_sum(one), bit_sum(other))
    if elements == 5000:
        assert not torch.equal(bit_sum(one), bit_sum(one.roll(512 // dtype.itemsize)))


# --- one rank of many, without the others -----------------------------------------------------------------------------


@pytest.fixture
def keep():
    return partitioned(FakeCommunicator(1, 4))


def made(*shape):
    """A tensor that autograd made."""
    return torch.randn(*shape, requires_grad=True) * 1


def part_of(keep, tensor):
    packed = keep.pack(tensor)
    return packed and packed[0]


@pytest.mark.parametrize("elements", [1, 3, 4, 21])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_part_is_this_ranks_padded_with_zeros(elements, ranks):
    x = made(elements)
    parts = [part_of(partitioned(FakeCommunicator(rank, ranks)), x) for rank in range(ranks)]
    sizes = {size for part in parts for size in (len(part), part.untyped_storage().nbytes() // 4)}
    assert sizes == {module.part_elements(elements, ranks)}
    whole = torch.cat(parts)
    assert torch.equal(whole[:elements], x) and not whole[elements:].any()


@pytest.mark.parametrize("view", [
    lambda x: x.t(), lambda x: x[1:], lambda x: x[:, 3:], lambda x: x[::2], lambda x: x.view(4, 2, 8).transpose(0, 2),
    lambda x: x[0, 0], lambda x: x[:, 3:].t()])
def test_views_come_back_with_their_strides(keep, monkeypatch, view):
    x = view(made(8, 8))
    part, layout = keep.pack(x)
    padded = torch.zeros(4 * len(part))
    padded[:x.numel()] = x.detach().as_strided((x.numel(),), (1,)) if layout.dense else x.detach().flatten()
    monkeypatch.setattr(keep.comm, "all_gather", lambda part, label: padded)
    again = keep.unpack(part, layout)
    assert torch.equal(again, x) and again.stride() == x.stride() and again.dtype == x.dtype
    assert layout.dense == (again.untyped_storage().nbytes() == padded.nbytes) or not layout.dense


def test_what_stays_whole(keep):
    parameter = nn.Parameter(torch.randn(8, 8))
    table, tokens = torch.randn(8, 8), torch.arange(8)
    for tensor in (parameter, parameter.t(), parameter.detach().requires_grad_(), table, tokens, made(8).expand(3, 8),
                   made(0, 3), made(8, 8).to(torch.complex64), made(9).unfold(0, 3, 1)):
        assert keep.pack(tensor) is None
    assert PartitionedInputs(keep.comm).pack(made(100)) is None, "too small"
    assert partitioned(FakeCommunicator(0, 1)).pack(made(100)) is None


def test_an_input_that_regions_share_is_kept_once(keep):
    """Such as an encoder's output in the cross-attention of every block."""
    x = made(8, 8)
    regions = [keep.pack(each) for each in (x, x, x.view(64))]
    first, again, flat = (region[0] for region in regions)
    assert first is again is flat and regions[2][1].shape == (64,)
    assert part_of(keep, x[:4]) is not first and part_of(keep, made(8, 8)) is not first
    with torch.no_grad():
        x.add_(1)
    assert part_of(keep, x) is not first, "changed in place"
    del regions, first, again, flat, x
    assert len(keep._parts) == 0


def test_a_function_that_writes_into_its_input_or_a_caller_that_does_changes_no_gradient(keep):
    """The part is a copy, so what would be an error with whole inputs is right."""
    keep = partitioned(FakeCommunicator(0, 2, "cpu"))
    w = torch.ones(2, 4, requires_grad=True)
    x = w * 3
    y = checkpoint(lambda x: x.sin(), x, keep=keep)
    with torch.no_grad():
        x.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), w)[0], 3 * torch.full((2, 4), 3.0).cos())


def test_without_grad_mode_nothing_is_cut(keep, monkeypatch):
    monkeypatch.setattr(keep, "pack", lambda tensor: pytest.fail("it was asked for a part"))
    with torch.no_grad():
        assert checkpoint(torch.sin, torch.ones(3), keep=keep).sum() > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_without_the_others_and_a_dry_run_read_the_same(precision):
    comm = FakeCommunicator(3, 4)
    kept, _, sent, _ = bodies.step(comm, "gpt", precision, partitioned(comm))
    whole, _, _, _ = bodies.step(comm, "gpt", precision, None)
    assert (whole - kept, sent.total) == expected("gpt", 4, precision)

    def dry(keep, backward):
        model, _, tokens = built("gpt", precision)

        def run(model, tokens):
            with recompute(list(model.blocks), keep=keep):
                loss = model(tokens, tokens)
            return loss.backward() if backward else loss

        return memory.dry_run(run, model, tokens)

    random_states = 5056 * CONFIG.layers  # which fake tensors do not change
    forward = dry(partitioned(comm), backward=False)
    assert forward.now.total - forward.start.total == kept - random_states
    comm.reset_traffic()
    peak = dry(partitioned(comm), backward=True).peak.total
    assert comm.traffic == {"all_gather": sent.total}
    _, elements, dtype = inputs("gpt", precision)
    assert peak - dry(None, backward=True).peak.total == partitioned_bytes(elements, 4, dtype), (
        "in so small a model the peak is in the first block's backward, where its part stands beside the whole")


def test_in_every_way_to_recompute():
    comm, w = FakeCommunicator(0, 2), torch.ones(8, 8, requires_grad=True)
    adaptive = AdaptiveCheckpoint(budget=1, used=lambda: 2, keep=partitioned(comm))
    ways = {
        "checkpoint": lambda x, keep: checkpoint(torch.sin, checkpoint(torch.sin, x, keep=keep), keep=keep),
        "sequential": lambda x, keep: checkpoint_sequential([torch.sin] * 3, 3, x, keep=keep),
        "adaptive": lambda x, keep: adaptive(torch.sin, adaptive(torch.sin, x))}
    for name, way in ways.items():
        comm.reset_traffic()
        way(w * 1, partitioned(comm)).sum().backward()
        assert comm.traffic == {"all_gather": 2 * partitioned_traffic(64, 2)}, name


# --- in host memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_in_host_memory_leave_checksums_on_the_device(ranks):
    """The CPU stands for the device here, and "meta" for the host: what is there has no bytes on the CPU."""
    def kept(keep):
        model, blocks, tokens = built("gpt")
        with memory.track(model, tokens) as t, recompute(blocks, keep=keep):
            loss = model(tokens, tokens)
        assert loss.isfinite()
        there = sum(known.part().nbytes for known in keep._parts.values()) if keep else 0
        return t.on("cpu").now.total - t.on("cpu").start.total, there

    keep = partitioned(FakeCommunicator(0, ranks), "cpu")
    keep.device = torch.device("meta")
    layers, elements, dtype = inputs("gpt")
    here, there = kept(keep)
    checksums = layers * 8 * (ranks > 1)
    assert kept(None)[0] - here == layers * elements * dtype.itemsize - checksums
    assert there == layers * partitioned_bytes(elements, ranks) - checksums


def test_where_the_input_is_in_host_memory_already_it_changes_nothing():
    for found in pooled(functools.partial(held, device="cpu"), 2, "gpt"):
        assert found["equal"] and found["saved"] == expected("gpt", 2)[0]
    assert partitioned(FakeCommunicator(0, 1), "cpu").pack(made(100)) is None


# --- closed forms and errors ------------------------------------------------------------------------------------------


def test_the_closed_forms_in_numbers():
    assert partitioned_bytes(100, 4, torch.bfloat16) == 50 + 8 and partitioned_bytes(101, 4) == 104 + 8
    assert partitioned_bytes(100, 1) == 400 and partitioned_bytes(100, 2, check=False) == 200
    assert partitioned_traffic(100, 4) == 300 and partitioned_traffic(101, 4) == 312
    assert partitioned_traffic(100, 1) == 0


@pytest.mark.parametrize(("options", "message"), [
    ({"device": "cuda"}, "device='cuda': expected None, the input's own, or 'cpu'"),
    ({"smallest": -1}, "smallest=-1: expected a number of bytes"), ({"smallest": 1.5}, "smallest=1.5")])
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        PartitionedInputs(FakeCommunicator(0, 2), **options)


def test_an_input_that_comes_back_as_another_one_is_refused():
    """Of a communicator that gathers this rank's part from all."""
    comm = FakeCommunicator(0, 2)
    comm.has_others = True
    inputs = PartitionedInputs(comm, smallest=0)
    inputs.unpack(*inputs.pack(torch.ones(8, requires_grad=True)))
    with pytest.raises(UnequalInputs):
        inputs.unpack(*inputs.pack(torch.arange(8.0, requires_grad=True)))
