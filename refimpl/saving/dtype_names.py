"""What files call dtypes and the parts of a tensor."""

import torch

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def part_name(name, number):
    """Return what files call a rank's part of a tensor: as the tensor; a further part also by its number. No name that
    torch allows has two dots in a row."""
    return f"{name}..{number}" if number else name


def tensor_of(part):
    """Return the name of the tensor of which this is a part."""
    return part.partition("..")[0]


def name_of(dtype):
    """Return the name of a dtype, such as float32; `DTYPES[name]` is the way back."""
    return str(dtype).removeprefix("torch.")
