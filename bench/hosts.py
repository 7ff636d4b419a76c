"""Allreduce between two hosts of our own (network namespaces) against iperf3 on the same link.

Usage (as root, with iproute2, OpenSSH's server and iperf3):
  python bench/hosts.py [--links free,1gbit,100mbit,delay] [--ranks 1,2] [--connections 1,4] [--json FILE] [--quick]

Every rank of a host sends its part of the vector to the other host: with two hosts an allreduce of N bytes puts
N bytes of payload on the link in each direction, however many ranks there are. `Gbit/s` is N * 8 / median time,
one direction; `iperf3` is what it carries per direction while it sends in both (`--bidir`), with as many connections
each way as ours has in all. `of line` counts Ethernet, IP and TCP headers too (1514 bytes per 1448 of payload), because
the shaper does.

There is a barrier before each operation, unless it is one of those `in a row`, which begin when the one before has
ended, or `in flight`: as many as it says are submitted, and each again as soon as it has ended, so the time of one is
that from one end to the next. Up to 128 MiB that are ready at the same time become one operation: some of four do.

`delay` adds 20 ms in each direction, 40 ms to a round trip. Whatever carries the bytes, one operation by itself first
waits for the last rank's "ready" and the answer, and at its end for the last bytes: in a row 40 ms in which nothing
passes, after a barrier 80 ms, for that leaves one rank 20 ms behind the other. `latency allows` is what of iperf3's
rate is left then. iperf3 is a steady flow of seconds, so what is held against it there are operations in flight, as
training has them.
"""

from __future__ import annotations

import argparse
import enum
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "hosts"), str(ROOT / "bench")]

import network  # noqa: E402  (all made importable just above)
import tables  # noqa: E402
import wire  # noqa: E402
from processes import output_of, unwind_on_sigterm  # noqa: E402

# One job or one run of iperf3; far above what either takes.
LIMIT_S = 110
WIRE_OVER_PAYLOAD = 1514 / 1448
MIB = 1 << 20


class Pacing(enum.Enum):
    """When a rank submits its tensors."""

    BARRIER = "all of them after a barrier"
    IN_A_ROW = "all of them when those before have ended"
    IN_FLIGHT = (
        "each when it itself has ended, so that as many as there are tensors are always under way"
    )

    @property
    def crossings(self) -> int:
        """How often a message must cross the link while nothing else is on it, whatever the ranks do."""
        # "Ready", the answer to it, and the last bytes; a barrier leaves one rank one way behind the other.
        return {Pacing.BARRIER: 4, Pacing.IN_A_ROW: 2, Pacing.IN_FLIGHT: 0}[self]


@dataclass(frozen=True)
class Case:
    """The reduced tensors, and their time."""

    name: str
    bytes: int
    """Of a tensor; 0: the gradients of ResNet-50 instead."""
    tensors: int = 1
    pacing: Pacing = Pacing.BARRIER


CASES = {
    case.name: case
    for case in (
        Case("4 B", 4),
        Case("64 KiB", 64 << 10),
        Case("1 MiB", MIB),
        Case("8 MiB", 8 * MIB),
        Case("64 MiB", 64 * MIB),
        Case("64 MiB in a row", 64 * MIB, pacing=Pacing.IN_A_ROW),
        Case("4 x 64 MiB in a row", 64 * MIB, 4, Pacing.IN_A_ROW),
        Case("64 MiB, 4 in flight", 64 * MIB, 4, Pacing.IN_FLIGHT),
        Case("resnet50", 0),
    )
}


@dataclass(frozen=True)
class Goal:
    """A goal, and its cases."""

    percent: float
    of: str  # "iperf3" or "line"
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """How the link between the hosts is held back; each host shapes what it sends."""

    name: str
    qdisc: tuple[str, ...]
    """The queueing discipline that `tc` sets on each host's device."""
    bits_per_s: float | None
    repeats: int
    cases: tuple[str, ...]
    goal: Goal
    delay_s: float = 0
    """Packets take another way, see tests/hosts/wire.py."""
    connections: tuple[int, ...] = (1,)
    """Between two ranks."""

    def allowed(self, case: Case, bytes_: int, bits_per_s: float) -> float:
        """The share of this rate that is left when nothing passes while messages cross the link."""
        sending = bytes_ * 8 / bits_per_s
        return sending / (sending + case.pacing.crossings * self.delay_s)


ONE, IN_FLIGHT = "64 MiB", "64 MiB, 4 in flight"
LINKS = {
    link.name: link
    for link in (
        Link("free", (), None, 15, ("4 B", "64 KiB", "1 MiB", "8 MiB", ONE, IN_FLIGHT, "resnet50"),
             Goal(80, "iperf3", (ONE,))),
        Link("1gbit", ("tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"), 1e9, 5, (ONE, IN_FLIGHT),
             Goal(95, "line", (ONE, IN_FLIGHT))),
        Link("100mbit", ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"), 1e8, 2, (ONE,),
             Goal(95, "line", (ONE,))),
        Link("delay", (), None, 8, (ONE, "64 MiB in a row", "4 x 64 MiB in a row", IN_FLIGHT),
             Goal(85, "iperf3", (IN_FLIGHT,)), delay_s=0.02, connections=(1, 4)),
    )
}  # fmt: skip


def rank_program(cases: Sequence[str], repeats: int) -> None:
    """The program of each rank; rank 0 prints a JSON line per case."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from cases import resnet50_shapes

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()

    def submit(t: torch.Tensor, name: str) -> int:
        return hvd.allreduce_async_(t, name=name, op=hvd.Sum)

    def reduce(tensors: list[torch.Tensor], tag: str) -> None:
        handles = [submit(t, f"{tag}.{i}") for i, t in enumerate(tensors)]
        for handle in handles:
            hvd.synchronize(handle)

    def one_by_one(case: Case, tensors: list[torch.Tensor], rounds: int) -> list[float]:
        """Seconds of each operation by itself."""
        seconds = []
        for _ in range(rounds):
            if case.pacing is Pacing.BARRIER:
                hvd.barrier()
            start = time.perf_counter()
            reduce(tensors, case.name)
            seconds.append(time.perf_counter() - start)
        return seconds

    def in_flight(case: Case, tensors: list[torch.Tensor], rounds: int) -> list[float]:
        """Seconds per operation, each the mean over as many as are in flight."""
        names = [f"{case.name}.{i}" for i in range(len(tensors))]
        handles = [submit(t, name) for t, name in zip(tensors, names, strict=True)]
        ends = []
        # The first round begins with an idle link.
        for _ in range(rounds + 1):
            for i, t in enumerate(tensors):
                hvd.synchronize(handles[i])
                handles[i] = submit(t, names[i])
            ends.append(time.perf_counter())
        for handle in handles:
            hvd.synchronize(handle)
        return [(b - a) / len(tensors) for a, b in itertools.pairwise(ends)]

    for case in (CASES[name] for name in cases):
        shapes = [(case.bytes // 4,)] * case.tensors if case.bytes else resnet50_shapes()
        tensors = [torch.ones(shape) for shape in shapes]
        total = sum(t.nbytes for t in tensors)
        rounds = repeats * 10 if total <= MIB else repeats
        if case.tensors > 1:
            # bbr holds a busy connection back for 200 ms every ten seconds: that must not be half of them.
            rounds = max(repeats // 2, 3)
        reduce(tensors, case.name)
        if not all(bool((t == hvd.size()).all()) for t in tensors):
            raise SystemExit(f"rank {hvd.rank()}: {case.name}: wrong sums")
        for t in tensors:
            t.zero_()
        if case.pacing is Pacing.IN_FLIGHT:
            total //= len(tensors)
            seconds = in_flight(case, tensors, rounds)
        else:
            for _ in range(4 if repeats >= 10 else 2 if len(tensors) == 1 else 1):
                reduce(tensors, case.name)
            seconds = one_by_one(case, tensors, rounds)
        if hvd.rank() == 0:
            record = {"case": case.name, "bytes": total, "seconds": seconds}
            print(json.dumps(record), flush=True)


def python_on(net: network.Network, ranks: int, words: Sequence[str]) -> list[str]:
    """The command that runs Python with these words as so many ranks on each host."""
    command = [str(Path(sys.executable).with_name("horovodrun")), "-np"]
    command += [str(len(net.hosts) * ranks)]
    command += ["-H", ",".join(f"{host.name}:{ranks}" for host in net.hosts)]
    command += ["-p", str(network.SSH_PORT), "-i", str(net.folder / "user")]
    return net.hosts[0].enter([*command, sys.executable, *words])


def launch(
    net: network.Network, link: Link, ranks: int, connections: int, repeats: int
) -> dict[str, dict[str, object]]:
    """Every case over this link with so many ranks on each host, so many connections between two."""
    settings = {"OMP_NUM_THREADS": "1", "HOROVOD_CONNECTIONS_PER_PEER": str(connections)}
    if link.delay_s:
        settings["HOROVOD_GLOO_IFACE"] = wire.NAME
    words = [str(Path(__file__).resolve()), "--cases", ";".join(link.cases)]
    words += ["--repeats", str(repeats)]
    command = python_on(net, ranks, words)
    done = output_of(command, LIMIT_S, env={**os.environ, **settings})
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    lines = [
        line[line.index('{"case"') :] for line in done.stdout.splitlines() if '{"case"' in line
    ]
    return {record["case"]: record for record in map(json.loads, lines)}


def iperf3(net: network.Network, address: str, connections: int, seconds: float) -> float:
    """Bits per second that each direction carries, the mean of both, while both are busy."""
    server = subprocess.Popen(
        net.hosts[1].enter(["iperf3", "-s", "-1", "--forceflush"]),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "listening" in line:
                break
        client = ["iperf3", "-c", address, "--bidir", "-J", "-t", str(seconds)]
        client += ["-P", str(connections), "-O", "1"]
        done = output_of(net.hosts[0].enter(client), LIMIT_S)
        end = json.loads(done.stdout).get("end", {})
        if "sum_received" not in end:
            raise SystemExit(f"iperf3: {done.stdout}{done.stderr}")
        one, other = end["sum_received"], end["sum_received_bidir_reverse"]
        return float(one["bits_per_second"] + other["bits_per_second"]) / 2
    finally:
        server.kill()
        server.wait()


def shape(net: network.Network, link: Link) -> tuple[str, Callable[[], None]]:
    """Make the link what it shall be; returns the second host's address on it, and what undoes it."""
    if link.delay_s:
        delayed = wire.Wire(net.hosts, delay_s=link.delay_s)
        return delayed.addresses[1], delayed.close
    device = ("dev", "eth0", "root")
    for host in net.hosts if link.qdisc else []:
        network.run("tc", "-n", host.namespace, "qdisc", "add", *device, *link.qdisc)

    def free() -> None:
        for host in net.hosts if link.qdisc else []:
            network.run("tc", "-n", host.namespace, "qdisc", "del", *device)

    return net.hosts[1].address, free


def why_not() -> str | None:
    """Why this cannot be measured here; None when it can."""
    if reason := network.why_not():
        return reason
    if not shutil.which("iperf3"):
        return "iperf3 is not installed (Debian package iperf3)"
    return None


def main() -> None:
    """Measure every chosen link with every number of ranks; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--ranks", default="1,2", help="ranks per host")
    parser.add_argument("--json", type=Path, help="write JSON lines here (- for stdout)")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    parser.add_argument("--connections", help="between two ranks; default: as the link has it")
    parser.add_argument("--only", help="cases, with semicolons between")
    parser.add_argument("--no-iperf", action="store_true")
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cases:
        rank_program(options.cases.split(";"), options.repeats)
        return
    if reason := why_not():
        print(f"NOT RUN, between hosts: {reason}")
        return
    records: list[dict[str, object]] = []
    unwind_on_sigterm()
    net = network.Network(2)
    try:
        for link in (LINKS[name] for name in options.links.split(",")):
            if options.only:
                link = replace(link, cases=tuple(options.only.split(";")))
            repeats = max(link.repeats // 3, 2) if options.quick else link.repeats
            wanted = options.connections or ",".join(map(str, link.connections))
            for ranks, connections in itertools.product(
                map(int, options.ranks.split(",")), map(int, wanted.split(","))
            ):
                address, free = shape(net, link)
                try:
                    peer = None
                    if not options.no_iperf:
                        seconds = 2 if options.quick else 4
                        peer = iperf3(net, address, connections * ranks, seconds)
                    cases = launch(net, link, ranks, connections, repeats)
                finally:
                    free()
                for record in cases.values():
                    times = record["seconds"]
                    assert isinstance(times, list)
                    records.append(
                        {
                            "suite": "hosts",
                            "link": link.name,
                            "ranks_per_host": ranks,
                            "connections_per_peer": connections,
                            **record,
                            "line_bits_per_s": link.bits_per_s,
                            "iperf3_bits_per_s": peer,
                            "bits_per_s": int(str(record["bytes"])) * 8 / statistics.median(times),
                        }
                    )
    finally:
        net.down()
    if options.json == Path("-"):
        for record in records:
            print(json.dumps(record))
    elif options.json:
        options.json.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(table(records))


def table(records: list[dict[str, object]]) -> str:
    """The records for people."""
    lines = [
        "| link | ranks per host | connections | allreduce | ms: median (minimum to maximum) "
        "| Gbit/s | of iperf3 | latency allows | of line |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in records:
        seconds = record["seconds"]
        assert isinstance(seconds, list)
        link, case = LINKS[str(record["link"])], CASES[str(record["case"])]
        rate, nbytes = float(str(record["bits_per_s"])), int(str(record["bytes"]))
        of_iperf3 = allows = of_line = ""
        if peer := record["iperf3_bits_per_s"] if nbytes >= MIB else None:
            of_iperf3 = share(rate / float(str(peer)), link.goal, "iperf3", case)
            if case.pacing.crossings and link.delay_s:
                allows = f"{link.allowed(case, nbytes, float(str(peer))):.0%}".replace("%", " %")
        if link.bits_per_s and nbytes >= MIB:
            of_line = share(rate * WIRE_OVER_PAYLOAD / link.bits_per_s, link.goal, "line", case)
        cells = [
            link.name,
            str(record["ranks_per_host"]),
            str(record["connections_per_peer"]),
            case.name,
            f"{statistics.median(seconds) * 1e3:.3f} ({min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f})",
            f"{rate / 1e9:.2f}" if nbytes >= MIB else "",
            of_iperf3,
            allows,
            of_line,
        ]
        lines.append(tables.row(*cells))
    return "\n".join(lines)


def share(ratio: float, goal: Goal, of: str, case: Case) -> str:
    """A ratio in percent, and whether it is what shall be reached."""
    text = f"{100 * ratio:.{1 if of == 'line' else 0}f} %"
    if goal.of != of or case.name not in goal.cases:
        return text
    mark = tables.REACHED if 100 * ratio >= goal.percent else tables.MISSED
    return f"{text} (≥ {goal.percent:g} {mark})"


if __name__ == "__main__":
    main()
