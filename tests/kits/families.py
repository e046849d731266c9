"""What makes a GPTConfig that of a family, besides its sizes."""

LLAMA = {"kv_heads": 2, "norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False, "tied": False}
NEOX = {"positions": "rotary", "rotary_fraction": 0.25, "parallel_residual": True, "tied": False}
GEMMA = {**LLAMA, "head_dim": 12, "activation": "geglu", "post_norms": True}
