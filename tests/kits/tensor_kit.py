"""What tests of tensor and sequence parallelism share: whole models, tiny, and how each is called and compared."""

import copy

import torch
from families import GEMMA
from outside.models import GROUPED, causal
from torch import nn

from refimpl.model import GPT, GPTConfig
from refimpl.pipeline.stages import LayerOfAnotherStage
from refimpl.tensor import sequence_parallel, tensor_parallel

V, ROWS, T = 61, 3, 7  # a vocabulary and a number of tokens that no number of ranks divides
SIZES = {"vocab_size": V, "context_length": 16, "layers": 2, "hidden": 32, "heads": 4}
GPTS = {"gpt": GPTConfig(**SIZES), "grouped gpt": GPTConfig(**SIZES, **GEMMA, mlp_hidden=54, qkv_bias=True),
        "parallel gpt": GPTConfig(**SIZES, parallel_residual=True, positions="rotary", tied=False)}
OTHERS = {"gpt2": causal("gpt2", vocab_size=V, n_embd=32, n_head=4, n_layer=2, n_positions=16, resid_pdrop=0.0,
                         embd_pdrop=0.0, attn_pdrop=0.0),
          "llama": causal("llama", **GROUPED | {"vocab_size": V}),
          "tied llama": causal("llama", **GROUPED, tie_word_embeddings=True), "qwen2": causal("qwen2", **GROUPED),
          "mistral": causal("mistral", **GROUPED), "qwen3": causal("qwen3", **GROUPED)}
SPLITS = {"tensor": tensor_parallel, "sequence": sequence_parallel}


def whole(name, dtype=torch.float64, seed=0):
    """Return a model that nobody has split, its biases and norms not 0 and 1, as they begin."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = GPT(GPTS[name], dtype=dtype) if name in GPTS else with_exact_norms(OTHERS[name]().to(dtype))
    if name in GPTS and dtype == torch.float64:
        model.loss = loss_in_fp64
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.1 * torch.randn(p.shape).to(dtype)
    return model


def loss_in_fp64(head, x, targets, reduction):
    """Score as a GPT does, which scores in fp32, whatever it is built in; the split loss keeps fp64."""
    return nn.functional.cross_entropy(head(x).flatten(0, 1), targets.flatten(), reduction=reduction)


def with_exact_norms(model):
    """Replace RMS norms of transformers, which compute in fp32 whatever they are built in, by torch's."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            model.set_submodule(name, nn.RMSNorm(module.weight.shape, eps=1e-6, dtype=module.weight.dtype))
    return model


def tokens_of(model, rows=ROWS, length=T, seed=0):
    return torch.randint(model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def twins(name, dtype=torch.float64):
    """Return a model that is to be split, one like it, and tokens."""
    model = whole(name, dtype)
    return model, copy.deepcopy(model), tokens_of(model)


def logits_of(model, tokens):
    return model(tokens) if isinstance(model, GPT) else model(input_ids=tokens).logits


def loss_of(model, tokens):
    return model(tokens, tokens.roll(-1, 1)) if isinstance(model, GPT) else model(input_ids=tokens, labels=tokens).loss


def block_of(value, spec):
    """Return a rank's block of a whole tensor."""
    for dim, (offset, length) in enumerate(zip(spec.offsets, spec.lengths, strict=True)):
        value = value.narrow(dim, offset, length)
    return value


def farthest(parameters, reference):
    """Return the largest difference of gradients of a split model from those of the unsplit one."""
    wanted = {key: p.grad for key, p in reference.named_parameters()}
    return max((p.grad - block_of(wanted[p.shard_spec.name], p.shard_spec)).abs().max().item() for p in parameters)


def distances(comm, name, split, dtype):
    """Return the largest differences of logits, loss and gradients from the unsplit model, relative to their size."""
    model, reference, tokens = twins(name, dtype)
    SPLITS[split](model, comm)
    found = {}
    for each in (reference, model):
        logits, loss = logits_of(each, tokens), loss_of(each, tokens)
        (loss + logits.square().mean()).backward()
        found.setdefault("logits", []).append(logits.detach()), found.setdefault("loss", []).append(loss.detach())
    theirs = {key: p.grad for key, p in reference.named_parameters()}
    for key, p in model.named_parameters():
        scale = theirs[p.shard_spec.name].abs().max()
        found[key] = [block_of(theirs[p.shard_spec.name], p.shard_spec) / scale, p.grad / scale]
    return {key: ((a - b).abs().max() / max(1, a.abs().max())).item() for key, (a, b) in found.items()}


def bodies(model):
    """Return the blocks of a model, of a stage those that are there."""
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    here = [block for block in blocks if not isinstance(block, LayerOfAnotherStage)]
    return here if len(here) < len(blocks) else blocks
