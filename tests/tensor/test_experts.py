"""Experts in one tensor, split in place: 1/N of their bytes, the same training, and the same files under any mesh."""

import functools

import pytest
import torch
from outside.models import GROUPED, causal
from safetensors.torch import load_file

from refimpl.comm import FakeCommunicator, simulate
from refimpl.engine import together
from refimpl.mesh import Mesh
from refimpl.sharding import ShardSpec, check_specs, copy_overlap, spec_of
from refimpl.tensor import tensor_parallel

MIXTRAL = causal("mixtral", **GROUPED, num_local_experts=4, num_experts_per_tok=2)
SGD = functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9)
TOKENS = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
TARGETS = torch.nn.functional.pad(TOKENS[:, 1:], (0, 1), value=-100)
GATE_UP, DOWN = (f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down"))


def built():
    torch.manual_seed(0)
    return MIXTRAL()


def test_each_rank_has_its_part_of_all_experts_and_no_more():
    whole, (E, I2, C) = built(), built().get_parameter(GATE_UP).shape
    for n in (2, 4):
        bytes_of = []
        for rank in range(n):
            split = tensor_parallel(built(), FakeCommunicator(rank, n))
            gate_up, down = split.get_parameter(GATE_UP), split.get_parameter(DOWN)
            assert gate_up.shape == (E, I2 // n, C) and down.shape == (E, C, I2 // 2 // n)
            first, width = rank * I2 // 2 // n, I2 // 2 // n
            both = whole.get_parameter(GATE_UP).view(E, 2, I2 // 2, C)[:, :, first:first + width]
            assert torch.equal(gate_up, both.reshape(gate_up.shape)) and spec_of(GATE_UP, gate_up).fused == (1, 2)
            assert gate_up.untyped_storage().nbytes() == gate_up.nbytes
            bytes_of.append(gate_up.nbytes + down.nbytes)
        assert sum(bytes_of) == whole.get_parameter(GATE_UP).nbytes + whole.get_parameter(DOWN).nbytes


def plain(steps):
    model = built()
    optimizer, losses = SGD(model.parameters()), []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def steps_of(engine, steps):
    losses, at, n = [], engine.mesh.here["dp"], engine.mesh.dp
    for _ in range(steps):
        loss = engine.train_step(TOKENS[at * 4 // n:(at + 1) * 4 // n], TARGETS[at * 4 // n:(at + 1) * 4 // n])
        engine.clip_grad_norm_(0.5)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(comm, axes, zero, folder=None, load=False):
    engine = together(built(), Mesh(**axes).connect(comm), SGD, zero=zero)
    if load:
        engine.load(folder / "state")
    losses = steps_of(engine, 1 if load else 2)
    if folder is not None and not load:
        engine.save(folder / "state")
        engine.save_weights(folder / "weights", None)
    return losses


@pytest.mark.parametrize(("axes", "zero"), [({"tp": 2}, 1), ({"tp": 2, "dp": 2}, 1), ({"tp": 2, "dp": 2}, 2),
                                            ({"tp": 2, "dp": 2}, 3), ({"tp": 2, "pp": 2}, 1), ({"tp": 4}, 0)])
def test_it_trains_as_the_whole(axes, zero):
    _, expected = plain(2)
    for losses in simulate(trained, Mesh(**axes).world_size, axes, zero):
        assert losses == pytest.approx(expected, rel=2e-5)


def test_what_one_mesh_saves_another_loads_and_a_plain_model_too(tmp_path):
    whole, _ = plain(2)
    _, expected = plain(3)
    simulate(trained, 4, {"tp": 2, "dp": 2}, 1, tmp_path)
    for name, x in load_file(tmp_path / "weights").items():
        assert torch.allclose(whole.get_parameter(name), x, atol=1e-5), name
    for axes, zero in (({}, 1), ({"dp": 2}, 3), ({"tp": 4}, 1), ({"tp": 2, "dp": 2}, 2)):
        for losses in simulate(trained, Mesh(**axes).world_size, axes, zero, tmp_path, True):
            assert losses == pytest.approx(expected[2:], rel=2e-5), axes


def test_in_the_order_of_ranks_alone_the_whole_would_be_another():
    """The mutant whose block is one range of rows, gate's alone on the first rank."""
    split = tensor_parallel(built(), FakeCommunicator(0, 2)).get_parameter(GATE_UP)
    E, I2, C = built().get_parameter(GATE_UP).shape
    assert not torch.equal(split, built().get_parameter(GATE_UP)[:, :I2 // 2])


# --- parts side by side in one dim -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [None, (0, 7), (5, 29), (13, 24)])
@pytest.mark.parametrize("n", [2, 3])
def test_boxes_of_fused_parts_are_the_elements_of_the_block(n, cut):
    whole = torch.arange(2 * n * 6 * 2).view(2, n * 6, 2)
    for rank in range(3):
        spec = ShardSpec("w", whole.shape, (0, 2 * rank, 0), (2, n * 2, 2), fused=(1, n))
        block = torch.cat([whole[:, p * 6 + 2 * rank:p * 6 + 2 * rank + 2] for p in range(n)], 1)
        assert torch.equal(spec.block(whole), block)
        spec = spec if cut is None else spec.cut(*(min(each, spec.numel) for each in cut))
        flat = block.reshape(-1)[spec.first:spec.end]
        found = torch.full_like(flat, -1)
        copy_overlap(found, spec, whole.reshape(-1), ShardSpec("w", whole.shape))
        assert torch.equal(found, flat)
        back = torch.full((whole.numel(),), -1)
        copy_overlap(back, ShardSpec("w", whole.shape), flat, spec)
        assert sorted(back[back >= 0].tolist()) == flat.sort().values.tolist()
        assert torch.equal(back[flat], flat)


def test_each_element_of_fused_parts_is_somewhere_once():
    def spec(begin, length, fused=(0, 2)):
        return ShardSpec("w", (12, 2), (begin, 0), (length, 2), fused=fused)

    check_specs([[spec(0, 4)], [spec(2, 8)]])
    with pytest.raises(ValueError, match="w: .* of its .* elements are on no rank"):
        check_specs([[spec(0, 4)], [spec(2, 4)]])
    with pytest.raises(ValueError, match="have elements in common"):
        check_specs([[spec(0, 6)], [spec(2, 8)]])
    for wrong in ((4, 6), (0, 3)):
        with pytest.raises(ValueError, match="w: "):
            spec(*wrong)
