"""How a torch tensor is presented to the core: dtype codes, plain contiguous memory in and out."""

from collections.abc import Sequence
from typing import Any

import torch

from horovod import _core
from horovod.common._ops import Adasum, Average, Max, Min, Product, Sum

# Queues an operation in place on one tensor that needs no preparation: contiguous host memory of a dtype that the
# core computes with. It reads address, shape and dtype itself, which asked for in Python would cost most of a small
# operation; None for any other tensor, or for all where torch is too old to have the interface (before 2.10).
# It asks `is_neg` of single elements only: a longer negated tensor is never contiguous, unless torch's private
# `_neg_view` made it.
_plain = _core.PlainTensors([torch.Tensor, torch.nn.Parameter], torch.Tensor.is_neg)
enqueue_plain = _plain.enqueue
# The same for several allreduces of which the other ranks hear at once.
allreduce_plain_together = _plain.allreduce_together

# One tensor for `_core.enqueue`: input pointer, output pointer (0: the core allocates), dtype code, shape, owner.
Entry = tuple[int, int, int, tuple[int, ...], Any]

# dtypes that the core computes with.
CODES: dict[torch.dtype, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.uint16: 2,
    torch.int16: 3,
    torch.int32: 4,
    torch.int64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bool: 9,
    torch.bfloat16: 10,
    torch.uint32: 11,
    torch.uint64: 12,
}

_FLOATING = (torch.float16, torch.float32, torch.float64, torch.bfloat16)

# Complex numbers travel as pairs of reals, which is exact for what is linear: sums, averages and copies.
_REAL_OF = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
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


def _reducible() -> dict[tuple[int, torch.dtype], int]:
    table = {(op, dtype): CODES[dtype] for op in (Sum, Min, Max, Product) for dtype in CODES}
    table |= {(Average, dtype): CODES[dtype] for dtype in CODES if dtype != torch.bool}
    table |= {(Adasum, dtype): CODES[dtype] for dtype in _FLOATING}
    return table


# What can be reduced as it is: (operator, dtype) -> code.
REDUCIBLE = _reducible()

_OP_NAMES = {
    Average: "Average",
    Sum: "Sum",
    Adasum: "Adasum",
    Min: "Min",
    Max: "Max",
    Product: "Product",
}


def require_members(tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless a group has a tensor."""
    if not tensors:
        raise ValueError("A grouped operation needs at least one tensor.")


def type_name(tensor: torch.Tensor) -> str:
    """How error texts call a kind of tensor, such as torch.FloatTensor."""
    try:
        name: str = tensor.type()
    except RuntimeError:  # some layouts have no such name
        name = f"{tensor.layout} of {tensor.dtype}"
    return name


def check_memory(tensor: torch.Tensor) -> None:
    """Raise unless the argument is a tensor with plain host memory."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"Expected a torch.Tensor, got {type(tensor).__name__}.")
    if tensor.layout is not torch.strided:
        hint = "; see sparse_allreduce_async" if tensor.is_sparse else ""
        raise ValueError(f"Tensor type {type_name(tensor)} is not supported{hint}.")
    if tensor.is_cuda:
        raise ValueError(
            "CUDA tensors are not supported in this version; move the tensor to the CPU first, as in "
            "hvd.allreduce(tensor.cpu()).to(tensor.device)."
        )
    if not tensor.is_cpu or tensor.is_quantized:
        raise ValueError(
            f"Tensor type {type_name(tensor)} on device {tensor.device} is not supported."
        )


def check_reducible(tensor: torch.Tensor, op: int) -> None:
    """Raise unless tensors of this kind can be reduced with this operator."""
    check_memory(tensor)
    dtype = tensor.dtype
    if (op, dtype) in REDUCIBLE or op not in _OP_NAMES:  # the core names an unknown operator
        return
    if dtype in _REAL_OF and op in (Sum, Average):
        return
    raise ValueError(f"Tensor type {type_name(tensor)} is not supported for op {_OP_NAMES[op]}.")


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
    return tensor.resolve_neg().contiguous()


def from_wire(wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `to_wire`: view contiguous memory as a tensor of the original dtype."""
    if dtype in _REAL_OF:
        return torch.view_as_complex(wire)
    if dtype in _OPAQUE:
        return wire.view(dtype)
    return wire


def entry(wire: torch.Tensor, output: int, owner: Any) -> Entry:
    """Describe one tensor to the core. `wire` comes from `to_wire`; `owner` keeps all memory alive."""
    return (wire.data_ptr(), output, CODES[wire.dtype], wire.shape, owner)


def rows_entry(tensor: torch.Tensor) -> Entry:
    """Describe a tensor whose result the core allocates (allgather, alltoall, reducescatter)."""
    wire = to_wire(tensor)
    # A complex scalar must stay a scalar, so that the core refuses it like any other.
    shape = wire.shape if tensor.dim() else ()
    return (wire.data_ptr(), 0, CODES[wire.dtype], shape, wire)


def from_core(output: tuple[_core.Buffer, tuple[int, ...]], dtype: torch.dtype) -> torch.Tensor:
    """Wrap memory that the core allocated, without copying it."""
    buffer, shape = output
    wire_dtype = _REAL_OF.get(dtype, torch.uint8 if dtype in _OPAQUE else dtype)
    if len(buffer):
        wire = torch.frombuffer(buffer, dtype=wire_dtype).view(shape)
    else:
        wire = torch.empty(shape, dtype=wire_dtype, device="cpu")
    return from_wire(wire, dtype)


class Staged:
    """An in-place operand without plain contiguous memory of its own: worked on as a copy, written back later."""

    __slots__ = ("target", "wire")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.target = tensor
        self.wire = to_wire(tensor)

    def write_back(self) -> None:
        """Put the result into the operand."""
        target = self.target.data
        result = from_wire(self.wire, target.dtype)
        if result.data_ptr() == target.data_ptr():
            return
        # Elements that share memory (an expanded tensor) are written once, provided that they agree.
        kept = result
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.shape[dim] > 1:
                target, kept = target.narrow(dim, 0, 1), kept.narrow(dim, 0, 1)
        if kept.shape != result.shape and not _same(kept.expand_as(result), result):
            raise ValueError(
                "The result differs between elements of an expanded tensor that share memory; "
                "pass a clone() of the tensor."
            )
        target.copy_(kept)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))
