"""An instrument that shares nothing with the tracker: the profiler's trace, as a file, of a script that runs as it is.

    python tests/kits/allocator_peaks.py STEPS SCRIPT     prints the peak of the CPU's tensors, in bytes, from the first
                                                          forward to the end of so many optimizer steps
"""

import ctypes
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path


def peak_of(script, steps):
    """Return what this file prints for a script, of a process of its own."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests' / 'kits'}",
                   "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, __file__, str(steps), str(script)], capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.splitlines()[-1])


def main(limit, script):
    import outside  # noqa: F401 - before anything imports torchvision
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.profiler import ProfilerActivity, profile, record_function

    class Enough(BaseException):
        pass

    made = []

    def called(module, args):
        if not made:
            made.append(0)
            with record_function("first forward"):
                pass

    def stepped(optimizer, args, kwargs):
        made[0] += 1
        if made[0] == limit:
            raise Enough

    torch.set_num_threads(1)
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True  # of all threads
    register_module_forward_pre_hook(called)
    if limit:
        register_optimizer_step_post_hook(stepped)
    sys.argv = [script]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.empty(1)
        try:
            runpy.run_path(script, run_name="__main__")
        except Enough:
            pass
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    begin = min(event["ts"] for event in events if event.get("name") == "first forward")
    memory = sorted((event["ts"], number, event["args"]["Total Allocated"]) for number, event in enumerate(events)
                    if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0)
    before = [total for at, _, total in memory if at < begin][-1:]
    print(max(before + [total for at, _, total in memory if at >= begin]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
