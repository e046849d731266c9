"""Context parallelism for models of transformers: an attention in their registry, and position_ids in each call."""

import itertools

from transformers import AttentionInterface

from .inner import options_of

NAMES = (f"refimpl_context_parallel_{number}" for number in itertools.count())
KNOWN = ("position_ids", "cache_position", "use_cache", "output_attentions", "num_items_in_batch", "is_causal",
         "position_embeddings", "return_dict", "shift_labels")  # that say nothing of attention


def give_attention(model, attention):
    """Register `attention` under a name of its own, and let `model` use it; returns the model. See context_parallel.

    ValueError for a model that cannot be given one.
    """
    name = next(NAMES)
    AttentionInterface.register(name, _function(attention))
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} takes no other attention (AttentionInterface), so it cannot be given "
                         "one from outside")
    base = getattr(model, model.base_model_prefix, model)
    if "position_ids" not in options_of(base):
        raise ValueError(f"{type(base).__name__}.forward takes no position_ids, so its positions cannot be given from "
                         "outside")
    model.register_forward_pre_hook(_positions(attention), with_kwargs=True)
    return model


def _function(attention):
    def attend(module, query, key, value, attention_mask=None, *, dropout=0.0, scaling=None, sliding_window=None,
               **others):
        """Return (out (B, T, H, D), None), as the registry's functions do."""
        unknown = [name for name, given in others.items() if given is not None and name not in KNOWN]
        if attention_mask is not None or unknown:
            raise ValueError(f"{'attention_mask' if attention_mask is not None else unknown[0]} in attention of a "
                             "split sequence: expected none; pad at the end of rows, with targets −100")
        causal = others.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if scaling is not None and scaling != query.shape[-1] ** -0.5:
            query = query * (scaling * query.shape[-1] ** 0.5)
        length = query.shape[2] * attention.comm.world_size
        windowed = sliding_window is not None and sliding_window < length
        options = {"window": sliding_window - 1} if windowed else {}  # theirs counts the token itself
        out = attention(query, key, value, causal=causal, dropout_p=dropout, **options)
        return out.transpose(1, 2).contiguous(), None

    return attend


def _positions(attention):
    def give_positions(model, args, kwargs):
        tokens = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise ValueError("labels of a part of a sequence: the model would shift them, and a rank does not have the "
                             "token after its last; give labels=labels, shift_labels=attention.shard(next tokens)")
        if kwargs.get("attention_mask") is not None:
            raise ValueError("attention_mask of a part of a sequence: expected none; pad at the end of rows, with "
                             "targets −100")
        attention.check_length(tokens)
        ids = attention.positions(tokens.shape[1], tokens.device)[None]
        return args, {"use_cache": False, **kwargs, "position_ids": ids.expand(tokens.shape[0], -1)}

    return give_positions
