"""Our engines beside PyTorch's at a real size, read by PyTorch's own allocator: one of eight ranks of a model of 7B.

    python -m benchmarks.engines [--record]

Each engine is made and steps in a process of its own, on a device without kernels and in a group whose other ranks are
not there (phantom/group.py). The engines and models are those of the benches `zero`, `tensor_parallel`, `pipeline`.
`--record` writes data/measurements/phantom/engines.json.
"""

import json
import subprocess
import sys
import time

import torch

from refimpl import phantom
from refimpl.comm import launch
from refimpl.model import GPTConfig
from refimpl.phantom import group

from . import __main__, pipeline, record, tensor_parallel, zero

WORLD = 8
SEVEN = {"vocabulary": 32000, "context": 512, "layers": 32, "hidden": 4096, "heads": 32}
PIPELINES = ("gpipe", "1f1b")  # where rank 0 receives gradients alone
STEPS = 2  # before the one that is read
PAIRS = [*(("zero", *pair) for pair in zero.PAIRS), *(("tensor_parallel", *pair) for pair in tensor_parallel.PAIRS),
         *(("pipeline", f"ours {name}", f"theirs {name}") for name in PIPELINES)]  # bench, ours, the peer
PROGRAM = """
import json, sys
from refimpl import phantom
phantom.start(memory=2**39)  # before torch, which the benches import
from benchmarks import engines
print(json.dumps(engines.of_one_rank(*sys.argv[1:])))
"""


def main(arguments):
    """Read every pair, print the table, and with `--record` keep it."""
    rows = list(rows_of(PAIRS))
    print(__main__.table(rows))
    if "--record" in arguments:
        words = phantom.words(torch.__version__)
        settings = {"ranks": WORLD, "rank": 0, "model": SEVEN, "rows of a rank": 1, "dtype": "fp32", "of": words,
                    "read": "torch.cuda.max_memory_allocated of a step after two"}
        reading = record.describe("engines", settings, rows, "cpu")
        reading["device"] |= {"slug": "phantom", "name": "a device without kernels"}
        print(f"written to {record.write(reading)}")


def rows_of(pairs):
    """Yield the rows of some pairs: peaks that PyTorch's allocator counted as allocated, and what it reserved."""
    found = {(bench, name): peaks(bench, name) for bench, *names in pairs for name in names}
    for bench, *names in pairs:
        ours, theirs = (found[bench, name] for name in names)
        yield record.row(f"peak of a step, {names[0]}", names[1], "B", ours["allocated"], theirs["allocated"],
                         ours=ours, theirs=theirs)


def peaks(bench, name):
    """Return what `read` does of the engine `name` of a bench, made in a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, bench, name], capture_output=True, text=True,
                          env=phantom.environment_without())
    if done.returncode:
        raise RuntimeError(f"{bench}, {name}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def of_one_rank(bench, name):
    """Read an engine as rank 0 of eight, in this process, whose device is one without kernels."""
    group.pretend(WORLD)
    return launch(read, WORLD, bench, name, device="cuda", timeout=3600)[0]


def read(comm, bench, name):
    """Return {"allocated", "reserved"}: the peaks of a step in bytes; {"seconds"}: of the host."""
    with torch.device(comm.device):
        engine, tokens = made(comm, bench, name)
    for _ in range(STEPS):
        engine.step(tokens)
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    engine.step(tokens)
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            "seconds": time.perf_counter() - began, "torch": torch.__version__}


def made(comm, bench, name):
    """Return an engine of a bench, and the tokens of a step."""
    if bench == "zero":
        sizes = {"vocab_size": SEVEN["vocabulary"], "context_length": SEVEN["context"]}
        return zero.made(name, comm, GPTConfig(**sizes, **{key: SEVEN[key] for key in ("layers", "hidden", "heads")}))
    rows = 1 if bench == "tensor_parallel" else pipeline.MICRO_BATCHES
    tokens = torch.zeros(rows, SEVEN["context"], dtype=torch.int64)
    if bench == "tensor_parallel":
        return tensor_parallel.TRAINERS[name](tensor_parallel.Decoder(**SEVEN), comm), tokens

    class Told(pipeline.Theirs):
        """torch's stages, which would ask ranks that are not there for the shapes of tensors."""

        def known(self, stage, sizes):
            x = torch.empty(1, sizes["context"], sizes["hidden"], device="meta")
            gradients = {"output_grads": x} if torch.__version__ >= (2, 12) else {}
            return {"input_args": tokens[:1].to("meta"), "output_args": x, **gradients}

    # Since torch 2.12 the last rank says whether all stages were told. It is not there.
    pipeline.pipelining.PipelineStage._warmup_backward_result = lambda stage, **results: torch.ones(1)
    kind, _, schedule = name.partition(" ")
    return {"ours": pipeline.Ours, "theirs": Told}[kind](schedule, comm, SEVEN), tokens


if __name__ == "__main__":
    main(sys.argv[1:])
