"""What was changed in a model after its class made it is named, and nothing else."""

import types

import pytest
import torch
from net_kit import LLAMA, on_meta
from torch import nn

from refimpl.known_models.changes import changes_of


@pytest.fixture
def model():
    return on_meta("llama", **LLAMA)


def test_a_model_as_its_class_makes_it_is_not_changed(model):
    assert changes_of(model) is None and changes_of(model.eval()) is None


def test_the_first_change_is_named(model):
    layers, norm = model.model.layers, model.model.norm
    layers[1].mlp.forward = types.MethodType(lambda self, x: x, layers[1].mlp)
    assert changes_of(model) == "model.layers.1.mlp has a forward of its own"
    del layers[1].mlp.forward
    hook = model.lm_head.register_forward_hook(lambda *args: None)
    assert changes_of(model) == "lm_head has a hook, <lambda>"
    hook.remove()
    layers[0].extra = nn.Identity()
    assert changes_of(model) == "model.layers.0.extra, Identity, is new"
    del layers[0].extra
    norm.variance_epsilon = 1.0
    assert changes_of(model) == "variance_epsilon of model.norm is 1.0, and 1e-06 as its class makes it"
    norm.variance_epsilon = 1e-6
    norm.weight = nn.Parameter(torch.empty(1, device="meta"))
    assert changes_of(model) == "the shape of weight of model.norm is (1,), and (64,) as its class makes it"
    norm.weight = nn.Parameter(torch.empty(64, device="meta"))
    del layers[3]
    assert changes_of(model) == "model.layers.3 is gone"
