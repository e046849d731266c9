"""What is known by name, to the byte, beside the tracker and a sum of storages."""

import weakref

import pytest
import torch
from outside.models import SMALL, hf, text

from refimpl import memory
from refimpl.guard.known_bytes import KnownBytes, Rarely


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True}], ids=["apart", "tied"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_bytes_are_those_of_the_tracker(settings, optimizer):
    model = hf("ForCausalLM", "llama", **SMALL, **settings)()
    updates = optimizer(model.parameters())
    with memory.track(model, updates) as tracked:
        model(**text(batch=2)()).loss.backward()
        updates.step()
    known = KnownBytes()
    known.find()
    known.models, known.optimizers = {model}, {updates}  # of this process, where other tests leave theirs
    known._modules = [lambda m=m: m for m in model.modules()]
    found = known.read(-1)
    assert found == {name: tracked.now.get(name, 0) for name in found} and found["gradients"] > 0
    assert known.read(0).total == 0  # nothing is on a GPU


def test_models_and_optimizers_are_found_and_not_held():
    def build():
        return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))

    model = build()
    optimizer, known = torch.optim.SGD(model.parameters(), lr=1), KnownBytes()
    known.find()
    assert model in known.models and optimizer in known.optimizers
    assert model[0] not in known.models and model[1] not in known.models  # its parts are none
    there = weakref.ref(model)
    del model, optimizer
    assert there() is None


def test_a_parameter_that_no_module_has_is_found_with_its_gradient():
    known, alone = KnownBytes(), torch.nn.Parameter(torch.ones(5))
    alone.grad = torch.ones(5)
    known.optimizers = {torch.optim.SGD([alone], lr=1)}
    assert known.read(-1) == {"parameters": 20, "buffers": 0, "gradients": 20, "optimizer state": 0}


def test_what_takes_long_is_done_rarely():
    rarely = Rarely(0.01)
    assert rarely.due()
    rarely._spent, rarely._begun = 1.0, rarely._begun - 50  # a second of fifty
    assert not rarely.due()
    rarely._begun -= 51
    assert rarely.due()
