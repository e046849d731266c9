"""What a tracker writes down: operations, and storages with what was learnt of each.

A storage has one category for its whole life, decided only when the trace is read: that a tensor was saved for
backward, or became a gradient, is known only after it was allocated.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from ..common.ledger import ACTIVATIONS, BUFFERS, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS, TEMPORARIES

BUILD, FORWARD, BACKWARD, STEP = "build", "forward", "backward", "step"
START, END = "(start)", "(end)"


class Line(NamedTuple):
    """A line of source: `str(line)` is `train.py:31`. A cell of a notebook is a file, `In[3]`."""

    file: str
    number: int
    text: str = ""

    def __str__(self):
        return f"{self.file}:{self.number}"


@dataclass(slots=True)
class StorageRecord:
    """One tensor storage: what made it, and what was learnt of it afterwards.

    `roles` are categories that its owner gave it (a module's parameter, an optimizer's state …). The flags below
    it decide between activation and temporary. `owners`: whose it is, (module, its parameter, what of it) → None in
    the order of being found, e.g. `("h.0.mlp", "h.0.mlp.weight", "gradient")`; a bucket has several. `line`: the
    user's own line that made it, `source`: the line, a library's perhaps, that called PyTorch; None if not known.
    """

    device: str
    op: str  # the operation that made it; START if it is older than the trace
    phase: str
    module: str
    born: int  # index of that operation; -1 if older
    nbytes: int  # as of now: a storage can be resized
    alive: bool = True
    mark: str | None = None  # a category that outranks every role
    roles: set = field(default_factory=set)
    held_by_optimizer: bool = False  # in an optimizer's param_groups
    saved: bool = False  # autograd keeps it, seen by our own hook
    offered: bool = False  # a technique's pack hook was asked to keep it
    packed: bool = False  # made by a technique while packing, or inside an autograd.Function
    kept: bool = False  # born before a backward and alive when it began
    freed_by_backward: bool = False  # … and freed in it
    shape: tuple = ()  # of the tensor with which it was first seen; its `dtype` likewise, "float32"
    dtype: str = ""
    line: Line | None = None
    source: Line | None = None
    owners: dict = field(default_factory=dict)


class Op(NamedTuple):
    """One line of the timeline: an operation, its phase, the module it ran in, and when it was done (ns since 1970)."""

    name: str
    phase: str
    module: str
    time_ns: int


# Who wins when a storage has several roles, e.g. a weight that a matmul also saved for backward.
_PRIORITY = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE, INPUTS)


def category_of(record, master_weights):
    """Decide the category of one storage, from all that is known of it.

    An activation is what autograd saved. Where a technique's own hooks hide that, it is what the technique was
    offered or made, if it lives on until backward; or what backward alone was holding. A tensor that the user holds
    (logits, say) survives backward and is a temporary. `master_weights`: whether tensors that only an optimizer holds
    are copies of a module's parameters (then they are optimizer state) or the parameters themselves.
    """
    if record.mark is not None:
        return record.mark
    for role in _PRIORITY:  # before `saved`: a weight that autograd saved is still a parameter
        if role in record.roles:
            return role
    if record.held_by_optimizer:
        return OPTIMIZER_STATE if master_weights else PARAMETERS  # fp32 masters, if a module has the weights
    survives = record.kept or record.alive
    recomputed = record.offered and record.phase == BACKWARD
    if record.saved or recomputed or record.freed_by_backward or (survives and (record.offered or record.packed)):
        return ACTIVATIONS
    return TEMPORARIES
