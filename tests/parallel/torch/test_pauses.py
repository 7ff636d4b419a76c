"""Operations that the waiting thread leaves in the middle, to run a signal handler, and takes up again."""

import os
import signal
from pathlib import Path

import pytest
import torch

import horovod.torch as hvd

# Handlers run before the wait, too; of so many some run in it.
LEAVES = 3


def are_stopped(pids):
    stats = (Path(f"/proc/{pid}/stat").read_text() for pid in pids)
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def kill(pids, number):
    for pid in pids:
        os.kill(pid, number)


def wait_while_others_stand_still(start, others):
    """Waits, leaves to run handlers, and has the others stop as soon as their data are called for."""
    handlers_run = 0
    has_begun = has_ended = False

    def leave(*_):
        nonlocal handlers_run, has_begun, has_ended
        handlers_run += 1
        if handlers_run < LEAVES:
            return
        if not has_begun:
            # Now this thread makes progress, not the engine's.
            kill(others, signal.SIGUSR1)
            has_begun, handlers_run = True, 0
        elif not has_ended and are_stopped(others):
            kill(others, signal.SIGCONT)
            has_ended = True

    before = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        return hvd.synchronize(start())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        while not has_ended and not are_stopped(others):
            os.sched_yield()
        kill(others, signal.SIGCONT)


@pytest.mark.parametrize("elems", [64, 100_003])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("op", [hvd.Max, hvd.Product, hvd.Sum])
def test_an_allreduce_that_is_left_and_taken_up_again_scales_once(op, in_place, elems):
    if hvd.size() == 1:
        pytest.skip("nobody to wait for")
    # Blocked before rank 0 can send it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    pids = hvd.allgather(torch.tensor([os.getpid()])).tolist()
    everyone = [torch.arange(elems, dtype=torch.float32) % 7 + rank for rank in range(hvd.size())]
    scaled = 2 * torch.stack(everyone)
    want = {
        hvd.Max: lambda: scaled.max(0).values,
        hvd.Product: lambda: scaled.prod(0),
        hvd.Sum: lambda: scaled.sum(0),
    }[op]()
    mine = everyone[hvd.rank()].clone()

    def start():
        submit = hvd.allreduce_async_ if in_place else hvd.allreduce_async
        return submit(mine, op=op, name=f"left.{op}.{in_place}.{elems}", prescale_factor=2.0)

    if hvd.rank() == 0:
        got = wait_while_others_stand_still(start, pids[1:])
    else:
        signal.sigwait({signal.SIGUSR1})
        handle = start()
        # Rank 0 learns that this one is ready, and does not get its data.
        hvd.poll(handle)
        os.kill(os.getpid(), signal.SIGSTOP)
        got = hvd.synchronize(handle)
    assert torch.equal(got, want)
    if in_place:
        assert got is mine
