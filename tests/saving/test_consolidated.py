"""The whole on rank 0, and as weights for the plain model; what is refused; what is in memory meanwhile."""

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from saving_kit import BY_COLUMNS, MIXED, Holder, Small, alone, differing
from torch import nn

from refimpl import memory, saving
from refimpl.comm import FakeCommunicator, RankError, launch
from refimpl.saving import SavedStateError, TrainingState
from refimpl.sharding import Shard, ShardSpec


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


def refusing(comm):
    holder, said = Holder(comm, MIXED, tp=2).train(2), []
    sd = holder.state_dict()
    wrong = [{}, {**sd, "class": "torch.optim.sgd.SGD"} if sd else {},
             {**sd, "model": {name: x for name, x in sd["model"].items() if name != "norm.weight"}} if sd else {},
             {**sd, "model": {**sd["model"], "seen": torch.zeros(2)}} if sd else {}]
    for each in wrong:
        with pytest.raises(SavedStateError) as error:
            holder.load_state_dict(each)
        said.append(str(error.value))
    again = holder.state_dict()
    return said, comm.rank or differing(sd, again)


def test_what_does_not_fit_is_refused_by_all():
    first, second = launch(refusing, 2)
    assert first[0] == second[0] and first[1] == []
    for said, expected in zip(first[0], ("has no 'model': expected what state_dict returned",
                                         "its optimizer is torch.optim.sgd.SGD, here torch.optim.adamw.AdamW",
                                         "norm.weight: absent, here (7,) float32",
                                         "seen: (2,) float32, not trained, here () int64, not trained"), strict=True):
        assert expected in said


# --- weights ---------------------------------------------------------------------------------------------------------

CUTS = {"flat": {}, "columns": {"dims": BY_COLUMNS, "tp": 2}, "stages": {"stages": 2}}


def weights(comm, folder):
    """Files by (cut, dtype asked for), and the parameters that they are of."""
    found = {}
    for cut, how in CUTS.items():
        holder = Holder(comm, **how).train(2)
        held = holder.state_dict()
        for to in (torch.bfloat16, torch.float32, None):
            saving.save_weights(holder.state, folder / f"{cut} {to}", to)
            found[cut, to] = held
    return found


def test_weights_for_the_plain_model(tmp_path):
    found, *_ = launch(weights, 2, tmp_path)
    assert len(os.listdir(tmp_path)) == len(found)  # and no temporary file
    for (cut, to), held in found.items():
        path = tmp_path / f"{cut} {to}"
        loaded = load_file(path)
        assert "tied.weight" not in loaded and loaded.keys() | {"tied.weight"} == held["model"].keys()
        for name, x in loaded.items():
            expected, own = held["model"][name], torch.bfloat16 if name == "low" else torch.float32
            assert torch.equal(x, expected.to(to or own) if x.is_floating_point() else expected)
        plain = Small().to(to) if to else Small()
        assert plain.load_state_dict(loaded, strict=False) == (["tied.weight"], [])
        load_model(plain, path)
        assert torch.equal(plain.tied.weight, loaded["up.weight"])
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_on_its_way_does_not_grow_with_the_model(tmp_path, rank):
    above, weight = [], 64 * 64 * 4
    for layers in (4, 16):
        model, comm = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))), FakeCommunicator(0, 1)
        optimizer = torch.optim.Adam(model.parameters())
        specs = [ShardSpec(name, p.shape) for name, p in model.named_parameters()]
        shards = [Shard(spec, p.detach().view(-1), "parameters", p.dtype, p, spec)
                  for spec, p in zip(specs, model.parameters(), strict=True)]
        state = TrainingState(comm, shards, optimizer, [[spec.name for spec in specs]], model)
        sd = saving.state_dict(state)
        with memory.track(model, optimizer, sd["model"]) as t:
            before = t.now.total
            saving.load_state_dict(state, sd) if rank else saving.save_weights(state, tmp_path / "weights")
        above.append(t.peak.total - before)
    assert above[0] == above[1] <= 3 * weight + 8000


def full(comm, path):
    """Rank 0 cannot write the second time; the third it can."""
    holder, said, sync = Holder(comm, stages=2).train(2), [], os.fsync
    saving.save_weights(holder.state, path)
    before = path.read_bytes()
    for fails in (True, False):
        holder.train(1)

        def failing(fd):
            raise OSError(28, "No space left on device")
        os.fsync = failing if fails else sync
        try:
            saving.save_weights(holder.state, path)
        except (OSError, RankError) as error:
            said.append((type(error).__name__, str(error)))
        finally:
            os.fsync = sync
        said.append(path.read_bytes() == before)
        comm.barrier()
    return said, holder.now


def test_a_full_disk_leaves_the_file_that_was(tmp_path):
    (first, now), (second, _) = launch(full, 2, tmp_path / "new" / "weights.safetensors")
    expected = f"[Errno 28] No space left on device: '{tmp_path / 'new' / 'weights.safetensors.tmp'}'"
    assert first == [("OSError", expected), True, False] and now == []
    assert second == [("RankError", f"rank 0 raised OSError: {expected}"), True, False]
    assert os.listdir(tmp_path / "new") == ["weights.safetensors"]  # and no temporary file
