"""Images by their resolution: what is made of each pixel goes with the square of the width."""

from ..helps.batches import of_rows
from .answer import about

LEAST = 16  # pixels: what is narrower is no image
BOUND = "if all that is made of an image's rows goes with its pixels; a model may take one resolution alone"


def resolution(timeline):
    """List an Answer, if a model that trains is given images: at half the width and height."""
    given = {i for call in timeline.recording.calls if call.depth == 1 and call.goes_back for i in call.inputs}
    images = [i for i in given if _is_image(timeline.records[i])]
    if not images:
        return []
    largest = max(images, key=lambda i: timeline.nbytes[i])
    *_, height, width = timeline.records[largest].shape
    kept = {*of_rows(timeline), *images}
    spans = [(first, after, nbytes * 3 // 4) for first, after, nbytes in map(timeline.whole, sorted(kept))]
    what = f"{{at}}, are made of images of {height} × {width} pixels"
    return about(timeline, "resolution", kept, what, f"images of {height // 2} × {width // 2}, where their detail is "
                 "not needed", BOUND, spans)


def _is_image(record):
    return len(record.shape) == 4 and record.dtype.startswith(("float", "bfloat")) and min(record.shape[2:]) >= LEAST
