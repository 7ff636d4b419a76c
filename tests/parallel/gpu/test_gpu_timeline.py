"""The timeline of operations on GPU tensors: what the GPU did, on tracks of the GPUs."""

import json
import os
from pathlib import Path

import pytest
import torch
from devices import IS_REAL, count, number_of_gpus, on_gpu

import horovod.torch as hvd
from horovod import _core

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
DEVICE = hvd.local_rank() % number_of_gpus()
IS_STAGED = os.environ["HOROVOD_GPU_OPERATIONS"] == "HOST"
RANK_PIDS = 1_000_000_000


@pytest.fixture
def dynamic(monkeypatch):
    """A job that may record, in place of the usual one."""
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_TIMELINE", "DYNAMIC")
    hvd.init()
    yield
    hvd.shutdown()
    monkeypatch.undo()
    hvd.init()


def operations(when):
    """One of each kind, with names that say when."""

    def ones(rows=SIZE):
        return on_gpu(torch.ones(rows, 2), DEVICE)

    hvd.allreduce(ones(), name=f"{when}.allreduce")
    hvd.allgather(ones(RANK + 1), name=f"{when}.allgather")
    hvd.broadcast(ones(), root_rank=0, name=f"{when}.broadcast")
    hvd.alltoall(ones(), name=f"{when}.alltoall")
    hvd.reducescatter(ones(), op=hvd.Sum, name=f"{when}.reducescatter")
    hvd.barrier()


def expected_stage(kind):
    if SIZE == 1:
        return "LOCAL_ALLREDUCE" if kind == "allreduce" else "LOCAL_COPY"
    return {"broadcast": "NCCL_BCAST"}.get(kind, f"NCCL_{kind.upper()}")


def test_operations_are_on_tracks_of_the_gpus(dynamic, tmp_path):
    path = Path(hvd.broadcast_object(str(tmp_path), name="folder of the timeline")) / "gpu.json"
    operations("before")
    before = 0 if IS_REAL else count("cuEventElapsedTime")
    hvd.start_timeline(str(path))
    hvd.barrier()  # rank 0 has begun
    operations("recorded")
    # All are launched; now they have ended, too.
    _core.wait_for_devices()
    hvd.barrier()
    hvd.stop_timeline()
    hvd.barrier()
    if not IS_REAL:
        assert count("cuEventElapsedTime") > before
    if RANK != 0:
        return
    events = json.loads(path.read_text())
    tracks = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"
    }
    for rank in range(SIZE):
        pid = RANK_PIDS + rank
        done = [e for e in events if e.get("pid") == pid and e["ph"] == "X"]
        for kind in ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"):
            (operation,) = [
                e
                for e in done
                if e["cat"] == "operation" and e["args"]["names"].endswith(f"recorded.{kind}")
            ]
            assert tracks[pid, operation["tid"]].startswith("GPU "), operation
            begin, end = operation["ts"], operation["ts"] + operation["dur"]
            stages = [
                e["name"]
                for e in done
                if e["cat"] == "stage"
                and e["tid"] == operation["tid"]
                and begin <= e["ts"]
                and e["ts"] + e["dur"] <= end + 0.001
            ]
            if IS_STAGED:
                # Of a broadcast only the root's tensor goes there, and only to the others it comes from there.
                is_root, is_broadcast = rank == 0, kind == "broadcast"
                is_read, is_written = not is_broadcast or is_root, not (is_broadcast and is_root)
                assert ("MEMCPY_IN_HOST_BUFFER" in stages) == is_read, (kind, stages)
                assert ("MEMCPY_OUT_HOST_BUFFER" in stages) == is_written, (kind, stages)
            else:
                assert stages == [expected_stage(kind)]


@pytest.mark.skipif(IS_REAL, reason="only the double counts calls")
def test_nothing_is_timed_without_a_timeline():
    before = count("cuEventElapsedTime")
    operations("untimed")
    assert count("cuEventElapsedTime") == before
