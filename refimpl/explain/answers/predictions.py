"""What an evaluation keeps of each batch until its end: predictions, labels, and what puts them together."""

from ..phases import EVALUATION, own_phase, phases_of
from .answer import Answer

SWITCHES = ("`prediction_loss_only=True`, or `preprocess_logits_for_metrics` that returns `logits.argmax(-1)`, or "
            "`eval_accumulation_steps=1`, which keeps them on the host")
BY_HAND = "keep `.argmax(-1)` of each batch, or the metric's sums, or move what is kept to the host with `.cpu()`"


def predictions(timeline):
    """List an Answer, if what evaluation made outlives its batch and is there at the peak."""
    phases, calls = phases_of(timeline.recording), [each for each in timeline.recording.calls if own_phase(each)]
    ends = sorted(call.end for call in calls)
    if not ends or phases[timeline.peak_row - 1] != EVALUATION:
        return []
    begins = sorted(call.begin for call in calls)

    def outlives_its_batch(i):
        """Tell whether another batch begins before it goes, or all of them have ended."""
        born, freed = int(timeline.born[i]) - 1, int(timeline.freed[i]) - 1
        return any(born < begin < freed for begin in begins) or born > ends[-1]

    gone = [i for i in timeline.where("activations", "temporaries")
            if phases[timeline.born[i] - 1] == EVALUATION and outlives_its_batch(i)]
    there = [i for i in gone if timeline.born[i] <= timeline.peak_row < timeline.freed[i]]
    there.sort(key=lambda i: -timeline.nbytes[i])
    if not there:
        return []
    sources = {timeline.records[i].source for i in there}
    lines = tuple(dict.fromkeys(timeline.records[i].line for i in there if timeline.records[i].line))[:1]
    by_trainer = any(source and "trainer" in source.file for source in sources)
    what = (f"{sum(int(timeline.nbytes[i]) for i in there):,} bytes at the peak are what evaluation keeps of its batches"
            f"{f', at {lines[0]}' if lines else ''}")
    return [Answer("predictions", timeline.saved([timeline.whole(i) for i in gone]), what, lines,
                   SWITCHES if by_trainer else BY_HAND)]
