"""Children of a rank have no part in its job: forked ones remember who they are, others know nothing of it."""

import itertools
import multiprocessing
import os

import pytest
import torch
from ops_support import still_works

import horovod.torch as hvd
from horovod.torch import mpi_ops


@pytest.fixture(autouse=True)
def _the_job_goes_on():
    yield
    still_works()


def observe():
    """A child's view, as text."""
    import horovod.torch as child_hvd

    seen = [f"initialized={child_hvd.is_initialized()}"]
    try:
        seen.append(f"{whoami()}")
    except ValueError as error:
        seen.append("not initialized" if "has not been initialized" in str(error) else str(error))
    for call in (
        lambda: child_hvd.allreduce(torch.ones(1)),
        lambda: child_hvd.broadcast_object("x", 0),
        child_hvd.barrier,
        child_hvd.join,
    ):
        try:
            call()
            seen.append("done")
        except child_hvd.HorovodInternalError as error:
            forked = "was forked from a rank" in str(error) and "forkserver" in str(error)
            seen.append("refused with advice" if forked else "refused")
    return ", ".join(seen)


def whoami():
    """All that a process may ask about its place in the job."""
    everybody = hvd.global_process_set
    return [
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        mpi_ops.is_homogeneous(),
        everybody.rank(),
        everybody.size(),
        everybody.included(),
    ]


def child(queue):
    queue.put(observe())


# A fresh interpreter imports torch first, which takes long where ranks outnumber cores.
CHILD_LIMIT_S = 300
INERT = "initialized=False, not initialized" + 4 * ", refused"


def forked():
    return f"initialized=True, {whoami()}" + 4 * ", refused with advice"


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_has_no_part_in_the_job(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join(CHILD_LIMIT_S)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, f"no answer within {CHILD_LIMIT_S} s, or a crash"
    assert queue.get() == (forked() if method == "fork" else INERT)


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
        assert stream.read() == forked()
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
        inherited = {target for _, target in job_descriptors()} & ours
        os.write(writer, repr(inherited).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        assert stream.read() == "set()"
    os.waitpid(pid, 0)
    assert hvd.size() == 1 or before


def test_a_forked_child_that_has_left_is_on_its_own(tmp_path):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        hvd.init()  # as in the parent: it runs already
        seen = [hvd.is_initialized()]
        hvd.shutdown()
        seen.append(hvd.is_initialized())
        for call in (hvd.rank, hvd.barrier):
            try:
                call()
            except ValueError as error:
                seen.append("has not been initialized" in str(error))
        os.write(writer, repr(seen).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        assert stream.read() == "[True, False, True, True]"
    os.waitpid(pid, 0)


class Shards(torch.utils.data.IterableDataset):
    """Shares numbers out by rank, in the worker."""

    def __iter__(self):
        assert hvd.is_initialized()
        return iter(range(hvd.rank(), 12, hvd.size()))


def test_forked_workers_share_out_data_by_rank():
    ranks = []

    def begin(_):
        ranks.append(hvd.rank())  # as seeds are made
        assert ranks == [hvd.rank()]

    loader = torch.utils.data.DataLoader(
        Shards(),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=begin,
    )
    mine = list(loader)
    assert sorted(itertools.chain(*hvd.allgather_object(mine))) == list(range(12))


class Squares(torch.utils.data.Dataset):
    def __init__(self, initialized):
        self.initialized = initialized

    def __len__(self):
        return 24

    def __getitem__(self, index):
        # A worker may ask, as library code does, and must not disturb the job.
        assert hvd.is_initialized() is self.initialized
        return torch.tensor(float(index * index))


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_data_loaders(method):
    squares = Squares(initialized=method == "fork")
    sampler = torch.utils.data.DistributedSampler(
        squares, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False
    )
    loader = torch.utils.data.DataLoader(
        squares,
        batch_size=3,
        sampler=sampler,
        num_workers=2 if method == "fork" else 1,
        multiprocessing_context=method,
    )
    total = torch.zeros(())
    for step, batch in enumerate(loader):
        total += hvd.allreduce(batch.sum(), name=f"{method}.{step}", op=hvd.Sum)
    assert total.item() == sum(i * i for i in range(24))
