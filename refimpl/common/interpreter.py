"""Where our Triton kernels run: GPUs that are new enough, and what Triton's interpreter gets wrong."""

from importlib.metadata import version

import torch

CAPABILITY = 8, 0  # Triton's own lower bound; on 7.5 tiles do not fit in shared memory, and registers spill by KB


def new_enough(device):
    """Tell whether a CUDA device runs our kernels. In a dry run without a GPU each does."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= CAPABILITY


def check_interpreter(kernel, x, on_a_cpu, instead, in_torch):
    """Raise ValueError or RuntimeError where `kernel` cannot compute a tensor, or the interpreter gets it wrong.

    A compiled kernel passes on a GPU that is new enough. For a tensor in host memory the error says `on_a_cpu`.
    `instead`: what bfloat16 is computed by where kernels are interpreted; `in_torch`: what computes the same on an
    older GPU.
    """
    import triton  # which decides when it is imported whether it interprets

    if isinstance(kernel, triton.JITFunction):  # decided at import: an interpreted one is another class
        if x.device.type == "cpu":
            raise RuntimeError(on_a_cpu)
        if x.device.type == "cuda" and not new_enough(x.device):
            major, minor = torch.cuda.get_device_capability(x.device)
            raise RuntimeError(f"{torch.cuda.get_device_name(x.device)} has compute capability {major}.{minor}, and "
                               f"Triton's kernels need 8.0: {in_torch} computes the same")
        return
    if x.dtype == torch.bfloat16:
        raise ValueError("bfloat16 under TRITON_INTERPRET=1: Triton's interpreter computes it wrongly, without an "
                         f"error (seen in 3.6 to 3.9); use float32 or float16 here, bfloat16 on a GPU, or {instead}")
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        raise RuntimeError(f"Triton {version('triton')} under TRITON_INTERPRET=1 fails with numpy {version('numpy')}: "
                           "pip install 'triton>=3.7' or 'numpy<2.4'")
