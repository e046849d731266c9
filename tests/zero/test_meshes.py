"""ZeRO on a model that tensor or pipeline parallelism has split before: norms, saved states, other meshes."""

import contextlib

import pytest
import torch
from mesh_kit import ADAMW, mesh, rows, split, step_of, train_alone, whole
from rank_pool import on_ranks
from safetensors.torch import load_file
from saving_kit import part
from torch import nn
from zero_kit import ENGINES, equal, parameters_of
from zero_steps import STATES, traced

from refimpl.comm import RankError, launch
from refimpl.saving.durable import safetensors_bytes
from refimpl.sharding import ShardSpec, set_spec
from refimpl.zero import Zero1, Zero3
from refimpl.zero.closed_forms import model_state_bytes, step_traffic

STEPS, BUCKET, STAGES = 3, 300, range(4)


def engine_on(comm, stage, tp, bucket_bytes=BUCKET):
    """An engine of the split model; of the whole one if tp is 1."""
    if tp == 1:
        return ENGINES[stage](whole(), comm, ADAMW, bucket_bytes=bucket_bytes)
    group, dp, peers = mesh(comm, tp)
    return ENGINES[stage](split(group, peers=peers), dp, ADAMW, bucket_bytes=bucket_bytes, world=comm)


def held(engine):
    """{name: (spec, tensor)} of the whole local parameters."""
    return {name: (engine.specs[name], p) for name, p in parameters_of(engine).items()}


def check(answers, norms, model, which=None):
    """All ranks have the norms of one process, and of its parameters their parts."""
    for ours, parts, *_ in answers:
        assert ours == pytest.approx(norms, rel=1e-6), which  # an fp32 scalar
        assert all((part(model.get_parameter(name), spec) - p.flatten()).abs().max() < 1e-6
                   for name, (spec, p) in parts.items()), which


def trained(comm, stage, tp, directory=None):
    engine = engine_on(comm, stage, tp)
    norms = [step_of(engine, step) for step in range(STEPS)]
    if directory:
        engine.save(directory)
    return norms, held(engine), engine.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_clipped_norms_and_parameters_are_those_of_one_process(stage):
    norms, model = train_alone(STEPS)
    assert all(norm > 0.05 for norm in norms)  # so that it clips
    check(launch(trained, 4, stage, 2), norms, model)


def go_on(engine):
    """The norms of two more steps after a load, and the parameters."""
    return [step_of(engine, step) for step in range(STEPS, STEPS + 2)], held(engine)


def loaded(comm, stage, tp, directory, sd=None):
    engine = engine_on(comm, stage, tp, bucket_bytes=200)
    engine.load(directory) if sd is None else engine.load_state_dict(sd)
    return go_on(engine)


MESHES = [(1, 1), (3, 1), (4, 1), (4, 2), (2, 2), (4, 4)]  # ranks, of which in a tensor-parallel group


@pytest.mark.parametrize(("stage", "other"), [(1, 3), (3, 1), (0, 2), (2, 0)])
def test_what_one_mesh_has_saved_is_loaded_on_any_other(stage, other, tmp_path):
    norms, model = train_alone(STEPS + 2)
    launch(trained, 4, stage, 2, tmp_path / "mesh")
    launch(trained, 3, stage, 1, tmp_path / "whole")
    for ranks, tp in MESHES:
        for source in ["mesh", "whole"] if tp > 1 else ["mesh"]:
            check(launch(loaded, ranks, other, tp, tmp_path / source), norms[STEPS:], model, (ranks, tp, source))


def test_a_state_dict_of_a_mesh_is_that_of_the_whole_model():
    def through_a_dict(comm, stage, other):
        """The norms of two steps after a load_state_dict of what the mesh has on its rank 0; and its names."""
        _, _, sd = trained(comm, stage, 2)
        return loaded(comm, other, 2, None, sd), loaded(comm, other, 1, None, sd), list(sd.get("model", ()))
    norms, model = train_alone(STEPS + 2)
    for rank, (*found, theirs) in enumerate(launch(through_a_dict, 4, 1, 3)):
        assert set(theirs) == (set() if rank else set(model.state_dict()))
        check(found, norms[STEPS:], model)


def test_the_weights_of_a_mesh_are_one_file_for_the_whole_model(tmp_path):
    launch(lambda comm: engine_on(comm, 3, 2).save_weights(tmp_path / "weights.safetensors", None), 4)
    assert equal(load_file(tmp_path / "weights.safetensors"), whole().state_dict())


def read(comm, stage, directory):
    """(states of this rank after a second backward, as a tracker has them and as predicted), what it has sent to the
    ranks with the same part in that step and as predicted, and bytes of its file, as written and as its shards say."""
    engine = engine_on(comm, stage, 2)
    step_of(engine, 0)
    x = rows(1).chunk(2)[engine.comm.rank]
    now, sent, _ = traced(engine, lambda: engine.backward(engine.forward(x).square().mean()))
    now = {name: now[name] for name in STATES}
    options = {"rank": engine.comm.rank, "bucket_bytes": BUCKET}
    local = split(engine.model[0].tp, peers=())  # its part alone
    predicted = model_state_bytes(local, 2, stage, **options), dict(step_traffic(local, 2, stage, **options))
    engine.save(directory)
    specs = [(f"{kind}/{shard.spec.name}", torch.float64 if shard.own is not None else torch.float32,
              (shard.owned.numel,)) for shard in engine.shards() if shard.owned is not None for kind in
             (("parameters", "optimizer/exp_avg", "optimizer/exp_avg_sq") if shard.own is not None else ("rest",))]
    specs.append(("rng/cpu", torch.uint8, torch.get_rng_state().shape))
    written, = directory.glob(f"*/rank-{comm.rank:05d}.safetensors")
    return (now, dict(predicted[0])), (dict(sent), predicted[1]), (written.stat().st_size, safetensors_bytes(specs))


@pytest.mark.parametrize("stage", STAGES)
def test_bytes_of_states_traffic_and_files_are_those_of_the_part(stage, tmp_path):
    for readings in launch(read, 4, stage, tmp_path):
        for found, predicted in readings:
            assert found == predicted


def test_replicas_that_are_not_named_are_an_error():
    def undeclared(comm, declare):
        """Replicas that nobody has named: their elements would count twice."""
        group, dp, peers = mesh(comm, 2)
        Zero1(split(group, peers=peers, declare=declare), dp, ADAMW, world=comm)
    launch(undeclared, 4, True)
    with pytest.raises(RankError, match="0.bias: elements 0 … 5 are on rank 0 and on rank 1.*name each other in `rep"):
        launch(undeclared, 4, False)


@on_ranks(4, fails=r"ranks \[0, 1, 2, 3\] name ranks \[0, 1\] as replicas")
def test_replicas_that_name_other_ranks_are_an_error(comm):
    """Ranks 2 and 3 name the replicas of ranks 0 and 1, and nobody would count theirs."""
    group, dp, _ = mesh(comm, 2)
    Zero1(split(group, peers=[0, 1]), dp, ADAMW, world=comm)


class Counted(Zero1):
    """The mutant: every rank counts what it holds, replicas too."""
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        self.specs = {name: ShardSpec(name, spec.shape, spec.offsets, spec.lengths)
                      for name, spec in self.specs.items()}
        return super().clip_grad_norm_(max_norm, norm_type)


class Apart(Counted):
    """The mutant: and the norm is over the ranks with the same part alone."""
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        world, self.world = self.world, self.comm
        norm, self.world = super().clip_grad_norm_(max_norm, norm_type), world
        return norm


@pytest.mark.parametrize("make", [Zero1, Zero3, Counted, Apart])
def test_replicas_are_counted_once_and_all_ranks_clip_alike(make):
    def first_norm(comm, make):
        group, dp, peers = mesh(comm, 2)
        engine = make(split(group, peers=peers), dp, ADAMW, world=comm)
        norm = step_of(engine, 0)
        return norm, {name: p for name, (_, p) in held(engine).items() if "norm" in name}
    (norm,), _ = train_alone(1)
    answers = launch(first_norm, 4, make)
    right = all(ours == pytest.approx(norm, rel=1e-6) for ours, _ in answers)
    assert right == (make in (Zero1, Zero3))
    alike = all(torch.equal(p, answers[0][1][name]) for _, replicas in answers for name, p in replicas.items())
    assert alike == (make is not Apart)  # whose replicas drift apart


class Stage(nn.Sequential):
    """One block of the model, named as there."""
    def __init__(self, number):
        super().__init__(whole()[number])
        for name, p in self.named_parameters():
            set_spec(p, ShardSpec(name.replace("0.", f"{number}.", 1), tuple(p.shape)))


def piped(comm, stage, directory):
    """Two stages of a pipeline, each on two data-parallel ranks: all forwards, then all backwards."""
    number, micro_batches = comm.rank // 2, 3
    dp = comm.split([0, 1] if number == 0 else [2, 3])
    engine, other = ENGINES[stage](Stage(number), dp, ADAMW, bucket_bytes=BUCKET, world=comm), (comm.rank + 2) % 4
    norms = []
    for step in range(STEPS):
        xs, ys = rows(step).chunk(2)[dp.rank].chunk(micro_batches), []
        for i, x in enumerate(xs):
            if number:
                x = comm.recv(x, other).requires_grad_()
                xs = [*xs[:i], x, *xs[i + 1:]]
            ys.append(engine.forward(x))
            if number == 0:
                comm.send(ys[-1].detach(), other)
        for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
            with engine.no_sync() if i < micro_batches - 1 else contextlib.nullcontext():
                if number:
                    engine.backward(y.square().mean() / micro_batches)
                    comm.send(x.grad, other)
                else:
                    engine.backward(y, comm.recv(y.detach(), other))
        norms.append(engine.clip_grad_norm_(0.05).item())
        engine.step()
    engine.save(directory)
    return norms


@pytest.mark.parametrize("stage", STAGES)
def test_a_pipeline_trains_clips_and_saves_as_one_process(stage, tmp_path):
    norms, model = train_alone(STEPS + 2)
    for ours in launch(piped, 4, stage, tmp_path):
        assert ours == pytest.approx(norms[:STEPS], rel=1e-6)
    check(launch(loaded_whole, 2, tmp_path), norms[STEPS:], model)


def loaded_whole(comm, directory):
    """The whole model, without the buffer that no stage of the pipeline has."""
    model = whole()
    del model.seen
    engine = Zero1(model, comm, ADAMW)
    engine.load(directory)
    return go_on(engine)
