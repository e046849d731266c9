"""Saved states that somebody changed: what no optimizer of this class can have is refused by name."""

import copy
import functools
import math
import shutil

import pytest
import torch
from rank_pool import on_ranks
from refused_kit import hashed, rewritten
from safetensors.torch import load_file, save_file
from saving_kit import alone, differing, make, train

from refimpl.saving import SavedStateError

AMSGRAD = functools.partial(torch.optim.AdamW, lr=1e-2, amsgrad=True)
NAN, INF = math.nan, math.inf
OPTIONS = {  # of a param group: what is said
    **{("lr", value): "lr of its param group 0 is .*: expected finite lr >= 0" for value in (NAN, INF, -INF, -1, -0.1)},
    ("betas", (NAN, 0.9)): "betas of its param group 0 is", ("betas", (0.9, INF)): "betas of its param group 0 is",
    ("betas", (1.0, 0.9)): "Invalid beta parameter", ("betas", (0.9, -0.1)): "Invalid beta parameter",
    ("betas", (0.9, 1.5)): "Invalid beta parameter", ("eps", -1e-8): "Invalid epsilon value", ("eps", NAN): "eps of",
    ("weight_decay", -0.1): "Invalid weight_decay", ("weight_decay", INF): "weight_decay of its param group 0 is inf",
    ("more", 3): "more of its param group 0 is 3, and the optimizer here has none", ("initial_lr", 0.1): None,
    ("amsgrad", False): None, ("maximize", True): None, ("lr", 0.0): None, ("betas", (0.0, 0.5)): None}
STATES = {  # of one parameter: what is said
    **{("step", value): r"step of up.weight is .*: expected a count" for value in (NAN, INF, -7.0, 2.5, -0.5)},
    ("step", None): "state of up.weight cannot be with its param group 0: KeyError: 'step'", ("step", 1e6): None,
    **{(key, None): f"state of up.weight cannot be with its param group 0: KeyError: '{key}'"
       for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")},
    **{("exp_avg", dtype): f"exp_avg of up.weight is {str(dtype)[6:]}: expected float32|state of up.weight cannot be"
       for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool)},
    ("exp_avg", (7,)): "'exp_avg' of up.weight is shape", ("exp_avg", (5, 6)): "'exp_avg' of up.weight is shape",
    ("exp_avg", 0.0): "exp_avg of up.weight as", ("more", (6, 5)): None, ("none at all", None): None}


def loads(holder, source, said):
    """Refused, with everything as it was; or loaded, and it trains on."""
    before = holder.state_dict()
    if said is None:
        return holder.load_state_dict(source).train(1)
    with pytest.raises(SavedStateError, match=said):
        holder.load_state_dict(source)
    assert differing(holder.state_dict(), before) == []


@pytest.fixture(scope="module")
def whole():
    return alone(optimizer=AMSGRAD).train(2).state_dict()


@pytest.mark.parametrize(("key", "value"), OPTIONS)
def test_options_of_a_state_dict(whole, key, value):
    sd = copy.deepcopy(whole)
    sd["param_groups"][0][key] = value
    loads(alone(optimizer=AMSGRAD, seed=7).train(1), sd, OPTIONS[key, value])


@pytest.mark.parametrize(("key", "value"), STATES)
def test_states_of_a_state_dict(whole, key, value):
    sd = copy.deepcopy(whole)
    state = sd["optimizer"]["up.weight"]
    if key == "none at all":
        state.clear()
    elif value is None:
        del state[key]
    elif isinstance(value, torch.dtype):
        state[key] = state[key].to(value)
    else:
        state[key] = torch.zeros(value) if isinstance(value, tuple) else torch.tensor(value) if key == "step" else value
    loads(alone(optimizer=AMSGRAD, seed=7).train(1), sd, STATES[key, value])


def test_amsgrad_that_was_not_there_needs_a_state_that_was_not():
    sd = alone().train(2).state_dict()
    sd["param_groups"][1]["amsgrad"] = True
    loads(alone(seed=7), sd, r"state of \S+ cannot be with its param group 1: KeyError: 'max_exp_avg_sq'")


@pytest.mark.parametrize(("optimizer", "key", "value", "said"), [
    ("momentum", "momentum", -0.5, "ValueError: Invalid momentum value"),
    ("momentum", "momentum", NAN, "momentum of its"), ("momentum", "dampening", 0.3, None),
    ("momentum", "nesterov", True, None),
    (torch.optim.RMSprop, "alpha", -1.0, "Invalid alpha value"), (torch.optim.RMSprop, "centered", True, "'grad_avg'"),
    (torch.optim.RMSprop, "momentum", 0.9, "'momentum_buffer'"), (torch.optim.Rprop, "etas", (1.5, 1.2), "Invalid"),
    (torch.optim.Adagrad, "lr_decay", -1.0, "Invalid"), (torch.optim.NAdam, "momentum_decay", -1.0, "Invalid")])
def test_of_other_classes(optimizer, key, value, said):
    sd = alone(optimizer=optimizer).train(2).state_dict()
    sd["param_groups"][0][key] = value
    loads(alone(optimizer=optimizer, seed=7).train(1), sd, said)


def test_a_class_that_cannot_run_here_has_its_numbers_checked():
    class OnGPUs(torch.optim.SGD):
        def step(self):
            if self.param_groups[0]["params"][0].shape == (2,):
                raise NotImplementedError
            super().step()
    sd = alone(optimizer=functools.partial(OnGPUs, lr=0.1)).state_dict()
    loads(alone(optimizer=functools.partial(OnGPUs, lr=0.1), seed=7), sd, None)
    loads(alone(optimizer=functools.partial(OnGPUs, lr=0.1)), {**sd, "param_groups": [
        {**group, "lr": NAN} for group in sd["param_groups"]]}, "lr of its param group 0 is nan")


def first_lr(value):
    return rewritten(lambda content: content["groups"][0]["hyperparameters"].update(lr=value))


def first_step(value):
    return rewritten(lambda content: next(iter(content["states"].values()))["step"].update(value=value))


def no_generator(folder):
    """A file whose generator's state is as long as one, and none; only rank 1 reads it."""
    path = next(folder.glob("step-*/rank-00001*"))
    tensors = load_file(path)
    tensors["rng/cpu"].fill_(255)
    save_file(tensors, path)
    hashed(path)


def flipped(content):
    content["groups"][1]["hyperparameters"]["amsgrad"] = True


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_of_files_all_ranks_say_the_same_and_nothing_changes(comm, stage, tmp_path):
    train(make(comm, stage), 2).save(tmp_path / "whole")
    engine = train(make(comm, 3 - stage, seed=7), 1)
    before = engine.state_dict()
    for number, (change, said) in enumerate((
            (first_lr(NAN), "lr of its param group 0 is nan"), (first_lr(-1.0), "lr of its param group 0 is -1.0"),
            (first_step(NAN), "step of .* is nan: expected a count"), (first_step(-7.0), "step of .* is -7.0"),
            (rewritten(flipped), "'max_exp_avg_sq'"), (no_generator, "rng/cpu, which no generator can have"))):
        folder = tmp_path / str(number)
        if comm.rank == 0:
            shutil.copytree(tmp_path / "whole", folder)
            change(folder)
        comm.barrier()
        where = "(manifest.json does not fit what is trained here: |rank-00001)"
        with pytest.raises(SavedStateError, match=f"{where}.*{said}"):
            engine.load(folder)
        assert differing(engine.state_dict(), before) == []
    engine.load(tmp_path / "whole")
    assert engine.state_dict().get("step", 2) == 2
