"""A step in parts is the whole step, for optimizers that count, and one that fails leaves the groups as they were."""

import pytest
import torch

from refimpl.optimizer_subset import snapshot_groups, step_subset


class CountsInItsGroup(torch.optim.SGD):
    """Halves its learning rate in each step, in the group, as some schedulers inside optimizers do."""
    def step(self):
        for group in self.param_groups:
            group["lr"] /= 2
        super().step()


def three(optimizer):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3)) for _ in range(3)]
    return parameters, optimizer([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.25}], lr=1.0)


def give_gradients(parameters):
    for p in parameters:
        p.grad = torch.ones_like(p)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, CountsInItsGroup])
def test_parts_are_the_whole(optimizer):
    (whole, one), (parts, other) = three(optimizer), three(optimizer)
    for _ in range(2):
        give_gradients([*whole, *parts])
        one.step()
        before = snapshot_groups(other)
        for p in (parts[2], parts[0], parts[1]):
            step_subset(other, [p], before)
        assert all(map(torch.equal, whole, parts))
        assert [group["lr"] for group in one.param_groups] == [group["lr"] for group in other.param_groups]


def test_only_the_part_is_updated_and_its_temporaries_are_its_own():
    parameters, optimizer = three(torch.optim.AdamW)
    old = [p.clone() for p in parameters]
    give_gradients(parameters)
    step_subset(optimizer, parameters[1:2], snapshot_groups(optimizer))
    assert [torch.equal(p, q) for p, q in zip(parameters, old, strict=True)] == [True, False, True]
    assert list(optimizer.state) == parameters[1:2]


def test_a_step_that_fails_leaves_all_parameters_in_their_groups():
    parameters, optimizer = three(torch.optim.SGD)
    parameters[0].grad = torch.ones(3)
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step_subset(optimizer, parameters[:1], snapshot_groups(optimizer))
    found = [list(map(id, group["params"])) for group in optimizer.param_groups]
    assert found == [list(map(id, parameters[:2])), list(map(id, parameters[2:]))]
