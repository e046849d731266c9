"""Between stages under sequence parallelism a rank sends its rows alone, and keeps no more of what it got."""

import functools

import pytest
import torch
from together_kit import ROWS, T, alone, built, trained

from refimpl.comm import launch
from refimpl.engine import dry_rank
from refimpl.mesh import Mesh

X = ROWS * T * 32 * 4  # bytes of what a layer reads in a step, fp32


def received(trace):
    """Bytes that are held, at the highest moment of a forward, of what came from other stages."""
    return sum(each.nbytes for each in trace.held("forward")
               if each.category == "communication" and each.source.file.endswith("mailbox.py"))


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_messages_are_rows_and_rows_are_kept(name):
    """In GPipe all micro-batches are in flight on the last stage when the first backward begins."""
    for rank in range(4):
        whole, rows = (dry_rank(functools.partial(built, name), Mesh(tp=2, pp=2), rank, ROWS, T, micro_batches=4,
                                schedule="gpipe", sequence=sequence) for sequence in (False, True))
        assert (whole.traffic["pp"]["send"], rows.traffic["pp"]["send"]) == (X, X // 2)
        if rank >= 2:
            assert (received(whole.trace), received(rows.trace)) == (X, X // 2)


@pytest.mark.parametrize(("axes", "options"), [
    ({"tp": 2, "pp": 2}, {"schedule": "zb-v"}), ({"tp": 3, "pp": 2}, {"schedule": "gpipe", "recompute": True})])
def test_losses_are_those_of_one_process(axes, options):
    """Over three ranks rows are padded, tokens not being a multiple of them."""
    name = "llama" if axes["tp"] == 2 else "six heads"
    options = {"micro_batches": 4, "sequence": True, **options}
    found = launch(trained, Mesh(**axes).world_size, name, axes, 3, options, device="cpu")
    for losses in found:
        assert torch.tensor(losses).allclose(torch.tensor(alone(name, 3)), atol=2e-5)
