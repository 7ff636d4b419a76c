"""MPI on two hosts, whose launcher reaches the other one through real ssh: `horovodrun --mpi`, and `mpirun` itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import network
import pytest

import harness
from mpi_libraries import LIBRARIES, Mpi, find

pytestmark = pytest.mark.hosts

WORLD = """
import os, socket
import numpy as np
import horovod.numpy as hvd
from mpi4py import MPI
hvd.init(comm=MPI.COMM_WORLD)
total = hvd.allreduce(np.arange(100_000.0), op=hvd.Sum)
assert (total == np.arange(100_000.0) * 2).all()
words = ("says", socket.gethostname(), hvd.rank(), MPI.COMM_WORLD.rank, hvd.local_rank(), hvd.cross_rank())
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece
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


ALONE = """
import os, socket
import numpy as np
{imports}
import horovod.numpy as hvd
for again in range(2):
    hvd.init()
    total = hvd.allreduce(np.arange(1000.0), op=hvd.Sum)
    assert (total == np.arange(1000.0) * 2).all()
    hvd.shutdown()
hvd.init()
words = ("says", socket.gethostname(), hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank())
os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece
"""


def mpirun(mpi: Mpi, net, script: Path) -> list[str]:
    """The command line for a rank on each host."""
    ssh = f"-p {network.SSH_PORT} -i {net.folder / 'user'}"
    if "mpich" in mpi.name:
        words = ["-hosts", "host-a:1,host-b:1"]
    elif "wheel" in mpi.name:
        words = ["-H", "host-a:1,host-b:1", "--prtemca", "plm_ssh_args", ssh]
    else:
        words = ["-H", "host-a:1,host-b:1", "-mca", "plm_rsh_args", ssh]
    # With it Open MPI 5 fills the first host.
    launcher = [word for word in mpi.launcher if word != "--oversubscribe"]
    return [*launcher, "-np", "2", *words, sys.executable, os.fspath(script)]


@pytest.mark.parametrize("name", LIBRARIES)
def test_under_mpirun_nothing_has_to_be_set(name: str, net, jobs, tmp_path: Path) -> None:
    mpi = find(name)
    path = tmp_path / "script.py"
    path.write_text(ALONE.format(imports="from mpi4py import MPI"))
    ssh = f"-p {network.SSH_PORT} -i {net.folder / 'user'}"
    env = {**mpi.env, "HYDRA_LAUNCHER_EXTRA_ARGS": ssh}
    job = jobs(harness.Job(net.hosts[0].enter(mpirun(mpi, net, path)), env=env)).succeed()
    found = sorted(line for line in job.stdout.splitlines() if "says" in line)
    assert found == ["says host-a 0 2 0 0", "says host-b 1 2 0 1"]


@pytest.mark.parametrize("name", LIBRARIES)
def test_without_mpi4py_the_error_says_what_to_do(name: str, net, jobs, tmp_path: Path) -> None:
    mpi = find(name)
    path = tmp_path / "script.py"
    path.write_text(ALONE.format(imports=""))
    ssh = f"-p {network.SSH_PORT} -i {net.folder / 'user'}"
    env = {**mpi.env, "HYDRA_LAUNCHER_EXTRA_ARGS": ssh}
    job = jobs(harness.Job(net.hosts[0].enter(mpirun(mpi, net, path)), env=env))
    assert job.fail() != 0
    for text in ("cannot find each other safely", "import mpi4py.MPI before hvd.init()"):
        assert text in job.stderr, job.report()
