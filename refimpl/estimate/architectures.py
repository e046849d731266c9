"""Which of transformers' classes a config.json names, and the batch that this class gives its loss of."""

import torch

from ..untrusted.text import shown
from .source import tokens, tokens_of

# Classes of transformers that choose by a task, and what one label belongs to.
TASKS = {"AutoModelForCausalLM": "token", "AutoModelForMaskedLM": "token", "AutoModelForSeq2SeqLM": "token",
         "AutoModelForSpeechSeq2Seq": "token", "AutoModelForImageTextToText": "token",
         "AutoModelForTokenClassification": "token", "AutoModelForSequenceClassification": "row",
         "AutoModelForImageClassification": "row"}
CONTEXTS = "max_position_embeddings", "max_target_positions", "n_positions"  # keys that limit the tokens of a sequence


def class_of(path, config, settings):
    """Return (class, what a label belongs to, sentences about what was assumed). `settings`: transformers' config.

    ValueError if `architectures` names a class that transformers does not have for this model, or one whose batch is
    not known; without `architectures`, if the model is no causal language model."""
    import transformers

    known = [(each, label) for task, label in TASKS.items()
             for each in _classes(getattr(transformers, task)._model_mapping, settings)]
    named = config.get("architectures")
    if not named:
        for each in _classes(transformers.AutoModelForCausalLM._model_mapping, settings):
            return each, "token", [f"architectures is not given: assumed {each.__name__}"]
        raise ValueError(f"{path}: model_type={shown(config['model_type'])} has no AutoModelForCausalLM: add "
                         f"architectures, one of {', '.join(sorted(each.__name__ for each, _ in known)) or 'none'}; "
                         "for another model give file.py:function, with a function that returns it and its batch")
    for each, label in known:
        if each.__name__ == named[0]:
            text_alone = each in _classes(transformers.AutoModelForImageTextToText._model_mapping, settings)
            return each, label, ["text alone is given to it, no images"] * text_alone
    raise ValueError(f"{path}: architectures={shown(named[0])}: how its loss is called is not known; expected one of "
                     f"{', '.join(sorted(each.__name__ for each, _ in known)) or 'none'} for model_type="
                     f"{shown(config['model_type'])}, or give file.py:function, a function that returns the model and "
                     "its batch")


def _classes(mapping, settings):
    """List the classes that a mapping of transformers has for a config."""
    found = mapping[type(settings)] if type(settings) in mapping else ()
    return found if isinstance(found, tuple) else (found,)


def batch_of(path, kind, label, settings, options):
    """Return (function that makes the arguments of a call, their shape in words).

    `kind`: the class; `settings`: transformers' config. ValueError for more tokens than it has positions for, and for
    inputs that are no tokens, images or spectrograms."""
    inputs = kind.main_input_name
    if inputs == "input_ids" or label == "token":
        text = settings.get_text_config(decoder=True)
        context = next((value for key in CONTEXTS if (value := getattr(text, key, None)) is not None), None)
        length = tokens_of(options, context, path)
        if length is None:
            raise ValueError(f"{path} names no {CONTEXTS[0]}: give sequence")
    elif options.sequence is not None:
        raise ValueError(f"sequence={options.sequence}: {path} names {kind.__name__}, which takes {inputs}: leave it "
                         "out")
    if inputs == "input_ids":
        shape, words = (options.batch, length), f"{options.batch} × {length} tokens"
    elif inputs == "pixel_values" and label == "row":
        size = settings.image_size
        shape = (options.batch, settings.num_channels, *(size if isinstance(size, (list, tuple)) else (size, size)))
        words = f"{' × '.join(map(str, shape))} pixels"
    elif inputs == "input_features" and hasattr(settings, "max_source_positions"):
        shape = options.batch, settings.num_mel_bins, 2 * settings.max_source_positions  # a convolution halves it
        words = f"{' × '.join(map(str, shape))} features, {options.batch} × {length} tokens"
    else:
        raise ValueError(f"{path}: {kind.__name__} takes {inputs}, of a shape that is not known; give "
                         "file.py:function, a function that returns the model and its batch")

    def arguments():
        first = tokens(*shape) if inputs == "input_ids" else torch.zeros(shape)
        if label == "token":
            labels = tokens(options.batch, length)
        else:
            labels = torch.zeros(options.batch, dtype=torch.float if settings.num_labels == 1 else torch.int64)
        return {inputs: first, "labels": labels}

    return arguments, words
