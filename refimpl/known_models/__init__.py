"""What is known of models that others wrote: by transformers, timm and peft. One file a kind of question: which modules
are its layers (`decoder_anatomy`), where its head is and what lies between head and loss (`lm_head`), what this MLP is
(`mlp`), this attention, and how a model is given another one (`attention_layers`, `encoder_attention`,
`sequence_parts`), this linear layer (`linear_layers`), how layers are split (`plans`), how a toy of a model is made
(`toys`), and what somebody has changed in it (`changes`).

Techniques do not import this: they `ask` (`refimpl/others`, which says what each question means), and the first
question of a kind loads its file. No file imports a library before it is asked. Beside `estimate` and `explain` no
other package imports one at all, or knows a class by its name (`tests/test_floors`).

A new library's model needs no change of a technique. First run its tests on the model: most answers are read from what
a model computes, and hold. For a question that has no answer, or a wrong one, write a function that returns None for
whatever is not its library's, and register it: below, or from a program of your own. It is asked before those that are
here. Then add a tiny config of the model to the cases of the tests.
"""

from functools import partial
from importlib import import_module

from ..others import register

ANSWERS = {  # {file: {question: function}}
    "decoder_anatomy": {"blocks": "anatomy_of"},
    "lm_head": {"head": "head_of", "between": "changed", "loss": "loss_by"},
    "mlp": {"mlp": "read"},
    "attention_layers": {"attentions": "attentions_of", "attention": "attention_of", "cache": "is_cache"},
    "encoder_attention": {"encoder": "encoder_of"}, "sequence_parts": {"sequence": "sequence_of"},
    "linear_layers": {"transposed": "is_transposed", "adapted": "adapted"},
    "plans": {"plan": "plan_of"}, "changes": {"changes": "changes_of", "hooks": "hooks_of"},
    "toys": {"kind": "kind_of", "toy": "toy_of", "tokens": "tokens_of", "size": "described", "results": "results_of"}}


def _answer(file, name, *args, **kwargs):
    return getattr(import_module(f".{file}", __name__), name)(*args, **kwargs)


register({question: partial(_answer, file, name)
          for file, named in ANSWERS.items() for question, name in named.items()})
