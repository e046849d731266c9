"""Saved tensors in fewer bytes, or elsewhere: compression and host offload of what autograd keeps for backward.

Read `papers/activations` (the idea in one screen), then `saved_tensors` (each storage once), `codecs` and `compress`,
then `offload` with `transfer/copy_order` (when a storage is copied) and `transfer/streams` (how). `closed_forms`
predicts the bytes, `storage_report` tells what was done.
"""

from .closed_forms import (
    compressed_activation_bytes,
    compressed_activation_terms,
    offloaded_activation_bytes,
    saved_storages,
)
from .compress import compress_activations
from .offload import offload_activations
from .storage_report import Report
from .transfer.streams import Rehearsal

__all__ = [
    "Rehearsal", "Report", "compress_activations", "compressed_activation_bytes", "compressed_activation_terms",
    "offload_activations", "offloaded_activation_bytes", "saved_storages",
]
