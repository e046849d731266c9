"""The plain answers: what takes bytes that need not be there, the line to change, and how."""

from . import dead, foreach, images, loading, masks, models, predictions, replicas, saving, sparse
from .answer import Answer
from .first import first, together

__all__ = ["Answer", "answers", "first", "together"]
SHOWN = 0.01  # share of the peak


def answers(timeline) -> list[Answer]:
    """List the Answers of a RecordedTimeline that save a hundredth of its peak or more, those that save most first."""
    rules = (dead.dead, foreach.foreach, sparse.sparse, masks.masks, predictions.predictions, loading.loading,
             models.copies, models.upcasts, saving.copies, images.resolution,
             replicas.whole_models)
    found = [each for rule in rules for each in rule(timeline)]
    return sorted((each for each in found if each.saves >= SHOWN * timeline.peak), key=lambda each: -each.saves)
