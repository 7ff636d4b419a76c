"""Network namespaces whose loopback interface is down, as in a fresh one, or has an address of IP version 6 only."""

from __future__ import annotations

import shutil
import sys

import pytest

import harness

# As root alone, for others in a user namespace.
WITHOUT_LOOPBACK = """
import ctypes, os, sys
NEWNET, NEWUSER = 0x40000000, 0x10000000
libc = ctypes.CDLL(None)
if libc.unshare(NEWNET) != 0 and libc.unshare(NEWUSER | NEWNET) != 0:
    sys.exit(77)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def test_a_loopback_that_is_down_is_named_at_once_with_the_cure(jobs) -> None:
    launch = [harness.HOROVODRUN, "-np", "2", "true"]
    job = jobs(harness.Job([sys.executable, "-c", WITHOUT_LOOPBACK, *launch]))
    if job.fail() == 77:
        pytest.skip("this system allows no network namespaces")
    assert "the loopback interface is down" in job.stderr
    assert "ip link set lo up" in job.stderr


WITH_VERSION_6_ONLY = """
ip link set lo up || exit 77
ip -6 addr show dev lo | grep -q "inet6 ::1/128" || exit 77
ip addr del 127.0.0.1/8 dev lo || exit 77
exec "$@"
"""

ADD_UP = """
import numpy as np
import horovod.numpy as hvd
hvd.init()
total = hvd.allreduce(np.full(100_003, hvd.rank() + 1.0, np.float32), op=hvd.Sum)
assert (total == 3).all()
print("right", flush=True)
"""


@pytest.mark.parametrize("shm", ["1", "0"])
def test_a_loopback_with_an_address_of_version_6_only_is_enough(shm, jobs, script) -> None:
    if not shutil.which("ip"):
        pytest.skip("NOT RUN: ip is not installed (Debian package iproute2)")
    launch = [harness.HOROVODRUN, "-np", "2", sys.executable, script(ADD_UP)]
    within = [sys.executable, "-c", WITHOUT_LOOPBACK, "sh", "-c", WITH_VERSION_6_ONLY, "sh"]
    job = jobs(harness.Job([*within, *launch], env={"HOROVOD_SHM": shm}))
    if job.wait() == 77:
        pytest.skip("NOT RUN: this system allows no network namespaces, or knows no IP version 6")
    assert job.succeed().stdout.count("right") == 2
