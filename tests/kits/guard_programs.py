"""Programs that run out of memory, as users report them: `python guard_programs.py NAME FOLDER [cured]`.

Each has a guard around it whose limit it passes; cured it does not. They run on a GPU, real or not, or on a CPU.
"""

import copy
import io
import os
import sys

import psutil
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from refimpl import memory

MIB = 2**20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, WIDTH = 1000, 256


def limit(mebibytes):
    """So many bytes beyond what there is: on a CPU a limit counts the whole process."""
    return mebibytes * MIB + (psutil.Process().memory_info().rss if DEVICE == "cpu" else 0)


def blocks(count=4, width=WIDTH):
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *(nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)),
        nn.Linear(width, VOCABULARY)).to(DEVICE)


def batch(rows=4, length=64):
    return torch.randint(0, VOCABULARY, (rows, length), device=DEVICE)


def loss_of(model, tokens):
    return cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def step(model, optimizer, tokens):
    loss = loss_of(model, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def guarded(mebibytes, on_cuda=None):
    """A guard, behind a step that loads what PyTorch loads when it is first asked: libraries, threads."""
    small = blocks(1, 8)
    step(small, torch.optim.AdamW(small.parameters()), batch(1, 8))
    return memory.guard(FOLDER, limit(on_cuda if on_cuda and DEVICE == "cuda" else mebibytes))


def losses(cured):
    with guarded(400):
        model, kept = blocks(), []
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(60):
            step(model, optimizer, batch())
            loss = loss_of(model, batch())
            kept.append(loss.item() if cured else loss)


def hook(cured):
    with guarded(150):
        model, outputs = nn.Sequential(nn.Embedding(VOCABULARY, 2048), nn.Linear(2048, 16),
                                       nn.Linear(16, VOCABULARY)).to(DEVICE), []
        optimizer = torch.optim.AdamW(model.parameters())
        model[0].register_forward_hook(lambda *given: outputs.append(given[-1].mean().item() if cured else given[-1]))
        for _ in range(60):
            step(model, optimizer, batch())


def predictions(cured):
    with guarded(230):
        model = blocks(1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(model, optimizer, batch())
        evaluate(model, cured)


def evaluate(model, cured):
    predicted = []
    with torch.no_grad():
        for _ in range(70):
            logits = model(batch(16, 64))
            predicted.append(logits.argmax(-1) if cured else logits)


def longest(cured):
    with guarded(200, 240):
        model = blocks(2)
        optimizer = torch.optim.AdamW(model.parameters())
        for length in (64, 96, 128, 160, 192, 1024):
            tokens = batch(8, length)
            for rows in tokens.split(1 if cured and length > 200 else 8):
                (loss_of(model, rows) * len(rows) / len(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()


def second_model(cured):
    with guarded(310, 350):
        teacher, batches = blocks(6, 1024), [batch(1, 32) for _ in range(3)]
        with torch.no_grad():
            answers = [teacher(tokens).softmax(-1) for tokens in batches if cured]
        if cured:
            del teacher
        model = blocks(8, 512)
        optimizer = torch.optim.SGD(model.parameters())
        for i, tokens in enumerate(batches):
            with torch.no_grad():
                wanted = answers[i] if cured else teacher(tokens).softmax(-1)
            cross_entropy(model(tokens).flatten(0, 1), wanted.flatten(0, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()


def save(cured):
    with guarded(290):
        model = blocks(8, 512)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            step(model, optimizer, batch(1, 8))
        state = model.state_dict()
        if cured:
            for tensor in state.values():
                torch.save(tensor, io.BytesIO())
        else:
            copies = [copy.deepcopy(state) for _ in range(4)]
            torch.save(copies, io.BytesIO())


def foreach(cured):
    with guarded(725, 840):
        model = blocks(8, 768)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=not cured)
        for _ in range(3):
            step(model, optimizer, batch(1, 8))


def data_set(cured):
    with guarded(285, 325):
        data = torch.zeros(1 if cured else 64, 1024, 1024, device=DEVICE)
        model = blocks(1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            step(model, optimizer, data[0, :8, :128].long())


def recomputation(cured):
    from transformers import LlamaConfig, LlamaForCausalLM

    with guarded(220):
        config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=512, num_hidden_layers=12,
                             num_attention_heads=4, use_cache=False)
        model = LlamaForCausalLM(config).to(DEVICE)
        model.gradient_checkpointing_enable()
        model.train(cured)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            tokens = batch(4, 256)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def fragmentation(cured):
    """Cured by the setting that the report names, in the environment: of some, which PyTorch itself refuses, too."""
    with guarded(1000):
        model = blocks()
        optimizer = torch.optim.AdamW(model.parameters())
        whole = torch.empty(600 * MIB, dtype=torch.uint8, device=DEVICE)
        del whole
        pieces = [torch.empty(50 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(12)]
        del pieces[::2]
        step(model, optimizer, batch())
        torch.empty(420 * MIB, dtype=torch.uint8, device=DEVICE)
        step(model, optimizer, batch())


def other_process(cured):
    """Bytes of the device that PyTorch's allocator does not have."""
    import ctypes

    with memory.guard(FOLDER):
        model = blocks()
        optimizer = torch.optim.AdamW(model.parameters())
        free, _ = torch.cuda.mem_get_info()
        taken, address = ctypes.c_size_t(0 if cured else free - 64 * MIB), ctypes.c_void_p()
        assert cured or not ctypes.CDLL("libcudart.so.13").cudaMalloc(ctypes.byref(address), taken)
        for _ in range(3):
            step(model, optimizer, batch(8, 256))


if __name__ == "__main__":
    name, FOLDER, *rest = sys.argv[1:]
    torch.manual_seed(0)
    globals()[name](cured=bool(rest))
    print("done", os.getpid())
