"""The state of a thread, and what a region casts."""

import sys
import weakref

import torch
from threads_kit import in_a_thread

from refimpl.mixed_precision.internals.autocast_regions import KEY, NONE, AutocastRegion, current, set_stack, state


def test_a_new_thread_has_no_regions():
    set_stack((AutocastRegion(None, "cpu", torch.bfloat16),))
    seen = in_a_thread(state)
    set_stack(())
    assert seen == state() == NONE


def test_the_innermost_of_each_device_counts():
    cpu, cuda, off = (AutocastRegion(None, device, dtype) for device, dtype in
                      (("cpu", torch.bfloat16), ("cuda", torch.float16), ("cpu", None)))
    for stack, active in (((cpu,), (cpu,)), ((cpu, cuda), (cuda, cpu)), ((cpu, cuda, off), (cuda,)), ((cpu, off), ()),
                          ((off, cpu), (cpu,)), ((), ())):
        set_stack(stack)
        assert state().active == active and state().stack == stack
        assert torch._C._dispatch_tls_is_dispatch_key_included(KEY) == bool(active)
        assert torch._C._dispatch_tls_is_dispatch_key_excluded(KEY) == (not active)
        assert current("cpu") is ({0: None}.get(len(stack), stack[-1] if stack and stack[-1] is not cuda else cpu))
    assert current("cuda") is None


def test_what_a_region_casts():
    region, x = AutocastRegion(None, "cpu", torch.bfloat16, {}), torch.ones(2)
    assert region.cast(x, torch.bfloat16).dtype is torch.bfloat16
    for same in (x.bfloat16(), x.double(), x.int(), x.to(torch.complex64), torch.ones(2, device="meta")):
        assert region.cast(same, torch.bfloat16) is same
    assert not region.casts  # none of these is a weight


def test_casts_of_weights_are_found_again():
    region, weight = AutocastRegion(None, "cpu", torch.bfloat16, {}), torch.nn.Parameter(torch.ones(2))
    assert region.cast(weight, torch.bfloat16) is region.cast(weight, torch.bfloat16)
    assert region.cast(weight, torch.float16) is not region.cast(weight, torch.float16)  # not the region's dtype
    with torch.no_grad():
        assert not region.cast(weight, torch.bfloat16).requires_grad
    view = weight.detach().requires_grad_()[:1]
    assert region.cast(view, torch.bfloat16) is not region.cast(view, torch.bfloat16)


def test_a_cast_is_not_taken_for_another_weight_s_that_got_its_id():
    region = AutocastRegion(None, "cpu", torch.bfloat16, {})
    for value in range(20):
        with torch.no_grad():
            assert region.cast(torch.nn.Parameter(torch.full((1,), float(value))), torch.bfloat16).item() == value


def test_the_state_is_kept_alive_while_it_is_needed_and_no_longer():
    """PyTorch 2.11 takes no reference of its own to what is stashed."""
    class CountsAsAlive(dict):
        pass
    for _ in range(1000):
        casts = CountsAsAlive()
        set_stack((AutocastRegion(None, "cpu", torch.bfloat16, casts),))
        alive = weakref.ref(casts)
        del casts
        assert state().stack[0].casts is alive() is not None
        set_stack(())
        assert alive() is None
        references = sys.getrefcount(state())  # the storage's and the call's
        assert references <= 2


def test_a_view_of_other_memory_is_cast_at_each_use():
    casts = {}
    region, part = AutocastRegion(None, "cpu", torch.bfloat16, casts), torch.ones(4)[:2].requires_grad_()
    assert part._is_view() and region.cast(part, torch.bfloat16).dtype is torch.bfloat16 and not casts
