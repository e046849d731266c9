"""States of hybrid sharding saved and loaded: each element once, replicas compared, on other meshes too."""

import pytest
import torch
from hsdp_kit import STAGES, WithoutReplicas, alone, hybrid, step_of
from mesh_kit import split, train_alone, whole
from mesh_kit import step_of as step_of_mesh
from rank_pool import on_ranks
from zero_kit import ENGINES, FAST, copied, farthest, parameters_of, three_layers
from zero_steps import train

from refimpl.comm import FakeCommunicator, launch
from refimpl.mesh import Mesh
from refimpl.zero import Zero1


def saving(comm, stage, directory, shards=2):
    engine = hybrid(stage, three_layers(), comm, shards, bucket_bytes=300)
    for step in range(2):
        step_of(engine, step)
    engine.save(directory)
    return engine.state_dict(), sum(0 if each.owned is None else each.owned.numel for each in engine.shards())


def check_going_on(comm, stage, directory, shards, sd=None):
    """Two steps after a load are those of one process."""
    engine, (norms, expected) = hybrid(stage, three_layers(7), comm, shards, bucket_bytes=200), alone(torch.float32)
    engine.load(directory) if sd is None else engine.load_state_dict(sd)
    assert [step_of(engine, step) for step in (2, 3)] == pytest.approx(norms[2:], rel=1e-5)
    assert farthest(parameters_of(engine), expected) < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_each_element_is_written_once_and_any_mesh_goes_on(stage, tmp_path):
    saved = launch(saving, 4, stage, tmp_path)
    assert sum(owned for _, owned in saved) == sum(p.numel() for p in three_layers().parameters())
    for ranks, other, shards, sd in ((4, stage, 2, None), (4, 3, 4, None), (4, 1, 1, None), (2, 2, None, None),
                                     (4, 3, 2, saved[0][0]), (1, 0, None, None)):
        launch(check_going_on, ranks, other, tmp_path, shards, sd)


@pytest.mark.parametrize("stage", STAGES)
def test_what_plain_zero_has_saved_is_loaded(stage, tmp_path):
    launch(saving, 2, 2, tmp_path, None)
    launch(check_going_on, 4, stage, tmp_path, 2)


@on_ranks(4)
def test_replicas_that_are_not_the_same_are_named_at_a_save(comm, tmp_path):
    """Groups that did not reduce between them."""
    with pytest.raises(RuntimeError, match=r"is not the same on ranks \["):
        train(hybrid(WithoutReplicas, three_layers(), comm), 1).save(tmp_path)


@on_ranks(4)
def test_what_rank_0_writes_is_on_all_replicas(comm):
    engine = hybrid(3, three_layers(), comm)
    with engine.gathered(write=True):
        engine.model[0].weight.data.fill_(comm.rank + 5)
    assert parameters_of(engine)["0.weight"].unique().tolist() == [5.0]


def on_a_split_model(comm, stage, directory):
    """The norms' weights are on all ranks of a tensor-parallel group, and these on both replicas."""
    mesh = Mesh(dp=2, tp=2, shards=1).connect(comm)
    tp, dp, shards, replicas = map(mesh.get_parallel_group, ("tp", "dp", "shards", "replicas"))
    engine = ENGINES[stage](split(tp, peers=mesh.ranks("tp")), dp, FAST, bucket_bytes=300, world=comm, shards=shards,
                            replicas=replicas)
    norms = [step_of_mesh(engine, step) for step in range(3)]
    engine.save(directory)
    return norms


@pytest.mark.parametrize("stage", STAGES)
def test_on_a_model_that_is_split_already(stage, tmp_path):
    norms, model = train_alone(3)
    for ours in launch(on_a_split_model, 4, stage, tmp_path):
        assert ours == pytest.approx(norms, rel=1e-6)
    engine = Zero1(whole(), FakeCommunicator(0, 1), FAST)
    engine.load(tmp_path)
    assert farthest(parameters_of(engine), copied(model)) < 1e-6
