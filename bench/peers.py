"""Each peer's public API behind one face: what a rank of the collectives benchmark calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import calls
import torch
from cases import Case


class Peer(Protocol):
    """Interface of a peer. Tags name the operation where the peer wants names."""

    rank: int
    size: int

    def allreduce(self, tensors: Sequence[torch.Tensor], tag: str) -> Any:
        """Sum each tensor in place: all started, then all waited for."""

    def chain(self, tensors: Sequence[torch.Tensor], tag: str, count: int) -> Any:
        """Sum one tensor in place so many times, each time submitted by the end of the last, while no thread waits."""

    def broadcast(self, tensors: Sequence[torch.Tensor], tag: str) -> Any:
        """Rank 0's tensor to all, in place."""

    def allgather(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        """The rows of all ranks."""

    def reducescatter(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        """This rank's rows of the sum."""

    def alltoall(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        """An equal share of rows for each rank."""

    def barrier(self) -> Any: ...
    def close(self) -> Any: ...


class Horovod:
    """Ours."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()
        self.barrier, self.close = hvd.barrier, hvd.shutdown

    def allreduce(self, tensors: Sequence[torch.Tensor], tag: str) -> None:
        hvd = self.hvd
        handles = [
            hvd.allreduce_async_(t, name=f"{tag}.{i}", op=hvd.Sum) for i, t in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def chain(self, tensors: Sequence[torch.Tensor], tag: str, count: int) -> None:
        calls.chain(tensors[0], tag, count)

    def broadcast(self, tensors: Sequence[torch.Tensor], tag: str) -> None:
        self.hvd.broadcast_(tensors[0], 0, name=tag)

    def allgather(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        return self.hvd.allgather(tensors[0], name=tag)

    def reducescatter(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        return self.hvd.reducescatter(tensors[0], name=tag, op=self.hvd.Sum)

    def alltoall(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        return self.hvd.alltoall(tensors[0], name=tag)


class Gloo:
    """torch.distributed with its Gloo backend."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.dist, self.rank, self.size = dist, dist.get_rank(), dist.get_world_size()
        self.barrier, self.close = dist.barrier, dist.destroy_process_group

    def allreduce(self, tensors: Sequence[torch.Tensor], tag: str) -> None:
        for work in [self.dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()

    def broadcast(self, tensors: Sequence[torch.Tensor], tag: str) -> None:
        self.dist.broadcast(tensors[0], 0)

    def allgather(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        out = _rows(tensors[0], self.size, 1)
        self.dist.all_gather_into_tensor(out, tensors[0])
        return out

    def reducescatter(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        out = _rows(tensors[0], 1, self.size)
        self.dist.reduce_scatter_tensor(out, tensors[0])
        return out

    def alltoall(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        out = torch.empty_like(tensors[0])
        self.dist.all_to_all_single(out, tensors[0])
        return out


class Mpi:
    """Open MPI through mpi4py, on the tensors' memory."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.barrier, self.close = self.comm.Barrier, lambda: None

    def allreduce(self, tensors: Sequence[torch.Tensor], tag: str) -> None:
        requests = [self.comm.Iallreduce(self.mpi.IN_PLACE, t.numpy()) for t in tensors]
        self.mpi.Request.Waitall(requests)

    def broadcast(self, tensors: Sequence[torch.Tensor], tag: str) -> None:
        self.comm.Bcast(tensors[0].numpy(), 0)

    def allgather(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        out = _rows(tensors[0], self.size, 1)
        self.comm.Allgather(tensors[0].numpy(), out.numpy())
        return out

    def reducescatter(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        out = _rows(tensors[0], 1, self.size)
        self.comm.Reduce_scatter_block(tensors[0].numpy(), out.numpy())
        return out

    def alltoall(self, tensors: Sequence[torch.Tensor], tag: str) -> torch.Tensor:
        out = torch.empty_like(tensors[0])
        self.comm.Alltoall(tensors[0].numpy(), out.numpy())
        return out


def _rows(tensor: torch.Tensor, times: int, parts: int) -> torch.Tensor:
    """An empty tensor with so many times or so few rows."""
    return torch.empty((tensor.shape[0] * times // parts, *tensor.shape[1:]), dtype=tensor.dtype)


PEERS: dict[str, Callable[[], Peer]] = {"horovod": Horovod, "gloo": Gloo, "mpi": Mpi}


def lacks(peer: str, case: Case) -> str | None:
    """Why a peer cannot take part in a case, or None."""
    if case.operation == "chain" and peer != "horovod":
        return "its ends are waited for"
    if case.order and peer != "horovod":
        return "it reduces contiguous memory only"
    if peer == "mpi" and case.dtype != "float32":
        return f"MPI has no type for {case.dtype}"
    return None
