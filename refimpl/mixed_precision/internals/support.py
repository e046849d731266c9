"""Checks of dtypes and devices: which ones mixed precision supports, and whether a device computes in a dtype."""

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

LOW_DTYPES = (torch.bfloat16, torch.float16)


def check_dtype(dtype, allowed=LOW_DTYPES, name="dtype"):
    """Return `dtype`; ValueError unless it is one of `allowed`."""
    if dtype not in allowed:
        raise ValueError(f"{name}={dtype!r}: expected {' or '.join(map(str, allowed))}")
    return dtype


def check_device(device_type):
    """Return `device_type`, or the one there is if it is None. ValueError for one that is unknown or not there."""
    if device_type is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device_type, torch.dtype):
        raise ValueError(f"device_type={device_type}: the dtype comes first, and then the device: "
                         f"autocast({device_type}, 'cpu')")
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r}: expected 'cpu' or 'cuda', or None for what there is")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device_type='cuda', but torch {torch.__version__} sees no GPU: leave device_type out")
    return device_type


def check_computes(device_type, dtype):
    """Raise ValueError if `device_type` cannot multiply matrices of `dtype`: tried on the device, once a process."""
    error = _refusal(device_type, dtype)
    if error:
        other = torch.bfloat16 if dtype is torch.float16 else torch.float16
        raise ValueError(f"{device_type} cannot compute in {dtype} here ({error}): use {other} or float32")


@functools.cache
def _refusal(device_type, dtype):
    """Return the device's error for a 1×1 matrix product in `dtype`, or None if it computes it."""
    if device_type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
        return "no bfloat16 in its hardware, only emulated"
    try:
        with _disable_current_modes(), torch.no_grad():
            one = torch.ones(1, 1, dtype=dtype, device=device_type)
            torch.mm(one, one)
    except RuntimeError as error:  # "… not implemented for 'Half'"
        return str(error).splitlines()[0]
    return None
