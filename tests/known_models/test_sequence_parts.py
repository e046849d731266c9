"""The attention that a model is given for a part of a sequence."""

from types import SimpleNamespace

import torch
from net_kit import on_meta
from transformers import AttentionInterface

from refimpl.known_models.sequence_parts import give_attention


def test_a_model_that_names_no_dropout_has_none():
    asked = {}

    def attention(q, k, v, **options):
        asked.update(options)
        return q

    attention.comm = SimpleNamespace(world_size=2)
    model = give_attention(on_meta("llama", num_hidden_layers=1), attention)
    given = AttentionInterface()[model.config._attn_implementation]
    given(model, *torch.zeros(3, 1, 1, 4, 8))
    assert asked == {"causal": True, "dropout_p": 0.0}
