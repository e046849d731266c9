"""The sequences of a call: which keys a query sees, a band along the diagonal, and where packed sequences lie.

Query i of T is at key position i + S − T: the last query beside the last key ("aligned bottom-right"). It sees
`left` keys to the left of that position and `right` to the right, as with flash-attention's window_size=(left, right);
None is no bound. Ranges are half open, as in Python: (first, end).

Of packed sequences a kernel reads `cu_seqlens` itself, on the device. The host needs two numbers alone, how many
programs to launch for queries and for keys: the lengths of the longest sequences. If they are given, nothing comes back
from the device.
"""

from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor


class Band(NamedTuple):
    """The band of T queries and S keys; T or S may be 0 (a sequence of a packed batch)."""

    T: int
    S: int
    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, T, S, causal, window):
        """Make the band i − j ≤ window, and j ≤ i if `causal`, else j − i ≤ window, with i counted as a key
        position."""
        return cls(T, S, window, 0 if causal else window)  # not causal: both sides, as flash-attention has it

    def _first_key(self, query):
        return 0 if self.left is None else max(0, query + self.S - self.T - self.left)

    def _end_key(self, query):
        return self.S if self.right is None else min(self.S, query + self.S - self.T + self.right + 1)

    @property
    def fully_masked(self):
        """Return the number of queries that see no key. They are the first ones: later queries are further right."""
        if self.S == 0 or self.right is None:
            return self.T if self.S == 0 else 0
        return min(self.T, max(0, self.T - self.S - self.right))

    def keys_seen(self, rows):
        """Return (first, end) of the keys that any of the queries `rows` = (first, end) sees; first = end if none."""
        first, end = self._first_key(rows[0]), self._end_key(rows[1] - 1)
        return (first, end) if first < end else (0, 0)

    def all_seen(self, rows, keys):
        """Tell whether each of the queries `rows` sees all of `keys`."""
        return self._first_key(rows[1] - 1) <= keys[0] and keys[1] <= self._end_key(rows[0])

    def mask(self, rows, keys, device):
        """Return (rows, keys) booleans, True where a query does not see a key; None if each sees all of these keys."""
        if self.all_seen(rows, keys):
            return None
        position = torch.arange(*rows, device=device)[:, None] + (self.S - self.T)
        key = torch.arange(*keys, device=device)
        if self.right is None:
            return key < position - self.left
        mask = key > position + self.right
        return mask if self.left is None else mask.logical_or_(key < position - self.left)

    def pairs(self):
        """Count the (query, key) pairs that see each other: Σ over queries of end − first, in closed form."""
        shift, T, S = self.S - self.T, self.T, self.S
        ends = T * S if self.right is None else _clamped_sum(shift + self.right + 1, T, S)
        firsts = 0 if self.left is None else _clamped_sum(shift - self.left, T, S)
        return ends - firsts


def _clamped_sum(start, count, top):
    """Return Σ of min(max(x, 0), top) for x = start … start + count − 1."""

    def below(n):  # Σ over 0 ≤ x < n
        n = max(n, 0)
        return n * (n - 1) // 2 if n <= top + 1 else top * (top + 1) // 2 + (n - top - 1) * top

    return below(start + count) - below(start)


def tiles(span, size):
    """Cut `span` = (first, end) into [(first, end), …] of `size`, the last one shorter."""
    return [(first, min(first + size, span[1])) for first in range(span[0], span[1], size)]


class Sequence(NamedTuple):
    """One sequence of a batch: where its queries and keys lie, (first, end), and who sees whom, counted from there."""

    queries: tuple
    keys: tuple
    band: Band


# --- packed -----------------------------------------------------------------------------------------------------------


def check_max_seqlens(max_seqlen, max_seqlen_k, cu_seqlens):
    """Return (max_seqlen, max_seqlen_k), by default the same; they belong to cu_seqlens."""
    for name, value in (("max_seqlen", max_seqlen), ("max_seqlen_k", max_seqlen_k)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r}: expected an int of at least 1, the length of the longest sequence")
        if value is not None and cu_seqlens is None:
            raise ValueError(f"{name}={value} without cu_seqlens: expected both or neither")
    if max_seqlen is None and max_seqlen_k is not None:
        raise ValueError(f"max_seqlen_k={max_seqlen_k} without max_seqlen: expected max_seqlen, and max_seqlen_k if "
                         "the keys' differs")
    return max_seqlen, max_seqlen if max_seqlen_k is None else max_seqlen_k


def check_packing(name, cu_seqlens, batch):
    """Check what can be checked of packed sequences without the values of a tensor."""
    if batch != 1:
        raise ValueError(f"{name} with a batch of {batch}: expected sequences packed one after the other in a batch of "
                         "1")
    if isinstance(cu_seqlens, torch.Tensor) and (cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1):
        raise ValueError(f"{name} of shape {tuple(cu_seqlens.shape)}, {cu_seqlens.dtype}: expected one dimension, "
                         "int32; .to(torch.int32) casts it")


def check_cu_seqlens(name, cu_seqlens, total, batch, longest=None):
    """Return `cu_seqlens` as a list of ints: 0, then where each sequence ends, the last one at `total`. No sequence is
    longer than `longest`, if given."""
    check_packing(name, cu_seqlens, batch)
    if isinstance(cu_seqlens, torch.Tensor):
        ends = cu_seqlens.tolist()  # on CUDA this waits for the device; a list does not
    elif isinstance(cu_seqlens, (list, tuple)) and all(type(end) is int for end in cu_seqlens):
        ends = list(cu_seqlens)
    else:
        raise TypeError(f"{name} is a {type(cu_seqlens).__name__}: expected an int32 tensor or a list of ints (in a "
                        "dry run a list: fake tensors have no values)")
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != total:
        raise ValueError(f"{name}={_short(ends)}: expected to begin with 0 and to end with {total}, the number of "
                         "tokens given")
    if any(later < earlier for earlier, later in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"{name}={_short(ends)} decreases: expected the sequences' ends in order, as in "
                         "lengths.cumsum(0)")
    lengths = [later - earlier for earlier, later in zip(ends, ends[1:], strict=False)]
    if longest is not None and max(lengths) > longest:
        raise ValueError(f"{name.replace('cu', 'max').replace('seqlens', 'seqlen')}={longest}: a sequence has "
                         f"{max(lengths)} tokens, expected none longer")
    return ends


def _short(ends):
    return ends if len(ends) <= 8 else f"[{', '.join(map(str, ends[:6]))}, …, {ends[-1]}]"


def as_tensors(call, packing, given, device):
    """Return (cu_seqlens, cu_seqlens_k, longest, longest_k) for the kernels, of a call whose sequences the host knows;
    None, None, 0, 0 if nothing is packed. `given`: cu_seqlens and cu_seqlens_k."""
    if not call.packed:
        return None, None, 0, 0
    spans = [[sequence[which] for sequence in call.sequences] for which in (0, 1)]
    found = [ends if isinstance(ends, torch.Tensor) and ends.device == device and packing["max_seqlen"] is not None
             else torch.tensor([0, *(end for _, end in which)], dtype=torch.int32, device=device)
             for ends, which in zip(given, spans, strict=True)]
    longest = check_max_seqlens(packing["max_seqlen"], packing["max_seqlen_k"], given[0])
    most = (max(end - first for first, end in which) for which in spans)
    return *found, *(given or own for given, own in zip(longest, most, strict=True))


def is_known(ends):
    """Tell whether the host can read these values without a wait for a device."""
    if not isinstance(ends, torch.Tensor):
        return True
    # fake and traced tensors have no values to read
    return ends.device.type == "cpu" and not isinstance(ends, FakeTensor) and not torch.compiler.is_compiling()


def _on_cuda(ends):
    """Tell whether there is a device that could check these values."""
    return ends.device.type == "cuda" and not isinstance(ends, FakeTensor)


def check_on_device(name, ends, total, longest):
    """Have a CUDA device assert that `ends` begin with 0, do not decrease, end with `total`, and that no sequence is
    longer than `longest`. It happens there, later: the host does not wait."""
    if not _on_cuda(ends) or torch.compiler.is_compiling():
        return
    lengths = ends.diff()
    right = (ends[0] == 0) & (ends[-1] == total) & (lengths >= 0).all() & (lengths <= longest).all()
    # a check on the host would wait for the device
    torch._assert_async(right, f"{name}: expected to begin with 0, not to decrease, to end with {total}, and no "
                               f"sequence longer than max_seqlen={longest}")
