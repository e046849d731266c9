"""A plugin (`pytest -p on_phantom`): all tests of the process run on eight devices without kernels."""

from refimpl import phantom

phantom.start(memory=80 * 2**30, devices=8)
