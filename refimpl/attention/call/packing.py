"""Packed sequences for the kernels: where they begin and end, as tensors on the device, and without a wait for it.

A kernel reads `cu_seqlens` itself. The host needs two numbers alone, how many programs to launch for queries and for
keys: the lengths of the longest sequences. If they are given, nothing comes back from the device.
"""

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .arguments import check_max_seqlens, check_packing, resolve


def resolve_packed(q_BHTD, k_BGSD, v_BGSV, options, packing):
    """Return (Call, (cu_seqlens, cu_seqlens_k, longest, longest_k)); None, None, 0, 0 if nothing is packed. The Call's
    sequences are not set if they are not known on the host. `options`, `packing`: the arguments of `resolve`."""
    ends, ends_k = packing["cu_seqlens"], packing["cu_seqlens_k"]
    ends_k = ends if ends_k is None else ends_k
    if packing["max_seqlen"] is None or all(map(_is_known, (ends, ends_k))):
        call = resolve(q_BHTD, k_BGSD, v_BGSV, **options, **packing)
        return call, _known(call, packing, (ends, ends_k), q_BHTD.device)
    longest = check_max_seqlens(packing["max_seqlen"], packing["max_seqlen_k"], ends)
    found = []
    for name, which, x, most in zip(("cu_seqlens", "cu_seqlens_k"), (ends, ends_k), (q_BHTD, k_BGSD), longest,
                                    strict=True):
        check_packing(name, which, q_BHTD.shape[0])
        which = torch.tensor(which, dtype=torch.int32, device=x.device) if isinstance(which, (list, tuple)) else which
        if which.device != x.device or which.shape[0] < 2:
            raise ValueError(f"{name} of shape {tuple(which.shape)} on {which.device}: expected 0 and the end of each "
                             f"sequence, on {x.device}")
        check_on_device(name, which, x.shape[2], most)
        found.append(which)
    if found[0].shape != found[1].shape:
        raise ValueError(f"queries in {len(found[0]) - 1} sequences and keys in {len(found[1]) - 1}: expected as many "
                         "of both")
    alone = dict.fromkeys(("cu_seqlens", "cu_seqlens_k"))
    return resolve(q_BHTD, k_BGSD, v_BGSV, **options, **alone, sequences=len(found[0]) - 1), (*found, *longest)


def _known(call, packing, given, device):
    """Return what the kernels are given of sequences that the host knows."""
    if not call.packed:
        return None, None, 0, 0
    spans = [[sequence[which] for sequence in call.sequences] for which in (0, 1)]
    found = [ends if isinstance(ends, torch.Tensor) and ends.device == device and packing["max_seqlen"] is not None
             else torch.tensor([0, *(end for _, end in which)], dtype=torch.int32, device=device)
             for ends, which in zip(given, spans, strict=True)]
    longest = check_max_seqlens(packing["max_seqlen"], packing["max_seqlen_k"], given[0])
    most = (max(end - first for first, end in which) for which in spans)
    return *found, *(given or own for given, own in zip(longest, most, strict=True))


def _is_known(ends):
    """Tell whether the host can read these values without a wait for a device."""
    if not isinstance(ends, torch.Tensor):
        return True
    return ends.device.type == "cpu" and not isinstance(ends, FakeTensor) and not torch.compiler.is_compiling()


def _on_cuda(ends):
    """Tell whether there is a device that could check these values."""
    return ends.device.type == "cuda" and not isinstance(ends, FakeTensor)


def check_on_device(name, ends, total, longest):
    """Have a CUDA device assert that `ends` begin with 0, do not decrease, end with `total`, and that no sequence is
    longer than `longest`. It happens there, later: the host does not wait."""
    if not _on_cuda(ends) or torch.compiler.is_compiling():
        return
    lengths = ends.diff()
    right = (ends[0] == 0) & (ends[-1] == total) & (lengths >= 0).all() & (lengths <= longest).all()
    torch._assert_async(right, f"{name}: expected to begin with 0, not to decrease, to end with {total}, and no "
                               f"sequence longer than max_seqlen={longest}")
