"""What is found out about a class of models, once for each: by the class and its config when it is shrunk."""

from concurrent.futures import ThreadPoolExecutor

from ..unseen import unseen
from .toys import config_of, shrunk

_found = {}


def once(question, model, find):
    """Return find(model), which is the same for all models of one class and one small config; `question` names it.

    It runs unseen, and in a thread of its own, in which no mode is on. What it raises is raised again for the next
    model. CannotShrink for a model without a config of transformers.
    """
    config = config_of(model)
    key = question, type(model), config._attn_implementation, repr(sorted(shrunk(config).to_dict().items()))
    if key not in _found:
        with unseen(), ThreadPoolExecutor(1) as thread:
            done = thread.submit(find, model)
        _found[key] = done
    error = _found[key].exception()
    if error is not None:
        raise error.with_traceback(None)
    return _found[key].result()
