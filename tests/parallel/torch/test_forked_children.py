"""Children of a rank are inert: forked, spawned or from a fork server, they share nothing of the running job."""

import multiprocessing
import os

import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd


@pytest.fixture(autouse=True)
def _the_job_goes_on():
    yield
    still_works()


def observe():
    """What a child sees, as text."""
    import horovod.torch as child_hvd

    seen = [f"initialized={child_hvd.is_initialized()}"]
    for call in (child_hvd.rank, child_hvd.size):
        try:
            seen.append(f"{call.__name__}={call()}")
        except ValueError as error:
            seen.append(
                "not initialized" if "has not been initialized" in str(error) else str(error)
            )
    try:
        child_hvd.allreduce(torch.ones(1))
        seen.append("reduced")
    except child_hvd.HorovodInternalError:
        seen.append("refused")
    child_hvd.shutdown()
    return ", ".join(seen)


def child(queue):
    queue.put(observe())


# A fresh interpreter imports torch first, which takes long where ranks outnumber cores.
CHILD_LIMIT_S = 100
INERT = "initialized=False, not initialized, not initialized, refused"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_sees_no_job(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join(CHILD_LIMIT_S)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, f"no answer within {CHILD_LIMIT_S} s, or a crash"
    assert queue.get() == INERT


def test_a_forked_child_may_exit_in_the_ordinary_way():
    # Its exit handlers run, unlike those of multiprocessing's children.
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        status = 1
        try:
            os.write(writer, observe().encode())
            hvd.shutdown()
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as stream:
        assert stream.read() == INERT
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_forked_child_holds_none_of_the_jobs_descriptors():
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")

    def job_descriptors():
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if (
                target.startswith("socket:")
                or "eventfd" in target
                or "eventpoll" in target
                or "memfd" in target
            ):
                found.add((fd, target))
        return found

    before = job_descriptors()
    hvd.barrier()
    hvd.shutdown()
    without = job_descriptors()
    hvd.init()
    ours = {target for _, target in job_descriptors() - without if target.startswith("socket:")}
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        held = {target for _, target in job_descriptors()} & ours
        os.write(writer, repr(held).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        assert stream.read() == "set()"
    os.waitpid(pid, 0)
    assert hvd.size() == 1 or before


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        # A worker may ask, as library code does, and must not disturb the job.
        assert not hvd.is_initialized()
        return torch.tensor(float(index * index))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_data_loaders(method):
    sampler = torch.utils.data.DistributedSampler(
        Squares(), num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    loader = torch.utils.data.DataLoader(
        Squares(),
        batch_size=3,
        sampler=sampler,
        num_workers=2 if method == "fork" else 1,
        multiprocessing_context=method,
    )
    total = torch.zeros(())
    for step, batch in enumerate(loader):
        total += hvd.allreduce(batch.sum(), name=f"{method}.{step}", op=hvd.Sum)
    assert total.item() == sum(i * i for i in range(24))
