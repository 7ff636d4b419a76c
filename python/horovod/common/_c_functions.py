"""The core's C functions for adapters that call them through ctypes: the structures of `horovod.h`."""

import ctypes


class Operation(ctypes.Structure):
    """`horovod_operation`; `struct_size` is filled in."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("kind", ctypes.c_uint8),
        ("reduce_op", ctypes.c_uint8),
        ("process_set", ctypes.c_uint32),
        ("root", ctypes.c_uint32),
        ("prefix", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("tensors", ctypes.c_void_p),
        ("tensor_count", ctypes.c_size_t),
        ("splits", ctypes.c_void_p),
        ("split_count", ctypes.c_size_t),
        ("done", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )

    def __init__(self, **fields: object) -> None:
        super().__init__(struct_size=ctypes.sizeof(Operation), **fields)
