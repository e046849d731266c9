"""What each rank keeps for itself."""

from types import SimpleNamespace

import torch

from refimpl.comm import FakeCommunicator
from refimpl.saving.rank_tensors import gather_own, scatter_own


def test_a_rank_takes_what_it_gave():
    taken = []
    state = SimpleNamespace(comm=FakeCommunicator(0, 1), own={"residual": torch.ones(3)}, about={"own": "a hook's"},
                            take=taken.append)
    scatter_own(state, gather_own(state))
    assert [each["residual"].tolist() for each in taken] == [[1, 1, 1]]
