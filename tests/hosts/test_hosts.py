"""Jobs across two hosts with two ranks each, through real ssh: training, and everything that can go wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import network
import pytest

import harness
import strangers

pytestmark = pytest.mark.hosts


@pytest.fixture
def launch(net, jobs):
    """Starts horovodrun on the first host for ranks on both; checks that nothing is left on any host."""
    before = {host.name: host.pids() for host in net.hosts}
    started = []

    def start(
        command, *options: str, hosts: str = "host-a:2,host-b:2", np: int = 4, key="user", **kwargs
    ):
        words = [harness.HOROVODRUN, "-np", str(np), "-H", hosts, "-p", str(network.SSH_PORT)]
        words += ["-i", str(net.folder / key), *options, *command]
        job = jobs(harness.Job(net.hosts[0].enter(words), **kwargs))
        started.append(job)
        return job

    yield start
    for job in started:
        if job.process.poll() is None:
            job.kill()  # the test has failed already
        job.assert_nothing_left()
    for host in net.hosts:
        left = harness.wait_for_processes_to_end(lambda host=host: host.pids() - before[host.name])
        assert not left, f"processes left on {host.name}: {left}"


TOPOLOGY = """
import os, socket
import numpy as np
from ml_dtypes import bfloat16
import horovod.numpy as hvd
hvd.init()
everyone = hvd.allgather_object((socket.gethostname(), hvd.rank(), hvd.local_rank(), hvd.local_size(),
                                 hvd.cross_rank(), hvd.cross_size()))
for elements in (1, 1000, 1_000_001):
    for dtype in (np.float32, bfloat16, np.int64):
        total = hvd.allreduce((np.arange(elements) % 7 * (hvd.rank() + 1)).astype(dtype), op=hvd.Sum)
        assert total.dtype == dtype and np.array_equal(total, (np.arange(elements) % 7 * 10).astype(dtype))
    gathered = hvd.allgather(np.full((hvd.rank() + 1, elements), hvd.rank(), np.float32))
    assert gathered.shape[0] == 10 and gathered[-1, -1] == 3
    sent = hvd.broadcast(np.full(elements, hvd.rank(), np.float32), root_rank=3)
    assert (sent == 3).all()
    swapped = hvd.alltoall(np.full((4, elements), hvd.rank(), np.float32))
    assert swapped[:, 0].tolist() == [0, 1, 2, 3]
    scattered = hvd.reducescatter(np.ones((8, elements), np.float32), op=hvd.Sum)
    assert scattered.shape == (2, elements) and (scattered == 4).all()
if hvd.rank() == 0:
    print(everyone, flush=True)
"""


def test_two_hosts_with_two_ranks_each(launch, script) -> None:
    job = launch([sys.executable, script(TOPOLOGY)]).succeed()
    assert (
        "[('host-a', 0, 0, 2, 0, 2), ('host-a', 1, 1, 2, 0, 2), "
        "('host-b', 2, 0, 2, 1, 2), ('host-b', 3, 1, 2, 1, 2)]"
    ) in job.stdout


def test_the_usual_script_trains_on_two_hosts(launch, tmp_path: Path) -> None:
    mnist = harness.ROOT / "examples" / "pytorch" / "pytorch_mnist.py"
    words = ["--epochs", "2", "--no-cuda", "--data-dir", str(tmp_path)]
    job = launch([sys.executable, mnist, *words]).succeed()
    assert re.search(r"Accuracy: [5-9]\d", job.stdout), job.report()
    assert (tmp_path / "checkpoint-2.pth.tar").exists()


def test_uneven_hosts(launch, script) -> None:
    path = script(
        """
import numpy as np
import horovod.numpy as hvd
hvd.init()
result = hvd.allreduce(np.full(100_003, float(hvd.rank()), np.float32), op=hvd.Sum)
assert (result == 3).all()
print("cross", hvd.rank(), hvd.cross_rank(), hvd.cross_size(), hvd.is_initialized(), flush=True)
"""
    )
    job = launch([sys.executable, path], hosts="host-a:2,host-b:1", np=3).succeed()
    found = sorted(re.findall(r"cross (\d \d \d)", job.stdout))
    assert found == ["0 0 2", "1 0 1", "2 1 2"]


def test_hosts_from_a_file(launch, script, net, jobs, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two hosts\nhost-a slots=1\n\nhost-b slots=1  # the other one\n")
    path = script("import os; print('on', os.environ['HOROVOD_HOSTNAME'])")
    words = [harness.HOROVODRUN, "-np", "2", "--hostfile", hostfile, "-p", str(network.SSH_PORT)]
    words += ["-i", net.folder / "user", sys.executable, path]
    job = jobs(harness.Job(net.hosts[0].enter(words))).succeed()
    assert {line.split("on ")[1] for line in job.stdout.splitlines()} == {"host-a", "host-b"}


def test_environment_folder_and_output_cross_over(launch, script, tmp_path: Path) -> None:
    path = script("import os; print(os.environ['MINE'], os.getcwd(), os.uname().nodename)")
    job = launch([sys.executable, path], env={"MINE": "two words"}, cwd=tmp_path).succeed()
    for rank, name in ((0, "host-a"), (3, "host-b")):
        assert f"[{rank}]<stdout>:two words {tmp_path} {name}" in job.stdout


def test_job_key_is_on_no_command_line(launch, script) -> None:
    path = script(
        "import os, threading\nprint('key', os.environ['HOROVOD_JOB_KEY'], flush=True)\nthreading.Event().wait()"
    )
    job = launch([sys.executable, path])
    key = job.wait_for("key ", count=4)[0].split()[-1].encode()
    words = [word for pid in _processes() for word in harness.command_line(pid)]
    assert str(path).encode() in words
    assert not any(key in word for word in words)
    job.process.send_signal(signal.SIGTERM)
    assert job.fail() == 143


def test_wrong_ssh_key_is_explained_and_nothing_is_started(launch) -> None:
    job = launch([sys.executable, "-c", "print('a rank ran')"], key="wrong")
    job.fail()
    assert "host-b" in job.stderr
    assert "Permission denied" in job.stderr
    assert "a rank ran" not in job.stdout


def test_closed_ssh_port_is_explained(launch) -> None:
    job = launch([sys.executable, "-c", "print('a rank ran')"], "-p", "2")
    job.fail()
    assert "host-b" in job.stderr
    assert "refused" in job.stderr.lower()


def test_unknown_host_key_is_refused_where_the_user_demands_it(launch, net) -> None:
    known = net.folder / "known_hosts"
    saved = known.read_text()
    known.write_text("")
    try:
        job = launch([sys.executable, "-c", "print('a rank ran')"])
        job.fail()
    finally:
        known.write_text(saved)
    assert "host-b" in job.stderr
    assert "a rank ran" not in job.stdout


def test_a_host_that_never_answers_is_named_within_the_start_timeout(launch, net) -> None:
    # Of the block for documentation; ssh gets no answer at all, not even a refusal.
    for address in ("203.0.113.7", "203.0.113.8"):
        net.hosts[0].add_black_hole(address)
    job = launch(
        [sys.executable, "-c", "print('a rank ran')"],
        "--start-timeout",
        "3",
        hosts="host-a:1,203.0.113.7:1,host-b:1,203.0.113.8:1",
        np=4,
    )
    job.fail()
    # Both, though the first takes all the time there is: they were tried at the same time.
    assert "203.0.113.7" in job.stderr, job.report()
    assert "203.0.113.8" in job.stderr, job.report()
    assert "a rank ran" not in job.stdout


def test_hosts_with_ip_version_6_only(launch, net, script) -> None:
    for host in net.hosts:
        host.remove_address4()
    try:
        first, second = net.hosts
        path = script(TOPOLOGY)
        job = launch(
            [sys.executable, path], hosts=f"{first.name6}:2,[{second.address6}]:2"
        ).succeed()
    finally:
        for host in net.hosts:
            host.add_address4()
    assert "('host-b', 3, 1, 2, 1, 2)" in job.stdout


WITHOUT_LAUNCHER = """
import os
import numpy as np
import horovod.numpy as hvd
hvd.init()
total = hvd.allreduce(np.arange(100_000, dtype=np.float32), op=hvd.Sum)
assert np.array_equal(total, np.arange(100_000, dtype=np.float32) * 4)
numbers = (hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
os.write(1, f"rank {' '.join(map(str, numbers))}\\n".encode())  # in one piece
"""


@pytest.mark.parametrize("variant", ["address", "folder"])
def test_ranks_on_two_hosts_meet_without_a_launcher(variant, net, jobs, script, tmp_path) -> None:
    path = script(WITHOUT_LAUNCHER)
    env = {
        "address": {"HOROVOD_RANK0_ADDRESS": "host-a:29600", "HOROVOD_JOB_KEY": "ab" * 32},
        "folder": {"HOROVOD_RENDEZVOUS_DIR": str(tmp_path)},
    }[variant]
    # Both ranks of a host in one set of namespaces: else they were hosts of their own, as containers are.
    both = 'HOROVOD_RANK=$1 "$3" "$4" & HOROVOD_RANK=$2 "$3" "$4"; wait'
    started = []
    # Rank 0 last: the others have to wait for it.
    for host, ranks in reversed(list(zip(net.hosts, (("0", "1"), ("2", "3")), strict=True))):
        command = host.enter(["sh", "-c", both, "sh", *ranks, sys.executable, path])
        started.append(jobs(harness.Job(command, env={**env, "HOROVOD_SIZE": "4"})))
    lines = [line for job in started for line in job.succeed().stdout.splitlines()]
    assert sorted(lines) == ["rank 0 0 2 0 2", "rank 1 1 2 0 2", "rank 2 0 2 1 2", "rank 3 1 2 1 2"]


CALL = """
import os, sys
import horovod
def work(block):
    return os.uname().nodename, int(os.environ["HOROVOD_RANK"]), len(block), block[::1_000_000]
results = horovod.run(work, (bytes(range(256)) * 20_000,), num_proc=4, hosts="host-a:2,host-b:2",
                      ssh_port=int(sys.argv[1]), ssh_identity_file=sys.argv[2])
print([(host, rank, size) for host, rank, size, _ in results], len({part for *_, part in results}))
"""


def test_functions_are_called_on_two_hosts(net, jobs, script) -> None:
    words = [sys.executable, script(CALL), str(network.SSH_PORT), net.folder / "user"]
    job = jobs(harness.Job(net.hosts[0].enter(words))).succeed()
    size = 256 * 20_000
    places = [
        (host, 2 * at + i, size) for at, host in enumerate(("host-a", "host-b")) for i in (0, 1)
    ]
    assert job.stdout.strip() == f"{places} 1"


REDUCE_FOR_EVER = """
import os, signal, socket, sys, time
import numpy as np
import horovod.numpy as hvd

signal.signal(signal.SIGTERM, signal.SIG_IGN)
hvd.init()
rank = hvd.rank()
print(f"rank {rank} is process {os.getpid()}", flush=True)
tensor = np.ones(1 << 20, np.float32)
try:
    step = 0
    while True:
        hvd.allreduce(tensor, name="gradient")
        step += 1
        if step == 5:
            print("reducing", flush=True)
except hvd.HorovodInternalError as error:
    print(f"rank {rank} caught: {error}", flush=True)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("victim", "fan_out"),
    [(3, "16"), (0, "16"), (2, "2")],
    ids=["on the other host", "the coordinator", "through whom another one negotiates"],
)
def test_killed_rank_is_named_with_its_host_everywhere(victim, fan_out, launch, script) -> None:
    # At once, and not because somebody is silent.
    env = {"HOROVOD_CONTROL_FAN_OUT": fan_out, "HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "0"}
    job = launch([sys.executable, script(REDUCE_FOR_EVER)], env=env)
    found = [
        re.search(r"rank (\d) is process (\d+)", x) for x in job.wait_for(" is process ", count=4)
    ]
    pids = {int(match[1]): int(match[2]) for match in found}
    job.wait_for("reducing", count=4)

    os.kill(pids[victim], signal.SIGKILL)
    caught = job.wait_for("caught:", count=3)
    code = job.fail()

    assert code == 137
    host = "host-b" if victim > 1 else "host-a"
    for line in caught:
        printed = line.split("caught:")[1]
        assert re.search(rf"rank {victim}\b", printed)
        assert host in printed
    assert re.search(
        rf"horovodrun: rank {victim} on host {host} was killed by signal 9", job.stderr
    )


def test_a_host_that_vanishes_without_a_word_is_given_up_on_both_sides(launch, net, script) -> None:
    job = launch(
        [sys.executable, script(REDUCE_FOR_EVER)], env={"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "2"}
    )
    job.wait_for("reducing", count=4)
    net.hosts[1].cut_off()
    try:
        job.wait_for("caught:", count=2)
    finally:
        net.hosts[1].connect_again()
    # Output of the other side could not pass.
    caught = job.wait_for("caught:", count=4)
    job.fail()

    for line in caught:
        here = int(re.search(r"rank (\d) caught", line)[1]) // 2
        there = ("host-b", "host-a")[here]
        lost = re.search(r"lost a member of the job: rank (\d) on (\S+): (.*)", line)
        assert int(lost[1]) // 2 != here
        assert lost[2] == there
        assert "did not answer" in lost[3] or "timed out" in lost[3].lower(), line


@pytest.mark.parametrize("seconds", ["300", "0"])
def test_ssh_is_as_patient_as_the_ranks(seconds, launch, script) -> None:
    job = launch(
        [sys.executable, script(REDUCE_FOR_EVER)],
        env={"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": seconds},
    )
    job.wait_for("reducing", count=4)
    lines = [list(map(os.fsdecode, harness.command_line(pid))) for pid in job.members()]
    [words] = [words for words in lines if words and Path(words[0]).name == "ssh"]
    # The options that ssh itself derives, whatever else it is configured with.
    asked = [words[0], "-G", *words[1 : words.index("--")], "host-b"]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    settings = dict(line.split(" ", 1) for line in printed.splitlines() if " " in line)
    limit = int(settings["serveraliveinterval"]) * int(settings["serveralivecountmax"])
    # 0 is for ever, for both.
    assert limit == 0 if seconds == "0" else limit >= 300
    job.process.send_signal(signal.SIGINT)
    assert job.fail() == 130


def test_nothing_outlives_a_launcher_killed_with_sigkill(launch, script) -> None:
    job = launch([sys.executable, script(REDUCE_FOR_EVER)])
    job.wait_for("reducing", count=4)
    job.process.kill()
    job.wait()


def test_interrupt_ends_ranks_on_all_hosts(launch, script) -> None:
    job = launch([sys.executable, script(REDUCE_FOR_EVER)])
    job.wait_for("reducing", count=4)
    job.process.send_signal(signal.SIGINT)
    assert job.fail() == 130


WORK_UNTIL_STOPPED = """
import os, sys
import numpy as np
import horovod.numpy as hvd

hvd.init()
stop, step = False, 0
while not stop:
    total = hvd.allreduce(np.full(100_000, float(hvd.rank()), np.float32), op=hvd.Sum, name="work")
    assert (total == 6).all()
    stop = bool(hvd.broadcast(np.array(int(os.path.exists(sys.argv[1]))), 0, name="stop"))
    step += 1
    if step == 3:
        print(f"working {os.getpid()}", flush=True)
print("all right", flush=True)
"""


MORE = pytest.mark.thorough(
    also="tests/hosts/test_hosts.py::test_garbage_from_the_network_does_no_harm"
)


@pytest.mark.parametrize("share", [0.25, pytest.param(1.0, marks=MORE)])
def test_garbage_from_the_network_does_no_harm(
    launch, script, net, jobs, tmp_path, pytestconfig, share
) -> None:
    stop = tmp_path / "stop"
    job = launch([sys.executable, script(WORK_UNTIL_STOPPED), stop])
    job.wait_for("working", count=4)
    first, second = net.hosts
    members = set(job.members()) | {job.process.pid}
    # These namespaces have IPv4 addresses only.
    found = strangers.listening(members & first.pids())
    ports = {address[1] for family, address in found if family == "tcp"}
    assert ports, "nothing listens on the first host"
    budget = int(pytestconfig.getoption("--garbage-mb") * share * 1_000_000) // len(ports)

    for port in ports:
        words = [sys.executable, strangers.__file__, first.address, str(port), str(budget)]
        stranger = jobs(harness.Job(second.enter(words)))
        assert stranger.wait() == 0
        assert int(stranger.stdout) > 0, f"port {port} took nothing"
        print(f"port {port} took {int(stranger.stdout) / 1e6:.1f} MB")

    stop.touch()
    job.succeed()
    assert job.stdout.count("all right") == 4


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
