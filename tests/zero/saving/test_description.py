"""What has to be the same where a saved state is loaded."""

import copy

import pytest
import torch
from torch import nn

from refimpl.comm import FakeCommunicator
from refimpl.zero import DataParallel, Zero1
from refimpl.zero.saving.description import describe, differences, listed


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)
        self.b.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def description(make=Zero1, dtype=None):
    return describe(make(Several().to(dtype), FakeCommunicator(0, 1)))


def test_an_engine_is_described():
    found = description(dtype=torch.bfloat16)
    assert found["optimizer"] == "torch.optim.adamw.AdamW" and (found["stage"], found["world_size"]) == (1, 1)
    assert found["parameters"]["a.weight"] == {"shape": [2, 3], "dtype": "bfloat16", "held": "float32"}
    assert list(found["rest"]) == ["b.weight", "b.bias", "mean"]
    assert found["groups"][0]["parameters"] == ["a.weight", "a.bias"]
    assert found["groups"][0]["hyperparameters"]["lr"] == 1e-3


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
    (lambda r: r["groups"][0]["parameters"].reverse(), "its param groups are of other parameters, or in another"),
])
def test_what_cannot_be_loaded(change, said):
    here = description()
    saved = copy.deepcopy(here)
    assert differences(saved, here) == []
    change(saved)
    found = differences(saved, here)
    assert len(found) == 1 and found[0].startswith(said)


def test_what_can_be_loaded():
    fp32, masters, low = description(), description(dtype=torch.bfloat16), description(DataParallel, torch.bfloat16)
    assert differences(masters, fp32) == []  # and buffers go from bf16 to fp32
    assert differences(fp32, masters) == [f"{name}: {shape} float32, not trained, here {shape} bfloat16, not trained"
                                          for name, shape in (("b.weight", (2, 2)), ("b.bias", (2,)), ("mean", (2,)))]
    assert len(differences(masters, low)) == 2 and len(differences(low, masters)) == 2
    assert differences({**fp32, "step": 9, "stage": 3, "world_size": 64}, fp32) == []


def test_a_message_lists_the_first():
    assert listed(["a", "b"]) == "a; b"
    assert listed(list("abcdef")) == "a; b; c; d; and 2 more"
