"""From what is known of failed ranks to one exception that names the rank that failed first."""

import linecache
import pickle
import re
import signal

from .crowded import TOO_MANY, more_open_files
from .errors import RankError, names
from .worker import TORCH_DISTRIBUTED, RankFailure

FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
STARTING = ("/ranks/worker.py", "/ranks/forking.py", "<string>")


def died(rank, when, hint=""):
    """Return the RankFailure of a `launched_ranks.LaunchedRank` whose process ended too early."""
    errors, number = rank.errors.decode(errors="replace").strip(), rank.status & 0x7F
    text = [f"the last that it wrote to stderr:\n{errors}"] if errors else []
    text += [f"where it was:\n{show(frames)}" for frames in threads(rank.stacks.decode(errors="replace"))]
    what = f"was killed by {signal.Signals(number).name} (signal {number})" if number else \
        f"exited with code {rank.status >> 8}"
    what += " after it had returned, while others ran" if rank.value is not None else " before it returned"
    if number == signal.SIGKILL:
        what += "; the kernel does that too when memory runs out"
    if number == signal.SIGBUS:
        what += "; the kernel does that when a mapped file was cut short, or its file system is full: for the " \
                "workers of a DataLoader that is /dev/shm (df -h /dev/shm; docker run --shm-size)"
    if "Received data size doesn't match" in errors:
        what += f"; tensors of different sizes met in a collective: {hint}"
    # gloo aborts the process on an invalid message, so another rank may be to blame.
    return RankFailure(rank.number, what, "\n\n".join(text), when, consequence=number == signal.SIGABRT)


def blame(failures, dead, explain=lambda: None):
    """Return one RankError for all `failures`; `dead` are the ranks whose processes ended.

    Blamed first are failures that may not be consequences of others (as broken connections are); of these, deaths
    before exceptions, since deaths break connections; of these, the earliest.

    A rank that raises a subclass of RankError knows better which ranks are to blame: that class and its `ranks` stay.
    And if all are consequences, `explain()` may return a RankError that says of what.
    """
    first, *others = sorted(failures, key=lambda f: (f.consequence, f.rank not in dead, f.when))
    message = f"rank {first.rank} {first.what}"
    message += "".join(f"\nrank {f.rank}, too, {f.what.splitlines()[0]}" for f in others if not f.consequence)
    if TOO_MANY in first.what:
        message += f"\n{more_open_files()}"
    message += f"\n\n{first.text}" if first.text else ""
    try:
        cause = pickle.loads(first.exception) if first.exception else None
    except Exception as error:
        cause, message = None, f"{message}\n(the exception itself could not be unpickled: {error!r})"
    if isinstance(cause, RankError) and type(cause) is not RankError:
        return type(cause)(f"{cause}\n\n{first.text}", cause.ranks)
    error = explained(RankError(message, [first.rank]), explain() if first.consequence else None)
    error.__cause__ = cause
    return error


def explained(error, better):
    """Return `error`; or `better`, which explains it, with both messages."""
    return type(better)(f"{better}\n\n{error}", better.ranks) if better else error


def hung(stacks, why, returned, world, records=()):
    """Return the RankError for ranks that did not return.

    `stacks`: {rank: what faulthandler wrote in it}; `why`: what they did not do, and for how long; `returned`: ranks
    that had returned; `records`: of all ranks. Ranks that wait for others,
    in the code of `world.folders` or of torch.distributed, are not to blame, unless all do.
    """
    seen = {rank: threads(text) for rank, text in stacks.items()}
    folders = (TORCH_DISTRIBUTED, *world.folders)
    waits = {rank: found for rank, frames in seen.items() if (found := waiting_in(frames, folders))}
    waits.update({rank: told for rank, told in world.waits(records).items() if rank in waits})
    ranks = [rank for rank in stacks if rank not in waits] or list(stacks)
    message = f"{names(ranks)} {why}"
    silent = [rank for rank in ranks if not seen[rank]]
    if silent:
        message += f"; {names(silent)} did not even answer a signal: stopped, or deep in C code"
    if returned:
        message += f"; {names(returned)} had returned"
    for place in sorted(set(waits.values())):
        message += f"\n{names([rank for rank in waits if waits[rank] == place])} waited for others in {place}"
    if not set(ranks).difference(waits) and world.hint:
        message += f"\n{world.hint}"
    for rank in ranks:
        for frames in seen[rank]:
            message += f"\n\nwhere rank {rank} was:\n{show(frames)}"
    return RankError(message, ranks)


def threads(text):
    """Parse what faulthandler wrote: for each thread its frames (file, line, function), innermost first."""
    found = []
    for block in re.split(r"^(?:Current t|T)hread 0x.*$", text, flags=re.MULTILINE):
        frames = [(file, int(line), name) for file, line, name in FRAME.findall(block)]
        frames = [frame for frame in frames if not frame[0].endswith(STARTING)]
        if frames:
            found.append(frames)
    return found


def waiting_in(found, folders):
    """Return the name of the collective, from code in `folders`, in which one of these threads waits; or None."""
    for frames in found:
        if frames[0][0].startswith(folders):
            ours = [name for file, _, name in frames if file.startswith(folders) and name != "wrapper"]
            return ours[-1] if ours else frames[0][2]
    return None


def show(frames):
    """Format frames as a traceback shows them: the innermost call comes last."""
    lines = []
    for file, line, name in reversed(frames):
        source = linecache.getline(file, line).strip()
        lines += [f'  File "{file}", line {line}, in {name}'] + ([f"    {source}"] if source else [])
    return "\n".join(lines)
