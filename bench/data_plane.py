"""A model of training on many hosts: the time of an allreduce, fitted to measurements, and the step it makes possible.

An allreduce of N bytes between H hosts takes `start + host * (H - 1)` seconds, and the time in which the link carries
`wire * 2 * (H - 1) / H * N + fill * (H - 1)` bytes. The fit finds the four constants: seconds to agree, seconds for
each other host, bytes on the wire for each byte, and bytes for each other host before results can follow.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ACCELERATORS_PER_HOST = 4
# A backward pass computes the gradients of the inputs and of the weights: twice the work of the forward pass.
FORWARD_SHARE = 1 / 3
# The default of HOROVOD_FUSION_THRESHOLD.
FUSED_BYTES = 128 << 20


@dataclass(frozen=True)
class Point:
    """One measured allreduce between hosts of one rank each."""

    hosts: int
    bits_per_s: float
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class DataPlane:
    """The constants of the model."""

    start_s: float
    host_s: float
    wire: float
    fill_bytes: float

    def seconds(self, hosts: int, bits_per_s: float, nbytes: float) -> float:
        """Time of an allreduce."""
        constants = dataclasses.astuple(self)
        return float(np.dot(_terms(hosts, bits_per_s, nbytes), constants))

    def errors(self, points: Sequence[Point]) -> list[float]:
        """The relative error at each point."""
        return [abs(self.seconds(p.hosts, p.bits_per_s, p.nbytes) / p.seconds - 1) for p in points]


def _terms(hosts: int, bits_per_s: float, nbytes: float) -> tuple[float, ...]:
    """The factors of the constants, in their order."""
    byte_s = 8 / bits_per_s
    return 1.0, hosts - 1.0, 2 * (hosts - 1) / hosts * nbytes * byte_s, (hosts - 1) * byte_s


def fit(points: Sequence[Point]) -> DataPlane:
    """The constants with the least squares of the relative errors, none of them negative."""
    rows = np.array([_terms(p.hosts, p.bits_per_s, p.nbytes) for p in points])
    rows /= np.array([[p.seconds] for p in points])
    best, least = np.zeros(4), float(len(points))
    # Constants that would be negative are zero in the best solution. Few constants: each subset is tried.
    for count in range(1, 5):
        for used in itertools.combinations(range(4), count):
            found = np.zeros(4)
            found[list(used)], *_ = np.linalg.lstsq(rows[:, used], np.ones(len(points)), rcond=None)
            squares = float(((rows @ found - 1) ** 2).sum())
            if found.min() >= 0 and squares < least:
                best, least = found, squares
    return DataPlane(*map(float, best))


@dataclass(frozen=True)
class Layer:
    """A layer in the order of the forward pass: its share of the work, and the bytes of its gradients."""

    work: float
    nbytes: int


def step_seconds(
    layers: Sequence[Layer],
    compute_s: float,
    accelerators: int,
    bits_per_s: float,
    plane: DataPlane,
) -> float:
    """Time of a training step in which gradients are sent while the backward pass goes on.

    As in the engine, gradients that become ready during an allreduce form the next one, up to `FUSED_BYTES`. A larger
    gradient is alone.
    """
    hosts = -(-accelerators // ACCELERATORS_PER_HOST)
    whole = sum(layer.work for layer in layers)
    now = FORWARD_SHARE * compute_s
    ready: list[tuple[float, int]] = []
    for layer in reversed(layers):
        now += (1 - FORWARD_SHARE) * compute_s * layer.work / whole
        if layer.nbytes:
            ready.append((now, layer.nbytes))
    if hosts == 1:
        return compute_s
    free = 0.0
    while ready:
        begin = max(free, ready[0][0])
        fused, count = ready[0][1], 1
        for since, nbytes in ready[1:]:
            if since > begin or fused + nbytes > FUSED_BYTES:
                break
            fused, count = fused + nbytes, count + 1
        free = begin + plane.seconds(hosts, bits_per_s, fused)
        ready = ready[count:]
    return max(free, compute_s)


def efficiency(
    layers: Sequence[Layer],
    compute_s: float,
    accelerators: int,
    bits_per_s: float,
    plane: DataPlane,
) -> float:
    """Images per second, as a share of what as many accelerators would reach without communication."""
    return compute_s / step_seconds(layers, compute_s, accelerators, bits_per_s, plane)
