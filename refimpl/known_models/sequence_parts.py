"""Whether a model can be given a part of a sequence: it takes another attention, and position_ids in each call."""

from torch import nn

from ..context.inner_attention import options_of
from .attention_layers import attend_by, check_named

LAYERS = ("full_attention", "sliding_attention")
MASKED = ("attention_mask of a part of a sequence: expected none; pad at the end of rows, with targets −100 (causal "
          "attention of other tokens does not see paddings)")


def give_attention(model, attention):
    """Let a model use an attention of sequences cut over ranks; returns the model. See context_parallel.

    ValueError for a model that cannot be given one.
    """
    attend_by(model, _of_parts(attention), MASKED)
    model.register_forward_pre_hook(_positions(attention), with_kwargs=True)
    return model


def sequence_of(model):
    """Return `give_attention` for a model of transformers. ValueError for one in which something else than its
    attention looks at other tokens or at positions."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) is None:
        return None
    base = getattr(model, model.base_model_prefix, model)
    if "position_ids" not in options_of(base):
        raise ValueError(f"{type(base).__name__}.forward takes no position_ids, so its positions cannot be given from "
                         "outside")
    config, kind = model.config.get_text_config(), type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv1d, nn.RNNBase)):
            raise ValueError(f"{kind}: {name}, {type(module).__name__}, reads tokens one after the other, and a rank "
                             "has a part of them: expected a model whose tokens meet in attention alone")
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            raise ValueError(f"{kind}: {name} has padding_idx={module.padding_idx}: such models count positions from "
                             f"{module.padding_idx + 1}, without paddings; expected positions that begin at 0")
    for layer in dict.fromkeys(getattr(config, "layer_types", None) or ()):
        if layer.endswith("_attention") and layer not in LAYERS:
            raise ValueError(f"{kind} has layers of {layer}: expected {' and '.join(LAYERS)} alone, since the mask of "
                             "another kind is not known here")
    return give_attention


def _of_parts(attention):
    def attend(query, key, value, *, causal, scale, dropout_p, window, softcap, sinks):
        if scale is not None and scale != query.shape[-1] ** -0.5:
            query = query * (scale * query.shape[-1] ** 0.5)  # the attention itself multiplies by 1/√D
        length = query.shape[2] * attention.comm.world_size
        options = {"window": window} if window is not None and window + 1 < length else {}
        if softcap is not None:
            options["softcap"] = softcap
        if sinks is not None:
            options["sinks"] = sinks
        return attention(query, key, value, causal=causal, dropout_p=dropout_p, **options)

    return attend


def _positions(attention):
    def give_positions(model, args, kwargs):
        check_named(args)
        given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
        tokens = next(x for x in given if x is not None)
        for name in ("past_key_values", "use_cache"):
            if kwargs.get(name):
                raise ValueError(f"{name} with a sequence cut over ranks: expected none, since a rank has the keys of "
                                 "its own tokens; generate with a model on one device")
        if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise ValueError("labels of a part of a sequence: a causal model would shift them, and a rank does not "
                             "have the token after its last; shift them before the cut, next_tokens = "
                             "F.pad(labels[:, 1:], (0, 1), value=-100), and give it as both labels and shift_labels: "
                             "attention.shard(next_tokens, pad=-100); or score the logits")
        if kwargs.get("attention_mask") is not None:
            raise ValueError(MASKED)
        if kwargs.get("position_ids") is not None:
            raise ValueError("position_ids of a part of a sequence: expected none; they are attention.positions(…)")
        attention.check_length(tokens)
        ids = attention.positions(tokens.shape[1], tokens.device)[None]
        return args, {"use_cache": False, **kwargs, "position_ids": ids.expand(tokens.shape[0], -1)}

    return give_positions
