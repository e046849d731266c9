"""What is there all the time, and the optimizer's own moment."""

import pytest
import torch

from refimpl import memory
from refimpl.model import GPT
from refimpl.sequence_length import Quadratic
from refimpl.sequence_length.states import always, chunked_moments, optimizer_moments, parameter_sizes

CONTEXT = Quadratic(c=1024)


@pytest.mark.parametrize("changes", [{}, {"tied": False, "bias": False}, {"activation": "swiglu", "norm": "rmsnorm"}])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_parameters_in_the_models_order(family, name, changes):
    config = family(name, **changes)
    sizes = [n.c for n in parameter_sizes(config, CONTEXT * config.hidden)]
    assert sizes == [parameter.numel() for parameter in GPT(config, device="meta").parameters()]


def test_learned_positions_grow_with_the_context_and_rotary_tables_do_too(family):
    growing = Quadratic(b=1)
    learned = always(family("gpt2"), 2, torch.float32, "adamw", growing)
    assert learned["parameters"].b == 4 * 64 and learned["optimizer state"].b == 8 * 64
    assert always(family("llama"), 2, torch.float32, "adamw", growing)["buffers"] == Quadratic(b=2 * 4 * 16)
    assert always(family("llama"), 2, torch.float32, "adamw", CONTEXT)["buffers"](5) == 2 * 4 * 16 * 1024


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "momentum"])
def test_the_optimizers_own_peak(family, trace, optimizer):
    """Of a sequence so short that it is the step's peak."""
    config = family("gpt2", hidden=256)
    read = trace(config, 1, 2, optimizer=optimizer).timeline.peak("step").ledger
    moments = optimizer_moments(config, torch.float32, optimizer, CONTEXT, "cpu")
    highest = max(moment.total.c for moment in moments)
    states = always(config, 1, torch.float32, optimizer, CONTEXT)
    assert highest + sum(each(2) for each in states.values()) == read.total


def test_on_cuda_all_parameters_at_once(family):
    (moment,) = optimizer_moments(family("gpt2"), torch.float32, "adamw", CONTEXT, "cuda")
    assert moment.temporaries.c == 4 + 4 * family("gpt2").parameter_count()


def test_in_chunks_keys_and_values_are_counted_and_their_gradients_unless_truncated(family):
    full, truncated = (chunked_moments(family("gpt2"), 2, CONTEXT, torch.float32, 64, 64, truncated=each)[0].carried
                       for each in (False, True))
    assert truncated == Quadratic(b=2 * 4 * 3 * 2 * 64) and full == 2 * truncated


def test_an_unknown_optimizer_is_named(family):
    with pytest.raises(ValueError, match="optimizer='lion': expected one of sgd"):
        always(family("gpt2"), 2, torch.float32, "lion", CONTEXT)
    assert memory.model_state_bytes(1, "sgd").total == 8
