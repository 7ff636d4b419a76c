"""Runs a program with a folder mounted as its `/dev/shm`: `python private_shm.py FOLDER PROGRAM ARGUMENTS...`.

Files that the program and its descendants put into `/dev/shm` are then in FOLDER and nothing else is, whatever other
programs of the machine do. Where the system allows no such mount, FOLDER is removed and the program runs without."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000

LIBC = ctypes.CDLL(None, use_errno=True)


def demand(outcome: int) -> None:
    if outcome != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(source: str | None, target: str, flags: int) -> None:
    where = None if source is None else os.fsencode(source)
    demand(LIBC.mount(where, os.fsencode(target), None, ctypes.c_ulong(flags), None))


def make_namespace() -> None:
    """A mount namespace of this process's own; who is not root needs a user namespace for that."""
    if LIBC.unshare(CLONE_NEWNS) == 0:
        return
    user, group = os.getuid(), os.getgid()
    demand(LIBC.unshare(CLONE_NEWUSER | CLONE_NEWNS))
    # Everybody keeps their numbers.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def main() -> None:
    folder, command = sys.argv[1], sys.argv[2:]
    try:
        make_namespace()
        # Mounts of the system still arrive here, but none of ours leaves.
        mount(None, "/", MS_REC | MS_SLAVE)
        mount(folder, "/dev/shm", MS_BIND)
    except OSError:
        os.rmdir(folder)
    # The interpreter ignores these, and a program would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error}")


if __name__ == "__main__":
    main()
