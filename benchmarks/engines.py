"""Our engines beside PyTorch's at real sizes, read by PyTorch's own allocator: one rank of several.

    python -m benchmarks.engines [--record]                           one of eight ranks of a model of 7B
    python -m benchmarks.engines zero_peaks [--record] [model …]      stage 3 on twelve models of transformers and timm

Each engine is made and steps in a process of its own, on a device without kernels and in a group whose other ranks are
not there (phantom/group.py). `engines`: those of the benches `zero`, `tensor_parallel`, `pipeline`, on their models.
`zero_peaks`: stage 3 beside FSDP2, with fused AdamW, two ways: `autocast`, of fp32 weights in bf16; `masters`, of bf16
weights with fp32 masters beside FSDP2's mixed precision. FSDP2 is read with its blocks and the root as units, and with
all units of ours; the better one counts. `--record` writes data/measurements/phantom/.
"""

import functools
import json
import subprocess
import sys
import time
from collections import Counter

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from refimpl import phantom
from refimpl.comm import launch
from refimpl.model import GPTConfig
from refimpl.phantom import group
from refimpl.zero import Zero3
from refimpl.zero.units import blocks, default_units

from . import __main__, pipeline, record, tensor_parallel, zero

WORLD = 8
SEVEN = {"vocabulary": 32000, "context": 512, "layers": 32, "hidden": 4096, "heads": 32}
PIPELINES = ("gpipe", "1f1b")  # where rank 0 receives gradients alone
PAIRS = [*(("zero", *pair) for pair in zero.PAIRS), *(("tensor_parallel", *pair) for pair in tensor_parallel.PAIRS),
         *(("pipeline", f"ours {name}", f"theirs {name}") for name in PIPELINES)]  # bench, ours, the peer
WAYS, PEERS = ("autocast", "masters"), ("blocks", "units")
STEPS = 2  # before the one that is read
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
PROGRAM = """
import json, sys
from refimpl import phantom
phantom.start(memory=2**39)  # before torch, which the benches import
from benchmarks import engines
print(json.dumps(engines.of_one_rank(*sys.argv[1:])))
"""


def main(arguments):
    """Read every pair or model, print the table, and with `--record` keep it."""
    words = phantom.words(torch.__version__)
    if "zero_peaks" in arguments:
        chosen = [each for each in arguments if each in MODELS] or MODELS
        name, rows = "zero_peaks", [row for each in chosen for row in rows_of_model(each)]
        settings = {"rank": 0, "of": words, "read": "the third step's peak of requested bytes",
                    "optimizer": "fused AdamW", "ranks": {name: ranks for name, (ranks, _) in MODELS.items()}}
    else:
        name, rows = "engines", list(rows_of(PAIRS))
        settings = {"ranks": WORLD, "rank": 0, "model": SEVEN, "rows of a rank": 1, "dtype": "fp32", "of": words,
                    "read": "torch.cuda.max_memory_allocated of a step after two"}
    print(__main__.table(rows))
    if "--record" in arguments:
        reading = record.describe(name, settings, rows, "cpu")
        reading["device"] |= {"slug": "phantom", "name": "a device without kernels"}
        print(f"written to {record.write(reading)}")


def rows_of(pairs):
    """Yield the rows of some pairs: peaks that PyTorch's allocator counted as allocated, and what it reserved."""
    found = {(bench, name): peaks(bench, name) for bench, *names in pairs for name in names}
    for bench, *names in pairs:
        ours, theirs = (found[bench, name] for name in names)
        yield record.row(f"peak of a step, {names[0]}", names[1], "B", ours["allocated"], theirs["allocated"],
                         ours=ours, theirs=theirs)


def rows_of_model(name):
    """Yield the rows of a model of `zero_peaks`, one for each way."""
    for way in WAYS:
        ours, *theirs = (peaks("zero_peaks", name, way, engine) for engine in ("ours", *PEERS))
        best = min(theirs, key=lambda each: each["requested"])
        yield record.row(f"peak of a step, {name}, {way}", "FSDP2", "B", ours["requested"], best["requested"],
                         ours=ours, theirs=dict(zip(PEERS, theirs, strict=True)))


def peaks(*which):
    """Return what `of_one_rank` does, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *which], capture_output=True, text=True,
                          env=phantom.environment_without())
    if done.returncode:
        raise RuntimeError(f"{', '.join(which)}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def of_one_rank(bench, name, *how):
    """Read an engine as rank 0, in this process, whose device is one without kernels."""
    ranks, make = (WORLD, made) if bench != "zero_peaks" else (MODELS[name][0], made_of_model)
    group.pretend(ranks)
    return launch(read, ranks, make, bench, name, *how, device="cuda", timeout=3600)[0]


def read(comm, make, bench, *which):
    """Return the peaks of a step in bytes; of `engines` also the host's seconds."""
    step = make(comm, bench, *which)
    for _ in range(STEPS):
        step()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step()
    seconds, found = time.perf_counter() - began, torch.cuda.memory_stats()
    peak = {kind: found[f"{kind}_bytes.all.peak"] for kind in ("allocated", "requested", "reserved")}
    if bench == "zero_peaks":
        return {kind: peak[kind] for kind in ("requested", "reserved")}
    return {"allocated": peak["allocated"], "reserved": peak["reserved"], "seconds": seconds,
            "torch": torch.__version__}


# --- engines of other benches ----------------------------------------------------------------------------------------


def made(comm, bench, name):
    """Return a step of an engine of a bench."""
    with torch.device(comm.device):
        engine, tokens = engine_of(comm, bench, name)
    return functools.partial(engine.step, tokens)


def engine_of(comm, bench, name):
    """Return (engine, tokens)."""
    rows = 1 if bench == "tensor_parallel" else pipeline.MICRO_BATCHES
    tokens = torch.zeros(rows, SEVEN["context"], dtype=torch.int64)
    if bench == "zero":
        sizes = {"vocab_size": SEVEN["vocabulary"], "context_length": SEVEN["context"]}
        return zero.made(name, comm, GPTConfig(**sizes, **{key: SEVEN[key] for key in ("layers", "hidden", "heads")}))
    if bench == "tensor_parallel":
        return tensor_parallel.TRAINERS[name](tensor_parallel.Decoder(**SEVEN), comm), tokens
    # Since torch 2.12 the last rank says whether all stages were told. It is not there.
    pipeline.pipelining.PipelineStage._warmup_backward_result = lambda stage, **results: torch.ones(1)
    kind, _, schedule = name.partition(" ")
    return {"ours": pipeline.Ours, "theirs": Told}[kind](schedule, comm, SEVEN), tokens


class Told(pipeline.Theirs):
    """torch's stages, which would ask ranks that are not there for the shapes of tensors."""

    def known(self, stage, sizes):
        x = torch.empty(1, sizes["context"], sizes["hidden"], device="meta")
        gradients = {"output_grads": x} if torch.__version__ >= (2, 12) else {}
        tokens = torch.empty(1, sizes["context"], dtype=torch.int64, device="meta")
        return {"input_args": tokens, "output_args": x, **gradients}


# --- stage 3 on models of others -------------------------------------------------------------------------------------


def text(kind, rows, length, ranks=4, auto="AutoModelForCausalLM", **config):
    """Return how a model of transformers is made: (ranks, function of no arguments → (model, batch))."""
    def make():
        import transformers

        settings = transformers.AutoConfig.for_model(kind, use_cache=False, **config)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        return getattr(transformers, auto).from_config(settings), {"input_ids": tokens, "labels": tokens}

    return ranks, make


def images(name, rows):
    """Return how a model of timm is made."""
    def make():
        import timm

        model = timm.create_model(name)
        return model, {"x": torch.zeros(rows, *model.default_cfg["input_size"])}

    return 4, make


pair = functools.partial(text, auto="AutoModelForSeq2SeqLM")  # an encoder and a decoder
LLAMA = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "num_attention_heads": 16,
         "vocab_size": 32000}
MODELS = {
    "Llama 1.3B": text("llama", 1, 2048, **LLAMA),
    "GPT-2 124M": text("gpt2", 4, 1024),
    "GPT-J 254M": text("gptj", 1, 512, n_embd=1024, n_layer=12, n_head=16, rotary_dim=64, vocab_size=50400,
                       attn_implementation="eager"),
    "Qwen3-MoE 288M": text("qwen3_moe", 1, 1024, hidden_size=512, num_hidden_layers=8, num_attention_heads=8,
                           num_key_value_heads=4, head_dim=64, num_experts=16, num_experts_per_tok=4,
                           moe_intermediate_size=512, vocab_size=151936),
    "Gemma 3 270M": text("gemma3_text", 1, 1024, hidden_size=640, intermediate_size=2048, num_hidden_layers=18,
                         num_attention_heads=4, num_key_value_heads=1, head_dim=256, vocab_size=262144),
    "OPT 331M": text("opt", 1, 1024, hidden_size=1024, ffn_dim=4096, num_hidden_layers=24, num_attention_heads=16,
                     word_embed_proj_dim=512, do_layer_norm_before=False),
    "Phi 1.4B": text("phi", 1, 1024, hidden_size=2048, intermediate_size=8192, num_hidden_layers=24,
                     num_attention_heads=32, vocab_size=51200),
    "BART 139M": pair("bart", 4, 512, d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072,
                      decoder_ffn_dim=3072, encoder_attention_heads=12, decoder_attention_heads=12),
    "T5 223M": pair("t5", 2, 512, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12,
                    decoder_start_token_id=0),
    "ViT-B/16": images("vit_base_patch16_224", 32),
    "EVA-02-B": images("eva02_base_patch14_224", 16),
    "Llama-2-7B": text("llama", 1, 4096, ranks=8, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                       num_attention_heads=32, vocab_size=32000, max_position_embeddings=4096)}


def made_of_model(comm, _, name, way, engine):
    """Return a step of stage 3, "ours", or of FSDP2 with these units."""
    with torch.device(comm.device):
        model, batch = MODELS[name][1]()
    step = our_step(comm, model, way) if engine == "ours" else their_step(engine, comm, model, way)
    floats = torch.bfloat16 if way == "masters" else torch.float32
    return lambda: step({key: x.to(comm.device, floats if x.is_floating_point() else x.dtype)
                         for key, x in batch.items()})


def loss_of(model, batch, way):
    """Return a model's loss, or one that a model of images may have."""
    with torch.autocast("cuda", torch.bfloat16, enabled=way == "autocast"):
        output = model(**batch)
        return output.loss if hasattr(output, "loss") else output.float().logsumexp(-1).mean()


def our_step(comm, model, way):
    """Return a function that makes a step of a batch with stage 3."""
    engine = Zero3(model.bfloat16() if way == "masters" else model, comm, ADAMW)

    def step(batch):
        loss = loss_of(engine, batch, way)
        engine.backward(loss)
        engine.step()

    return step


def their_step(units, comm, model, way):
    """Return a function that makes a step of a batch with FSDP2."""
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if way == "masters" else {}
    holders = Counter(p for module in model.modules() for p in module._parameters.values())
    for module in blocks(model) if units == "blocks" else default_units(model):
        if module is not model and all(holders[p] == 1 for p in module.parameters()):  # what is tied is the root's
            fully_shard(module, **policy)
    fully_shard(model, **policy)
    optimizer = ADAMW(model.parameters())

    def step(batch):
        loss = loss_of(model, batch, way)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(sys.argv[1:])
