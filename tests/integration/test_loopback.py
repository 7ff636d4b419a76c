"""A network namespace whose loopback interface is down, as a fresh one is."""

from __future__ import annotations

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
