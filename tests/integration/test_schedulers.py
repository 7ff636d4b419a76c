"""Jobs that other launchers start: Open MPI, MPICH, torchrun, and pods that nobody starts together."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

import harness
from mpi_libraries import find

# Without a framework: importing one takes longer than all the rest.
WORK = """
import os
from horovod import _core as hvd
for again in range(2):
    hvd.init()
    hvd.barrier(0)
    numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    os.write(1, f"rank {' '.join(map(str, numbers))}\\n".encode())  # in one piece
    hvd.shutdown()
"""
RANKS = {f"rank {rank} 3 {rank} 3 0 1" for rank in range(3)}


def needs(*programs: str) -> str:
    """The path of the first program that is installed; skips, saying so, if none is."""
    for program in programs:
        if path := shutil.which(program):
            return path
    pytest.skip(f"not installed: {' or '.join(programs)}")


def printed(text: str) -> list[str]:
    """The lines that ranks printed, without what launchers put before them."""
    return [line[line.index("rank ") :] for line in text.splitlines() if "rank " in line]


def check(job: harness.Job) -> None:
    """All three ranks met twice, and nothing is left."""
    job.succeed()
    lines = printed(job.stdout)
    assert sorted(lines) == sorted([*RANKS, *RANKS]), job.report()
    # The file through which they met is gone, its folder empty and private.
    for folder in job.folder.glob("horovod-*"):
        assert list(folder.iterdir()) == []
        assert folder.stat().st_mode & 0o777 == 0o700


def open_mpi() -> list[str]:
    path = needs("mpirun.openmpi", "mpirun")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in version.stdout and "OpenRTE" not in version.stdout:
        pytest.skip(f"{path} is not Open MPI")
    return [path, "--allow-run-as-root", "--oversubscribe", "-np"]


def test_open_mpi(script, jobs) -> None:
    check(jobs(harness.Job([*open_mpi(), "3", sys.executable, script(WORK)])))


def test_open_mpi_passes_on_what_a_rank_tried_that_cannot_reach_rank_0(script, jobs, port) -> None:
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("NOT RUN: no IPv6 loopback")
    # Rank 0 listens on another address than the one where rank 1 looks for it.
    each = (("::1", f"[::1]:{port}"), ("127.0.0.1", f"127.0.0.1:{port}"))
    words = open_mpi()
    command = words[:-1]
    for interface, address in each:
        own = ["-x", f"HOROVOD_GLOO_IFACE={interface}", "-x", f"HOROVOD_RANK0_ADDRESS={address}"]
        command += [":"] * (address != each[0][1])
        command += ["-np", "1", *own, sys.executable, str(script(INIT))]
    env = {"HOROVOD_JOB_KEY": "ab" * 32, "HOROVOD_GLOO_TIMEOUT_SECONDS": "20"}
    job = jobs(harness.Job(command, env=env))
    job.fail()
    cause = r"rank 1 on \S+ cannot connect to rank 0, where all ranks meet \(tried "
    assert re.search(rf"{cause}127\.0\.0\.1:{port}: connection refused", job.stderr), job.report()
    assert "names 127.0.0.1, which does not lead to the other host" in job.stderr
    assert "`horovodrun --doctor -H 127.0.0.1," in job.stderr


def test_mpich(script, jobs) -> None:
    # A shell between the proxy and the rank, as in many job scripts.
    command = f"{sys.executable} {script(WORK)}; exit $?"
    check(jobs(find("mpich").start(3, "sh", "-c", command)))


def test_torchrun(script, jobs) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"]
    check(jobs(harness.Job([*words, script(WORK)])))


# Stands for LSF's jsrun: it gives processes the variables, and does nothing else.
JSRUN = """
import os, subprocess, sys
count, command = int(sys.argv[2]), sys.argv[3:]
ranks = []
for rank in range(count):
    env = dict(os.environ, LSB_JOBID="41", JSM_NAMESPACE_ID=os.environ["TMPDIR"], PMIX_NAMESPACE="7")
    env |= {f"JSM_NAMESPACE_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
    env |= {f"JSM_NAMESPACE_{name}": str(count) for name in ("SIZE", "LOCAL_SIZE")}
    ranks.append(subprocess.Popen(command, env=env))
sys.exit(max(rank.wait() for rank in ranks))
"""


def test_a_double_of_jsrun(script, jobs) -> None:
    words = [sys.executable, script(JSRUN), "-n", "3"]
    check(jobs(harness.Job([*words, sys.executable, script(WORK)])))


def pods(jobs, path: Path, env: dict[str, str], **each: list[str]) -> list[harness.Job]:
    """Three processes started apart from each other; the last first."""
    started = []
    for rank in reversed(range(3)):
        own = {name: values[rank] for name, values in each.items()}
        words = [sys.executable, path]
        started.append(jobs(harness.Job(words, env={**env, **own}, own_shm=False)))
    return started


def check_pods(started: list[harness.Job]) -> None:
    text = "\n".join(job.succeed().stdout for job in started)
    assert sorted(printed(text)) == sorted([*RANKS, *RANKS])


INDEXES = ["0", "1", "2"]
INIT = "from horovod import _core; _core.init(); print('rank', _core.rank())"


def test_a_kubernetes_indexed_job_with_a_key_file(script, jobs, port, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(uuid.uuid4().hex * 2 + "\n")
    key.chmod(0o440)
    env = {
        "HOROVOD_SIZE": "3",
        # A name, as a headless service gives one to pod 0.
        "HOROVOD_RANK0_ADDRESS": f"localhost:{port}",
        "HOROVOD_JOB_KEY_FILE": str(key),
    }
    check_pods(pods(jobs, script(WORK), env, JOB_COMPLETION_INDEX=INDEXES))


def test_hosts_of_sagemaker(script, jobs, port) -> None:
    """The script runs once on each host; the list of hosts makes ranks."""
    env = {
        "SM_HOSTS": '["algo-3", "algo-1", "algo-2"]',
        # Instead of algo-1, which does not resolve here, and a port that other tests may use.
        "HOROVOD_RANK0_ADDRESS": f"localhost:{port}",
        "HOROVOD_JOB_KEY": "ab" * 32,
    }
    check_pods(pods(jobs, script(WORK), env, SM_CURRENT_HOST=["algo-1", "algo-2", "algo-3"]))
    del env["HOROVOD_JOB_KEY"], env["HOROVOD_RANK0_ADDRESS"]
    job = jobs(
        harness.Job([sys.executable, script(INIT)], env={**env, "SM_CURRENT_HOST": "algo-2"})
    )
    job.fail()
    for text in ("rank 1 of 3 started by SageMaker", "HOROVOD_JOB_KEY", "HOROVOD_SIZE=1"):
        assert text in job.stderr, job.report()


def test_elements_of_a_job_array_are_no_ranks(script, jobs, tmp_path: Path) -> None:
    """Those that run at another time never come: the error says what to do instead."""
    folder = tmp_path / "shared"
    folder.mkdir()
    by_hand = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_RENDEZVOUS_DIR": str(folder)}
    env = {**by_hand, "SLURM_ARRAY_TASK_ID": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}
    job = jobs(harness.Job([sys.executable, script(INIT)], env=env))
    job.fail()
    for text in ("SLURM_ARRAY_TASK_ID=1", "without an array", "horovod-rendezvous-2"):
        assert text in job.stderr, job.report()


def test_an_operators_pods_without_local_rank(script, jobs, port) -> None:
    """As Kubeflow's PyTorchJob starts them: before, each of them trained alone."""
    env = {
        "WORLD_SIZE": "3",
        # Rank 0 listens on the port above this one.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port - 1),
        "HOROVOD_JOB_KEY": "ab" * 32,
    }
    check_pods(pods(jobs, script(WORK), env, RANK=INDEXES))
    # The key is what is missing without it; to be alone is a wish that is told.
    del env["HOROVOD_JOB_KEY"]
    job = jobs(harness.Job([sys.executable, script(INIT)], env={**env, "RANK": "1"}))
    job.fail()
    for text in ("rank 1 of 3", "HOROVOD_JOB_KEY", "HOROVOD_SIZE=1"):
        assert text in job.stderr, job.report()
    job = jobs(
        harness.Job([sys.executable, script(INIT)], env={**env, "RANK": "1", "HOROVOD_SIZE": "1"})
    )
    job.succeed()
    assert printed(job.stdout) == ["rank 0"]


def test_processes_of_azure_mls_pytorch_configuration(script, jobs, port) -> None:
    """Azure ML starts each process, with PyTorch's variables and its own."""
    env = {
        "AZUREML_RUN_ID": "run",
        "AZ_BATCHAI_JOB_MASTER_NODE_IP": "localhost",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port - 1),
        "HOROVOD_JOB_KEY": "ab" * 32,
    }
    each = {"RANK": INDEXES, "LOCAL_RANK": INDEXES, "NODE_RANK": ["0", "0", "0"]}
    check_pods(pods(jobs, script(WORK), env, **each))


# As TonY's driver, which places the ranks and then prints what its application master gives to the containers.
DRIVER = """
import signal
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
plan = get_host_assignments(parse_hosts("localhost:3"), 1)
server = RendezvousServer(verbose=1)
port = server.start()
server.init(plan[:2])
server.init(plan)  # the last plan counts
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("port", port, *(slot.to_response_string() for slot in plan), flush=True)
signal.sigwait([signal.SIGTERM])
server.stop()
"""
NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def test_containers_of_tony_meet_at_its_driver(script, jobs) -> None:
    key = {"HOROVOD_JOB_KEY": "ab" * 32}
    path = script(DRIVER)
    without = jobs(harness.Job([sys.executable, path]))
    without.fail()
    assert "set one of them for this driver and for all ranks" in without.stderr, without.report()
    driver = jobs(harness.Job([sys.executable, path], env=key))
    words = driver.wait_for("port")[0].split()
    env = {
        **key,
        "JOB_NAME": "worker",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "2000",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "localhost",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": words[1],
        "HOROVOD_HOSTNAME": "localhost",
    }
    each: dict[str, list[str]] = {f"HOROVOD_{name}": [] for name in NUMBERS}
    for place in words[2:]:
        for name, number in zip(NUMBERS, place.split(","), strict=True):
            each[f"HOROVOD_{name}"].append(number)
    check_pods(pods(jobs, script(WORK), env, **each))
    driver.process.terminate()
    driver.succeed()


def test_containers_of_tony_meet_in_a_folder(script, jobs, tmp_path: Path) -> None:
    """TonY gives its tasks the places and the address of the original's rendezvous, which is not used."""
    env = {
        "JOB_NAME": "worker",
        "TASK_NUM": "3",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "9",
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_SIZE": "3",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
    }
    names = ("TASK_INDEX", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK")
    places = dict.fromkeys(names, INDEXES)
    folder = {"HOROVOD_RENDEZVOUS_DIR": str(tmp_path)}
    check_pods(pods(jobs, script(WORK), {**env, **folder}, **places))
    one = dict.fromkeys(names, "1")
    job = jobs(harness.Job([sys.executable, script(INIT)], env={**env, **one}))
    job.fail()
    for text in ("rank 1 of 3", "HOROVOD_RENDEZVOUS_DIR", "HOROVOD_JOB_KEY"):
        assert text in job.stderr, job.report()
    env |= {"HOROVOD_JOB_KEY": "ab" * 32, "HOROVOD_GLOO_RENDEZVOUS_PORT": "none"}
    job = jobs(harness.Job([sys.executable, script(INIT)], env={**env, **one}))
    job.fail()
    assert 'HOROVOD_GLOO_RENDEZVOUS_PORT="none"' in job.stderr, job.report()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JOB_COMPLETION_INDEX", "0"),
        ("PMIX_RANK", "0"),
        ("PALS_RANKID", "0"),
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("SLURM_PROCID", "1"),
        ("FLUX_TASK_RANK", "0"),
        ("TF_CONFIG", '{"cluster": {"worker": ["a:1", "b:1"]}}'),
        ("SM_HOSTS", '["algo-1", "algo-2"]'),
        ("HOROVOD_RANK", "0"),
        ("LOCAL_RANK", "1"),
        ("PET_NNODES", "2"),
        ("JAX_NUM_PROCESSES", "2"),
    ],
)
def test_a_member_of_several_is_never_alone_in_silence(name, value, script, jobs) -> None:
    job = jobs(harness.Job([sys.executable, script(INIT)], env={name: value}))
    job.fail()
    for text in (name, "HOROVOD_SIZE=1"):
        assert text in job.stderr, job.report()


def test_ranks_that_only_share_a_folder(script, jobs, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    # Files of an earlier job are no hindrance: nobody listens at their address, or another program does.
    old = folder / "horovod-rendezvous-3"
    old.write_text(f"horovod-rs rendezvous 1\nkey {'ab' * 32}\naddress 127.0.0.1:9\n")
    old.chmod(0o600)
    env = {"HOROVOD_RENDEZVOUS_DIR": str(folder), "HOROVOD_SIZE": "3"}
    check_pods(pods(jobs, script(WORK), env, HOROVOD_RANK=INDEXES))
    assert list(folder.iterdir()) == []


def test_refuses_what_is_not_safe_and_says_what_to_set(script, jobs, port, tmp_path: Path) -> None:
    path = script(INIT)

    def refuses(env: dict[str, str], *texts: str) -> None:
        job = jobs(harness.Job([sys.executable, path], env=env))
        job.fail()
        for text in texts:
            assert text in job.stderr, job.report()

    two = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}
    refuses(
        two, "rank 1 of 2", "HOROVOD_RENDEZVOUS_DIR", "HOROVOD_RANK0_ADDRESS", "HOROVOD_JOB_KEY"
    )
    refuses(
        {**two, "HOROVOD_RANK0_ADDRESS": "localhost:1"}, "no common key", "openssl rand -hex 32"
    )
    public = tmp_path / "key"
    public.write_text("ab" * 32)
    public.chmod(0o644)
    address = {**two, "HOROVOD_RANK0_ADDRESS": f"localhost:{port}"}
    refuses(
        {**address, "HOROVOD_JOB_KEY_FILE": str(public)}, "everybody on this machine may read it"
    )
    refuses(
        {**address, "HOROVOD_UNAUTHENTICATED_JOB": "1"}, "anybody-who-reaches-my-ports-may-join"
    )
    # Nobody comes: the address and what happened there are named.
    refuses(
        {**address, "HOROVOD_JOB_KEY": "ab" * 32, "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"},
        "cannot connect to rank 0, where all ranks meet (tried ",
        f"127.0.0.1:{port}: connection refused",
        "horovodrun --doctor -H 127.0.0.1,",
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    refuses(
        {**two, "HOROVOD_RENDEZVOUS_DIR": str(empty), "HOROVOD_GLOO_TIMEOUT_SECONDS": "1"},
        "horovod-rendezvous-2: rank 0 writes it in its hvd.init()",
    )


def test_another_key_does_not_get_in(script, jobs, port) -> None:
    env = {
        "HOROVOD_SIZE": "2",
        "HOROVOD_RANK0_ADDRESS": f"localhost:{port}",
    }
    path = script(INIT)
    # Rank 0 must still be there when the other one has started.
    seconds = ("20", "3")
    jobs_of_both = [
        jobs(
            harness.Job(
                [sys.executable, path],
                env={
                    **env,
                    "HOROVOD_RANK": str(rank),
                    "HOROVOD_JOB_KEY": key * 32,
                    "HOROVOD_GLOO_TIMEOUT_SECONDS": seconds[rank],
                },
            )
        )
        for rank, key in enumerate(("ab", "cd"))
    ]
    for job in jobs_of_both:
        job.fail()
    assert "1 of 2 ranks did not register" in jobs_of_both[0].stderr
    assert "key" in jobs_of_both[1].stderr


WAITS = """
import os
from horovod import _core
os.environ.update(HOROVOD_SIZE="2", HOROVOD_RENDEZVOUS_DIR=os.environ["TMPDIR"])
try:
    print("waits", flush=True)
    _core.init()
except KeyboardInterrupt:
    print("interrupted", _core.is_initialized(), flush=True)
"""


HANDLES = """
import os, signal
from horovod import _core
from horovod.common.basics import basics
os.environ.update(HOROVOD_SIZE="2", HOROVOD_RENDEZVOUS_DIR=os.environ["TMPDIR"])

def say(*words):
    # Unlike print this may be interrupted by a handler that says something, too.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def first(number, frame):
    signal.signal(signal.SIGUSR1, second)
    try:
        basics.init()
    except ValueError as error:
        say("refused:", error)

def second(number, frame):
    basics.shutdown()
    say("handled")

signal.signal(signal.SIGUSR1, first)
try:
    basics.init()
except ValueError as error:
    say("given up:", error)
say("initialized", _core.is_initialized())
os.environ.update(HOROVOD_SIZE="1", HOROVOD_RENDEZVOUS_DIR="")
basics.init()
say("again", _core.size())
"""


def test_a_signal_handler_may_give_up_the_init_that_it_interrupts(script, jobs) -> None:
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "HOROVOD_RANK": "0"}
    job = jobs(harness.Job([sys.executable, script(HANDLES)], env=env))
    rendezvous_file = job.folder / "horovod-rendezvous-2"
    deadline = time.monotonic() + harness.REAP_LIMIT_S
    while not rendezvous_file.exists():
        assert time.monotonic() < deadline, job.report()
        time.sleep(0.01)
    # It waits for the other rank by now, which never comes.
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for(
        "refused: Horovod initialization failed. hvd.init() was called by a signal handler"
    )
    job.process.send_signal(signal.SIGUSR1)
    job.wait_for("handled")
    job.succeed()
    assert "given up: Horovod initialization failed. hvd.shutdown() was called" in job.stdout
    assert "initialized False" in job.stdout
    assert "again 1" in job.stdout


@pytest.mark.parametrize("rank", ["0", "1"], ids=["serving", "searching"])
def test_init_can_be_interrupted(rank, script, jobs) -> None:
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "HOROVOD_RANK": rank}
    job = jobs(harness.Job([sys.executable, script(WAITS)], env=env))
    job.wait_for("waits")
    if rank == "0":
        rendezvous_file = job.folder / "horovod-rendezvous-2"
        deadline = time.monotonic() + harness.REAP_LIMIT_S
        while not rendezvous_file.exists():
            assert time.monotonic() < deadline, job.report()
            time.sleep(0.01)
    job.process.send_signal(signal.SIGINT)
    job.succeed()
    assert "interrupted False" in job.stdout
    assert not list(job.folder.glob("horovod-rendezvous*"))
