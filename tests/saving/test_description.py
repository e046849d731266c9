"""What has to be the same where a saved state is loaded."""

import copy

import pytest
import torch
from torch import nn

from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.saving import TrainingState
from refimpl.saving.description import describe, differences, listed, piece_of, spec_from
from refimpl.sharding import Shard, ShardSpec


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)
        self.b.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def state(comm, dtype=None, masters=True, change=lambda shards: shards, lr=1e-3, names=("a.weight", "a.bias")):
    """Whole tensors on rank 0, replicas of which are on the others."""
    model, shards = Several().to(dtype), []
    replicas = tuple(range(comm.world_size)) if comm.world_size > 1 else ()
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        spec, values = ShardSpec(name, x.shape, replicas=replicas), x.detach().reshape(-1)
        own = nn.Parameter(values.float() if masters else values) if x.requires_grad else None
        kind = "parameters" if x.requires_grad else "frozen" if isinstance(x, nn.Parameter) else "buffers"
        shards.append(Shard(spec, values if own is None else own.detach(), kind, x.dtype, own,
                            None if comm.rank else spec))
    shards = change(shards)
    optimizer = torch.optim.AdamW([shard.own for shard in shards if shard.own is not None], lr=lr)
    return TrainingState(comm, shards, optimizer, [list(names)], model, 3, {"stage": 1})


def description(**how):
    return describe(state(FakeCommunicator(0, 1), **how))[0]


def test_what_is_trained_is_described():
    found = description(dtype=torch.bfloat16)
    assert found["optimizer"] == "torch.optim.adamw.AdamW"
    assert (found["about"], found["world_size"]) == ({"stage": 1}, 1)
    assert found["parameters"]["a.weight"] == {"shape": [2, 3], "dtype": "bfloat16", "held": "float32"}
    assert list(found["rest"]) == ["b.weight", "b.bias", "mean"] and found["step"] == 3
    assert found["groups"][0]["parameters"] == ["a.weight", "a.bias"]
    assert found["groups"][0]["hyperparameters"]["lr"] == 1e-3


def with_complex_state():
    held = state(FakeCommunicator(0, 1))
    held.optimizer.state[held.shards[0].own] = {"seen": 1j}
    return held


def test_states_are_described_to_save_them_alone():
    """So a load can take the place of states that no file can hold."""
    assert "states" not in describe(with_complex_state())[0]
    assert describe(state(FakeCommunicator(0, 1)), saving=True)[0]["states"] == {"a.weight": {}, "a.bias": {}}
    with pytest.raises(TypeError, match="seen"):
        describe(with_complex_state(), saving=True)


@pytest.mark.parametrize(("change", "said"), [
    (lambda r: r["parameters"].pop("a.bias"), "a.bias: absent, here (2,) float32"),
    (lambda r: r["parameters"].update(c=r["parameters"]["a.bias"]), "c: (2,) float32, here absent"),
    (lambda r: r["parameters"]["a.bias"].update(shape=[3]), "a.bias: (3,) float32, here (2,) float32"),
    (lambda r: r["parameters"]["a.bias"].update(held="bfloat16"), "a.bias: (2,) float32 with a master in bfloat16,"),
    (lambda r: r["rest"]["mean"].update(dtype="float64"), "mean: (2,) float64, not trained, here (2,) float32, not"),
    (lambda r: r["parameters"].update({"b.bias": {**r["rest"].pop("b.bias"), "held": "float32"}}),
     "b.bias: (2,) float32, here (2,) float32, not trained"),
    (lambda r: r.update(optimizer="torch.optim.sgd.SGD"), "its optimizer is torch.optim.sgd.SGD, here torch.opt"),
    (lambda r: r["groups"].append(r["groups"][0]), "its param groups have 2 + 2 parameters, here 2"),
    (lambda r: r["groups"][0]["parameters"].__setitem__(0, "c"), "its param groups are of other parameters, or in ano"),
])
def test_what_cannot_be_loaded(change, said):
    here = description()
    saved = copy.deepcopy(here)
    assert differences(saved, here) == []
    change(saved)
    found = differences(saved, here)
    assert len(found) == 1 and found[0].startswith(said)


def test_what_can_be_loaded():
    fp32, masters, low = description(), description(dtype=torch.bfloat16), description(dtype=torch.bfloat16,
                                                                                                masters=False)
    assert differences(masters, fp32) == []  # and buffers go from bf16 to fp32
    assert differences(fp32, masters) == [f"{name}: {shape} float32, not trained, here {shape} bfloat16, not trained"
                                          for name, shape in (("b.weight", (2, 2)), ("b.bias", (2,)), ("mean", (2,)))]
    assert len(differences(masters, low)) == 2 and len(differences(low, masters)) == 2
    assert differences({**fp32, "step": 9, "about": {"stage": 3}, "world_size": 64}, fp32) == []
    swapped = copy.deepcopy(fp32)  # as where ranks hold other layers
    swapped["groups"][0]["parameters"].reverse()
    assert differences(swapped, fp32) == []


def test_a_message_lists_the_first():
    assert listed(["a", "b"]) == "a; b"
    assert listed(list("abcdef")) == "a; b; c; d; and 2 more"


@pytest.mark.parametrize("spec", [ShardSpec("x", (4, 6)), ShardSpec("x", (4, 6), first=3, end=9), ShardSpec("x", ()),
                                  ShardSpec("x", (4, 6), (1, 3), (3, 3), 2, 8)])
def test_a_piece_in_json(spec):
    assert spec_from("x", spec.shape, piece_of(spec)) == spec
    assert len(piece_of(spec)) == (2 if spec.lengths == spec.shape else 4)


def changed(rank, name, **fields):
    """One rank's shard of a tensor with other fields, {field: function of the shard}."""
    def change(shard):
        here = {key: make(shard) for key, make in fields.items()} if shard.spec.name == name else {}
        return Shard(**{**vars(shard), **here})
    return lambda comm: {"change": lambda shards: [change(s) for s in shards] if comm.rank == rank else shards}


def without_replicas(shard):
    return ShardSpec(shard.spec.name, shard.spec.shape)


DIFFER = {
    "replicas that nobody names": (changed(1, "a.bias", spec=without_replicas, owned=without_replicas),
                                   r"ValueError: a.bias: elements 0 … 1 are on rank 0 and on rank 1: ranks that hold"),
    "replicas that one names": (changed(1, "a.bias", spec=without_replicas),
                                r"ValueError: a.bias: ranks \[0\] name ranks \[0, 1\] as replicas of elements"),
    "a tensor that nobody owns": (changed(0, "mean", owned=lambda s: None),
                                  r"ValueError: mean is in the model, and no rank owns a part of it"),
    "a trained tensor that nobody owns": (changed(0, "a.bias", owned=lambda s: None),
                                          r"ValueError: a.bias is in .*, and no rank owns a part of it: one has to"),
    "a gap": (changed(0, "a.weight", owned=lambda s: s.spec.cut(0, 4)),
              r"ValueError: a.weight: elements 4 … 5 are on no rank"),
    "a piece of rank 0's": (changed(1, "a.weight", owned=lambda s: s.spec.cut(4, 6)),
                            r"ValueError: a.weight: elements 4 … 5 are on rank 0 and on rank 1"),
    "another shape": (changed(1, "a.weight", spec=lambda s: ShardSpec("a.weight", (3, 2)),
                              owned=lambda s: ShardSpec("a.weight", (3, 2))),
                      r"ValueError: a.weight has shape \(2, 3\) on rank 0 and \(3, 2\) on rank 1"),
    "another dtype": (lambda comm: changed(comm.rank, "a.bias", owned=lambda s: s.spec.cut(comm.rank, comm.rank + 1),
                                           dtype=lambda s: (torch.float32, torch.float16)[comm.rank])(comm),
                      r"RuntimeError: rank 1 has another description of a.bias than ranks before it: \{.*float16"),
    "another lr": (lambda comm: {"lr": 0.1 * (comm.rank + 1)}, r"RuntimeError: rank 1 has param groups .*'lr': 0.2"),
    "a parameter that is nowhere": (lambda comm: {"names": ["a.weight", "a.bias", "c"]},
                                    r"ValueError: c is in a param group, and no rank owns a part of it")}


@pytest.mark.parametrize("what", DIFFER)
def test_ranks_that_differ_are_an_error_by_name(what):
    how, said = DIFFER[what]
    with pytest.raises(RankError, match=said):
        launch(lambda comm: describe(state(comm, **how(comm)), saving=True), 2)


def test_a_replica_that_is_nowhere_is_an_error_by_name():
    spec = ShardSpec("a.bias", (2,), replicas=(0, 1))
    change = changed(0, "a.bias", spec=lambda s: spec, owned=lambda s: spec)(FakeCommunicator(0, 1))
    with pytest.raises(ValueError, match=r"a.bias: ranks \[0\] name ranks \[0, 1\] as replicas of elements \[0, 2\]"):
        describe(state(FakeCommunicator(0, 1), **change))


def test_a_load_may_find_ranks_that_differ():
    launch(lambda comm: describe(state(comm, lr=0.1 * (comm.rank + 1))), 2)


def test_a_rank_has_one_shard_of_a_tensor():
    with pytest.raises(ValueError, match="two shards of a.weight on rank 0: expected one of each tensor"):
        state(FakeCommunicator(0, 1), change=lambda shards: shards[:1] * 2)


def row(shard, number, dtype=torch.float32):
    """A row of a.weight, as a shard of its own."""
    spec = ShardSpec("a.weight", (2, 3), (number, 0), (1, 3))
    own = nn.Parameter(shard.values[3 * number : 3 * number + 3].clone())
    return Shard(spec, own.detach(), "parameters", dtype, own, spec)


def in_rows(*rows):
    """A state in which one rank holds these rows of a.weight, (number, dtype), apart."""
    return state(FakeCommunicator(0, 1), change=lambda shards: [
        *(row(shards[0], *each) for each in rows), *shards[1:]])


def test_a_rank_may_have_several_parts_of_a_tensor():
    held = in_rows((0,), (1,))
    assert list(held.written.values())[:2] == ["a.weight", "a.weight..1"]
    found, (report,) = describe(held, saving=True)
    assert found["parameters"] == description()["parameters"] and found["groups"] == description()["groups"]
    assert report["pieces"]["a.weight..1"] == [0, 3, [1, 0], [1, 3]]


def in_two_groups():
    held = in_rows((0,), (1,))
    part = held.by_name["a.weight"][1].own
    held.optimizer.param_groups[0]["params"] = [p for p in held.optimizer.param_groups[0]["params"] if p is not part]
    held.optimizer.add_param_group({"params": [part], "lr": 0.1})
    held.groups.append(["a.weight"])
    return held


def with_another_state():
    held = in_rows((0,), (1,))
    for number, shard in enumerate(held.by_name["a.weight"]):
        held.optimizer.state[shard.own] = {"step": torch.tensor(float(number))}
    return held


@pytest.mark.parametrize(("make", "error", "said"), [
    (lambda: in_rows((0,)), ValueError, "a.weight: 3 of its 6 elements are on no rank"),
    (lambda: in_rows((0,), (1,), (1,)), ValueError, "two shards of a.weight on rank 0: .* no element in common"),
    (lambda: in_rows((0,), (1, torch.float16)), RuntimeError, "rank 0 has another description of a.weight"),
    (in_two_groups, ValueError, "a.weight is in 2 param groups: expected all parts of it in one"),
    (with_another_state, RuntimeError, "rank 0 has another optimizer state of a.weight")])
def test_parts_that_are_not_together_a_tensor_are_an_error_by_name(make, error, said):
    with pytest.raises(error, match=said):
        describe(make(), saving=True)
