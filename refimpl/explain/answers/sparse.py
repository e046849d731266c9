"""Whole gradients of embedding tables, of which a batch reads a few rows: `sparse=True` makes those rows alone."""

from ...common.ledger import GRADIENTS
from ...memory.storage_records import BACKWARD, STEP
from .answer import Answer

TABLES = ("embedding_dense_backward", "_embedding_bag_backward", "_embedding_bag_dense_backward")
TAKE_SPARSE = ("SGD", "Adagrad", "SparseAdam")


def sparse(timeline):
    """List an Answer, if an embedding's gradients are alive at the peak or their updates take room there."""
    of_tables = [i for i in timeline.where(GRADIENTS, "temporaries", phase=BACKWARD)
                 if timeline.records[i].op in TABLES]
    shapes = {tuple(timeline.records[i].shape) for i in of_tables}
    others = {tuple(record.shape) for record in timeline.records
              if record.phase == BACKWARD and record.op not in TABLES}
    shapes -= others  # a head that is tied to its table has a whole gradient anyway
    gone = [i for i in of_tables if tuple(timeline.records[i].shape) in shapes]
    gone += [i for i in timeline.where("temporaries", phase=STEP) if tuple(timeline.records[i].shape) in shapes]
    if not gone:
        return []
    name = next((each.name for each in timeline.recording.optimizers), "")
    nbytes = sum(int(timeline.nbytes[i]) for i in gone if timeline.born[i] <= timeline.peak_row < timeline.freed[i])
    lines = tuple(dict.fromkeys(timeline.records[i].line for i in gone if timeline.records[i].line))[:2]
    what = (f"{nbytes:,} bytes are whole gradients of embedding tables and their update"
            f"{f', made at {lines[0]}' if lines else ''}, though a batch reads a few rows")
    change = "`sparse=True` in the embeddings" + (
        "" if name in TAKE_SPARSE else f"; {name} takes no sparse gradients: give the tables `torch.optim.SparseAdam`, "
                                       "which updates the rows that were read")
    return [Answer("sparse", timeline.saved([timeline.whole(i) for i in gone]), what, lines, change,
                   "" if name in TAKE_SPARSE else "the rows of the batch come on top")]
