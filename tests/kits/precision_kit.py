"""What the tests of mixed precision share: the variants of our GPT, and a recorder of every operation's dtypes."""

import torch
from families import LLAMA, NEOX
from torch.utils._python_dispatch import TorchDispatchMode

SHAPE = {"vocab_size": 256, "context_length": 64, "layers": 2, "hidden": 32, "heads": 4}
CONFIGS = {
    "gpt2": SHAPE, "gpt2 with dropout": SHAPE | {"dropout": 0.1},
    "gpt2 untied, no bias": SHAPE | {"tied": False, "bias": False},
    "llama": SHAPE | LLAMA | {"mlp_hidden": 88}, "neox": SHAPE | NEOX,
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


def recorded(region, model, tokens):
    """(dtypes, loss, gradients) of a forward in a region and a backward after it."""
    torch.manual_seed(2)
    model.zero_grad()
    with Dtypes() as record:
        with region:
            loss = model(tokens, tokens)
        loss.backward()
    return record, loss, [p.grad.clone() for p in model.parameters()]
