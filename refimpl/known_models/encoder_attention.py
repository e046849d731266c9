"""How an encoder of transformers is given another attention, and what of its tokens are paddings.

Its attention layers are the modules that name the registry (AttentionInterface). To an attention of another name than
their own ones transformers hands no mask at all, paddings or none, unless a function that makes one has that name, too
(AttentionMaskInterface). Ours hands on the paddings as booleans (B, S), and refuses each mask that hides pairs.
"""

from .attention_layers import causal_of, take_attention, takes_from_registry


def encoder_of(model):
    """Return (the attention layers of a model of transformers, give(model, attention, masked)). None for another model.

    After `give` it attends by `attention(layer, q, k, v, *, causal, scale, dropout_p, padding)`. `padding`: booleans
    (B, S), True where a token is, or None. `masked`: what is said of a mask that hides more. ValueError for a model
    that takes no other attention.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) is None:
        return None
    return [module for module in model.modules() if takes_from_registry(type(module))], _give


def _give(model, attention, masked):
    take_attention(model, _as_in_registry(attention, masked), _paddings(masked))
    return model


def _paddings(masked):
    from transformers.masking_utils import bidirectional_mask_function

    def mask(*, mask_function, config, attention_mask=None, **others):
        """Return attention_mask, (B, S); transformers has made booleans of it."""
        if mask_function is not bidirectional_mask_function:
            raise ValueError(f"{config.model_type} gives its attention {masked}")
        return attention_mask

    return mask


def _as_in_registry(attention, masked):
    def attend(module, query, key, value, attention_mask=None, *, dropout=0.0, scaling=None, **others):
        """Return (out (B, T, H, D), None), as the registry's functions do."""
        kind = type(module).__name__
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"{kind} gives its attention {masked}")
        if query.shape[2] != key.shape[2]:
            raise ValueError(f"{kind} has {query.shape[2]} queries and {key.shape[2]} keys, as cross-attention: "
                             "expected self-attention of an encoder")
        causal = causal_of(module, others, "scaling")
        out = attention(module, query, key, value, causal=causal, scale=scaling, dropout_p=dropout,
                        padding=attention_mask)
        return out.transpose(1, 2).contiguous(), None

    return attend
