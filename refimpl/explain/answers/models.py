"""Whole models that could be less: a frozen copy of the one that trains, frozen weights in 32 bits."""

from .answer import about

REFERENCE = ("if it stays as it is: with adapters (LoRA) the model itself, under `with model.disable_adapter():`; else "
             "compute what is wanted of it once, before training")
SMALLER = "load them with `dtype=torch.bfloat16`; `prepare_model_for_kbit_training` would cast them up"


def copies(timeline):
    """List an Answer, if a frozen copy of a model that trains is called on the same batches, as a reference."""
    calls = [call for call in timeline.recording.calls if call.depth == 1 and call.inputs]
    given = [{frozenset(call.inputs) for call in calls if call.trained == trained} for trained in (True, False)]
    if not given[0] & given[1]:
        return []
    models = timeline.recording.models
    trained = [model for model in models if any(each for *_, each in model.parameters)]
    frozen = [number for model in models if model not in trained and any(model.shapes <= other.shapes
                                                                         for other in trained)
              for number, *_ in model.parameters if number is not None]
    return about(timeline, "copy", frozen, "{at}, are a frozen copy of a model that trains", REFERENCE)


def upcasts(timeline):
    """List an Answer, if frozen weights have 32 bits."""
    wide = [number for model in timeline.recording.models for number, _, size, trained in model.parameters
            if number is not None and size == 4 and not trained]
    halves = [(first, after, nbytes // 2) for first, after, nbytes in map(timeline.whole, wide)]
    return about(timeline, "upcast", wide, "{at}, are frozen weights in 32 bits", SMALLER, spans=halves)
