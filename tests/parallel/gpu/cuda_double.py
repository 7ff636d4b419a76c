"""Tensors in the memory of the GPU double (crates/horovod-gpu-double), and just enough of `torch.cuda` for them.

A `GpuTensor` says that it is a CUDA tensor and tells the double's memory and streams through DLPack's exchange
table, as PyTorch's own do on a machine with GPUs. Its elements are in host memory, so PyTorch computes with them on the
CPU: each function waits for the current stream of the double first, and tells the double what it has read and written
there, which notices what is not in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from double_streams import (
    HOST_WAITS,
    IS_ROCM,
    Stream,
    call_double,
    count,
    current_stream,
    device,
    is_own_process,
    library,
    stream,
)
from torch.overrides import TorchFunctionMode

_int, _pointer = ctypes.c_int, ctypes.c_void_p

torch.cuda.current_stream = current_stream
torch.cuda.device = device
torch.cuda.stream = stream

_grouped = torch._C._group_tensors_by_device_and_dtype


def _group_tensors(lists: Any, with_indices: bool = False) -> Any:
    """As optimizers and clipping group tensors; PyTorch itself takes the double's for those of the CPU."""
    groups = _grouped(lists, with_indices)
    return {
        (tensors[0][0].device if tensors[0] else device, dtype): (tensors, indices)
        for (device, dtype), (tensors, indices) in groups.items()
    }


torch._C._group_tensors_by_device_and_dtype = _group_tensors

# -- memory

# By the address of the storage: the device.
_devices: dict[int, int] = {}


def _free(address: int, allocated_on: Stream) -> None:
    # As PyTorch's allocator: what is allocated next on the same stream may have it.
    _devices.pop(address, None)
    if is_own_process():
        call_double("double_free_on", address, allocated_on.cuda_stream)


def _empty(device: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    # Never without a byte: what has no elements is on a device, too.
    nbytes = -(-max(numel * dtype.itemsize, 1) // 16) * 16
    address = library.double_alloc(device, nbytes)
    assert address, "the double has no memory left"
    memory = (ctypes.c_char * nbytes).from_address(address)
    # The storage keeps the array alive.
    weakref.finalize(memory, _free, address, current_stream(device)).atexit = False
    _devices[address] = device
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)[:numel]


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Owners of a tensor's memory: positions and values of a sparse one, else the tensor itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return (tensor,)


def _device_of(tensor: torch.Tensor) -> int | None:
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            return None
        return _devices.get(_parts(tensor)[-1].untyped_storage().data_ptr())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and length of the bytes that a tensor's elements are among."""
    with torch._C.DisableTorchFunctionSubclass():
        if not tensor.numel():
            return tensor.data_ptr(), 0
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _tell_read(tensor: torch.Tensor) -> None:
    own = current_stream(_device_of(tensor))
    with torch._C.DisableTorchFunctionSubclass():
        spans = [_span(part) for part in _parts(tensor)]
    for address, nbytes in spans:
        if nbytes:
            into = ctypes.create_string_buffer(nbytes)
            call_double("double_stream_read", own.cuda_stream, into, address, nbytes)
            own.synchronize()


def _tell_written(tensor: torch.Tensor) -> None:
    own = current_stream(_device_of(tensor))
    with torch._C.DisableTorchFunctionSubclass():
        spans = [_span(part) for part in _parts(tensor)]
    for address, nbytes in spans:
        if nbytes:
            content = ctypes.create_string_buffer(ctypes.string_at(address, nbytes), nbytes)
            call_double("double_stream_write", own.cuda_stream, address, content, nbytes)
            own.synchronize()


def _room_for(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """New memory of the double with the same strides, as far as they are dense."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        strides = torch.empty_like(tensor).stride()  # as of a clone
        room = _empty(device, tensor.dtype, tensor.numel()).as_strided(tensor.shape, strides)
        return room.as_subclass(GpuTensor)


def _move(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """A copy in the double's memory."""
    moved = _room_for(tensor, device)
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        moved.copy_(tensor)
    _tell_written(moved)
    return moved


def _sparse(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """A sparse tensor whose positions and values are in the double's memory: as they are, or copies."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        positions, values = (
            part if _device_of(part) is not None else _move(part, device) for part in _parts(tensor)
        )
        made = torch.sparse_coo_tensor(
            positions,
            values,
            tensor.shape,
            check_invariants=False,
            is_coalesced=tensor.is_coalesced(),
        )
        return torch.Tensor._make_subclass(GpuTensor, made)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device: int) -> torch.Tensor:
        return _move(tensor, device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _plain(grad) if isinstance(grad, GpuTensor) else grad, None


# Functions that look at what a tensor is, not at its elements.
_QUERIES = frozenset(
    (
        "__get__",
        "dim",
        "size",
        "stride",
        "data_ptr",
        "element_size",
        "numel",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "untyped_storage",
        "type",
        "storage_offset",
        "detach",
        "view",
        "view_as",
        "reshape",
        "requires_grad_",
        "as_strided",
        "narrow",
        "t",
        "expand",
        "expand_as",
        "is_neg",
        "is_conj",
        "is_coalesced",
        "sparse_dim",
        "dense_dim",
        "indices",
        "values",
        "_indices",
        "_values",
        "sparse_coo_tensor",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "__len__",
        "__hash__",
        "resolve_neg",
    )
)
_NEW = frozenset(["empty_like", "new_empty"])

# -- waits of the host

# Functions for which the host has to have elements of a GPU, or the number of those that are something.
_WAITS = frozenset(
    (
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__contains__",
        "allclose",
        "cpu",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "numpy",
        "to_sparse",
        "tolist",
        "unique",
    )
)
_waits: list[str] = []


def _note_wait(func: Any, args: Any, to_host: bool) -> None:
    """Keep the name of a function for which PyTorch has the host wait for the GPU."""
    name = func.__name__
    if (
        to_host
        or name in _WAITS
        # Duplicates are counted.
        or (name == "coalesce" and not args[0].is_coalesced())
        # From memory that is not pinned, where the number may have to come from, too.
        or (name == "copy_" and type(args[1]) is torch.Tensor)
        or (name == "__setitem__" and not isinstance(args[2], torch.Tensor))
    ):
        _waits.append(name)


@contextlib.contextmanager
def without_waiting(*allowed: str) -> Iterator[None]:
    """In the block nobody has the host wait for the GPU, but PyTorch in these of its functions, in order."""
    before = [count(call) for call in HOST_WAITS]
    _waits.clear()
    yield
    after = [count(call) for call in HOST_WAITS]
    assert after == before, f"{HOST_WAITS} were called: {before}, {after}"
    assert _waits == list(allowed), f"the host waited for {_waits}, not for {list(allowed)}"


def _tensors(values: Any) -> Iterator[GpuTensor]:
    for value in values:
        if isinstance(value, GpuTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _device_asked_for(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Where the result shall be, None where that is not said; and the arguments without it."""
    if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device)):
        return args[1], (args[0], *args[2:])
    return kwargs.get("device"), args


def _backward(
    tensor: torch.Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    # Not `Tensor.backward` itself: hooks shall see tensors as they are outside of a pass.
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


class GpuTensor(torch.Tensor):
    """A tensor in the double's memory, or computed from some."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: torch.device("cuda", self.get_device()))

    def get_device(self) -> int:
        return _device_of(self) or 0

    def cpu(self) -> torch.Tensor:
        _waits.append("cpu")
        _tell_read(self)
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().clone().as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward:
            return _backward(*args, **kwargs)
        name = func.__name__
        to_host = False
        device, args = _device_asked_for(func, args, kwargs)
        if device is not None:
            to_host = torch.device(device).type == "cpu"
            kwargs.pop("device", None)
            if name == "to" and len(args) == 1 and not kwargs:
                return args[0].cpu() if to_host else args[0]
        operands = list(_tensors([*args, *kwargs.values()]))
        index = next((d for d in map(_device_of, operands) if d is not None), 0)
        is_query = name in _QUERIES or name in _NEW
        if name == "contiguous":
            is_query = args[0].is_contiguous(*args[1:], **kwargs)
        _note_wait(func, args, to_host)
        if not is_query:
            for operand in operands:
                _tell_read(operand)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if name in _NEW and not to_host:
            return _room_for(result, index)
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.grad:
            return _gradient(args[0], result, index)
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            for written in _tensors(args[:1]):
                _tell_written(written)
        return result if to_host else _converted(result, index)


def _converted(value: Any, device: int) -> Any:
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_converted(v, device) for v in value)
    if not isinstance(value, torch.Tensor) or isinstance(value, GpuTensor):
        return value
    if value.layout is torch.strided and _device_of(value) is not None:
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(GpuTensor)
    if value.layout is torch.sparse_coo:
        return _sparse(value, device)
    if value.layout is not torch.strided:
        return value
    return _Moved.apply(value, device) if value.requires_grad else _move(value, device)


def _gradient(param: torch.Tensor, grad: torch.Tensor | None, device: int) -> torch.Tensor | None:
    """The gradient that autograd has computed on the CPU goes to the device with the first look at it.

    A second pass puts what it adds to a sparse one into new memory.
    """
    if grad is None or (isinstance(grad, GpuTensor) and _device_of(grad) is not None):
        return grad
    moved = _sparse(grad, device) if grad.is_sparse else _move(grad, device)
    with torch._C.DisableTorchFunctionSubclass():
        param.grad = moved
    return moved


def on_gpu(tensor: torch.Tensor, device: int = 0) -> GpuTensor:
    """A copy on a GPU of the double."""
    moved = _sparse(tensor, device) if tensor.is_sparse else _move(tensor, device)
    assert isinstance(moved, GpuTensor)
    return moved.requires_grad_(tensor.requires_grad)


class OnGpu(TorchFunctionMode):
    """Makes what is asked for with `device="cuda"` in the double's memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = args, dict(kwargs or {})
        if func is torch.Tensor.backward:
            with self:
                return _backward(*args, **kwargs)
        device, args = _device_asked_for(func, args, kwargs)
        operand = next(_tensors([*args, *kwargs.values()]), None)
        of_double = operand is not None
        if func is torch.sparse_coo_tensor and of_double:
            # No subclass is asked for this one; its device is its operands'.
            kwargs.pop("device", None)
            return _sparse(func(*given, **kwargs), _device_of(operand) or 0)
        if device is None or of_double or torch.device(device).type != "cuda":
            return func(*given, **kwargs)
        kwargs.pop("device", None)
        result = func(*args, **kwargs) if func is not torch.Tensor.to or kwargs else args[0]
        return on_gpu(result, torch.device(device).index or 0)


def module_on_gpu(module: torch.nn.Module, device: int = 0) -> torch.nn.Module:
    """The module with its parameters and buffers on a GPU of the double, as after `module.cuda(device)`."""
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                moved = torch.nn.Parameter(on_gpu(param.detach(), device), param.requires_grad)
                part._parameters[name] = moved
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = on_gpu(buffer, device)
    return module


# -- DLPack's exchange table


class _RawTensor(ctypes.Structure):
    _fields_ = (
        ("data", _pointer),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", _pointer),
        ("strides", _pointer),
        ("byte_offset", ctypes.c_uint64),
    )


_Describe = ctypes.PYFUNCTYPE(_int, ctypes.py_object, ctypes.POINTER(_RawTensor))
_Stream = ctypes.PYFUNCTYPE(_int, _int, ctypes.c_int32, ctypes.POINTER(_pointer))


class _Table(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", _pointer),
        ("allocate", _pointer),
        ("managed_from_object", _pointer),
        ("managed_to_object", _pointer),
        ("tensor_from_object", _pointer),
        ("current_work_stream", _pointer),
    )


_CAPSULE = b"dlpack_exchange_api"
_open = ctypes.pythonapi.PyCapsule_GetPointer
_open.restype, _open.argtypes = _pointer, (ctypes.py_object, ctypes.c_char_p)
_seal = ctypes.pythonapi.PyCapsule_New
_seal.restype, _seal.argtypes = ctypes.py_object, (_pointer, ctypes.c_char_p, _pointer)

_of_torch = _Table.from_address(_open(torch.Tensor.__dlpack_c_exchange_api__, _CAPSULE))
_describe_on_host = _Describe(_of_torch.tensor_from_object)
_CUDA, _ROCM = 2, 10
# PyTorch calls AMD's GPUs CUDA devices, too, but not here.
_kind = _ROCM if IS_ROCM else _CUDA


@_Describe
def _describe(tensor: Any, raw: Any) -> int:
    if tensor.layout is not torch.strided:
        return -1
    status: int = _describe_on_host(tensor, raw)
    if status == 0:
        raw[0].device_type, raw[0].device_id = _kind, tensor.get_device()
    return status


@_Stream
def _current_work_stream(device_type: int, device_id: int, out: Any) -> int:
    out[0] = current_stream(device_id).cuda_stream if device_type == _CUDA else None
    return 0


_table = _Table(
    1,
    3,
    None,
    None,
    None,
    None,
    ctypes.cast(_describe, _pointer),
    ctypes.cast(_current_work_stream, _pointer),
)
GpuTensor.__dlpack_c_exchange_api__ = _seal(ctypes.addressof(_table), _CAPSULE, None)
