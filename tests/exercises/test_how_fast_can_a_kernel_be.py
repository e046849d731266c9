"""Right answers pass, wrong and unanswered ones do not."""

import functools

from exercises_kit import Answers, graded

from exercises import how_fast_can_a_kernel_be as page


def least(B, H, T, D, e, flops, bandwidth, matrices=4, products=4, queries=128, add=max):
    q, computing = e * B * H * T * D, products * B * H * T * T * D / flops
    dense = 4 * q + matrices * e * B * H * T * T
    asked = 2 * q + 2 * q * T / queries
    return tuple(add(computing, nbytes / bandwidth) for nbytes in (dense, asked, 4 * q))


def keys_held(M, D, warps, share=2 / 3, matrices=2):
    n = 1
    while matrices * 2 * n * (D + M) / 2 <= share * 255 * 32 * warps:
        n *= 2
    return n // 2


ANSWERS = {
    page.first: Answers(
        right=[least],
        wrong=[
            (functools.partial(least, matrices=6), "dense: "),
            (functools.partial(least, products=2), "each byte once: "),
            (functools.partial(least, queries=64), "as asked: "),
            (functools.partial(least, add=lambda a, b: a + b), "dense: "),
            (functools.partial(least, add=min), "bound by"),
            (lambda *args: least(*args)[0], "expected three times")],
    ),
    page.second: Answers(
        right=[keys_held],
        wrong=[
            (functools.partial(keys_held, share=1), "within two thirds"),
            (functools.partial(keys_held, matrices=1), "within two thirds"),
            (lambda M, D, warps: 128, "M=32, D=64, 4 warps: 128 keys take 75% of the registers")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_two_thirds_leave_the_tables_tile():
    """The table's kernel that holds keys has 32 queries and 128 keys at D = 128, by 8 warps."""
    from refimpl.attention.kernels import configs

    tile = configs.look_up("dkdv", "datacenter", 2, 128)
    assert keys_held(tile.block_m, 128, tile.num_warps) == tile.block_n
