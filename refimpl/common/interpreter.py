"""What Triton's interpreter is known to get wrong, for all of our kernels."""

from importlib.metadata import version

import torch


def check_interpreter(kernel, x, on_a_cpu, instead):
    """Raise ValueError or RuntimeError for what the interpreter gets wrong with `kernel`, for a tensor on any device.

    A compiled kernel passes, but for a tensor in host memory: then the error says `on_a_cpu`. `instead`: what bfloat16
    is computed by where kernels are interpreted.
    """
    import triton  # which decides when it is imported whether it interprets

    if isinstance(kernel, triton.JITFunction):  # decided at import: an interpreted one is another class
        if x.device.type == "cpu":
            raise RuntimeError(on_a_cpu)
        return
    if x.dtype == torch.bfloat16:
        raise ValueError("bfloat16 under TRITON_INTERPRET=1: Triton's interpreter computes it wrongly, without an "
                         f"error (seen in 3.6 to 3.9); use float32 or float16 here, bfloat16 on a GPU, or {instead}")
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4):
        raise RuntimeError(f"Triton {version('triton')} under TRITON_INTERPRET=1 fails with numpy {version('numpy')}: "
                           "pip install 'triton>=3.7' or 'numpy<2.4'")
