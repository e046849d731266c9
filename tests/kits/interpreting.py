"""Calls of interpreted kernels: [("module:name", args, kwargs)] → what they return. They run in this process if it
interprets, as all tests do where there is no GPU, else in one of their own."""

import os
import pickle
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path


def interpreted(calls):
    """New tensors are full of NaN meanwhile, so that what a kernel leaves out shows."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return answers(calls)
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parents[1], here)))
    run = subprocess.run([sys.executable, __file__], input=pickle.dumps(calls), capture_output=True,
                         env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr.decode()
    return pickle.loads(run.stdout)


def answers(calls):
    import torch
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy's: 0 / 0 in rows that are not stored, and how Triton calls it
            return [pkgutil.resolve_name(name)(*args, **kwargs) for name, args, kwargs in calls]
    finally:
        torch.use_deterministic_algorithms(before)


if __name__ == "__main__":
    import quick_interpreter
    quick_interpreter.quicken()
    sys.stdout.buffer.write(pickle.dumps(answers(pickle.loads(sys.stdin.buffer.read()))))
