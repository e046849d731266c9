"""Whole models that could be less: a frozen copy of the one that trains, frozen weights in 32 bits."""

from ...common.ledger import PARAMETERS
from .answer import Answer


def models(timeline):
    """List an Answer for frozen copies of a model that trains, and one for frozen weights in 32 bits."""
    found, alive = [], set(timeline.alive(timeline.peak_row).tolist())
    of_run = timeline.recording.models
    trained = [model for model in of_run if any(trained for *_, trained in model.parameters)]
    copies = [number for model in of_run if model not in trained for number, *_ in model.parameters
              if number in alive and any(model.shapes <= other.shapes for other in trained)]
    if copies and _same_batch(timeline):
        line = _line(timeline, copies)
        found.append(Answer(
            "copy", timeline.saved(map(timeline.whole, copies)), f"{_bytes(timeline, copies):,} bytes are a frozen copy "
            f"of a model that trains{f', made at {line}' if line else ''}", (line,) if line else (),
            "if it stays as it is: with adapters (LoRA) the base is that model, under `with model.disable_adapter():`; "
            "else compute what is wanted of it once, before training"))
    wide = [number for model in timeline.recording.models for number, _, size, is_trained in model.parameters
            if number in alive and size == 4 and not is_trained and timeline.categories[number] == PARAMETERS]
    if wide:
        line = _line(timeline, wide)
        halves = [(first, after, nbytes // 2) for first, after, nbytes in map(timeline.whole, wide)]
        found.append(Answer(
            "upcast", timeline.saved(halves), f"{_bytes(timeline, wide):,} bytes are frozen weights in 32 bits"
            f"{f', made at {line}' if line else ''}", (line,) if line else (),
            "load them with `dtype=torch.bfloat16`, and leave out what casts them up (`prepare_model_for_kbit_training` "
            "does)"))
    return found


def _same_batch(timeline):
    """Tell whether a model that trains and one that does not are called on the same tensors."""
    calls = [call for call in timeline.recording.calls if call.depth == 1 and call.inputs]
    return bool({frozenset(call.inputs) for call in calls if call.trained} &
                {frozenset(call.inputs) for call in calls if not call.trained})


def _bytes(timeline, numbers):
    return sum(int(timeline.nbytes[i]) for i in numbers)


def _line(timeline, numbers):
    return timeline.records[max(numbers, key=lambda i: timeline.nbytes[i])].line
