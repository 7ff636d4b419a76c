"""Operations inside functions that XLA compiles (`jit_compile=True`), which call handlers in the core.

XLA has no kernels for custom operations from outside of TensorFlow. While a function is traced for XLA, the functions
of this module therefore replace the generated functions of the same names. Each adds an `XlaCallModule` whose program
calls a handler of the core, one for the CPU and one for NVIDIA GPUs; JAX uses the same handlers. Shapes must be known
when the function is traced.
"""

import ctypes
import functools
import itertools
import struct
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import tensorflow as tf
from tensorflow.python.framework import ops as _ops

from horovod import _core
from horovod.common._operations import checked_root
from horovod.common._ops import Average, Sum
from horovod.tensorflow import _call_order, _call_sites, _graphs

# Version of the program's format, which TensorFlow 2.13 and later support.
_MODULE_VERSION: Final = 9
_KINDS: Final = ("allreduce", "allgather", "broadcast", "reducescatter")
# For each platform of programs, the platform's name for registration and the prefix of the core's handlers. TensorFlow
# adds the platform's index as the first argument of a program.
_PLATFORMS: Final = {"CPU": (b"Host", "horovod_xla_"), "CUDA": (b"CUDA", "horovod_xla_cuda_")}
_TYPES: Final = {
    "bool": "i1",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "uint8": "ui8",
    "uint16": "ui16",
    "uint32": "ui32",
    "uint64": "ui64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
}
# Offsets in XLA's table of functions. The head, version and a pointer are followed by three functions for errors.
_GET_MESSAGE_AT: Final = 56
_REGISTER_AT: Final = 72


def is_compiling() -> bool:
    """Return whether a function is being traced for XLA, at any depth of nesting.

    A function that was traced outside of XLA is not traced again inside, and keeps its operations.
    """
    if _ops.executing_eagerly_outside_functions() and tf.executing_eagerly():
        return False
    return _graphs.is_compiled(_ops.get_default_graph())


class _Span(ctypes.Structure):
    _fields_ = (("at", ctypes.c_char_p), ("length", ctypes.c_size_t))


class _Register(ctypes.Structure):
    """`XLA_FFI_Handler_Register_Args` of version 0.4.

    Earlier versions have `traits` in the place of `record`; both are zero.
    """

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("name", _Span),
        ("platform", _Span),
        ("instantiate", ctypes.c_void_p),
        ("prepare", ctypes.c_void_p),
        ("initialize", ctypes.c_void_p),
        ("execute", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("traits", ctypes.c_uint32),
    )


class _Message(ctypes.Structure):
    """`XLA_FFI_Error_GetMessage_Args`; from version 0.4 on `XLA_FFI_Error_GetDetails_Args`, which adds the code."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extensions", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


@functools.cache
def _register() -> None:
    """Register the core's handlers in TensorFlow's XLA, once per process.

    Raises
    ------
    NotImplementedError
        This TensorFlow does not support the registration of foreign functions.
    """
    core = ctypes.CDLL(_core.__file__)
    for kind, (platform, prefix) in itertools.product(_KINDS, _PLATFORMS.values()):
        refused = _register_one(f"horovod_xla_{kind}", platform, getattr(core, f"{prefix}{kind}"))
        if refused is not None:
            raise NotImplementedError(
                f"TensorFlow {tf.__version__} does not take Horovod's functions for XLA: {refused!r}"
            )
    # This stores the folders of NCCL: handlers run on threads of XLA and cannot query the interpreter.
    _core.prepare_gpus()


def _register_one(name: str, platform: bytes, handler: Any) -> bytes | None:
    """Register a handler under a name on a platform; return XLA's error message, or None on success."""
    functions = _xla_functions()
    written = name.encode()
    arguments = _Register(
        struct_size=ctypes.sizeof(_Register),
        name=_Span(written, len(written)),
        platform=_Span(platform, len(platform)),
        execute=ctypes.cast(handler, ctypes.c_void_p),
    )
    error = functions(_REGISTER_AT)(ctypes.addressof(arguments))
    if not error:
        return None
    message = _Message(struct_size=ctypes.sizeof(_Message), error=error)
    functions(_GET_MESSAGE_AT)(ctypes.addressof(message))
    return bytes(message.message)


def _xla_functions() -> Callable[[int], Any]:
    """Return a function that returns the entry of XLA's function table at an offset."""
    for library in ("libtensorflow_cc.so.2", "libtensorflow_framework.so.2"):
        try:
            table = ctypes.CDLL(library)._ZN3xla3ffi12GetXlaFfiApiEv
            break
        except (OSError, AttributeError):
            continue
    else:
        raise NotImplementedError(
            f"Horovod inside jit_compile=True needs XLA's foreign functions, which TensorFlow {tf.__version__} does "
            "not export: set jit_compile=False, or use a newer TensorFlow."
        )
    table.restype = ctypes.c_void_p
    api = table()

    def function(at: int) -> Any:
        address = ctypes.c_void_p.from_address(api + at).value or 0
        return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)

    return function


def _call(
    kind: str,
    tensors: Sequence[Any],
    name: "_Name",
    attributes: dict[str, Any],
    rows: Callable[[int], int] | None = None,
) -> list[Any]:
    """Add one call of the core's handler and return its results; `rows` computes dimension 0 of a result."""
    _register()
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops  # missing in builds without XLA

    shapes = [_known_shape(kind, name.text, tensor) for tensor in tensors]
    outputs = [shape if rows is None else (rows(shape[0]), *shape[1:]) for shape in shapes]
    dtypes = [tensor.dtype for tensor in tensors]
    args = [_type(kind, *pair) for pair in zip(shapes, dtypes, strict=True)]
    results = [_type(kind, *pair) for pair in zip(outputs, dtypes, strict=True)]
    operands = list(tensors)
    if name.site is not None:
        operands.append(name.site)
        args.append("tensor<i64>")
        attributes = attributes | {"has_call_site": "1 : i32"}
    before = _call_order.before()
    if before is not None:
        operands.append(before)
        args.append(_type(kind, tuple(before.shape.as_list()), before.dtype))
        attributes = attributes | {"after": "1 : i32"}
    module = _program(kind, name.text, attributes, args, results, in_place=rows is None)
    made = list(
        gen_xla_ops.xla_call_module(
            operands,
            version=_MODULE_VERSION,
            module=module,
            Sout=[tf.TensorShape(shape) for shape in outputs],
            Tout=dtypes,
            platforms=list(_PLATFORMS),
        )
    )
    _call_order.note(made)
    return made


def _program(
    kind: str,
    name: str,
    attributes: dict[str, Any],
    args: list[str],
    results: list[str],
    in_place: bool,
) -> str:
    """Return the StableHLO text of a program with one call."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    config = ", ".join([f'name = "{quoted}"', *(f"{k} = {v}" for k, v in attributes.items())])
    names = [f"%arg{i}" for i in range(len(args))]
    pairs = [("%platform", "tensor<i32>"), *zip(names, args, strict=True)]
    parameters = ", ".join(f"{name}: {kind}" for name, kind in pairs)
    several = len(results) > 1
    aliases = ", ".join(
        f"#stablehlo.output_operand_alias<output_tuple_indices = [{i if several else ''}], "
        f"operand_index = {i}, operand_tuple_indices = []>"
        for i in range(len(results))
    )
    alias = f", output_operand_aliases = [{aliases}]" if in_place else ""
    returned = ", ".join(f"%0#{i}" for i in range(len(results))) if several else "%0"
    count = f":{len(results)}" if several else ""
    made = ", ".join(results)
    return (
        f"module @horovod {{ func.func public @main({parameters}) -> ({made}) {{ "
        f"%0{count} = stablehlo.custom_call @horovod_xla_{kind}({', '.join(names)}) "
        f"{{api_version = 4 : i32, has_side_effect = true, backend_config = {{{config}}}{alias}}} : "
        f"({', '.join(args)}) -> {f'({made})' if several else made} "
        f"return {returned} : {made} }} }}"
    )


def _known_shape(kind: str, name: str, tensor: Any) -> tuple[int, ...]:
    if not tensor.shape.is_fully_defined():
        raise ValueError(
            f"{kind} {name!r} inside jit_compile=True needs a tensor whose shape is known when the function is traced, "
            f"got {tensor.shape}: batch with drop_remainder=True, give an input_signature or set_shape(), or set "
            "jit_compile=False."
        )
    return tuple(tensor.shape.as_list())


def _type(kind: str, shape: tuple[int, ...], dtype: Any) -> str:
    if dtype.name not in _TYPES:
        raise TypeError(
            f"{kind} inside jit_compile=True does not take tensors of dtype {dtype.name}."
        )
    return f"tensor<{''.join(f'{n}x' for n in shape)}{_TYPES[dtype.name]}>"


# For each function that is being traced, the number of calls so far by label.
_calls: "weakref.WeakKeyDictionary[Any, Counter[str]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Name:
    """Name by which ranks pair an operation."""

    text: str
    """Text that is unique in the function, and equal on ranks that trace the same function.

    TensorFlow's numbers of graphs and nodes count all traces of a process, which may differ between ranks. Calls are
    therefore counted in this module, separately for each trace.
    """
    function: Any
    """The graph of the function."""
    site: Any
    """Call site of the function, which the core appends to the text."""

    @staticmethod
    def of_call(kind: str, name: str | None, ignore_name_scope: bool) -> "_Name":
        """Return the name of an operation that is added to the current graph."""
        function = _graphs.function_of(_ops.get_default_graph())
        label = name or kind
        if not ignore_name_scope:
            label = f"{getattr(function, 'name', '')}/{label}"
        return _Name(_numbered(function, label), function, _call_sites.current())

    def of_gradient(self) -> "_Name":
        """Return the name of the operation that differentiates the operation of this name."""
        _call_sites.note_gradient(self.site)
        return _Name(_numbered(self.function, f"{self.text}_grad"), self.function, self.site)


def _numbered(function: Any, label: str) -> str:
    calls = _calls.setdefault(function, Counter())
    calls[label] += 1
    return label if calls[label] == 1 else f"{label}#{calls[label]}"


def _attributes(process_set_id: int, **others: Any) -> dict[str, str]:
    """Return attributes as StableHLO text: integers have 32 bits, and floats are written as their 64 bits."""
    integers = {"process_set": process_set_id}
    integers |= {k: v for k, v in others.items() if isinstance(v, int)}
    floats = {k: v for k, v in others.items() if isinstance(v, float)}
    written = {k: f"{v} : i32" for k, v in integers.items()}
    return written | {k: f"0x{struct.pack('>d', v).hex().upper()} : f64" for k, v in floats.items()}


def _exact(
    reduce_op: int,
    prescale_factor: float,
    postscale_factor: float,
    prescale_bits: int = 0,
    postscale_bits: int = 0,
) -> dict[str, Any]:
    """Return the attributes of a reduction with its exact 64-bit factors."""
    return {
        "reduce_op": reduce_op,
        "prescale": _factor(prescale_factor, prescale_bits),
        "postscale": _factor(postscale_factor, postscale_bits),
    }


def _factor(value: float, bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0]) if bits else float(value)


def _members(process_set_id: int) -> list[int]:
    return _core.process_set_ranks(process_set_id)


def _differentiable(
    call: Callable[[list[Any]], list[Any]],
    gradient: Callable[[list[Any]], list[Any]],
    tensors: Sequence[Any],
) -> list[Any]:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*operands: Any) -> Any:
        def backward(*gradients: Any) -> list[Any]:
            return gradient([tf.convert_to_tensor(g) for g in gradients])

        return call(list(operands)), backward

    results = run(*[tf.convert_to_tensor(tensor) for tensor in tensors])
    return list(results) if isinstance(results, list | tuple) else [results]


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None,
    ignore_name_scope: bool,
    process_set_id: int,
    **reduction: Any,
) -> list[Any]:
    attributes = _attributes(process_set_id, **_exact(**reduction))
    return _allreduce(
        tensors, _Name.of_call("HorovodAllreduce", name, ignore_name_scope), attributes
    )


def _allreduce(tensors: Sequence[Any], name: _Name, attributes: dict[str, Any]) -> list[Any]:
    return _differentiable(
        lambda operands: _call("allreduce", operands, name, attributes),
        lambda gradients: _allreduce(gradients, name.of_gradient(), attributes),
        tensors,
    )


def _averaged(gradients: list[Any], name: _Name, process_set_id: int) -> list[Any]:
    attributes = _attributes(process_set_id, reduce_op=Average, prescale=1.0, postscale=1.0)
    return _allreduce(gradients, name, attributes)


def _grouped_allgather(
    tensors: Sequence[Any], name: str | None, ignore_name_scope: bool, process_set_id: int
) -> list[Any]:
    _require_rows("allgather", tensors)
    full_name = _Name.of_call("HorovodAllgather", name, ignore_name_scope)
    return _allgather(tensors, full_name, process_set_id)


def _allgather(tensors: Sequence[Any], name: _Name, process_set_id: int) -> list[Any]:
    members = _members(process_set_id)

    def own_rows(gradients: list[Any]) -> list[Any]:
        me = members.index(_core.rank())
        averaged = _averaged(gradients, name.of_gradient(), process_set_id)
        shares = [g.shape[0] // len(members) for g in averaged]
        return [g[me * n : (me + 1) * n] for g, n in zip(averaged, shares, strict=True)]

    return _differentiable(
        lambda operands: _call(
            "allgather",
            operands,
            name,
            _attributes(process_set_id),
            lambda rows: rows * len(members),
        ),
        own_rows,
        tensors,
    )


def _broadcast(
    tensor: Any, root_rank: int, name: str | None, ignore_name_scope: bool, process_set_id: int
) -> Any:
    root_rank = checked_root(root_rank)
    full_name = _Name.of_call("HorovodBroadcast", name, ignore_name_scope)

    def of_root(gradients: list[Any]) -> list[Any]:
        averaged = _averaged(gradients, full_name.of_gradient(), process_set_id)
        # The call has side effects, so XLA keeps it on ranks that do not use its result.
        is_root = _core.rank() == root_rank
        return averaged if is_root else [tf.zeros_like(g) for g in averaged]

    attributes = _attributes(process_set_id, root=root_rank)
    return _differentiable(
        lambda operands: _call("broadcast", operands, full_name, attributes), of_root, [tensor]
    )[0]


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None,
    ignore_name_scope: bool,
    process_set_id: int,
    **reduction: Any,
) -> list[Any]:
    members = len(_members(process_set_id))
    _require_rows("reducescatter", tensors, members)
    full_name = _Name.of_call("HorovodReducescatter", name, ignore_name_scope)
    exact = _exact(**reduction)
    attributes = _attributes(process_set_id, **exact)
    factor = exact["prescale"] * exact["postscale"]
    factor *= members if exact["reduce_op"] == Sum else 1

    def gathered(gradients: list[Any]) -> list[Any]:
        scaled = [g if factor == 1 else g * tf.cast(factor, g.dtype) for g in gradients]
        return _allgather(scaled, full_name.of_gradient(), process_set_id)

    return _differentiable(
        lambda operands: _call(
            "reducescatter", operands, full_name, attributes, lambda rows: rows // members
        ),
        gathered,
        tensors,
    )


def _require_rows(kind: str, tensors: Sequence[Any], members: int = 1) -> None:
    for tensor in tensors:
        shape = tensor.shape
        if shape.rank == 0 or (shape.rank and shape[0] is not None and shape[0] % members):
            raise ValueError(
                f"{kind} inside jit_compile=True needs rows (dimension 0) that {members} ranks can share evenly, got "
                f"shape {shape}: pad it to a multiple of {members}, or set jit_compile=False."
            )


def _refused_alltoall(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "alltoall has results whose sizes are known late, which jit_compile=True cannot have: set jit_compile=False."
    )


def _refused_join(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "join cannot be inside jit_compile=True: call it outside of the function."
    )


def _constant(number: Callable[[], int]) -> Callable[..., Any]:
    return lambda *_, name=None, **__: tf.constant(number(), tf.int32, name=name)


LIBRARY: Final = SimpleNamespace(
    horovod_allreduce=lambda tensor, **options: _grouped_allreduce([tensor], **options)[0],
    horovod_grouped_allreduce=_grouped_allreduce,
    horovod_allgather=lambda tensor, **options: _grouped_allgather([tensor], **options)[0],
    horovod_grouped_allgather=_grouped_allgather,
    horovod_broadcast=_broadcast,
    horovod_reducescatter=lambda tensor, **options: _grouped_reducescatter([tensor], **options)[0],
    horovod_grouped_reducescatter=_grouped_reducescatter,
    horovod_alltoall=_refused_alltoall,
    horovod_join=_refused_join,
    horovod_size=lambda process_set_id=0, name=None: tf.constant(
        len(_members(process_set_id)), tf.int32, name=name
    ),
    horovod_process_set_included=lambda process_set_id=0, name=None: tf.constant(
        int(_core.rank() in _members(process_set_id)), tf.int32, name=name
    ),
    horovod_rank=_constant(_core.rank),
    horovod_local_rank=_constant(_core.local_rank),
    horovod_local_size=_constant(_core.local_size),
)
"""Replacements of the generated functions while a function is traced for XLA; sizes and ranks are constants."""
