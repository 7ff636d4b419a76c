"""How a torch tensor is presented to the core: dtype codes, plain contiguous memory in and out, streams of GPUs."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from horovod import _core
from horovod.common import _dtypes
from horovod.common._collectives import Collectives, Memory
from horovod.common._dtypes import OP_NAMES, can_be_reduced
from horovod.common._operations import Allocate, Allocation, Gpu, Output
from horovod.common._splits import checked_splits
from horovod.torch._autograd import explain
from horovod.torch._exclusive_parameters import is_sharded, sharded_text

# Queues an allreduce in place on one tensor that needs no preparation: dense memory with a dtype that the core computes
# with. On the host it may have any order of strides; on a GPU it is row by row. The core reads address, shape, strides
# and dtype itself, because to ask for them in Python would cost most of a small operation. The result is None for any
# other tensor, or for all where torch is too old to have the interface (before 2.10). It asks `is_neg` of single
# elements only: a longer negated one is never dense, unless torch's private `_neg_view` made it.
# It keeps the storage alive: the tensor may be given another one while the operation is in flight.
_plain = _core.PlainTensors(
    [torch.Tensor, torch.nn.Parameter], torch.Tensor.is_neg, torch.Tensor.untyped_storage
)
allreduce_plain = _plain.allreduce
# The same for a broadcast.
broadcast_plain = _plain.broadcast
# The same with the wait for it in one call: the tensor, or None.
allreduce_plain_and_wait = _plain.allreduce_and_wait
broadcast_plain_and_wait = _plain.broadcast_and_wait
# For several allreduces of which the other ranks hear at once.
allreduce_plain_together = _plain.allreduce_together
# For a group of them.
grouped_allreduce_plain = _plain.grouped_allreduce

# dtypes that the core computes with.
CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _dtypes.CODES.items()}

_REAL_OF: dict[torch.dtype, torch.dtype] = {
    getattr(torch, name): getattr(torch, real) for name, real in _dtypes.REAL_OF.items()
}

# Of these it need not be asked whether they are sharded.
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)

# Pairs of operation and dtype that can be reduced; a look-up, as every tensor is checked.
_REDUCIBLE = {
    (op, getattr(torch, name))
    for name in (*_dtypes.CODES, *_dtypes.REAL_OF)
    for op in OP_NAMES
    if can_be_reduced(op, name)
}

# Only copied, never computed with, hence sent as bytes.
_OPAQUE = frozenset(
    dtype
    for dtype in (
        getattr(torch, name, None)
        for name in (
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
    )
    if dtype is not None
)


# PyTorch for AMD's GPUs calls them CUDA devices, too.
_HIP = torch.version.hip is not None
if _HIP or torch.version.cuda is not None:
    _core.prefer_gpus(_HIP)
_core.advise_one_gpu("call torch.cuda.set_device(hvd.local_rank()) before tensors are made")

# By type of tensor and number of the device.
_gpus: dict[tuple[type, int], Gpu] = {}


def _current_stream(ordinal: int) -> int:
    # Of what has no exchange table, as torch before 2.10.
    stream: int = torch.cuda.current_stream(ordinal).cuda_stream
    return stream


def _allocator(operand: torch.Tensor) -> Allocate:
    # The core asks in a thread of its own. Memory allocated on the stream that is current now may be used on it at
    # once, and is given back to its pool.
    stream = torch.cuda.current_stream(operand.device)

    def allocate(shape: tuple[int, ...]) -> Allocation:
        # To go to the stream from another current device and back would make a context on that one, of some 100 MB.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            result = operand.new_empty(shape)
        return result.data_ptr(), result

    return allocate


def _gpu_of(tensor: torch.Tensor) -> Gpu | None:
    """The GPU that the tensor is on, None for host memory."""
    if tensor.is_cpu:
        return None
    key = (type(tensor), tensor.get_device())
    gpu = _gpus.get(key)
    if gpu is None:
        streams = _core.Streams(key[0], _current_stream, _HIP)
        gpu = _gpus[key] = Gpu(streams, key[1], _allocator)
    return gpu


Splits: TypeAlias = torch.Tensor | Sequence[int] | None


def type_name(tensor: torch.Tensor) -> str:
    """How error texts call a kind of tensor, such as torch.FloatTensor."""
    try:
        name: str = tensor.type()
    except RuntimeError:  # some layouts have no such name
        name = f"{tensor.layout} of {tensor.dtype}"
    return name


def check_memory(tensor: torch.Tensor) -> None:
    """Raise unless the argument is a tensor with plain memory, of the host or of a GPU."""
    if (
        type(tensor) in _PLAIN_TYPES
        and (tensor.is_cpu or tensor.is_cuda)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    ):
        return
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"Expected a torch.Tensor, got {type(tensor).__name__}.")
    if is_sharded(tensor):
        raise ValueError(sharded_text("the tensor"))
    if tensor.layout is not torch.strided:
        hint = "; see sparse_allreduce_async" if tensor.is_sparse else ""
        raise ValueError(f"Tensor type {type_name(tensor)} is not supported{hint}.")
    if not (tensor.is_cpu or tensor.is_cuda) or tensor.is_quantized:
        raise ValueError(
            f"Tensor type {type_name(tensor)} on device {tensor.device} is not supported."
        )


def check_reducible(tensor: torch.Tensor, op: int) -> None:
    """Raise unless tensors of this kind can be reduced with this operator."""
    check_memory(tensor)
    if (
        op,
        tensor.dtype,
    ) not in _REDUCIBLE and op in OP_NAMES:  # the core names an unknown operator
        raise ValueError(f"Tensor type {type_name(tensor)} is not supported for op {OP_NAMES[op]}.")


def check_summable(tensor: torch.Tensor, op: int) -> None:
    """Raise unless the elements of a tensor of any layout can be summed, or averaged."""
    if (op, tensor.dtype) not in _REDUCIBLE:
        raise ValueError(f"Tensor type {type_name(tensor)} is not supported for op {OP_NAMES[op]}.")


def check_movable(tensor: torch.Tensor) -> None:
    """Raise unless tensors of this kind can be gathered, broadcast and exchanged."""
    check_memory(tensor)
    dtype = tensor.dtype
    if dtype not in CODES and dtype not in _REAL_OF and dtype not in _OPAQUE:
        raise ValueError(f"Tensor type {type_name(tensor)} is not supported.")


def to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's values as contiguous memory of a dtype that the core knows.

    It is the tensor's own memory where that is possible. Complex tensors get one more dimension, of size two.
    """
    tensor = tensor.data  # no autograd and no version counting from here on
    dtype = tensor.dtype
    if dtype in _REAL_OF:
        return torch.view_as_real(tensor.resolve_conj().contiguous())
    if dtype in _OPAQUE:
        return tensor.contiguous().view(torch.uint8)
    return (tensor.resolve_neg() if tensor.is_neg() else tensor).contiguous()


def from_wire(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `to_wire`: view contiguous memory as a tensor of the original dtype."""
    if dtype in _REAL_OF:
        return torch.view_as_complex(wire)
    if dtype in _OPAQUE:
        return wire.view(dtype)
    return wire


class TorchArrays:
    """Tensors of any layout, of all kinds of numbers, in host memory or on GPUs."""

    def describe(self, array: Any, op: int | None) -> Memory:
        if op is None:
            check_movable(array)
        else:
            check_reducible(array, op)
        try:
            wire = to_wire(array)
            address = wire.data_ptr()
        except RuntimeError as error:
            explain(error)
            raise
        return Memory(
            address,
            wire.nbytes,
            CODES[wire.dtype],
            wire.shape,
            wire,
            array.dtype,
            array.data_ptr(),
            array.dim() > 0,
            _gpu_of(wire),
        )

    def check_writable(self, array: torch.Tensor) -> None:
        pass  # every tensor is

    def allocate(self, like: Memory) -> Allocation:
        wire = torch.empty_like(like.owner)
        return wire.data_ptr(), wire

    def copy(self, memory: Memory) -> Allocation:
        wire = memory.owner.clone()
        return wire.data_ptr(), wire

    def put(self, array: torch.Tensor, memory: Memory) -> None:
        if array.data_ptr() != memory.origin and memory.nbytes:
            raise RuntimeError(_core.MOVED)
        if memory.is_own:
            return
        target = array.data
        result = from_wire(memory.owner, memory.dtype)
        # Elements that share memory (an expanded tensor) are written once, provided that they agree.
        kept = result
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.shape[dim] > 1:
                target, kept = target.narrow(dim, 0, 1), kept.narrow(dim, 0, 1)
        if kept.shape != result.shape and not same_bits(kept.expand_as(result), result):
            raise ValueError(
                "The result differs between elements of an expanded tensor that share memory; "
                "pass a clone() of the tensor."
            )
        target.copy_(kept)

    def wrap(self, owner: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return from_wire(owner, dtype)

    def wrap_output(self, output: Output, dtype: torch.dtype) -> torch.Tensor:
        buffer, shape = output
        if isinstance(buffer, torch.Tensor):
            return from_wire(buffer, dtype)
        wire_dtype = _REAL_OF.get(dtype, torch.uint8 if dtype in _OPAQUE else dtype)
        if len(buffer):
            wire = torch.frombuffer(buffer, dtype=wire_dtype).view(shape)
        else:
            wire = torch.empty(shape, dtype=wire_dtype, device="cpu")
        return from_wire(wire, dtype)

    def rows(self, splits: Splits) -> list[int] | None:
        if splits is None:
            return None
        if isinstance(splits, torch.Tensor):
            if splits.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    "alltoall expects splits to contain 32-bit integer elements (or 64-bit ones), "
                    f"not {splits.dtype}."
                )
            if splits.dim() != 1:
                raise ValueError(
                    f"alltoall expects a 1D splits tensor, not one of shape {tuple(splits.shape)}."
                )
        return checked_splits(splits)

    def counts(self, numbers: list[int], splits: Splits) -> torch.Tensor:
        device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
        return torch.tensor(numbers, dtype=torch.int32, device=device)


collectives: Collectives[torch.Tensor] = Collectives(TorchArrays())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits."""
    a, b = a.detach().resolve_conj().resolve_neg(), b.detach().resolve_conj().resolve_neg()
    return bool(
        torch.equal(
            a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        )
    )
