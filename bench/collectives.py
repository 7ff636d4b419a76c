"""One rank of the collectives benchmark: the same cases through any peer's public API.

Started by run.py under the peer's own launcher. Rank 0 prints one JSON line per case with the
seconds of every repeat; the result of each case is verified once, outside the timing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch


class Peer(Protocol):
    """What a peer must be able to do."""

    rank: int
    size: int

    def allreduce(self, tensors: list[torch.Tensor], tag: str) -> None: ...
    def broadcast(self, tensor: torch.Tensor, tag: str) -> None: ...
    def allgather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor: ...
    def barrier(self) -> None: ...


class HorovodPeer:
    """Ours: every tensor submitted asynchronously, then all synchronised."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self.hvd, self.rank, self.size = hvd, hvd.rank(), hvd.size()

    def allreduce(self, tensors: list[torch.Tensor], tag: str) -> None:
        hvd = self.hvd
        handles = [
            hvd.allreduce_async_(t, name=f"{tag}.{i}", op=hvd.Sum) for i, t in enumerate(tensors)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    def broadcast(self, tensor: torch.Tensor, tag: str) -> None:
        self.hvd.broadcast_(tensor, 0, name=tag)

    def allgather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        return self.hvd.allgather(tensor, name=tag)

    def barrier(self) -> None:
        self.hvd.barrier()


class GlooPeer:
    """torch.distributed with its Gloo backend."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.dist, self.rank, self.size = dist, dist.get_rank(), dist.get_world_size()

    def allreduce(self, tensors: list[torch.Tensor], tag: str) -> None:
        for work in [self.dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()

    def broadcast(self, tensor: torch.Tensor, tag: str) -> None:
        self.dist.broadcast(tensor, 0)

    def allgather(self, tensor: torch.Tensor, tag: str) -> torch.Tensor:
        out = torch.empty((self.size * tensor.shape[0], *tensor.shape[1:]), dtype=tensor.dtype)
        self.dist.all_gather_into_tensor(out, tensor)
        return out

    def barrier(self) -> None:
        self.dist.barrier()


PEERS: dict[str, Callable[[], Peer]] = {"horovod": HorovodPeer, "gloo": GlooPeer}


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Shapes of ResNet-50's 161 parameters (He et al. 2015), in the order of the network."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [
                (width, channels, 1, 1),
                (width, width, 3, 3),
                (4 * width, width, 1, 1),
            ]
            if block == 0:
                convolutions.append((4 * width, channels, 1, 1))
            for shape in convolutions:
                shapes += [shape, (shape[0],), (shape[0],)]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def measure(peer: Peer, run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat, all ranks starting together."""
    for _ in range(5):
        run()
    seconds = []
    for _ in range(repeats):
        peer.barrier()
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


def report(peer: Peer, case: str, nbytes: int, seconds: list[float]) -> None:
    """One JSON line on rank 0."""
    if peer.rank == 0:
        print(json.dumps({"case": case, "bytes": nbytes, "seconds": seconds}), flush=True)


def check(peer: Peer, tensor: torch.Tensor) -> None:
    """The sum of ones over all ranks is the number of ranks."""
    probe = torch.ones_like(tensor)
    peer.allreduce([probe], "check")
    if not bool((probe == peer.size).all()):
        raise SystemExit(f"rank {peer.rank}: allreduce gave a wrong sum for {tuple(tensor.shape)}")


def main() -> None:
    """Run every case and report it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=sorted(PEERS), required=True)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    peer = PEERS[options.peer]()

    for label, elements in (
        ("4 B", 1),
        ("4 KiB", 1 << 10),
        ("1 MiB", 1 << 18),
        ("8 MiB", 1 << 21),
        ("64 MiB", 1 << 24),
    ):
        tensor = torch.ones(elements)
        check(peer, tensor)
        repeats = options.repeats * (6 if elements < 1 << 18 else 1)
        times = measure(peer, lambda t=tensor: peer.allreduce([t], "size"), repeats)
        report(peer, f"allreduce f32 {label}", tensor.nbytes, times)
    for dtype in (torch.float16, torch.bfloat16):
        tensor = torch.ones(1 << 24, dtype=dtype)
        check(peer, tensor)
        times = measure(peer, lambda t=tensor: peer.allreduce([t], "half"), options.repeats)
        report(peer, f"allreduce {str(dtype)[6:]} 32 MiB", tensor.nbytes, times)
    small = [torch.ones(256) for _ in range(1000)]
    times = measure(peer, lambda: peer.allreduce(small, "many"), options.repeats)
    report(peer, "1000 tensors of 1 KiB", sum(t.nbytes for t in small), times)
    gradients = [torch.ones(s) for s in resnet50_shapes()]
    times = measure(peer, lambda: peer.allreduce(gradients, "resnet"), options.repeats)
    label = f"ResNet-50's {len(gradients)} gradients"
    report(peer, label, sum(g.nbytes for g in gradients), times)
    tensor = torch.ones(1 << 24)
    times = measure(peer, lambda: peer.broadcast(tensor, "broadcast"), options.repeats)
    report(peer, "broadcast f32 64 MiB", tensor.nbytes, times)
    tensor = torch.ones(1 << 22)
    times = measure(peer, lambda: peer.allgather(tensor, "allgather"), options.repeats)
    report(peer, "allgather f32 16 MiB each", tensor.nbytes, times)


if __name__ == "__main__":
    main()
