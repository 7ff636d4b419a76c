"""Which rank and which cause a job names for delays that are injected (docs/watching.md, "A slow rank").

Usage: python bench/slow_causes.py [--runs N] [--kinds K ...] [--seconds S] [--json FILE]

  balanced       no delay: nothing may be named
  busy_loop      another process computes on the processor of rank 1
  marked_loader  rank 1 waits for its batches, within hvd.phase("data")
  loader         rank 1 waits for its batches in a PyTorch DataLoader, without a mark
  network        three hosts; messages of the last one are delayed in both directions
  memory         two hosts; the second one's /proc/meminfo says that its memory is used up, and its rank faults pages in
  computing      rank 1 computes more

Each run is a job of its own under horovodrun. It ends when a rank is named, or after S seconds. One line for each run
is added to the file. A later call makes only the runs that are missing there, so it can be interrupted. `network` and
`memory` need root and network namespaces. Processor time that the hypervisor takes (`steal`) cannot be injected here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "hosts"), str(ROOT / "bench")]

import network  # noqa: E402
import tables  # noqa: E402
import wire  # noqa: E402
from processes import output_of, started, unwind_on_sigterm  # noqa: E402

# Beyond the seconds of a run: the start and the end of a job on a loaded machine.
START_AND_END_S = 90
# Work of a rank in each step, and what delays one of them: more than other processes of the machine delay the others.
COMPUTING_S = 0.015
DELAY_S = 0.045
NETWORK_DELAY_S = 0.02
MARK = "SLOW-CAUSES "


@dataclass(frozen=True)
class Kind:
    """A cause that is injected, and the ranks and the cause that shall be named."""

    hosts: int = 1
    ranks: tuple[int, ...] = (1,)
    cause: str | None = None

    def judge(self, named: dict | None) -> str:
        """`right`, `wrong` or `not named`."""
        if self.cause is None:
            return "right" if named is None else "wrong"
        if named is None:
            return "not named"
        is_right = (tuple(named["ranks"]), named["cause"]) == (self.ranks, self.cause)
        return "right" if is_right else "wrong"


KINDS = {
    "balanced": Kind(),
    "busy_loop": Kind(cause="other_processes"),
    "marked_loader": Kind(cause="input"),
    "loader": Kind(cause="input"),
    "network": Kind(hosts=3, ranks=(2,), cause="network"),
    "memory": Kind(hosts=2, cause="memory"),
    "computing": Kind(cause="computing"),
}


# -- the program of each rank


def rank_program(name: str, seconds: float) -> None:
    """Train until a rank is named; rank 0 prints what was named."""
    import torch

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    is_late = hvd.rank() in KINDS[name].ranks
    if name == "busy_loop":
        os.sched_setaffinity(0, {hvd.rank() % (os.cpu_count() or 1)})
    batches = iter(loader(DELAY_S if name == "loader" and is_late else 0.0))
    # As much work as takes so long on an idle processor, the same on all ranks.
    matrix, products = torch.randn(128, 128), products_in(COMPUTING_S)
    products = hvd.broadcast_object(products, name="products")
    gradient, is_over = torch.ones(100_000), torch.zeros(1)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, 64 << 20, private) if name == "memory" and is_late else None
    end = time.monotonic() + seconds
    named = None
    while not is_over[0]:
        next(batches)
        if name == "marked_loader" and is_late:
            with hvd.phase("data"):
                time.sleep(DELAY_S)
        for _ in range(4 * products if name == "computing" and is_late else products):
            matrix @ matrix
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)
            for at in range(0, len(pages), mmap.PAGESIZE):
                pages[at] = 1
        hvd.allreduce_(gradient, name="gradient")
        if hvd.rank() == 0:
            named = hvd.stats()["slow"]
            is_over[0] = named is not None or time.monotonic() > end
        hvd.allreduce_(is_over, name="is_over", op=hvd.Max)
        hvd.step()
    if hvd.rank() == 0:
        print(MARK + json.dumps(named), flush=True)
        if named is None:
            keys = ("computing", "communicating", "waiting", "awaited", "input", "cpu")
            for row in hvd.stats()["ranks"]:
                shares = {key: row[f"{key}_seconds"] / row["elapsed_seconds"] for key in keys}
                text = ", ".join(f"{key} {share:.0%}" for key, share in shares.items())
                print(f"rank {row['rank']}: {text}, last {row['came_last']} times", flush=True)


def products_in(seconds: float) -> int:
    """How many products of matrices take so long on an idle processor: the quickest of several tries."""
    import torch

    matrix, least = torch.randn(128, 128), float("inf")
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(10):
            matrix @ matrix
        least = min(least, (time.perf_counter() - begin) / 10)
    return max(1, round(seconds / least))


def loader(delay_s: float) -> Iterator[object]:
    """A data loader that reads for so long; without a worker, so that computing hides nothing of it."""
    import torch

    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1 << 30

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(delay_s)
            return torch.zeros(16)

    order = torch.utils.data.SequentialSampler(range(1 << 30))
    return torch.utils.data.DataLoader(Samples(), sampler=order)


# -- the runs


@contextlib.contextmanager
def injected(name: str) -> Iterator[tuple[Callable[[list[str]], list[str]], list[str], dict]]:
    """While the cause is there: what enters the host of `horovodrun`, options of it, and settings."""
    kind = KINDS[name]
    with contextlib.ExitStack() as stack:
        if kind.hosts == 1:
            if name == "busy_loop":
                words = ["taskset", "-c", "1", sys.executable, "-c", "while True: pass"]
                stack.enter_context(started(words))
            yield list, ["-np", "2"], {}
            return
        net = network.Network(kind.hosts)
        stack.callback(net.down)
        settings = {}
        if name == "network":
            link = wire.Wire(net.hosts)
            stack.callback(link.close)
            link.last_host(delay_s=NETWORK_DELAY_S)
            settings["HOROVOD_GLOO_IFACE"] = wire.NAME
        else:
            use_up_memory(net.hosts[-1])
        hosts = ",".join(f"{host.name}:1" for host in net.hosts)
        options = ["-np", str(kind.hosts), "-H", hosts, "-p", str(network.SSH_PORT)]
        yield net.hosts[0].enter, [*options, "-i", str(net.folder / "user")], settings


def use_up_memory(host: network.Host) -> None:
    """Replace the figures of memory that processes of this host see."""
    figures = host.network.folder / "meminfo"
    lines = Path("/proc/meminfo").read_text().splitlines()
    used_up = ("MemAvailable:", "MemFree:", "Cached:")
    lines = [f"{line.split()[0]} 100000 kB" if line.startswith(used_up) else line for line in lines]
    figures.write_text("\n".join(lines) + "\n")
    assert host.sshd is not None
    within = ["nsenter", "-t", str(host.sshd.pid), "-m"]
    subprocess.run([*within, "mount", "--bind", figures, "/proc/meminfo"], check=True)


def run(name: str, seconds: float) -> dict:
    """One job with this cause."""
    with injected(name) as (enter, options, settings):
        words = [str(Path(sys.executable).with_name("horovodrun")), *options, sys.executable]
        words += [str(Path(__file__).resolve()), "--rank-program", name, "--seconds", str(seconds)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_METRICS": "1", **settings}
        begin = time.monotonic()
        done = output_of(enter(words), seconds + START_AND_END_S, env=env)
    lines = [line for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    named = json.loads(lines[0].split(MARK, 1)[1])
    if named is None:
        print(done.stdout.split(MARK, 1)[1].split("\n", 1)[1], end="", flush=True)
    record = {"kind": name, "verdict": KINDS[name].judge(named), "named": named}
    return record | {"seconds": round(time.monotonic() - begin, 1), "load": os.getloadavg()[0]}


def table(records: list[dict]) -> list[str]:
    """A row for each kind."""
    rows = []
    for name, kind in KINDS.items():
        its = [record for record in records if record["kind"] == name]
        if not its:
            continue
        verdicts = Counter(record["verdict"] for record in its)
        others = Counter(
            f"{record['named']['cause']} of {record['named']['ranks']}"
            for record in its
            if record["verdict"] == "wrong"
        )
        wrong = ", ".join(f"{count} {text}" for text, count in others.items())
        right = verdicts["right"]
        counts = (len(its), right, wrong or 0, verdicts["not named"])
        rows.append((name, kind.cause or "nobody", *map(str, counts)))
    titles = ("injected", "shall be named", "runs", "rightly", "wrongly", "not named")
    return [tables.row(*cells) for cells in (titles, ["---"] * len(titles), *rows)]


def main() -> None:
    """Make the runs that are missing; print the table of all runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="of each kind, with those in the file")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=35, help="length of a run without a name")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-output" / "slow-causes.jsonl")
    parser.add_argument("--rank-program", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_program:
        rank_program(options.rank_program, options.seconds)
        return
    unwind_on_sigterm()
    options.json.parent.mkdir(exist_ok=True)
    options.json.touch()
    records = [json.loads(line) for line in options.json.read_text().splitlines()]
    reason = network.why_not()
    # Each kind in turn, so that an interrupted call has some of all.
    for number in range(1, options.runs + 1):
        for name in options.kinds:
            if KINDS[name].hosts > 1 and reason:
                print(f"NOT RUN, {name}: {reason}")
                continue
            if sum(record["kind"] == name for record in records) >= number:
                continue
            record = run(name, options.seconds)
            records.append(record)
            with options.json.open("a") as file:
                file.write(json.dumps(record) + "\n")
            text = record["named"]["text"] if record["named"] else "nobody is named"
            print(f"{name} {number}: {record['verdict']}: {text}", flush=True)
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
