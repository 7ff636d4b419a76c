"""Faults of a rank, and their ends: signals, sockets, limits, disks, clocks; links are in wire.py."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ground
import plan

HERE = Path(__file__).resolve().parent

# Of the small disks of a job that shall run out of space.
DISK_KIB, SHM_KIB = 1024, 64
# A memfd of ranks that share memory is larger, all that a worker writes smaller.
FILE_MAX = 1 << 20


@dataclass
class Scene:
    """Where a fault happens."""

    folder: Path
    pid: int
    """The victim."""
    bystanders: list[int]
    """The other ranks."""
    launcher: int
    wire: ground.wire.Wire | None = None
    """Between hosts, see wire.py; the victim is on the last one."""

    @property
    def disk(self) -> Path:
        """The small disk, seen from outside of the job's mount namespace."""
        return Path(f"/proc/{self.launcher}/root{self.folder}/disk")

    @property
    def shm(self) -> Path:
        return Path(f"/proc/{self.launcher}/root/dev/shm")


def kill(scene: Scene) -> None:
    os.kill(scene.pid, signal.SIGKILL)


def stop(scene: Scene) -> None:
    os.kill(scene.pid, signal.SIGSTOP)


def go_on(scene: Scene) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(scene.pid, signal.SIGCONT)


def slow(scene: Scene) -> None:
    """Stops it again and again, each time for less than any time-out."""
    for _ in range(5):
        stop(scene)
        time.sleep(0.2)
        go_on(scene)
        time.sleep(0.02)


def reset(scene: Scene) -> None:
    """Every TCP connection that it has gets a reset; when it has none yet, those of the others that wait for it."""
    if not _reset_all(scene.pid):
        for pid in scene.bystanders:
            _reset_all(pid)


def reset_launcher(scene: Scene) -> None:
    """Every rank loses its connection to the launcher; among themselves they share memory."""
    for pid in (scene.pid, *scene.bystanders):
        _reset_all(pid)


def _reset_all(pid: int) -> int:
    """Cuts the connections of a process; how many there were."""
    if not os.path.exists(f"/proc/{pid}/ns/net"):
        return 0  # it has ended
    enter = ["nsenter", "--target", str(pid), "--net"]
    listed = _run(*enter, "ss", "--tcp", "--numeric", "--processes", "--no-header")
    cut = 0
    for line in listed.splitlines():
        if f"pid={pid}," not in line:
            continue
        words = line.split()
        here, there = (_end(word) for word in words[3:5])
        _run(*enter, "ss", "--tcp", "--kill", f"src {here} and dst {there}")
        cut += 1
    return cut


def _end(text: str) -> str:
    address, _, port = text.rpartition(":")
    address = re.sub(r"%\w+", "", address)
    return f"{address}:{port}"


def fill_disk(scene: Scene) -> None:
    _fill(scene.disk)


def fill_shm(scene: Scene) -> None:
    _fill(scene.shm)


def _fill(folder: Path) -> None:
    """Takes all the space that there is, down to the last byte."""
    size = 1 << 16
    with (folder / "filler").open("wb", buffering=0) as file:
        while size:
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
            size //= 2


def refuse_memory(scene: Scene) -> None:
    """No file that it makes may be large, those in memory neither; what it has got it keeps."""
    resource.prlimit(scene.pid, resource.RLIMIT_FSIZE, (FILE_MAX, FILE_MAX))


def refuse_descriptors(scene: Scene) -> None:
    """It cannot open anything more."""
    used = max(int(name) for name in os.listdir(f"/proc/{scene.pid}/fd")) + 1
    hard = resource.prlimit(scene.pid, resource.RLIMIT_NOFILE)[1]
    # Whatever is free below stays usable, as it would when others than we use them up.
    free = set(range(used)) - {int(name) for name in os.listdir(f"/proc/{scene.pid}/fd")}
    limit = used if not free else min(free)
    resource.prlimit(scene.pid, resource.RLIMIT_NOFILE, (limit, hard))


def jump(scene: Scene) -> None:
    """The wall clock of all processes jumps by an hour, then back by a day (clock_jump.c)."""
    for seconds in (3600, -86400):
        new = scene.folder / "clock.new"
        new.write_text(f"{seconds}\n")
        new.rename(scene.folder / "clock")
        time.sleep(0.1)


def clock_library(folder: Path) -> Path:
    """Compiles the library that lets the wall clock jump."""
    library = folder / "clock_jump.so"
    source = HERE / "clock_jump.c"
    _run("gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl")
    return library


def black_hole(scene: Scene) -> None:
    scene.wire.last_host(cut_in=True, cut_out=True)


def one_way(scene: Scene) -> None:
    """Messages from the last host are lost; it receives all others."""
    scene.wire.last_host(cut_out=True)


def other_way(scene: Scene) -> None:
    """The last host hears nothing; what it sends arrives."""
    scene.wire.last_host(cut_in=True)


def loss(scene: Scene) -> None:
    scene.wire.last_host(loss=0.05)


def delay(scene: Scene) -> None:
    scene.wire.last_host(delay_s=0.2)


def heal_link(scene: Scene) -> None:
    scene.wire.last_host()


@dataclass(frozen=True)
class Fault:
    """How it is done; how it is undone once its consequences have been seen, if it has to be; what it needs."""

    do: Callable[[Scene], None]
    undo: Callable[[Scene], None] | None = None
    programs: tuple[str, ...] = ()
    needs_root: bool = False
    between_hosts: bool = False


FAULTS = {
    "SIGKILL": Fault(kill),
    "SIGSTOP": Fault(stop, go_on),
    "connection reset": Fault(reset, programs=("ss", "nsenter"), needs_root=True),
    "launcher's connections reset": Fault(
        reset_launcher, programs=("ss", "nsenter"), needs_root=True
    ),
    "slow rank": Fault(slow),
    "full disk": Fault(fill_disk, programs=("unshare", "mount"), needs_root=True),
    "/dev/shm full": Fault(fill_shm, programs=("unshare", "mount"), needs_root=True),
    "memory refused": Fault(refuse_memory),
    "no descriptors": Fault(refuse_descriptors),
    "clock jump": Fault(jump, programs=("gcc",)),
    "black hole": Fault(black_hole, heal_link, needs_root=True, between_hosts=True),
    "one-way partition, out": Fault(one_way, heal_link, needs_root=True, between_hosts=True),
    "one-way partition, in": Fault(other_way, heal_link, needs_root=True, between_hosts=True),
    "5 % loss": Fault(loss, needs_root=True, between_hosts=True),
    "200 ms delay": Fault(delay, needs_root=True, between_hosts=True),
}


def of(cell: plan.Cell) -> Fault:
    """The fault of a cell; strace does by itself what happens at a system call."""
    if cell.inject:
        return Fault(lambda scene: None, programs=("strace",))
    return FAULTS[cell.fault]


def why_not(fault: Fault) -> str | None:
    """Why it cannot be done here; None when it can."""
    if fault.needs_root and os.geteuid() != 0:
        return "needs root"
    if fault.between_hosts and (reason := ground.why_not()):
        return reason
    missing = [name for name in fault.programs if not shutil.which(name)]
    return f"not installed: {', '.join(missing)}" if missing else None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
