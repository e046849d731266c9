"""What an evaluation keeps of each batch until its end: predictions, labels, and what puts them together."""

from ...common.ledger import ACTIVATIONS, TEMPORARIES
from ..phases import EVALUATION, own_phase, phases_of
from .answer import about

TRAINER = ("`prediction_loss_only=True`, or a `preprocess_logits_for_metrics` that returns `logits.argmax(-1)`, or "
           "`eval_accumulation_steps=1`, which moves them to the host")
BY_HAND = "keep each batch's `.argmax(-1)` or its metric, or move what is kept to the host with `.cpu()`"


def predictions(timeline):
    """List an Answer, if what evaluation made outlives its batch and is there at the peak."""
    phases = phases_of(timeline.recording)
    calls = [call for call in timeline.recording.calls if own_phase(call) == EVALUATION]
    if not calls or phases[timeline.peak_row - 1] != EVALUATION:
        return []
    begins, last = [call.begin for call in calls], max(call.end for call in calls)

    def outlives_its_batch(i):
        """Tell whether another batch begins before it goes, or all of them have ended."""
        born, freed = int(timeline.born[i]) - 1, int(timeline.freed[i]) - 1
        return born > last or any(born < begin < freed for begin in begins)

    kept = [i for i in timeline.where(ACTIVATIONS, TEMPORARIES)
            if timeline.born[i] and phases[timeline.born[i] - 1] == EVALUATION and outlives_its_batch(i)]
    sources = {timeline.records[i].source for i in kept}
    by_trainer = any(source and "trainer" in source.file for source in sources)
    return about(timeline, "predictions", kept, "{at}, are what evaluation keeps of its batches",
                 TRAINER if by_trainer else BY_HAND)
