"""The techniques of the package, each with its cost and its page."""

from typing import NamedTuple

from ... import catalog
from .effects import EFFECTS
from .found import LOOSE, SURELY, Found, Help
from .row import RANKS


class Technique(NamedTuple):
    """One technique: `room` is its package in refimpl, `page` the slug of its page; EFFECTS has what it does."""

    name: str
    room: str
    title: str
    cost: str
    page: str
    call: str


TECHNIQUES = [Technique(*each) for each in (
    ("none", "memory", "gradients set to None before forward", "nothing", "where_the_memory_goes",
     "optimizer.zero_grad(), then the model"),
    ("no_grad", "memory", "no graph where there is no backward", "nothing", "reading_the_meters",
     "with torch.no_grad(): …"),
    ("autocast", "mixed_precision", "mixed precision", "16-bit rounding", "mixed_precision",
     "with mixed_precision.autocast(\"cuda\"): …"),
    ("accumulate", "accumulation", "each batch in 2 micro-batches", "time of smaller products",
     "gradient_accumulation", "accumulate(model, *batch, micro_batch=len(batch[0]) // 2)"),
    ("rows", "accumulation", "each batch row by row", "much time: products of one row",
     "gradient_accumulation", "accumulate(model, *batch, micro_batch=1)"),
    ("recompute", "checkpointing", "recompute every block in backward", "a third more FLOPs",
     "recomputation", "checkpointing.recompute(blocks)"),
    ("masks", "activations", "masks in one bit", "next to nothing", "smaller_activations",
     "compress_activations(model, \"lossless\")"),
    ("bf16", "activations", "activations in bfloat16 until backward", "gradients off by 0.1 %",
     "smaller_activations", "compress_activations(model, \"bf16\")"),
    ("int8", "activations", "activations in 8 bits until backward", "gradients off by 0.3 %; time",
     "smaller_activations", "compress_activations(model, \"int8\")"),
    ("host", "activations", "activations in host memory until backward",
     "copies both ways over the bus", "smaller_activations", "offload_activations(model)"),
    ("chunks", "sequence_length", "the sequence in 8 chunks", "time; attention must be causal",
     "long_sequences", "ChunkedSequenceProcessor(model, …)"),
    ("logits", "cross_entropy", "the loss without logits", "no logits for metrics",
     "the_logits_are_the_peak", "without_logits(model)"),
    ("mlp", "mlp", "MLPs that compute their hidden layer again", "a fifth more of their FLOPs",
     "the_logits_are_the_peak", "memory_efficient_mlps(model)"),
    ("attention", "attention", "attention in tiles", "one product of six more", "attention_in_tiles",
     "flash_attention(q, k, v, causal=True)"),
    ("sparse", "attention", "masks as lists of blocks, and no other block computed", "a mask is cut once, on the host",
     "masks_that_skip_tiles", "block_sparse_attention(q, k, v, mask)"),
    ("data", "zero", f"the batch on {RANKS} ranks", "an all_reduce of gradients", "data_parallel",
     "DataParallel(model, comm, optimizer)"),
    ("zero1", "zero", f"ZeRO-1 on {RANKS} ranks", "no byte more on the wire", "zero_1_and_2",
     "Zero1(model, comm, optimizer)"),
    ("zero2", "zero", f"ZeRO-2 on {RANKS} ranks", "no byte more, if nothing accumulates", "zero_1_and_2",
     "Zero2(model, comm, optimizer)"),
    ("zero3", "zero", f"ZeRO-3 on {RANKS} ranks", "1.5 times the traffic", "zero_3", "Zero3(model, comm, optimizer)"),
    ("offload", "offload", "gradients and optimizer state on the host, or a disk",
     "the bus; the update at host speed", "offload_to_cpu", "Zero1(model, comm, optimizer, update=CPUAdam())"),
    ("compression", "compression", "compressed gradients", "a residual of 4 bytes a parameter",
     "fewer_bytes_on_the_wire", "hook=GradientCompressor(\"topk\", 0.05)"),
    ("tensor", "tensor", f"layers split over {RANKS} ranks", "two all_reduces a block, each way",
     "tensor_parallel", "tensor_parallel(model, comm)"),
    ("context", "context", f"the sequence split over {RANKS} ranks",
     "keys and values in a ring", "context_parallel", "context_parallel(model, attention)"),
    ("pipeline", "pipeline", f"the layers on {RANKS} ranks", "ranks that wait for each other",
     "pipeline_parallel", "pipeline(model, comm, \"1f1b\", micro_batches)"),
    ("allocator", "allocator", "no fragments: expandable segments, or a static plan",
     "nothing, or two calls to record", "fragmentation", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
)]


def helps(timeline):
    """List a Help for each of TECHNIQUES, those that save most first; those that save nothing say why.

    `timeline`: of a recorded step. Each saving is in bytes of that step's peak, of the technique alone, so they
    do not add up.
    """
    return sorted((_help(technique, timeline) for technique in TECHNIQUES), key=lambda each: -each.saves)


def _help(technique, timeline):
    found = EFFECTS[technique.name](timeline)
    if isinstance(found, Found):
        saves, bound, why, loose = max(0, timeline.saved(found.spans)), found.bound, "", found.loose
        other_kernels = technique.room in ("activations", "mixed_precision")
        most = timeline.saved(found.spans + timeline.workspaces(other_kernels))
        if most > SURELY * saves and (saves or bound):
            saves, bound, loose = most, bound or "kernels may take other workspaces then", loose or most > LOOSE * saves
        why = why or ("" if saves else "it holds nothing at the peak, or the peak moves and is as high")
    else:
        saves, bound, why, loose = 0, "", found, False
    return Help(technique.name, technique.title, saves, bound if saves else "", why, technique.cost,
                catalog.page(technique.page).number, technique.call, technique.title.endswith(" ranks"),
                loose and saves > 0)
