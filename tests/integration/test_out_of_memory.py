"""Ranks that the kernel ends because the memory of their control group has run out."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness

ROOT = Path("/sys/fs/cgroup")
LIMIT_BYTES = 400 << 20

# Moves itself into the group, and with it all processes that it starts.
INSIDE = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
os.execvp(sys.argv[2], sys.argv[2:])
"""

EATS = """
import numpy as np
import horovod.numpy as hvd
hvd.init()
kept = []
while True:
    hvd.allreduce(np.ones(4))
    if hvd.rank() == 1:
        kept.append(np.ones(1 << 22))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with little memory, of version 1 or 2."""
    is_first = (ROOT / "memory").is_dir()
    folder = (ROOT / "memory" if is_first else ROOT) / f"hvd-test-{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if is_first else "memory.max")
    try:
        folder.mkdir()
        if not limit.exists():
            raise OSError(f"{limit.name} is missing: the memory controller is not enabled")
        limit.write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"NOT RUN: no control group with a limit can be made here: {error}")
    yield folder
    folder.rmdir()


@pytest.mark.parametrize("how", ["itself", "in a shell"])
def test_the_cause_names_the_memory(how: str, group, jobs, script) -> None:
    program = [sys.executable, script(EATS)]
    if how == "in a shell":  # which exits with 137
        program = ["sh", "-c", '"$0" "$1"; exit $?', *program]
    inside = [sys.executable, "-c", INSIDE, str(group)]
    launch = [harness.HOROVODRUN, "-np", "2", *program]
    job = jobs(harness.Job([*inside, *launch]))
    assert job.fail() == 137
    cause = "the memory of its host or container had run out"
    assert (
        f"rank 1 on host localhost was killed by signal 9 (SIGKILL) from the kernel, because {cause}"
        in job.stderr
    )
    # The other rank is told the same.
    assert (
        f"rank 1 on localhost: killed by signal 9 (SIGKILL) from the kernel, because {cause}"
        in job.stderr
    )
