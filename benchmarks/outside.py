"""The meter on models that others wrote: transformers', timm's and peft's, on a CPU.

The programs are those of tests/kits/outside_programs.py, tiny, and four of transformers' at a realistic size. They
need a checkout and the test extra; without these there are no rows.
"""

import importlib
import sys

from tqdm import tqdm

from refimpl import memory

from .record import CHECKOUT, row
from .runner import BAR_DELAY, compare

KITS = CHECKOUT / "tests" / "kits"
ROUNDS_EACH = 5  # of a tiny program
REALISTIC = {  # 4 layers of 256
    "gpt2": ("causal", {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 256}),
    "llama": ("causal", {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
                         "intermediate_size": 688, "vocab_size": 256}),
    "bert": ("masked", {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
                        "intermediate_size": 1024}),
    "t5": ("seq2seq", {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4, "vocab_size": 256,
                       "decoder_start_token_id": 0}),
}


def kit():
    """The modules of programs, of how to read them, and of models; None where they or what they import are missing."""
    if str(KITS) not in sys.path:
        sys.path.append(str(KITS))
    try:
        return [importlib.import_module(name) for name in ("outside_programs", "outside_reading", "outside.models")]
    except ImportError:
        return None


def rows(rounds, names=None):
    """Yield a row of time for each realistic model, and for each program (all, or those of `names`) one of bytes.

    A row of bytes: the tracker's peak above the start of a step beside that of the allocator alone, in another run;
    `slowdown`: a tracked step over a plain one.
    """
    found = kit()
    if found is None:
        return
    programs, reading, models = found
    for name, (kind, config) in REALISTIC.items():
        program = programs.plain(getattr(models, kind)(name, **config), models.text(4, 128))()
        yield time_row(f"tracked step of transformers' {name}, 4 layers of 256, 4 x 128 tokens", program, rounds)
    for name in tqdm(names or programs.PROGRAMS, "programs", delay=BAR_DELAY, leave=False):
        build = programs.PROGRAMS[name]
        alone, tracked = reading.read_alone(build), reading.read_tracked(build)
        time = time_row(name, build(), ROUNDS_EACH)
        yield row(f"tracker's peak above the start, {name}", "allocator alone, bytes asked for", "bytes", tracked.peak,
                  alone.peak, net=tracked.net - alone.net, slowdown=time["ratio"], notes=tracked.log.notes)


def time_row(what, program, rounds):
    """Seconds of a tracked step beside an untracked one, in alternation."""

    def tracked():
        with memory.track(*program.objects):
            program.step()

    timing = compare({"tracked": tracked, "untracked step": program.step}, rounds=rounds, title=what)
    return timing.row(what, "tracked", "untracked step")
