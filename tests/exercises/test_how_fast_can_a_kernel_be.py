"""Right answers pass, wrong and unanswered ones do not."""

import math
from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import how_fast_can_a_kernel_be as page
from refimpl import attention
from refimpl.attention.kernels.configs import Config

# --- first -----------------------------------------------------------------------------------------------------------


def least(B, H, T, D, e, flops, bandwidth):
    computing = 4 * B * H * T * T * D / flops
    q, matrix = e * B * H * T * D, e * B * H * T * T
    programs = math.ceil(T / 128)  # of a head: each reads all keys and values
    moved = (4 * q + 4 * matrix, 2 * q + programs * 2 * q, 4 * q)
    return tuple(max(computing, nbytes / bandwidth) for nbytes in moved)


def by_the_library(B, H, T, D, e, flops, bandwidth):
    shape, dtype = (B, H, T, D), {2: torch.float16, 4: torch.float32}[e]
    once = 4 * torch.empty(shape, dtype=dtype, device="meta").nbytes
    asked = attention.flash_attention_traffic(shape, shape, dtype, configs={"forward": Config(128, 32, 4, 1)})
    asked = sum(asked["forward"]) - 4 * B * H * T
    seconds = attention.attention_flops(shape, shape).forward / flops
    return [max(seconds, each / bandwidth) for each in (once + 4 * e * B * H * T * T, asked, once)]


def by_intensity(B, H, T, D, e, flops, bandwidth):
    """Each way has FLOPs a byte, and a roof."""
    work, programs = 4 * B * H * T * T * D, -(-T // 128)
    intensity = (D * T / (e * (D + T)), 2 * T / (e * (1 + programs)), T / e)
    return tuple(work / min(flops, each * bandwidth) for each in intensity)


def with_fault(B, H, T, D, e, flops, bandwidth, *, matrices=4, products=4, programs=lambda T: math.ceil(T / 128),
               add=max, outputs=1, of_matrix=None, once=4):
    q, computing = e * B * H * T * D, products * B * H * T * T * D / flops
    dense = 4 * q + matrices * (of_matrix or e) * B * H * T * T
    asked = (1 + outputs) * q + 2 * q * programs(T)
    return tuple(add(computing, nbytes / bandwidth) for nbytes in (dense, asked, once * q))


# --- second ----------------------------------------------------------------------------------------------------------


def keys_held(M, D, warps):
    registers = 255 * 32 * warps
    n = 1
    while 2 * (2 * n) * (D + M) <= 2 / 3 * registers:
        n *= 2
    return n


def by_logarithm(M, D, warps):
    return 2 ** math.floor(math.log2(255 * 32 * warps / (3 * (D + M))))


def by_bits(M, D, warps):
    most = 2 * 255 * 32 * warps // (3 * 2 * (D + M))
    return 1 << (most.bit_length() - 1)


def held(M, D, warps, *, share=2 / 3, numbers=lambda n, M, D: 2 * n * D + 2 * M * n, registers=255, threads=32):
    return max(2**i for i in range(16) if numbers(2**i, M, D) <= share * registers * threads * warps)


ANSWERS = {
    page.first: Answers(
        right=[least, by_the_library, by_intensity],
        wrong=[
            (partial(with_fault, matrices=6), "(1, 16, 8192, 128, 2), dense: 3,886.3044 µs, expected 2,604.2246"),
            (partial(with_fault, matrices=2), "(1, 16, 8192, 128, 2), dense: "),
            (partial(with_fault, products=2), "(1, 16, 8192, 128, 2), each byte once: "),
            (partial(with_fault, products=8), "(1, 16, 8192, 128, 2), each byte once: "),
            (partial(with_fault, programs=lambda T: math.ceil(T / 64)), "as ⌈T/128⌉ programs a head ask: "),
            (partial(with_fault, programs=lambda T: T / 128), "(3, 2, 385, 64, 2), as ⌈T/128⌉ programs a head ask: "),
            (partial(with_fault, programs=lambda T: T // 128), "(3, 2, 385, 64, 2), as ⌈T/128⌉ programs a head ask: "),
            (partial(with_fault, programs=lambda T: 1), "as ⌈T/128⌉ programs a head ask: "),
            (partial(with_fault, outputs=0), "as ⌈T/128⌉ programs a head ask: "),
            (partial(with_fault, once=3), "(2, 8, 512, 64, 4), each byte once: "),
            (partial(with_fault, of_matrix=2), "(2, 8, 512, 64, 4), dense: "),
            (partial(with_fault, of_matrix=4), "(1, 16, 8192, 128, 2), dense: "),
            (partial(with_fault, add=lambda computing, moving: computing + moving), "dense: "),
            (partial(with_fault, add=min), "the slower bounds it"),
            (partial(with_fault, add=lambda computing, moving: moving), "(1, 16, 8192, 128, 2), each byte once: "),
            (partial(with_fault, add=lambda computing, moving: computing), "(1, 16, 8192, 128, 2), dense: "),
            (lambda *args: least(*args)[::-1], "(1, 16, 8192, 128, 2), dense: "),
            (lambda *args: [1e6 * each for each in least(*args)], "(1, 16, 8192, 128, 2), dense: "),
            (lambda B, *args: least(1, *args), "(2, 8, 512, 64, 4), dense: "),
            (lambda *args: least(*args)[0], "expected 3 values (a number, a number, a number)")],
        same=("computing, nbytes / bandwidth → nbytes / bandwidth, computing",),
    ),
    page.second: Answers(
        right=[keys_held, by_logarithm, by_bits],
        wrong=[
            (partial(held, share=1), "M=32, D=64, 4 warps: 128 keys take 75.3% of the 32,640 registers; 64 is the "
                                     "largest power of two within two thirds"),
            (partial(held, share=0.66), "M=64, D=21, 2 warps: 32 keys take 33.3% of the 16,320 registers; 64 is"),
            (partial(held, share=1 / 3), "M=32, D=128, 8 warps: 64 keys take 31.4%"),
            (partial(held, numbers=lambda n, M, D: n * D + M * n), "M=32, D=128, 8 warps: 256 keys take 125.5%"),
            (partial(held, numbers=lambda n, M, D: 2 * n * D), "M=64, D=64, 8 warps: 256 keys take 100.4%"),
            (partial(held, numbers=lambda n, M, D: 2 * n * D + M * n), "keys take"),
            (partial(held, numbers=lambda n, M, D: M * D + M * n), "keys take"),
            (partial(held, numbers=lambda n, M, D: 4 * (2 * n * D + 2 * M * n)), "M=32, D=128, 8 warps: 32 keys"),
            (partial(held, registers=256, share=0.75), "M=32, D=64, 4 warps: 128 keys take 75.3% of the 32,640"),
            (partial(held, registers=256), "M=85, D=256, 8 warps: 64 keys take 66.9% of the 65,280 registers; 32 is"),
            (partial(held, threads=1), "M=32, D=128, 8 warps: 4 keys take 2.0%"),
            (lambda M, D, warps: 255 * 32 * warps // (3 * (M + D)), "M=32, D=128, 8 warps: 136 keys take 66.7%"),
            (lambda M, D, warps: 2 * keys_held(M, D, warps), "M=32, D=128, 8 warps: 256 keys take 125.5%"),
            (lambda M, D, warps: 128, "M=32, D=64, 4 warps: 128 keys take 75.3% of the 32,640 registers")],
        same=("1 → 2",),  # no case has one key
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_two_thirds_leave_the_tables_tile():
    """The table's kernel that holds keys has 32 queries and 128 keys at D = 128, by 8 warps."""
    from refimpl.attention.kernels import configs

    tile = configs.look_up("dkdv", "datacenter", 2, 128)
    assert keys_held(tile.block_m, 128, tile.num_warps) == tile.block_n
