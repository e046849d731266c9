"""A model that is cut is proven against the whole, once for each class: `double` lets a toy of it compute in fp64,
`compare` says where two of them differ first, `ranks` cuts it over simulated ranks, `once` remembers. How the toy is
made is `known_models/toys`. A part of a sequence on each rank: `context/sequence_proof`. Pipeline stages:
`pipeline/stages_proof`.
"""

from .comparison import CannotShrink, CutDiffers

__all__ = ["CannotShrink", "CutDiffers"]
