"""Rehearsals of scripts of the kinds that people run: each takes what its states are by hand, or is refused."""

import pytest

from refimpl.rehearse import rehearse

LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
for batch in range(4):
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
NANOGPT = """
import numpy, torch, torch.nn as nn
from contextlib import nullcontext
numpy.arange(9000, dtype=numpy.uint16).tofile("train.bin")
data = numpy.memmap("train.bin", dtype=numpy.uint16, mode="r")
def get_batch():
    places = torch.randint(len(data) - 65, (4,))
    x, y = (torch.stack([torch.from_numpy(data[i + at : i + at + 64].astype(numpy.int64)) for i in places])
            for at in (0, 1))
    return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(9000, 256), nn.Linear(256, 9000, bias=False)
        self.block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.head.weight = self.tokens.weight
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.block(self.tokens(x))).flatten(0, 1), y.flatten())
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
scaler = torch.amp.GradScaler("cuda")
for step in range(4):
    for micro in range(2):
        with torch.autocast("cuda", torch.float16):
            loss = model(*get_batch()) / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
"""
GPT2 = """
import torch, transformers
config = transformers.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=9000, bos_token_id=1, eos_token_id=1)
model = transformers.GPT2LMHeadModel(config)
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)}] * 16
"""
TRAINER = GPT2 + """
arguments = transformers.TrainingArguments("out", per_device_train_batch_size=2, max_steps=4, report_to=[], bf16=True,
                                           logging_steps=1, save_strategy="no", disable_tqdm=True)
transformers.Trainer(model, arguments, train_dataset=rows).train()
"""
ACCELERATE = GPT2 + """
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()),
                                               torch.utils.data.DataLoader(rows, batch_size=2))
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
"""
LORA = GPT2 + """
import peft
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True)).cuda()
loss_of = lambda model: model(**{name: x[None].cuda() for name, x in rows[0].items()}).loss
""" + LOOP
RECOMPUTED = GPT2 + """
model = model.cuda().train()
model.gradient_checkpointing_enable()
loss_of = lambda model: model(**{name: x[None].cuda() for name, x in rows[0].items()}).loss
""" + LOOP
TIMM = """
import timm, torch
model = timm.create_model("resnet18", num_classes=10).cuda().to(memory_format=torch.channels_last)
images = torch.randn(4, 3, 64, 64).cuda()
loss_of = lambda model: torch.nn.functional.cross_entropy(model(images), torch.zeros(4, dtype=torch.long).cuda())
""" + LOOP
GAN = """
import torch
from torch import nn
maker, judge = nn.Linear(64, 4096).cuda(), nn.Linear(4096, 1).cuda()
optimizers = [torch.optim.Adam(each.parameters()) for each in (maker, judge)]
for step in range(4):
    false = maker(torch.randn(32, 64, device="cuda"))
    true = torch.randn_like(false)
    worse, better = judge(false.detach()) - judge(true), lambda: -judge(false)
    for optimizer in reversed(optimizers):
        nn.functional.softplus(better() if optimizer is optimizers[0] else worse).mean().backward()
        optimizer.step()
        for each in optimizers:
            each.zero_grad()
"""
POLICY = """
import torch
model = torch.nn.Linear(4, 2).cuda()
optimizer = torch.optim.Adam(model.parameters())
for episode in range(3):
    state, told = torch.zeros(4, device="cuda"), []
    while state[0].item() < 1:  # until it has moved far enough
        chances = model(state).log_softmax(-1)
        action = torch.multinomial(chances.exp(), 1)
        told.append(chances.gather(0, action))
        state = state + 0.25 + 0.1 * action
    loss = -torch.cat(told).sum()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
FSDP2 = """
import os, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
loss_of = lambda model: model(torch.randn(8, 1024, device="cuda")).sum()
""" + LOOP
DDP = """
import torch, torch.distributed as dist, torch.multiprocessing
def train(rank, words):
    dist.init_process_group()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    print(words, rank)
torch.multiprocessing.spawn(train, args=("rank",), nprocs=4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024, bias=False).cuda())
loss_of = lambda model: model(torch.randn(8, 1024, device="cuda")).sum()
""" + LOOP
EXPERTS = """
import torch
experts, router = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4)).cuda(), torch.nn.Linear(64, 4).cuda()
model = torch.nn.ModuleList([experts, router])
def loss_of(model):
    x = torch.randn(32, 64, device="cuda")
    best = router(x).argmax(-1)
    return sum(expert(x[torch.where(best == i)]).sum() for i, expert in enumerate(experts))
""" + LOOP
GPT2_PARAMETERS = 9000 * 256 + 1024 * 256 + 2 * (12 * 256**2 + 13 * 256) + 512  # tokens, positions, two blocks, a norm
RESNET18 = 11_181_642  # parameters, with ten classes
# kind → (script, options, bytes between two steps: of parameters and Adam's moments; or the words of a refusal)
SCRIPTS = {
    "nanoGPT": (NANOGPT, {}, 12 * (9000 * 256 + 12 * 256**2)),
    "Trainer": (TRAINER, {}, 12 * GPT2_PARAMETERS),
    "accelerate": (ACCELERATE, {}, 12 * GPT2_PARAMETERS),
    "LoRA": (LORA, {}, 4 * GPT2_PARAMETERS + 12 * 2 * 8 * (256 + 768)),
    "recomputed": (RECOMPUTED, {}, 12 * GPT2_PARAMETERS),
    "timm": (TIMM, {}, 12 * RESNET18),
    "GAN": (GAN, {}, 12 * (65 * 4096 + 4097)),
    "policy": (POLICY, {"numbers": True}, 12 * 10),
    "policy without numbers": (POLICY, {}, "numbers were read since the last step"),
    "FSDP2": (FSDP2, {"world": 8}, 12 * 4 * 1024**2 // 8),
    "DDP": (DDP, {"world": 8, "rank": 5}, 12 * 1024**2),
    "experts": (EXPERTS, {"numbers": True}, 12 * (4 * 65 * 64 + 65 * 4)),
    "experts without numbers": (EXPERTS, {}, "nonzero of a tensor on a device that computes nothing"),
}


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_kind_of_script(kind, tmp_path, monkeypatch):
    text, options, expected = SCRIPTS[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    found = rehearse("train.py", on="t4", **options)
    if isinstance(expected, str):
        assert found["status"] == 1 and expected in found["said"]
        return
    assert found["status"] == 0 and found["made"] == 2, found["said"]
    assert expected <= found["steps"][1]["now"] <= 1.2 * expected + 90 * 2**20  # cuBLAS' workspaces, gradients, a batch
