"""The whole on rank 0, and as weights for the plain model; what is refused; what is in memory meanwhile."""

import functools
import os

import pytest
import torch
from refused_kit import check_state_dicts_that_do_not_fit, check_weights, check_weights_on_a_full_disk
from saving_kit import BY_COLUMNS, MIXED, Holder, Small, alone, whole_state
from zero_steps import above, stack

from refimpl import saving
from refimpl.comm import launch


def test_it_is_what_the_model_and_the_optimizer_say():
    holder = alone().train(2)
    sd, model, optimizer = holder.state_dict(), holder.model.state_dict(), holder.optimizer.state_dict()
    assert sd["model"].keys() == model.keys()
    assert sd["model"]["tied.weight"] is sd["model"]["up.weight"]  # no bytes twice
    assert torch.equal(sd["model"]["table"], model["table"]) and torch.equal(sd["model"]["seen"], model["seen"])
    own = [shard for names in holder.names for name in names for shard in holder.shards if shard.spec.name == name]
    for i, shard in enumerate(own):
        name = shard.spec.name
        assert torch.equal(sd["model"][name].flatten(), shard.values)
        for key, x in optimizer["state"][i].items():
            assert torch.equal(sd["optimizer"][name][key].flatten(), x.flatten())
            assert sd["optimizer"][name][key].dtype == x.dtype
    ours, theirs = ({**each["param_groups"][0], "params": None} for each in (sd, optimizer))
    assert ours == theirs and sd["step"] == 2


def test_what_does_not_fit_is_refused_by_all():
    check_state_dicts_that_do_not_fit((functools.partial(Holder, dims=MIXED, tp=2), Holder.train), "(7,)")


CUTS = {"flat": {}, "columns": {"dims": BY_COLUMNS, "tp": 2}, "stages": {"stages": 2}}


def weights(comm, folder):
    """Files by (cut, dtype asked for), and the parameters that they are of."""
    found = {}
    for cut, how in CUTS.items():
        holder = Holder(comm, **how).train(2)
        held = holder.state_dict()
        for to in (torch.bfloat16, torch.float32, None):
            holder.save_weights(folder / f"{cut} {to}", to)
            found[cut, to] = held
    return found


def test_weights_for_the_plain_model(tmp_path):
    found, *_ = launch(weights, 2, tmp_path)
    assert len(os.listdir(tmp_path)) == len(found)  # and no temporary file
    for (cut, to), held in found.items():
        plain = Small().to(to) if to else Small()
        check_weights(tmp_path / f"{cut} {to}", held["model"], plain, tied="tied.weight", kept="up.weight")


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_on_its_way_does_not_grow_with_the_model(tmp_path, rank):
    found, weight = [], 64 * 64 * 4
    for layers in (4, 16):
        model = stack(layers)
        optimizer = torch.optim.Adam(model.parameters())
        state = whole_state(model, optimizer)
        sd = saving.state_dict(state)
        work, given = (saving.load_state_dict, sd) if rank else (saving.save_weights, tmp_path / "weights")
        found.append(above([model, sd["model"]], optimizer, work, state, given))
    assert found[0] == found[1] <= 3 * weight + 8000


def test_a_full_disk_leaves_the_file_that_was(tmp_path):
    check_weights_on_a_full_disk((functools.partial(Holder, stages=2), Holder.train), tmp_path / "new")
