"""How ranks that others have started find each other: torch's store, and what each says of itself there.

torchrun's first agent keeps the store, so it outlives the ranks; without torchrun rank 0 keeps it. Ranks are connected
only when all have come and have told what they are: so a rank that is missing, or is there twice, is named.
"""

import contextlib
import datetime
import json
import os
import socket
import sys
import time

import torch.distributed as dist

from ...ranks.errors import RankError, names
from .facts import Hosts, facts_here
from .schedulers import PORT

JOIN = 300.0  # seconds for which ranks wait for each other to begin
SAY = 15.0  # seconds after which a rank that waits says for whom
LOOK = 0.05


def open_store(rank, world_size):
    """Return torch's store, of MASTER_ADDR and MASTER_PORT. RankError, naming both, if it is not there."""
    address, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", str(PORT))
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_PORT={port!r}: expected a port from 1 to 65535, the same on every host")
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return dist.TCPStore(address, int(port), world_size, keeps, datetime.timedelta(seconds=JOIN), False)
    except (RuntimeError, ValueError) as error:
        who = f"rank {rank} ({socket.gethostname()})"
        first = str(error).splitlines()[0]
        if "EADDRINUSE" in str(error):
            raise RankError(f"{who}: MASTER_PORT={port} is in use on this host, where rank 0 keeps torch's store. Set "
                            f"another one, the same on every host (torchrun --master-port); `ss -ltnp` shows who has "
                            f"{port}", [rank]) from error
        raise RankError(f"{who} found no torch store at MASTER_ADDR={address} ({_resolved(address)}), MASTER_PORT="
                        f"{port} within {JOIN:g} s: {first}. Expected that of rank 0's host. Set both alike on every "
                        "host, start rank 0, and let its host accept connections to all ports from the others",
                        [rank]) from error


def _resolved(address):
    try:
        found = socket.gethostbyname(address)
    except OSError:
        return "a name that this host does not know"
    return f"{found}, this host itself" if found.startswith("127.") else found


def address_towards(address):
    """Return this host's address, as one sees it from the host `address`."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.connect((socket.gethostbyname(address), 9))  # sends nothing
        return end.getsockname()[0]
    return "an unknown address"


def meet(store, rank, world_size, backend):
    """Tell the others what this rank is; return the Hosts of all, and the number of this meeting. RankError for ranks
    that do not come within JOIN seconds, or of which there are two, and for what differs.

    torchrun starts ranks anew after a failure (--max-restarts), beside the same store, and its hosts do not count the
    same restarts. So rank 0 calls each meeting, and says when all have come; who comes later waits for the next one.
    """
    mine = facts_here(rank, world_size, backend, address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")))
    number = store.add("meetings", int(rank == 0))
    if number == 0 or store.check([f"meeting {number}/met"]):
        number += 1
    while not _wait_for(store, number, mine):
        number = store.add("meetings", 0)
    here = dist.PrefixStore(f"meeting {number}", store)
    if here.check(["refused"]):
        _refuse(here, text := here.get("refused").decode())
        raise RankError(text, [rank])
    keys = _keys(world_size)
    if here.check(["met"]) and (met := int(here.get("met"))) != world_size:
        keys = [key for key in _keys(max(met, world_size)) if here.check([key])]
    hosts = Hosts(json.loads(each) for each in here.multi_get(keys))
    try:
        hosts.check()
    except RankError as error:
        _refuse(here, str(error))
        raise
    return hosts, number


def _keys(world_size):
    return [f"facts {rank}" for rank in range(world_size)]


def _come(here, mine):
    """Write what this rank is. A second one of its number is refused, unless torchrun has started it in place of the
    first."""
    rank = mine["rank"]
    if here.add(f"came {rank}", 1) > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        here.set("refused", _twice(json.loads(here.get(f"facts {rank}")), mine))
    else:
        here.set(f"facts {rank}", json.dumps(mine))


def _refuse(here, text):
    """Tell those that wait, too, why ranks do not meet; give them the time to read it, as the store may be of this
    process."""
    here.set("refused", text)
    time.sleep(20 * LOOK)


def _wait_for(store, number, mine):
    """Come to a meeting, and wait until all have, or are refused. Returns False if rank 0 has called another one."""
    here, rank, keys = dist.PrefixStore(f"meeting {number}", store), mine["rank"], _keys(mine["world_size"])
    began, said = time.monotonic(), 0
    try:
        _come(here, mine)
        while not _is_over(here, mine, keys):
            if (last := store.add("meetings", 0)) > number:
                if rank == 0:
                    other = json.loads(store.get(f"meeting {last}/facts 0"))
                    raise RankError(_twice(mine, other), [0])
                return False
            waited = time.monotonic() - began
            if waited > JOIN:
                _refuse(here, text := _who_is_missing(here, keys, waited))
                raise RankError(text, [rank])
            if waited > SAY * 2**said and rank == min(_came(here, keys)):  # one of them says it
                print(_who_is_missing(here, keys, waited), file=sys.stderr, flush=True)
                said += 1
            time.sleep(LOOK)
    except dist.DistNetworkError as error:
        raise RankError(f"rank {rank} ({socket.gethostname()}) has lost torch's store at "
                        f"{os.environ.get('MASTER_ADDR')} while it waited for all ranks to begin: rank 0 or torchrun "
                        "there has ended; its output says why", [rank]) from error
    return True


def _is_over(here, mine, keys):
    """Tell whether ranks have met, which rank 0 says, or do not."""
    if here.check(["met"]) or here.check(["refused"]):
        return True
    if not here.check(keys):
        return False
    if mine["rank"] == 0:
        here.set("met", str(mine["world_size"]))
    return mine["rank"] == 0 or json.loads(here.get("facts 0"))["world_size"] != mine["world_size"]


def _came(store, keys):
    return [number for number, key in enumerate(keys) if store.check([key])]


def _who_is_missing(store, keys, waited):
    came = _came(store, keys)
    here = Hosts([json.loads(store.get(keys[rank])) if rank in came else {"host": "?", "address": "?"}
                  for rank in range(len(keys))])
    missing = [rank for rank in range(len(keys)) if rank not in came]
    told = ", ".join(f"{host} has {names(ranks)}" for host, ranks in here.groups(came).items())
    return (f"ranks {missing} of {len(keys)} have not begun after {waited:.0f} s; {told}. Expected WORLD_SIZE="
            f"{len(keys)} processes with MASTER_ADDR={os.environ.get('MASTER_ADDR')} and MASTER_PORT="
            f"{os.environ.get('MASTER_PORT', PORT)}: start those on the other hosts, or set WORLD_SIZE to what runs "
            "(torchrun: --nnodes)")


def _twice(first, second):
    rank = first["rank"]
    return (f"rank {rank} is there twice: process {first['pid']} on {first['host']} and process {second['pid']} on "
            f"{second['host']} have RANK={rank}. Give each process a number of its own (torchrun: another --node-rank "
            "on each host)")
