"""Texts of errors that scripts and search engines know, one row each; a job of one process is enough for these."""

import re

import pytest
import torch

import horovod.torch as hvd


@pytest.fixture(autouse=True)
def _job():
    hvd.init()
    yield
    hvd.shutdown()


def unknown_set():
    process_set = hvd.ProcessSet([0])
    process_set.process_set_id = 4711
    return process_set


def ones():
    return torch.ones(3, 2)


UNKNOWN_SET = "Process set provided does not exist, or has not been registered."
INTERNAL = hvd.HorovodInternalError

ROWS = [
    (
        "poll",
        ValueError,
        "Handle 4711 was not created or has been cleared.",
        lambda: hvd.poll(4711),
    ),
    (
        "average and op",
        ValueError,
        "The op parameter supersedes average. Please provide only one of them.",
        lambda: hvd.allreduce(ones(), average=True, op=hvd.Sum),
    ),
    (
        "sparse allreduce",
        ValueError,
        "Tensor type torch.sparse.FloatTensor is not supported",
        lambda: hvd.allreduce(ones().to_sparse()),
    ),
    (
        "float8",
        ValueError,
        "Tensor type torch.Float8_e5m2Tensor is not supported",
        lambda: hvd.allreduce(ones().to(torch.float8_e5m2)),
    ),
    (
        "allreduce, unknown set",
        ValueError,
        f"Allreduce: {UNKNOWN_SET}",
        lambda: hvd.allreduce(ones(), process_set=unknown_set()),
    ),
    (
        "allgather, unknown set",
        ValueError,
        f"Allgather: {UNKNOWN_SET}",
        lambda: hvd.allgather(ones(), process_set=unknown_set()),
    ),
    (
        "broadcast, unknown set",
        ValueError,
        f"Broadcast: {UNKNOWN_SET}",
        lambda: hvd.broadcast(ones(), 0, process_set=unknown_set()),
    ),
    (
        "alltoall, unknown set",
        ValueError,
        f"Alltoall: {UNKNOWN_SET}",
        lambda: hvd.alltoall(ones(), process_set=unknown_set()),
    ),
    (
        "reducescatter, unknown set",
        ValueError,
        f"Reducescatter: {UNKNOWN_SET}",
        lambda: hvd.reducescatter(ones(), process_set=unknown_set()),
    ),
    (
        "barrier, unknown set",
        ValueError,
        f"Barrier: {UNKNOWN_SET}",
        lambda: hvd.barrier(process_set=unknown_set()),
    ),
    (
        "size of an unknown set",
        ValueError,
        "Process set does not exist or has not been registered.",
        lambda: unknown_set().size(),
    ),
    (
        "broadcast, root",
        ValueError,
        "broadcast received invalid root rank 5 for provided process set",
        lambda: hvd.broadcast(ones(), 5),
    ),
    (
        "reducescatter, operator",
        INTERNAL,
        "Reducescatter currently only supports AVERAGE and SUM.",
        lambda: hvd.reducescatter(ones(), op=hvd.Max),
    ),
    (
        "reducescatter, scalar",
        ValueError,
        "Reducescatter does not support scalar inputs",
        lambda: hvd.reducescatter(torch.tensor(1.0)),
    ),
    (
        "allgather, scalar",
        INTERNAL,
        "Process-set rank zero tried to ALLGATHER a rank-zero tensor.",
        lambda: hvd.allgather(torch.tensor(1.0)),
    ),
    (
        "alltoall, scalar",
        INTERNAL,
        "Process-set rank zero tried to ALLTOALL a rank-zero tensor.",
        lambda: hvd.alltoall(torch.tensor(1.0)),
    ),
    (
        "alltoall, dimensions of splits",
        ValueError,
        "alltoall expects a 1D splits tensor",
        lambda: hvd.alltoall(ones(), splits=torch.tensor([[3]])),
    ),
    (
        "alltoall, dtype of splits",
        ValueError,
        "alltoall expects splits to contain 32-bit integer elements",
        lambda: hvd.alltoall(ones(), splits=torch.tensor([3.0])),
    ),
    (
        "alltoall, sum of splits",
        ValueError,
        "Sum of splits entries is greater than the first dimension of tensor.",
        lambda: hvd.alltoall(ones(), splits=[4]),
    ),
    (
        "alltoall, number of splits",
        ValueError,
        "Number of entries in splits does not equal number of workers.",
        lambda: hvd.alltoall(ones(), splits=[1, 1]),
    ),
    (
        "parameters",
        ValueError,
        "invalid params of type",
        lambda: hvd.broadcast_parameters(3, root_rank=0),
    ),
    (
        "process set of no ranks",
        ValueError,
        "ProcessSet should be initialized with a list of process ranks",
        lambda: hvd.ProcessSet(["0"]),
    ),
    (
        "process set of a communicator",
        ValueError,
        "Apparently you tried to build a ProcessSet from an MPI communicator",
        lambda: hvd.ProcessSet(object()),
    ),
    (
        "adding to a static job",
        ValueError,
        "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding",
        lambda: hvd.add_process_set([0]),
    ),
    (
        "removing from a static job",
        ValueError,
        "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow removing",
        lambda: hvd.remove_process_set(unknown_set()),
    ),
    (
        "communicator of MPI",
        ValueError,
        "Horovod has not been built with MPI support.",
        lambda: hvd.init(comm=object()),
    ),
]


@pytest.mark.parametrize(
    ("kind", "text", "call"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_text(kind, text, call):
    with pytest.raises(kind, match=re.escape(text)) as error:
        call()
    assert type(error.value) is kind


def test_text_after_shutdown_of_the_runtime():
    hvd.shutdown()
    with pytest.raises(
        ValueError, match=re.escape("Horovod has not been initialized; use hvd.init().")
    ):
        hvd.size()
