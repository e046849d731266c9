"""Stage 3 beside FSDP2 on twelve models of transformers and timm: peaks of a rank's step by PyTorch's own allocator.

    python -m benchmarks.zero_peaks [--record] [name …]

Each reading is of a process of its own, on a device without kernels, in a group whose other ranks are not there: the
third step's peak of requested bytes, and of reserved ones. Two ways, each with fused AdamW: `autocast`, of fp32 weights
in bf16; `masters`, of bf16 weights with fp32 masters beside FSDP2's mixed precision. FSDP2 is read with its blocks and
the root as units, and with all units of ours; the better one counts. `--record` writes
data/measurements/phantom/zero_peaks.json.
"""

import functools
import json
import subprocess
import sys
from collections import Counter

import torch

from refimpl import phantom
from refimpl.comm import launch
from refimpl.phantom import group
from refimpl.zero import Zero3
from refimpl.zero.units import blocks, default_units

from . import __main__, record

WAYS, PEERS = ("autocast", "masters"), ("blocks", "units")
PROGRAM = """
import json, sys
from refimpl import phantom
phantom.start(memory=2**39)  # before torch
from benchmarks import zero_peaks
print(json.dumps(zero_peaks.of_one_rank(*sys.argv[1:])))
"""


def causal(kind, rows, length, ranks=4, **config):
    """Return how a causal model of transformers is made: (ranks, function of no arguments → (model, batch))."""
    def make():
        import transformers

        settings = transformers.AutoConfig.for_model(kind, use_cache=False, **config)
        model = transformers.AutoModelForCausalLM.from_config(settings)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        return model, {"input_ids": tokens, "labels": tokens}

    return ranks, make


def pair(kind, rows, length, **config):
    """Return how an encoder and a decoder of transformers are made."""
    def make():
        import transformers

        model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.AutoConfig.for_model(
            kind, use_cache=False, **config))
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        return model, {"input_ids": tokens, "labels": tokens}

    return 4, make


def images(name, rows):
    """Return how a model of timm is made."""
    def make():
        import timm

        model = timm.create_model(name)
        return model, {"x": torch.zeros(rows, *model.default_cfg["input_size"])}

    return 4, make


LLAMA = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16,
         "vocab_size": 32000}
MODELS = {
    "Llama 1.3B": causal("llama", 1, 2048, **LLAMA),
    "GPT-2 124M": causal("gpt2", 4, 1024),
    "GPT-J 254M": causal("gptj", 1, 512, n_embd=1024, n_layer=12, n_head=16, rotary_dim=64, vocab_size=50400,
                         attn_implementation="eager"),
    "Qwen3-MoE 288M": causal("qwen3_moe", 1, 1024, hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
                             num_key_value_heads=4, head_dim=64, num_experts=16, num_experts_per_tok=4,
                             moe_intermediate_size=512, vocab_size=151936),
    "Gemma 3 270M": causal("gemma3_text", 1, 1024, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
                           num_attention_heads=4, num_key_value_heads=1, head_dim=256, vocab_size=262144),
    "OPT 331M": causal("opt", 1, 1024, hidden_size=1024, ffn_dim=4096, num_hidden_layers=24, num_attention_heads=16,
                       word_embed_proj_dim=512, do_layer_norm_before=False),
    "Phi 1.4B": causal("phi", 1, 1024, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
                       num_attention_heads=32, vocab_size=51200),
    "BART 139M": pair("bart", 4, 512, d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072,
                      decoder_ffn_dim=3072, encoder_attention_heads=12, decoder_attention_heads=12),
    "T5 223M": pair("t5", 2, 512, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12,
                    decoder_start_token_id=0),
    "ViT-B/16": images("vit_base_patch16_224", 32),
    "EVA-02-B": images("eva02_base_patch14_224", 16),
    "Llama-2-7B": causal("llama", 1, 4096, ranks=8, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                         num_attention_heads=32, vocab_size=32000, max_position_embeddings=4096)}


def main(arguments):
    """Read the models, print the table, and with `--record` keep it."""
    rows = [row for name in [each for each in arguments if each in MODELS] or MODELS for row in rows_of(name)]
    print(__main__.table(rows))
    if "--record" in arguments:
        settings = {"rank": 0, "of": phantom.words(torch.__version__), "read": "the third step's peak of requested "
                    "bytes", "optimizer": "fused AdamW", "ranks": {name: ranks for name, (ranks, _) in MODELS.items()}}
        reading = record.describe("zero_peaks", settings, rows, "cpu")
        reading["device"] |= {"slug": "phantom", "name": "a device without kernels"}
        print(f"written to {record.write(reading)}")


def rows_of(name):
    """Yield the rows of a model, one for each way."""
    for way in WAYS:
        ours, *theirs = (peaks(name, way, engine) for engine in ("ours", *PEERS))
        best = min(theirs, key=lambda each: each["requested"])
        yield record.row(f"peak of a step, {name}, {way}", "FSDP2", "B", ours["requested"], best["requested"],
                         ours=ours, theirs=dict(zip(PEERS, theirs, strict=True)))


def peaks(*which):
    """Return what `read` does of a model, a way and an engine, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *which], capture_output=True, text=True,
                          env=phantom.environment_without())
    if done.returncode:
        raise RuntimeError(f"{', '.join(which)}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def of_one_rank(name, way, engine):
    """Read an engine as rank 0, in this process, whose device is one without kernels."""
    ranks, make = MODELS[name]
    group.pretend(ranks)
    return launch(read, ranks, make, way, engine, device="cuda", timeout=3600)[0]


def read(comm, make, way, engine):
    """Return {"requested", "reserved"}: the peaks of the third step in bytes."""
    with torch.device(comm.device):
        model, batch = make()
    step = {"ours": ours}.get(engine, functools.partial(theirs, engine))(comm, model, way)
    for number in range(3):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        step({name: x.to(comm.device, torch.bfloat16 if x.is_floating_point() and way == "masters" else x.dtype)
              for name, x in batch.items()})
    found = torch.cuda.memory_stats()
    return {"requested": found["requested_bytes.all.peak"], "reserved": found["reserved_bytes.all.peak"]}


def loss_of(output):
    """Return a model's loss, or one that a model of images may have."""
    return output.loss if hasattr(output, "loss") else output.float().logsumexp(-1).mean()


def ours(comm, model, way):
    """Return a function that makes a step of a batch with stage 3."""
    engine = Zero3(model.bfloat16() if way == "masters" else model, comm, functools.partial(
        torch.optim.AdamW, lr=1e-3, fused=True))

    def step(batch):
        with torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
            loss = loss_of(engine(**batch))
        engine.backward(loss)
        engine.step()

    return step


def theirs(units, comm, model, way):
    """Return a function that makes a step of a batch with FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if way == "masters" else {}
    holders = Counter(p for module in model.modules() for p in module._parameters.values())
    for module in blocks(model) if units == "blocks" else default_units(model):
        if module is not model and all(holders[p] == 1 for p in module.parameters()):  # what is tied is the root's
            fully_shard(module, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(batch):
        with torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
            loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(sys.argv[1:])
