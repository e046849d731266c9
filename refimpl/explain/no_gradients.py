"""Parameters that an optimizer stepped without a gradient, as where a frozen model's blocks are recomputed: reentrant
recomputation gives gradients only where an input of the block wants one (peft#525)."""

import functools

import torch
from torch.utils import checkpoint

ALL = "does not require grad and does not have a grad_fn"  # autograd's error, where nothing wants a gradient
CURE = ("blocks are recomputed whose inputs want no gradient, and then none of their parameters gets one: call "
        "`model.enable_input_require_grads()`, or recompute with `use_reentrant=False`")


class Recomputed:
    """Notes whether reentrant recomputation met a block whose inputs want no gradients, `without`: a context."""

    without = False

    def __enter__(self):
        self._original = original = checkpoint.check_backward_validity

        @functools.wraps(original)
        def noted(inputs):
            self.without |= not any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)
            return original(inputs)

        checkpoint.check_backward_validity = noted
        return self

    def __exit__(self, *exception):
        checkpoint.check_backward_validity = self._original


def count(optimizer):
    """Return how many numbers of an optimizer's parameters want a gradient, and have none when it has stepped."""
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"]
               if p.requires_grad and p.grad is None)


def note(recording, text):
    """Return a sentence, None if all had gradients. `text`: the error that ended the script, "" if none did."""
    if ALL in text:
        return CURE if recording.recomputed.without else None
    if not recording.no_gradients:
        return None
    cure = f": {CURE}" if recording.recomputed.without else ""
    return f"{recording.no_gradients:,} numbers that an optimizer is to update had no gradient at its first step{cure}"
