"""What techniques ask about models that others wrote. A technique asks; `refimpl.known_models` answers.

    ask("blocks", model)                    its Anatomy: its layers, what is before them and after them
    ask("head", model)                      (the model that scores, its head), whose product the loss can make itself
    ask("between", model, hidden, logits)   the Change that it makes to its logits between head and loss
    ask("loss", model, score)               a function for the place of its loss, that calls `score`
    ask("mlp", module)                      {in training: the FeedForward that it is}
    ask("attentions", block)                the modules in a block that compute attention
    ask("attention", model)                 give(model, attention): another attention, in each of its layers
    ask("encoder", model)                   (its attention layers, give(model, attention, masked)), with paddings
    ask("cache", value)                     whether it is a cache of keys and values
    ask("sequence", model)                  give(model, attention): attention of a sequence that is cut over ranks
    ask("transposed", layer)                whether it is a linear layer whose weight is (in, out)
    ask("adapted", module)                  the layer around which it is an adapter
    ask("plan", model)                      {names of its layers: how each is split}
    ask("kind", model)                      what models have alike of which one proof is enough
    ask("toy", model)                       (a small model of its class, how many ranks can share its heads)
    ask("tokens", toy)                      tokens for it; ask("size", toy): its size in words
    ask("results", toy, tokens)             {name: tensor} of what it computes, "loss" among them
    ask("changes", model)                   what was changed in it since its class made it
    ask("hooks", module)                    hooks that a user has put there

`ask` returns None if no answer knows the module. An answer raises the errors that the asking technique documents. The
first question loads `known_models`, and an answer loads a library: importing a technique loads neither.
"""

import importlib
from typing import Any

OURS = ("builtins", "torch", "refimpl")
KNOWN = "refimpl.known_models"
_answers = {}


def register(answers: Any) -> None:
    """Register {question: function} as answers; a function returns None for a module that it does not know."""
    importlib.import_module(KNOWN)  # before it, so that it is asked last
    for question, answer in answers.items():
        _answers.setdefault(question, []).insert(0, answer)


def ask(question: str, thing: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the first answer that is not None. The last one registered is asked first."""
    importlib.import_module(KNOWN)
    found = (answer(thing, *args, **kwargs) for answer in _answers[question])
    return next((each for each in found if each is not None), None)


def ask_of_others(question: str, thing: Any) -> Any:
    """Ask of what others wrote alone: None at once for what is torch's own or ours."""
    return None if type(thing).__module__.partition(".")[0] in OURS else ask(question, thing)
