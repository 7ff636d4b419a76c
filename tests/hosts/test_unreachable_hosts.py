"""Hosts that ssh reaches and ranks do not: every rank fails soon, with one text that says what was tried."""

from __future__ import annotations

import re
import sys

import network
import pytest

import harness

pytestmark = pytest.mark.hosts
HOSTS = 3

INIT = """
import os
import horovod.numpy as hvd
rank = os.environ["HOROVOD_RANK"]
try:
    hvd.init()
except Exception as error:
    os.write(1, f"rank {rank} caught {type(error).__name__}: {error}\\n".encode())  # in one piece
    raise
os.write(1, f"rank {rank} has begun\\n".encode())
"""

# Only what waits for a time limit reaches it, and then the harness ends the test.
FOREVER = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}


@pytest.fixture
def launch(net, jobs, script):
    """Starts horovodrun on the first host for two ranks on each of two hosts."""

    def start(
        *options: str, hosts: str = "host-a:2,host-b:2", program: str = INIT, words=(), env=FOREVER
    ):
        command = [harness.HOROVODRUN, "-np", "4", "-H", hosts, "-p", str(network.SSH_PORT)]
        command += ["-i", str(net.folder / "user"), *options]
        command += [sys.executable, script(program), *words]
        return jobs(harness.Job(net.hosts[0].enter(command), env=env))

    return start


def one_cause(job: harness.Job, ranks: int = 4) -> str:
    """The one cause that all ranks and the launcher print, with the class that failures.md promises."""
    job.fail()
    found = re.findall(r"rank (\d) caught (\w+): (.*)", job.stdout)
    assert {rank for rank, _, _ in found} == set(map(str, range(ranks))), job.report()
    assert {name for _, name, _ in found} == {"ValueError"}, job.report()
    texts = {text for _, _, text in found}
    assert len(texts) == 1, job.report()
    text = texts.pop()
    assert text.startswith("Horovod initialization failed. "), text
    cause = text.partition("the job could not be set up: ")[2]
    assert f"horovodrun: {cause}" in job.stderr, job.report()
    return cause


@pytest.mark.parametrize(
    ("how", "came_back", "likely"),
    [
        ("swallow", "no answer in time", "A firewall on one of the hosts or between them drops"),
        (
            "refuse",
            "no route to host",
            "No route leads to the other host, or a firewall rejects the packets",
        ),
    ],
)
def test_a_firewall_between_ranks_and_launcher(how, came_back, likely, launch, net) -> None:
    first, second, _ = net.hosts
    getattr(second, how)(first)
    try:
        cause = one_cause(launch())
    finally:
        second.restore_routes()
    assert cause.startswith("ranks 2, 3 on host-b cannot connect to the launcher"), cause
    for address in (first.address, rf"\[{first.address6}\]"):
        assert re.search(rf"{address}:\d+: {came_back}", cause), cause
    assert likely in cause
    check = f"`horovodrun --doctor -H host-a:2,host-b:2 -p {network.SSH_PORT} -i "
    assert check in cause


@pytest.mark.parametrize(
    ("how", "came_back"), [("swallow", "no answer in time"), ("refuse", "no route to host")]
)
def test_a_firewall_between_ranks_alone(how, came_back, launch, net) -> None:
    _, second, third = net.hosts
    getattr(third, how)(second)
    try:
        cause = one_cause(launch(hosts="host-b:2,host-c:2"))
    finally:
        third.restore_routes()
    # The first rank that gives up ends the others, which may have tried one of the ranks there or both.
    found = re.match(
        r"ranks? (?:2|3|2, 3) on host-c cannot connect to ranks? (0|1|0, 1) on host-b", cause
    )
    assert found, cause
    for address in (second.address, rf"\[{second.address6}\]"):
        # Each of them listens on a port of its own.
        ports = re.findall(rf"{address}:(\d+): {came_back}", cause)
        assert len(set(ports)) == len(found[1].split(", ")), cause
    assert "`horovodrun --doctor -H host-b:2,host-c:2 " in cause


def test_an_interface_that_leads_nowhere(launch, net) -> None:
    for number, host in enumerate(net.hosts):
        host.add_bridge("lonely0", f"203.0.113.{number + 1}/32")
    try:
        cause = one_cause(launch("--network-interfaces", "lonely0"))
    finally:
        for host in net.hosts:
            host.remove_link("lonely0")
    assert re.search(r"\(tried 203\.0\.113\.1:\d+: no route to host\)", cause), cause
    assert "names lonely0, which does not lead to the other host: leave it out" in cause
    assert "--network-interfaces lonely0`" in cause


def test_the_same_address_on_both_hosts(launch, net) -> None:
    for host in net.hosts:
        host.add_bridge("docker0", "172.17.0.1/16")
    try:
        # Without the option the ranks find the common network.
        assert launch().succeed().stdout.count("has begun") == 4
        cause = one_cause(launch("--network-interfaces", "docker0"))
    finally:
        for host in net.hosts:
            host.remove_link("docker0")
    tried = r"\(tried 172\.17\.0\.1:\d+: connection refused, an address of this host itself\)"
    assert re.search(tried, cause), cause
    assert "Two hosts have the address 172.17.0.1" in cause
    assert "names docker0" in cause


def test_ranks_without_a_launcher_say_themselves_what_they_tried(net, jobs, script) -> None:
    first, second, _ = net.hosts
    env = {
        "HOROVOD_RANK0_ADDRESS": "host-a:29600",
        "HOROVOD_JOB_KEY": "ab" * 32,
        "HOROVOD_SIZE": "2",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "8",
    }
    second.swallow(first)
    path = script(INIT)
    try:
        started = [
            jobs(
                harness.Job(
                    host.enter([sys.executable, path]), env={**env, "HOROVOD_RANK": str(rank)}
                )
            )
            for rank, host in enumerate((first, second))
        ]
        for job in started:
            job.fail()
    finally:
        second.restore_routes()
    there, here = (job.stdout for job in started)
    cause = "rank 1 on host-b cannot connect to rank 0, where all ranks meet"
    assert (
        f"rank 1 caught ValueError: Horovod initialization failed. the job could not be set up: {cause}"
        in here
    )
    tried = rf"\(tried {first.address}:29600: no answer in time"
    assert re.search(tried, here), here
    assert f"`horovodrun --doctor -H {first.address},host-b`" in here
    # Before that it has warned, in case that whoever started it ends it first.
    assert re.search(rf"not connected yet, trying for \d s more: {cause}", started[1].stderr)
    assert "1 of 2 ranks did not register" in there
    assert "says in its own output what it tried" in there


LARGE_AFTER_SMALL = """
import os, sys
import numpy as np
import horovod.numpy as hvd
hvd.init()
print("has begun", flush=True)
narrowed = False
while not narrowed:
    narrowed = bool(hvd.broadcast(np.array(int(os.path.exists(sys.argv[1]))), 0, name="narrowed"))
try:
    hvd.allreduce(np.ones(1 << 20, np.float32))
except hvd.HorovodInternalError as error:
    os.write(1, f"rank {hvd.rank()} caught {error}\\n".encode())  # in one piece
    raise
"""


def test_a_path_with_a_smaller_mtu_is_named(launch, net, tmp_path) -> None:
    narrowed = tmp_path / "narrowed"
    env = {"HOROVOD_HEARTBEAT_TIMEOUT_SECONDS": "4"}
    job = launch(program=LARGE_AFTER_SMALL, words=[narrowed], env=env)
    # ssh needs large packets, too: to begin, and from the other host for what ranks there print.
    job.wait_for("has begun", count=4)
    both = net.hosts[:2]
    try:
        for host in both:
            host.narrow(1200)
        narrowed.touch()
        # Output of the ranks here reaches the launcher; large packets of other hosts do not.
        job.wait_for("caught", count=2)
    finally:
        for host in both:
            host.widen()
    job.fail()
    caught = re.findall(r"rank \d caught (.*)", job.stdout)
    assert len(caught) == 4, job.report()
    # A rank that has not noticed yet when another one has ended may hear of that end first.
    noticed = [text for text in caught if "exited with code" not in text]
    assert noticed, job.report()
    for text in noticed:
        assert "small packets passed" in text, job.report()
        assert re.search(r"those of 1\d\d\d bytes did not", text), text
        assert "a smaller MTU than the 1500 that this host takes for granted" in text, text
        assert "ping -M do -s 1472" in text, text
