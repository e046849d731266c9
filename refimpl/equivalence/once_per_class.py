"""What is found out about a class of models, once for each kind."""

from concurrent.futures import ThreadPoolExecutor

from ..others import ask
from ..side_effects import no_side_effects

_found = {}


def once(question, model, find):
    """Return find(model), which is the same for all models of one kind; `question` names it.

    It runs without side effects, and in a thread of its own, in which no mode is on. What it raises is raised again for
    the next model. CannotShrink for a model without a config of transformers.
    """
    key = question, *ask("kind", model)
    if key not in _found:
        with no_side_effects(), ThreadPoolExecutor(1) as thread:
            done = thread.submit(find, model)
        _found[key] = done
    error = _found[key].exception()
    if error is not None:
        raise error.with_traceback(None)  # or each raise would lengthen the same traceback
    return _found[key].result()
