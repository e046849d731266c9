"""Saved states that are not loaded, or not written: damaged ones, those of another model, those that lose gradients."""

import pytest
import torch
from rank_pool import on_ranks
from refused_kit import DAMAGE, ZERO, check_a_full_disk, check_damage, check_errors_of_files, check_other_folders
from saving_kit import OPTIMIZERS, build, make, train, two_groups
from torch import nn
from zero_kit import WIDTH

from refimpl.comm import FakeCommunicator, launch
from refimpl.zero import SavedStateError, Zero1, Zero2, Zero3


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A state that two ranks have saved."""
    folder = tmp_path_factory.mktemp("whole")
    launch(lambda comm: train(make(comm, 2), 2).save(folder), 2)
    return folder


def test_what_is_damaged_is_named_by_all_ranks_and_nothing_changes(whole, tmp_path):
    check_damage(DAMAGE, whole, tmp_path, ZERO)


def test_another_model_optimizer_or_grouping(whole):
    comm, adamw, other = FakeCommunicator(0, 1), OPTIMIZERS["adamw"], build()
    other.two = nn.Linear(WIDTH, 3)
    other.three.requires_grad_(True)
    wrong = {
        r"two.weight: absent, here \(3, 10\) float32": Zero1(other, comm, adamw, groups=two_groups),
        r"three.weight: \(10, 10\) float32, not trained, here \(10, 10\) float32;":
            Zero1(other, comm, adamw, groups=two_groups),
        r"its optimizer is torch.optim.adamw.AdamW, here torch.optim.sgd.SGD": make(comm, 1, "momentum"),
        r"its param groups have 1 \+ 3 parameters, here 4": Zero2(build(), comm, adamw),
        r"its param groups are of other parameters": Zero3(build(), comm, adamw, groups=lambda named: [
            {"params": [named[0][1]]}, {"params": [p for _, p in reversed(named[1:])]}])}
    for expected, engine in wrong.items():
        with pytest.raises(SavedStateError, match=f"manifest.json does not fit what is trained here: .*{expected}"):
            engine.load(whole)


@on_ranks(2)
def test_gradients_are_not_forgotten(comm, tmp_path):
    for stage in range(4):
        engine = train(make(comm, stage), 1)
        engine.save(tmp_path)
        engine.backward(engine.forward(torch.ones(2, WIDTH)).mean())
        for doing, *given in (("save", tmp_path), ("state_dict",)):
            with pytest.raises(RuntimeError) as error:
                getattr(engine, doing)(*given)
            assert str(error.value) == (f"{doing} after 1 micro-batches of a step, and their gradients would be lost: "
                                        "call engine.step() or engine.zero_grad() first")
        engine.step()
        engine.save(tmp_path)
    alone = make(FakeCommunicator(0, 1), 0)
    alone.load(tmp_path)
    assert alone.state_dict()["step"] == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_is_one_on_all_and_leaves_what_was(tmp_path, rank):
    check_a_full_disk(ZERO, tmp_path, rank)


def test_errors_of_files_name_the_file(tmp_path):
    check_errors_of_files(ZERO, tmp_path)


def test_ranks_that_do_not_see_the_same_files(tmp_path):
    check_other_folders(ZERO, tmp_path)


@on_ranks(2, fails=r"ranks \[1\] are elsewhere than rank 0: rank 0: load .*rank 1: save")
def test_ranks_that_differ_are_named(comm, tmp_path):
    engine = make(comm, 2)
    engine.save(tmp_path) if comm.rank else engine.load(tmp_path)
