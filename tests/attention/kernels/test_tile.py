"""The queries that see a tile of keys."""

import attention_kit as kit
import torch

from refimpl.attention import flash_attention, reference_attention

pytestmark = kit.in_the_interpreter()


def test_more_queries_than_keys_have_the_gradients_of_their_window():
    """Of 20 queries the last four are at the four keys; of those before, some see a key or all do, by the window."""
    given = kit.inputs(1, 1, 1, 20, 4, 16)
    for window in (2, 18):
        found, expected = (kit.gradients(function, *given, window=window)
                           for function in (flash_attention, reference_attention))
        assert all(x.abs().max() > 0.1 for x in expected)
        torch.testing.assert_close(found, expected)
