"""Estimates: what a rank of a training would hold, before anything runs.

    found = estimate("llama3-8b", batch=1, sequence=2048, precision="bf16", zero=3, gpus=8, gpu="h100-sxm")
    found.peak          # Ledger: bytes of a rank by category, at the highest moment of a later step
    found.reserved      # what PyTorch's caching allocator would reserve, by a replay
    found.fits          # whether that is less than the GPU has

A model is a name of the catalog, a `config.json` of Hugging Face, or `file.py:function`. There is no formula in
between: the step that real ranks run is run on tensors without memory (`memory.dry_run`), beside ranks that do not
exist.

Order of reading: `training_options` (what can be asked), `tracked_step` (the step, real or dry), `model_sources` (what
MODEL names) with `source`, `hugging_face`, `our_gpt` and `users`, `kernels` (a GPU's, also for dry runs of your own),
`reserved`, `estimate` (the dry run and what it says), `report` (as text and as JSON), `command`. Then recipes, over the
ranks of a mesh: `recipe_estimate`, `recipe_report` and `recipe_options`.
"""

from .estimate import Estimate, estimate
from .kernels import kernels_of
from .training_options import Options

__all__ = ["Estimate", "Options", "estimate", "kernels_of"]
