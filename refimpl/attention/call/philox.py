"""Random numbers that depend on their position alone: Philox-4x32-10, and the dropout mask made of it.

A counter of four 32-bit words and a key of two become four random words. Such a mask needs no memory: backward, in
tiles of another size, draws the same one again. "Parallel Random Numbers: As Easy as 1, 2, 3" (Salmon et al. 2011),
section 3.3; the words are those of Triton's tl.philox(seed, c0, c1, c2, c3) with 32-bit counters.

    weight at (batch b, head h, row i, column j):   counter (⌊j/4⌋, i, b·H + h, 0),   word j mod 4,   key = the seed

So one run of Philox serves four neighbours of a row, c0 belongs to a tile's columns, c1 to its rows, c2 is one number
per head, and a kernel joins the four words w as tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(rows, columns).
"""

import torch

LOW = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # odd constants with good mixing, Salmon et al., table 2
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round: the golden ratio and √3 − 1, as fractions of 2³²


def philox(seed, c0, c1, c2, c3, rounds=10):
    """Draw four int64 tensors of 32-bit words, of the counters' common shape.

    `seed`: the key, an int or int64 tensor of 64 bits; counters: ints or int64 tensors that hold 32 bits. A product of
    two such words overflows int64, but its low 64 bits are right, and both halves are read from them.
    """
    k0, k1 = seed & LOW, (seed >> 32) & LOW
    for _ in range(rounds):
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((b >> 32) & LOW) ^ c1 ^ k0  # int64 shifts its sign in: & LOW drops that
        c1 = b & LOW
        c2 = ((a >> 32) & LOW) ^ c3 ^ k1
        c3 = a & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def dropped(seed, dropout_p, B, H, rows, columns, device):
    """Draw (B, H, rows, columns) booleans, True where a weight is dropped; rows and columns are (first, end).

    A weight is dropped if its word is below ⌊dropout_p · 2³²⌋. While it runs it takes 16 bytes for each weight
    (`dropped_bytes`).
    """
    threshold = int(dropout_p * 2**32)
    first = columns[0] // 4
    c0 = torch.arange(first, first + runs_of(columns), device=device)
    c1 = torch.arange(*rows, device=device)[:, None]
    c2 = torch.arange(B * H, device=device).view(B, H, 1, 1)
    below = [word < threshold for word in philox(seed, c0, c1, c2, 0)]
    skipped = columns[0] - 4 * first  # a tile may begin within a run of four
    return torch.stack(below, dim=-1).flatten(-2)[..., skipped : skipped + columns[1] - columns[0]]


def dropped_bytes(B, H, rows, columns):
    """Predict the bytes that `dropped` takes while it runs, for an int seed: eight int64 for each run of Philox, and
    one for each row, run of a row, and head."""
    count, runs = rows[1] - rows[0], runs_of(columns)
    return 8 * (8 * B * H * count * runs + count + runs + B * H)


def runs_of(columns):
    """Count the runs of Philox that serve these columns of one row."""
    return -(-columns[1] // 4) - columns[0] // 4
