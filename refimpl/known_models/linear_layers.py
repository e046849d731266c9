"""What linear layer this is: GPT-2's, whose weight is (in, out), or an adapter of peft around another one."""


def is_transposed(layer):
    """Return True for transformers' Conv1D, x W + b."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") or None


def adapted(module):
    """Return the layer around which a module is an adapter of peft."""
    return getattr(module, "base_layer", None)
