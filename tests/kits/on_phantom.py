"""A plugin (`pytest -p on_phantom`): all tests of the process run on eight devices without kernels.

With NUMBERS=bytes in the environment, operations whose tensors have at most that many have numbers: as counts of
tokens, by which a step decides. Bytes do not depend on the others.
"""

import os

from refimpl import phantom

NUMBERS = int(os.environ.get("NUMBERS", 0))
phantom.start(memory=80 * 2**30, devices=8, numbers=NUMBERS > 0)
if NUMBERS:
    from refimpl.phantom import numbers

    numbers.LIMIT = NUMBERS
