"""The forward once more, for Hopper GPUs (H100, H200). In reading order: `forward` leaves the hardware's units to
Triton's compiler; `gluon_forward` and `gluon_consumer` place barriers and warps by hand; `fast_path` decides when
`flash_attention` takes one of them.
"""
