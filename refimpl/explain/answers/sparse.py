"""Whole gradients of embedding tables, of which a batch reads a few rows: `sparse=True` makes those rows alone."""

from ...common.ledger import GRADIENTS, TEMPORARIES
from ...memory.storage_records import BACKWARD, STEP
from .answer import about

WHOLE = ("embedding_dense_backward", "_embedding_bag_backward", "_embedding_bag_dense_backward")
TAKE_SPARSE = ("SGD", "Adagrad", "SparseAdam")  # of torch.optim


def sparse(timeline):
    """List an Answer, if gradients of embedding tables, or their update, are there at the peak."""
    made = [i for i in timeline.where(GRADIENTS, TEMPORARIES, phase=BACKWARD) if timeline.records[i].op in WHOLE]
    shapes = {timeline.records[i].shape for i in made}
    shapes -= {record.shape for record in timeline.records  # a table that is a head, too, has a whole gradient anyway
               if record.phase == BACKWARD and record.op not in WHOLE}
    gone = [i for i in made + timeline.where(TEMPORARIES, phase=STEP) if timeline.records[i].shape in shapes]
    name = next((each.name for each in timeline.recording.optimizers), "")
    if name in TAKE_SPARSE:
        change, bound = "`sparse=True` in the embeddings", ""
    else:
        change = (f"`sparse=True` in the embeddings, and for them `torch.optim.SparseAdam` in place of {name}, which "
                  "takes none: only rows that were read are updated then")
        bound = "the rows of the batch come on top"
    return about(timeline, "sparse", gone, "{at}, are whole gradients of embedding tables and their update, though a "
                 "batch reads a few rows", change, bound)
