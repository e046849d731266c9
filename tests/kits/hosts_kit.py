"""Several hosts on one machine: namespaces with a network, a name, a /tmp, a clock and processes of their own.

    with Hosts(folder, "hosta", "hostb") as hosts:
        run = hosts.run(code, ranks=2)              # two processes on each host, started by torchrun
        done = run.wait(60)                         # {host: Done(code, text)}

Each host has eth0 at 10.77.0.i, on a bridge in a namespace of its own, and sees `hosts.shared` (the same for all), its
own working directory under the same path, and its own /tmp. Its monotonic clock is hours from the others'. All it runs
ends with it, and with this process: its first process takes the others along. It needs root, util-linux and iproute2:
`missing()` says what is not there.

`how`: "torchrun" is what users call. "forked" gives each rank torchrun's variables without an agent, "slurm"
those of SLURM, both in a process that has torch imported already: 0.1 s instead of 4.
"""

import atexit
import contextlib
import ctypes
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from torch.multiprocessing import _prctl_pr_set_pdeathsig as die_with_parent

ROOT = Path(__file__).resolve().parents[2]
PORT = 29555
SPACES = {"uts": 0x04000000, "net": 0x40000000, "time": 0x80, "pid": 0x20000000, "mnt": 0x00020000}
SETTLE = 10  # seconds that setting up a host may take


@functools.cache
def missing():
    """Say what this machine lacks for hosts, or ""."""
    if os.geteuid() or not sys.platform.startswith("linux"):
        return "hosts are namespaces of Linux, and only root may make them"
    if gone := [name for name in ("unshare", "nsenter", "ip") if not shutil.which(name)]:
        return f"{', '.join(gone)} is not installed (util-linux, iproute2)"
    made = subprocess.run(["unshare", "--net", "--mount", "--uts", "--pid", "--time", "--fork", "--mount-proc", "sh",
                           "-c", "ip link add name br0 type bridge && ip link add name one type veth peer name two"],
                          capture_output=True, text=True)
    return "" if made.returncode == 0 else f"this machine makes no namespaces with a bridge: {made.stderr.strip()}"


@dataclass
class Done:
    """How a host's processes ended. `lines`: (time.monotonic(), text) of what they wrote."""

    code: int | None
    lines: list

    @property
    def text(self):
        return "\n".join(line for _, line in self.lines)

    def when(self, words):
        """The time at which it wrote a line with these words; None if it did not."""
        return next((at for at, line in self.lines if words in line), None)


class Hosts:
    """Starts hosts with these names, as a context. `names_of`: {host: what its /etc/hosts says of itself}."""

    def __init__(self, folder, *names, own_address=None):
        self.folder, self.names, self._own_address = Path(folder), names or ("hosta", "hostb"), own_address or {}
        self.shared, self.own = self.folder / "shared", self.folder / "own"
        self._holders, self._pids, self._runs = {}, {}, []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            self.shared.mkdir(parents=True)
            self.own.mkdir()
            for name in (None, *self.names):
                self._hold(name)
            for name in (None, *self.names):
                self._pids[name] = _child_of(self._holders[name].pid)
            self._connect()
            for name in self.names:
                self._furnish(name)
            stack.pop_all()
        return self

    def __exit__(self, *_):
        self._end()

    def _hold(self, name):
        """Start the first process of a host; of None, the switch."""
        spaces = ["--mount", "--uts", "--time", "--monotonic", str(7200 * self._number(name))] if name else []
        self._holders[name] = subprocess.Popen(
            ["unshare", "--net", "--pid", *spaces, "--fork", "--kill-child", "--mount-proc", "sleep", "100000"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL))

    def _number(self, name):
        return 1 + self.names.index(name)

    def address(self, name):
        return f"10.77.0.{self._number(name)}"

    def _connect(self):
        lines = ["link add name br0 type bridge", "link set br0 up"]
        for name in self.names:
            lines += [f"link add name {name} type veth peer name eth0 netns {self._pids[name]}",
                      f"link set {name} master br0", f"link set {name} up"]
        self._within(None, "ip", "-batch", "-", text="\n".join(lines))

    def _furnish(self, name):
        there = self.folder / name
        stage, home = there / "tmp", there / "own"
        for folder in (stage, home):
            folder.mkdir(parents=True)
        known = "".join(f"{self._own_address.get(each, self.address(each)) if each == name else self.address(each)} "
                        f"{each}\n" for each in self.names)
        (there / "etc-hosts").write_text(f"127.0.0.1 localhost\n{known}")
        lines = ["set -e", f"hostname {name}", "ip link set lo up", f"ip addr add {self.address(name)}/24 dev eth0",
                 "ip link set eth0 up", f"mount --bind {home} {self.own}",
                 f"mount --bind {there / 'etc-hosts'} /etc/hosts"]
        for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix), self.folder):
            if path.is_relative_to("/tmp"):  # else the host's own /tmp would hide it
                hidden = stage / path.relative_to("/tmp")
                lines += [f"mkdir -p {hidden}", f"mount --rbind {path} {hidden}"]
        self._within(name, "sh", text="\n".join([*lines, f"mount --rbind {stage} /tmp"]))

    def _within(self, name, *command, text=""):
        """Run a command in a host, as this machine's root; in None, the switch."""
        spaces = ["-m", "-u"] if name else []
        done = subprocess.run(["nsenter", "-t", str(self._pids[name]), "-n", *spaces, *command], input=text, text=True,
                              capture_output=True, timeout=SETTLE)
        assert done.returncode == 0, f"{command} in {name}: {done.stderr}"
        return done.stdout

    def _end(self):
        for run in self._runs:
            run.stop()
        for name, holder in self._holders.items():
            if name in self._pids:  # the rest of a host goes with its first process, and then `unshare` ends
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[name], signal.SIGKILL)
            else:
                holder.kill()
        for holder in self._holders.values():
            holder.wait(SETTLE)
        for run in self._runs:
            run.join()

    # --- what may befall them ----------------------------------------------------------------------------------------

    def cut(self, name):
        """Take a host's cable out: nobody is told, packets are lost."""
        self._within(None, "ip", "link", "set", name, "down")

    def mend(self, name):
        self._within(None, "ip", "link", "set", name, "up")

    def power_off(self, name):
        """End all that a host runs, and its network first: no other host hears of it."""
        self.cut(name)
        os.kill(self._pids[name], signal.SIGKILL)

    def sent(self, name):
        """The bytes that have left a host by its cable."""
        lines = Path(f"/proc/{self._pids[name]}/net/dev").read_text()
        return int(re.search(r"eth0:\s*(.*)", lines)[1].split()[8])

    # --- what they run -----------------------------------------------------------------------------------------------

    def run(self, code, ranks=1, how="torchrun", options=(), codes=None, own=None, late=None, **environment):
        """Start a script on every host: `ranks` processes on each, a number or one for each host. `codes`: {host: its
        own script}; `own`: {host: variables of its own}; `late`: {host: seconds}. Returns the Run."""
        counts = dict(zip(self.names, [ranks] * len(self.names) if isinstance(ranks, int) else ranks, strict=True))
        run, first, script = Run(self), 0, self.own / "script.py"
        if how != "torchrun":
            zygote()  # here: what a thread starts ends with the thread
        self._runs.append(run)
        for index, name in enumerate(self.names):
            (self.folder / name / "own" / "script.py").write_text(textwrap.dedent((codes or {}).get(name, code)))
            if how == "torchrun":
                command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(self.names)),
                           "--node-rank", str(index), "--nproc-per-node", str(counts[name]), "--master-addr",
                           self.names[0], "--master-port", str(PORT), *options, str(script)]
                starts = [(command, {})]
            else:
                starts = [(None, self._variables(how, counts, name, first + i, i)) for i in range(counts[name])]
            for command, variables in starts:
                variables = {**_environment(), **variables, **environment, **(own or {}).get(name, {})}
                variables = {key: value for key, value in variables.items() if value is not None}
                run.start(name, command, variables, script, (late or {}).get(name, 0))
            first += counts[name]
        return run

    def _variables(self, how, counts, name, rank, here):
        """What torchrun, or `srun`, sets for a rank."""
        size = str(sum(counts.values()))
        if how == "slurm":
            return {"SLURM_STEP_NUM_TASKS": size, "SLURM_NTASKS": size, "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(here), "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4711",
                    "SLURM_NODEID": str(self._number(name) - 1), "SLURM_JOB_NODELIST": ",".join(self.names),
                    "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts.values()))}
        return {"MASTER_ADDR": self.names[0], "MASTER_PORT": str(PORT), "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": str(counts[name]), "RANK": str(rank), "LOCAL_RANK": str(here)}


class Run:
    """Holds what hosts run: what they write, with the time, and how they end."""

    def __init__(self, hosts):
        self._hosts, self._lock, self._threads, self._ranks = hosts, threading.Lock(), [], {}
        self.lines, self._codes = ({name: [] for name in hosts.names} for _ in range(2))
        self._stopped = threading.Event()
        self._pending = dict.fromkeys(hosts.names, 0)

    def start(self, name, command, variables, script, late):
        self._pending[name] += 1
        thread = threading.Thread(target=self._serve, args=(name, command, variables, script, late), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, name, command, variables, script, late):
        """Start one process on a host; take in what it writes until it ends."""
        code = None
        try:
            if self._stopped.wait(late):
                return
            pid, hosts = self._hosts._pids[name], self._hosts
            if command is None:
                process = zygote().fork(pid, variables, hosts.own, script)
                self._ranks[int(variables.get("RANK", variables.get("SLURM_PROCID", -1)))] = process.pid
            else:
                process = subprocess.Popen(
                    ["nsenter", "-t", str(pid), "-n", "-m", "-u", "-p", "-T", "sh", "-c",
                     f'cd {hosts.own} && exec "$@"', "sh", *command],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    errors="replace", env=variables)
            with process.stdout as out:
                for line in out:
                    self.lines[name].append((time.monotonic(), line.rstrip("\n")))
            code = process.wait()
        finally:
            with self._lock:
                self._codes[name].append(code)
                self._pending[name] -= 1

    def pid(self, rank):
        """The process of a rank, once it has begun."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            if rank in self._ranks:
                return self._ranks[rank]
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    if process.environ().get("RANK") == str(rank) and self._is_here(process):
                        return process.pid
            time.sleep(0.05)
        raise AssertionError(f"rank {rank} has not begun:\n{self.text}")

    def _is_here(self, process):
        space = os.readlink(f"/proc/{process.pid}/ns/pid")
        return any(space == os.readlink(f"/proc/{pid}/ns/pid") for pid in self._hosts._pids.values()
                   if psutil.pid_exists(pid))

    def signal(self, rank, number):
        os.kill(self.pid(rank), number)

    def heard(self, words, times=1, seconds=40):
        """Wait until these words have been written so often, by all hosts together; return the time."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = sorted(at for lines in self.lines.values() for at, line in lines if words in line)
            if len(found) >= times:
                return found[times - 1]
            time.sleep(0.01)
        raise AssertionError(f"{words!r} was not written {times} times within {seconds} s:\n{self.text}")

    def wait(self, seconds):
        """Wait for all hosts' ends; return {host: Done}. A host that still runs has no code."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0, until - time.monotonic()))
        with self._lock:
            return {name: Done(None if self._pending[name] else max(map(abs, self._codes[name])), self.lines[name])
                    for name in self._hosts.names}

    @property
    def text(self):
        return "\n".join(f"[{name}] {line}" for name, lines in self.lines.items() for _, line in lines)

    def stop(self):
        self._stopped.set()

    def join(self):
        for thread in self._threads:
            thread.join(SETTLE)


def _environment():
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if key in os.environ}
    return {**kept, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'kits'}", "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp",
            "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}


def _child_of(pid):
    until = time.monotonic() + SETTLE
    while time.monotonic() < until:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            child = int(children[0])
            if "sleep" in Path(f"/proc/{child}/comm").read_text():  # its namespaces are complete
                return child
        time.sleep(0.005)
    raise AssertionError(f"process {pid} has started none")


# --- a process that has torch imported, and forks ranks into hosts ---------------------------------------------------


@functools.cache
def zygote():
    return Zygote()


def pids():
    """The process that stays for the next test, if there is one."""
    return {zygote()._process.pid} if zygote.cache_info().currsize else set()


class Zygote:
    """Starts, in the caller's place, processes that run a script in a host."""

    def __init__(self):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import hosts_kit; hosts_kit.serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment(),
                preexec_fn=lambda: die_with_parent(signal.SIGKILL))
        self._lock = threading.Lock()
        atexit.register(self.close)

    def close(self):
        atexit.unregister(self.close)
        self._socket.close()
        self._process.wait()

    def fork(self, *wanted):
        """Run a script in the namespaces of process `pid`; return its Process."""
        ours, theirs = zip(*(os.pipe() for _ in range(2)), strict=True)
        with self._lock:
            message = json.dumps([str(each) if isinstance(each, Path) else each for each in wanted]).encode()
            socket.send_fds(self._socket, [message], theirs)
        for fd in theirs:
            os.close(fd)
        return Process(*(open(fd, errors="replace") for fd in ours))


class Process:
    """What `subprocess.Popen` would be of it. `pid`: outside of its host."""

    def __init__(self, out, told):
        self.stdout, self._told = out, told
        self.pid = int(told.readline())

    def wait(self):
        with self._told:
            return os.waitstatus_to_exitcode(int(self._told.readline() or -1))


def serve(fd):
    """In the zygote: import what ranks need, then fork what is asked for until the caller is gone."""
    import torch
    import torch._dynamo  # the first optimizer would

    import refimpl.comm
    import refimpl.engine
    import refimpl.zero  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=fd)
    while True:
        message, fds, *_ = socket.recv_fds(requests, 1 << 20, 2)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            os._exit(_become(*json.loads(message), *fds))
        for each in fds:
            os.close(each)


def _become(pid, variables, folder, script, out, told):
    """Run the script in a child of this process, in the host; tell its pid, then how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("uts", "net", "pid", "time", "mnt"):  # mnt last: /proc is then the host's own
        space = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        if libc.setns(space, SPACES[name]):
            os.write(told, f"0\n{1 << 8}\n".encode())
            return 1
        os.close(space)
    child = os.fork()
    if child:
        os.close(out)
        os.write(told, f"{child}\n".encode())
        os.write(told, f"{os.waitpid(child, 0)[1]}\n".encode())
        return 0
    os.close(told)
    die_with_parent(signal.SIGKILL)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv[:] = [script]
    return _run(script)


def _run(script):
    import runpy
    import traceback

    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    return code
