"""`horovodrun --mpi` on two hosts: the launcher of an MPI reaches the other one through real ssh."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import network
import pytest

import harness
from mpi_libraries import LIBRARIES, find

pytestmark = pytest.mark.hosts

WORLD = """
import socket
import numpy as np
import horovod.numpy as hvd
from mpi4py import MPI
hvd.init(comm=MPI.COMM_WORLD)
total = hvd.allreduce(np.arange(100_000.0), op=hvd.Sum)
assert (total == np.arange(100_000.0) * 2).all()
print("says", socket.gethostname(), hvd.rank(), MPI.COMM_WORLD.rank, hvd.local_rank(), hvd.cross_rank(), flush=True)
"""


@pytest.mark.parametrize("name", LIBRARIES)
def test_mpirun_starts_a_rank_on_each_host(name: str, net, jobs, tmp_path: Path) -> None:
    mpi = find(name)
    path = tmp_path / "script.py"
    path.write_text(WORLD)
    words = [harness.HOROVODRUN, "--mpi", "-np", "2", "-H", "host-a:1,host-b:1"]
    words += ["-p", str(network.SSH_PORT), "-i", str(net.folder / "user"), sys.executable, path]
    before = {host.name: host.pids() for host in net.hosts}
    job = jobs(harness.Job(net.hosts[0].enter(list(map(os.fspath, words))), env=mpi.env)).succeed()
    found = sorted(line for line in job.stdout.splitlines() if "says" in line)
    assert found == ["[0]<stdout>:says host-a 0 0 0 0", "[1]<stdout>:says host-b 1 1 0 1"]
    for host in net.hosts:
        left = harness.wait_for_processes_to_end(lambda host=host: host.pids() - before[host.name])
        assert not left, f"processes left on {host.name}: {left}"
