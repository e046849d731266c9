"""Saved states that are not loaded, or not written: damage, another model, a full disk, replicas that differ."""

import os

import pytest
import torch
from refused_kit import BY_HAND, DAMAGE, check_a_full_disk, check_damage, check_errors_of_files, check_other_folders
from saving_kit import BY_COLUMNS, BY_ROWS, Holder, Small, alone, differing
from torch import nn

from refimpl import saving
from refimpl.comm import RankError, launch
from refimpl.saving import SavedStateError, TrainingState
from refimpl.sharding import Shard, ShardSpec


@pytest.mark.parametrize("how", [{}, {"dims": BY_ROWS, "tp": 2}], ids=["flat", "rows"])
def test_what_is_damaged_is_named_by_all_ranks_and_nothing_changes(tmp_path, how):
    launch(lambda comm: Holder(comm, **how).train(2).save(tmp_path / "whole"), 2)
    check_damage(DAMAGE, tmp_path / "whole", tmp_path)


def small(change=lambda model: None, **how):
    model = Small()
    change(model)
    return alone(build=lambda: model, **how)


def wider(model):
    model.up.bias = nn.Parameter(torch.zeros(7))


def thawed(model):
    model.still.requires_grad_(True)


def test_what_does_not_fit_is_refused_with_what_differs(tmp_path):
    alone().train(1).save(tmp_path)
    given, regrouped, swapped = alone().train(1).state_dict(), alone(), alone()
    regrouped.names = [regrouped.names[0] + regrouped.names[1][:1], regrouped.names[1][1:]]
    swapped.names = [[swapped.names[1][0], *swapped.names[0][1:]], [swapped.names[0][0], *swapped.names[1][1:]]]
    wrong = {
        r"up.bias: \(6,\) float32, here \(7,\) float32$": small(wider),
        r"still.weight: \(3, 4\) float32, not trained, here \(3, 4\) float32$": small(thawed),
        r"its optimizer is torch.optim.adamw.AdamW, here torch.optim.sgd.SGD": alone(optimizer="momentum"),
        r"its param groups have \d \+ \d parameters, here \d \+ \d": regrouped,
        r"its param groups are of other parameters": swapped}
    for expected, holder in wrong.items():
        before = holder.state_dict()
        for load, source, what in ((holder.load, tmp_path, "manifest.json"),
                                   (holder.load_state_dict, given, "the state_dict")):
            with pytest.raises(SavedStateError, match=f"{what} does not fit what is trained here: .*{expected}"):
                load(source)
        assert differing(holder.state_dict(), before) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_one_on_all_and_leaves_what_was(tmp_path, rank):
    check_a_full_disk(BY_HAND, tmp_path, rank)


def test_errors_of_files_name_the_file(tmp_path):
    check_errors_of_files(BY_HAND, tmp_path)


def test_ranks_that_do_not_see_the_same_files(tmp_path):
    check_other_folders(BY_HAND, tmp_path)


def other(comm, folder, what, weights=False):
    """Save a state of which a replica on the last rank differs, after one that is right; what is said of it."""
    holder = Holder(comm, BY_COLUMNS, tp=2).train(1)
    holder.save(folder)
    name = "table" if what == "buffer" else "norm.weight"
    shard = next(shard for shard in holder.shards if shard.spec.name == name)
    kept = holder.optimizer.state.get(shard.own)
    if what == "places":
        shard.values.copy_(torch.arange(shard.spec.numel))
    if comm.rank == comm.world_size - 1:
        if what == "state":
            kept["exp_avg"][1] += 1
        elif what == "step":
            kept["step"] += 1
        elif what == "places":
            shard.values.copy_(shard.values.flip(0))  # the same sum
        else:
            shard.values[-1] += 1
    holder.step = 2
    try:
        holder.save_weights(folder / "weights") if weights else holder.save(folder)
    except RuntimeError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(("what", "said"), [("value", "parameters"), ("places", "parameters"),
                                            ("state", "optimizer/exp_avg"), ("step", "numbers")])
def test_replicas_that_differ_are_named_and_not_saved(tmp_path, what, said):
    answers = launch(other, 4, tmp_path, what)
    assert set(answers) == {("RuntimeError", f"norm.weight is not the same on ranks [2, 3], its replicas: {said} on "
                             "ranks [3] differ from rank 2's. Broadcast it from one of them; did all of them reduce "
                             "its gradient?")}
    assert alone(seed=7).load(tmp_path).step == 1


@pytest.mark.parametrize("what", ["value", "places"])
def test_weights_of_replicas_that_differ_are_not_written(tmp_path, what):
    answers = launch(other, 4, tmp_path, what, True)
    assert {kind for kind, _ in answers} == {"RuntimeError"}
    assert all("norm.weight is not the same on ranks [2, 3], its replicas: parameters" in said for _, said in answers)
    assert not (tmp_path / "weights").exists()
    assert launch(other, 4, tmp_path, "state", True) == [None] * 4 and (tmp_path / "weights").exists()


def test_of_buffers_the_owner_counts(tmp_path):
    assert launch(other, 4, tmp_path, "buffer") == [None] * 4
    assert alone(seed=7).load(tmp_path).model.table.equal(alone().model.table)


def test_a_save_says_what_is_owned_by_nobody_or_twice(tmp_path):
    def saves(comm, owned, expected):
        spec, model = ShardSpec("x", (4,)), nn.Module()
        model.x = nn.Parameter(torch.zeros(4))
        shard = Shard(spec, model.x.detach(), "parameters", torch.float32, model.x, owned[comm.rank](spec))
        state = TrainingState(comm, [shard], torch.optim.SGD([model.x]), [["x"]], model)
        for work in (lambda: saving.save(state, tmp_path / "saved"), lambda: saving.state_dict(state),
                     lambda: saving.save_weights(state, tmp_path / "weights")):
            with pytest.raises((ValueError, RankError), match=expected):
                work()
    for owned, expected in (
            ([lambda s: s, lambda s: s], "x: elements 0 … 3 are on rank 0 and on rank 1: ranks that hold the"),
            ([lambda s: s.cut(0, 2), lambda s: s.cut(1, 4)], "x: elements 1 … 1 are on rank 0 and on rank 1"),
            ([lambda s: s.cut(0, 2), lambda s: s.cut(3, 4)], "x: elements 2 … 2 are on no rank"),
            ([lambda s: None, lambda s: None], "x is in a param group, and no rank owns a part of it")):
        launch(saves, 2, owned, expected)
    assert not os.listdir(tmp_path)
