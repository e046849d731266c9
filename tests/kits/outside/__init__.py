"""Training programs on models that nobody here wrote: `models`, `loops`, and `outside_programs`, which names them."""

import os

from outside import torchvision_operators  # noqa: F401 - before anything imports torchvision

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no weights, no kernels from the hub
