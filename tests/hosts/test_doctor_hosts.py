"""`horovodrun --doctor` across two hosts, through real ssh: what is healthy, and every kind of trouble by its name."""

from __future__ import annotations

import json
import re
import select
import signal

import network
import pytest

import harness

pytestmark = pytest.mark.hosts


@pytest.fixture
def examine(net, jobs):
    """Runs the doctor on the first host; checks that it leaves nothing behind on any."""
    before = {host.name: host.pids() for host in net.hosts}
    started = []

    def start(*options: str, hosts: str = "host-a:2,host-b:2", within: str = "", **kwargs):
        words = [harness.HOROVODRUN, "--doctor=json", "-H", hosts, "-p", str(network.SSH_PORT)]
        words += ["-i", str(net.folder / "user"), *options]
        if within:
            words = ["sh", "-c", f'{within} && exec "$@"', "sh", *words]
        # It promises to need at most 15 s; the rest is for a machine that is busy.
        job = jobs(harness.Job(net.hosts[0].enter(words), **kwargs))
        started.append(job)
        return job

    yield start
    for job in started:
        job.assert_nothing_left()
    for host in net.hosts:
        left = harness.wait_for_processes_to_end(lambda host=host: host.pids() - before[host.name])
        assert not left, f"processes left on {host.name}: {left}"


def healthy(job: harness.Job) -> dict:
    job.succeed()
    chart = json.loads(job.stdout)
    assert not chart["would_stop"], job.report()
    return chart


def ill(job: harness.Job) -> dict:
    assert job.fail() == 1, job.report()
    chart = json.loads(job.stdout)
    assert chart["would_stop"], job.report()
    return chart


def finding(chart: dict, what: str) -> dict:
    found = [one for one in chart["findings"] if re.search(what, one["what"])]
    assert len(found) == 1, json.dumps(chart["findings"], indent=2)
    return found[0]


def route(chart: dict, start: str, end: str) -> dict:
    return next(route for route in chart["ways"] if (route["from"], route["to"]) == (start, end))


def test_a_healthy_pair(examine, net) -> None:
    chart = healthy(examine())
    first, second = net.hosts
    assert chart["ranks"] == 4
    assert [host["name"] for host in chart["hosts"]] == ["host-a", "host-b"]
    for host in chart["hosts"]:
        assert host["hostname"] == host["name"]
        assert host["python"]
        assert host["torch"]
        assert host["horovod"] == chart["version"]
        assert abs(host["clock_ahead_ns"]) <= host["clock_uncertain_ns"] + 1e8
        names = {entry["name"]: entry["addresses"] for entry in host["names"]}
        assert names == {"host-a": [first.address], "host-b": [second.address]}
    for start, end in (("host-a", second), ("host-b", first)):
        found = route(chart, start, end.name)
        assert (found["address"], found["interface"]) == (end.address, "eth0")
        # Both versions of IP were tried.
        assert [one["address"] for one in found["tried"]] == [end.address, end.address6]
        assert not any(one["problem"] for one in found["tried"])
        assert found["bytes_per_second"] > 1e6
        assert 0 < found["round_trip_ns"] < 1e9
    assert chart["not_measured"] == []


def test_what_people_see(examine, net) -> None:
    # Of an option that is given twice the last one counts: no JSON.
    job = examine("--doctor").succeed()
    head = r"^host-b \(2 ranks, clock [+-][\d.]+ [µm]?s, give or take"
    assert re.search(head, job.stdout, re.M), job.report()
    row = rf"^host-b +host-a +{net.hosts[0].address} \(eth0\) +4 +[\d.]+ [kMG]B/s +[\d.]+ [µm]?s$"
    assert re.search(row, job.stdout, re.M), job.report()
    assert re.search(r"^2 hosts, 4 ranks: nothing would stop a job", job.stdout, re.M), job.report()


@pytest.mark.parametrize(
    ("how", "problem", "fix"),
    [
        ("swallow", "no answer in time", "a firewall drops the packets"),
        ("refuse", "no route to host", "ip route get"),
    ],
)
def test_blocked_ports_are_told_from_a_host_that_is_away(how, problem, fix, examine, net) -> None:
    first, second = net.hosts
    getattr(second, how)(first)
    try:
        chart = ill(examine())
    finally:
        second.restore_routes()
    found = finding(chart, "^no connection from host-b to host-a")
    assert found["severity"] == "stops the job"
    assert found["hosts"] == ["host-b"]
    for address in (first.address, first.address6):
        assert f"{address} (eth0) {problem}" in found["what"]
    assert fix in found["fix"]
    assert "allow TCP ports" in found["fix"]
    # Everything else about that host is known.
    assert chart["hosts"][1]["problem"] is None
    assert chart["hosts"][1]["torch"]


def test_hosts_that_cannot_be_reached_are_named_and_the_others_examined(examine, net) -> None:
    net.hosts[0].add_black_hole("203.0.113.9")
    hosts = "host-a:1,203.0.113.9:1,no-such-host.invalid:1,host-b:1"
    chart = ill(examine(hosts=hosts))
    silent, unknown = (chart["hosts"][i]["problem"] for i in (1, 2))
    assert re.search("did not answer ssh in time|no answer within", silent), silent
    assert "its name does not resolve" in unknown
    assert "firewall" in finding(chart, re.escape(silent))["fix"]
    assert finding(chart, "does not resolve \\(")["hosts"] == ["no-such-host.invalid"]
    assert route(chart, "host-b", "host-a")["bytes_per_second"] > 1e6


def test_a_wrong_key_is_explained_as_at_the_start_of_a_job(examine, net) -> None:
    chart = ill(examine("-i", str(net.folder / "wrong")))
    found = finding(chart, "Permission denied")
    assert found["hosts"] == ["host-b"]
    assert "ssh-copy-id" in found["fix"]


OTHER_VERSION = """#!/bin/sh
# An agent of another version: it says hello, then waits for the launcher to hang up.
printf '\\000horovod-agent1\\n\\015\\000\\000\\000\\000\\0050.0.9\\005other'
exec cat >/dev/null
"""


def test_another_version_on_one_host_is_named(examine, net) -> None:
    fake = net.folder / "horovodrun"
    fake.write_text(OTHER_VERSION)
    fake.chmod(0o755)
    second = net.hosts[1]
    inside = ["nsenter", "--mount", "--target", str(second.sshd.pid)]
    network.run(*inside, "mount", "--bind", str(fake), str(harness.HOROVODRUN))
    try:
        chart = ill(examine())
    finally:
        network.run(*inside, "umount", str(harness.HOROVODRUN))
    found = finding(chart, r"has horovod-rs 0\.0\.9, this host .*: install the same there")
    assert found["hosts"] == ["host-b"]
    assert "install the same wheels" in found["fix"]


def test_too_few_open_files(examine) -> None:
    chart = healthy(examine(within="ulimit -n 64"))
    found = finding(chart, "ulimit -n is 64")
    assert (found["severity"], found["hosts"]) == ("risk", ["host-a"])
    assert "leaves" in found["what"]
    assert "hard limit" in found["fix"]
    # With so many connections each rank cannot even start.
    env = {"HOROVOD_CONNECTIONS_PER_PEER": "16"}
    chart = ill(examine(within="ulimit -n 64", hosts="host-a:2,host-b:4", env=env))
    assert finding(chart, "ulimit -n is 64")["severity"] == "stops the job"


def test_little_room_in_shared_memory_and_for_temporary_files(examine) -> None:
    tiny = "mount -t tmpfs -o size=1m tmpfs"
    within = f"{tiny} /dev/shm && {tiny} $TMPDIR"
    chart = healthy(examine(within=within))
    found = finding(chart, "/dev/shm has 1.0 MiB free of 1.0 MiB")
    assert (found["severity"], found["hosts"]) == ("risk", ["host-a"])
    assert "DataLoader" in found["what"]
    assert "--shm-size" in found["fix"]
    assert "TMPDIR" in finding(chart, "has only .* free")["fix"]


def test_a_command_that_one_host_does_not_have(examine, net) -> None:
    chart = ill(examine("-np", "4", "no-such-command", "--epochs", "3"))
    found = finding(chart, "command not found: no-such-command")
    assert found["hosts"] == ["host-a", "host-b"]


def test_interrupted(examine, net) -> None:
    net.hosts[0].add_black_hole("203.0.113.10")
    job = examine(hosts="host-a:1,203.0.113.10:1")
    # ssh runs for seconds: it waits for an answer that never comes.
    while not _ssh_runs(job):
        assert job.process.poll() is None, job.report()
        select.select([], [], [], 0.02)
    job.process.send_signal(signal.SIGINT)
    assert job.fail() == 130
    assert job.stdout == ""


def _ssh_runs(job: harness.Job) -> bool:
    lines = [b" ".join(harness.command_line(pid)) for pid in job.members()]
    return any(b"__agent" in line and b"203.0.113.10" in line for line in lines)
