"""Compilation of many kernels in other processes, several at once.

The other processes never interpret kernels, even if this one runs with TRITON_INTERPRET=1.
"""

import concurrent.futures
import io
import os
import pickle
import pkgutil
import subprocess
import sys
import traceback

from ..record import cores
from .compiled import compile_kernel
from .sass import disassembled

SHARE = 24  # cases for one process, which takes some seconds to start


def compile_all(named, processes=None):
    """Compile {name: Case} in several processes (default: one per core).

    Yields (name, Compiled) of each as it is done, or (name, RuntimeError) if it does not compile.
    """
    names = list(named)
    shares = [names[i : i + SHARE] for i in range(0, len(names), SHARE)]
    with concurrent.futures.ThreadPoolExecutor(processes or cores()) as pool:
        compiling = {pool.submit(compile_each, [named[name] for name in share]): share for share in shares}
        try:
            for done in concurrent.futures.as_completed(compiling):
                yield from zip(compiling[done], done.result(), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def compile_cases(cases):
    """Compile each Case in another process and return the list of Compiled. Raises the first RuntimeError."""
    found = compile_each(cases)
    for each in found:
        if isinstance(each, RuntimeError):
            raise each
    return found


def compile_each(cases):
    """Compile each Case in another process. Returns for each its Compiled, or a RuntimeError with the process's output.

    If the compiler aborts, its process ends, and the remaining cases go to a new one.
    """
    cases, found = list(cases), []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    while len(found) < len(cases):
        run = subprocess.run([sys.executable, "-c", f"from {__name__} import _answer; _answer()"], env=environment,
                             input=pickle.dumps(cases[len(found):]), capture_output=True)
        found += _answers(run.stdout)
        if len(found) < len(cases):
            found.append(f"exit status {run.returncode}\n{run.stderr.decode()}")
    compiled = iter(disassembled(answer for answer in found if not isinstance(answer, str)))
    return [RuntimeError(f"compiling {case.kernel} failed: {answer[-4000:]}") if isinstance(answer, str)
            else next(compiled) for case, answer in zip(cases, found, strict=True)]


def _answers(said):
    """Read the pickles one after another; the last one may be incomplete."""
    answers, stream = [], io.BytesIO(said)
    while True:
        try:
            answers.append(pickle.load(stream))
        except (EOFError, pickle.UnpicklingError):
            return answers


def _answer():
    """Read cases from stdin; write a Compiled or a traceback for each to stdout. Runs in the other process."""
    for case in pickle.load(sys.stdin.buffer):
        try:
            answer = compile_kernel(pkgutil.resolve_name(case.kernel), case.arguments, num_warps=case.num_warps,
                                    num_stages=case.num_stages, **case.options)
        except Exception:
            answer = traceback.format_exc()
        sys.stdout.buffer.write(pickle.dumps(answer))
        sys.stdout.buffer.flush()
