import pytest
import torch

from refimpl.mixed_precision import MixedPrecisionOptimizer
from refimpl.mixed_precision.internals import group_options as options


def test_options_are_replaced_and_parameters_stay():
    group = {"params": [1], "lr": 0.1, "foreach": None}
    options.replace(group, {"params": [2], "lr": 0.2, "initial_lr": 0.3})
    assert group == {"params": [1], "lr": 0.2, "initial_lr": 0.3}


def test_a_change_of_an_option_is_named_and_a_new_one_is_none():
    groups = [{"params": [1], "lr": 0.1}, {"params": [2], "lr": torch.tensor(0.1), "betas": (0.9, 0.99)}]
    then = options.remember(groups)
    groups[0]["initial_lr"], groups[1]["params"] = 0.1, []
    groups[1]["lr"] = torch.tensor(0.1)
    options.check_unchanged(then, groups)
    groups[1]["betas"] = (0.9, 0.95)
    with pytest.raises(ValueError, match=r"betas .* changed from \(0.9, 0.99\) to \(0.9, 0.95\)"):
        options.check_unchanged(then, groups)


def test_a_scheduler_of_the_inner_optimizer_is_refused_and_one_of_the_wrapper_works():
    model = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    before_wrapping = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)
    optimizer = MixedPrecisionOptimizer(inner)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25**step)
    for _ in range(3):
        model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        schedule.step()
    assert inner.param_groups[0]["lr"] == 0.25**2 and optimizer.param_groups[0]["lr"] == 0.25**3
    before_wrapping.step()
    with pytest.raises(ValueError, match="lr of the inner optimizer was changed.*give schedulers the Mixed"):
        optimizer.step()


def test_an_optimizer_is_wrapped_once():
    inner = torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=1.0)
    MixedPrecisionOptimizer(inner)
    with pytest.raises(ValueError, match="this SGD is wrapped already"):
        MixedPrecisionOptimizer(inner)
