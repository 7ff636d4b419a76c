"""The layouts by which tests/parallel/gpu calls XLA handlers are those of the header that jaxlib brings."""

import ctypes
import subprocess
import sys
from pathlib import Path

import jax.ffi

import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel" / "gpu"))
import xla_frames

STRUCTURES = {
    "XLA_FFI_ByteSpan": xla_frames.ByteSpan,
    "XLA_FFI_Scalar": xla_frames.Scalar,
    "XLA_FFI_Buffer": xla_frames.Buffer,
    "XLA_FFI_Args": xla_frames.Args,
    "XLA_FFI_Attrs": xla_frames.Attrs,
    "XLA_FFI_CallFrame": xla_frames.CallFrame,
    "XLA_FFI_Api_Version": xla_frames.ApiVersion,
    "XLA_FFI_Metadata": xla_frames.Metadata,
    "XLA_FFI_Error_Create_Args": xla_frames.ErrorCreateArgs,
    "XLA_FFI_Error_GetMessage_Args": xla_frames.ErrorGetMessageArgs,
    "XLA_FFI_Error_Destroy_Args": xla_frames.ErrorDestroyArgs,
    "XLA_FFI_Stream_Get_Args": xla_frames.StreamGetArgs,
    "XLA_FFI_DeviceOrdinal_Get_Args": xla_frames.DeviceOrdinalGetArgs,
    "XLA_FFI_RunId_Get_Args": xla_frames.RunIdGetArgs,
    "XLA_FFI_Api": xla_frames.Api,
}
CONSTANTS = {
    "XLA_FFI_CallFrame_STRUCT_SIZE": xla_frames.CallFrame.attrs.offset
    + ctypes.sizeof(xla_frames.Attrs),
    "XLA_FFI_ExecutionStage_EXECUTE": xla_frames.EXECUTE,
    "XLA_FFI_Extension_Metadata": xla_frames.METADATA,
    "XLA_FFI_ArgType_BUFFER": xla_frames.BUFFER,
    "XLA_FFI_DataType_F32": xla_frames.CODES[xla_frames.torch.float32],
    "XLA_FFI_DataType_BF16": xla_frames.CODES[xla_frames.torch.bfloat16],
    "XLA_FFI_DataType_C64": xla_frames.CODES[xla_frames.torch.complex64],
}


def test_layouts(tmp_path: Path) -> None:
    want = {name: ctypes.sizeof(structure) for name, structure in STRUCTURES.items()} | CONSTANTS
    lines = [f'printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTURES]
    lines += [f'printf("{name} %zu\\n", (size_t){name});' for name in CONSTANTS]
    for name, structure in STRUCTURES.items():
        for field, *_ in structure._fields_:
            key = f"{name} {field}"
            want[key] = getattr(structure, field).offset
            lines.append(f'printf("{key} %zu\\n", offsetof({name}, {field}));')

    source, program = tmp_path / "layouts.c", tmp_path / "layouts"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n"
        f'#include "xla/ffi/api/c_api.h"\nint main(void) {{ {" ".join(lines)} return 0; }}\n'
    )
    compiler = ["gcc", f"-I{jax.ffi.include_dir()}", source, "-o", program]
    subprocess.run(compiler, check=True, timeout=harness.LIMIT_S)
    printed = subprocess.run(
        [program], check=True, capture_output=True, text=True, timeout=harness.LIMIT_S
    )

    got = {
        name: int(n) for name, n in (line.rsplit(" ", 1) for line in printed.stdout.splitlines())
    }
    assert got == want
