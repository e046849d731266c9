"""Every operation of PyTorch on its own samples: where the allocator saw a workspace, the tracker's note names it."""

import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from refimpl import memory
from refimpl.memory.tracking.taking import NOT_COUNTED, WORKSPACE

WORTH, SAMPLES = 1024, 4  # bytes; of an operation
FORMULAS = "Backward"  # names of autograd's own formulas end in it and a number: the tracker sees what they return
LAYOUTS = "contiguous", "expanded gradient", "transposed", "strided"


def laid_out(x, how):
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.ndim < 2 or how not in LAYOUTS[2:]:
        return x
    if how == "transposed":
        y = x.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    else:
        y = torch.stack([x.detach()] * 2, dim=-1)[..., 0]
    return y.requires_grad_(x.requires_grad)


def workspaces(op, sample, how):
    """Return ({operation: bytes} of an operation's forward and backward, the names that the tracker's note has)."""
    given, others = (tree_map(lambda x: laid_out(x, how), each) for each in (sample.input, sample.args))
    with memory.track() as t, memory.measure("cpu") as m:
        outputs = [each for each in tree_leaves(op(given, *others, **sample.kwargs))
                   if isinstance(each, torch.Tensor) and each.requires_grad]
        if outputs:
            ones = [torch.ones((), dtype=each.dtype).expand(each.shape) for each in outputs]
            torch.autograd.backward(outputs, [each if how == LAYOUTS[1] else each.contiguous() for each in ones])
    said = next((note for note in t.notes if note.startswith(NOT_COUNTED)), "")
    names = said.partition("inside ")[2].partition(";")[0].split(", ")
    found = {}
    for record in memory.with_workspaces(t, m).records:
        if record.mark == WORKSPACE and record.nbytes >= WORTH and FORMULAS not in record.op:
            found[record.op] = max(found.get(record.op, 0), record.nbytes)
    return found, names


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_a_workspace_of_a_kernel_is_named(part):
    lost, tried = {}, 0
    for op in op_db[part::8]:
        if torch.float32 not in op.dtypes or op.name.startswith("jiterator"):  # these need CUDA
            continue
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:SAMPLES]
        for how in LAYOUTS:
            for sample in samples:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        found, names = workspaces(op, sample, how)
                except (RuntimeError, NotImplementedError):
                    continue  # this sample takes no such layout, or has no derivative
                tried += 1
                lost |= {name: (nbytes, op.name, how) for name, nbytes in found.items() if name not in names}
    assert not lost and tried > 400
