"""A bit that changes between two hosts, in real jobs: it is noticed, all ranks say where, and nobody is given up.

Both ranks are on this machine; that they call their hosts by different names makes them speak as ranks of two hosts do.
"""

from __future__ import annotations

import re

import pytest

import harness

SCRIPT = """
import os, sys
rank = int(os.environ["HOROVOD_RANK"])
placement = {"LOCAL_RANK": 0, "LOCAL_SIZE": 1, "CROSS_RANK": rank, "CROSS_SIZE": 2}
os.environ.update({f"HOROVOD_{name}": str(value) for name, value in placement.items()})
os.environ["HOROVOD_HOSTNAME"] = f"host-{'ab'[rank]}"
sys.path.append(sys.argv[1])
import bit_flipper
import numpy as np
import horovod.numpy as hvd

hvd.init()
byte, outgoing = int(sys.argv[2]), sys.argv[3] == "out"
for step in range(3):
    hvd.allreduce(np.ones(1000, np.float32), name="before")
hvd.barrier()
if rank == 1:
    print("relays", bit_flipper.flip(byte, outgoing=outgoing), flush=True)
right = np.full(500_000, 3.0, np.float32)
try:
    for step in range(5):
        total = hvd.allreduce(np.full(500_000, rank + 1.0, np.float32), op=hvd.Sum, name="gradient")
        print("step", step, "right" if np.array_equal(total, right) else "wrong", flush=True)
except hvd.HorovodInternalError as error:
    print(f"rank {rank} caught: {error}", flush=True)
    if rank == 1:
        # The relay ends with it.
        bit_flipper.wait_until_left()
"""
# Messages come first, but all of them together are never so long as the tensor.
IN_A_MESSAGE, IN_A_TENSOR = 70, 1_000_003


def _job(jobs, script, direction: str, byte: int = IN_A_TENSOR, **env: str) -> harness.Job:
    words = (str(harness.ROOT / "tests"), str(byte), direction)
    return jobs(harness.python(2, script(SCRIPT), *words, env=env))


# The way of what rank 1 says, and of what it hears.
@pytest.mark.parametrize("direction", ["out", "in"])
@pytest.mark.parametrize(
    ("byte", "encrypt"),
    [(IN_A_MESSAGE, "0"), (IN_A_TENSOR, "0"), (IN_A_TENSOR, "1")],
    ids=["message", "tensor", "tensor encrypted"],
)
def test_every_rank_names_the_link_and_none_is_called_dead(
    direction, byte, encrypt, script, jobs
) -> None:
    job = _job(jobs, script, direction, byte, HOROVOD_ENCRYPT=encrypt)
    caught = job.wait_for(" caught: ", count=2)
    job.succeed()
    source, sink = ("rank 1 on host-b", "rank 0 on host-a")[:: 1 if direction == "out" else -1]
    for line in caught:
        assert f"what {source} sent to {sink} was changed on the way" in line, job.report()
        assert ("record does not open" if encrypt == "1" else "checksum") in line, job.report()
        assert "no rank is lost" in line, job.report()
    assert {re.search(r"rank (\d) caught", line)[1] for line in caught} == {"0", "1"}
    assert "step 4" not in job.stdout
    assert "wrong" not in job.stdout
    for words in ("lost a member", "died", "killed", "did not answer", "connection reset"):
        assert words not in (job.stdout + job.stderr).lower(), job.report()


def test_the_relay_alone_does_no_harm(script, jobs) -> None:
    job = _job(jobs, script, "out", byte=1 << 40).succeed()
    assert job.stdout.count(" right") == 2 * 5
    assert re.search(r"relays [2-9]", job.stdout), job.report()


def test_without_checksums_a_wrong_result_is_taken_for_a_right_one(script, jobs) -> None:
    job = _job(jobs, script, "out", HOROVOD_DATA_CHECKSUM="0").succeed()
    assert job.stdout.count(" wrong") > 0, job.report()
