"""What can be asked of an estimate, and what is refused before anything is built."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import catalog
from ..untrusted.text import shown

if TYPE_CHECKING:
    from ..catalog import Hardware

PRECISIONS = {
    "fp32": "weights, gradients and optimizer states in fp32",
    "bf16": "all in bf16; with ZeRO the shards that are updated have fp32 masters",
    "bf16-master": "weights and gradients in bf16, fp32 masters and optimizer states",
    "autocast": "weights in fp32, operations under torch.autocast in bf16",
}
OPTIMIZERS = {
    "adamw": "as PyTorch runs it on a GPU, foreach: temporaries of a whole moment",
    "adamw-fused": "in one kernel, without temporaries",
    "adam": "as adamw",
    "momentum": "SGD with momentum",
    "sgd": "SGD without states",
}
ATTENTIONS = {
    "sdpa": "torch.nn.functional.scaled_dot_product_attention, which keeps no scores",
    "eager": "softmax over whole scores",
}
BUILDERS = {
    "auto": "transformers where it can be imported, else our GPT",
    "transformers": "transformers",
    "refimpl": "our GPT: GPT-2, Llama, Mistral and Qwen 2",
}
CPU = "cpu"
USUAL = "h100-sxm"  # whose kernels are taken if none is named, and for a GPU whose are not known
MOST = {"batch": 2**20, "sequence": 2**30, "gpus": 2**17}
CHOICES = {"precision": PRECISIONS, "optimizer": OPTIMIZERS, "attention": ATTENTIONS, "builder": BUILDERS}


@dataclass(frozen=True)
class Options:
    """Describes a training. ValueError, with the value and what to give instead, for one that cannot be.

    - `batch`: sequences of one rank in a step. `sequence`: tokens of each; None: the model's context.
    - `precision`, `optimizer`, `attention`: see the tables of this file. `attention` None: sdpa; what transformers
      chooses for its own models, sdpa where they have it; of a model that a function builds: its own.
    - `window`: each token sees so many before it, and the first `global_tokens`: `attention.sparse`, in place of
      `attention`. None: all of them.
    - `zero`: the stage of ZeRO, 0 to 3, over `gpus` ranks; stage 0 on one GPU is a plain loop without an engine.
    - `recompute`: keep of each block its input alone.
    - `gpu`: a name of the catalog: whose kernels the step runs, and whether it fits. None: an H100's kernels. "cpu": a
      CPU's. `builder`: of a config.json.
    """

    batch: int = 1
    sequence: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    zero: int = 0
    gpus: int = 1
    recompute: bool = False
    attention: str | None = None
    window: int | None = None
    global_tokens: int = 0
    gpu: str | None = None
    builder: str = "auto"

    def __post_init__(self):
        for name in ("batch", "sequence", "gpus"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "sequence" and value is None):
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
            if value is not None and value > MOST[name]:
                raise ValueError(f"{name}={shown(value)}: expected at most {MOST[name]:,}")
        if type(self.zero) is not int or self.zero not in range(4):
            raise ValueError(f"zero={self.zero!r}: expected a stage of ZeRO: 0 (data parallel), 1, 2 or 3")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known and not (name == "attention" and self.attention is None):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        for name in ("window", "global_tokens"):
            value = getattr(self, name)
            if (type(value) is not int or value < 0) and not (name == "window" and value is None):
                raise ValueError(f"{name}={value!r}: expected a whole number of tokens")
        if self.window is None and self.global_tokens:
            raise ValueError(f"global_tokens={self.global_tokens} without a window: give window=N, the tokens that "
                             "each one sees before it")
        if self.window is not None and self.attention is not None:
            raise ValueError(f"window={self.window} with attention={self.attention!r}: give one of the two; a window "
                             "is block-sparse attention")
        if self.precision == "bf16-master" and self.gpus > 1 and not self.zero:
            raise ValueError(f"precision='bf16-master' on gpus={self.gpus} with zero=0: data parallelism updates the "
                             "parameters themselves, without masters; give zero=1 or more, or precision='bf16'")
        if self.gpu not in (None, CPU):
            catalog.hardware(self.gpu)

    @property
    def hardware(self) -> "Hardware | None":
        """Return the Hardware whose kernels run, None for a CPU's."""
        if self.gpu == CPU:
            return None
        named = catalog.hardware(self.gpu or USUAL)
        return named if named.capability else catalog.hardware(USUAL)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which the model is built. (The masters of bf16-master are made from its fp32 weights.)"""
        wide = self.precision in ("fp32", "autocast") or (self.precision == "bf16-master" and not self.zero)
        return torch.float32 if wide else self.low

    @property
    def low(self) -> torch.dtype:
        """Return the 16-bit type: bf16, and fp16 on a GPU without it."""
        return torch.float16 if self.hardware is not None and self.hardware.low_precision == "fp16" else torch.bfloat16

    @property
    def is_plain(self) -> bool:
        """Tell whether it is a loop on one device, without an engine."""
        return self.gpus == 1 and not self.zero
