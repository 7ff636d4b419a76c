"""Another user of NCCL whose operations are not kept apart from Horovod's: what is told, and how it ends."""

from __future__ import annotations

import ast

import gpu_double
import harness
from gpu_double import environment, program

BODY = """
from other_nccl import OtherUser, current_device, unique_id
from horovod import _core

hvd.init()
identity = hvd.broadcast_object(unique_id() if rank == 0 else None)

def kinds():
    return sorted({line.partition(":")[0] for line in violations()})

with OnGpu(), current_device(rank):
    other = OtherUser(rank, 2, identity)
    current, side = torch.cuda.current_stream(rank), Stream(rank)
    ours, its = on_gpu(torch.ones(4), rank), on_gpu(torch.ones(4), rank)

    # On another stream, at the same time.
    with current.paused():
        hvd.synchronize(hvd.allreduce_async_(ours, op=hvd.Sum, name="at the same time"))
        other.all_reduce_(its, side)
    say(kinds())
    side.synchronize()
    _core.wait_for_devices()
    hvd.barrier()

    # On the same stream, on the two ranks in two orders.
    def mine():
        hvd.synchronize(hvd.allreduce_async_(ours, op=hvd.Sum, name="in two orders"))
    def others():
        other.all_reduce_(its, current)
    for step in (others, mine) if rank == 0 else (mine, others):
        step()
    tell(_core.wait_for_devices)
    current.synchronize()
    say("the GPU came to rest")
"""


def test_two_users_of_nccl_that_nobody_orders(script, jobs) -> None:
    env = environment("devices=2,seed=3", HOROVOD_GPU_TIMEOUT="1")
    job = jobs(harness.python(2, script(program(BODY)), env=env))
    job.wait()
    for rank in range(2):
        together, apart, rest = gpu_double.printed(job, rank)
        # The ends of both depend on how much of the GPU each kernel wants: a real one may hang here already.
        assert ast.literal_eval(together) == ["launch order", "threads"]
        for text in (
            "HorovodInternalError: ",
            "allreduce.in two orders has been on GPUs for",
            "HOROVOD_GPU_TIMEOUT",
            "rank 0 on ",
            "still computes what the script has put on it before",
        ):
            assert text in apart, job.report()
        assert rest == "the GPU came to rest"
