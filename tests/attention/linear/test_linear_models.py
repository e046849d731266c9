"""Linear attention inside of models: the definition as a matrix of weights, our GPT, and Qwen3-Next of transformers."""

import delta_rule_kit as kit
import outside  # noqa: F401 - before transformers
import pytest
import torch
from torch.nn import functional as F

from refimpl.attention.linear.models import GatedDeltaAttention, chunk_gated_delta_rule, linear_attention
from refimpl.model import GPT, Attention, GPTConfig
from refimpl.papers.linear_attention import recurrent


def quadratic(q, k, v, causal):
    """Weights φ(q)·φ(k), each row divided by its sum."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    weights = weights.tril() if causal else weights
    return weights / weights.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize("causal", [True, False])
def test_linear_attention_is_its_definition(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 70, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    found, wanted = linear_attention(q, k, v, causal=causal), quadratic(q, k, v, causal)
    torch.testing.assert_close(found, wanted)
    for x, y in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y)


def test_half_precision_sums_more_than_it_can_hold():
    q = k = torch.full((1, 1, 4096, 4), 8.0, dtype=torch.float16)
    v = torch.full((1, 1, 4096, 4), 2.0, dtype=torch.float16)
    assert linear_attention(q / 64, k, v, kernel="tiled").eq(2).all()


def test_more_keys_than_queries_are_refused_where_it_is_causal():
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match="3 queries and 5 keys with causal=True: expected as many"):
        linear_attention(q, k, k, causal=True)
    assert linear_attention(q, k, k).shape == q.shape


def test_gates_are_those_that_the_module_says():
    torch.manual_seed(0)
    module = GatedDeltaAttention(4, 8, kernel="tiled").double()
    for p in module.parameters():
        torch.nn.init.normal_(p)
    q, k, v = (torch.randn(2, heads, 20, 8, dtype=torch.float64) for heads in (4, 2, 2))
    keys = F.normalize(k, dim=-1).repeat_interleave(2, 1)
    beta = (torch.einsum("bhtd,hd->bht", keys, module.write) * 8**0.5 + module.write_bias[:, None]).sigmoid()
    decay = torch.einsum("bhtd,hd->bht", keys, module.decay) * 8**0.5 + module.decay_bias[:, None]
    wanted, last = recurrent(F.normalize(q, dim=-1), keys, v.repeat_interleave(2, 1), -F.softplus(decay), beta)
    found, state = module(q, k, v, return_state=True)
    torch.testing.assert_close(found, F.rms_norm(wanted, (8,)))
    torch.testing.assert_close(state, last)
    with pytest.raises(ValueError, match="causal=False with a gated delta rule: expected True"):
        module(q, k, v, causal=False)
    with pytest.raises(ValueError, match="with 4 heads of 8: expected as many"):
        module(q[..., :4], k[..., :4], v)


def test_a_head_forgets_in_8_tokens_and_another_one_in_8192():
    decay = -F.softplus(GatedDeltaAttention(11, 4).decay_bias)
    torch.testing.assert_close(-1 / decay, 2.0 ** torch.arange(3, 14))


@pytest.mark.parametrize("kind", [lambda: linear_attention, lambda: GatedDeltaAttention(2, 16)])
def test_a_gpt_learns_and_does_not_see_the_future(kind):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=20, hidden=32, layers=2, heads=2, context_length=64), attention=kind())
    tokens = torch.arange(40).view(1, 40) * 7 % 20
    changed = tokens.clone()
    changed[0, 30] += 1
    apart = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert not apart[:30].any() and apart[30:].all()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(30):
        losses.append(model(tokens[:, :-1], tokens[:, 1:]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] / 3
    assert all((p != before[name]).any() for name, p in model.named_parameters() if "positions" not in name)


def test_a_state_in_place_of_a_cache_writes_what_the_whole_does():
    torch.manual_seed(0)
    module = GatedDeltaAttention(2, 8, kernel="tiled")
    q, k, v = (torch.randn(1, 2, 12, 8) for _ in range(3))
    whole, out, state = module(q, k, v), [], None
    for t in range(12):
        one, state = module(*(x[:, :, t : t + 1] for x in (q, k, v)), state_BHDV=state, return_state=True)
        out.append(one)
    torch.testing.assert_close(torch.cat(out, 2), whole, rtol=1e-4, atol=1e-5)


def qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    return Qwen3NextForCausalLM(Qwen3NextConfig(
        vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16, mlp_only_layers=[0, 1]))


def test_qwen3_next_computes_the_same_by_it(monkeypatch):
    from transformers.models.qwen3_next import modeling_qwen3_next

    model, ids = qwen3_next(), torch.arange(150).view(1, 150) * 7 % 60

    def run():
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    (loss, gradients), calls = run(), []
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule",
                        lambda *args, **options: calls.append(1) or chunk_gated_delta_rule(*args, **options))
    found = run()
    assert calls
    torch.testing.assert_close(found[0], loss, rtol=1e-5, atol=1e-5)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def test_transformers_form_takes_and_returns_a_state_and_names_what_it_does_not_know():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    (*tensors, state), _ = kit.inputs(G=2, H=4, T=130, dtype=torch.float32)
    given = [x.detach().transpose(1, 2) for x in tensors]
    options = {"initial_state": state.detach(), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for x, y in zip(chunk_gated_delta_rule(*given, **options, chunk_size=64),
                    torch_chunk_gated_delta_rule(*given, **options), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    assert chunk_gated_delta_rule(*given)[1] is None
    with pytest.raises(TypeError, match=r"cu_seqlens=\[0, 130\]: what that does here is not known"):
        chunk_gated_delta_rule(*given, cu_seqlens=[0, 130])


def test_layers_of_a_gpt_share_one_module():
    module = GatedDeltaAttention(2, 16)
    model = GPT(GPTConfig(vocab_size=20, hidden=32, layers=3, heads=2, context_length=64), attention=module)
    assert [each.attention for each in model.modules() if isinstance(each, Attention)] == [module] * 3
