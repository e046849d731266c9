"""Sends a matrix as the product of two thin ones: r(n + m) numbers of n · m.

    P = Σ_rank M Q        (n, r)      all_reduce, then made orthonormal
    Q = mean Mᵀ P         (m, r)      all_reduce
    M̂ = P Qᵀ              the average of all ranks' matrices, as far as rank r can tell it

One step of a power iteration, which begins where the last step's ended: Q is kept. Tensors of one dimension, and
matrices that r(n + m) numbers do not halve, are sent whole, with P. "PowerSGD" (Vogels et al. 2019), algorithm 1. The
order of work, the seed and `MIN_COMPRESSION_RATE` are those of torch's `powerSGD_hook`, so that both give one result.
"""

import numpy as np
import torch

MIN_COMPRESSION_RATE = 2


class FactorLayout:
    """Says which tensors of a bucket are sent as factors, and which whole. `rank`: r; without one it is chosen for each
    matrix, so that r(n + m) is at most `ratio` · n · m."""

    def __init__(self, shapes, ratio, rank=None):
        self.matrices, self.whole = {}, []  # tensor's number -> (n, m, r); numbers of those that are sent whole
        found = {}
        for number, shape in enumerate(shapes):
            n, m = (shape[0], shape[1:].numel()) if len(shape) else (1, 1)
            r = min(n, m, rank or max(1, int(ratio * n * m / max(1, n + m))))
            if r * (n + m) * MIN_COMPRESSION_RATE < n * m:
                found.setdefault((n, m), []).append((number, (n, m, r)))
            else:
                self.whole.append((number, shape.numel()))
        self.matrices = dict(each for same in found.values() for each in same)  # those of one shape together
        self.whole_numel = sum(numel for _, numel in self.whole)
        self.p_sizes = [n * r for n, m, r in self.matrices.values()]
        self.q_sizes = [m * r for n, m, r in self.matrices.values()]

    def payload_bytes(self, itemsize=4):
        """Return the bytes of both factors and of what is sent whole."""
        return itemsize * (self.whole_numel + sum(self.p_sizes) + sum(self.q_sizes))

    def draw_factors(self, seed, key, like):
        """Draw the first Q's of bucket `key`, side by side. A seed is drawn for each bucket in turn, as torch does."""
        generator = torch.Generator().manual_seed(int(np.random.RandomState(seed).randint(1_000_000_000,
                                                                                          size=key + 1)[key]))
        drawn = [torch.randn(1, m, r, generator=generator, dtype=like.dtype).view(-1)
                 for n, m, r in self.matrices.values()]
        return torch.cat([*drawn, torch.zeros(0, dtype=like.dtype)]).to(like.device)

    def first_payload(self, tensors, q):
        """Return what is sent first, flat: whole tensors, then each P = M Q, with Q made orthonormal in place."""
        parts = [tensors[number].reshape(-1) for number, _ in self.whole]
        for (number, (n, m, r)), each in zip(self.matrices.items(), q.split(self.q_sizes), strict=True):
            orthonormalize(each.view(m, r))
            parts.append((tensors[number].reshape(n, m) @ each.view(m, r)).view(-1))
        return torch.cat([*parts, q[:0]])  # q[:0]: cat refuses an empty list, and a bucket may have neither

    def second_payload(self, tensors, p):
        """Return what is sent next, flat: each Mᵀ P, with P made orthonormal in place."""
        parts = []
        for (number, (n, m, r)), each in zip(self.matrices.items(), p.split(self.p_sizes), strict=True):
            orthonormalize(each.view(n, r))
            parts.append((tensors[number].reshape(n, m).T @ each.view(n, r)).view(-1))
        return torch.cat([*parts, p[:0]])

    def write_average(self, out, whole, p, q):
        """Write the average into `out`, one tensor for each: whole ones, and P Qᵀ."""
        for (number, _), each in zip(self.whole, whole.split([numel for _, numel in self.whole]), strict=True):
            out[number].copy_(each.view(out[number].shape))
        for (number, (n, m, r)), P, Q in zip(self.matrices.items(), p.split(self.p_sizes), q.split(self.q_sizes),
                                             strict=True):
            out[number].copy_((P.view(n, r) @ Q.view(m, r).T).view(out[number].shape))


def orthonormalize(matrix):
    """Make the columns of `matrix` (n, r) orthonormal, in place: two by Gram-Schmidt, more by a QR decomposition, as
    torch does. A column of zeros stays."""
    if matrix.shape[1] > 2:
        matrix.copy_(torch.linalg.qr(matrix).Q)
        return
    for i in range(matrix.shape[1]):
        column, rest = matrix[:, i : i + 1], matrix[:, i + 1 :]
        norm = column.norm(dim=0, keepdim=True)
        column /= torch.where(norm == 0, 1, norm)
        rest -= (column * rest).sum(0, keepdim=True) * column
