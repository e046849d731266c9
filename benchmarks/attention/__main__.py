"""A kernel's trial, in this process: `python -m benchmarks.attention NAME SHAPES`, with the shapes as JSON."""

import json
import sys

from .kernels import Shape, trial

print(trial(sys.argv[1], [Shape(*each) for each in json.loads(sys.argv[2])]))
