"""The forward kernel, interpreted: its parts of a vocabulary, whatever the tiles; how many parts there are."""

import pytest
import torch
from head_kit import head
from interpreting import interpreted

from refimpl.cross_entropy.kernels.configs import Config
from refimpl.cross_entropy.triton_forward import PROGRAMS, parts_of

CONFIGS = [Config(16, 16, 16, 4, 1), Config(32, 64, 16, 4, 1), Config(64, 16, 32, 4, 1)]


def test_rows_whatever_the_tiles():
    cases = [(head(N, C, V, needs=False), config) for N, C, V in ((1, 3, 1), (40, 20, 100), (70, 16, 257))
             for config in CONFIGS]
    found = interpreted([("head_bodies:rows", (*given[:3], config), {}) for given, config in cases])
    for ((hidden, weight, targets, _), _), (lse, predicted, total) in zip(cases, found, strict=True):
        z = hidden.double() @ weight.double().T
        picked = z.gather(1, targets.clamp(min=0)[:, None])[:, 0].masked_fill(targets < 0, 0)
        for a, b in ((lse, z.logsumexp(1)), (predicted, picked), (total, z.sum(1))):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_logits_of_a_thousand_do_not_overflow():
    hidden, weight = torch.tensor([[1000.0], [-1000.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    (lse, predicted, _), = interpreted([("head_bodies:rows", (hidden, weight, torch.tensor([0, 0])), {})])
    assert lse.tolist() == [1000, 1000] and predicted.tolist() == [1000, -1000]


@pytest.mark.parametrize(("N", "V"), [(8192, 128256), (1, 128256), (100, 3), (10**6, 50257)])
def test_parts_cover_the_vocabulary_and_give_all_a_part(N, V):
    config = CONFIGS[1]
    parts, tiles = parts_of(N, V, config)
    assert (parts - 1) * tiles * config.block_v < V <= parts * tiles * config.block_v
    assert parts == 1 or parts * -(-N // config.block_m) <= PROGRAMS
