"""Jobs that Slurm starts on two nodes: `srun` by each of its interfaces for MPI, and `horovodrun` in a batch job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import network
import pytest
import slurm

import harness

pytestmark = pytest.mark.hosts

WORK = """
import os, socket
from horovod import _core as hvd
for again in range(2):
    hvd.init()
    hvd.barrier(0)
    numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    hvd.shutdown()
os.write(1, f"rank-on {socket.gethostname()} {' '.join(map(str, numbers))}\\n".encode())  # in one piece
"""
NO_PMIX = "NOT RUN: no libpmix.so.2 (Debian package libpmix2)"
# Slurm fills the first node: two ranks there, one on the second.
THREE = ["rank-on host-a 0 3 0 2 0 2", "rank-on host-a 1 3 1 2 0 1", "rank-on host-b 2 3 0 1 1 2"]


@pytest.fixture(scope="module")
def cluster(net) -> Iterator[slurm.Slurm]:
    if reason := slurm.why_not():
        pytest.skip(f"NOT RUN, Slurm: {reason}")
    try:
        made = slurm.Slurm(net)
    except slurm.NotReady as error:
        # Nothing of Horovod has run so far: it is the machine that does not let Slurm start.
        pytest.skip(f"NOT RUN, Slurm: {error}")
    yield made
    made.down()


@pytest.fixture
def start(cluster, jobs) -> Callable[..., harness.Job]:
    """Starts a command of Slurm on the first node."""

    def start(*command: object, **env: str | None) -> harness.Job:
        words = cluster.enter(cluster.hosts[0], list(map(str, command)))
        return jobs(harness.Job(words, env={**cluster.env, "OMP_NUM_THREADS": "1", **env}))

    return start


def printed(text: str) -> list[str]:
    """The ranks' lines, sorted, without what a launcher puts before them."""
    return sorted(
        line[line.index("rank-on ") :] for line in text.splitlines() if "rank-on " in line
    )


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_under_srun_nothing_has_to_be_set(mpi: str, cluster, start, script) -> None:
    if mpi == "pmix" and not cluster.has_pmix():
        pytest.skip(NO_PMIX)
    job = start("srun", "-N2", "-n3", f"--mpi={mpi}", sys.executable, script(WORK))
    assert printed(job.succeed().stdout) == THREE, job.report()


def test_without_an_interface_a_folder_or_a_key_suffices(start, script, tmp_path: Path) -> None:
    path = script(WORK)
    words = ("srun", "-N2", "-n3", "--mpi=none", sys.executable, path)
    for env in ({"HOROVOD_RENDEZVOUS_DIR": str(tmp_path)}, {"HOROVOD_JOB_KEY": "ab" * 32}):
        job = start(*words, **env)
        assert printed(job.succeed().stdout) == THREE, job.report()
    job = start(*words)
    assert job.fail() != 0
    for text in (
        "rank 2 of 3 started by Slurm, and the ranks cannot",
        "either HOROVOD_RENDEZVOUS_DIR",
        "srun --mpi=pmix",
    ):
        assert text in job.stderr, job.report()


def test_a_killed_rank_is_named_on_the_other_node(start, script) -> None:
    dies = """
import os, signal
import numpy as np
import horovod.numpy as hvd
hvd.init()
hvd.barrier()
if hvd.rank() == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allreduce(np.ones(3))
except hvd.HorovodInternalError as error:
    os.write(1, f"rank-on {error}\\n".encode())
    raise
"""
    # Slurm's own end of a step comes a minute later.
    words = ("--kill-on-bad-exit=0", "--wait=60", "--mpi=pmi2", sys.executable, script(dies))
    job = start("srun", "-N2", "-n2", *words)
    assert job.fail() != 0
    (line,) = printed(job.stdout)
    assert "rank 0 on host-a" in line, job.report()


def batch(net, folder: Path, command: str, *options: str) -> Path:
    """A batch script; `horovodrun` reaches the other node by ssh."""
    path = folder / "batch.sh"
    ssh = f"-p {network.SSH_PORT} -i {net.folder / 'user'}"
    lines = ["#!/bin/sh", *(f"#SBATCH {option}" for option in options)]
    lines += [command.format(horovodrun=f"{harness.HOROVODRUN} {ssh}", python=sys.executable)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_horovodrun_in_a_batch_job_uses_all_of_it(net, start, script, tmp_path: Path) -> None:
    output = tmp_path / "output"
    command = f"{{horovodrun}} {{python}} {script(WORK)}"
    options = ("--nodes=2", "--ntasks=3", f"--output={output}")
    job = start("sbatch", "--wait", batch(net, tmp_path, command, *options))
    text = output.read_text() if job.wait() == 0 else ""
    assert printed(text) == THREE, f"{job.report()}\n{output.read_text()}"
    assert "uses the whole allocation of Slurm, 3 slots on 2 hosts (host-a:2,host-b:1;" in text


RESUMES = """
import os, sys
from pathlib import Path
import numpy as np
import horovod.numpy as hvd
from horovod.common.elastic import ObjectState
hvd.init()
state = ObjectState(step=0)
folder = Path(sys.argv[1])
checkpoint = hvd.Checkpoint(state, folder / "checkpoint")
if checkpoint.resume():
    os.write(1, f"rank-on {os.uname().nodename} goes on from {state.step}\\n".encode())
    sys.exit()
while True:
    hvd.allreduce(np.ones(3))
    state.step += 1
    if state.step == 5 and hvd.rank() == 0:
        (folder / "trains").touch()
    checkpoint.end_step()
"""


# Slurm sends SIGTERM to every process of the job, also to the ssh of horovodrun.
@pytest.mark.parametrize("starter", ["srun --mpi=pmi2", "{horovodrun}"])
def test_a_requeued_job_goes_on_from_the_end_of_a_step(
    starter: str, net, cluster, start, script, tmp_path
) -> None:
    output = tmp_path / "output"
    command = f"{starter} {{python}} {script(RESUMES)} {tmp_path}"
    options = ("--nodes=2", "--ntasks=2", "--requeue", "--open-mode=append", f"--output={output}")
    path = batch(net, tmp_path, command, *options)
    number = start("sbatch", "--parsable", path).succeed().stdout.strip()

    def trains() -> bool:
        state = cluster.ask("scontrol", "show", "job", number)
        assert "JobState=FAILED" not in state, output.read_text()
        return (tmp_path / "trains").exists()

    cluster.wait_until("the training", trains)
    cluster.ask("scontrol", "requeue", number)

    def has_ended() -> bool:
        # Slurm would let a requeued job wait for two minutes. It holds a job that starts too soon after its former end.
        cluster.ask("scontrol", "release", number)
        cluster.ask("scontrol", "update", f"JobId={number}", "StartTime=now")
        return "JobState=COMPLETED" in cluster.ask("scontrol", "show", "job", number)

    cluster.wait_until("the end of the job", has_ended)
    lines = printed(output.read_text())
    steps = {int(line.split()[-1]) for line in lines}
    assert len(lines) == 2, output.read_text()
    assert len(steps) == 1, "the ranks go on from different steps"
    assert min(steps) >= 5


@pytest.mark.parametrize("mpi", ["pmi2", "pmix"])
def test_a_step_inside_a_step_is_a_job_of_its_own(mpi: str, cluster, start, script) -> None:
    if mpi == "pmix" and not cluster.has_pmix():
        pytest.skip(NO_PMIX)
    # The inner step inherits the variables of the outer one, which say that there is one process.
    path = script(WORK)
    inner = f"srun --overlap -N1 -n2 --mpi=none {sys.executable} {path}"
    words = ("salloc", "-N1", "-n2", "srun", "-n1", f"--mpi={mpi}", "sh", "-c", inner)
    job = start(*words)
    both = ["rank-on host-a 0 2 0 2 0 1", "rank-on host-a 1 2 1 2 0 1"]
    assert printed(job.succeed().stdout) == both, job.report()
