"""The forward in Gluon: which tensors it takes. Its steps: test_gluon_consumer.py."""

import torch

from refimpl.attention import gluon_forward


def test_which_tensors_suit(monkeypatch):
    monkeypatch.setattr(gluon_forward.hopper, "suits", lambda q, k, v: True)
    suit = [D for D in range(1, 257) if gluon_forward.suits(*[torch.empty(1, 1, 1, D, device="meta")] * 3)]
    assert suit == list(range(8, 129, 8))


def test_one_kernel_serves_all_sizes_strides_and_edges():
    q, lse2 = torch.empty(1, 2, 3, 64, dtype=torch.float16), torch.empty(1, 2, 3)
    given, _ = gluon_forward.launch_arguments(q, q, q, q, lse2, 1.0, True, 2)
    free = {each.name for each in gluon_forward.forward_kernel.params if each.do_not_specialize}
    assert free == {name for name, value in given.items() if isinstance(value, int)}
