"""`horovod.h` declares structures, functions and codes. Rust and Python repeat them; these tests compare the copies."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from horovod.common import _c_functions

ROOT = Path(__file__).resolve().parent.parent.parent
HEADER = ROOT / "python/horovod/include/horovod.h"
CORE = ROOT / "crates/horovod-python/src/ffi"
TENSORFLOW = ROOT / "crates/horovod-tensorflow/src/core_functions.rs"

Fields = list[tuple[str, str]]

C_TYPES = {
    "uint8_t": "u8",
    "uint32_t": "u32",
    "int32_t": "i32",
    "double": "f64",
    "size_t": "usize",
    "void": "",
}
CTYPES = {
    ctypes.c_uint8: "u8",
    ctypes.c_uint32: "u32",
    ctypes.c_double: "f64",
    ctypes.c_size_t: "usize",
    ctypes.c_char_p: "pointer",
    ctypes.c_void_p: "pointer",
}
# Aliases of function pointers in both Rust files.
RUST_POINTERS = ("*const ", "*mut ", "Option<Done>", "Option<Allocate>", "Done")


def of_c(declared: str) -> str:
    """The type of a declaration in C, with or without a name."""
    return "pointer" if "*" in declared else C_TYPES[declared.split()[0]]


def of_rust(declared: str) -> str:
    declared = declared.strip()
    return "pointer" if declared.startswith(RUST_POINTERS) else declared


def header() -> str:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"^#.*$", "", text, flags=re.MULTILINE)


def structures_of_c(text: str) -> dict[str, Fields]:
    found = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", text, re.DOTALL):
        fields = []
        for declared in filter(None, map(str.strip, body.split(";"))):
            function = re.match(r"void \*?\(\*(\w+)\)", declared)
            field = function[1] if function else re.split(r"[ *]", declared)[-1]
            fields.append((field, "pointer" if function else of_c(declared)))
        found[name] = fields
    return found


def functions_of_c(text: str) -> dict[str, list[str]]:
    """The types of arguments, and of the result at last, by name."""
    found = {}
    for result, name, arguments in re.findall(
        r"^(\w[\w *]*?)\b(horovod_\w+)\(([^()]*)\);", text, re.MULTILINE
    ):
        types = [of_c(argument) for argument in arguments.split(",")]
        found[name] = [*filter(None, types), of_c(result)]
    return found


def without_comments(text: str) -> str:
    return re.sub(r"//.*", "", text)


def fields_of_rust(text: str, name: str) -> Fields:
    body = re.search(
        rf"#\[repr\(C\)\]\n(?:#.*\n)*(?:pub.*)?struct {name} \{{(.*?)\n\}}", text, re.DOTALL
    )
    assert body, name
    fields = re.findall(r"(\w+): ([^,]+),", body[1])
    return [(field, of_rust(declared)) for field, declared in fields]


def signature_of_rust(arguments: str, result: str) -> list[str]:
    parts = [part.strip() for part in arguments.split(",") if part.strip()]
    return [*(of_rust(part.split(": ")[-1]) for part in parts), of_rust(result)]


def core() -> str:
    return without_comments(
        "\n".join(path.read_text(encoding="utf-8") for path in CORE.glob("*.rs"))
    )


def functions_of_core(text: str) -> Iterator[tuple[str, list[str]]]:
    pattern = r'extern "C" fn (horovod_\w+)\(([^()]*)\)(?: -> ([\w* ]+))? \{'
    for name, arguments, result in re.findall(pattern, text):
        yield name, signature_of_rust(arguments, result)


def test_the_header_has_what_is_compared() -> None:
    structures = structures_of_c(header())
    assert set(structures) == {"horovod_tensor", "horovod_operation", "horovod_output"}
    assert structures["horovod_tensor"][:3] == [
        ("struct_size", "u32"),
        ("dtype", "u8"),
        ("device", "u8"),
    ]
    assert structures["horovod_operation"][-4:-1] == [
        ("done", "pointer"),
        ("allocate", "pointer"),
        ("context", "pointer"),
    ]
    functions = functions_of_c(header())
    assert len(functions) == header().count(");") - header().count("(*")
    assert functions["horovod_enqueue"] == ["pointer", "pointer", "usize", "i32"]


def test_structures_are_those_of_the_header() -> None:
    of_header = structures_of_c(header())
    rust = core()
    later = fields_of_rust(rust, "WithWaiting")
    operation = fields_of_rust(rust, "HorovodOperation")
    assert later[0] == ("first", "HorovodOperation")
    assert [*operation, *later[1:]] == of_header["horovod_operation"]
    assert fields_of_rust(rust, "HorovodTensor") == of_header["horovod_tensor"]
    assert fields_of_rust(rust, "HorovodOutput") == of_header["horovod_output"]
    tensorflow = without_comments(TENSORFLOW.read_text(encoding="utf-8"))
    assert fields_of_rust(tensorflow, "CoreOperation") == of_header["horovod_operation"]
    assert fields_of_rust(tensorflow, "CoreTensor") == of_header["horovod_tensor"]


def test_the_structure_of_ctypes_is_the_header_s_first_version() -> None:
    fields = [(name, CTYPES[kind]) for name, kind in _c_functions.Operation._fields_]
    of_header = structures_of_c(header())["horovod_operation"]
    assert fields == of_header[: of_header.index(("may_wait", "u8"))]


def test_functions_are_those_of_the_header() -> None:
    of_header = functions_of_c(header())
    # MXNet's and XLA's are called by this package alone.
    of_core = {
        name: types
        for name, types in functions_of_core(core())
        if not re.match("horovod_(mxnet|xla)", name)
    }
    assert of_core == of_header
    text = without_comments(TENSORFLOW.read_text(encoding="utf-8"))
    pattern = r'(\w+): (?:unsafe )?extern "C" fn\(([^()]*)\) -> ([\w* ]+)[,;=]'
    found = [
        (name, signature_of_rust(*types))
        for name, *types in re.findall(pattern, re.sub(r"\s+", " ", text))
    ]
    assert len(found) > 10
    for name, types in found:
        name = {"version": "abi_version"}.get(name, name)
        assert of_header[f"horovod_{name}"] == types, name


STATUS = {"OK", "INVALID", "NOT_INITIALIZED", "STALLED", "REPLICAS_DIFFER"}


@pytest.mark.parametrize(
    ("text", "pattern", "names"),
    [
        (
            core(),
            r"const (?:HOROVOD_)?([A-Z_]+): (?:i32|u32|u8) = (\d+);",
            {"ABI_VERSION", "INTERNAL", "BARRIER", "JOIN"} | STATUS,
        ),
        (
            TENSORFLOW.read_text(encoding="utf-8"),
            r"const ([A-Z_]+): (?:i32|u32) = (\d+);",
            {"ABI_VERSION"} | STATUS,
        ),
        (
            TENSORFLOW.with_name("operations.rs").read_text(encoding="utf-8"),
            r"\b([A-Z]\w+) = (\d+),",
            {"ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER", "JOIN"},
        ),
    ],
    ids=["core", "tensorflow", "operations of tensorflow"],
)
def test_codes_are_those_of_the_header(text: str, pattern: str, names: set[str]) -> None:
    """Status codes and operations. Codes of element types and reductions are not compared."""
    codes: Mapping[str, str] = dict(re.findall(r"HOROVOD_(\w+) = (\d+)", header()))
    version = re.findall(r"ABI_VERSION (\d+)", HEADER.read_text(encoding="utf-8"))[0]
    codes = {**codes, "ABI_VERSION": version}
    found = [(name.upper(), code) for name, code in re.findall(pattern, without_comments(text))]
    compared = {name: code for name, code in found if name in codes}
    assert set(compared) == names
    assert compared == {name: codes[name] for name in names}
