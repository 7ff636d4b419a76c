"""`HOROVOD_PORT_RANGE`: every listener of a job takes its port from there, and says so when none is left."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

import harness

# Ranks that share no memory listen for each other. A connection that was accepted has the listener's port.
CONNECTED = """
import os
import socket
import horovod.numpy as hvd

hvd.init()
hvd.barrier()
fds = ["/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")]
inodes = {os.readlink(fd)[8:-1] for fd in fds if os.path.exists(fd) and "socket:[" in os.readlink(fd)}
pairs = []
for kind in ("tcp", "tcp6"):
    with open("/proc/self/net/" + kind) as table:
        for line in list(table)[1:]:
            words = line.split()
            if words[9] in inodes and words[3] == "01":
                pairs.append([int(words[at].rsplit(":", 1)[1], 16) for at in (1, 2)])
os.write(1, f"rank {hvd.rank()} {pairs} {os.environ['HOROVOD_RENDEZVOUS']}\\n".encode())
hvd.barrier()
"""
ENOUGH = 12


@pytest.fixture
def ports() -> Iterator[range]:
    """Ports in a row that nobody else gets: bound, so that only who asks for these very ports can listen there."""
    for first in range(20_000, 32_000, ENOUGH + 1):
        with contextlib.ExitStack() as stack:
            try:
                # Without SO_REUSEADDR: one test gets it, and with it the ports that follow.
                stack.enter_context(socket.socket()).bind(("127.0.0.1", first))
                for port in range(first + 1, first + 1 + ENOUGH):
                    taken = stack.enter_context(socket.socket())
                    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            yield range(first + 1, first + 1 + ENOUGH)
            return
    pytest.fail("no ports in a row are free")


def text(ports: range) -> str:
    """As the setting has it."""
    return f"{ports[0]}-{ports[-1]}"


def test_all_listeners_of_a_job_take_their_ports_from_the_range(ports, script, jobs) -> None:
    env = {"HOROVOD_PORT_RANGE": text(ports), "HOROVOD_SHM": "0"}
    job = jobs(harness.python(3, script(CONNECTED), env=env))
    job.succeed()
    lines = [line for line in job.stdout.splitlines() if ">:rank " in line]
    assert len(lines) == 3, job.report()
    count = 0
    for line in lines:
        pairs, _, rendezvous = line.partition(">:rank ")[2][2:].rpartition(" ")
        assert int(rendezvous.rsplit(":", 1)[1]) in ports, job.report()
        for pair in eval(pairs):
            count += 1
            assert set(pair) & set(ports), (pair, job.report())
    assert count >= 6, job.report()


def test_a_function_and_its_results_travel_through_the_range(ports, script, jobs) -> None:
    program = script(
        "import horovod\n"
        "def work():\n"
        "    import horovod.numpy as hvd\n"
        "    hvd.init()\n"
        "    return hvd.rank()\n"
        "if __name__ == '__main__':\n"
        "    print('results', horovod.run(work, num_proc=2))\n"
    )
    env = {"HOROVOD_PORT_RANGE": text(ports)}
    job = jobs(harness.Job([harness.sys.executable, program], env=env))
    job.succeed()
    assert "results [0, 1]" in job.stdout


def test_a_range_without_a_free_port_is_an_error_that_names_it(ports, script, jobs) -> None:
    # The launcher itself has nowhere to listen.
    with socket.create_server(("127.0.0.1", ports[0])):
        env = {"HOROVOD_PORT_RANGE": f"{ports[0]}-{ports[0]}"}
        job = jobs(harness.python(2, script(CONNECTED), env=env))
        job.fail()
        for part in (f"HOROVOD_PORT_RANGE={ports[0]}-{ports[0]}", "widen the range"):
            assert part in job.stderr, job.report()
    # The launcher takes the last port, and the ranks have none.
    tries = CONNECTED.replace(
        "hvd.init()",
        "try:\n    hvd.init()\nexcept ValueError as e:\n"
        "    os.write(1, f'refused {e}\\n'.encode())\n    raise SystemExit(3)",
    )
    env["HOROVOD_SHM"] = "0"
    job = jobs(harness.python(2, script(tries), env=env))
    job.fail()
    refused = [line for line in job.stdout.splitlines() if ">:refused" in line]
    assert len(refused) == 2, job.report()
    assert all(f"HOROVOD_PORT_RANGE={ports[0]}-{ports[0]}" in line for line in refused), (
        job.report()
    )


@pytest.mark.parametrize("value", ["29000", "29100-29000", "80-90", "a-b"])
def test_what_is_no_range_is_refused_before_anything_starts(value, jobs) -> None:
    job = jobs(harness.horovodrun(2, ["true"], env={"HOROVOD_PORT_RANGE": value}))
    assert job.fail() == 2
    for part in ("HOROVOD_PORT_RANGE", value, "29000-29100"):
        assert part in job.stderr, job.report()
