"""Dispatch keys above autograd, as all keys for autocast are, that no tensor on a CPU or a GPU uses by itself."""

from torch._C import DispatchKey

REGIONS = DispatchKey.AutocastPrivateUse1  # where `refimpl.mixed_precision.autocast` has its kernels
CASTS = DispatchKey.AutocastIPU  # where `refimpl.zero` hears of casts of whole parameters
