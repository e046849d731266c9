"""What a rank runs to train a model that others wrote, by DDP and by each engine of ZeRO."""

import functools

import torch
from outside_programs import DEEPSEEK, EXPERTS, GPT2, LORA, PICTURE, T5, WHISPER
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zero_kit import ENGINES, FAST

from outside.loops import seed
from outside.models import GROUPED, SMALL, adapted, causal, classify, images, masked, seq2seq, speech, text, vision

STEPS = 3


class Expert(nn.Module):
    """Two experts; one that no token chooses is not called."""
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 2), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        weights, y = self.router(x).softmax(-1), torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = weights.argmax(-1) == i
            if chosen.any():
                y = y + torch.where(chosen[:, None], expert(x) * weights[:, i : i + 1], 0.0)
        return x + y.tanh()


class Experts(nn.Module):
    """Four blocks of experts: ranks with other tokens call other parts of each."""
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}


MODELS = {
    "experts": (Experts, lambda: {"x": torch.randn(2, 16) * 2}),
    "gpt2, recomputed": (causal("gpt2", recompute=False, **GPT2), text(2, 16)),
    "gpt2, recomputed, reentrant": (causal("gpt2", recompute=True, **GPT2), text(2, 16)),
    "llama, LoRA": (adapted(causal("llama", **GROUPED), "LoraConfig", **LORA), text(2, 16)),
    "qwen2, tied": (causal("qwen2", tie_word_embeddings=True, **GROUPED), text(2, 16)),
    "opt": (causal("opt", ffn_dim=128, word_embed_proj_dim=64, **SMALL), text(2, 16)),
    "albert, one layer several times": (masked("albert", embedding_size=32), text(2, 16)),
    "t5": (seq2seq("t5", **T5), text(2, 16)), "whisper": (WHISPER, speech(frames=128)),
    "mixtral": (causal("mixtral", experts_implementation="eager", **EXPERTS), text(1, 8)),
    "switch transformer": (seq2seq("switch_transformers", num_experts=4, expert_capacity=16, **T5), text(1, 8)),
    "deepseek-v3": (causal("deepseek_v3", **DEEPSEEK), text(1, 8)), "vit": (classify("vit", **PICTURE), images()),
    "resnet": (vision("resnet10t"), images())}


def losses_of(comm, name, train):
    """The losses of three steps; each rank has batches, and random numbers, of its own."""
    build, batch = MODELS[name]
    torch.set_num_threads(1)
    seed(0)
    forward, backward, step = train(build(), comm)
    losses = []
    for number in range(STEPS):
        seed(100 * number + comm.rank)
        loss = forward(**batch())["loss"]
        backward(loss)
        step()
        losses.append(loss.item())
    return losses


def with_ddp(model, comm, reentrant=False):
    model = DistributedDataParallel(model, broadcast_buffers=False, find_unused_parameters=not reentrant)
    optimizer = FAST(p for p in model.parameters() if p.requires_grad)
    return model, torch.Tensor.backward, lambda: (optimizer.step(), optimizer.zero_grad())


def with_engine(make, model, comm):
    engine = make(model, comm, FAST, bucket_bytes=20_000)
    return engine, engine.backward, engine.step


def trained(comm, name):
    ways = {"DDP": functools.partial(with_ddp, reentrant="reentrant" in name),
            **{make.__name__: functools.partial(with_engine, make) for make in ENGINES}}
    return {way: losses_of(comm, name, train) for way, train in ways.items()}


def dropping_layers(comm):
    """Each rank drops layers of its own, as OPT's LayerDrop does."""
    engine = ENGINES[3](causal("opt", ffn_dim=128, word_embed_proj_dim=64, layerdrop=0.5, **SMALL)(), comm, FAST)
    for number in range(6):
        seed(100 * number + comm.rank)
        engine.backward(engine(**text(2, 16)())["loss"])
        engine.step()
