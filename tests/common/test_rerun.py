"""Random numbers, autocast and registered contexts come back as they were; what was not drawn from is not kept."""

from contextlib import contextmanager

import pytest
import torch

from refimpl.common import rerun
from refimpl.common.rerun import Environment, has_drawn, random_state


def test_numbers_come_again_and_afterwards_go_on_as_before():
    there, first = Environment(torch.rand, []), torch.rand(3)
    there.drop_unused()
    state = torch.get_rng_state()
    with there.restored():
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_state_that_did_not_change_is_let_go():
    there = Environment(torch.sin, [])
    there.drop_unused()
    assert not there._random
    torch.rand(1)
    state = torch.get_rng_state()
    with there.restored():
        assert torch.equal(torch.get_rng_state(), state)


def test_the_generator_is_put_back_after_an_exception():
    there, state = Environment(torch.rand, []), torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), there.restored():
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_autocast_is_what_it_was(then, now):
    with torch.autocast("cpu", torch.bfloat16, enabled=then):
        there = Environment(torch.sin, [])
    with torch.autocast("cpu", torch.float16, enabled=now):
        with there.restored():
            assert torch.is_autocast_enabled("cpu") is then
            assert not then or torch.get_autocast_dtype("cpu") is torch.bfloat16
        assert torch.is_autocast_enabled("cpu") is now


def test_a_draw_is_noticed():
    before = random_state("cpu")
    assert not has_drawn("cpu", before)
    torch.rand(1)
    assert has_drawn("cpu", before)


def test_a_registered_context_is_what_it_was(monkeypatch):
    monkeypatch.setattr(rerun, "_registered", [])
    now = ["first"]
    @rerun.register
    def capture():
        then = now[-1]
        @contextmanager
        def context():
            now.append(then)
            try:
                yield
            finally:
                now.pop()
        return context
    assert rerun._registered == [capture]
    there = Environment(torch.sin, [])
    now[0] = "second"
    with pytest.raises(ZeroDivisionError), there.restored():
        assert now[-1] == "first"
        raise ZeroDivisionError
    assert now == ["second"]
