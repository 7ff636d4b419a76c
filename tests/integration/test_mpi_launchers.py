"""`horovodrun --mpi` and `--jsrun`: the launcher of an MPI starts the ranks, and horovodrun does the rest.

Open MPI and MPICH are real. Doubles of Intel MPI, Spectrum MPI, MVAPICH and jsrun write their command line down and
start the processes with the variables of the real ones.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from pathlib import Path

import pytest

import harness
import horovod
from mpi_libraries import LIBRARIES, Mpi, find

KEY = "HOROVODRUN_AGENTS_KEY"
ADDRESSES = "HOROVODRUN_AGENTS_ADDRESSES"
WORLD = """
import os, sys
from mpi4py import MPI
import numpy as np
import horovod.numpy as hvd
world = MPI.COMM_WORLD
hvd.init(comm=world)
assert (world.rank, world.size) == (hvd.rank(), hvd.size()), (world.rank, world.size)
assert hvd.mpi_enabled() and hvd.mpi_built() and hvd.mpi_threads_supported()
total = hvd.allreduce(np.ones(3), op=hvd.Sum)
assert "HOROVODRUN_AGENTS_KEY" not in os.environ
print("says", hvd.rank(), int(total[0]), os.environ.get("OF_THE_USER"), os.environ.get("OF_MPI"), flush=True)
"""
PLAIN = """
import os
import numpy as np
import horovod.numpy as hvd
hvd.init()
total = hvd.allreduce(np.ones(1), op=hvd.Sum)
print("says", hvd.rank(), hvd.size(), hvd.local_size(), int(total[0]), flush=True)
"""


@pytest.fixture(params=LIBRARIES)
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI library that is here."""
    return find(request.param)


@pytest.fixture
def script(tmp_path: Path):
    """Writes a script."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def failed(job: harness.Job) -> int:
    """The exit status of a job whose ranks end without `MPI_Finalize`, after which MPICH's shared memory stays."""
    job.wait()
    assert job.shm is not None
    for file in job.shm.glob("mpich_shm_*"):
        file.unlink()
    return job.fail()


def lines(job: harness.Job) -> list[str]:
    """Lines of the ranks' output, sorted, with the prefix that tells the rank."""
    return sorted(line for line in job.stdout.splitlines() if "says" in line)


def test_the_world_of_mpi_is_the_job(mpi: Mpi, script, jobs) -> None:
    env = {**mpi.env, "OF_THE_USER": "word"}
    job = jobs(harness.python(2, script(WORLD), options=["--mpi"], env=env)).succeed()
    assert lines(job) == ["[0]<stdout>:says 0 2 word None", "[1]<stdout>:says 1 2 word None"]


def test_without_mpi4py_it_is_a_job_too(mpi: Mpi, script, jobs) -> None:
    options = ["--mpi", "-H", "localhost:2", "--binding-args=--bind-to none", "--verbose"]
    job = jobs(harness.python(2, script(PLAIN), options=options, env=mpi.env)).succeed()
    assert lines(job) == ["[0]<stdout>:says 0 2 2 2", "[1]<stdout>:says 1 2 2 2"]
    assert re.search(r"horovodrun: mpirun \(.+\) starts the ranks: .*--bind-to none", job.stderr)


def test_further_arguments_reach_mpirun(mpi: Mpi, script, jobs) -> None:
    is_hydra = "mpich" in mpi.name
    args = "-genv OF_MPI 'two words'" if is_hydra else "-x 'OF_MPI=two words'"
    options = ["--mpi", f"--mpi-args={args}"]
    # Horovodrun's own value counts less.
    env = {**mpi.env, "OF_MPI": "another"}
    job = jobs(harness.python(2, script(WORLD), options=options, env=env)).succeed()
    assert lines(job)[1] == "[1]<stdout>:says 1 2 None two words", job.report()


def test_the_exit_status_is_that_of_the_rank(mpi: Mpi, script, jobs) -> None:
    text = WORLD + "if hvd.rank() == 1: os._exit(7)\nhvd.barrier()\n"
    job = jobs(harness.python(2, script(text), options=["--mpi"], env=mpi.env))
    assert failed(job) == 7, job.report()
    assert re.search(r"rank 1 on host \S+ exited with code 7", job.stderr), job.report()


def test_a_rank_that_is_killed_is_named(mpi: Mpi, script, jobs) -> None:
    text = WORLD + "if hvd.rank() == 1: os.kill(os.getpid(), 9)\nhvd.barrier()\n"
    job = jobs(harness.python(2, script(text), options=["--mpi"], env=mpi.env))
    assert failed(job) == 137, job.report()
    assert re.search(r"rank 1 on host \S+ was killed by signal 9", job.stderr), job.report()


def test_a_rank_that_ends_early_ends_no_other(mpi: Mpi, script, jobs, tmp_path: Path) -> None:
    """Its agent stays: launchers of MPI end the other processes when one ends."""
    end = tmp_path / "end"
    text = (
        WORLD
        + f"""
import time
pids = hvd.allgather(np.array([[os.getpid(), os.getppid()]]))
hvd.shutdown()
if world.rank == 1:
    os._exit(0)
while os.path.exists(f"/proc/{{pids[1][0]}}"):
    time.sleep(0.01)
print("alone, agent", pids[1][1], flush=True)
while not os.path.exists({str(end)!r}):
    time.sleep(0.01)
print("says the end", flush=True)
os._exit(0)
"""
    )
    job = jobs(harness.python(2, script(text), options=["--mpi"], env=mpi.env))
    (alone,) = job.wait_for("alone, agent")
    assert int(alone.split()[-1]) in job.members(), "the agent of rank 1"
    end.touch()
    assert job.wait() == 0, job.report()
    assert "[0]<stdout>:says the end" in job.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_nothing_is_left_behind(number: int, mpi: Mpi, script, jobs) -> None:
    text = WORLD + "import signal\nsignal.pause()\n"
    job = jobs(harness.python(2, script(text), options=["--mpi"], env=mpi.env))
    job.wait_for("says", count=2)
    job.process.send_signal(number)
    job.wait()
    job.wait_until_gone()


def test_no_secret_is_on_a_command_line(mpi: Mpi, script, jobs) -> None:
    text = WORLD + "import signal\nsignal.pause()\n"
    job = jobs(harness.python(2, script(text), options=["--mpi"], env=mpi.env))
    job.wait_for("says", count=2)
    members = job.members()
    environments = [harness.environment_of(pid) for pid in members]
    secrets = {
        env[name] for env in environments for name in (KEY, "HOROVOD_JOB_KEY") if name in env
    }
    assert len(secrets) == 2, "one key of the agents, one of the job"
    written = [word for pid in members for word in harness.command_line(pid)]
    assert any(b"__agent" in word for word in written)
    for secret in secrets:
        assert not [word for word in written if secret.encode() in word]
    job.process.send_signal(signal.SIGTERM)
    job.wait()


def test_functions_run_on_ranks_of_mpi(mpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in mpi.env.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)

    def world() -> tuple[int, int]:
        from mpi4py import MPI

        return MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()

    assert horovod.run(world, num_proc=2, use_mpi=True) == [(0, 2), (1, 2)]


# -- launchers that cannot be installed here

DOUBLE = """#!{python}
import os, subprocess, sys
if sys.argv[1:] == ["--version"]:
    print({banner!r})
    sys.exit({version_status})
with open({record!r}, "w") as record:
    record.write("\\n".join(sys.argv[1:]))
command = sys.argv[sys.argv.index({program!r}):]
ranks = []
for rank in range({started}):
    names = {names!r}
    env = dict(os.environ, **{{names[0]: str(rank), names[1]: "2"}})
    ranks.append(subprocess.Popen(command, env=env))
sys.exit(max(rank.wait() for rank in ranks) or {status})
"""
PMI = ("PMI_RANK", "PMI_SIZE")
OMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
JSM = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101"
SPECTRUM = "mpirun (IBM Spectrum MPI) 10.4.0.3rtm0"
MVAPICH = "HYDRA build details:\n    Version: 3.0 (MVAPICH)"


class Doubles:
    """Makes doubles of launchers in a folder at the front of `PATH`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = folder / "record"
        self.env: dict[str, str | None] = {"PATH": f"{folder}:{os.environ['PATH']}"}

    def make(self, banner: str, names: tuple[str, str], name: str = "mpirun", **more: int) -> None:
        """A launcher that says this of itself, and gives its processes these variables."""
        path = self.folder / name
        values = {"started": 2, "status": 0, "version_status": 0, **more}
        text = DOUBLE.format(
            python=sys.executable,
            banner=banner,
            record=str(self.record),
            program=os.fspath(harness.HOROVODRUN.resolve()),
            names=names,
            **values,
        )
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def words(self) -> str:
        """The recorded command line, up to the program."""
        text = " ".join(self.record.read_text().split("\n"))
        return text.split(f" {harness.HOROVODRUN.resolve()}")[0]


@pytest.fixture
def doubles(tmp_path: Path) -> Doubles:
    """Doubles of launchers."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return Doubles(folder)


PASSED = f"-x {KEY} -x {ADDRESSES}"


@pytest.mark.parametrize(
    ("banner", "names", "options", "expected"),
    [
        (INTEL, PMI, [], "-np 2 -ppn 2 -hosts localhost"),
        (MVAPICH, PMI, [], "-np 2 -hosts localhost:2 -bind-to none"),
        (
            SPECTRUM,
            OMPI,
            ["--tcp"],
            "--allow-run-as-root -np 2 -H localhost:2 -bind-to socket -map-by socket -rank-by core "
            f"-tcp {PASSED}",
        ),
    ],
    ids=["intel", "mvapich", "spectrum"],
)
def test_a_double_of(
    banner: str, names: tuple[str, str], options: list[str], expected: str, doubles, script, jobs
) -> None:
    doubles.make(banner, names)
    options = ["--mpi", *options]
    job = jobs(harness.python(2, script(PLAIN), options=options, env=doubles.env)).succeed()
    assert lines(job) == ["[0]<stdout>:says 0 2 2 2", "[1]<stdout>:says 1 2 2 2"]
    assert doubles.words() == expected


def test_a_double_of_jsrun(doubles, script, jobs) -> None:
    doubles.make("", JSM, name="jsrun")
    env = {**doubles.env, "LSB_JOBID": "7", "LSB_MCPU_HOSTS": "localhost 2"}
    options = ["--jsrun", "--mpi-args=-gpu"]
    job = jobs(harness.python(2, script(PLAIN), options=options, env=env)).succeed()
    assert lines(job) == ["[0]<stdout>:says 0 2 2 2", "[1]<stdout>:says 1 2 2 2"]
    assert doubles.words() == (
        "--nrs 1 --tasks_per_rs 2 --rs_per_host 1 --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none "
        "--smpiargs -gpu"
    )


# -- mistakes


@pytest.mark.parametrize(
    ("options", "env", "status", "texts"),
    [
        (["--mpi"], {"PATH": "/nowhere"}, 2, ["does not find an installed MPI", "without --mpi"]),
        (["--jsrun"], {"LSB_JOBID": None}, 2, ["did not detect an LSF job", "LSB_JOBID"]),
        (
            ["--jsrun"],
            {"LSB_JOBID": "7", "PATH": "/nowhere"},
            2,
            ["there is no jsrun on PATH"],
        ),
        (["--mpi", "-H", "me@there:2"], {}, 2, ["host me@there", "~/.ssh/config"]),
        (
            ["--jsrun", "-H", "localhost:2"],
            {"LSB_JOBID": "7"},
            2,
            ["argument -H: not allowed with --jsrun", "hosts of the LSF job", "leave -H out"],
        ),
    ],
    ids=["no-mpi", "no-lsf", "no-jsrun", "user", "hosts-of-jsrun"],
)
def test_mistakes_of_the_call(options, env, status, texts, doubles, script, jobs) -> None:
    doubles.make(INTEL, PMI)
    if "--jsrun" in options:
        doubles.make("", JSM, name="jsrun")
    job = jobs(harness.python(2, script(PLAIN), options=options, env={**doubles.env, **env}))
    assert job.fail() == status, job.report()
    for text in texts:
        assert text in job.stderr, job.report()


def test_a_launcher_that_nobody_knows(doubles, script, jobs) -> None:
    doubles.make("something 1.0", PMI)
    job = jobs(harness.python(2, script(PLAIN), options=["--mpi"], env=doubles.env))
    assert job.fail() == 2, job.report()
    assert "says nothing of Open MPI" in job.stderr
    assert '"something 1.0"' in job.stderr


def test_a_launcher_whose_version_fails(doubles, script, jobs) -> None:
    doubles.make(MVAPICH, PMI, version_status=3)
    job = jobs(harness.python(2, script(PLAIN), options=["--mpi"], env=doubles.env))
    assert job.fail() == 2, job.report()
    pattern = r'mpirun --version exited with code 3, its output: "HYDRA build details'
    assert re.search(pattern, job.stderr), job.report()


def test_a_launcher_whose_version_hangs(doubles, script, jobs) -> None:
    # A script, as Intel's is: what it has started ends with it.
    path = doubles.folder / "mpirun"
    path.write_text("#!/bin/sh\nsleep 1000\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    options = ["--mpi", "--start-timeout", "1"]
    job = jobs(harness.python(2, script(PLAIN), options=options, env=doubles.env))
    assert job.fail() == 2, job.report()
    assert "mpirun --version has not ended within 1 s (see --start-timeout)" in job.stderr


def test_ranks_of_an_outer_launcher_do_not_count(doubles, script, jobs) -> None:
    doubles.make(MVAPICH, PMI)
    env = {**doubles.env, "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
    job = jobs(harness.python(2, script(PLAIN), options=["--mpi"], env=env)).succeed()
    assert lines(job) == ["[0]<stdout>:says 0 2 2 2", "[1]<stdout>:says 1 2 2 2"]


def test_two_processes_of_one_rank_are_named(doubles, script, jobs) -> None:
    # Both are rank 2.
    doubles.make(MVAPICH, ("NOT_KNOWN", "PMI_RANK"))
    job = jobs(harness.python(3, script(PLAIN), options=["--mpi"], env=doubles.env))
    assert job.fail() == 1, job.report()
    pattern = r"calls two processes rank 2: \d+ on host \S+ and \d+ on host"
    assert re.search(pattern, job.stderr), job.report()


def test_a_launcher_that_fails_is_quoted(mpi: Mpi, script, jobs) -> None:
    options = ["--mpi", "--mpi-args=--no-such-option"]
    job = jobs(harness.python(2, script(PLAIN), options=options, env=mpi.env))
    assert job.fail() == 1, job.report()
    pattern = r"mpirun \(.+\) exited with code \d+ before all processes were there; its output: .*no-such-option"
    assert re.search(pattern, job.stderr), job.report()


def test_a_launcher_that_starts_too_few(doubles, script, jobs) -> None:
    doubles.make(MVAPICH, PMI, started=1)
    options = ["--mpi", "--start-timeout", "2"]
    job = jobs(harness.python(2, script(PLAIN), options=options, env=doubles.env))
    assert job.fail() == 1, job.report()
    assert "1 of 2 ranks have come within 2 s" in job.stderr
    assert "missing: rank 1" in job.stderr


def test_a_launcher_without_ranks(doubles, script, jobs) -> None:
    doubles.make(MVAPICH, ("NOT_KNOWN", "ALSO_NOT"))
    env = {**doubles.env, **dict.fromkeys((*PMI, *OMPI, *JSM, "PMIX_RANK"), None)}
    job = jobs(harness.python(2, script(PLAIN), options=["--mpi"], env=env))
    assert job.fail() == 1, job.report()
    assert "MPI's launcher tells no rank: none of OMPI_COMM_WORLD_RANK" in job.stderr, job.report()
