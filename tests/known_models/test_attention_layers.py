"""The attention of everyone's blocks, found by what is called: recomputed, and the rest kept."""

import contextlib

import pytest
import torch
from outside.models import GROUPED, SMALL, causal, classifier, masked, seq2seq, text
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torchvision.models import vit_b_16

from refimpl.checkpointing import recompute, selective
from refimpl.known_models.attention_layers import attentions_of

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 128}
T5 = {"vocab_size": 256, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.1,
      "decoder_start_token_id": 0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
HEADS = {"llama": causal("llama", **GROUPED), "llama eager": causal("llama", "eager", **GROUPED),
         "qwen3": causal("qwen3", **GROUPED), "qwen3_moe": causal("qwen3_moe", **GROUPED, **MOE),
         "gpt2": causal("gpt2", **GPT2), "gpt_neox": causal("gpt_neox", **SMALL), "phi": causal("phi", **SMALL),
         "opt": causal("opt", **SMALL, ffn_dim=128, word_embed_proj_dim=64), "bert": masked("bert"),
         "t5": seq2seq("t5", **T5), "gemma3": causal("gemma3_text", **GROUPED), "falcon": causal("falcon", **SMALL),
         "timm": classifier("vit_tiny_patch16_224", drop_rate=0.1)}


def blocks_of(net):
    """All blocks of the lists of equal modules in a model."""
    lists = [m for m in net.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1]
    return [block for each in lists for block in each if type(block).__name__.endswith(("Layer", "Block"))
            and not type(block).__name__.startswith("T5Layer")]


class Step:
    """A forward whose saved storages are noted by where they are saved, and its backward."""

    def __init__(self, net, batch, policy=contextlib.nullcontext):
        self.inside, self.saved, self.inputs, self.held, handles = 0, {False: {}, True: {}}, {}, [], []
        own = {p.untyped_storage().data_ptr() for p in (*net.parameters(), *net.buffers())}
        self.skip = own
        if policy is contextlib.nullcontext:
            for each in [attention for block in blocks_of(net) for attention in attentions_of(block)]:
                handles.append(each.register_forward_pre_hook(self.entered, with_kwargs=True))
                handles.append(each.register_forward_hook(self.left))
        torch.manual_seed(3)
        net.zero_grad()
        with policy():
            with saved_tensors_hooks(self.pack, lambda tensor: tensor):
                out = net(**batch) if isinstance(batch, dict) else net(batch)
        loss = out.loss if hasattr(out, "loss") else out.square().mean()
        loss.backward()
        self.gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        for handle in handles:
            handle.remove()

    def note(self, tensor, where):
        self.held.append(tensor.detach())  # so that no address is given twice
        if tensor.untyped_storage().data_ptr() not in self.skip:
            where[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()

    def pack(self, tensor):
        self.note(tensor, self.saved[self.inside > 0])
        return tensor.detach() if tensor.requires_grad else tensor

    def entered(self, module, args, kwargs):
        self.inside += 1
        for tensor in filter(torch.is_tensor, torch.utils._pytree.tree_leaves((args, kwargs))):
            self.note(tensor, self.inputs)

    def left(self, *_):
        self.inside -= 1

    @property
    def whole(self):
        """Bytes kept without recomputation."""
        return sum({**self.saved[False], **self.saved[True]}.values())

    @property
    def without_attention(self):
        """Bytes kept if what attention saves is recomputed from its inputs."""
        return sum({**self.saved[False], **self.inputs}.values())


def batch_of(name, net):
    if name == "timm":
        return torch.randn(2, 3, 224, 224)
    batch = text(2, 64)()
    return batch | {"use_cache": False} if name != "bert" else batch


@pytest.mark.parametrize("name", HEADS)
def test_the_attention_of_others_blocks_is_recomputed_and_the_rest_is_kept(name):
    torch.manual_seed(0)
    net = HEADS[name]().train()
    batch = batch_of(name, net)
    plain, less = Step(net, batch), Step(net, batch, lambda: selective(blocks_of(net), "attention"))
    assert all(map(torch.equal, plain.gradients, less.gradients)) and len(plain.gradients) > 10
    assert sum(less.saved[False].values()) == plain.without_attention < 0.9 * plain.whole
    nothing = Step(net, batch, lambda: recompute([]))
    assert sum(nothing.saved[False].values()) == plain.whole, "a policy that recomputes nothing"


def test_one_that_pytorch_s_attention_is_inside_of():
    block = vit_b_16(num_classes=10).encoder.layers[0]
    assert attentions_of(block) == [block.self_attention]
    with selective([block], "attention") as applied:
        assert applied.modules == [block.self_attention]


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.Linear(4, 4)

    def forward(self, x):
        return self.attention(x).softmax(-1)


@pytest.mark.parametrize("block", [
    causal("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2), Router,
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))])
def test_a_block_without_attention_is_refused_by_name(block):
    made = block()
    made = blocks_of(made)[0] if hasattr(made, "config") else made
    with pytest.raises(ValueError, match=f"a {type(made).__name__} has no attention: .* use recompute"):
        selective([made], "attention")
    assert not any("forward" in vars(each) for each in made.modules())
