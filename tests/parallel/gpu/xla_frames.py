"""Calls of the core's XLA handlers for CUDA as XLA makes them: call frames laid out by ctypes, over a table of XLA's
functions that stands here and tells the stream and the GPU.

The layouts are those of `xla/ffi/api/c_api.h`; tests/unit/test_xla_layouts.py compares them with jaxlib's own header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from horovod import _core

_int, _i64, _size, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_void_p
_HEAD = (("struct_size", _size), ("extension_start", _pointer))

EXECUTE = 3
BUFFER = 1
_SCALAR, _STRING = 3, 4
_S32, _F64 = 4, 12
METADATA = 1
VERSION = (0, 3)

# XLA's codes of element types.
CODES = {
    torch.bool: 1,
    torch.int8: 2,
    torch.int16: 3,
    torch.int32: _S32,
    torch.int64: 5,
    torch.uint8: 6,
    torch.float16: 10,
    torch.float32: 11,
    torch.float64: _F64,
    torch.complex64: 15,
    torch.bfloat16: 16,
}


class ByteSpan(ctypes.Structure):
    _fields_ = (("ptr", _pointer), ("len", _size))


class Scalar(ctypes.Structure):
    _fields_ = (("dtype", _int), ("value", _pointer))


class Buffer(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("dtype", _int),
        ("data", _pointer),
        ("rank", _i64),
        ("dims", ctypes.POINTER(_i64)),
    )


class Args(ctypes.Structure):
    """Arguments; results have the same layout."""

    _fields_ = (
        *_HEAD,
        ("size", _i64),
        ("types", ctypes.POINTER(_int)),
        ("args", ctypes.POINTER(_pointer)),
    )


class Attrs(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("size", _i64),
        ("types", ctypes.POINTER(_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(ByteSpan))),
        ("attrs", ctypes.POINTER(_pointer)),
    )


class CallFrame(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("api", _pointer),
        ("ctx", _pointer),
        ("stage", _int),
        ("args", Args),
        ("rets", Args),
        ("attrs", Attrs),
        ("future", _pointer),
    )


class ApiVersion(ctypes.Structure):
    _fields_ = (*_HEAD, ("major_version", _int), ("minor_version", _int))


class Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("api_version", ApiVersion),
        ("traits", ctypes.c_uint32),
        ("state_type_id", _i64),
    )


class MetadataExtension(ctypes.Structure):
    _fields_ = (
        ("struct_size", _size),
        ("type", _int),
        ("next", _pointer),
        ("metadata", ctypes.POINTER(Metadata)),
    )


class ErrorCreateArgs(ctypes.Structure):
    _fields_ = (*_HEAD, ("message", ctypes.c_char_p), ("errc", _int))


class ErrorGetMessageArgs(ctypes.Structure):
    _fields_ = (*_HEAD, ("error", _pointer), ("message", ctypes.c_char_p))


class ErrorDestroyArgs(ctypes.Structure):
    _fields_ = (*_HEAD, ("error", _pointer))


class StreamGetArgs(ctypes.Structure):
    _fields_ = (*_HEAD, ("ctx", _pointer), ("stream", _pointer))


class DeviceOrdinalGetArgs(ctypes.Structure):
    _fields_ = (*_HEAD, ("ctx", _pointer), ("device_ordinal", ctypes.c_int32))


class RunIdGetArgs(ctypes.Structure):
    _fields_ = (*_HEAD, ("ctx", _pointer), ("run_id", _i64))


_FUNCTIONS = (
    "XLA_FFI_Error_Create",
    "XLA_FFI_Error_GetMessage",
    "XLA_FFI_Error_Destroy",
    "XLA_FFI_Handler_Register",
    "XLA_FFI_Stream_Get",
    "XLA_FFI_Type_Register",
    "XLA_FFI_ExecutionContext_Get",
    "XLA_FFI_State_Set",
    "XLA_FFI_State_Get",
    "XLA_FFI_DeviceMemory_Allocate",
    "XLA_FFI_DeviceMemory_Free",
    "XLA_FFI_ThreadPool_Schedule",
    "XLA_FFI_ThreadPool_NumThreads",
    "XLA_FFI_Future_Create",
    "XLA_FFI_Future_SetAvailable",
    "XLA_FFI_Future_SetError",
    "XLA_FFI_RunId_Get",
    "XLA_FFI_DeviceOrdinal_Get",
)


class Api(ctypes.Structure):
    _fields_ = (
        *_HEAD,
        ("api_version", ApiVersion),
        ("internal_api", _pointer),
        *((name, _pointer) for name in _FUNCTIONS),
    )


class XlaError(Exception):
    """The error of a handler: `code` is XLA's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Place:
    """XLA's description of a call's place; missing facts are refused with a text."""

    ordinal: int | str
    stream: int | str | None
    run_id: int = 0


class Xla:
    """A table of XLA's functions. Errors are kept until their owner takes or destroys them."""

    def __init__(self) -> None:
        self.errors: dict[int, tuple[int, bytes]] = {}
        self.places: dict[int, Place] = {}
        answers = {
            "XLA_FFI_Error_Create": (ErrorCreateArgs, self._create),
            "XLA_FFI_Error_GetMessage": (ErrorGetMessageArgs, self._message),
            "XLA_FFI_Error_Destroy": (ErrorDestroyArgs, self._destroy),
            "XLA_FFI_Stream_Get": (StreamGetArgs, self._stream),
            "XLA_FFI_DeviceOrdinal_Get": (DeviceOrdinalGetArgs, self._ordinal),
            "XLA_FFI_RunId_Get": (RunIdGetArgs, self._run_id),
        }
        self._kept = {
            name: ctypes.CFUNCTYPE(_pointer, ctypes.POINTER(args))(function)
            for name, (args, function) in answers.items()
        }
        size = ctypes.sizeof(Api)
        version = ApiVersion(ctypes.sizeof(ApiVersion), None, *VERSION)
        functions = {name: ctypes.cast(f, _pointer).value for name, f in self._kept.items()}
        # A function that is not there is at no address: a call of it would be noticed.
        self.table = Api(struct_size=size, api_version=version, **functions)

    def _new_error(self, code: int, text: bytes) -> int:
        number = 0x1000 + 16 * len(self.errors)
        while number in self.errors:
            number += 16
        self.errors[number] = code, text
        return number

    def take(self, error: int) -> XlaError:
        """The error that a handler has returned, which is XLA's from then on."""
        code, text = self.errors.pop(error)
        return XlaError(code, text.decode())

    def _create(self, args: Any) -> int:
        return self._new_error(args[0].errc, bytes(args[0].message))

    def _message(self, args: Any) -> None:
        # Version 0.4 writes the error's code behind the text, whatever the size is.
        has_room = args[0].struct_size >= ctypes.sizeof(ErrorGetMessageArgs) + ctypes.sizeof(_int)
        text = self.errors[args[0].error][1]
        args[0].message = text if has_room else b"no room for the code"

    def _destroy(self, args: Any) -> None:
        del self.errors[args[0].error]

    def _stream(self, args: Any) -> int | None:
        stream = self.places[args[0].ctx].stream
        if isinstance(stream, str):
            return self._new_error(12, stream.encode())
        args[0].stream = stream
        return None

    def _ordinal(self, args: Any) -> int | None:
        ordinal = self.places[args[0].ctx].ordinal
        if isinstance(ordinal, str):
            return self._new_error(12, ordinal.encode())
        args[0].device_ordinal = ordinal
        return None

    def _run_id(self, args: Any) -> None:
        args[0].run_id = self.places[args[0].ctx].run_id

    def older(self, before: str, minor: int) -> Api:
        """A table that ends before a function, as that of an earlier version."""
        table = Api.from_buffer_copy(self.table)
        table.struct_size = getattr(Api, before).offset
        ctypes.memset(
            ctypes.addressof(table) + table.struct_size, 0, ctypes.sizeof(Api) - table.struct_size
        )
        table.api_version.minor_version = minor
        return table


XLA = Xla()
_library = ctypes.CDLL(_core.__file__)


def handler(name: str) -> Any:
    """An exported handler, such as `horovod_xla_cuda_allreduce`."""
    function = getattr(_library, name)
    function.restype, function.argtypes = _pointer, (ctypes.POINTER(CallFrame),)
    return function


def metadata_of(name: str) -> tuple[tuple[int, int], int]:
    """Version of the interface and traits, as a handler tells them when it is registered."""
    metadata = Metadata(struct_size=ctypes.sizeof(Metadata), traits=0xFFFF)
    extension = MetadataExtension(
        ctypes.sizeof(MetadataExtension), METADATA, None, ctypes.pointer(metadata)
    )
    frame = CallFrame(
        struct_size=CallFrame.future.offset,
        extension_start=ctypes.addressof(extension),
        api=ctypes.addressof(XLA.table),
        stage=EXECUTE,
    )
    assert handler(name)(frame) is None
    version = metadata.api_version
    return (version.major_version, version.minor_version), metadata.traits


class Memory:
    """A buffer of a call: where, of which type and shape."""

    def __init__(self, address: int | None, dtype: torch.dtype, shape: Sequence[int]) -> None:
        self._dims = (_i64 * len(shape))(*shape)
        self.buffer = Buffer(
            struct_size=ctypes.sizeof(Buffer),
            dtype=CODES[dtype],
            data=address,
            rank=len(shape),
            dims=self._dims,
        )

    @staticmethod
    def of(tensor: torch.Tensor) -> Memory:
        """That of a dense tensor. XLA has no address for what has no elements."""
        return Memory(
            tensor.data_ptr() if tensor.numel() else None, tensor.dtype, tuple(tensor.shape)
        )


class Call:
    """One place in a program. It keeps what a frame points to, and may be called again, as XLA does."""

    def __init__(self, **attributes: str | int | float) -> None:
        names, types, values = [], [], []
        for name, value in sorted(attributes.items()):
            names.append(ctypes.pointer(_span(name)))
            if isinstance(value, str):
                types.append(_STRING)
                values.append(_span(value))
                continue
            types.append(_SCALAR)
            is_float = isinstance(value, float)
            content = ctypes.c_double(value) if is_float else ctypes.c_int32(value)
            scalar = Scalar(_F64 if is_float else _S32, ctypes.addressof(content))
            scalar.kept = content
            values.append(scalar)
        count = len(names)
        self._kept = names, values
        self._types = (_int * count)(*types)
        self._names = (ctypes.POINTER(ByteSpan) * count)(*names)
        self._values = (_pointer * count)(*map(ctypes.addressof, values))

    def run(
        self,
        name: str,
        operands: Sequence[Memory],
        results: Sequence[Memory],
        place: Place,
        *,
        stage: int = EXECUTE,
        table: Api = XLA.table,
    ) -> None:
        """Call a handler, as a thread of XLA's does: without the interpreter's lock.

        Raises
        ------
        XlaError
            The handler has returned an error.
        """
        context = ctypes.c_char()
        address = ctypes.addressof(context)
        XLA.places[address] = place
        args, rets = _list(operands), _list(results)
        frame = CallFrame(
            struct_size=CallFrame.future.offset,
            api=ctypes.addressof(table),
            ctx=address,
            stage=stage,
            args=args,
            rets=rets,
            attrs=Attrs(
                struct_size=ctypes.sizeof(Attrs),
                size=len(self._types),
                types=self._types,
                names=self._names,
                attrs=self._values,
            ),
        )
        try:
            error = handler(name)(frame)
        finally:
            del XLA.places[address]
        assert frame.future is None, "a call on a GPU is over when it returns"
        if error is not None:
            raise XLA.take(error)
        assert not XLA.errors, f"errors that nobody has destroyed: {XLA.errors}"


def _span(text: str) -> ByteSpan:
    content = ctypes.create_string_buffer(text.encode())
    span = ByteSpan(ctypes.addressof(content), len(content) - 1)
    span.kept = content
    return span


def _list(buffers: Sequence[Memory]) -> Args:
    count = len(buffers)
    types = (_int * count)(*[BUFFER] * count)
    addresses = (_pointer * count)(*[ctypes.addressof(memory.buffer) for memory in buffers])
    args = Args(ctypes.sizeof(Args), None, count, types, addresses)
    args.kept = types, addresses
    return args
