"""What each rank keeps is saved and loaded with the engine; that of another world is refused."""

import pytest
import torch
from compression_kit import engine_of
from rank_pool import pooled
from zero_kit import FAST, SGD, equal, gpt, gradients_of_step, parameters_of, token_batches

from refimpl.compression import GradientCompressor
from refimpl.zero import DataParallel, SavedStateError

CASES = [(0, "topk"), (1, "random"), (2, "sign"), (3, "int8"), (0, "powersgd"), (1, "powersgd")]


def steps(engine, batches):
    for tokens in batches:
        gradients_of_step(engine, tokens)
        engine.step()


def resumed(comm, stage, algorithm, folder, way):
    """Six steps at once, and six with a save and a load in another engine after three."""
    batches = token_batches(6)
    whole, first, second = (engine_of(comm, stage, GradientCompressor(algorithm, 0.1), FAST) for _ in range(3))
    steps(whole, batches)
    steps(first, batches[:3])
    if way == "state_dict":
        second.load_state_dict(first.state_dict())
    else:
        first.save(folder)
        second.load(folder, hook=way != "left")
    steps(second, batches[3:])
    return equal(parameters_of(whole), parameters_of(second))


@pytest.mark.parametrize("way", ["folder", "state_dict"])
@pytest.mark.parametrize(("stage", "algorithm"), CASES)
def test_training_goes_on_to_the_bit(stage, algorithm, way, tmp_path):
    assert all(pooled(resumed, 2, stage, algorithm, str(tmp_path / "saved"), way))


def test_a_residual_that_is_lost_is_seen(tmp_path):
    """The mutant: what was kept is left at the resume."""
    assert not any(pooled(resumed, 2, 0, "topk", str(tmp_path / "saved"), "left"))


def saved(comm, folder, hook=True):
    engine = engine_of(comm, 0, GradientCompressor("topk", 0.1) if hook else None)
    steps(engine, token_batches(2))
    engine.save(folder)
    return engine.state_dict()


def errors_of(engine, folder, sd):
    """The errors of a load from the folder and from the state_dict."""
    said = []
    for load, source in ((engine.load, folder), (engine.load_state_dict, sd)):
        with pytest.raises(SavedStateError) as error:
            load(source)
        said.append(str(error.value))
    return said


def refused(comm, folder, sd, how):
    """The errors of both, after which nothing has changed."""
    engine = engine_of(comm, 0, GradientCompressor(**how) if how else None)
    before = parameters_of(engine)
    said = errors_of(engine, folder, sd)
    assert equal(parameters_of(engine), before)
    engine.load(folder, hook=False)
    engine.load_state_dict(sd, hook=False)
    steps(engine, token_batches(1))
    return said


@pytest.mark.parametrize(("world_size", "how", "here"), [
    (4, {"algorithm": "topk", "ratio": 0.1}, "of 4 ranks"), (2, {"algorithm": "topk", "ratio": 0.2}, "ratio 0.2"),
    (2, {"algorithm": "sign"}, "sign"), (2, None, "nothing")])
def test_what_another_world_or_hook_kept_is_refused(world_size, how, here, tmp_path):
    folder = str(tmp_path / "saved")
    sd = pooled(saved, 2, folder)[0]
    for said in pooled(refused, world_size, folder, sd, how):
        for each in said:
            assert "topk, ratio 0.1" in each and "of 2 ranks" in each and here in each and "hook=False" in each


def test_a_hook_where_none_was_saved_is_refused(tmp_path):
    folder = str(tmp_path / "saved")
    sd = pooled(saved, 2, folder, False)[0]
    for said in pooled(refused, 2, folder, sd, {"algorithm": "topk"}):
        assert all("of nothing" in each for each in said)


def other_buckets(comm, folder, sd):
    return errors_of(DataParallel(gpt(), comm, SGD, hook=GradientCompressor("topk", 0.1)), folder, sd)


def test_other_buckets_are_refused(tmp_path):
    folder = str(tmp_path / "saved")
    sd = pooled(saved, 2, folder)[0]
    assert all("residual" in one and "same buckets" in other for one, other in pooled(other_buckets, 2, folder, sd))


def test_a_state_dict_holds_what_each_rank_keeps(tmp_path):
    sd = pooled(saved, 2, str(tmp_path / "saved"))[0]
    assert [each["steps"].item() for each in sd["own"]["ranks"]] == [2, 2]
    assert not torch.equal(*(each["0/residual"] for each in sd["own"]["ranks"]))
