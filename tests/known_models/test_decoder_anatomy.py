"""What a decoder computes before its layers and after them, as it is watched on a toy of it."""

import pytest
from net_kit import LLAMA, on_meta
from transformers import BertConfig, BertForMaskedLM

from refimpl.equivalence import once_per_class as once
from refimpl.known_models.decoder_anatomy import anatomy_of


@pytest.fixture(autouse=True)
def _anew(monkeypatch):
    monkeypatch.setattr(once, "_found", {})


def test_a_llama_is_divided_around_its_layers():
    found = anatomy_of(on_meta("llama", **LLAMA))
    assert (found.layers, found.base, found.returns, found.shifts) == ("model.layers", "model", 0, True)
    assert (found.first, found.all) == (("model.embed_tokens",), ("model.rotary_emb",))
    assert (set(found.last), found.after) == ({"model.norm", "lm_head"}, "model.norm")


def test_a_model_without_a_list_of_decoder_layers_beside_its_head_is_refused():
    config = BertConfig(vocab_size=96, hidden_size=48, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(TypeError, match="the layers of BertForMaskedLM are not known"):
        anatomy_of(BertForMaskedLM(config))
