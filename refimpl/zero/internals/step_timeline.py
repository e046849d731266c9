"""Records what an engine computes in a step, and what is on the wire meanwhile, to be drawn and added up.

    with timeline(engine) as line, memory.track(engine.model, engine.optimizer) as t:
        engine.backward(engine.forward(tokens, tokens)); engine.step()
    line.plot(t)

The spans are those of `comm.rank_timeline`: in lane "compute" forward and backward by unit, and update; in lanes
"gather" and "reduce" all_gather, reduce_scatter and all_reduce by bucket; and lanes of what a store or an update
reports, such as copies. Collectives that are not of a bucket, such as the checks that all ranks do the same, have no
name.
"""

import contextlib

from ...comm.rank_timeline import LANES
from ...comm.rank_timeline import timeline as of_units
from ..units import default_units


@contextlib.contextmanager
def timeline(engine):
    """Record what `engine` (of any stage) computes and communicates in this context; gives a
    `common.spans.Recording`."""
    units, recording = set(getattr(engine, "units", None) or default_units(engine.model)), None
    named = {name: module for name, module in engine.model.named_modules() if module in units}
    try:
        with of_units(named, engine.optimizer, LANES) as recording:
            yield recording
    finally:
        buckets = {bucket.name for bucket in (*engine.buckets, *engine.frozen_buckets)}
        recording.spans[:] = [span._replace(name="") if span.kind in LANES and span.name not in buckets else span
                              for span in recording.spans]
        recording.lanes[:] = dict.fromkeys((*recording.lanes, *(span.lane for span in recording.spans)))
