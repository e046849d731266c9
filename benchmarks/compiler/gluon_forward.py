"""The cases of refimpl/attention/gluon_forward.py for the compiler."""

from refimpl.attention import gluon_forward

from .compiled import Case
from .hopper import masks_by_name, on_meta, types_of


def cases():
    """Make {name: Case}, as `hopper.cases` does."""
    return {name: _case(*case) for name, case in masks_by_name(gluon_forward.STAGES).items()}


def _case(dtype, D, causal, window, S):
    values, constants = gluon_forward.launch_arguments(*on_meta(dtype, D, S), D**-0.5, causal, window)
    return Case(f"{gluon_forward.__name__}:forward_kernel",
                types_of(values, gluon_forward.NOT_SPECIALIZED) | constants, 4, 1,
                {"maxnreg": gluon_forward.REGISTERS["all"]})
