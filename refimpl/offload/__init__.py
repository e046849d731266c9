"""Offload: shards that stay outside of device memory, and an optimizer that runs where they are.

    engine = Zero2(model, comm, optimizer, store=HostStore())      # states and gradients in host memory between updates
    engine = Zero2(model, comm, optimizer, update=CPUAdam())       # they stay there; the host computes the update
    engine = Zero2(model, comm, optimizer, store=DiskStore(folder))    # in a file

Both work at stages 1 to 3 of refimpl.zero, on any number of ranks: `Zero1` on one rank is offload on one GPU.

Order of reading: `papers/offload` (the idea in one screen), then `copies` (what moves bytes between a device and the
host), `host_store` (which bytes, and when), `cpu_adam` (AdamW on the host, copies on both sides of it) with `host_part`
(what rests there), `host_link` (the copies), `tiled_update` (in which order) and `adamw_kernels` (what computes a
tile), `closed_forms` (bytes in each memory, and on each link in a step).

Then `disk_store` (a file behind a fixed number of buffers) with `disk/`, `tiered_store` (device, host and disk, by the
order of a step) with `tiers/`, and `traces` (what an engine asks in a step).

No file here knows ZeRO: an engine calls a store's `put`, `prefetch`, `get` and `drop`, and an update's `step`.
"""

from .cpu_adam import CPUAdam
from .disk_store import DiskStore
from .host_store import HostStore
from .tiered_store import TieredStore

__all__ = ["CPUAdam", "DiskStore", "HostStore", "TieredStore"]
