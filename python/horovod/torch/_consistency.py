"""Checksums of torch tensors, and the check whether all ranks hold the same ones."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.nn.parameter import is_lazy

from horovod import _core
from horovod.common import _replicas, consistency
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.torch._tensors import check_memory, to_wire


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """One number per tensor, of its elements' bytes in logical order: strides do not count, signs of zero do."""
    wires = [to_wire(tensor) for tensor in tensors]
    on_host = [wire for wire in wires if wire.is_cpu]
    sums = iter(_core.checksums([(wire.data_ptr(), wire.nbytes) for wire in on_host]))
    return [next(sums) if wire.is_cpu else _checksum_on_gpu(wire) for wire in wires]


def _checksum_on_gpu(wire: torch.Tensor) -> int:
    # One after the other: host memory need not hold them all.
    copy = wire.cpu()
    [checksum] = _core.checksums([(copy.data_ptr(), copy.nbytes)])
    return checksum


def can_be_checked(tensor: torch.Tensor) -> bool:
    """Whether its elements are plain memory of the host or of a GPU."""
    is_readable = tensor.is_cpu or tensor.is_cuda
    return tensor.layout is torch.strided and is_readable and not tensor.is_quantized


class _Readable:
    """Parameters in memory of the host or of a GPU."""

    def shape_of(self, tensor: torch.Tensor) -> _replicas.Shape:
        return str(tensor.dtype), tuple(tensor.shape), tensor.element_size()

    def checksum(self, tensor: torch.Tensor, parts: Sequence[slice]) -> int:
        flat = tensor.data.reshape(-1)
        pieces = [flat[part] for part in parts]
        [checksum] = checksums(pieces if len(pieces) == 1 else [torch.cat(pieces)])
        return checksum


def report_replica(parameters: Iterable[tuple[str, torch.Tensor]], process_set: ProcessSet) -> None:
    """Tell rank 0 the checksums of an optimizer's trainable parameters, which are about to be updated first."""
    trainable = [
        (name, param)
        for name, param in sorted(parameters, key=lambda entry: entry[0])
        if param.requires_grad and not is_lazy(param) and can_be_checked(param)
    ]
    where = _replicas.arguments(process_set)
    advice = f"Call hvd.broadcast_parameters(model.state_dict(), {where}) before training."
    by_name = _replicas.PairedBy.NAME
    _replicas.report(trainable, _Readable(), process_set, advice, by_name)


def watch_step(watch: consistency.Watch, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Count a step, and take the checksums of the parameters if this is one to compare after."""
    if watch.steps_on():
        named = sorted(parameters, key=lambda entry: entry[0])
        named = [(name, param) for name, param in named if can_be_checked(param)]
        watch.report([name for name, _ in named], checksums(param for _, param in named))


def check_consistency(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    action: str | None = None,
    name: str = "tensors",
    process_set: ProcessSet = global_process_set,
) -> bool:
    """Compare tensors over the ranks, bit by bit; return whether all ranks hold the same.

    Every member of the process set has to call it. Sixteen bytes travel per rank; after a difference eight more per
    tensor. Tensors on GPUs are copied to host memory, one at a time, for which the host waits.
    `DistributedOptimizer(check_consistency=...)` does it for its parameters while training goes on.

    Parameters
    ----------
    named_tensors
        Such as `model.state_dict()` or `model.named_buffers()`: the same names in the same order on every rank.
    action
        "error", "warn" (rank 0 logs it), or None for what `HOROVOD_CONSISTENCY_ACTION` says.
    name
        Pairs the calls of the ranks, as of every operation.
    process_set
        The ranks that take part; only members may call.

    Raises
    ------
    ReplicasDifferError
        They differ and the action is "error". The text names tensors and ranks, and the majority if there is one.
    ValueError
        The ranks name different tensors, or one is not a dense tensor in memory of the host or of a GPU.
    """
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    named = list(items)
    consistency.checked_action(action)
    for _, tensor in named:
        check_memory(tensor)
    sums = checksums(tensor for _, tensor in named)
    return consistency.report([key for key, _ in named], sums, action, name, process_set)
