"""Context parallelism of models that others wrote: the logits of one device, or refused with the reason."""

import pytest
import torch
from context_outside_kit import GEMMA, MODELS, distance
from outside.models import GROUPED, causal, masked
from rank_pool import pooled

from refimpl.comm import FakeCommunicator, RankError
from refimpl.context import SequenceParallelAttention, context_parallel

LLAMA4 = {**GROUPED, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 4}
WINDOWED = ("modernbert", "gemma3", "gemma2", "gpt_oss")  # or with capped scores, or sinks


@pytest.mark.parametrize(("name", "method"), [
    (name, method) for name in MODELS for method in ("ring", "gathered", "ulysses")
    if (name not in WINDOWED or method != "ring") and (name, method) != ("modernbert", "gathered")])
def test_logits_of_one_device(name, method):
    assert max(pooled(distance, 2, name, method)) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_positions_that_restart_on_each_rank_are_seen(name):
    with pytest.raises(RankError, match="LM, cut over 3 ranks, would not compute what it does whole"):
        pooled(distance, 2, name, "ulysses", True)


@pytest.mark.parametrize(("make", "words"), [
    (masked("roberta"), "position_embeddings has padding_idx=0: such models count positions from 1"),
    (causal("lfm2", **GROUPED, layer_types=["conv", "full_attention"]), "conv, Conv1d, reads tokens one after the"),
    (causal("llama4_text", **LLAMA4), "has layers of chunked_attention: expected full_attention and sliding_attention"),
    (causal("gemma2", **GEMMA), r"softcap=50\.0 in ring attention"),
    (causal("mistral", **GEMMA), "window=3 in ring attention")])
def test_what_a_part_of_a_sequence_would_get_wrong_in_silence_is_refused(make, words):
    model, before = make(), torch.ones(1, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match=words):
        context_parallel(model, SequenceParallelAttention(FakeCommunicator(0, 2)))(input_ids=before)
