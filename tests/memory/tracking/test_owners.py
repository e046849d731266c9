"""Names of parameters and buffers."""

import gc

import torch

from refimpl.memory.tracking.owners import Owners


def test_a_shared_parameter_belongs_to_the_first_and_an_id_is_used_again():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2), "n": torch.nn.BatchNorm1d(2)})
    model["b"].weight = model["a"].weight
    names, owners = {module: path for path, module in model.named_modules()}, Owners()
    owners.learn(model, names)
    assert owners.of(model["b"].weight) == ("a", "a.weight") and owners.of(model["b"].bias) == ("b", "b.bias")
    assert owners.of(model["n"].running_mean) == ("n", "n.running_mean") and owners.of(torch.ones(1)) is None
    known = dict(owners._known)
    del model, names
    gc.collect()
    stranger = torch.ones(1)
    owners._known[id(stranger)] = next(iter(known.values()))  # as if it had the id of one that is gone
    assert owners.of(stranger) is None
