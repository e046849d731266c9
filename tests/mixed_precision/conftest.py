"""What the tests of mixed precision share: the variants of our GPT, and a recorder of every operation's dtypes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refimpl.model import GPT, GPTConfig

SHAPE = {"vocab_size": 256, "context_length": 64, "layers": 2, "hidden": 32, "heads": 4}
CONFIGS = {
    "gpt2": SHAPE, "gpt2 with dropout": SHAPE | {"dropout": 0.1},
    "gpt2 untied, no bias": SHAPE | {"tied": False, "bias": False},
    "llama": SHAPE | {"kv_heads": 2, "mlp_hidden": 88, "norm": "rmsnorm", "activation": "swiglu",
                      "positions": "rotary", "bias": False, "tied": False},
    "neox": SHAPE | {"positions": "rotary", "rotary_fraction": 0.25, "parallel_residual": True, "tied": False},
    "one key head, learned positions": SHAPE | {"kv_heads": 1, "activation": "swiglu"}}


class Dtypes(TorchDispatchMode):
    """Every operation below autograd and the dtypes of its outputs; and of every tensor that autograd saved.

    In which order C++ casts the arguments of one operation is the compiler's choice, and backward runs those casts in
    the opposite one: `casts`, and what runs in `backward`, are sorted.
    """

    def __enter__(self):
        self.forward, self.backward, self.casts, self.saved = [], [], [], []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._hooks.__exit__(*exception)
        self.casts.sort()
        self.backward.sort()

    def everything(self):
        return self.forward, self.backward, self.casts, self.saved

    def _pack(self, tensor):
        self.saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        ops = self.forward if torch._C._current_graph_task_id() == -1 else self.backward
        for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(output, torch.Tensor):
                line = func.name(), str(tuple(output.shape)), str(output.dtype)
                (self.casts if "_to_copy" in func.name() else ops).append(line)
        return outputs


@pytest.fixture
def dtypes():
    return Dtypes


@pytest.fixture(params=CONFIGS)
def gpt(request):
    """(model, tokens), the same at every call of a test, one for each variant."""
    torch.manual_seed(1)
    return GPT(GPTConfig(**CONFIGS[request.param])), torch.randint(0, 256, (2, 32))


@pytest.fixture
def model():
    """One variant."""
    torch.manual_seed(1)
    return GPT(GPTConfig(**SHAPE))


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (2, 32))
