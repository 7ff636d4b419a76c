"""Ranks that this test starts itself, with places, environments and rendezvous from `horovod.runner.executor`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import harness
from horovod.runner import executor

# Of no job, as an executor's processes are.
BASE = {
    **{n: v for n, v in os.environ.items() if not n.startswith(harness.NOT_HANDED_DOWN)},
    "OMP_NUM_THREADS": "1",
}
RANK = """
import json
import numpy as np
import horovod.numpy as hvd

hvd.init()
total = hvd.allreduce(np.arange(4.0, dtype=np.float32) + hvd.rank(), op=hvd.Sum)
numbers = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
print(json.dumps([numbers, total.tolist()]), flush=True)
"""
SUM_OF_3 = [3.0, 6.0, 9.0, 12.0]


@contextlib.contextmanager
def started(ranks: list[executor.Rank], script: str) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=rank.environment(BASE),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def results(processes: list[subprocess.Popen[str]]) -> list[object]:
    ended = [process.communicate(timeout=harness.LIMIT_S) for process in processes]
    errors = "\n".join(err for _, err in ended)
    assert [process.returncode for process in processes] == [0] * len(processes), errors
    return [json.loads(out) for out, _ in ended]


def numbers(rank: executor.Rank) -> list[int]:
    return [
        *(rank.rank, rank.size, rank.local_rank, rank.local_size),
        *(rank.cross_rank, rank.cross_size),
    ]


def test_the_caller_serves_the_rendezvous() -> None:
    # As if they were on two hosts, given in any order.
    processes = [("one", "127.0.0.1"), ("two", "127.0.0.1"), ("one", "127.0.0.1")]
    with executor.Rendezvous(3, local=True) as rendezvous:
        ranks = executor.assign(processes, rendezvous.address)
        assert [rank.rank for rank in ranks] == [0, 2, 1]
        assert not rendezvous.has_met()
        with started(ranks, RANK) as running:
            assert results(running) == [[numbers(rank), SUM_OF_3] for rank in ranks]
        assert rendezvous.has_met()


def test_rank_0_serves_the_rendezvous_at_a_known_port(port: int) -> None:
    ranks = executor.assign([("here", "127.0.0.1")] * 3, executor.RankZero(port))
    with started(ranks, RANK) as running:
        assert results(running) == [[numbers(rank), SUM_OF_3] for rank in ranks]


def test_the_process_of_rank_0_serves_the_rendezvous_and_tells_where() -> None:
    first = """
import json, os, sys
from horovod.runner import executor

rendezvous = executor.Rendezvous(3, local=True)
ranks = executor.assign([("here", "127.0.0.1")] * 3, rendezvous.address)
print(json.dumps([dict(rank.variables) for rank in ranks]), flush=True)
os.environ.update(ranks[0].variables)
"""
    # Ranks that are connected need the rendezvous no more.
    rest = RANK.replace("hvd.init()\n", "hvd.init()\nhvd.barrier()\nrendezvous.close()\n")
    own = subprocess.Popen(
        [sys.executable, "-c", first + rest],
        env=BASE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert own.stdout is not None
        variables = json.loads(own.stdout.readline())
        ranks = [executor.Rank(n, 3, n, 3, 0, 1, "here", variables[n]) for n in range(3)]
        others = RANK.replace("hvd.init()\n", "hvd.init()\nhvd.barrier()\n")
        with started(ranks[1:], others) as running:
            assert results([own, *running]) == [[numbers(rank), SUM_OF_3] for rank in ranks]
    finally:
        own.kill()
        own.communicate()


def test_ranks_are_told_why_one_has_died() -> None:
    script = """
import os, signal, sys
import horovod.numpy as hvd

hvd.init()
hvd.barrier()
print("met", flush=True)
if hvd.rank() == 1:
    signal.pause()
try:
    hvd.barrier()
except hvd.HorovodInternalError as error:
    sys.exit(f"so: {error}")
"""
    with executor.Rendezvous(2, local=True) as rendezvous:
        ranks = executor.assign([("h", "127.0.0.1")] * 2, rendezvous.address)
        with started(ranks, script) as (survivor, victim):
            for process in (survivor, victim):
                assert process.stdout is not None
                assert process.stdout.readline() == "met\n"
            # Before the process ends: what the survivors learn does not depend on who is faster.
            rendezvous.report_death(1, "h", "evicted by the scheduler")
            _, error = survivor.communicate(timeout=harness.LIMIT_S)
            assert survivor.returncode == 1
            assert "so: " in error
            assert "rank 1" in error
            assert "evicted by the scheduler" in error


@pytest.mark.parametrize("slots", [[3], [2, 1], [1, 2]])
def test_environments_are_those_that_horovodrun_gives(slots) -> None:
    names = ["localhost", "127.0.0.1"][: len(slots)]
    script = (
        "import os, json; print(json.dumps({n: v for n, v in os.environ.items()"
        " if n.startswith('HOROVOD') or n == 'PYTHONUNBUFFERED'}))"
    )
    hosts = ",".join(f"{name}:{count}" for name, count in zip(names, slots, strict=True))
    command = [harness.HOROVODRUN, "-np", "3", "-H", hosts, sys.executable, "-c", script]
    run = subprocess.run(
        command, env=BASE, capture_output=True, text=True, check=True, timeout=harness.LIMIT_S
    )
    given = [json.loads(line.split(">:", 1)[1]) for line in run.stdout.splitlines()]
    processes = [
        (name, name) for name, count in zip(names, slots, strict=True) for _ in range(count)
    ]
    with executor.Rendezvous(3, local=True) as rendezvous:
        ranks = executor.assign(processes, rendezvous.address)
    of_this_job = {"HOROVOD_RENDEZVOUS", "HOROVOD_JOB_KEY", "HOROVOD_GLOO_RENDEZVOUS_PORT"}
    for expected in given:
        mine = dict(ranks[int(expected["HOROVOD_RANK"])].variables)
        # Only the agents of horovodrun have such a socket.
        assert expected.pop("HOROVOD_AGENT_SOCKET")
        assert mine.keys() == expected.keys()
        for name in of_this_job:
            assert mine.pop(name) != expected.pop(name)
        assert mine == expected
