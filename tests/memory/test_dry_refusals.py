"""What a dry run refuses: a ValueError that begins with the line, says what was asked there, and what to do."""

import inspect
import logging
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types
from users_kit import function_of

from refimpl import memory

OUTSIDE = torch.ones(3)


def unknown(*shape):
    return torch.rand(*shape)


def through_a_list():
    return unknown(7).split(unknown(2).long().tolist())


def sparse():
    torch.nn.Embedding(9, 4, sparse=True)(torch.tensor([1])).sum().backward()


def looks_for_values(ctx, gradient):
    return gradient.nonzero()


@torch.library.custom_op("refimpl_dry::without_a_rule", mutates_args=())
def without_a_rule(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def jagged():
    rows = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    torch.nn.Linear(4, 4)(rows)


def loads_elsewhere():
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    return list(torch.utils.data.DataLoader(data, batch_size=2, num_workers=1))


REFUSED = {  # what a step does -> the step, and words of the error
    "mask": (lambda: unknown(3)[unknown(3) > 0], r"bool tensor of shape \(3,\) \(nonzero\).*sizes={'"),
    "nonzero": (lambda: unknown(3, 4).nonzero(), r"float32 tensor of shape \(3, 4\) \(nonzero\).*sizes={'"),
    "where": (lambda: torch.where(unknown(3) > 0), r"\(nonzero\).*sizes={'"),
    "masked_select": (lambda: unknown(3).masked_select(unknown(3) > 0), r"\(masked_select\).*sizes={'"),
    "unique": (lambda: unknown(3).unique(), r"\(_unique2\).*sizes={'"),
    "unique_consecutive": (lambda: torch.unique_consecutive(unknown(3)), r"\(unique_consecutive\).*sizes={'"),
    "repeat_interleave": (lambda: unknown(3).repeat_interleave(unknown(3).long()), r"\(repeat_interleave\).*sizes={'"),
    "bincount": (lambda: unknown(3).long().bincount(), r"\(bincount\).*sizes={'"),
    "a list of sizes": (through_a_list, r"`unknown\(2\)\.long\(\)\.tolist\(\)` reads 2 integers.*values={'"),
    "numpy": (lambda: unknown(3).numpy(), r"needs the values.*leave \.numpy\(\) out"),
    "sparse": (sparse, "make it dense"),
    "real": (lambda: unknown(3) + OUTSIDE, r"`unknown\(3\) \+ OUTSIDE` uses a real tensor.*build it inside"),
    "in backward": (lambda: function_of(lambda ctx, x: x.clone(), looks_for_values).apply(
        unknown(3).requires_grad_()).sum().backward(), r"\(nonzero\).*sizes={'"),
    "a nested tensor": (jagged, "makes a nested tensor, whose sizes are values.*pad the batch, or measure"),
    "another process": (loads_elsewhere, "loads data in another process, which makes real tensors: set num_workers=0"),
    "no rule": (lambda: without_a_rule(unknown(3)), "no rule for fake tensors: write one, torch.library.register_fake")}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_its_line_and_what_to_do(what, caplog):
    step, message = REFUSED[what]
    with caplog.at_level(logging.INFO), pytest.raises(ValueError, match=message) as caught:
        memory.dry_run(step)
    file, _, rest = str(caught.value).partition(":")
    lines, start = inspect.getsourcelines(looks_for_values if what == "in backward" else step)
    assert file == Path(__file__).name and start <= int(rest.partition(":")[0]) < start + len(lines)
    assert caught.value.__cause__ is not None or "reads 2 integers" in message
    assert isinstance(caught.value.trace, memory.Trace) and not caplog.records
    assert FakeTensor not in _foreach_supported_types


def test_the_log_speaks_again_afterwards():
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with pytest.raises(ValueError, match="nonzero"):
        memory.dry_run(unknown(3).nonzero)
    assert not log.disabled


def test_a_model_that_cannot_be_built():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            kept = torch.rand(8)
            self.weight = torch.nn.Parameter(kept[kept > 0.5])
    with pytest.raises(ValueError, match=rf"^{Path(__file__).name}:\d+: `kept\[kept > 0.5\]` makes a tensor"):
        memory.dry_run(Model)


@pytest.mark.parametrize("error", [ZeroDivisionError, AssertionError, TypeError, RuntimeError, KeyboardInterrupt])
def test_an_error_of_the_programs_own_has_the_trace_and_the_placeholders(error):
    def step():
        if unknown(3).sum().item() < 1:
            raise error("of the step")
    with pytest.raises(error, match="of the step") as caught:
        memory.dry_run(step)
    assert caught.value.trace.peak.total == 16
    assert len(caught.value.__notes__) == 1 and "`unknown(3).sum().item()` reads 0.0" in caught.value.__notes__[0]
    assert FakeTensor not in _foreach_supported_types and "tolist" in vars(FakeTensor)
    assert "__deepcopy__" not in vars(FakeTensor) and "__format__" not in vars(FakeTensor)


def test_a_shape_that_does_not_fit_is_the_programs_own_error(caplog):
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError) as caught:
        memory.dry_run(lambda: unknown(3) @ unknown(4))
    assert type(caught.value) is RuntimeError and not caplog.records


@pytest.mark.parametrize("declared", ["train.py", 31, "train.py:", ":forward", "train.py:a b"])
@pytest.mark.parametrize("what", ["sizes", "values"])
def test_a_declaration_names_a_line_or_a_function(declared, what):
    with pytest.raises(ValueError, match=f"{what}=.*expected a line, e.g. 'train.py:31', or a function"):
        memory.dry_run(lambda: None, **{what: {declared: 3}})
