"""Resources of a job: memory stays flat, an idle runtime takes no time, nothing of the process is changed."""

from __future__ import annotations

import re

import harness

# 10,000 operations of every kind; names and shapes change all the time, in the same way on all ranks.
MIXED = """
import gc, random
import torch
import horovod.torch as hvd

def resident_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

hvd.init()
rank, size = hvd.rank(), hvd.size()
dice = random.Random(42)
dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]

def one(step):
    rows, columns = dice.randint(0, 40) * size, dice.randint(1, 60)
    tensor = torch.ones(rows, columns).to(dice.choice(dtypes))
    name = f"step.{step}" if dice.random() < 0.7 else f"repeated.{rows}x{columns}.{tensor.dtype}"
    kind = dice.randrange(8)
    if kind == 0:
        assert (hvd.allreduce(tensor, name=name, op=hvd.Sum) == size).all()
    elif kind == 1:
        hvd.allreduce_(tensor, name=name, op=hvd.Max)
    elif kind == 2:
        results = hvd.grouped_allreduce([tensor, tensor * 2], name=name, op=hvd.Sum)
        assert (results[1] == 2 * size).all()
    elif kind == 3:
        assert hvd.allgather(tensor, name=name).shape == (rows * size, columns)
    elif kind == 4:
        assert hvd.broadcast(tensor + rank, root_rank=step % size, name=name).shape == tensor.shape
    elif kind == 5:
        assert hvd.alltoall(tensor, name=name).shape == tensor.shape
    elif kind == 6:
        assert hvd.reducescatter(tensor, name=name, op=hvd.Sum).shape[0] == rows // size
    else:
        hvd.synchronize(hvd.allreduce_async(tensor, name=name, op=hvd.Min))
    if step % 500 == 0:
        hvd.barrier()
        assert hvd.broadcast_object({"step": step}, root_rank=0, name=f"object.{step}")["step"] == step

for step in range(10_001):
    one(step)
    if step % 1000 == 0:
        gc.collect()
        print(f"rank {rank} step {step} resident {resident_kib()} KiB", flush=True)
"""
# Pools and caches fill up first; after that, what is gained must be noise.
WARM_AFTER_STEP = 3000
GROWTH_MAX_KIB = 4096


def test_ten_thousand_mixed_operations_keep_the_memory_flat(script, jobs) -> None:
    job = jobs(harness.python(2, script(MIXED))).succeed()

    for rank in range(2):
        found = re.findall(rf"rank {rank} step (\d+) resident (\d+) KiB", job.stdout)
        sizes = {int(step): int(kib) for step, kib in found}
        print(f"rank {rank}: resident KiB by step: {sizes}")
        growth = (
            max(kib for step, kib in sizes.items() if step > WARM_AFTER_STEP)
            - sizes[WARM_AFTER_STEP]
        )
        assert growth < GROWTH_MAX_KIB, f"grew by {growth} KiB\n{job.report()}"


IDLE = """
import os, resource, select
import torch
import horovod.torch as hvd

def used_s():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

def state():
    affinity = {int(task): sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
    return affinity, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

before = state()
hvd.init()
hvd.allreduce(torch.ones(1000), name="warm up")
after = state()
assert {task: after[0][task] for task in before[0]} == before[0], "another thread's affinity was changed"
assert after[1:] == before[1:], "thread counts were changed"

hvd.barrier()
begin = used_s()
select.select([], [], [], 5.0)
print(f"idle for 5 s used {1000 * (used_s() - begin):.2f} ms", flush=True)
hvd.barrier()
"""


def test_idle_runtime_takes_under_one_percent_of_a_core_and_changes_no_thread(script, jobs) -> None:
    job = jobs(harness.python(2, script(IDLE))).succeed()

    used_ms = [float(ms) for ms in re.findall(r"idle for 5 s used ([\d.]+) ms", job.stdout)]
    print(f"processor time of 5 idle seconds: {used_ms} ms")
    assert len(used_ms) == 2
    assert max(used_ms) < 0.01 * 5000


# Four ranks on two cores, which move between them while they wait; the last one may not.
OVERSUBSCRIBED = """
import os
import numpy as np

cores = set(sorted(os.sched_getaffinity(0))[:2])
os.sched_setaffinity(0, cores if os.environ["HOROVOD_RANK"] != "3" else {max(cores)})

import horovod.numpy as hvd

hvd.init()
before = os.sched_getaffinity(0)
for _ in range(3000):
    hvd.allreduce_(np.ones(16, np.float32), name="small")
assert os.sched_getaffinity(0) == before, (before, os.sched_getaffinity(0))
print("as before", flush=True)
"""


def test_ranks_that_outnumber_cores_keep_the_cores_they_may_use(script, jobs) -> None:
    job = jobs(harness.python(4, script(OVERSUBSCRIBED))).succeed()

    assert job.stdout.count("as before") == 4
