"""The techniques of the package, each with its cost, its page, and the function that reads its saving from a Replay."""

from typing import NamedTuple

from . import batches, head, packed, recomputed, states, tiles
from .found import Found, Help

RANKS = states.RANKS


class Technique(NamedTuple):
    """One technique: `room` is its package in refimpl, `find(replay)` returns a Found, or why it would save nothing."""

    name: str
    room: str
    title: str
    find: object
    cost: str
    page: str
    call: str


TECHNIQUES = [Technique(*each) for each in (
    ("none", "memory", "gradients set to None before forward", states.set_to_none, "nothing", "00",
     "optimizer.zero_grad(), then the model"),
    ("no_grad", "memory", "no graph where there is no backward", states.without_graph, "nothing", "01",
     "with torch.no_grad(): …"),
    ("autocast", "mixed_precision", "mixed precision", states.half_precision, "16-bit rounding", "02",
     "with mixed_precision.autocast(\"cuda\"): …"),
    ("accumulate", "accumulation", "each batch in 2 micro-batches", batches.in_two, "time of smaller products", "03",
     "accumulate(model, *batch, micro_batches=2)"),
    ("rows", "accumulation", "each batch row by row", batches.row_by_row, "much time: products of one row", "03",
     "accumulate(model, *batch, micro_batch=1)"),
    ("recompute", "checkpointing", "recompute every block in backward", recomputed.blocks, "a third more FLOPs", "04",
     "checkpointing.recompute(blocks)"),
    ("masks", "activations", "masks in one bit", packed.lossless, "next to nothing", "06",
     "compress_activations(model, \"lossless\")"),
    ("bf16", "activations", "activations in bfloat16 until backward", packed.bf16, "gradients off by 0.1 %", "06",
     "compress_activations(model, \"bf16\")"),
    ("int8", "activations", "activations in 8 bits until backward", packed.int8, "gradients off by 0.3 %; time", "06",
     "compress_activations(model, \"int8\")"),
    ("host", "activations", "activations in host memory until backward", packed.on_the_host,
     "copies both ways over the bus", "06", "offload_activations(model)"),
    ("chunks", "sequence_length", "the sequence in 8 chunks", states.in_chunks, "time; attention must be causal", "07",
     "ChunkedSequenceProcessor(model, …)"),
    ("logits", "cross_entropy", "the loss without logits", head.without_logits, "no product more", "08",
     "without_logits(model)"),
    ("mlp", "mlp", "MLPs that compute their hidden layer again", recomputed.mlps, "a fifth more of their FLOPs", "08",
     "memory_efficient_mlps(model)"),
    ("attention", "attention", "attention in tiles", tiles.tiles, "one product of six more", "10",
     "flash_attention(q, k, v, causal=True)"),
    ("data", "zero", f"the batch on {RANKS} ranks", states.fewer_rows, "an all_reduce of gradients", "21",
     "DataParallel(model, comm, optimizer)"),
    ("zero1", "zero", f"ZeRO-1 on {RANKS} ranks", states.zero1, "no byte more on the wire", "22",
     "Zero1(model, comm, optimizer)"),
    ("zero2", "zero", f"ZeRO-2 on {RANKS} ranks", states.zero2, "no byte more, if nothing accumulates", "22",
     "Zero2(model, comm, optimizer)"),
    ("zero3", "zero", f"ZeRO-3 on {RANKS} ranks", states.zero3, "1.5 times the traffic", "23",
     "Zero3(model, comm, optimizer)"),
    ("offload", "offload", "gradients and optimizer state on the host, or a disk", states.on_the_host,
     "the bus; the update at host speed", "24", "Zero1(model, comm, optimizer, update=CPUAdam())"),
    ("compression", "compression", "compressed gradients", states.on_the_wire, "a residual of 4 bytes a parameter",
     "26", "hook=GradientCompressor(\"topk\", 0.05)"),
    ("tensor", "parallel", f"layers split over {RANKS} ranks", states.split_layers, "two all_reduces a block, each way",
     "30", "tensor_parallel(model, comm)"),
    ("context", "parallel", f"the sequence split over {RANKS} ranks", states.split_sequence,
     "keys and values in a ring", "32", "context_parallel(model, attention)"),
    ("pipeline", "parallel", f"the layers on {RANKS} ranks", states.split_model, "ranks that wait for each other", "33",
     "pipeline(model, comm, \"1f1b\", micro_batches)"),
    ("allocator", "allocator", "no fragments: expandable segments, or a static plan", states.fragments, "nothing, or "
     "two calls to record", "41", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
)]


def helps(replay):
    """List a Help for each of TECHNIQUES, those that save most first; those that save nothing say why.

    `replay`: a recorded step as a Replay. Each saving is in bytes of that step's peak, of the technique alone, so they
    do not add up.
    """
    return sorted((_help(technique, replay) for technique in TECHNIQUES), key=lambda each: -each.saves)


def _help(technique, replay):
    found = technique.find(replay)
    if isinstance(found, Found):
        saves, bound, why = max(0, replay.saved(found.spans)), found.bound, ""
        why = why or ("" if saves else "it holds nothing at the peak, or the peak moves and is as high")
    else:
        saves, bound, why = 0, "", found
    return Help(technique.name, technique.title, saves, bound if saves else "", why, technique.cost, technique.page,
                technique.call, technique.title.endswith(" ranks"))
