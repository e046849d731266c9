"""Benchmarks of each technique beside its production peer, in one process: `python -m refimpl bench NAME`.

A bench is a module of this folder with a function `run(device) -> (settings, rows)`. `settings` says what is run
(shapes, rounds). `rows` is an iterator of rows made by `record.row`. It yields each row as soon as it is measured, so
that a run that is interrupted leaves on disk what it has measured. `NAMES` lists the benches and what they compare.
"""

from .record import measurement, measurements
from .runner import compare

NAMES = {
    "smoke": "each attention kernel on two small calls: does it run on this device, is it right",
    "attention": "each stage of attention beside PyTorch's: bytes, seconds, on a GPU TFLOP/s beside each backend",
    "sparse": "attention over lists of blocks beside the dense form and FlexAttention: seconds over the share listed",
    "linear": "the gated delta rule beside transformers' and fla's code, and flash attention: seconds, bytes, a state",
    "recall": "what each attention answers of values seen 1,500 tokens earlier, beside chance; trained, three seeds",
    "recall_many": "the same task with 128 keys in place of 32: which of those that find all of 32 find these",
    "which": "seven ways to attend at four lengths: bytes and FLOPs beside the closed forms",
    "losses": "what each way to attend costs in loss: 5 million parameters, 400 steps of real text, three seeds; hours",
    "meter": "the tracker's bytes beside the allocator's, a tracked step beside a plain one, a dry run's cost",
    "comm": "a launch of ranks, and each collective beside torch.distributed's",
    "precision": "autocast and the loss scaler beside torch's own, and each recipe beside fp32",
    "accumulation": "steps in micro-batches beside the whole batch at once, and beside a loop by hand",
    "checkpointing": "recomputation beside torch.utils.checkpoint, and what each policy costs",
    "activations": "saved tensors compressed or offloaded beside uncompressed, recomputed and save_on_cpu ones",
    "sequences": "a long sequence in chunks beside the whole one: bytes at the peak and seconds",
    "cross_entropy": "a head without logits, an MLP without its hidden layer beside plain ones: bytes, seconds",
    "zero": "each stage of ZeRO beside DDP, ZeroRedundancyOptimizer and FSDP2 on four ranks: bytes, seconds of a step",
    "zero_quantized": "ZeRO-3 in blocks of int8 beside whole numbers: bytes, memory, error, loss, seconds; the kernels",
    "tensor_parallel": "tensor and sequence parallelism beside torch's on four ranks: bytes, seconds of a step",
    "context_parallel": "a sequence on four ranks by ring, gathered keys, Ulysses beside the whole one: bytes, seconds",
    "pipeline": "six schedules beside torch.distributed.pipelining's on four ranks: seconds of a step, bytes of a rank",
    "allocator": "what a block and a replay cost, and what each policy and setting leaves unused on five programs",
    "static_plan": "static plans beside what is live and PyTorch's allocator; MiniMalloc's problems; an arena",
    "compression": "compressed gradients: loss after 250 steps, bytes, seconds on a slow link; all_reduce in levels",
    "offload": "AdamW on the host beside torch's fused kernel and memory's rates; copies, overlap, what fits on a card",
    "kernels": "what the compiler makes of each kernel: registers, spills, shared memory, instructions",
}

__all__ = ["NAMES", "compare", "measurement", "measurements"]
