"""Allreduce between two hosts of our own (network namespaces) against iperf3 on the same link.

Usage (as root, with iproute2, OpenSSH's server and iperf3):
  python bench/hosts.py [--links free,1gbit,100mbit,delay] [--ranks 1,2] [--json FILE] [--quick]

Every rank of a host sends its part of the vector to the other host: with two hosts an allreduce of N bytes puts
N bytes of payload on the link in each direction, however many ranks there are. `Gbit/s` is N * 8 / median time,
one direction; `iperf3` is what it carries per direction while it sends in both (`--bidir`), with as many connections.
`of line` counts Ethernet, IP and TCP headers too (1514 bytes per 1448 of payload), because the shaper does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "hosts"), str(ROOT / "bench")]

import network  # noqa: E402  (made importable just above)

# One job or one run of iperf3; far above what either takes.
LIMIT_S = 110
WIRE_OVER_PAYLOAD = 1514 / 1448
MIB = 1 << 20


@dataclass(frozen=True)
class Link:
    """How the link between the hosts is held back; each host shapes what it sends."""

    name: str
    qdisc: tuple[str, ...]
    bits_per_s: float | None
    repeats: int
    cases: tuple[str, ...]


LINKS = {
    link.name: link
    for link in (
        Link("free", (), None, 15, ("4 B", "64 KiB", "1 MiB", "8 MiB", "64 MiB", "resnet50")),
        Link("1gbit", ("tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"), 1e9, 5, ("64 MiB",)),
        Link("100mbit", ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"), 1e8, 2, ("64 MiB",)),
        # The queue holds what is on its way: it must not be the limit.
        Link("delay", ("netem", "delay", "20ms", "limit", "1000000"), None, 10, ("64 MiB",)),
    )
}  # fmt: skip
SIZES = {"4 B": 4, "64 KiB": 64 << 10, "1 MiB": MIB, "8 MiB": 8 * MIB, "64 MiB": 64 * MIB}


def rank_program(cases: Sequence[str], repeats: int) -> None:
    """What each rank runs; rank 0 prints a JSON line per case."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    from cases import resnet50_shapes

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()

    def reduce(tensors: list[torch.Tensor], tag: str) -> None:
        handles = [
            hvd.allreduce_async_(t, name=f"{tag}.{i}", op=hvd.Sum) for i, t in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    for case in cases:
        if case == "resnet50":
            tensors = [torch.ones(shape) for shape in resnet50_shapes()]
        else:
            tensors = [torch.ones(SIZES[case] // 4)]
        total = sum(t.nbytes for t in tensors)
        rounds = repeats * (10 if total <= MIB else 1)
        reduce(tensors, case)
        if not all(bool((t == hvd.size()).all()) for t in tensors):
            raise SystemExit(f"rank {hvd.rank()}: {case}: wrong sums")
        for t in tensors:
            t.zero_()
        for _ in range(2 if repeats < 10 else 4):
            reduce(tensors, case)
        seconds = []
        for _ in range(rounds):
            hvd.barrier()
            start = time.perf_counter()
            reduce(tensors, case)
            seconds.append(time.perf_counter() - start)
        if hvd.rank() == 0:
            print(json.dumps({"case": case, "bytes": total, "seconds": seconds}), flush=True)


def launch(
    net: network.Network, link: Link, ranks: int, repeats: int
) -> dict[str, dict[str, object]]:
    """Every case over this link with so many ranks on each host."""
    words = [str(Path(sys.executable).with_name("horovodrun")), "-np", str(2 * ranks)]
    words += ["-H", ",".join(f"{host.name}:{ranks}" for host in net.hosts)]
    words += ["-p", str(network.SSH_PORT), "-i", str(net.folder / "user")]
    words += [sys.executable, str(Path(__file__).resolve()), "--cases", ",".join(link.cases)]
    words += ["--repeats", str(repeats)]
    done = subprocess.run(
        net.hosts[0].enter(words),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    lines = [
        line[line.index('{"case"') :] for line in done.stdout.splitlines() if '{"case"' in line
    ]
    return {record["case"]: record for record in map(json.loads, lines)}


def iperf3(net: network.Network, connections: int, seconds: float) -> float:
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
        client = ["iperf3", "-c", net.hosts[1].address, "--bidir", "-J", "-t", str(seconds)]
        client += ["-P", str(connections), "-O", "1"]
        done = subprocess.run(
            net.hosts[0].enter(client), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        end = json.loads(done.stdout)["end"]
        one, other = end["sum_received"], end["sum_received_bidir_reverse"]
        return (one["bits_per_second"] + other["bits_per_second"]) / 2
    finally:
        server.kill()
        server.wait()


def shape(net: network.Network, link: Link) -> Callable[[], None]:
    """Hold the link back; returns what lets it go."""
    if not link.qdisc:
        return lambda: None
    for host in net.hosts:
        network.run("tc", "-n", host.namespace, "qdisc", "add", "dev", "eth0", "root", *link.qdisc)

    def free() -> None:
        for host in net.hosts:
            network.run("tc", "-n", host.namespace, "qdisc", "del", "dev", "eth0", "root")

    return free


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
    parser.add_argument("--connections", type=int, default=1, help="of iperf3, per rank and peer")
    parser.add_argument("--only", help="comma list of cases")
    parser.add_argument("--no-iperf", action="store_true")
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cases:
        rank_program(options.cases.split(","), options.repeats)
        return
    if reason := why_not():
        print(f"NOT RUN, between hosts: {reason}")
        return
    records: list[dict[str, object]] = []
    net = network.Network(2)
    try:
        for link in (LINKS[name] for name in options.links.split(",")):
            if options.only:
                link = Link(
                    link.name,
                    link.qdisc,
                    link.bits_per_s,
                    link.repeats,
                    tuple(options.only.split(",")),
                )
            repeats = max(link.repeats // 3, 2) if options.quick else link.repeats
            for ranks in map(int, options.ranks.split(",")):
                free = shape(net, link)
                try:
                    connections = options.connections * ranks
                    peer = None
                    if not options.no_iperf:
                        peer = iperf3(net, connections, 2 if options.quick else 4)
                    cases = launch(net, link, ranks, repeats)
                finally:
                    free()
                for case, record in cases.items():
                    seconds = record["seconds"]
                    assert isinstance(seconds, list)
                    records.append(
                        {
                            "suite": "hosts",
                            "link": link.name,
                            "ranks_per_host": ranks,
                            **record,
                            "line_bits_per_s": link.bits_per_s,
                            "iperf3_bits_per_s": peer,
                            "iperf3_connections": connections,
                            "bits_per_s": int(str(record["bytes"]))
                            * 8
                            / statistics.median(seconds),
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
        "| link | ranks per host | allreduce | ms: median (minimum to maximum) | Gbit/s | of iperf3 | of line |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for record in records:
        seconds = record["seconds"]
        assert isinstance(seconds, list)
        rate = float(str(record["bits_per_s"]))
        big = int(str(record["bytes"])) >= MIB
        peer, line = record["iperf3_bits_per_s"], record["line_bits_per_s"]
        cells = [
            str(record["link"]),
            str(record["ranks_per_host"]),
            str(record["case"]),
            f"{statistics.median(seconds) * 1e3:.3f} ({min(seconds) * 1e3:.3f} to {max(seconds) * 1e3:.3f})",
            f"{rate / 1e9:.2f}" if big else "",
            f"{rate / float(str(peer)) * 100:.0f} %" if peer and big else "",
            f"{rate * WIRE_OVER_PAYLOAD / float(str(line)) * 100:.1f} %" if line and big else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
