"""A model that is cut is proven against the whole, once for each class: `toys` makes a small model of the same class,
`anatomy` says where its blocks and its head are, `double` lets it compute in fp64, `compare` says where two of them
differ first, `ranks` cuts it over simulated ranks, `once` remembers. A part of a sequence on each rank:
`context/proof`. Pipeline stages: `pipeline/proof`.
"""

from .compare import CutDiffers
from .toys import CannotShrink

__all__ = ["CannotShrink", "CutDiffers"]
