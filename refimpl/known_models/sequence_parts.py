"""Whether a model can be given a part of a sequence: it takes another attention, and position_ids in each call."""

from torch import nn

from ..context.inner_attention import options_of
from .attention_layers import use_attention

KNOWN = ("position_ids", "cache_position", "use_cache", "output_attentions", "num_items_in_batch", "is_causal",
         "position_embeddings", "return_dict", "labels", "shift_labels")  # that say nothing of attention

LAYERS = ("full_attention", "sliding_attention")
MASKED = ("attention_mask of a part of a sequence: expected none; pad at the end of rows, with targets −100 (causal "
          "attention of other tokens does not see paddings)")


def give_attention(model, attention):
    """Let a model use an attention of sequences cut over ranks; returns the model. See context_parallel.

    ValueError for a model that cannot be given one.
    """
    name, before = use_attention(model, _function(attention))
    if model.config._attn_implementation != name:
        model.set_attn_implementation(before)  # parts of it may have taken the new one
        raise ValueError(f"{type(model).__name__} takes no other attention (AttentionInterface), so it cannot be given "
                         "one from outside")
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


def _function(attention):
    def attend(module, query, key, value, attention_mask=None, *, dropout=0.0, scaling=None, sliding_window=None,
               softcap=None, s_aux=None, **others):
        """Return (out (B, T, H, D), None), as the registry's functions do."""
        if attention_mask is not None:
            raise ValueError(MASKED)
        unknown = [name for name, given in others.items() if not (given is None or given is False or name in KNOWN)]
        if unknown:
            raise ValueError(f"{type(module).__name__} gives its attention {unknown[0]}: what that does to a split "
                             "sequence is not known; expected scaling, sliding_window, softcap, s_aux and is_causal "
                             "alone")
        causal = others.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if scaling is not None and scaling != query.shape[-1] ** -0.5:
            query = query * (scaling * query.shape[-1] ** 0.5)  # the attention itself multiplies by 1/√D
        length = query.shape[2] * attention.comm.world_size
        windowed = sliding_window is not None and sliding_window < length
        options = {"window": sliding_window - 1} if windowed else {}  # theirs counts the token itself
        if softcap is not None:
            options["softcap"] = softcap
        if s_aux is not None:
            options["sinks"] = s_aux
        out = attention(query, key, value, causal=causal, dropout_p=dropout, **options)
        return out.transpose(1, 2).contiguous(), None

    return attend


def _positions(attention):
    def give_positions(model, args, kwargs):
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
