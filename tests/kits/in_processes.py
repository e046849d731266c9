"""Runs test bodies in several processes at once: what each of them compiles, it compiles beside the others, and a
kernel that hangs or reads where it may not takes its own process with it and no other test."""

import concurrent.futures
import importlib
import multiprocessing
import time
import traceback

import pytest
import torch

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
broken_by = None  # in a worker: the task after which its CUDA context is of no use


def outcomes(tasks, processes, seconds):
    """{name: (verdict, text)} of {name: ("module:function", keyword arguments)}, started in this order. What is not
    done after `seconds` in all has failed, and its process is ended."""
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(1,))
    until, found = time.monotonic() + seconds, {}
    try:
        futures = {name: pool.submit(attempt, name, *task) for name, task in tasks.items()}
        for name, future in futures.items():
            try:
                found[name] = future.result(max(0, until - time.monotonic()))
            except concurrent.futures.TimeoutError:
                found[name] = FAILED, f"not done after {seconds} seconds in all"
            except concurrent.futures.process.BrokenProcessPool as error:
                found[name] = FAILED, f"a process died: {error}"
    finally:
        workers = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
            worker.join()
    return found


def attempt(name, path, arguments):
    """In a worker: one task."""
    global broken_by
    if broken_by:
        return FAILED, f"not run: in this process {broken_by} ended with an error of CUDA"
    module, function = path.split(":")
    try:
        getattr(importlib.import_module(module), function)(**arguments)
    except pytest.skip.Exception as skipped:
        return SKIPPED, str(skipped)
    except BaseException as error:  # all of it is told to the test
        if "CUDA error" in str(error) or "cudaError" in str(error):
            broken_by = name
        return FAILED, traceback.format_exc()[-6000:]
    finally:
        if torch.cuda.is_initialized() and not broken_by:
            torch.cuda.empty_cache()
    return PASSED, ""
