"""MPI on two hosts, whose launcher reaches the other one through real ssh: `horovodrun --mpi`, and `mpirun` itself."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
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


# Open MPI 5 has a store, which Horovod leaves alone (crates/horovod-pmi).
WITH_STORE = [name for name in LIBRARIES if name != "open-mpi-wheel"]


@pytest.fixture
def start(request: pytest.FixtureRequest, net, jobs, tmp_path: Path) -> Callable[..., harness.Job]:
    """Starts a script on both hosts by `mpirun` of each MPI that is here."""
    mpi = find(request.param)
    ssh = f"-p {network.SSH_PORT} -i {net.folder / 'user'}"

    def start(text: str, **env: str | None) -> harness.Job:
        path = tmp_path / "script.py"
        path.write_text(text)
        words = net.hosts[0].enter(mpirun(mpi, net, path))
        return jobs(harness.Job(words, env={**mpi.env, "HYDRA_LAUNCHER_EXTRA_ARGS": ssh, **env}))

    return start


BOTH = ["says host-a 0 2 0 0", "says host-b 1 2 0 1"]
# MPI can still be initialised in the process after Horovod has used the launcher's store.
MPI_AFTERWARDS = """
from mpi4py import MPI
assert MPI.COMM_WORLD.size == 2 and MPI.COMM_WORLD.rank == hvd.rank()
assert MPI.COMM_WORLD.allreduce(hvd.rank()) == 1
"""


def greetings(job: harness.Job) -> list[str]:
    """Lines of the ranks' output, sorted."""
    return sorted(line for line in job.stdout.splitlines() if "says" in line)


def of_the_page(pattern: str) -> str:
    """The part of docs/clusters.md's first job that matches the pattern."""
    page = (harness.ROOT / "docs" / "clusters.md").read_text()
    text = page.partition("## A first job by `mpirun`\n")[2].partition("\n## ")[0]
    found = re.search(pattern, text, re.MULTILINE | re.DOTALL)
    assert found, pattern
    return found[1]


@pytest.mark.parametrize("start", LIBRARIES, indirect=True)
def test_the_first_job_of_the_page(start) -> None:
    check = of_the_page(r'^mpirun -np 2 -H host1:1,host2:1 /opt/env/bin/python -c "(.*?)"$')
    assert start(check).succeed().stdout.split() in (["2", "2"], ["22"])
    job = start(of_the_page(r"^```python\n(.*?)^```$")).succeed()
    shown = of_the_page(
        r"^\$ mpirun -np 4 -H host1:2,host2:2 /opt/env/bin/python train.py\n(.*?)^```$"
    )
    line = re.compile(r"rank (\d) of (\d) on ([\w-]+): loss 0\.\d")
    assert len(line.findall(shown)) == 4
    assert sorted(line.findall(job.stdout)) == [("0", "2", "host-a"), ("1", "2", "host-b")]


@pytest.mark.parametrize("start", LIBRARIES, indirect=True)
def test_under_mpirun_mpi4py_suffices(start) -> None:
    assert greetings(start(ALONE.format(imports="from mpi4py import MPI")).succeed()) == BOTH


@pytest.mark.parametrize("start", WITH_STORE, indirect=True)
def test_under_mpirun_nothing_has_to_be_set(start) -> None:
    assert greetings(start(ALONE.format(imports="")).succeed()) == BOTH


@pytest.mark.parametrize("start", WITH_STORE, indirect=True)
def test_mpi_is_initialised_after_the_launchers_store_was_used(start) -> None:
    assert greetings(start(ALONE.format(imports="") + MPI_AFTERWARDS).succeed()) == BOTH


@pytest.mark.parametrize("start", WITH_STORE, indirect=True)
def test_keys_that_differ_are_an_error_that_names_the_rank_that_has_another(start) -> None:
    own_key = """
import os, horovod.numpy as hvd
os.environ["HOROVOD_JOB_KEY"] = f"{int(os.uname().nodename == 'host-b'):064x}"
hvd.init()
"""
    job = start(own_key, HOROVOD_GLOO_TIMEOUT_SECONDS="10")
    assert job.fail() != 0
    text = "HOROVOD_JOB_KEY (or HOROVOD_JOB_KEY_FILE) is set on rank 0, and is another on rank 1"
    assert text in job.stderr, job.report()


# Open MPI ends a job by itself of which one process has ended without MPI.
@pytest.mark.parametrize("start", ["mpich"], indirect=True)
def test_a_rank_that_never_calls_init_is_an_error_in_time(start) -> None:
    ends = """
import os, sys, horovod.numpy as hvd
if os.uname().nodename == "host-b":
    sys.exit()
hvd.init()
"""
    job = start(ends, HOROVOD_GLOO_TIMEOUT_SECONDS="3")
    assert job.fail() != 0
    assert "not all ranks have called hvd.init() within 3 s" in job.stderr, job.report()


@pytest.mark.parametrize("start", LIBRARIES, indirect=True)
def test_without_a_store_the_error_says_what_to_do(start) -> None:
    hidden = """
import os
for name in list(os.environ):
    if name == "PMI_FD" or name.startswith("PMIX_SERVER_URI"):
        del os.environ[name]
"""
    job = start(hidden + ALONE.format(imports=""))
    assert job.fail() != 0
    for text in ("cannot find each other safely", "import mpi4py.MPI before hvd.init()"):
        assert text in job.stderr, job.report()
