"""Native sparse attention on lists of blocks: `papers/native_sparse` by `block_sparse_attention`, for any model.

    in_each_layer(model, lambda: NativeSparseAttention(64))      each layer with parameters of its own

Three calls of `block_sparse_attention`, each under a mask of its own, and gates that weigh what they return:

    compressed    T queries, one key for each whole block: those of the blocks before the query's own
    selected      `selected_masks`: what each query picked, of each sequence and group
    sliding       a window

No T × T matrix is ever made, and no T × T/block one is kept. The scores that choose are computed for ROWS queries at a
time, without autograd. Yuan et al. 2025, section 3; see the paper's file for what is simpler here.
"""

import functools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from ..common.nested_tensors import is_dry
from .block_sparse import block_sparse_attention, block_sparse_attention_bytes, block_sparse_attention_flops
from .call.arguments import check_tensors, without_autocast
from .call.dry_tiles import in_tiles
from .call.sequences import tiles
from .masks import BlockMask, check_block, check_size, longformer_mask
from .reference import AttentionBytes, AttentionFlops, wide_dtype
from .selected_masks import apart, selected_mask

ROWS = 128  # queries whose choice is made at a time
ALWAYS = 3  # blocks that are always picked: the first, the own and the one before


class NativeSparseAttention(nn.Module):
    """Causal attention with a learned choice of blocks: `NativeSparseAttention(head_dim)(q_BHTD, k_BGTD, v_BGTD)`.

    - `block`: tokens of a block, which become one key and are picked together: 32, 64, 128 or 256.
    - `top_k`: blocks that a query picks; the first, its own and the one before are among them. `window`: tokens before
      a query that it sees whatever it picks.
    - `kernel`: as `block_sparse_attention` takes it.

    Parameters: `phi_k` and `phi_v` make one key, and one value, of those of a block, at first their sum over √block;
    `gates` the three weights of a query, at first 1/2 each. The H/G heads of a group share a choice.

    The choice of a dry run, which has no values, is `selected_masks.apart`: lists as long as they can be. The mask of a
    choice is made on the host, as every mask: with tensors on a GPU the host waits for it in each forward.

    Raises TypeError or ValueError for sizes that are none; in calls for causal=False, other head_dims, queries of
    another length than keys, and a selection larger than the sequence.
    """

    def __init__(self, head_dim: int, *, block: int = 64, top_k: int = 16, window: int = 512,
                 kernel: str = "auto") -> None:
        super().__init__()
        check_size("head_dim", head_dim)
        check_size("top_k", top_k, least=ALWAYS)
        check_size("window", window, least=0)
        check_block(block)
        self.block, self.top_k, self.window, self.kernel = block, top_k, window, kernel
        self.phi_k, self.phi_v = (nn.Linear(block * head_dim, head_dim) for _ in range(2))
        self.gates = nn.Linear(head_dim, 3)
        for phi in (self.phi_k, self.phi_v):
            phi.weight.data.copy_(torch.eye(head_dim).repeat(1, block) / block**0.5)
            nn.init.zeros_(phi.bias)
        nn.init.zeros_(self.gates.weight)
        nn.init.zeros_(self.gates.bias)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"block={self.block}, top_k={self.top_k}, window={self.window}"

    def forward(self, q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor,
                causal: bool = True) -> torch.Tensor:
        """Return (B, H, T, D)."""
        self._check(q_BHTD, k_BGTD, v_BGTD, causal)
        T, attend = q_BHTD.shape[2], functools.partial(block_sparse_attention, kernel=self.kernel)
        gates_BHT1 = self.gates(q_BHTD).sigmoid().unsqueeze(-2).unbind(-1)
        short = self.compressed(k_BGTD, self.phi_k), self.compressed(v_BGTD, self.phi_v)
        # each branch is added at once, so that backward holds the gradient of one of them at a time
        out_BHTD = gates_BHT1[0] * attend(q_BHTD, *short, compressed_mask(T, self.block))
        for gate, mask in ((1, self.select(q_BHTD, short[0])), (2, window_mask(T, self.window))):
            out_BHTD = torch.addcmul(out_BHTD, gates_BHT1[gate], attend(q_BHTD, k_BGTD, v_BGTD, mask))
        return out_BHTD

    def compressed(self, x_BGTD: torch.Tensor, phi: nn.Linear) -> torch.Tensor:
        """Return one row for each whole block of keys, or of values: (B, G, T/block, D)."""
        whole = x_BGTD.shape[2] // self.block * self.block
        return phi(x_BGTD[:, :, :whole].unflatten(2, (-1, self.block)).flatten(3))

    @torch.no_grad()
    def select(self, q_BHTD: torch.Tensor, short_BGCD: torch.Tensor) -> BlockMask:
        """Return the mask of what each query picks, given the compressed keys."""
        (B, H, T, _), G = q_BHTD.shape, short_BGCD.shape[1]
        picked_BGTK = q_BHTD.new_empty((B, G, T, self.top_k), dtype=torch.int32)
        with without_autocast(q_BHTD.device):
            in_tiles("select", [q_BHTD, short_BGCD, picked_BGTK], self.block, functools.partial(
                _select, q_BHTD, short_BGCD, picked_BGTK, self.block))
        if is_dry(q_BHTD):
            return apart((B, G, T, self.top_k), H, self.block)
        return selected_mask(picked_BGTK, H, self.block)

    def _check(self, q_BHTD, k_BGTD, v_BGTD, causal):
        check_tensors(q_BHTD, k_BGTD, v_BGTD)
        if causal is not True:
            raise ValueError(f"causal={causal!r}: expected True, a query picks among blocks that ended before it")
        T, D = q_BHTD.shape[2], self.gates.in_features
        if k_BGTD.shape[2] != T:
            raise ValueError(f"{T} queries with {k_BGTD.shape[2]} keys: expected as many of both")
        if q_BHTD.shape[3] != D or v_BGTD.shape[3] != D:
            raise ValueError(f"head_dims of q and v {q_BHTD.shape[3]} and {v_BGTD.shape[3]}: expected {D}, the "
                             "head_dim that the attention was made for")
        if self.top_k > (blocks := -(-T // self.block)):
            raise ValueError(f"top_k={self.top_k} blocks of {self.block} with {T} tokens, {blocks} blocks: "
                             "expected a selection that is no larger than the sequence; give a smaller top_k or block")


def _select(q_BHTD, short_BGCD, picked_BGTK, block, is_new):
    """Write the top-k of the compressed branch's weights, summed over the heads of a group, for each query."""
    (B, H, T, D), (G, C), wide = q_BHTD.shape, short_BGCD.shape[1:3], wide_dtype(q_BHTD.dtype)
    column = torch.arange(-(-T // block), device=q_BHTD.device)
    for first, end in tiles((0, T), ROWS):
        if not is_new(end - first):
            continue
        own_R1 = torch.arange(first, end, device=q_BHTD.device)[:, None] // block
        rows_BGRD = q_BHTD[:, :, first:end].to(wide).reshape(B, G, -1, D)
        s_BHRC = (rows_BGRD @ short_BGCD.to(wide).mT).mul_(D**-0.5).view(B, H, -1, C)
        p_BHRC = s_BHRC.masked_fill_(column[:C] >= own_R1, -torch.inf).softmax(-1)  # NaN where none has ended
        worth_BGRC = F.pad(p_BHRC.unflatten(1, (G, -1)).sum(2), (0, len(column) - C))
        always = (column == 0) | (column == own_R1) | (column == own_R1 - 1)
        worth_BGRC.masked_fill_(always, torch.inf).masked_fill_(column > own_R1, -1)
        most, index = worth_BGRC.topk(picked_BGTK.shape[-1])
        picked_BGTK[:, :, first:end] = index.masked_fill_(most < 0, -1)


@functools.lru_cache(8)
def compressed_mask(T: int, block: int) -> BlockMask:
    """Return the mask of T queries and one key for each whole block: a query sees those before its own block."""
    C, side = T // block, 128

    def hint(b, h, R, column):
        first, last = R * side // block, (R * side + side - 1).clamp(max=T - 1) // block
        return (column * side < last).to(torch.int8) + ((column + 1) * side <= first).to(torch.int8)

    return BlockMask.of(lambda b, h, i, j: j < (i + T - C) // block, T, C, block=side, hint=hint)


@functools.lru_cache(8)
def window_mask(T: int, window: int) -> BlockMask:
    """Return the mask of a causal window."""
    return longformer_mask(T, window, causal=True)


# --- FLOPs and bytes -------------------------------------------------------------------------------------------------


def _parts(q_shape, k_shape, selected, window):
    """Return [(shape of keys, mask) of each branch], in the order in which backward comes to them."""
    T, block = q_shape[2], selected.block
    short = (*k_shape[:2], T // block, k_shape[3])
    return [(k_shape, window_mask(T, window)), (k_shape, selected), (short, compressed_mask(T, block))]


def native_sparse_flops(q_shape: Sequence[int], k_shape: Sequence[int], selected: BlockMask,
                        window: int) -> AttentionFlops:
    """Count the AttentionFlops of `NativeSparseAttention` for shapes (B, H, T, D) and (B, G, T, D), exact. `selected`:
    the choice's mask, on which they depend. To those of three calls of `block_sparse_attention` are added:

        choice   2·D · BHT · C                    forward alone; C = ⌊T/block⌋ compressed keys
        φ        2 · 2·D · BG · C·block·D         of keys and values; twice as much in backward
        gates    2·D · BHT · 3                    as well
    """
    (B, H, T, D), G, C = q_shape, k_shape[1], q_shape[2] // selected.block
    calls = [block_sparse_attention_flops(q_shape, shape, mask) for shape, mask in
             _parts(q_shape, k_shape, selected, window)]
    choice, linear = 2 * D * B * H * T * C, 4 * D * B * G * C * selected.block * D + 6 * D * B * H * T
    pairs, forward, backward, recomputing = (sum(each) for each in zip(*calls, strict=True))
    return AttentionFlops(pairs, forward + choice + linear, backward + 2 * linear, recomputing + 2 * linear)


def native_sparse_bytes(q_shape: Sequence[int], k_shape: Sequence[int], selected: BlockMask, window: int,
                        dtype: torch.dtype = torch.float32, *, kernels: bool = True) -> AttentionBytes:
    """Predict the AttentionBytes of `NativeSparseAttention` for shapes (B, H, T, D) and (B, G, T, D), exact. The masks
    themselves are apart: `selected.nbytes`, and those of two that depend on the length alone. With elements of e bytes
    and C = ⌊T/block⌋:

        kept     e·BHT·(D + 3) + 2e·BGC·D + Σ kept      the output, gates, compressed keys and values; of each branch
                 + 2e·BG·C·block·D                      if block does not divide T: whole blocks apart
        peak     kept − (what branches before kept) + (peak − kept of the branch) + e·BHT·(D + n) + (dQ, dK, dV so far)

    at the branch n of the window, the selection and the compressed one for which that is most: its output's gradient, n
    gates' gradients, and what it adds to is there. `kernels=False`: of the form in PyTorch. For contiguous q, k and v;
    others are copied for φ and the gates. While it chooses, the choice holds two matrices of ROWS queries and C keys,
    which is less unless the head_dim is.

    Raises as `block_sparse_attention` does.
    """
    (B, H, T, D), G, C, e = q_shape, k_shape[1], q_shape[2] // selected.block, dtype.itemsize
    out, keys = e * B * H * T * D, 2 * e * B * G * T * D
    calls = [block_sparse_attention_bytes(q_shape, shape, mask, dtype, kernels=kernels) for shape, mask in
             _parts(q_shape, k_shape, selected, window)]
    whole = 2 * e * B * G * C * selected.block * D * (T % selected.block > 0)
    kept = held = (out + 3 * e * B * H * T + 2 * e * B * G * C * D + whole + sum(call.kept for call in calls))
    peaks, gradients = [], 0
    for n, call in enumerate(calls, 1):
        peaks.append(held + out + n * e * B * H * T + gradients + call.peak - call.kept)
        held, gradients = held - call.kept, out + keys
    return AttentionBytes(kept, max(peaks))
