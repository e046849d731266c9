"""Linear attention: a state in place of keys and values. Order of reading: `papers/linear_attention`, `delta_rule`
(what users call, bytes and FLOPs), `chunks` (the arithmetic in PyTorch, and its derivative), `triton_chunks` (its
kernels), `operators` and `kernels` (how they are called), `models` (inside of models)."""
