"""The forward in Gluon: which tensors it takes. Its steps: test_gluon_consumer.py."""

import torch

from refimpl.attention import gluon_forward


def test_which_tensors_suit(monkeypatch):
    monkeypatch.setattr(gluon_forward.hopper, "suits", lambda q, k, v: True)
    suit = [D for D in range(1, 257) if gluon_forward.suits(*[torch.empty(1, 1, 1, D, device="meta")] * 3)]
    assert suit == list(range(8, 129, 8))
