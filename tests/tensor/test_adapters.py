"""LoRA of peft and tensor parallelism: equal to the unsplit model, or refused with the reason."""

import pytest
from adapters_kit import ADAPTERS, LAYERS, adapted, with_adapters
from rank_pool import pooled
from tensor_kit import whole

from refimpl.comm import FakeCommunicator
from refimpl.tensor import sequence_parallel, tensor_parallel


def test_a_model_with_adapters_is_split_by_a_plan():
    assert all(far <= 1e-12 and apart == 0 for far, apart in pooled(adapted, 2, 0.0))


def test_dropout_before_an_adapter_agrees_on_all_ranks():
    assert all(apart <= 1e-15 for _, apart in pooled(adapted, 2, 0.3))


def test_adapters_that_are_not_in_the_plan_are_refused():
    plan = {f"{LAYERS}self_attn.q_proj": "column"}
    with pytest.raises(TypeError, match=r"q_proj is of peft's Linear.*q_proj.base_layer': 'column', .*lora_B"):
        tensor_parallel(with_adapters(), FakeCommunicator(0, 2), plan)
    with pytest.raises(ValueError, match="PeftModel has adapters of peft.*use tensor_parallel"):
        sequence_parallel(with_adapters(), FakeCommunicator(0, 2), ADAPTERS)


def test_a_split_model_takes_no_adapters():
    """It has no nn.Linear that peft could put its own around."""
    model = tensor_parallel(whole("llama"), FakeCommunicator(0, 2))
    with pytest.raises(ValueError, match="Target module ColumnParallelLinear"):
        with_adapters(model=model)
