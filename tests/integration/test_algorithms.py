"""The settings that choose algorithms: names, mistakes, ranks that disagree, and the same bits from all of them."""

from __future__ import annotations

import re
import sys

import pytest

import harness

# Prints a digest of every tensor's bits, reduced all at once and one by one.
DIGEST = """
import hashlib, os
import numpy as np
import horovod.numpy as hvd

if "OTHERS" in os.environ and os.environ["HOROVOD_RANK"] != "0":
    for pair in os.environ["OTHERS"].split():
        name, value = pair.split("=")
        os.environ[name] = value
hvd.init()
dice = np.random.default_rng(hvd.rank())
lengths = (1, 7, 3000, 40_000, 33, 200_001, 500)
tensors = [dice.standard_normal(n).astype(dtype) for dtype in (np.float32, np.float16) for n in lengths]

def digest(results):
    everything = b"".join(r.tobytes() for r in results)
    return hashlib.sha256(everything).hexdigest()[:16]

handles = [hvd.allreduce_async(t, name=f"together.{i}", op=hvd.Average) for i, t in enumerate(tensors)]
together = digest([hvd.synchronize(h) for h in handles])
alone = digest([hvd.allreduce(t, name=f"alone.{i}", op=hvd.Average) for i, t in enumerate(tensors)])
gathered = hvd.allgather(np.full(30_000 * (hvd.rank() + 1), float(hvd.rank())), name="gathered")
assert gathered.shape == (30_000 * 6,) and gathered[-1] == 2
print("digests", hvd.rank(), together, alone, flush=True)
"""


def run(jobs, script, **env: str) -> set[str]:
    """The different digests that three ranks print."""
    words = [harness.HOROVODRUN, "-np", "3", sys.executable, script(DIGEST)]
    job = jobs(harness.Job(words, env=env)).succeed()
    found = re.findall(r"digests \d (\w+) (\w+)", job.stdout)
    assert len(found) == 3, job.report()
    return {digest for pair in found for digest in pair}


def test_the_same_bits_by_every_algorithm_fused_or_not(jobs, script) -> None:
    by = {"automatic": run(jobs, script)}
    for name in ("exchange", "pairwise", "staged"):
        by[name] = run(jobs, script, HOROVOD_ALLREDUCE_ALGORITHM=name)
    by["without shared memory"] = run(jobs, script, HOROVOD_SHM="0", HOROVOD_FUSION_THRESHOLD="0")
    assert all(len(digests) == 1 for digests in by.values()), by
    assert len(set.union(*by.values())) == 1, by
    # A ring rounds float16 at each rank, but always alike.
    assert len(run(jobs, script, HOROVOD_ALLREDUCE_ALGORITHM="ring")) == 1


def test_ranks_that_disagree_follow_rank_0(jobs, script) -> None:
    others = "HOROVOD_ALLREDUCE_ALGORITHM=ring HOROVOD_EXCHANGE_MAX_BYTES=0 HOROVOD_CONNECTIONS_PER_PEER=1 "
    others += "HOROVOD_WIRE_CHUNK_BYTES=4096 HOROVOD_HIERARCHICAL_ALLGATHER=0"
    congestion = " HOROVOD_TCP_CONGESTION=reno"  # each rank's own
    mixed = run(
        jobs, script, HOROVOD_SHM="0", HOROVOD_CONNECTIONS_PER_PEER="3", OTHERS=others + congestion
    )
    assert mixed == run(jobs, script, HOROVOD_SHM="0")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {"HOROVOD_ALLREDUCE_ALGORITHM": "tree"},
            ["tree", "auto", "staged", "exchange", "pairwise", "ring"],
        ),
        (
            {"HOROVOD_ALLREDUCE_ALGORITHM": "staged", "HOROVOD_SHM": "0"},
            ["staged", "auto", "exchange", "pairwise", "ring"],
        ),
        ({"HOROVOD_CONNECTIONS_PER_PEER": "17"}, ["HOROVOD_CONNECTIONS_PER_PEER=17", "1 to 16"]),
        (
            {"HOROVOD_TCP_CONGESTION": "nope", "HOROVOD_SHM": "0"},
            ["HOROVOD_TCP_CONGESTION=nope", "reno"],
        ),
    ],
    ids=["unknown", "impossible", "too many connections", "unknown to the system"],
)
def test_a_mistake_ends_init_with_the_choices(env, words, jobs, script) -> None:
    path = script(
        """
import horovod.numpy as hvd
try:
    hvd.init()
except ValueError as error:
    print("refused:", error, flush=True)
"""
    )
    job = jobs(harness.Job([harness.HOROVODRUN, "-np", "2", sys.executable, path], env=env))
    job.succeed()
    lines = [line for line in job.stdout.splitlines() if "refused:" in line]
    assert len(lines) == 2, job.report()
    assert any(all(word in line for word in words) for line in lines), job.report()
